//! Children that are forked while other threads use a heap: they can exit and drop their values without hanging.
//!
//! Each test forks in a process of its own, since a child has a copy of all locks that other tests' threads held.

use std::alloc::Layout;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};
#[cfg(feature = "portable")]
use std::{
    pin::Pin,
    task::{Context, Poll, Waker},
};

use egmem::driver::NodeId;
use egmem::heap::DebugOptions;
use egmem::vmm::PhysicalMemory;
use egmem::{Backing, Block, Buffer, Driver, Error, Heap, HeapOptions, Machine, Pool, Stream};
#[cfg(feature = "portable")]
use egmem::{
    Transfer,
    driver::{Call, Code},
    stream::TransferFailed,
};

/// Children of each test.
const CHILDREN: usize = 40;
/// A child needs milliseconds; one that hangs needs for ever.
const PATIENCE: Duration = Duration::from_secs(300);

/// Runs the test of this name in a process without leak checking, since the memory of a child's lost threads looks
/// leaked there, and without ThreadSanitizer's second of waiting before each exit for threads that a child has not
/// got.
fn alone(name: &str, test: impl FnOnce()) {
    let with = |name: &str, option: &str| std::env::var(name).unwrap_or_default() + option;
    let mut child = egmem_tests::child(module_path!(), name);
    child
        .env("ASAN_OPTIONS", with("ASAN_OPTIONS", ":detect_leaks=0"))
        .env("TSAN_OPTIONS", with("TSAN_OPTIONS", ":atexit_sleep_ms=0"));
    egmem_tests::alone_as(child, test);
}

/// Forks a child that runs `work` and then `end`, and waits for it.
fn in_a_child(work: impl FnOnce(), end: unsafe extern "C" fn(libc::c_int) -> !) {
    // SAFETY: the child runs the functions under test, which are said to work there, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        // A thread of a test that panics would end alone, and the process with status 0.
        let status = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(()) => 0,
            Err(_) => 1,
        };
        // SAFETY: ends this process, which has one thread.
        unsafe { end(status) }
    }
    let (begun, mut status) = (Instant::now(), 0);
    loop {
        // SAFETY: `status` is this function's own, and nothing else waits for the child.
        let found = unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) };
        if found == child {
            break;
        }
        assert_eq!(found, 0, "waitpid: {}", std::io::Error::last_os_error());
        if begun.elapsed() > PATIENCE {
            // SAFETY: the child is this process's, and has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            // SAFETY: as above.
            unsafe { libc::waitpid(child, &mut status, 0) };
            panic!("a forked child hangs");
        }
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(status, 0, "the child's status");
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 1).unwrap()
}

fn options() -> HeapOptions {
    Heap::on(NodeId(0)).limit(64 << 20).chunk(4 << 20)
}

/// Runs `test` while other threads allocate, free and take each other's caches.
fn beside_busy_threads(heap: &Heap, test: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for number in 1..=3_usize {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Relaxed) {
                    let blocks = (1..50).map(|n| heap.allocate(layout(n * 100 * number)));
                    drop(blocks.collect::<Vec<_>>());
                }
            });
        }
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                heap.stats();
                drop(heap.trim());
            }
        });
        // Also where the test panics: the scope waits for its threads.
        let _stop = StopOnDrop(&stop);
        test();
    });
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

thread_local! {
    static KEPT: RefCell<Vec<(Block, Heap)>> = const { RefCell::new(Vec::new()) };
}

#[test]
fn a_forked_child_exits_while_other_threads_were_inside_of_the_heap() {
    alone(
        "a_forked_child_exits_while_other_threads_were_inside_of_the_heap",
        || {
            let driver = Driver::simulated(Machine::gh200()).unwrap();
            let heap = options().build(&driver).unwrap();
            let block = heap.allocate(layout(5000)).unwrap();
            KEPT.with(|kept| kept.borrow_mut().push((block, heap.clone())));
            beside_busy_threads(&heap, || {
                for _ in 0..CHILDREN {
                    drop(heap.allocate(layout(3000)).unwrap());
                    // `exit` runs the destructors of this thread's thread-locals.
                    in_a_child(|| (), libc::exit);
                }
            });
            KEPT.with(|kept| kept.borrow_mut().clear());
            assert_eq!(heap.stats().live_blocks, 0);
        },
    );
}

#[test]
fn a_forked_child_drops_what_it_has_and_takes_nothing_from_its_parent() {
    alone(
        "a_forked_child_drops_what_it_has_and_takes_nothing_from_its_parent",
        || {
            let driver = Driver::simulated(Machine::gh200()).unwrap();
            for options in [
                options(),
                options().scrub_on_free(true).grow_ahead(16 << 20),
                options().debug(DebugOptions::new()),
            ] {
                let heap = options.build(&driver).unwrap();
                let block = heap.allocate(layout(5000)).unwrap();
                block.fill(7).unwrap();
                let mut shared = Some((heap.allocate(layout(100)).unwrap(), heap.clone()));
                let buffer = Buffer::near(&driver, 0, 1 << 20).unwrap();
                let stream = Stream::new(&driver, 0).unwrap();
                let mut theirs = Some((block, buffer, stream));
                beside_busy_threads(&heap, || {
                    for _ in 0..CHILDREN / 4 {
                        in_a_child(
                            || {
                                theirs.take();
                                shared.take();
                            },
                            libc::_exit,
                        );
                    }
                });
                let (block, ..) = theirs.unwrap();
                let mut bytes = vec![0_u8; 5000];
                block.read_at(0, &mut bytes).unwrap();
                assert!(
                    bytes.iter().all(|&byte| byte == 7),
                    "a child has scrubbed it"
                );
                drop(block);
                drop(shared);
                assert_eq!(heap.stats().live_blocks, 0);
            }
        },
    );
}

#[test]
fn a_forked_child_gets_no_memory_of_its_parents_heap() {
    alone("a_forked_child_gets_no_memory_of_its_parents_heap", || {
        let told = |error: Error| {
            let is_typed = matches!(error, Error::InvalidArgument { .. });
            assert!(is_typed && error.to_string().contains("forked"), "{error}");
        };
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        for options in [
            options(),
            options().scrub_on_free(true),
            options().debug(DebugOptions::new()),
        ] {
            let heap = options.build(&driver).unwrap();
            let stream = Stream::new(&driver, 0).unwrap();
            // This thread's cache has blocks of these sizes.
            for bytes in [64, 3000, 1 << 20] {
                drop(heap.allocate(layout(bytes)).unwrap());
            }
            let mut blocks = Some([64, 3000, 1 << 20].map(|n| heap.allocate(layout(n)).unwrap()));
            let on_stream = heap.on_stream(&stream).unwrap();
            drop(on_stream.allocate(layout(64)).unwrap());
            let arena = heap.arena();
            arena.allocate(layout(64)).unwrap();
            beside_busy_threads(&heap, || {
                for _ in 0..CHILDREN / 4 {
                    let in_child = || {
                        told(on_stream.allocate(layout(64)).unwrap_err());
                        told(arena.allocate(layout(64)).unwrap_err());
                        for bytes in [64, 3000, 1 << 20, 8 << 20] {
                            told(heap.allocate(layout(bytes)).unwrap_err());
                            told(heap.allocate_zeroed(layout(bytes)).unwrap_err());
                        }
                        told(heap.reserve(1 << 20).unwrap_err());
                        told(heap.trim().unwrap_err());
                        told(heap.collect().unwrap_err());
                        told(heap.collect_all().unwrap_err());
                        told(heap.check().unwrap_err());
                        let [mut small, medium, large] = blocks.take().unwrap();
                        assert!(!small.resize_in_place(60));
                        stream.copy(&medium, 0, &large, 0, 3000).unwrap_err();
                        told(*medium.free_after(&stream).unwrap_err().error);
                        told(
                            *heap
                                .free_all_after([small, large], &stream)
                                .unwrap_err()
                                .error,
                        );
                        assert_eq!(heap.stats(), egmem::heap::HeapStats::default());
                        assert_eq!(heap.backed(), 0);
                    };
                    in_a_child(in_child, libc::_exit);
                }
            });
            drop((blocks, on_stream, arena));
            assert_eq!(heap.stats().live_blocks, 0);
        }
    });
}

#[test]
fn a_forked_child_gets_no_call_of_its_parents_simulated_driver() {
    let name = "a_forked_child_gets_no_call_of_its_parents_simulated_driver";
    alone(name, || {
        let driver = Driver::simulated(Machine::gh200x4()).unwrap();
        let buffer = Buffer::near(&driver, 0, 1 << 20).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            // Its calls hold the simulator's lock at some of the forks.
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    buffer.put(0, 7_u64).unwrap();
                    Stream::new(&driver, 0).unwrap().synchronize().unwrap();
                }
            });
            let _stop = StopOnDrop(&stop);
            for _ in 0..CHILDREN {
                let calls = || {
                    Buffer::near(&driver, 0, 1 << 20).unwrap_err();
                    Stream::new(&driver, 0).unwrap_err();
                    egmem::pinned::PinnedHost::new(&driver, 0, 4096).unwrap_err();
                    driver.mem_info(0).unwrap_err();
                };
                in_a_child(calls, libc::_exit);
            }
        });
    });
}

/// A child's heap caches for the thread whose caches of the parent's heap are lost.
#[test]
fn a_forked_child_has_heaps_of_its_own() {
    alone("a_forked_child_has_heaps_of_its_own", || {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let heap = options().build(&driver).unwrap();
        drop(heap.allocate(layout(100)).unwrap());
        in_a_child(
            || {
                let driver = Driver::simulated(Machine::gh200()).unwrap();
                let own = options().build(&driver).unwrap();
                assert!(heap.allocate(layout(100)).is_err());
                let blocks = [100, 100, 100].map(|bytes| own.allocate(layout(bytes)).unwrap());
                assert_eq!(own.stats().live_blocks, 3);
                drop(blocks);
                assert_eq!(own.stats().live_blocks, 0);
            },
            libc::_exit,
        );
        drop(heap.allocate(layout(100)).unwrap());
    });
}

/// The driver is never asked: in a child its locks may be held for ever.
#[test]
fn a_forked_child_is_told_that_what_it_gives_back_is_its_parents() {
    let name = "a_forked_child_is_told_that_what_it_gives_back_is_its_parents";
    alone(name, || {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let memory = || {
            PhysicalMemory::options(NodeId(0))
                .create(&driver, 2 << 20)
                .unwrap()
        };
        let mut pool = Some(Pool::options(NodeId(0)).create(&driver).unwrap());
        let mut memories = Some([memory(), memory()]);
        let mut mapping = Some(memory().map().unwrap());
        in_a_child(
            || {
                let told = |error: &Error| assert!(error.to_string().contains("forked"), "{error}");
                let [released, kept] = memories.take().unwrap();
                told(&released.release().unwrap_err());
                told(&kept.try_release().unwrap_err().1);
                let failed = mapping.take().unwrap().unmap().unwrap_err();
                told(&failed.1);
                drop(failed);
                told(&pool.take().unwrap().destroy().unwrap_err());
            },
            libc::_exit,
        );
        for memory in memories.unwrap() {
            memory.release().unwrap();
        }
        mapping.unwrap().unmap().unwrap();
        assert!(matches!(pool.unwrap().destroy(), Ok(Ok(()))));
    });
}

/// Other threads may have held the driver's locks, so access is refused before the driver is called.
#[test]
fn a_forked_child_changes_no_access() {
    use egmem::driver::{Access, AccessDesc, Location};
    use egmem::vmm::Mapping;
    alone("a_forked_child_changes_no_access", || {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let mut buffer = Buffer::near(&driver, 0, 4096).unwrap();
        let memory = PhysicalMemory::options(NodeId(0)).create(&driver, 4096);
        let mut mapping = memory.unwrap().map().unwrap();
        let access = [AccessDesc::new(Location::Host, Access::ReadWrite)];
        mapping.set_access(&access).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    Buffer::near(&driver, 0, 4096).unwrap();
                }
            });
            let _stop = StopOnDrop(&stop);
            for _ in 0..CHILDREN {
                in_a_child(
                    || {
                        let told = |result: egmem::Result<()>| {
                            let error = result.unwrap_err();
                            assert!(error.to_string().contains("forked"), "{error}");
                        };
                        told(mapping.set_access(&access));
                        told(Mapping::set_access_together(&mut [&mut mapping], &access));
                        told(buffer.set_access_at(0, 4096, &access));
                    },
                    libc::_exit,
                );
            }
        });
        mapping.set_access(&access).unwrap();
    });
}

#[cfg(feature = "portable")]
#[test]
fn a_forked_child_leaves_copies_and_registered_pages_to_its_parent() {
    use egmem::driver::Location;
    use egmem::pinned::{PageSize, RegisteredHost};
    use egmem::shapes::Replicated;
    let name = "a_forked_child_leaves_copies_and_registered_pages_to_its_parent";
    alone(name, || {
        let driver = Driver::simulated(Machine::h200x8()).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let places = [Location::Device(0), Location::HostNuma(0)];
        let data = Replicated::on(places).create(&driver, &[1_u64; 9]).unwrap();
        // Its work has not run in the parent either.
        data.local(Location::Device(0))
            .unwrap()
            .release_after(&stream)
            .unwrap();
        let held = data.local(Location::Host).unwrap();
        let pages = RegisteredHost::new(&driver, 0, 4096, PageSize::Base).unwrap();
        pages.cpu().put(0, 5_u64).unwrap();
        let mut all = Some((data, held, pages));
        in_a_child(
            || {
                let told = |error: Error| assert!(error.to_string().contains("forked"), "{error}");
                let (data, held, pages) = all.take().unwrap();
                told(data.local(Location::Host).unwrap_err());
                told(data.publish(&[2; 9]).unwrap_err());
                drop((held, data, pages));
            },
            libc::_exit,
        );
        let (data, held, pages) = all.unwrap();
        assert_eq!((held.get(8), pages.cpu().get(0)), (Ok(1), Ok(5_u64)));
        assert_eq!(data.publish(&[2; 9]), Ok(2));
        drop((data, held, pages, stream));
        assert!(driver.sim().unwrap().held().is_empty());
    });
}

#[cfg(feature = "portable")]
#[test]
fn a_forked_child_leaves_its_parents_socket() {
    use egmem::share::{Channel, Listener, Peers};
    alone("a_forked_child_leaves_its_parents_socket", || {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut owned = Some(Listener::bind(&path, Peers::same_user()).unwrap());
        in_a_child(|| drop(owned.take()), libc::_exit);
        assert!(owned.is_some());
        Channel::connect(&path, Peers::same_user()).unwrap();
    });
}

/// A child that a process has forked has its listening socket, and accepts no connection.
#[cfg(feature = "portable")]
#[test]
fn a_forked_child_does_not_listen_for_its_ended_parent() {
    use egmem::share::{Channel, Error, Listener, Peers, Unreachable};
    use std::io::Read;
    alone(
        "a_forked_child_does_not_listen_for_its_ended_parent",
        || {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            let (mut ends, end) = std::os::unix::net::UnixStream::pair().unwrap();
            let mut end = Some(end);
            let listens = || {
                std::mem::forget(Listener::bind(&path, Peers::same_user()).unwrap());
                // SAFETY: the child closes a file, reads from another one, and ends.
                if unsafe { libc::fork() } == 0 {
                    end.take();
                    let _ = ends.read(&mut [0]);
                }
            };
            in_a_child(listens, libc::_exit);
            let error = Channel::connect(&path, Peers::same_user()).unwrap_err();
            let cause = Unreachable::NobodyListens;
            assert!(
                matches!(error, Error::Unreachable { cause: found, .. } if found == cause),
                "{error}"
            );
            let _listener = Listener::bind(&path, Peers::same_user()).unwrap();
            Channel::connect(&path, Peers::same_user()).unwrap();
            drop(end); // the child ends
        },
    );
}

/// A child has not the threads of its parent's clients and servers, so nothing would ever answer.
#[cfg(feature = "portable")]
#[test]
fn a_forked_child_gets_no_answer_of_its_parents_client_or_server() {
    use egmem::exchange::{Address, Client, Server, blocking};
    let name = "a_forked_child_gets_no_answer_of_its_parents_client_or_server";
    alone(name, || {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let options = Server::options().listen(Address::loopback(0));
        let server = blocking::Server::start(options).unwrap();
        let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable();
        let buffer = buffer.allocate(&driver).unwrap();
        let published = server.publish("a", buffer).unwrap();
        let at = server.addresses().remove(0);
        let client = blocking::Client::connect(Client::options(at), &driver).unwrap();
        let mut remote = Some(client.fetch("a").unwrap());
        in_a_child(
            || {
                for error in [
                    client.list("").unwrap_err(),
                    client.fetch("a").map(drop).unwrap_err(),
                    remote.take().unwrap().release().unwrap_err(),
                    published.withdraw(PATIENCE).map(drop).unwrap_err(),
                    server.close(PATIENCE).unwrap_err(),
                ] {
                    assert!(error.to_string().contains("forked"), "{error}");
                }
            },
            libc::_exit,
        );
        remote.unwrap().release().unwrap();
    });
}

#[cfg(feature = "portable")]
fn poll<T>(ticket: &mut Transfer<T>) -> Poll<Result<T, TransferFailed<T>>> {
    let mut context = Context::from_waker(Waker::noop());
    Future::poll(Pin::new(ticket), &mut context)
}

#[cfg(feature = "portable")]
fn polled_by_a_child<T>(mut ticket: Transfer<T>) -> Transfer<T> {
    let Poll::Ready(Err(failed)) = poll(&mut ticket) else {
        panic!("nobody would wake the task");
    };
    assert!(failed.to_string().contains("forked"));
    ticket
}

/// A ticket takes no lock in a child, where another thread may have held it.
#[test]
fn a_forked_child_is_told_that_a_transfer_is_its_parents() {
    alone(
        "a_forked_child_is_told_that_a_transfer_is_its_parents",
        || {
            let driver = Driver::simulated(Machine::gh200()).unwrap();
            let stream = Stream::new(&driver, 0).unwrap();
            let memory = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    while !stop.load(Relaxed) {
                        let memory = Buffer::near(&driver, 0, 4096).unwrap();
                        stream
                            .start_fill((memory, 0), 4096, 1)
                            .unwrap()
                            .wait()
                            .unwrap();
                    }
                });
                let _stop = StopOnDrop(&stop);
                for _ in 0..CHILDREN {
                    let fill = |byte| stream.start_fill((Arc::clone(&memory), 0), 4096, byte);
                    let tickets = [fill(1), fill(2), fill(3)].map(Result::unwrap);
                    #[cfg(feature = "portable")]
                    let tickets = tickets.map(|mut ticket| {
                        // More questions than the tickets' thread asks until the child has ended.
                        for nth in 1..=3000 {
                            driver
                                .sim()
                                .unwrap()
                                .fail(Call::EventQuery, nth, Code::NOT_READY);
                        }
                        assert!(poll(&mut ticket).is_pending());
                        ticket
                    });
                    let mut tickets = Some(tickets);
                    in_a_child(
                        || {
                            let [asked, waited, dropped] = tickets.take().unwrap();
                            #[cfg(feature = "portable")]
                            let asked = polled_by_a_child(asked);
                            let told =
                                |error: &Error| assert!(error.to_string().contains("forked"));
                            told(&asked.is_done().unwrap_err());
                            let failed = waited.wait().unwrap_err();
                            told(&failed.error);
                            assert!(failed.operands.is_none());
                            drop(dropped);
                            told(&fill(4).unwrap_err().error);
                        },
                        libc::_exit,
                    );
                    driver.sim().unwrap().cancel_all();
                    for ticket in tickets.into_iter().flatten() {
                        ticket.wait().unwrap();
                    }
                    assert_eq!(memory.get::<u8>(0).unwrap(), 3);
                }
            });
            assert_eq!(Arc::strong_count(&memory), 1);
        },
    );
}

/// The last handle, dropped by a child, ends nothing.
#[test]
fn a_heap_that_is_dropped_in_a_child_lives_on_in_its_parent() {
    alone(
        "a_heap_that_is_dropped_in_a_child_lives_on_in_its_parent",
        || {
            let driver = Driver::simulated(Machine::gh200()).unwrap();
            let heap = options()
                .scrub_on_free(true)
                .grow_ahead(16 << 20)
                .build(&driver)
                .unwrap();
            let block = heap.allocate(layout(1 << 20)).unwrap();
            block.fill(9).unwrap();
            let mut owned = Some((heap, block));
            for _ in 0..CHILDREN {
                in_a_child(|| drop(owned.take()), libc::exit);
            }
            let (heap, block) = owned.unwrap();
            assert_eq!(block.get::<u8>((1 << 20) - 1).unwrap(), 9);
            drop((heap, block));
            assert!(driver.sim().unwrap().held().is_empty());
        },
    );
}

#[cfg(feature = "portable")]
#[test]
fn a_child_changes_nothing_in_its_parents_shapes() {
    use egmem::shapes::{Appender, Growable, Ring};

    alone("a_child_changes_nothing_in_its_parents_shapes", || {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let ring = Ring::<u64>::on(NodeId(0)).records(10);
        let Ring {
            mut producer,
            mut consumer,
        } = ring.create(&driver).unwrap();
        assert!(producer.try_push(1).unwrap());
        let mut output = Appender::<u64>::on(NodeId(0)).create(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let mut vector = Growable::<u64>::on(NodeId(0)).create(&driver).unwrap();
        let refused =
            |error: Error| assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        in_a_child(
            || {
                refused(producer.try_push(2).unwrap_err());
                refused(consumer.try_pop().unwrap_err());
                output.pump();
                refused(output.pump_while(&stream).unwrap_err());
                refused(output.append(&[3]).unwrap_err());
                refused(output.collect().unwrap_err());
                refused(vector.push(4).unwrap_err());
            },
            libc::_exit,
        );
        assert!(producer.try_push(5).unwrap());
        assert_eq!(consumer.try_pop().unwrap(), Some(1));
        assert_eq!(consumer.try_pop().unwrap(), Some(5));
        assert_eq!(output.append(&[6]).unwrap(), 1);
        assert_eq!(output.collect().unwrap().missed, 0);
    });
}

/// A child that drops its copies of the sides of a ring, and of replicated data, cuts none of its parent's links.
#[cfg(feature = "portable")]
#[test]
fn a_child_cuts_no_link_of_its_parents() {
    use egmem::shapes::replicated::ReplicatedView;
    use egmem::shapes::{Consumer, Replicated, Ring};
    use egmem::share::{Channel, ImportOptions, Peers};

    alone("a_child_cuts_no_link_of_its_parents", || {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let channel = |stream| Channel::new(stream, &Peers::same_user()).unwrap();
        let (mut channel, mut others) = (channel(one), channel(other));
        let Ring { mut producer, .. } = {
            let options = Ring::<u64>::on(NodeId(0)).records(10);
            options.shareable().create(&driver).unwrap()
        };
        producer.share_consumer(&mut channel).unwrap();
        let options = ImportOptions::new();
        let mut consumer = Consumer::<u64>::receive(&driver, &mut others, options.clone()).unwrap();
        let data = Replicated::on([NodeId(0)]).shareable();
        let data = data.create(&driver, &[1_u64]).unwrap();
        data.share(&mut channel).unwrap();
        let view = ReplicatedView::<u64>::receive(&driver, &mut others, options).unwrap();
        let replica = view.local(NodeId(0)).unwrap();
        let mut held = Some((producer, consumer, data, view, replica));
        in_a_child(
            || {
                let (mut producer, mut consumer, data, view, replica) = held.take().unwrap();
                assert!(producer.try_push(2).is_err() && consumer.try_pop().is_err());
                assert!(producer.share_consumer(&mut channel).is_err());
                assert!(data.share(&mut channel).is_err() && view.local(NodeId(0)).is_err());
                drop((producer, consumer, data, view, replica));
            },
            libc::exit,
        );
        let (data, view, replica);
        (producer, consumer, data, view, replica) = held.unwrap();
        assert!(!producer.is_alone() && !consumer.is_alone() && !view.is_alone());
        assert!(producer.try_push(3).unwrap());
        assert_eq!(consumer.try_pop(), Ok(Some(3)));
        assert_eq!((data.publish(&[2]), replica.get(0)), (Ok(2), Ok(1)));
        assert!(data.publish(&[3]).is_err());
        drop(replica);
        assert_eq!(data.publish(&[3]), Ok(3));
    });
}

/// A child drops a tier, and the values that hold its pages, while another thread of the parent uses it.
#[cfg(feature = "portable")]
#[test]
fn a_forked_childs_tier_stays_its_parents() {
    use egmem::kv::{Key, Tier};

    alone("a_forked_childs_tier_stays_its_parents", || {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let memory = Arc::new(Buffer::near(&driver, 0, 2 << 20).unwrap());
        let tier = Tier::attach(memory.clone()).page_bytes(4096);
        let tier = tier.open().unwrap();
        let [ready, new, busy, seen] = [1, 2, 3, 4].map(|number| [Key::new([number; 32])]);
        tier.prepare_store(&ready).unwrap().commit().unwrap();
        let owner: u64 = memory.get(136).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    tier.prepare_store(&busy).unwrap().commit().unwrap();
                    tier.remove(&busy).unwrap();
                }
            });
            let _stop = StopOnDrop(&stop);
            for _ in 0..CHILDREN {
                let store = tier.prepare_store(&new).unwrap();
                let load = tier.prepare_load(&ready).unwrap();
                let (events, told) = (tier.events(9), tier.on_event(|_| ()));
                tier.prepare_store(&seen).unwrap().commit().unwrap();
                tier.remove(&seen).unwrap();
                let mut held = Some((store, load, tier.clone(), events, told));
                in_a_child(
                    || {
                        let (mut store, load, tier, events, told) = held.take().unwrap();
                        assert_eq!(tier.lookup(&ready), 0);
                        assert!(tier.prepare_store(&ready).is_err());
                        assert!(store.commit().is_err());
                        assert!(store.view(0).is_err() && load.view(0).is_err());
                        assert_eq!((events.try_next(), events.lost()), (None, 0));
                        drop((tier.on_event(|_| ()), told, events));
                        drop((store, load, tier));
                    },
                    libc::exit,
                );
                assert_eq!(tier.stats().pinned, 1);
                assert_eq!(memory.get::<u64>(136).unwrap(), owner);
            }
        });
        assert_eq!((tier.stats().ready, tier.stats().pinned), (1, 0));
        assert_eq!(tier.lookup(&ready), 1);
    });
}

/// A child drops a tier that grows in a thread of its parent, which it has not got: it waits for nothing.
#[cfg(feature = "portable")]
#[test]
fn a_forked_child_does_not_grow_its_parents_tier() {
    use std::ops::ControlFlow;

    use egmem::kv::{Key, Tier};
    use egmem::{Growth, GrowthState};

    alone("a_forked_child_does_not_grow_its_parents_tier", || {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let options = Tier::on(NodeId(0)).pages(200).page_bytes(1 << 20);
        let options = options.growth(Growth::steady().chunk(2 << 20));
        let goes_on = |_| ControlFlow::Continue(());
        for _ in 0..CHILDREN {
            let tier = options.clone().create_in_background(&driver, goes_on);
            let mut held = Some(tier.unwrap());
            in_a_child(
                || {
                    let tier = held.take().unwrap();
                    assert!(tier.prepare_store(&[Key::new([1; 32])]).is_err());
                    assert_eq!(tier.growth(), GrowthState::Stopped);
                    assert!(tier.wait_grown().is_err());
                    tier.cancel_growth();
                    drop(tier);
                },
                libc::exit,
            );
            let tier = held.unwrap();
            tier.wait_grown().unwrap();
            assert_eq!(tier.stats().usable, 200);
        }
    });
}

/// A child has registered memory as it has the driver's, and zeros of a buffer that was asked to be registered. It gives no
/// addresses back.
#[test]
fn a_child_has_registered_memory_or_zeros_at_its_addresses() {
    alone(
        "a_child_has_registered_memory_or_zeros_at_its_addresses",
        || {
            let driver = egmem_tests::drivers::cuda_or(Machine::h200x8());
            for (backing, is_shared) in [(Backing::Auto, true), (Backing::Registered, false)] {
                let node = egmem_tests::drivers::node(&driver);
                let options = Buffer::on(node).bytes(4 << 20).backing(backing);
                let buffer = options.allocate(&driver).unwrap();
                assert_eq!(buffer.backing().backing, Backing::Registered);
                buffer.put(2 << 20, 7_u64).unwrap();
                let at = buffer.device_ptr().add(2 << 20).0 as usize;
                let word = std::ptr::with_exposed_provenance_mut::<u64>(at);
                let mut buffer = Some(buffer);
                in_a_child(
                    || {
                        drop(buffer.take());
                        // SAFETY: the addresses stay mapped in a child.
                        unsafe {
                            assert_eq!(word.read_volatile(), if is_shared { 7 } else { 0 });
                            word.write_volatile(8);
                        }
                    },
                    libc::_exit,
                );
                let found = buffer.unwrap().get::<u64>(2 << 20);
                assert_eq!(found, Ok(if is_shared { 8 } else { 7 }));
            }
        },
    );
}
