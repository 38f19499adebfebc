//! The shapes' operations.

use egmem::Stream;
use egmem::driver::{Access, AccessDesc, Location, NodeId};
use egmem::shapes::{Appender, Growable, Replicated, Ring, Stripes, stripes};

use crate::fault_sweep::{MIB, Operation};
#[cfg(feature = "portable")]
use egmem::Driver;

pub const OPERATIONS: &[Operation] = &[
    ("growable", |driver| {
        let options = Growable::<u64>::on(NodeId(1)).max_len(1 << 20);
        let mut vector = options.step(2 * MIB).create(driver)?;
        vector.extend_from_slice(&[1; 300_000])?;
        let prefix = vector.prefix();
        vector.push(2)?;
        vector.truncate(100);
        drop(prefix);
        vector.set_access(&[AccessDesc::new(Location::Device(1), Access::Read)])?;
        vector.shrink_to_fit().map(drop)
    }),
    ("access to a growable's chunk", |driver| {
        let options = Growable::<u64>::on(NodeId(0)).max_len(1 << 20);
        let mut vector = options.step(2 * MIB).create(driver)?;
        vector.extend_unwritten(1 << 19)?;
        vector.reserve(1 << 19)?;
        let reads = [AccessDesc::new(Location::Device(0), Access::Read)];
        let changed = vector.set_access_of(0..1 << 19, &reads)?;
        assert_eq!(changed, 0..1 << 19);
        Ok(())
    }),
    ("stripes", |driver| {
        let plan = Stripes::over([NodeId(0), NodeId(1)]).front(Location::Device(0), 2 * MIB);
        let striped = plan.allocate(driver, 7 * MIB)?;
        assert_eq!(stripes(&striped).len(), 4);
        Ok(())
    }),
    ("ring", |driver| {
        let ring = Ring::<u64>::on(NodeId(0)).create(driver)?;
        let (mut producer, mut consumer) = (ring.producer, ring.consumer);
        assert!(producer.try_push(7)?);
        assert_eq!(consumer.try_pop()?, Some(7));
        producer.into_gpu().into_cpu().map(drop)
    }),
    ("ring in a GPU's memory", |driver| {
        let options = Ring::<u64>::on(Location::Device(1));
        options.create(driver).map(drop)
    }),
    ("appender", |driver| {
        let options = Appender::<u64>::on(NodeId(0)).max_len(1 << 20);
        let options = options.ahead(1).cursor_on(Location::Device(0));
        let mut appender = options.create(driver)?;
        appender.append(&vec![7; 300_000])?;
        appender.pump();
        let came = appender.collect()?;
        came.stopped.map_or(Ok(()), Err)
    }),
    ("appender that is pumped", |driver| {
        let options = Appender::<u64>::on(NodeId(0)).max_len(1 << 20);
        let mut appender = options.ahead(1).create(driver)?;
        let stream = Stream::new(driver, 0)?;
        let all = appender.records().capacity() as u64 * 8;
        // SAFETY: the appender keeps this memory until `pump_while` has returned.
        unsafe { stream.memset_async(appender.records().device_ptr(), 1, all)? };
        appender.pump_while(&stream)?;
        let came = appender.collect()?;
        came.stopped.map_or(Ok(()), Err)
    }),
    ("replicated data", |driver| {
        let places = [Location::Device(0), Location::Device(1), NodeId(0).into()];
        let data = Replicated::on(places).create(driver, &[1_u64; 100])?;
        let stream = Stream::new(driver, 1)?;
        let replica = data.local(Location::Device(1))?;
        replica.release_after(&stream).map_err(|kept| kept.1)?;
        data.publish(&[2; 100])?;
        let data = Replicated::on([Location::Device(0)]).create(driver, &[1_u64; 100])?;
        data.publish(&[3; 100]).map(drop)
    }),
    #[cfg(feature = "portable")]
    ("growable that another process follows", |driver| {
        // Only the driver's own failure counts, not the other end's report of it.
        followed(driver).map_err(|error| error.memory().expect("the driver's error").clone())
    }),
];

/// A vector's export and its view, in one thread: the socket's buffer has the updates.
#[cfg(feature = "portable")]
fn followed(driver: &Driver) -> egmem::share::Result<()> {
    use egmem::shapes::sharing::{GrowableExport, GrowableView};
    use egmem::share::{Channel, ImportOptions, Peers};
    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    let one = Channel::new(one, &Peers::same_user())?;
    let mut other = Channel::new(other, &Peers::same_user())?;
    let options = Growable::<u64>::on(NodeId(0))
        .max_len(1 << 20)
        .step(2 * MIB);
    let mut vector = options.shareable().create(driver)?;
    vector.push(1)?;
    let mut export = GrowableExport::new(&vector);
    let mut follower = export.follower(one, Access::ReadWrite);
    export.send(&vector, &mut follower)?;
    let mut view = GrowableView::<u64>::receive(driver, &mut other, ImportOptions::new())?;
    vector.extend_from_slice(&[2; 300_000])?;
    export.send(&vector, &mut follower)?;
    view.follow(&mut other)?;
    assert_eq!(view.get(300_000)?, 2);
    Ok(())
}
