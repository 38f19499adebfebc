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
        followed(driver).map_err(of_memory)
    }),
    #[cfg(feature = "portable")]
    ("ring with another process", |driver| {
        ring_shared(driver).map_err(of_memory)
    }),
    #[cfg(feature = "portable")]
    ("replicated data in another process", |driver| {
        replicated_shared(driver).map_err(of_memory)
    }),
];

/// Only the driver's own failure counts, not the other end's report of it.
#[cfg(feature = "portable")]
fn of_memory(error: egmem::share::Error) -> egmem::Error {
    error.memory().expect("the driver's error").clone()
}

/// A vector's export and its view, in one thread: the socket's buffer has the updates.
#[cfg(feature = "portable")]
fn followed(driver: &Driver) -> egmem::share::Result<()> {
    use egmem::shapes::sharing::{GrowableExport, GrowableView};
    use egmem::share::ImportOptions;

    let (one, mut other) = channels()?;
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

/// Both ends in one thread: the sockets' buffers have the messages.
#[cfg(feature = "portable")]
fn ring_shared(driver: &Driver) -> egmem::share::Result<()> {
    use egmem::shapes::{Consumer, Producer};
    use egmem::share::{ImportOptions, best_handle_types};

    best_handle_types(driver, NodeId(0).into())?;
    let (mut channel, mut others) = channels()?;
    let Ring { mut producer, .. } = Ring::<u64>::on(NodeId(0)).shareable().create(driver)?;
    producer.share_consumer(&mut channel)?;
    let mut consumer = Consumer::<u64>::receive(driver, &mut others, ImportOptions::new())?;
    assert!(producer.try_push(7)?);
    drop(producer);
    consumer.share_producer(&mut channel)?;
    let mut producer = Producer::<u64>::receive(driver, &mut others, ImportOptions::new())?;
    assert!(producer.try_push(8)?);
    assert_eq!(
        (consumer.try_pop()?, consumer.try_pop()?),
        (Some(7), Some(8))
    );
    Ok(())
}

#[cfg(feature = "portable")]
fn replicated_shared(driver: &Driver) -> egmem::share::Result<()> {
    use egmem::shapes::replicated::ReplicatedView;
    use egmem::share::{ImportOptions, best_handle_types};

    best_handle_types(driver, NodeId(0).into())?;
    let (mut channel, mut others) = channels()?;
    let data = Replicated::on([NodeId(0)]).shareable();
    let data = data.create(driver, &[1_u64; 100])?;
    data.share(&mut channel)?;
    let view = ReplicatedView::<u64>::receive(driver, &mut others, ImportOptions::new())?;
    let stream = Stream::new(driver, 0)?;
    let replica = view.local(Location::Device(0))?;
    replica.release_after(&stream).map_err(|kept| kept.1)?;
    data.publish(&[2; 100])?;
    assert_eq!(view.local(NodeId(0))?.get(99)?, 2);
    Ok(())
}

#[cfg(feature = "portable")]
fn channels() -> egmem::share::Result<(egmem::share::Channel, egmem::share::Channel)> {
    use egmem::share::{Channel, Peers};

    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    let peers = Peers::same_user();
    Ok((Channel::new(one, &peers)?, Channel::new(other, &peers)?))
}
