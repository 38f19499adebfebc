//! Errors name a program's mistakes, and safe code stays safe.

use egmem::capability::{Capabilities, Path};
use egmem::driver::{Access, AccessDesc, HandleTypes, Location, NodeId};
use egmem::heap::NotFreed;
use egmem::pinned::DeviceMemory;
use egmem::{
    Buffer, Driver, Error, Event, Explain, Explained, Heap, Machine, Memory, Pool, Result, Stream,
};

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

/// A row of the table: a part of the message, and a part of the remedy, "" where the message says what is valid.
#[track_caller]
fn row<T, E: Explain>(result: Result<T, E>, message: &str, remedy: &str) {
    let Err(error) = result else {
        panic!("there is no error: {message}");
    };
    let told = Explained(&error).message();
    assert!(told.contains(message), "{told:?} is without {message:?}");
    let advised = error.remedy();
    let is_right = advised.contains(remedy) && remedy.is_empty() == advised.is_empty();
    assert!(is_right, "{told:?} advises {advised:?}, not {remedy:?}");
}

#[test]
fn mistakes_with_buffers_are_explained() {
    let driver = quad();
    let on = |node| Buffer::on(NodeId(node));
    row(on(0).bytes(0).allocate(&driver), "1 byte or more", "");
    row(
        on(9).bytes(MIB).allocate(&driver),
        "host nodes: 0, 1, 2, 3",
        "egmem topo",
    );
    row(
        on(4).bytes(MIB).allocate(&driver),
        "GPU 0's own memory",
        "egmem topo",
    );
    row(
        on(0).bytes(1 << 50).allocate(&driver),
        "1 PiB requested",
        "`overcommit(true)`",
    );
    let overcommitted = on(0).bytes(1 << 50).overcommit(true);
    row(
        overcommitted.allocate(&driver),
        "out of memory: 1 PiB",
        "choose another node",
    );
    row(
        on(0).bytes(MIB).chunk(4096).allocate(&driver),
        "a multiple of 2 MiB",
        "",
    );
    row(
        Buffer::near(&driver, 9, MIB),
        "this machine has 4",
        "egmem topo",
    );
    let mut buffer = Buffer::near(&driver, 0, 4096).unwrap();
    row(
        buffer.write_at(4090, &[0_u8; 8]),
        "8 bytes at offset 4090",
        "within the memory's size",
    );
    row(
        buffer.get::<u64>(4096),
        "outside memory of 4096",
        "within the memory's size",
    );
    buffer
        .set_access(&[AccessDesc::new(Location::Host, Access::None)])
        .unwrap();
    row(
        buffer.write_at(0, &[0_u8; 8]),
        "the host has no access",
        "`set_access`",
    );
    row(
        buffer.get::<u64>(0),
        "access to read",
        "later with `set_access`",
    );
    row(buffer.access(Location::Device(7)), "no GPU 7", "egmem topo");
}

#[test]
fn mistakes_with_heaps_pools_and_streams_are_explained() {
    let (driver, stranger) = (quad(), quad());
    let layout = |size, align| std::alloc::Layout::from_size_align(size, align).unwrap();
    let build = || Heap::on(NodeId(0)).limit(8 << 20);
    row(
        build().reserve(64 << 20).build(&driver),
        "invalid reserve",
        "",
    );
    row(
        Heap::on(NodeId(9)).build(&driver),
        "no host NUMA node 9",
        "egmem topo",
    );
    row(build().chunk(0).build(&driver), "chunks of 0 bytes", "");
    let heap = build().build(&driver).unwrap();
    row(heap.allocate(layout(0, 1)), "1 byte or more", "");
    row(heap.allocate(layout(1 << 50, 1)), "at most", "");
    row(
        heap.allocate(layout(64 << 20, 1)),
        "its limit does not allow that much",
        "a larger limit",
    );
    row(heap.reserve(1 << 40), "1 TiB", "a larger limit");
    row(heap.check(), "without debug mode", "");
    let stream = Stream::new(&stranger, 0).unwrap();
    let block = heap.allocate(layout(64, 1)).unwrap();
    let NotFreed { error, block } = block.free_after(&stream).unwrap_err();
    drop(block);
    row(Err::<(), _>(*error), "another driver", "");

    let pool = Pool::options(NodeId(0)).create(&driver).unwrap();
    row(pool.allocate(64, &stream), "another driver", "");
    let stream = Stream::new(&driver, 0).unwrap();
    row(pool.allocate(0, &stream), "1 byte or more", "");
    row(
        pool.allocate(1 << 50, &stream),
        "1 PiB",
        "`overcommit(true)`",
    );
    row(Stream::new(&driver, 9), "no GPU 9", "egmem topo");
}

#[cfg(feature = "portable")]
#[test]
fn mistakes_with_tiers_and_connections_are_explained() {
    use egmem::exchange::{Address, Client, Owner, blocking};
    use egmem::kv::{CopyMethod, GpuPages, Key, Tier};

    let driver = quad();
    let on = || Tier::on(NodeId(0));
    row(
        on().pages(0).page_bytes(64).create(&driver),
        "1 to 1073741824",
        "",
    );
    row(
        on().pages(8).page_bytes(0).create(&driver),
        "1 to 4294967296",
        "",
    );
    let tier = on().pages(8).page_bytes(4096).create(&driver).unwrap();
    let keys: Vec<Key> = (0..9_u8).map(|byte| Key::from_bytes(&[byte])).collect();
    row(
        tier.prepare_store(&keys),
        "needs 9 pages",
        "fewer pages at a time",
    );
    row(tier.prepare_load(&keys), "at index 0", "`lookup`");
    let store = tier.prepare_store(&keys[..1]).unwrap();
    row(store.view(1), "no page 1; valid: 0", "");
    row(store.pairs(&[1, 2]), "2 blocks for 1 pages", "");
    let cache = std::sync::Arc::new(Buffer::near(&driver, 0, 8 * 4096).unwrap());
    let cache = GpuPages::over(vec![(cache, 0)], 4096, 4096).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let pairs = |block| store.pairs(&[block]).unwrap();
    row(
        tier.store(&stream, &pairs(8), &cache),
        "no block 8; valid: 0 to 7",
        "",
    );
    row(
        tier.store_by(CopyMethod::KERNEL, &stream, &pairs(0), &cache),
        "a simulated GPU runs no kernels",
        "`CopyMethod::Auto`",
    );
    let none = CopyMethod::Kernel { blocks: 0 };
    row(
        tier.store_by(none, &stream, &pairs(0), &cache),
        "1 to 1024",
        "",
    );

    row("a:b:c".parse::<Address>(), "tcp://host:port", "");
    row("no owner".parse::<Owner>(), "not a DNS name", "");
    let connect = |address: &str| {
        let options = Client::options(address.parse().unwrap());
        blocking::Client::connect(options, &driver)
    };
    row(
        connect("unix:/no/egmem.sock"),
        "/no/egmem.sock",
        "no socket is there",
    );
    row(
        connect("tcp://192.0.2.1:7740"),
        "192.0.2.1:7740",
        "`Security::PlainAnywhere`",
    );
}
