//! Cached blocks stay within reach of all threads.

use std::alloc::Layout;
use std::ops::ControlFlow;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use super::*;
use crate::Growth;
use crate::backing::Order;
use crate::debug::DebugOptions;
use crate::driver::{Call, Code, HandleTypes, NodeId};
use crate::{Driver, Machine, Stream};
use crate::{Heap, HeapOptions};

/// Returns whether another thread can see `kept` cleared before `empty` has reached the core, to
/// which it returns the memory of a freed block.
fn is_ever_out_of_reach(
    options: impl FnOnce(HeapOptions) -> HeapOptions,
    empty: fn(&HeapInner),
    kept: fn(&HeapInner) -> u64,
) -> bool {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = options(Heap::on(NodeId(0)).limit(64 << 20));
    let heap = heap.build(&driver).unwrap();
    let inner: &HeapInner = heap.inner();
    let (turns, core_is_free) = (Barrier::new(2), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(heap.allocate(Layout::new::<[u8; 65_536]>()).unwrap());
            assert!(kept(inner) > 0);
            turns.wait();
            turns.wait();
            empty(inner);
        });
        turns.wait();
        let core = inner.core();
        turns.wait();
        let looks = scope.spawn(|| {
            while kept(inner) > 0 {
                thread::sleep(Duration::from_millis(1));
            }
            !core_is_free.load(SeqCst)
        });
        thread::sleep(Duration::from_millis(50));
        core_is_free.store(true, SeqCst);
        drop(core);
        looks.join().unwrap()
    })
}

fn cached(heap: &HeapInner) -> u64 {
    heap.front.tally().1
}

#[test]
fn growth_in_advance_gives_the_table_memory_for_more_ranges() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).chunk(4 << 20);
    let heap = heap.build(&driver).unwrap();
    let inner: &HeapInner = heap.inner();
    inner.add_memory(4 << 20, false, |_, _| Ok(())).unwrap();
    assert!(inner.core().ranges.nodes.ahead(SPARE).is_some());
    inner.add_memory(8 << 20, true, |_, _| Ok(())).unwrap();
    assert!(inner.core().ranges.nodes.ahead(SPARE).is_none());
}

#[test]
fn what_a_thread_gives_back_of_its_own_is_never_out_of_reach() {
    let empty = |heap: &HeapInner| {
        assert!(heap.after_own_cache(&Request::new(65 << 20, 1)).is_none());
    };
    assert!(!is_ever_out_of_reach(|heap| heap, empty, cached));
}

#[test]
fn what_all_threads_give_back_is_never_out_of_reach() {
    let empty = |heap: &HeapInner| {
        heap.empty_all_caches();
    };
    assert!(!is_ever_out_of_reach(|heap| heap, empty, cached));
}

#[test]
fn what_leaves_quarantine_is_never_out_of_reach() {
    let empty = |heap: &HeapInner| {
        heap.empty_all_caches();
    };
    let debug = |heap: HeapOptions| heap.debug(DebugOptions::new());
    let kept = |heap: &HeapInner| heap.watch.as_ref().unwrap().quarantined();
    assert!(!is_ever_out_of_reach(debug, empty, kept));
}

#[test]
fn what_has_passed_is_waited_for_until_the_core_has_it() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let block = heap.allocate(Layout::new::<[u8; 65_536]>()).unwrap();
    block.free_after(&stream).unwrap();
    stream.synchronize().unwrap();
    let inner: &HeapInner = heap.inner();
    thread::scope(|scope| {
        let core = inner.core();
        let collects = scope.spawn(|| inner.collect_passed().unwrap());
        while inner.deferral.pending() > 0 {
            thread::yield_now();
        }
        let waits = inner.deferral.is_collecting();
        drop(core);
        assert_eq!((collects.join().unwrap(), waits), (1, true));
    });
}

#[test]
fn a_chunk_that_the_driver_refuses_to_unmap_stays_memory_of_the_heap() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let options = Heap::on(NodeId(0)).limit(64 << 20).chunk(8 << 20);
    let heap = options.build(&driver).unwrap();
    heap.reserve(8 << 20).unwrap();
    let sim = driver.sim().unwrap();
    // The call and its retry.
    for _ in 0..2 {
        sim.fail(Call::MemUnmap, 1, Code::NOT_PERMITTED);
    }
    let error = heap.trim().unwrap_err();
    assert_eq!(error.code(), Some(Code::NOT_PERMITTED));
    let stats = heap.stats();
    assert_eq!((stats.free, stats.backed), (8 << 20, 8 << 20));
    let created = sim.count(Call::MemCreate);
    let all = heap.allocate(Layout::new::<[u8; 8 << 20]>()).unwrap();
    assert_eq!(sim.count(Call::MemCreate), created);
    drop(all);
    assert_eq!(heap.trim(), Ok(8 << 20));
    assert_eq!((heap.backed(), heap.stats().free), (0, 0));
}

/// A heap without memory, and growth of `bytes` of it that was begun, as another thread's is while it rests.
fn with_growth_begun(options: HeapOptions, bytes: u64, test: impl FnOnce(&Heap, Order<'_>)) {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = options.chunk(4 << 20).build(&driver).unwrap();
    let mut locked = heap.inner().supply.locked();
    let backing = locked.backing().unwrap();
    let want = Want::More { bytes };
    let mut order = backing.order(want, u64::MAX).unwrap().unwrap();
    assert!(backing.step(&mut order).unwrap());
    drop(locked);
    test(&heap, order);
}

#[test]
fn a_thread_that_waits_gets_the_lock_between_two_chunks() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
    let supply = &heap.inner().supply;
    let was_there = AtomicBool::new(false);
    let mut locked = supply.locked();
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(supply.locked());
            was_there.store(true, Relaxed);
        });
        let got_it = lets_in(&mut locked, &was_there);
        drop(locked);
        assert!(got_it);
    });
}

/// Returns whether another thread gets the lock between chunks that take 50 ms.
fn lets_in(locked: &mut Locked<'_>, was_there: &AtomicBool) -> bool {
    (0..200_000).any(|_| {
        locked.release(Duration::from_millis(50));
        thread::sleep(Duration::from_millis(1));
        was_there.load(Relaxed)
    })
}

#[test]
fn a_thread_that_waited_for_growth_gets_the_lock_between_two_chunks_of_the_next() {
    let options = Heap::on(NodeId(0)).limit(64 << 20);
    with_growth_begun(options, 12 << 20, |heap, mut order| {
        let supply = &heap.inner().supply;
        let (has_lock, was_there) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut locked = supply.locked();
                has_lock.store(true, SeqCst);
                let refused = Error::invalid("heap", "a test's");
                locked.wait_for_others(refused).unwrap();
                was_there.store(true, Relaxed);
            });
            while !has_lock.load(SeqCst) {
                thread::yield_now();
            }
            // The other thread holds the lock until it waits.
            let mut locked = supply.locked();
            let backing = locked.backing().unwrap();
            while backing.step(&mut order).unwrap() {}
            let grown = backing.deliver(order);
            drop(heap.inner().with_new(backing, grown));
            locked.growth_ended();
            let got_it = lets_in(&mut locked, &was_there);
            drop(locked);
            assert!(got_it);
        });
    });
}

#[test]
fn growth_does_not_rest_for_a_thread_that_waits_until_it_has_ended() {
    let options = Heap::on(NodeId(0)).limit(64 << 20);
    with_growth_begun(options, 12 << 20, |heap, order| {
        let supply = &heap.inner().supply;
        let has_lock = AtomicBool::new(false);
        let took = Duration::from_secs(1);
        let rests = thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let mut locked = supply.locked();
                has_lock.store(true, SeqCst);
                locked.wait_for_others(Error::invalid("heap", "a test's"))
            });
            while !has_lock.load(SeqCst) {
                thread::yield_now();
            }
            // The other thread holds the lock until it sleeps.
            let mut locked = supply.locked();
            let asleep = locked.rest_after(took);
            let backing = locked.backing().unwrap();
            drop(backing.deliver(order));
            locked.growth_ended();
            let woken = locked.rest_after(took);
            drop(locked);
            waits.join().unwrap().unwrap();
            [asleep, woken, supply.locked().rest_after(took)]
        });
        assert_eq!(rests, [Duration::ZERO, took / 50, Duration::ZERO]);
    });
}

#[test]
fn while_growth_rests_others_grow_and_use_nothing_of_it() {
    let options = Heap::on(NodeId(0)).limit(64 << 20);
    with_growth_begun(options, 16 << 20, |heap, mut order| {
        let block = heap.allocate(Layout::new::<[u8; 1 << 20]>()).unwrap();
        assert!(block.offset() >= 16 << 20);
        assert_eq!((heap.backed(), heap.stats().free), (4 << 20, 3 << 20));
        let mut locked = heap.inner().supply.locked();
        let backing = locked.backing().unwrap();
        while backing.step(&mut order).unwrap() {}
        let grown = backing.deliver(order);
        drop(heap.inner().with_new(backing, grown));
        drop(locked);
        assert_eq!((heap.backed(), heap.stats().free), (20 << 20, 19 << 20));
    });
}

#[test]
fn a_request_that_is_refused_while_other_growth_rests_is_decided_when_that_has_ended() {
    let allocate = |heap: &Heap| heap.allocate(Layout::new::<[u8; 8 << 20]>()).map(drop);
    let reserve = |heap: &Heap| heap.reserve(8 << 20);
    let options = Heap::on(NodeId(0)).limit(16 << 20);
    let soft = Heap::on(NodeId(0)).soft_limit(16 << 20, |_| Relief::Refuse);
    is_decided_after_growth(options.clone(), allocate);
    is_decided_after_growth(options, reserve);
    is_decided_after_growth(soft, allocate);
}

/// There is room for `request` only once growth of 12 MiB has failed.
fn is_decided_after_growth(options: HeapOptions, request: fn(&Heap) -> Result<()>) {
    with_growth_begun(options, 12 << 20, |heap, mut order| {
        thread::scope(|scope| {
            let second = scope.spawn(|| request(heap));
            // Gives the thread time to be refused.
            thread::sleep(Duration::from_millis(100));
            let sim = heap.driver().sim().unwrap();
            sim.fail(Call::MemCreate, 1, Code::INVALID_VALUE);
            let failed = heap
                .inner()
                .supply
                .locked()
                .backing()
                .unwrap()
                .step(&mut order);
            assert!(failed.is_err());
            heap.inner().supply.locked().growth_ended();
            second.join().unwrap().unwrap();
        });
    });
}

#[test]
fn growth_of_another_thread_is_not_reported() {
    let options = Heap::on(NodeId(0)).limit(64 << 20);
    with_growth_begun(options, 12 << 20, |heap, mut order| {
        let sim = heap.driver().sim().unwrap();
        sim.fail(Call::MemCreate, 1, Code::INVALID_VALUE);
        let reported = AtomicU64::new(0);
        thread::scope(|scope| {
            let second = scope.spawn(|| {
                heap.reserve_with(8 << 20, |_| {
                    reported.fetch_add(1, SeqCst);
                    ControlFlow::Continue(())
                })
            });
            while sim.count(Call::MemCreate) < 2 {
                thread::yield_now();
            }
            // The second thread holds the lock until it waits.
            let mut locked = heap.inner().supply.locked();
            let backing = locked.backing().unwrap();
            while backing.step(&mut order).unwrap() {}
            let grown = backing.deliver(order);
            drop(heap.inner().with_new(backing, grown));
            locked.growth_ended();
            drop(locked);
            second.join().unwrap().unwrap();
        });
        assert_eq!((heap.backed(), reported.into_inner()), (12 << 20, 0));
    });
}

#[test]
fn what_is_reserved_may_lie_in_a_cache() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
    heap.reserve(64 << 20).unwrap();
    drop(heap.allocate(Layout::new::<[u8; 65_536]>()).unwrap());
    let inner: &HeapInner = heap.inner();
    assert!(inner.core().ranges.free_bytes() < 64 << 20);
    heap.reserve(64 << 20).unwrap();
    assert_eq!(inner.core().ranges.free_bytes(), 64 << 20);
    assert!(heap.reserve((64 << 20) + 1).is_err());
}

#[test]
fn slabs_that_emptied_while_the_core_was_busy_need_no_growth() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).chunk(4 << 20);
    let heap = heap.build(&driver).unwrap();
    heap.reserve(8 << 20).unwrap();
    let inner: &HeapInner = heap.inner();
    let blocks = (0..3 << 14).map(|_| heap.allocate(Layout::new::<[u8; 64]>()).unwrap());
    let blocks: Vec<_> = blocks.collect();
    let core = inner.core();
    let turns = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(blocks);
            // Its own cache goes back at its end, which needs the core.
            turns.wait();
        });
        turns.wait();
        drop(core);
    });
    assert!(inner.core().ranges.free_bytes() < 6 << 20);
    inner.add_memory(6 << 20, true, |_, _| Ok(())).unwrap();
    assert_eq!(heap.backed(), 8 << 20);
}

#[test]
fn what_leaves_a_cache_meanwhile_makes_up_for_what_is_missing() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
    heap.reserve(64 << 20).unwrap();
    drop(heap.allocate(Layout::new::<[u8; 65_536]>()).unwrap());
    let inner: &HeapInner = heap.inner();
    assert!(inner.core().ranges.free_bytes() < 64 << 20);
    assert!(inner.caches_may_make_up(64 << 20, 0));
    inner.empty_all_caches();
    assert!(inner.caches_may_make_up(64 << 20, 0));
    assert!(!inner.caches_may_make_up((64 << 20) + 1, 0));
}

#[test]
fn a_block_in_a_cache_is_found_after_many_emptyings_in_vain() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let options = Heap::on(NodeId(0)).limit(2 << 20).reserve(2 << 20);
    let heap = options.build(&driver).unwrap();
    let layout = |bytes: usize| Layout::from_size_align(bytes, 1).unwrap();
    let last = heap.allocate(layout(64)).unwrap();
    let mut rest = Vec::new();
    for bytes in [64 << 10, 16 << 10, 4 << 10, 2304, 500] {
        rest.extend(std::iter::from_fn(|| heap.allocate(layout(bytes)).ok()));
    }
    let in_a_row = || heap.inner().front.members.lock().unwrap().in_vain.in_a_row;
    // The other thread caches small blocks again after each emptying, so that no bound tells.
    while in_a_row() < 20 {
        thread::scope(|scope| {
            scope.spawn(|| drop(heap.allocate(layout(64)).unwrap()));
        });
        assert!(heap.allocate(layout(500)).is_err());
    }
    drop(last);
    assert!(heap.allocate(layout(500)).is_ok());
    assert_eq!(in_a_row(), 0);
}

#[test]
fn no_chunk_is_larger_than_drivers_were_reported_to_bear() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let layout = |bytes: u64| Layout::from_size_align(bytes as usize, 1).unwrap();
    let heap = Heap::on(NodeId(0)).limit(16 << 30).chunk(8 << 30);
    drop(
        heap.clone()
            .build(&driver)
            .unwrap()
            .allocate(layout(8 << 30))
            .unwrap(),
    );
    let sim = driver.sim().unwrap();
    assert_eq!(sim.count(Call::MemCreate), 3);
    let shared = heap
        .handle_types(HandleTypes::POSIX_FD)
        .build(&driver)
        .unwrap();
    drop(shared.allocate(layout(Growth::MAX_CHUNK)).unwrap());
    assert_eq!(sim.count(Call::MemCreate), 4);
    let error = shared.allocate(layout(Growth::MAX_CHUNK + 1)).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { what: "size", .. }),
        "{error}"
    );
}

#[test]
fn growth_decides_the_chunks_unless_they_are_set() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let options = Heap::on(NodeId(0)).limit(64 << 20).reserve(32 << 20);
    let gentle = options.growth(Growth::gentle());
    for (options, chunks) in [(gentle.clone(), 2), (gentle.clone().chunk(4 << 20), 8)] {
        let heap = options.build(&driver).unwrap();
        assert_eq!(heap.stats().driver.create, chunks);
    }
    // Also where the heap's own chunk is used.
    let wrong = gentle.growth(Growth::steady().chunk(3));
    for options in [wrong.clone(), wrong.chunk(4 << 20)] {
        let error = options.build(&driver).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "growth", .. }),
            "{error}"
        );
    }
}
