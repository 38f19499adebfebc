//! Tickets for copies and fills: their operands, their refusals, their ends.

use std::sync::Arc;

use egmem::driver::{Access, Call, Code, Location, NodeId};
use egmem::pinned::{DeviceMemory, PinnedHost};
use egmem::proof::Prover;
use egmem::stream::{NotStarted, TransferFailed};
use egmem::{Buffer, Driver, Error, Memory, Pool, Stream, Transfer};

use crate::lifecycle::{MIB, grace, grant, last, node, nothing_held};

pub fn tickets_copy_and_fill_and_give_their_operands_back(driver: &Driver) {
    let stream = Stream::new(driver, last(driver)).unwrap();
    let egm = Arc::new(Buffer::near(driver, 0, MIB).unwrap());
    let gpu = DeviceMemory::new(driver, last(driver), MIB).unwrap();
    let pinned = PinnedHost::new(driver, last(driver), MIB).unwrap();
    let address = gpu.device_ptr();
    egm.write_at(0, b"extended gpu memory").unwrap();

    let copy = stream.start_copy((gpu, 100), (Arc::clone(&egm), 0), 19);
    let (gpu, _) = copy.unwrap().wait().unwrap();
    assert_eq!(gpu.device_ptr(), address);
    let copy = stream.start_copy((pinned, 3), (gpu, 100), 19).unwrap();
    let (pinned, _) = copy.wait().unwrap();
    let mut back = [0_u8; 19];
    pinned.cpu().read_at(3, &mut back).unwrap();
    assert_eq!(&back, b"extended gpu memory");

    let fill = stream.start_fill((egm, 1), 3, 0xff).unwrap();
    let egm = fill.wait().unwrap();
    assert_eq!(egm.get::<[u8; 4]>(0).unwrap(), [b'e', 0xff, 0xff, 0xff]);
}

pub fn a_ticket_for_no_bytes_is_done(driver: &Driver) {
    let stream = Stream::new(driver, 0).unwrap();
    let memory = Buffer::near(driver, 0, MIB).unwrap();
    let fill = stream.start_fill((memory, MIB), 0, 1).unwrap();
    assert_eq!(fill.is_done(), Ok(true));
    assert_eq!(fill.wait().unwrap().get::<u8>(0).unwrap(), 0);
}

/// A thousand at once on several streams, waited for in another order; some are dropped.
pub fn many_tickets_live_at_once(driver: &Driver) {
    const TICKETS: u64 = 1000;
    let streams = [0, last(driver), 0].map(|gpu| Stream::new(driver, gpu).unwrap());
    let memory = Arc::new(Buffer::near(driver, 0, MIB).unwrap());
    let mut tickets: Vec<_> = (0..TICKETS)
        .map(|n| {
            let stream = &streams[n as usize % streams.len()];
            stream.start_fill((Arc::clone(&memory), n * 64), 64, n as u8)
        })
        .collect::<Result<_, _>>()
        .unwrap();
    while let Some(ticket) = tickets.pop() {
        if tickets.len() % 3 == 0 {
            drop(ticket);
        } else {
            ticket.wait().unwrap();
        }
    }
    for n in 0..TICKETS {
        assert_eq!(memory.get::<[u8; 64]>(n * 64).unwrap(), [n as u8; 64]);
    }
    assert_eq!(Arc::strong_count(&memory), 1);
}

/// They say whether the work is done, and it is once they say so.
pub fn a_ticket_tells_of_the_end(driver: &Driver) {
    let stream = Stream::new(driver, last(driver)).unwrap();
    let memory = Arc::new(Buffer::near(driver, 0, 64 * MIB).unwrap());
    let fill = stream
        .start_fill((Arc::clone(&memory), 0), 64 * MIB, 7)
        .unwrap();
    while !fill.is_done().unwrap() {
        std::thread::yield_now();
    }
    assert_eq!(memory.get::<u8>(64 * MIB - 1).unwrap(), 7);
    assert_eq!(fill.stream().handle(), stream.handle());
    fill.wait().unwrap();
}

pub fn a_pools_access_is_not_taken_from_a_ticket(driver: &Driver) {
    let gpu = last(driver);
    let stream = Stream::new(driver, gpu).unwrap();
    let all = [grant(Location::Device(gpu), Access::ReadWrite)];
    let none = [grant(Location::Device(gpu), Access::None)];
    let pool = Pool::options(node(driver, 0))
        .access_by([] as [Location; 0])
        .create(driver)
        .unwrap();
    pool.set_access(&all).unwrap();
    let to = Arc::new(pool.allocate(MIB, &stream).unwrap());
    let from = Buffer::near(driver, 0, MIB).unwrap();
    from.fill(5).unwrap();
    let tickets = [
        stream.start_fill((Arc::clone(&to), 0), 8, 1).unwrap(),
        stream.start_fill((Arc::clone(&to), 0), 8, 2).unwrap(),
    ];
    let copy = stream.start_copy((Arc::clone(&to), 8), (from, 0), 8);
    // As another thread could.
    let refused = || {
        let error = pool.clone().set_access(&none).unwrap_err();
        let held =
            matches!(&error, Error::StillHeld { name, .. } if name.contains(&format!("GPU {gpu}")));
        assert!(held, "{error}");
    };
    refused();
    pool.set_access(&all).unwrap();
    for ticket in tickets {
        ticket.wait().unwrap();
        refused();
    }
    drop(copy.unwrap());
    assert_eq!(
        to.cpu().unwrap().get::<u64>(0).unwrap(),
        0x0202_0202_0202_0202
    );
    assert_eq!(
        to.cpu().unwrap().get::<u64>(8).unwrap(),
        0x0505_0505_0505_0505
    );
    pool.set_access(&none).unwrap();
    let error = stream.start_fill((to, 0), 8, 3).unwrap_err().error;
    assert!(matches!(*error, Error::NotAccessible { .. }), "{error}");
}

/// The error of an unstarted transfer has its operands.
pub fn a_refused_ticket_gives_its_operands_back(driver: &Driver) {
    let gpu = last(driver);
    let stream = Stream::new(driver, gpu).unwrap();
    let closed = Buffer::on(node(driver, gpu))
        .access(Location::Device(gpu), Access::None)
        .bytes(MIB)
        .allocate(driver)
        .unwrap();
    let open = Buffer::near(driver, 0, MIB).unwrap();
    let addresses = (closed.device_ptr(), open.device_ptr());
    let refused = stream.start_copy((closed, 0), (open, 0), 8).unwrap_err();
    assert!(matches!(*refused.error, Error::NotAccessible { .. }));
    let (closed, open) = refused.operands;
    assert_eq!((closed.device_ptr(), open.device_ptr()), addresses);
    let NotStarted { error, operands } = stream.start_copy((open, 0), (closed, 0), 8).unwrap_err();
    assert!(matches!(*error, Error::NotAccessible { .. }), "{error}");
    let (open, _) = operands;
    let refused = stream.start_fill((open, MIB - 1), 2, 8).unwrap_err();
    let text = refused.to_string();
    assert!(
        text.starts_with("a copy or a fill did not complete: "),
        "{text}"
    );
    assert!(matches!(Error::from(refused), Error::OutOfRange { .. }));
    stream.synchronize().unwrap();
}

/// On the simulator work begins when a thread waits for it.
#[test]
fn a_ticket_that_is_dropped_waits() {
    let driver = grace();
    let stream = Stream::new(&driver, 0).unwrap();
    let memory = Arc::new(Buffer::near(&driver, 0, MIB).unwrap());
    let fill = stream.start_fill((Arc::clone(&memory), 0), MIB, 7).unwrap();
    assert_eq!(memory.get::<u8>(0).unwrap(), 0, "nobody has waited");
    drop(fill);
    assert_eq!(memory.get::<u8>(MIB - 1).unwrap(), 7);
    // The last owner of the memory: were it unmapped first, the GPU would lose its context.
    drop(stream.start_fill((memory, 0), MIB, 8).unwrap());
    stream.synchronize().unwrap();
    drop(stream);
    nothing_held(&driver);
}

pub fn fill(driver: &Driver) -> (Stream, Transfer<Buffer>) {
    let stream = Stream::new(driver, 0).unwrap();
    let memory = Buffer::near(driver, 0, MIB).unwrap();
    let fill = stream.start_fill((memory, 0), MIB, 7).unwrap();
    (stream, fill)
}

#[test]
fn the_end_is_asked_for_again_after_a_refusal() {
    let driver = grace();
    let (_stream, fill) = fill(&driver);
    let sim = driver.sim().unwrap();
    for call in [Call::EventSynchronize, Call::EventQuery] {
        for nth in 1..=5 {
            sim.fail(call, nth, Code::OUT_OF_MEMORY);
        }
    }
    let TransferFailed { error, operands } = fill.wait().unwrap_err();
    assert_eq!(error.code(), Some(Code::OUT_OF_MEMORY));
    assert_eq!(operands.unwrap().get::<u8>(MIB - 1).unwrap(), 7);
}

#[test]
fn a_busy_gpu_is_waited_for() {
    let driver = grace();
    let (_stream, fill) = fill(&driver);
    driver
        .sim()
        .unwrap()
        .fail(Call::EventQuery, 1, Code::NOT_READY);
    assert_eq!(fill.is_done(), Ok(false));
    assert_eq!(fill.is_done(), Ok(true));
    driver
        .sim()
        .unwrap()
        .fail(Call::EventQuery, 1, Code::UNKNOWN);
    assert_eq!(fill.is_done().unwrap_err().code(), Some(Code::UNKNOWN));
    fill.wait().unwrap();
}

#[test]
fn a_lost_context_gives_the_operands_back() {
    let driver = grace();
    let (stream, fill) = fill(&driver);
    let read_only = Buffer::on(NodeId(0))
        .access(Location::Device(0), Access::Read)
        .bytes(MIB)
        .allocate(&driver)
        .unwrap();
    // SAFETY: the memory outlives the work, which faults.
    unsafe { stream.memset_async(read_only.device_ptr(), 1, 8) }.unwrap();
    let second = stream.start_fill((Buffer::near(&driver, 0, MIB).unwrap(), 0), 8, 1);
    fill.wait().unwrap();
    let failed = second.unwrap().wait().unwrap_err();
    assert!(matches!(*failed.error, Error::ContextLost { .. }));
    assert!(failed.operands.is_some());
}

#[test]
fn a_refusal_at_any_step_loses_nothing() {
    for (call, started) in [
        (Call::EventCreate, false),
        (Call::MemsetD8Async, false),
        (Call::EventRecord, true),
    ] {
        let driver = grace();
        let stream = Stream::new(&driver, 0).unwrap();
        let memory = Buffer::near(&driver, 0, MIB).unwrap();
        driver.sim().unwrap().fail(call, 1, Code::OUT_OF_MEMORY);
        let memory = match stream.start_fill((memory, 0), MIB, 7) {
            Ok(fill) => {
                assert!(started, "{call:?}");
                let memory = fill.wait().unwrap();
                assert_eq!(memory.get::<u8>(MIB - 1).unwrap(), 7);
                memory
            }
            Err(NotStarted { error, operands }) => {
                assert!(!started, "{call:?}");
                assert_eq!(error.code(), Some(Code::OUT_OF_MEMORY));
                operands
            }
        };
        assert_eq!(driver.sim().unwrap().cancel_all(), 0);
        drop((memory, stream));
        nothing_held(&driver);
    }
}

/// A stream creates one event, and reuses it for each transfer.
#[test]
fn a_streams_events_are_used_again() {
    let driver = grace();
    let stream = Stream::new(&driver, 0).unwrap();
    let mut memory = Buffer::near(&driver, 0, MIB).unwrap();
    for byte in 0..100 {
        memory = stream
            .start_fill((memory, 0), 8, byte)
            .unwrap()
            .wait()
            .unwrap();
    }
    assert_eq!(driver.sim().unwrap().count(Call::EventCreate), 1);
    drop((memory, stream));
    nothing_held(&driver);
}

/// A stream of the program's own is captured too where it waits for one that is.
#[test]
fn a_stream_that_does_not_tell_of_captures_gets_no_work() {
    let driver = grace();
    let stream = Stream::new(&driver, 0).unwrap();
    let prover = Prover::new(&driver, 0).unwrap();
    let memory = Buffer::near(&driver, 0, MIB).unwrap();
    let sim = driver.sim().unwrap();
    let refused = |error: Error| assert_eq!(error.code(), Some(Code::STREAM_CAPTURE_IMPLICIT));
    let fault = || sim.fail(Call::StreamIsCapturing, 1, Code::STREAM_CAPTURE_IMPLICIT);
    fault();
    refused(stream.fill(&memory, 0, 8, 1).unwrap_err());
    fault();
    refused(stream.copy(&memory, 0, &memory, 8, 8).unwrap_err());
    fault();
    refused(prover.write(&memory, 1).unwrap_err());
    fault();
    refused(stream.start_fill((memory, 0), 8, 1).unwrap_err().into());
    for call in [Call::MemsetD8Async, Call::MemcpyAsync, Call::LaunchKernel] {
        assert_eq!(sim.count(call), 0, "{call:?}");
    }
}

/// Waiting for an allocation on a captured stream would make another stream part of the capture.
#[test]
fn an_allocation_on_a_stream_that_does_not_tell_of_captures_is_not_waited_for() {
    let driver = grace();
    let pool = Pool::options(NodeId(0)).create(&driver).unwrap();
    let [own, other] = [(); 2].map(|()| Stream::new(&driver, 0).unwrap());
    let memory = pool.allocate(MIB, &own).unwrap();
    let sim = driver.sim().unwrap();
    sim.fail(Call::StreamIsCapturing, 2, Code::STREAM_CAPTURE_IMPLICIT);
    let error = other.fill(&memory, 0, 8, 1).unwrap_err();
    assert_eq!(error.code(), Some(Code::STREAM_CAPTURE_IMPLICIT));
    for call in [
        Call::EventRecord,
        Call::StreamWaitEvent,
        Call::MemsetD8Async,
    ] {
        assert_eq!(sim.count(call), 0, "{call:?}");
    }
    other.fill(&memory, 0, 8, 1).unwrap();
}

/// Work of the program's own: the ticket owns what it uses until the work has ended, and gives it back if the work is refused.
#[test]
fn a_ticket_owns_what_other_work_uses() {
    let driver = grace();
    let sim = driver.sim().unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let memory = Arc::new(Buffer::near(&driver, 0, MIB).unwrap());
    let start = || {
        let copy = |memory: &mut Arc<Buffer>| {
            let at = memory.device_ptr();
            // SAFETY: both ranges are the operand's, and nothing else uses them meanwhile.
            unsafe { stream.copy_async(at.add(8), at, 8) }
        };
        // SAFETY: the copy is on this stream, and uses the operand alone.
        unsafe { Transfer::submit(&stream, Arc::clone(&memory), copy) }
    };
    memory.write_at(0, &[7_u8; 8]).unwrap();
    let copied = start().unwrap().wait().unwrap();
    assert_eq!(copied.get::<[u8; 8]>(8), Ok([7; 8]));
    drop(copied);
    sim.fail(Call::MemcpyAsync, 1, Code::UNKNOWN);
    let refused = start().unwrap_err();
    assert_eq!(refused.error.code(), Some(Code::UNKNOWN));
    assert!(Arc::ptr_eq(&refused.operands, &memory));
    drop(refused);
    assert_eq!(Arc::strong_count(&memory), 1);
}
