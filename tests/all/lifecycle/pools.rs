//! Pools, and the order of their work.

use egmem::driver::sim::Machine;
use egmem::driver::{Access, Call, Code, Location, NodeId};
use egmem::{Driver, Error, Memory, Pool, Stream};

use crate::lifecycle::{MIB, grace, grant, last, node, nothing_held};

pub fn pool_memory_is_ordered_across_streams(driver: &Driver) {
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
    pool.trim_to(0).unwrap();
    assert_eq!(pool.stats().unwrap().reserved, 0);
    pool.reset_high_water().unwrap();
    assert_eq!(pool.stats().unwrap().used_high, 0);
}

/// Memory is freed once, however the waiting for its users ends.
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

pub fn pools_keep_to_their_largest_size_and_their_grants(driver: &Driver) {
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
