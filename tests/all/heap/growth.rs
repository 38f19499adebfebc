//! Growth, limits, trimming.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use egmem::driver::{Call, Code};
use egmem::heap::Relief;
use egmem::topology::Share;
use egmem::{Block, Error, Growth, NoRoom};

use super::*;

#[test]
fn it_takes_memory_as_it_needs_it_up_to_the_limit() {
    for driver in drivers() {
        let heap = on(&driver).limit(32 * MIB).build(&driver).unwrap();
        assert_eq!(heap.backed(), 0);
        let mut blocks = Vec::new();
        let error = loop {
            match heap.allocate(layout(MIB)) {
                Ok(block) => blocks.push(block),
                Err(error) => break error,
            }
        };
        assert_eq!(blocks.len(), 32);
        assert_eq!(heap.backed(), 32 * MIB);
        assert!(
            matches!(error, Error::HeapFull { why: NoRoom::Limit, limit, .. } if limit == 32 * MIB),
            "{error}"
        );
        assert_eq!(heap.stats().failed, 1);
        blocks.pop();
        heap.allocate(layout(MIB)).unwrap();
    }
}

#[test]
fn what_all_threads_keep_is_used_before_the_limit_fails_an_allocation() {
    let driver = simulated();
    let heap = on(&driver).limit(32 * MIB).build(&driver).unwrap();
    // All of it in pieces, freed by threads that keep some and stay.
    let blocks: Vec<Block> = (0..512)
        .map(|_| heap.allocate(layout(64 << 10)).unwrap())
        .collect();
    let (done, wait) = (std::sync::Barrier::new(5), std::sync::Barrier::new(5));
    let parts: Mutex<Vec<Vec<Block>>> = Mutex::new(Vec::new());
    let mut blocks = blocks.into_iter();
    for _ in 0..4 {
        parts
            .lock()
            .unwrap()
            .push(blocks.by_ref().take(128).collect());
    }
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let part = parts.lock().unwrap().pop();
                drop(part);
                done.wait();
                wait.wait();
            });
        }
        done.wait();
        assert!(
            heap.stats().cached > 0,
            "the threads keep nothing: this tests nothing"
        );
        let all = heap.allocate(layout(32 * MIB));
        wait.wait();
        assert!(all.is_ok(), "{all:?}");
    });
}

#[test]
fn reserved_memory_is_there_and_trimmed_memory_is_not() {
    for driver in drivers() {
        let heap = on(&driver).reserve(20 * MIB).build(&driver).unwrap();
        assert_eq!(heap.backed(), 24 * MIB);
        heap.reserve(40 * MIB).unwrap();
        assert_eq!(heap.backed(), 40 * MIB);
        let blocks: Vec<Block> = (0..40)
            .map(|_| heap.allocate(layout(MIB)).unwrap())
            .collect();
        assert_eq!(heap.backed(), 40 * MIB);
        assert_eq!(heap.trim().unwrap(), 0);
        // Every second chunk: the range has holes, which are filled again.
        let mut kept: Vec<Block> = Vec::new();
        for block in blocks {
            if (block.offset() / (8 * MIB)).is_multiple_of(2) {
                kept.push(block);
            }
        }
        assert_eq!(heap.trim().unwrap(), 16 * MIB);
        assert_eq!(heap.backed(), 24 * MIB);
        let again: Vec<Block> = (0..16)
            .map(|_| heap.allocate(layout(MIB)).unwrap())
            .collect();
        assert!(again.iter().all(|block| block.offset() < 40 * MIB));
        again.iter().for_each(|block| block.fill(1).unwrap());
        drop((kept, again));
        assert_eq!(heap.trim_to(10 * MIB).unwrap(), 24 * MIB);
        assert_eq!(heap.trim().unwrap(), 16 * MIB);
        assert_eq!(heap.backed(), 0);
    }
}

fn refused_at(error: &Error, soft: u64) -> bool {
    let expected = NoRoom::SoftLimit { bytes: soft };
    matches!(error, Error::HeapFull { why, .. } if *why == expected)
}

#[test]
fn the_soft_limit_is_asked_and_obeyed() {
    let driver = simulated();
    let kept: Arc<Mutex<Vec<Block>>> = Arc::default();
    let asked = Arc::new(AtomicU32::new(0));
    let heap = {
        let (kept, asked) = (Arc::clone(&kept), Arc::clone(&asked));
        on(&driver)
            .soft_limit(16 * MIB, move |pressure| {
                assert_eq!(pressure.soft_limit, 16 * MIB);
                match asked.fetch_add(1, SeqCst) {
                    0 => {
                        kept.lock().unwrap().clear();
                        Relief::Retry
                    }
                    1 => Relief::Refuse,
                    _ => Relief::Grow,
                }
            })
            .build(&driver)
            .unwrap()
    };
    for _ in 0..16 {
        kept.lock()
            .unwrap()
            .push(heap.allocate(layout(MIB)).unwrap());
    }
    assert_eq!(asked.load(SeqCst), 0);
    let _one = heap.allocate(layout(MIB)).unwrap();
    assert_eq!(asked.load(SeqCst), 1, "room was made");
    assert_eq!(heap.backed(), 16 * MIB);
    let error = heap.allocate(layout(16 * MIB)).unwrap_err();
    assert!(refused_at(&error, 16 * MIB), "{error}");
    let _more = heap.allocate(layout(16 * MIB)).unwrap();
    assert_eq!(asked.load(SeqCst), 3);
    assert!(heap.backed() > 16 * MIB);
}

/// By whole chunks as long as they fit, by a smaller one then.
#[test]
fn the_soft_limit_is_asked_before_a_chunk_goes_beyond_it() {
    let driver = simulated();
    let asked = Arc::new(AtomicU32::new(0));
    let heap = {
        let asked = Arc::clone(&asked);
        on(&driver)
            .chunk(64 * MIB)
            .soft_limit(81 * MIB, move |pressure| {
                assert_eq!(pressure.backed, 80 * MIB);
                match asked.fetch_add(1, SeqCst) {
                    0 => Relief::Refuse,
                    _ => Relief::Grow,
                }
            })
            .build(&driver)
            .unwrap()
    };
    let mut blocks = vec![heap.allocate(layout(MIB)).unwrap()];
    assert_eq!(heap.backed(), 64 * MIB);
    blocks.extend((1..80).map(|_| heap.allocate(layout(MIB)).unwrap()));
    assert_eq!((heap.backed(), asked.load(SeqCst)), (80 * MIB, 0));
    assert_eq!(heap.stats().driver.create, 2);
    let error = heap.allocate(layout(MIB)).unwrap_err();
    assert!(refused_at(&error, 81 * MIB), "{error}");
    blocks.push(heap.allocate(layout(MIB)).unwrap());
    assert_eq!((heap.backed(), asked.load(SeqCst)), (144 * MIB, 2));
}

#[test]
fn where_soft_and_hard_limit_are_one_the_soft_one_is_asked() {
    let driver = simulated();
    let kept: Arc<Mutex<Vec<Block>>> = Arc::default();
    let relief = Arc::clone(&kept);
    let heap = on(&driver)
        .limit(16 * MIB)
        .soft_limit(16 * MIB, move |_| {
            relief.lock().unwrap().clear();
            Relief::Retry
        })
        .build(&driver)
        .unwrap();
    for _ in 0..16 {
        let block = heap.allocate(layout(MIB)).unwrap();
        kept.lock().unwrap().push(block);
    }
    heap.allocate(layout(MIB)).unwrap();
    assert!(kept.lock().unwrap().is_empty());
}

/// The most that a block has, and where blocks do not lie across.
const MOST: u64 = (1 << 40) - 2 * MIB;

/// On a node of 8 TiB; none where they cannot be mapped.
fn huge(limit: u64, chunk: u64) -> Option<Heap> {
    // ThreadSanitizer ends programs that map terabytes; emulators track each page.
    if std::env::var("EGMEM_SANITIZER").is_ok_and(|name| name == "thread")
        || std::env::var_os("EGMEM_TEST_RUNNER").is_some()
    {
        return None;
    }
    let mut machine = Machine::gh200();
    machine.nodes[0].memory = 8 << 40;
    let driver = Driver::simulated(machine).unwrap();
    let options = Heap::on(NodeId(0)).limit(limit).chunk(chunk);
    Some(options.build(&driver).unwrap())
}

#[test]
fn a_block_that_no_memory_would_do_for_is_refused_before_any_is_made() {
    let Some(heap) = huge(4 << 40, 1 << 40) else {
        return;
    };
    for bytes in [MOST + 1, 2 << 40, 8 << 40] {
        for align in [1, 4 << 20] {
            let error = heap.allocate(aligned(bytes, align)).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().contains(&MOST.to_string()), "{error}");
        }
    }
    assert_eq!((heap.backed(), heap.stats().failed), (0, 6));
    assert_eq!(heap.allocate(layout(MOST)).unwrap().len(), MOST);
    assert!((MOST..MOST + Growth::MAX_CHUNK).contains(&heap.backed()));
}

#[test]
fn beyond_the_largest_block_it_grows_by_what_is_needed_and_gives_back_all() {
    const PART: u64 = 32 << 30;
    let Some(heap) = huge(MOST + 4 * PART, PART) else {
        return;
    };
    let most = heap.allocate(layout(MOST - 3 * PART / 2)).unwrap();
    let backed = heap.backed();
    assert!((MOST - 3 * PART / 2..MOST).contains(&backed));
    // There is room up to there and beyond, but not in one piece.
    let block = heap.allocate(layout(2 * PART)).unwrap();
    assert_eq!(block.offset(), MOST);
    let grown = heap.backed() - backed;
    assert!(
        (2 * PART..2 * PART + Growth::MAX_CHUNK).contains(&grown),
        "{grown}"
    );
    drop(block);
    heap.trim().unwrap();
    heap.reserve(2 * PART).unwrap();
    drop(most);
    heap.trim().unwrap();
    assert_eq!(heap.backed(), 0);
}

#[test]
fn options_that_cannot_be_are_refused() {
    let driver = simulated();
    let options = [
        on(&driver).limit(0),
        on(&driver).limit(2 * MIB - 1),
        on(&driver).chunk(0),
        on(&driver).limit(4 * MIB).reserve(4 * MIB + 1),
    ];
    for options in options {
        let error = options.build(&driver).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    nothing_held(&driver);
    assert!(driver.sim().unwrap().count(Call::MemCreate) == 0);
}

#[test]
fn growth_takes_less_where_there_is_less() {
    let driver = simulated();
    let heap = on(&driver).chunk(64 * MIB).build(&driver).unwrap();
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 1, Code::OUT_OF_MEMORY);
    let block = heap.allocate(layout(MIB)).unwrap();
    assert!(heap.backed() < 64 * MIB, "{}", heap.backed());
    assert!(heap.stats().driver.halvings > 0);
    drop(block);
}

#[test]
fn whatever_call_of_growth_fails_nothing_is_lost() {
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        let driver = simulated();
        let heap = on(&driver).build(&driver).unwrap();
        let sim = driver.sim().unwrap();
        let kept = heap.allocate(layout(7 * MIB)).unwrap();
        kept.fill(9).unwrap();
        for nth in 1..=2 {
            sim.fail(call, nth, Code::UNKNOWN);
            // Fails, or finds another way.
            let _ = heap.allocate(layout(20 * MIB));
            assert_eq!(kept.get::<u8>(7 * MIB - 1).unwrap(), 9);
        }
        let block = heap.allocate(layout(20 * MIB)).unwrap();
        block.fill(1).unwrap();
        drop((block, kept, heap));
        nothing_held(&driver);
    }
}

#[test]
fn chunks_lie_on_several_nodes_in_turn() {
    let heap = spread();
    heap.reserve(64 * MIB).unwrap();
    let nodes: std::collections::BTreeSet<i32> = heap
        .occupancy()
        .chunks
        .iter()
        .map(|chunk| chunk.node.0)
        .collect();
    assert_eq!(nodes.len(), 4);
    let block = heap.allocate(layout(30 * MIB)).unwrap();
    block.fill(3).unwrap();
    assert_eq!(heap.limit(), 64 * MIB);
}

#[test]
fn a_spread_heap_keeps_to_its_shares() {
    let driver = Driver::simulated(Machine::gh200x4()).unwrap();
    let shares = [(0, 8), (2, 56)].map(|(node, mib)| Share {
        node: NodeId(node),
        bytes: mib * MIB,
    });
    let heap = Heap::spread(&shares).build(&driver).unwrap();
    heap.reserve(64 * MIB).unwrap();
    for share in shares {
        let chunks = heap.occupancy().chunks.into_iter();
        let there = chunks.filter(|chunk| chunk.node == share.node);
        let bytes: u64 = there.map(|chunk| chunk.range.end - chunk.range.start).sum();
        assert_eq!(bytes, share.bytes);
    }
    // Not even the sum of these is a number.
    let endless = shares.map(|share| Share {
        bytes: u64::MAX,
        ..share
    });
    assert!(Heap::spread(&endless).build(&driver).is_err());
    assert!(Heap::spread(&[]).build(&driver).is_err());
}

#[test]
fn a_reservation_tells_its_progress_and_may_be_cancelled() {
    for driver in drivers() {
        let heap = on(&driver).build(&driver).unwrap();
        let kept = heap.allocate(layout(MIB)).unwrap();
        let free = 7 * MIB;
        let mut told = Vec::new();
        let done = heap.reserve_with(30 * MIB, |progress| {
            // No lock is held: the heap may be used.
            drop(heap.allocate(layout(64 << 10)).unwrap());
            told.push((progress.done, progress.total));
            ControlFlow::Continue(())
        });
        done.unwrap();
        assert_eq!(told.len(), 3, "{told:?}");
        assert!(told.iter().all(|&(_, total)| total <= 24 * MIB), "{told:?}");
        assert_eq!(heap.trim_to(free), Ok(24 * MIB));
        let error = heap.reserve_with(30 * MIB, |progress| match progress.done {
            0..0x100_0000 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        });
        let error = error.unwrap_err();
        assert!(
            matches!(error, Error::Cancelled { done, .. } if done == 16 * MIB),
            "{error}"
        );
        assert_eq!(heap.backed(), 8 * MIB);
        drop(kept);
    }
}
