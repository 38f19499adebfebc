//! Errors name a program's mistakes, and safe code stays safe.

use egmem::capability::{Capabilities, Path};
use egmem::driver::{Access, AccessDesc, HandleTypes, Location, NodeId};
use egmem::pinned::DeviceMemory;
use egmem::{Buffer, Driver, Error, Event, Explained, Machine, Memory, Pool, Result, Stream};

const MIB: u64 = 1 << 20;

fn quad() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

fn no_such_gpu<T>(result: Result<T>) -> bool {
    matches!(result, Err(Error::NoSuchGpu { gpu: 44, count: 4 }))
}

#[test]
fn a_gpu_that_does_not_exist_is_named() {
    let driver = quad();
    let on = Location::Device(44);
    assert!(no_such_gpu(Stream::new(&driver, 44)));
    assert!(no_such_gpu(Event::new(&driver, 44, false)));
    assert!(no_such_gpu(DeviceMemory::new(&driver, 44, MIB)));
    assert!(no_such_gpu(Buffer::near(&driver, 44, MIB)));
    assert!(no_such_gpu(Buffer::on(on).bytes(MIB).allocate(&driver)));
    assert!(no_such_gpu(Pool::options(on).create(&driver)));
    let mut buffer = Buffer::near(&driver, 0, MIB).unwrap();
    assert!(no_such_gpu(
        buffer.set_access(&[AccessDesc::new(on, Access::ReadWrite)])
    ));
    assert!(no_such_gpu(buffer.access(on)));
    let pool = Pool::options(NodeId(0)).access_by([on]).create(&driver);
    assert!(no_such_gpu(pool));
    let pool = Pool::options(NodeId(0)).create(&driver).unwrap();
    assert!(no_such_gpu(pool.make_current(44)));
    for gpu in [44, i32::MAX, -1] {
        let capabilities = Capabilities::of(&driver);
        let answer = capabilities.support(Location::Device(gpu), Path::Vmm, HandleTypes::NONE);
        assert!(
            matches!(answer.error(), Some(Error::NoSuchGpu { .. })),
            "{gpu}: {answer:?}"
        );
    }
}

#[test]
fn a_node_that_does_not_exist_is_named_with_the_choices() {
    let driver = quad();
    let nodes = vec![NodeId(0), NodeId(1), NodeId(2), NodeId(3)];
    let missing = Error::NoSuchNode {
        node: NodeId(4),
        gpu: Some(0),
        choices: nodes,
    };
    let buffer = Buffer::on(NodeId(4)).bytes(MIB).allocate(&driver);
    assert_eq!(buffer.unwrap_err(), missing);
    let pool = Pool::options(NodeId(4)).create(&driver);
    assert_eq!(pool.unwrap_err(), missing);
}

#[test]
fn a_lost_context_is_told_once() {
    let driver = quad();
    let buffer = Buffer::on(NodeId(0))
        .access(Location::Device(1), Access::Read)
        .bytes(MIB)
        .allocate(&driver)
        .unwrap();
    let stream = Stream::new(&driver, 1).unwrap();
    // SAFETY: the memory outlives the work, which faults.
    unsafe { stream.memset_async(buffer.device_ptr(), 1, 8) }.unwrap();
    let error = stream.synchronize().unwrap_err();
    let words = Explained(&error).to_string();
    assert_eq!(words.matches("ILLEGAL_ADDRESS").count(), 1, "{words}");
}

#[test]
fn one_pool_at_a_time_is_a_devices_current_one() {
    let driver = quad();
    let host = Pool::options(NodeId(0)).create(&driver).unwrap();
    let own = Pool::options(Location::Device(0)).create(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();

    let guard = host.make_current(0).unwrap();
    let second = own.make_current(0).unwrap_err();
    assert!(matches!(second, Error::InvalidArgument { .. }), "{second}");
    // Another GPU, and the same number on another driver, are other devices.
    let _other = host.make_current(1).unwrap();
    let elsewhere = quad();
    let _elsewhere = Pool::options(NodeId(0))
        .create(&elsewhere)
        .unwrap()
        .make_current(0)
        .unwrap();

    // Code beside the guard changes the pool: its memory is not taken for the guard's.
    // SAFETY: `own` outlives its being current.
    unsafe { driver.driver_pools().device_set_pool(0, own.handle()) }.unwrap();
    let error = guard.allocate(4096, &stream).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    drop(guard);
    own.make_current(0)
        .unwrap()
        .allocate(4096, &stream)
        .unwrap();
}

#[test]
fn safe_work_on_another_stream_waits_for_the_pools() {
    let driver = quad();
    let (first, second) = (
        Stream::new(&driver, 0).unwrap(),
        Stream::new(&driver, 1).unwrap(),
    );
    let pool = Pool::options(NodeId(0)).create(&driver).unwrap();
    let memory = pool.allocate(MIB, &first).unwrap();
    // SAFETY: the memory outlives the work.
    unsafe { first.memset_async(memory.device_ptr(), 7, MIB) }.unwrap();
    let copy = Buffer::near(&driver, 1, MIB).unwrap();
    second.copy(&copy, 0, &memory, 0, MIB).unwrap();
    assert_eq!(copy.get::<u64>(MIB - 8).unwrap(), 0x0707_0707_0707_0707);
}

#[test]
fn a_pool_asks_for_more_than_is_free_only_when_told_to() {
    let driver = quad();
    let stream = Stream::new(&driver, 0).unwrap();
    let pool = |overcommit| {
        let options = Pool::options(NodeId(0)).overcommit(overcommit);
        options.create(&driver).unwrap()
    };
    let refused = pool(false).allocate(1 << 40, &stream).unwrap_err();
    assert!(matches!(refused, Error::NodeTooFull { .. }), "{refused}");
    let tried = pool(true).allocate(1 << 40, &stream).unwrap_err();
    assert!(matches!(tried, Error::OutOfMemory { .. }), "{tried}");
}
