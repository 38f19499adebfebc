//! Memory's life through the public API: rules of access, any drop order, nothing left behind.

use std::sync::Arc;

use egmem::driver::sim::Machine;
use egmem::driver::{Access, AccessDesc, Call, Code, HandleType, HandleTypes, Location, NodeId};
use egmem::plain::{DeviceMemory, PinnedHost};
use egmem::proof::Prover;
use egmem::topology::Placement;
use egmem::vmm::{PhysicalMemory, Reservation};
use egmem::{Buffer, Driver, Error, Event, Memory, Pool, Stream};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const MIB: u64 = 1 << 20;

fn grace() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

/// This machine's driver, where it has one; `EGMEM_REQUIRE_CUDA=1` makes a missing one a failure.
fn cuda() -> Option<Driver> {
    match Driver::open() {
        Ok(driver) => Some(driver),
        Err(error) if std::env::var_os("EGMEM_REQUIRE_CUDA").is_some() => panic!("{error}"),
        Err(error) => {
            println!("skipped on CUDA: {error}");
            None
        }
    }
}

/// The last GPU: another than the first where there are two.
fn last(driver: &Driver) -> i32 {
    driver.device_count().unwrap() - 1
}

/// The host node of a GPU.
fn node(driver: &Driver, gpu: i32) -> NodeId {
    egmem::Topology::discover(driver)
        .unwrap()
        .gpu(gpu)
        .unwrap()
        .host_node()
        .unwrap()
}

fn nothing_held(driver: &Driver) {
    if let Some(sim) = driver.sim() {
        let held = sim.held();
        assert!(held.is_empty(), "still held: {held}");
    }
}

/// Makes of each `fn name(driver: &Driver)` a test on a simulated Grace node and one on CUDA.
macro_rules! on_both {
    ($($name:ident,)*) => {
        mod simulated {
            $(#[test] fn $name() { super::$name(&super::grace()); })*
        }
        mod cuda {
            $(#[test] fn $name() { if let Some(driver) = super::cuda() { super::$name(&driver); } })*
        }
    };
}

on_both! {
    one_call_grants_the_host_and_every_gpu,
    cpu_and_gpus_see_the_same_bytes,
    a_wrong_word_is_found_and_named,
    a_spread_buffer_is_one_range,
    access_changes_and_reads_back,
    device_memory_is_shared_with_chosen_peers,
    exported_memory_outlives_its_maker,
    import_of_the_wrong_size_is_refused,
    mappings_lie_side_by_side_in_one_reservation,
    streams_copy_in_all_directions,
    pool_memory_is_ordered_across_streams,
    pools_keep_to_their_largest_size_and_their_grants,
    events_order_streams,
    objects_go_back_in_any_order,
}

fn grant(location: Location, access: Access) -> AccessDesc {
    AccessDesc { location, access }
}

fn shareable(driver: &Driver, gpu: i32) -> PhysicalMemory {
    PhysicalMemory::options(node(driver, gpu))
        .handle_types(HandleTypes::POSIX_FD)
        .create(driver, 2 * MIB)
        .unwrap()
}

fn one_call_grants_the_host_and_every_gpu(driver: &Driver) {
    let topology = egmem::Topology::discover(driver).unwrap();
    for gpu in topology.gpus() {
        let buffer = Buffer::near(driver, gpu.ordinal, 3 * MIB + 1).unwrap();
        assert_eq!(buffer.location(), gpu.host_node().unwrap().into());
        assert_eq!(buffer.len(), 3 * MIB + 1);
        assert_eq!(buffer.physical()[0].size().padded(), 4 * MIB);
        for who in [
            Location::Host,
            Location::Device(0),
            Location::Device(last(driver)),
        ] {
            assert_eq!(buffer.access(who).unwrap(), Access::ReadWrite, "{who}");
        }
        buffer.put(3 * MIB, 7_u8).unwrap();
        assert_eq!(buffer.get::<u8>(3 * MIB).unwrap(), 7);
        assert!(matches!(
            buffer.put(3 * MIB + 1, 7_u8),
            Err(Error::OutOfRange { .. })
        ));
    }
    nothing_held(driver);
}

fn cpu_and_gpus_see_the_same_bytes(driver: &Driver) {
    let buffer = Buffer::near(driver, last(driver), MIB + 40).unwrap();
    for gpu in 0..=last(driver) {
        let prover = Prover::new(driver, gpu).unwrap();
        prover
            .prove(&buffer, &buffer.cpu().unwrap(), 11 + gpu as u64)
            .unwrap();
    }
}

fn a_spread_buffer_is_one_range(driver: &Driver) {
    let topology = egmem::Topology::discover(driver).unwrap();
    let shares = Placement::Spread
        .request(11 * MIB + 8)
        .place(&topology)
        .unwrap();
    let mut buffer = Buffer::spread(&shares).allocate(driver).unwrap();
    assert_eq!(buffer.physical().len(), topology.nodes().len());
    assert_eq!(buffer.len(), 11 * MIB + 8);
    for gpu in topology.gpus() {
        let prover = Prover::new(driver, gpu.ordinal).unwrap();
        prover.prove(&buffer, &buffer.cpu().unwrap(), 5).unwrap();
    }
    buffer
        .set_access(&[grant(Location::Host, Access::None)])
        .unwrap();
    assert!(matches!(buffer.cpu(), Err(Error::NotAccessible { .. })));
    drop(buffer);
    assert!(matches!(
        Buffer::spread(&[]).allocate(driver),
        Err(Error::InvalidArgument { .. })
    ));
    nothing_held(driver);
}

fn a_wrong_word_is_found_and_named(driver: &Driver) {
    let buffer = Buffer::near(driver, 0, MIB).unwrap();
    let prover = Prover::new(driver, 0).unwrap();
    prover.write(&buffer, 5).unwrap();
    buffer.put(4096, 0xbad_u64).unwrap();
    let error = prover.check_rewrite(&buffer, 5, 6).unwrap_err();
    assert!(
        matches!(
            error,
            Error::WrongBytes {
                by: Location::Device(0),
                offset: 4096,
                ..
            }
        ),
        "{error}"
    );
    let error = egmem::proof::check_pattern(&buffer.cpu().unwrap(), 6).unwrap_err();
    assert!(
        matches!(
            error,
            Error::WrongBytes {
                by: Location::Host,
                offset: 4096,
                found: 0xbad,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_gpu_without_access_loses_its_context_and_says_so() {
    let driver = grace();
    let buffer = Buffer::on(NodeId(0))
        .access_by([Location::Device(0)])
        .bytes(MIB)
        .allocate(&driver)
        .unwrap();
    let stranger = Prover::new(&driver, 1).unwrap();
    let error = stranger.write(&buffer, 1).unwrap_err();
    assert!(
        matches!(error, Error::ContextLost { device: 1, .. }),
        "{error}"
    );
    Prover::new(&driver, 0).unwrap().write(&buffer, 1).unwrap();
}

fn access_changes_and_reads_back(driver: &Driver) {
    let mut buffer = Buffer::near(driver, 0, 2 * MIB).unwrap();
    let (host, gpu) = (Location::Host, Location::Device(last(driver)));
    buffer
        .set_access(&[grant(host, Access::Read), grant(gpu, Access::None)])
        .unwrap();
    assert_eq!(buffer.access(host).unwrap(), Access::Read);
    assert_eq!(buffer.access(gpu).unwrap(), Access::None);
    assert_eq!(buffer.get::<u8>(0).unwrap(), 0);
    assert!(matches!(
        buffer.put(0, 1_u8),
        Err(Error::NotAccessible { .. })
    ));
    buffer.set_access(&[grant(host, Access::None)]).unwrap();
    assert!(matches!(
        buffer.get::<u8>(0),
        Err(Error::NotAccessible { .. })
    ));
    buffer
        .set_access(&[grant(node(driver, last(driver)).into(), Access::ReadWrite)])
        .unwrap();
    buffer.put(0, 9_u8).unwrap();
    assert_eq!(buffer.get::<u8>(0).unwrap(), 9);
}

fn device_memory_is_shared_with_chosen_peers(driver: &Driver) {
    let peers = [0, last(driver)];
    let buffer = Buffer::on(Location::Device(0))
        .access_by(peers.map(Location::Device))
        .bytes(MIB)
        .allocate(driver)
        .unwrap();
    assert!(matches!(buffer.cpu(), Err(Error::NotAccessible { .. })));
    Prover::new(driver, 0).unwrap().write(&buffer, 3).unwrap();
    Prover::new(driver, last(driver))
        .unwrap()
        .check_rewrite(&buffer, 3, 4)
        .unwrap();
    if driver.is_simulated() {
        let stranger = Prover::new(driver, 2).unwrap();
        let error = stranger.read(&buffer).unwrap_err();
        assert!(
            matches!(error, Error::ContextLost { device: 2, .. }),
            "{error}"
        );
    }
}

fn exported_memory_outlives_its_maker(driver: &Driver) {
    let physical = shareable(driver, last(driver));
    assert!(matches!(
        physical.export(HandleType::Fabric),
        Err(Error::InvalidArgument {
            what: "handle type",
            ..
        })
    ));
    let shared = physical.export(HandleType::PosixFd).unwrap();
    let mut first = physical.map().unwrap();
    first
        .set_access(&[grant(Location::Host, Access::ReadWrite)])
        .unwrap();
    first.cpu().unwrap().put(8, 77_u64).unwrap();
    drop((first, physical));

    let imported = PhysicalMemory::import(driver, &shared, 2 * MIB).unwrap();
    assert_eq!(imported.location(), node(driver, last(driver)).into());
    assert_eq!(imported.props().handle_types, HandleTypes::NONE);
    let mut mapping = imported.map().unwrap();
    drop((imported, shared));
    mapping
        .set_access(&[grant(Location::Host, Access::Read)])
        .unwrap();
    assert_eq!(mapping.cpu().unwrap().get::<u64>(8).unwrap(), 77);
    drop(mapping);
    nothing_held(driver);
}

fn import_of_the_wrong_size_is_refused(driver: &Driver) {
    let physical = shareable(driver, 0);
    let shared = physical.export(HandleType::PosixFd).unwrap();
    assert!(PhysicalMemory::import(driver, &shared, MIB).is_err());
    let larger = PhysicalMemory::import(driver, &shared, 4 * MIB).unwrap();
    assert!(larger.map().is_err());
    drop((larger, physical, shared));
    nothing_held(driver);
}

/// What is refused for having too many references says so, and what to do.
#[test]
fn memory_that_is_shared_too_often_is_the_gpus_alone() {
    let mut machine = Machine::h200x8();
    machine.memory_references = Some(3);
    let driver = Driver::simulated(machine).unwrap();
    let physical = shareable(&driver, 0);
    let _shared = physical.export(HandleType::PosixFd).unwrap();
    let everyone = [
        grant(Location::Host, Access::ReadWrite),
        grant(Location::Device(0), Access::ReadWrite),
    ];
    let mut granted = [(); 2].map(|()| physical.map().unwrap());
    for mapping in &mut granted {
        mapping.set_access(&everyone).unwrap();
    }
    let mut refused = physical.map().unwrap();
    for access in [&everyone[..], &everyone[..1]] {
        let error = refused.set_access(access).unwrap_err();
        assert!(matches!(error, Error::TooManyReferences { .. }), "{error}");
        assert_eq!(error.code(), Some(Code::INVALID_VALUE));
        assert!(error.remedy().contains("duplicates"));
        assert!(refused.cpu().is_err());
    }
    refused.set_access(&everyone[1..]).unwrap();
    let [first, _second] = granted;
    drop(first);
    refused.set_access(&everyone).unwrap();
    refused.cpu().unwrap().put(0, 1_u8).unwrap();
}

/// The driver's INVALID_VALUE is not always the host's fault, and what is refused changes nothing.
#[test]
fn a_refusal_that_is_not_the_hosts_keeps_its_code_and_the_hosts_access() {
    let driver = grace();
    let sim = driver.sim().unwrap();
    let physical = shareable(&driver, 0);
    let mut mapping = physical.map().unwrap();
    for before in [Access::None, Access::Read] {
        mapping
            .set_access(&[grant(Location::Host, before)])
            .unwrap();
        sim.fail(Call::MemSetAccess, 1, Code::INVALID_VALUE);
        let error = mapping
            .set_access(&[grant(Location::Host, Access::ReadWrite)])
            .unwrap_err();
        assert!(matches!(error, Error::Driver(_)), "{error}");
        assert_eq!(mapping.access(Location::Host).unwrap(), before);
        assert_eq!(mapping.cpu().is_ok(), before == Access::Read);
    }
}

fn mappings_lie_side_by_side_in_one_reservation(driver: &Driver) {
    let range = Reservation::options()
        .alignment(1 << 30)
        .reserve(driver, 8 * MIB)
        .unwrap();
    assert_eq!(range.start().0 % (1 << 30), 0);
    let range = Arc::new(range);
    let physical = PhysicalMemory::options(node(driver, 0))
        .create(driver, 2 * MIB)
        .unwrap();
    let mut low = range.map(0, &physical).unwrap();
    let mut high = range.map(2 * MIB, &physical).unwrap();
    assert!(range.map(2 * MIB, &physical).is_err(), "over a mapping");
    assert!(matches!(
        range.map(7 * MIB, &physical),
        Err(Error::OutOfRange { .. })
    ));
    for mapping in [&mut low, &mut high] {
        mapping
            .set_access(&[grant(Location::Host, Access::ReadWrite)])
            .unwrap();
    }
    low.cpu().unwrap().put(0, 123_u32).unwrap();
    assert_eq!(high.cpu().unwrap().get::<u32>(0).unwrap(), 123);
}

/// CUDA's calls work from any thread, and so does all that is made by them.
#[test]
fn everything_can_be_sent_and_shared() {
    fn both<T: Send + Sync>() {}
    both::<Driver>();
    both::<PhysicalMemory>();
    both::<egmem::driver::ShareableHandle>();
    both::<Reservation>();
    both::<egmem::vmm::Mapping>();
    both::<Buffer>();
    both::<egmem::memory::CpuView<'_>>();
    both::<(PinnedHost, DeviceMemory)>();
    both::<(Stream, Event)>();
    both::<(Pool, egmem::PoolBuffer, egmem::pool::DevicePoolGuard)>();
    both::<Prover>();
    both::<egmem::capability::Capabilities>();
    both::<(egmem::Topology, Error)>();
}

#[test]
fn another_drivers_objects_are_refused() {
    let (one, two) = (grace(), grace());
    let physical = PhysicalMemory::options(NodeId(0))
        .create(&one, MIB)
        .unwrap();
    let range = Arc::new(Reservation::options().reserve(&two, 2 * MIB).unwrap());
    assert!(matches!(
        range.map(0, &physical),
        Err(Error::InvalidArgument { .. })
    ));
    let stream = Stream::new(&two, 0).unwrap();
    let pool = Pool::options(NodeId(0)).create(&one).unwrap();
    assert!(matches!(
        pool.allocate(1, &stream),
        Err(Error::InvalidArgument { .. })
    ));
    // The two drivers' first streams have the same handle.
    let own = Stream::new(&one, 0).unwrap();
    let mut buffer = pool.allocate(4096, &own).unwrap();
    for refused in [buffer.use_on(&stream), buffer.free_on(&stream)] {
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })));
    }
    own.synchronize().unwrap();
    assert_eq!(pool.stats().unwrap().used, 0, "freed on its own stream");
    let buffer = Buffer::near(&one, 0, MIB).unwrap();
    assert!(matches!(
        stream.fill(&buffer, 0, 1, 0),
        Err(Error::InvalidArgument { .. })
    ));
}

fn streams_copy_in_all_directions(driver: &Driver) {
    let stream = Stream::new(driver, last(driver)).unwrap();
    let egm = Buffer::near(driver, 0, MIB).unwrap();
    let gpu = DeviceMemory::new(driver, last(driver), MIB).unwrap();
    let pinned = PinnedHost::new(driver, last(driver), MIB).unwrap();
    egm.write_at(0, b"extended gpu memory").unwrap();
    stream.copy(&gpu, 100, &egm, 0, 19).unwrap();
    stream.copy(&pinned, 3, &gpu, 100, 19).unwrap();
    let mut back = [0_u8; 19];
    pinned.cpu().read_at(3, &mut back).unwrap();
    assert_eq!(&back, b"extended gpu memory");
    assert!(matches!(
        stream.copy(&gpu, MIB - 1, &egm, 0, 2),
        Err(Error::OutOfRange { .. })
    ));
    stream.fill(&egm, 1, 3, 0xff).unwrap();
    assert_eq!(egm.get::<[u8; 4]>(0).unwrap(), [b'e', 0xff, 0xff, 0xff]);
}

fn pool_memory_is_ordered_across_streams(driver: &Driver) {
    let pool = Pool::options(node(driver, last(driver)))
        .release_threshold(u64::MAX)
        .create(driver)
        .unwrap();
    let (first, second) = (
        Stream::new(driver, 0).unwrap(),
        Stream::new(driver, last(driver)).unwrap(),
    );
    let mut buffer = pool.allocate(64 << 10, &first).unwrap();
    buffer.use_on(&second).unwrap();
    // SAFETY: `buffer` outlives the work, which its `cpu` waits for.
    unsafe {
        second
            .memset_async(buffer.device_ptr(), 0x5a, 64 << 10)
            .unwrap()
    };
    assert_eq!(
        buffer.cpu().unwrap().get::<u32>(60_000).unwrap(),
        0x5a5a_5a5a
    );
    assert_eq!(pool.stats().unwrap().used, 64 << 10);
    buffer.free_on(&second).unwrap();
    second.synchronize().unwrap();
    let stats = pool.stats().unwrap();
    assert_eq!((stats.used, stats.used_high), (0, 64 << 10));
    assert!(stats.reserved > 0);
    pool.trim_to(0).unwrap();
    assert_eq!(pool.stats().unwrap().reserved, 0);
    pool.reset_high_water().unwrap();
    assert_eq!(pool.stats().unwrap().used_high, 0);
}

/// What is freed is freed once, however the waiting for its users ends.
#[test]
fn pool_memory_is_freed_once() {
    let driver = grace();
    let sim = driver.sim().unwrap();
    let pool = Pool::options(NodeId(0)).create(&driver).unwrap();
    let (first, second) = (
        Stream::new(&driver, 0).unwrap(),
        Stream::new(&driver, 0).unwrap(),
    );
    let mut buffer = pool.allocate(4096, &first).unwrap();
    buffer.use_on(&second).unwrap();
    sim.fail(Call::EventCreate, 1, Code::OUT_OF_MEMORY);
    sim.fail(Call::StreamSynchronize, 1, Code::OUT_OF_MEMORY);
    sim.reset_counts();
    drop(buffer);
    assert_eq!(sim.count(Call::MemFreeAsync), 1);
}

fn pools_keep_to_their_largest_size_and_their_grants(driver: &Driver) {
    let stream = Stream::new(driver, 0).unwrap();
    let pool = Pool::options(node(driver, 0))
        .max_size(64 * MIB)
        .access_by([Location::Device(0)])
        .create(driver)
        .unwrap();
    assert_eq!(pool.access(Location::Device(0)).unwrap(), Access::ReadWrite);
    let kept = pool.allocate(40 * MIB, &stream).unwrap();
    let error = pool.allocate(40 * MIB, &stream).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    let other = last(driver);
    if other != 0 {
        assert_eq!(pool.access(Location::Device(other)).unwrap(), Access::None);
        assert!(
            pool.set_access(&[grant(Location::Device(other), Access::Read)])
                .is_err()
        );
        let stranger = Stream::new(driver, other).unwrap();
        assert!(stranger.fill(&kept, 0, 1, 1).is_err());
        pool.set_access(&[grant(Location::Device(other), Access::ReadWrite)])
            .unwrap();
        stranger.fill(&kept, 0, 1, 1).unwrap();
    }
    let pool = pool.destroy().unwrap().unwrap_err(); // an allocation is left
    drop(kept);
    pool.destroy().unwrap().unwrap();
    drop(stream);
    nothing_held(driver);
}

#[test]
fn a_host_pool_becomes_a_devices_pool_only_where_the_platform_lets_it() {
    let x86 = Driver::simulated(Machine::h200x8()).unwrap();
    let pool = Pool::options(NodeId(0)).create(&x86).unwrap();
    let error = pool.make_current(0).unwrap_err();
    assert!(
        matches!(error, Error::PlatformUnsupported { .. }),
        "{error}"
    );

    let mut machine = Machine::gh200();
    machine.host_pool_for_device = true;
    let driver = Driver::simulated(machine).unwrap();
    let pool = Pool::options(NodeId(0)).create(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let before = driver.driver_pools().device_pool(0).unwrap();
    {
        let guard = pool.make_current(0).unwrap();
        let buffer = guard.allocate(4096, &stream).unwrap();
        buffer.cpu().unwrap().put(0, 1_u8).unwrap();
        assert_eq!(pool.stats().unwrap().used, 4096);
    }
    assert_eq!(driver.driver_pools().device_pool(0).unwrap(), before);
}

/// The host has many names; the CPU's windows must not believe an overruled one.
#[test]
fn the_last_word_on_the_hosts_access_counts() {
    let driver = grace();
    let physical = PhysicalMemory::options(NodeId(0))
        .create(&driver, MIB)
        .unwrap();
    let mut mapping = physical.map().unwrap();
    for (first, last) in [
        (Access::ReadWrite, Access::None),
        (Access::None, Access::Read),
        (Access::Read, Access::ReadWrite),
    ] {
        mapping
            .set_access(&[
                grant(Location::HostNuma(0), first),
                grant(Location::Device(0), Access::ReadWrite),
                grant(Location::Host, last),
            ])
            .unwrap();
        assert_eq!(mapping.access(Location::Host).unwrap(), last);
        let written = mapping.cpu().and_then(|cpu| cpu.put(0, 1_u8));
        assert_eq!(written.is_ok(), last == Access::ReadWrite);
    }
}

fn events_order_streams(driver: &Driver) {
    let (first, second) = (
        Stream::new(driver, 0).unwrap(),
        Stream::new(driver, last(driver)).unwrap(),
    );
    let buffer = Buffer::near(driver, 0, 2 * MIB).unwrap();
    let event = Event::new(driver, 0, false).unwrap();
    // SAFETY: `buffer` outlives the work, which is waited for below.
    unsafe { first.memset_async(buffer.device_ptr(), 1, MIB).unwrap() };
    event.record(&first).unwrap();
    second.wait(&event).unwrap();
    // SAFETY: as above.
    unsafe { second.memset_async(buffer.device_ptr(), 2, 8).unwrap() };
    second.synchronize().unwrap();
    assert_eq!(buffer.get::<u8>(0).unwrap(), 2);
    assert_eq!(buffer.get::<u8>(8).unwrap(), 1);
    assert!(event.is_done().unwrap());
}

type Thing = Option<Box<dyn std::any::Any>>;

/// Physical memory, mappings and reservations are dropped in random orders.
fn objects_go_back_in_any_order(driver: &Driver) {
    let mut runner = TestRunner::new(ProptestConfig::with_cases(64));
    let orders = Just((0..6_usize).collect::<Vec<_>>()).prop_shuffle();
    let (near, far) = (node(driver, 0), node(driver, last(driver)));
    let dropped = runner.run(&orders, |order| {
        let range = Arc::new(Reservation::options().reserve(driver, 8 * MIB).unwrap());
        let one = PhysicalMemory::options(near)
            .create(driver, 2 * MIB)
            .unwrap();
        let two = PhysicalMemory::options(far)
            .create(driver, 2 * MIB)
            .unwrap();
        let mut things: Vec<Thing> = vec![
            Some(Box::new(range.map(0, &one).unwrap())),
            Some(Box::new(range.map(2 * MIB, &two).unwrap())),
            Some(Box::new(one.map().unwrap())),
            Some(Box::new(one)),
            Some(Box::new(two)),
            Some(Box::new(range)),
        ];
        for index in order {
            drop(things[index].take());
        }
        nothing_held(driver);
        Ok(())
    });
    dropped.unwrap();
}
