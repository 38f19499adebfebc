//! Every driver call of every public operation is made to fail, one after another, with several
//! codes. The error names the call, and nothing stays behind.

#[cfg(feature = "portable")]
mod shapes;

use std::ops::ControlFlow;

use egmem::capability::shareable::best_handle_types;
use egmem::driver::{
    Access, AccessDesc, Call, Code, HandleType, HandleTypes, Location, NodeId, PoolApi,
};
use egmem::pinned::{
    DeviceMemory, ManagedMemory, PageSize, PinnedHost, RegisteredHost, SystemMemory,
};
use egmem::proof::Prover;
use egmem::topology::Placement;
use egmem::vmm::{PhysicalMemory, Reservation};
use egmem::{Buffer, Driver, Event, Growth, Machine, Pool, Result, Stream, Topology};

const MIB: u64 = 1 << 20;
const CODES: [Code; 4] = [
    Code::OUT_OF_MEMORY,
    Code::NOT_PERMITTED,
    Code::NOT_SUPPORTED,
    Code(77_777),
];

const IMPORTED_POOL: &str = "imported pool";
/// Operations that ask whether work has ended without disturbing captures.
const WITH_TICKETS: [&str; 3] = ["replicated data", "appender", "appender that is pumped"];

type Operation = (&'static str, fn(&Driver) -> Result<()>);

const OPERATIONS: &[Operation] = &[
    ("create physical memory", |driver| {
        PhysicalMemory::options(NodeId(0))
            .create(driver, 3 * MIB)?
            .release()
    }),
    ("reserve addresses", |driver| {
        Reservation::options()
            .alignment(1 << 30)
            .reserve(driver, MIB)
            .map(drop)
    }),
    ("map and grant in steps", |driver| {
        let physical = PhysicalMemory::options(NodeId(0))
            .handle_types(HandleTypes::POSIX_FD)
            .create(driver, 4 * MIB)?;
        let mut mapping = physical.map()?;
        drop(physical);
        let gpu = Location::Device(0);
        mapping.set_access(&[
            AccessDesc {
                location: Location::Host,
                access: Access::ReadWrite,
            },
            AccessDesc {
                location: gpu,
                access: Access::Read,
            },
        ])?;
        mapping.access(gpu).map(drop)
    }),
    ("export and import", |driver| {
        let physical = PhysicalMemory::options(NodeId(0))
            .handle_types(HandleTypes::POSIX_FD)
            .create(driver, 2 * MIB)?;
        let shared = physical.export(HandleType::PosixFd)?;
        let imported = PhysicalMemory::import(driver, &shared, 2 * MIB)?;
        imported.map().map(drop)
    }),
    ("registered buffer", |driver| {
        let buffer = Buffer::on(NodeId(0))
            .bytes(5 * MIB)
            .growth(Growth::steady().chunk(2 * MIB))
            .backing(egmem::Backing::Registered)
            .allocate(driver)?;
        buffer.put(4 * MIB, 7_u64)
    }),
    ("shareable registered memory", |driver| {
        let physical = PhysicalMemory::options(NodeId(0))
            .handle_types(HandleTypes::POSIX_FD)
            .backing(egmem::Backing::Registered)
            .create(driver, 2 * MIB)?;
        let shared = physical.export(HandleType::PosixFd)?;
        let imported = PhysicalMemory::import(driver, &shared, 2 * MIB)?;
        let mut mapping = imported.map()?;
        mapping.set_access(&[AccessDesc::read_write(Location::Device(0))])?;
        mapping.unmap().map_err(|refused| refused.1)
    }),
    ("fabric memory", |driver| {
        let memory = PhysicalMemory::options(NodeId(0))
            .handle_types(HandleTypes::FABRIC | HandleTypes::POSIX_FD)
            .create(driver, 2 * MIB)?;
        memory.export(HandleType::Fabric).map(drop)
    }),
    ("buffer near a GPU", |driver| {
        Buffer::near(driver, 0, 5 * MIB).map(drop)
    }),
    ("buffer on a GPU", |driver| {
        Buffer::on(Location::Device(1))
            .bytes(MIB)
            .allocate(driver)
            .map(drop)
    }),
    ("buffer in parts on several nodes", |driver| {
        let shares = Placement::Spread
            .request(6 * MIB)
            .place(&Topology::of_machine(&Machine::gb200())?)?;
        let mut buffer = Buffer::spread(&shares).allocate(driver)?;
        buffer.set_access(&[AccessDesc::new(Location::Device(1), Access::Read)])?;
        buffer.access(Location::Device(1)).map(drop)
    }),
    ("buffer in chunks", |driver| {
        let options = Buffer::on(NodeId(1)).bytes(7 * MIB).room_for_probes();
        let options = options.growth(Growth::steady().chunk(2 * MIB));
        let buffer = options.allocate_with(driver, |_| ControlFlow::Continue(()))?;
        assert_eq!(buffer.physical().len(), 4);
        buffer.access(Location::Device(1)).map(drop)
    }),
    ("access to chunks", |driver| {
        let options = Buffer::on(NodeId(1)).bytes(6 * MIB).chunk(2 * MIB);
        let mut buffer = options.allocate(driver)?;
        let reads = [AccessDesc::new(Location::Device(1), Access::Read)];
        buffer.set_access_at(2 * MIB, 4 * MIB, &reads)?;
        let none = [AccessDesc::new(Location::Host, Access::None)];
        buffer.set_access_at(0, 2 * MIB, &none)
    }),
    ("DMA-BUF", |driver| {
        let options = Buffer::on(Location::Device(0)).bytes(4 * MIB);
        let mut buffer = options.allocate(driver)?;
        buffer.dma_buf(MIB, 2 * MIB).map(drop)
    }),
    ("stream work", |driver| {
        let buffer = Buffer::near(driver, 0, 2 * MIB)?;
        let device = DeviceMemory::new(driver, 0, 2 * MIB)?;
        let stream = Stream::new(driver, 0)?;
        stream.copy(&device, 0, &buffer, 0, MIB)?;
        stream.fill(&buffer, 0, MIB, 1)?;
        let (start, end) = (Event::new(driver, 0, true)?, Event::new(driver, 0, true)?);
        start.record(&stream)?;
        end.record(&stream)?;
        end.synchronize()?;
        end.elapsed_ms_since(&start).map(drop)
    }),
    ("pinned host memory", |driver| {
        PinnedHost::new(driver, 0, MIB).map(drop)
    }),
    ("registered host memory", |driver| {
        RegisteredHost::new(driver, 0, MIB, PageSize::Base).map(drop)
    }),
    ("managed memory", |driver| {
        ManagedMemory::new(driver, 0, MIB).map(drop)
    }),
    ("system memory", |driver| {
        SystemMemory::new(driver, MIB, PageSize::Base).map(drop)
    }),
    ("proof", |driver| {
        let buffer = Buffer::near(driver, 0, 64 << 10)?;
        let prover = Prover::new(driver, 0)?;
        prover.prove(&buffer, &buffer.cpu()?, 1)
    }),
    ("topology", |driver| {
        egmem::Topology::discover(driver).map(drop)
    }),
    ("pool", |driver| pool(driver, PoolApi::Driver)),
    ("pool through the runtime API", |driver| {
        pool(driver, PoolApi::Runtime)
    }),
    ("fabric pool", |driver| {
        Pool::options(NodeId(0))
            .handle_types(HandleTypes::FABRIC)
            .create(driver)
            .map(drop)
    }),
    ("current pool", |driver| {
        let pool = Pool::options(Location::Device(0)).create(driver)?;
        let stream = Stream::new(driver, 0)?;
        let guard = pool.make_current(0)?;
        guard.allocate(MIB, &stream).map(drop)
    }),
    ("current pool through the runtime API", |driver| {
        let pool = Pool::options(Location::Device(0))
            .api(PoolApi::Runtime)
            .create(driver)?;
        let stream = Stream::new(driver, 0)?;
        let guard = pool.make_current(0)?;
        guard.allocate(MIB, &stream).map(drop)
    }),
    ("pool memory on a stream that does not know it", |driver| {
        let pool = Pool::options(NodeId(0)).create(driver)?;
        let stream = Stream::new(driver, 0)?;
        let memory = pool.allocate(MIB, &stream)?;
        let prover = Prover::new(driver, 1)?;
        prover.write(&memory, 3)?;
        prover.read(&memory)?;
        Stream::new(driver, 1)?.fill(&memory, 0, MIB, 1)
    }),
    #[cfg(feature = "portable")]
    ("shared and imported", |driver| {
        use egmem::share::{ImportOptions, Shared};
        let shares = [(0, 2), (1, 1)].map(|(node, mib)| egmem::topology::Share {
            node: NodeId(node),
            bytes: mib * MIB,
        });
        let shared: Shared = Buffer::spread(&shares)
            .handle_types(HandleTypes::POSIX_FD)
            .access(Location::Host, Access::None)
            .allocate(driver)?
            .into();
        let description = shared.describe(Access::ReadWrite)?;
        let fds = shared.export(HandleType::PosixFd)?;
        let imported = ImportOptions::new().import(driver, &description, fds)?;
        imported.put_word(0, 1)?;
        shared.word(0).map(drop)
    }),
    #[cfg(feature = "portable")]
    (IMPORTED_POOL, |driver| {
        // The failure is a driver call's, not the connection's.
        imported_pool(driver).map_err(|error| error.memory().expect("the driver's error").clone())
    }),
    ("pool destroyed", |driver| {
        let pool = Pool::options(NodeId(0)).create(driver)?;
        pool.destroy().map(drop)
    }),
];

fn pool(driver: &Driver, api: PoolApi) -> Result<()> {
    let reuse = egmem::pool::Reuse {
        allow_opportunistic: false,
        ..Default::default()
    };
    let pool = Pool::options(NodeId(0))
        .api(api)
        .max_size(64 * MIB)
        .release_threshold(u64::MAX)
        .reuse(reuse)
        .create(driver)?;
    let (first, second) = (Stream::new(driver, 0)?, Stream::new(driver, 1)?);
    let mut buffer = pool.allocate(MIB, &first)?;
    buffer.use_on(&second)?;
    buffer.cpu()?.put(0, 1_u8)?;
    pool.stats()?;
    pool.access(Location::Device(1))?;
    buffer.free_on(&second)?;
    pool.allocate(MIB, &second).map(drop)?;
    pool.trim_to(0)?;
    pool.reset_high_water()
}

/// Returns how often a call is made to find the handle types of shareable memory.
fn calls_of_trials(call: Call) -> u64 {
    let driver = Driver::simulated(Machine::gb200()).unwrap();
    best_handle_types(&driver, NodeId(0).into()).unwrap();
    driver.sim().unwrap().count(call)
}

/// Calls whose refusal an operation may survive: they give back, which is tried twice, or order a
/// free, for which there is another way.
fn may_be_survived(name: &str, call: Call, nth: u64, code: Code) -> bool {
    // Handle types are tried, and others taken where some do not work.
    let is_asked = nth <= calls_of_trials(call) || call == Call::DeviceGetCount;
    if name.contains("another process") && is_asked {
        return true;
    }
    // A reader asks again later, and the publisher waits until then.
    if name == "replicated data in another process" && call == Call::EventQuery {
        return true;
    }
    // A driver that does not know captures makes none.
    if call == Call::StreamIsCapturing && code == Code::NOT_SUPPORTED {
        return true;
    }
    // Kernels may run, so they are waited for anyway.
    if name == "appender that is pumped" && call == Call::StreamIsCapturing {
        return true;
    }
    // Captures are left alone where the driver knows of them.
    if call == Call::ThreadExchangeStreamCaptureMode {
        return true;
    }
    // Before a free the driver is asked twice whether the stream is being captured.
    if name.contains("pool") && call == Call::StreamIsCapturing {
        return true;
    }
    // The end of work is waited for twice.
    if WITH_TICKETS.contains(&name) && call == Call::EventSynchronize {
        return true;
    }
    if is_unknown(call, code) {
        return true;
    }
    // The pool's size has a second source, its CPU access was not asked for, and the end of its free
    // is waited for twice.
    let imported_pool = matches!(
        call,
        Call::MemGetAddressRange | Call::PointerGetAttribute | Call::StreamSynchronize
    );
    name == IMPORTED_POOL && imported_pool
        || matches!(
            call,
            Call::MemRelease
                | Call::MemUnmap
                | Call::MemAddressFree
                | Call::MemFree
                | Call::MemFreeHost
                | Call::MemHostUnregister
                | Call::MemFreeAsync
                | Call::RtFreeAsync
                | Call::MemPoolDestroy
                | Call::RtMemPoolDestroy
                | Call::StreamDestroy
                | Call::EventDestroy
                | Call::ModuleUnload
                | Call::DeviceSetMemPool
                | Call::RtDeviceSetMemPool
                | Call::EventCreate
                | Call::EventRecord
                | Call::StreamWaitEvent
        )
}

/// Returns whether the driver does not know something of a GPU, or of a link between two, which is unknown then.
fn is_unknown(call: Call, code: Code) -> bool {
    let attributes = [Call::DeviceGetAttribute, Call::DeviceGetP2PAttribute];
    attributes.contains(&call) && code == Code::NOT_SUPPORTED
}

#[test]
fn every_failing_call_is_named_and_leaves_nothing() {
    let mut injected = 0;
    #[cfg(not(feature = "portable"))]
    let shapes: &[Operation] = &[];
    #[cfg(feature = "portable")]
    let shapes = shapes::OPERATIONS;
    for (name, operation) in OPERATIONS.iter().chain(shapes) {
        let driver = Driver::simulated(Machine::gb200()).unwrap();
        operation(&driver).unwrap_or_else(|error| panic!("{name}: {error}"));
        for (call, count) in driver.sim().unwrap().calls() {
            for nth in 1..=count {
                for code in CODES {
                    fails_well(name, *operation, call, nth, code);
                    injected += 1;
                }
            }
        }
    }
    println!("{injected} faults injected");
    assert!(injected > 500, "only {injected} faults were injected");
}

fn fails_well(name: &str, operation: fn(&Driver) -> Result<()>, call: Call, nth: u64, code: Code) {
    let driver = Driver::simulated(Machine::gb200()).unwrap();
    let sim = driver.sim().unwrap();
    sim.fail(call, nth, code);
    let result = operation(&driver);
    let case = format!("{name}: {call} number {nth} failing with {code}");
    match &result {
        Ok(()) => assert!(
            may_be_survived(name, call, nth, code),
            "{case}: went unnoticed"
        ),
        // It names what is unknown and needed.
        Err(error) if is_unknown(call, code) && error.driver_error().is_none() => {
            assert!(!error.remedy().is_empty());
        }
        Err(error) => {
            let source = error
                .driver_error()
                .unwrap_or_else(|| panic!("{case}: the error names no call: {error}"));
            assert_eq!((source.call, source.code), (call, code), "{case}: {error}");
            assert!(!error.remedy().is_empty());
        }
    }
    let held = sim.held();
    assert!(held.is_empty(), "{case}: still held: {held}");
}

#[cfg(feature = "portable")]
fn imported_pool(driver: &Driver) -> egmem::share::Result<()> {
    use egmem::share::{Channel, LentPoolBuffer, Peers};
    let pool = Pool::options(NodeId(0))
        .handle_types(HandleTypes::POSIX_FD)
        .create(driver)?;
    let stream = Stream::new(driver, 0)?;
    let mut lent = LentPoolBuffer::from(pool.allocate(MIB, &stream)?);
    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    let mut one = Channel::new(one, &Peers::same_user())?;
    let mut other = Channel::new(other, &Peers::same_user())?;
    one.send_pool(&pool)?;
    let imported = other.receive_pool(driver)?;
    one.send_pool_buffer(&mut lent)?;
    let stream = Stream::new(driver, 1)?;
    other.receive_pool_buffer(&imported, &stream)?.free()?;
    // A process that another test starts has the connection until it runs its program.
    Ok(lent.wait(std::time::Duration::from_secs(300))?)
}
