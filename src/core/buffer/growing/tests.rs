use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::*;
use crate::driver::{Call, Code, NodeId};
use crate::memory::Memory;
use crate::{Backing, Buffer, Growth, Machine};

const MIB: u64 = 1 << 20;
const CHUNKS: u64 = 5;
const ALL: u64 = 2 * MIB * CHUNKS;

fn options() -> BufferOptions {
    let growth = Growth::steady().chunk(2 * MIB);
    Buffer::on(NodeId(0)).bytes(ALL - 8).growth(growth)
}

fn driver() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

/// Growth that makes a chunk for each step, once the front is there.
struct Steps {
    allow: SyncSender<ControlFlow<()>>,
    made: Receiver<Progress>,
}

impl Steps {
    fn of(driver: &Driver, options: BufferOptions, front: u64) -> (GrowingBuffer, Self) {
        let (allow, allowed) = sync_channel(0);
        let (made, of_made) = sync_channel(0);
        let caller = thread::current().id();
        let buffer = options.allocate_in_background(driver, front, move |progress| {
            let is_front = thread::current().id() == caller;
            assert_eq!(is_front, progress.done - 2 * MIB < front);
            if is_front || made.send(progress).is_err() {
                return ControlFlow::Continue(());
            }
            // Without the test's end nothing is held up.
            allowed.recv().unwrap_or(ControlFlow::Continue(()))
        });
        let made = of_made;
        (buffer.unwrap(), Self { allow, made })
    }

    /// Returns when the next chunk has been made; the thread goes no further.
    fn next(&self) -> u64 {
        self.made.recv().unwrap().done
    }

    fn allow(&self, what: ControlFlow<()>) {
        self.allow.send(what).unwrap();
    }

    /// Lets the growth go on by itself.
    fn end(self) {}
}

fn goes_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn only_the_bytes_that_are_there_are_accessible() {
    let driver = driver();
    let (buffer, steps) = Steps::of(&driver, options(), 1);
    // The thread may have made the next chunk by now, of which it waits to tell.
    let view = buffer.cpu().unwrap();
    let (at_first, start) = (view.len(), buffer.device_ptr());
    assert!(at_first <= 4 * MIB);
    for chunk in 2..=CHUNKS {
        let done = steps.next();
        assert_eq!(done, chunk * 2 * MIB);
        let len = done.min(ALL - 8);
        assert_eq!((buffer.len(), buffer.cpu().unwrap().len()), (len, len));
        assert_eq!(buffer.progress(), Progress::new(done, ALL));
        assert_eq!((buffer.total(), buffer.device_ptr()), (ALL - 8, start));
        assert_eq!(buffer.growth(), GrowthState::Growing);
        buffer.cpu().unwrap().put(len - 8, chunk).unwrap();
        assert!(buffer.cpu().unwrap().put(len - 4, chunk).is_err());
        assert_eq!(view.len(), at_first, "a view does not grow");
        for gpu in 0..4 {
            let access = |len| buffer.gpu_access(gpu, Engine::Kernel, 0, len);
            assert_eq!(access(done), Ok(Access::ReadWrite));
            assert!(matches!(access(done + 1), Err(Error::OutOfRange { .. })));
        }
        assert_eq!(buffer.of_one_mapping(MIB, done - MIB), Some(MIB));
        assert_eq!(buffer.of_one_copy(0, done), done);
        assert!(buffer.may_be_on_host(0, 1) && !buffer.is_read_only_for_cpu(0, done));
        steps.allow(ControlFlow::Continue(()));
    }
    buffer.wait().unwrap();
    assert_eq!(
        (buffer.growth(), buffer.error()),
        (GrowthState::Complete, None)
    );
    assert_eq!(buffer.wait_timeout(Duration::ZERO), Some(Ok(())));
    drop(buffer);
    assert!(driver.sim().unwrap().held().is_empty());
}

#[test]
fn access_that_was_not_granted_is_not_given() {
    let driver = driver();
    let reads = options()
        .access(Location::Host, Access::Read)
        .access(Location::Device(1), Access::Read);
    let buffer = reads.allocate_in_background(&driver, 0, goes_on).unwrap();
    buffer.wait().unwrap();
    assert!(buffer.cpu().unwrap().put(0, 1_u8).is_err());
    assert!(buffer.is_read_only_for_cpu(ALL - 16, 1));
    let access = |gpu| buffer.gpu_access(gpu, Engine::Copy, MIB, ALL - 2 * MIB);
    assert_eq!((access(0), access(1)), (Ok(Access::None), Ok(Access::Read)));
    // Without a chunk there is nothing to view.
    let none = options().access(Location::Host, Access::None);
    let buffer = none.allocate_in_background(&driver, 1, goes_on).unwrap();
    assert!(matches!(buffer.cpu(), Err(Error::NotAccessible { .. })));
}

#[test]
fn a_front_of_all_needs_no_thread() {
    let driver = driver();
    let buffer = options().allocate_in_background(&driver, u64::MAX, goes_on);
    let buffer = buffer.unwrap();
    assert!(buffer.thread.is_none());
    assert_eq!((buffer.len(), buffer.wait()), (ALL - 8, Ok(())));
    assert_eq!(buffer.growth(), GrowthState::Complete);
}

#[test]
fn a_front_that_fails_leaves_nothing() {
    let driver = driver();
    let sim = driver.sim().unwrap();
    for call in [
        Call::MemAddressReserve,
        Call::MemCreate,
        Call::MemMap,
        Call::MemSetAccess,
    ] {
        let nth = if call == Call::MemAddressReserve {
            1
        } else {
            2
        };
        sim.fail(call, nth, Code::UNKNOWN);
        let error = options()
            .allocate_in_background(&driver, 3 * MIB, goes_on)
            .unwrap_err();
        assert_eq!(error.code(), Some(Code::UNKNOWN), "{call:?}");
        assert!(sim.held().is_empty(), "{call:?}: {}", sim.held());
    }
    sim.fail(Call::MemCreate, 2, Code::OUT_OF_MEMORY);
    let error = options()
        .allocate_in_background(&driver, ALL, goes_on)
        .unwrap_err();
    assert!(
        matches!(error, Error::OutOfMemory { requested: ALL, .. }),
        "{error}"
    );
    let error = options().allocate_in_background(&driver, 1, |_| ControlFlow::Break(()));
    let (done, total) = (2 * MIB, ALL);
    assert_eq!(error.unwrap_err(), Error::Cancelled { done, total });
    assert!(sim.held().is_empty(), "{}", sim.held());
}

/// In each call of each chunk behind the front.
#[test]
fn a_failure_keeps_the_memory_until_then() {
    let driver = driver();
    let sim = driver.sim().unwrap();
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        for chunk in 2..=CHUNKS {
            sim.fail(call, chunk, Code::UNKNOWN);
            let buffer = options()
                .allocate_in_background(&driver, 1, goes_on)
                .unwrap();
            let error = buffer.wait().unwrap_err();
            assert_eq!(error.code(), Some(Code::UNKNOWN), "{call:?} {chunk}");
            assert_eq!(
                (buffer.growth(), buffer.error()),
                (GrowthState::Stopped, Some(error))
            );
            let len = (chunk - 1) * 2 * MIB;
            assert_eq!(buffer.len(), len);
            buffer.cpu().unwrap().fill(0, len, 7).unwrap();
            assert_eq!(
                buffer.gpu_access(3, Engine::Copy, 0, len),
                Ok(Access::ReadWrite)
            );
            drop(buffer);
            assert!(sim.held().is_empty(), "{call:?} {chunk}: {}", sim.held());
        }
    }
}

#[test]
fn the_caller_cancels_at_each_chunk() {
    let driver = driver();
    for by_progress in [false, true] {
        for chunk in 2..=CHUNKS {
            let (buffer, steps) = Steps::of(&driver, options(), 1);
            for _ in 2..chunk {
                steps.next();
                steps.allow(ControlFlow::Continue(()));
            }
            let done = steps.next();
            if by_progress {
                steps.allow(ControlFlow::Break(()));
            } else {
                buffer.cancel();
                steps.allow(ControlFlow::Continue(()));
            }
            let expected = match chunk {
                CHUNKS => Ok(()),
                _ => Err(Error::Cancelled { done, total: ALL }),
            };
            assert_eq!(buffer.wait(), expected);
            assert_eq!(buffer.len(), done.min(ALL - 8));
            buffer.cancel();
            drop(buffer);
            assert!(driver.sim().unwrap().held().is_empty());
        }
    }
}

#[test]
fn dropped_while_it_grows_it_gives_everything_back() {
    let driver = driver();
    let (buffer, steps) = Steps::of(&driver, options(), 1);
    steps.next();
    let shared = Arc::clone(&buffer.shared);
    let dropping = thread::spawn(move || drop(buffer));
    let mut state = lock(&shared.state);
    while !state.is_cancelled {
        state = shared.changed.wait(state).unwrap();
    }
    drop(state);
    drop(shared);
    steps.end();
    dropping.join().unwrap();
    assert!(driver.sim().unwrap().held().is_empty());
}

/// A rest of up to a second ends with the growth.
#[test]
fn a_rest_is_broken_off() {
    let addresses = Reservation::options().reserve(&driver(), 2 * MIB);
    let shared = Shared::new(Arc::new(addresses.unwrap()), 2);
    assert!(shared.rest(Duration::ZERO).is_continue());
    thread::scope(|scope| {
        let resting = scope.spawn(|| shared.rest(Duration::MAX));
        shared.cancel();
        assert!(resting.join().unwrap().is_break());
    });
    assert!(shared.rest(Duration::MAX).is_break());
}

/// The progress function may own the buffer, and can neither wait for itself nor join itself.
#[test]
fn the_progress_function_may_drop_the_buffer() {
    let driver = driver();
    let (give, given) = sync_channel::<GrowingBuffer>(1);
    let (ended, end) = sync_channel(1);
    let front = 2 * MIB;
    let buffer = options().allocate_in_background(&driver, front, move |progress| {
        if progress.done > front {
            let buffer = given.recv().unwrap();
            let error = buffer.wait().unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { what: "wait", .. }));
            let shared = Arc::downgrade(&buffer.shared);
            drop(buffer);
            ended.send(shared).unwrap();
        }
        ControlFlow::Continue(())
    });
    let buffer = buffer.unwrap();
    let own = Arc::downgrade(&buffer.shared);
    give.send(buffer).unwrap();
    assert!(end.recv().unwrap().ptr_eq(&own));
    // The channel ends when the thread has dropped the function; the memory follows.
    assert!(end.recv().is_err());
    while own.strong_count() > 0 {
        thread::yield_now();
    }
}

#[test]
fn a_panic_in_the_progress_function_stops_the_growth() {
    let driver = driver();
    let front = 2 * MIB;
    let buffer = options().allocate_in_background(&driver, front, move |progress| {
        assert!(progress.done <= front, "on purpose");
        ControlFlow::Continue(())
    });
    let buffer = buffer.unwrap();
    let error = buffer.wait().unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    assert_eq!(
        (buffer.growth(), buffer.len()),
        (GrowthState::Stopped, 4 * MIB)
    );
    drop(buffer);
    assert!(driver.sim().unwrap().held().is_empty());
}

#[test]
fn the_ledger_has_the_chunks_that_came_to_be() {
    for backing in [Backing::Driver, Backing::Registered] {
        let driver = driver();
        let options = options().backing(backing).label("five chunks");
        let buffer = options.allocate_in_background(&driver, 1, |progress| {
            if progress.done < 4 * MIB {
                return ControlFlow::Continue(());
            }
            ControlFlow::Break(())
        });
        let buffer = buffer.unwrap();
        buffer.wait().unwrap_err();
        let entries = ledger::allocations(&driver).into_iter();
        let of_label = |entry: &ledger::Allocation| entry.label.as_deref() == Some("five chunks");
        let bytes: Vec<u64> = entries.filter(of_label).map(|entry| entry.bytes).collect();
        assert_eq!(bytes, [buffer.len()], "{backing:?}");
    }
}

#[test]
fn readers_see_whole_chunks_while_others_come() {
    let driver = driver();
    let growth = Growth::steady().chunk(2 * MIB);
    let options = Buffer::on(NodeId(0)).bytes(200 * MIB).growth(growth);
    let buffer = options.allocate_in_background(&driver, 1, goes_on).unwrap();
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let buffer = &buffer;
            scope.spawn(move || {
                let mut last = 0;
                while last < buffer.total() {
                    let len = buffer.len();
                    assert!(len >= last && len.is_multiple_of(2 * MIB));
                    last = len;
                    let at = len - 64 + thread * 8;
                    buffer.cpu().unwrap().put(at, len).unwrap();
                    let have = buffer.gpu_access(0, Engine::Copy, 0, len);
                    assert_eq!(have, Ok(Access::ReadWrite));
                    assert_eq!(buffer.cpu().unwrap().get(at), Ok(len));
                }
            });
        }
    });
    drop(buffer);
    assert!(driver.sim().unwrap().held().is_empty());
}
