//! Threads with shards, as if they had shared the core for long.

use std::alloc::Layout;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;

use super::*;
use crate::driver::{Location, NodeId};
use crate::piece::Kind;
use crate::{Block, Driver, Heap, Machine};

const MIB: u64 = 1 << 20;

fn heap_of(limit: u64) -> Heap {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(limit).build(&driver).unwrap();
    heap.reserve(limit).unwrap();
    heap
}

fn layout(bytes: u64) -> Layout {
    Layout::from_size_align(bytes as usize, 1).unwrap()
}

/// Gives the calling thread a shard.
fn join(heap: &Heap) {
    let opened = member::with(&**heap.inner(), |local| {
        heap.inner().open_shard(local);
        Some(local.shard.is_some())
    });
    assert_eq!(opened, Some(true));
}

fn shard_of(block: &Block) -> u8 {
    block.heap().front.shards.of(block.offset())
}

/// Returns the number of the calling thread's shard, its segments and free bytes.
fn own(heap: &Heap) -> Option<(u8, usize, u64)> {
    member::with(&**heap.inner(), |local| {
        let own = local.shard.as_ref()?;
        assert_eq!(local.bound.shard(), own.shard.free_bytes());
        Some((own.id, own.shard.segments().len(), own.shard.free_bytes()))
    })
}

/// Checks that nothing is lost: with all caches empty, all memory is free and in one range.
fn assert_all_is_free(heap: &Heap) {
    heap.inner().empty_all_caches();
    let stats = heap.stats();
    assert_eq!(
        (stats.live_blocks, stats.free, stats.cached),
        (0, stats.backed, 0)
    );
    assert_eq!(stats.largest_free, stats.backed);
}

#[test]
fn a_thread_divides_segments_and_returns_those_that_are_empty() {
    let heap = heap_of(256 * MIB);
    join(&heap);
    let free = |heap: &Heap| heap.stats().free;
    let early = heap.allocate(layout(MIB + 1)).unwrap();
    let blocks: Vec<Block> = (0..100)
        .map(|_| heap.allocate(layout(MIB)).unwrap())
        .collect();
    let (id, segments, _) = own(&heap).unwrap();
    assert!(blocks.iter().all(|block| shard_of(block) == id));
    assert!((5..25).contains(&segments), "{segments}");
    assert!(free(&heap) < 156 * MIB);
    // Larger blocks and aligned ones are the core's; a large shard has blocks up to 2 MiB.
    let larger = heap.allocate(layout(2 * MIB)).unwrap();
    assert_eq!((shard_of(&early), shard_of(&larger)), (0, id));
    let large = heap.allocate(layout(2 * MIB + 1)).unwrap();
    let aligned = heap
        .allocate(Layout::from_size_align(4096, 4096).unwrap())
        .unwrap();
    assert_eq!((shard_of(&large), shard_of(&aligned)), (0, 0));
    drop((blocks, early, larger, large, aligned));
    let (_, segments, kept) = own(&heap).unwrap();
    assert!(kept <= 24 * MIB && segments <= 3, "{segments}, {kept}");
    assert_all_is_free(&heap);
    assert_eq!(own(&heap), Some((id, 0, 0)));
}

#[test]
fn a_thread_divides_the_pieces_between_other_blocks() {
    let heap = heap_of(64 * MIB);
    let blocks: Vec<Block> = (0..64)
        .map(|_| heap.allocate(layout(MIB)).unwrap())
        .collect();
    let every_other: Vec<Block> = blocks.into_iter().step_by(2).collect();
    assert_eq!(heap.stats().largest_free, MIB);
    join(&heap);
    let id = own(&heap).unwrap().0;
    let small: Vec<Block> = (0..100)
        .map(|_| heap.allocate(layout(100_000)).unwrap())
        .collect();
    assert!(small.iter().all(|block| shard_of(block) == id));
    drop((every_other, small));
    assert_all_is_free(&heap);
}

#[test]
fn what_others_free_returns_to_the_shard() {
    let heap = heap_of(64 * MIB);
    let (send, receive) = mpsc::sync_channel::<Block>(50);
    thread::scope(|scope| {
        scope.spawn(|| receive.into_iter().for_each(drop));
        join(&heap);
        let id = own(&heap).unwrap().0;
        for step in 0..5000 {
            let block = heap.allocate(layout(4000 + step * 37 % 200_000)).unwrap();
            assert!(shard_of(&block) == id || step > 100);
            send.send(block).unwrap();
        }
        drop(send);
    });
    assert_all_is_free(&heap);
}

#[test]
fn a_block_outlives_its_thread_and_its_shard() {
    let heap = heap_of(64 * MIB);
    let of_thread = || {
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                join(&heap);
                let block = heap.allocate(layout(100_000)).unwrap();
                (own(&heap).unwrap().0, shard_of(&block), block)
            });
            thread.join().unwrap()
        })
    };
    let (first, seen, block) = of_thread();
    assert_eq!((seen, shard_of(&block)), (first, 0), "the core has it back");
    let (second, _, other) = of_thread();
    assert_eq!(second, first, "numbers are used again");
    drop((block, other));
    assert_all_is_free(&heap);
}

/// A request that no shard has room for gets all that is free in them and around them.
#[test]
fn no_request_is_refused_for_what_shards_have() {
    let heap = heap_of(64 * MIB);
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                join(&heap);
                let blocks =
                    [3000, 500_000, MIB].map(|bytes| heap.allocate(layout(bytes)).unwrap());
                assert!(blocks.iter().all(|block| shard_of(block) != 0));
                drop(blocks);
                barrier.wait();
                barrier.wait();
                // And works on.
                drop(heap.allocate(layout(3000)).unwrap());
            });
        }
        barrier.wait();
        let core = heap.inner().core().ranges.largest_free();
        assert!(core < 60 * MIB, "segments of three threads are missing");
        let all = heap.allocate(layout(64 * MIB)).unwrap();
        assert!(heap.allocate(layout(1)).is_err());
        drop(all);
        barrier.wait();
    });
    assert_all_is_free(&heap);
}

/// Counts blocks of one shard as freed; returns the shard, and the blocks for its post.
fn free_later(inner: &Arc<HeapInner>, blocks: Vec<Block>) -> (u8, Vec<Extent>) {
    let id = shard_of(&blocks[0]);
    let extent = |block: Block| {
        let piece = block.into_piece();
        inner.note_freed_later(piece.bytes);
        match piece.key.kind() {
            Kind::Range(node) => Extent::new(piece.offset, node, piece.key.granules()),
            Kind::Small(_) => unreachable!(),
        }
    };
    (id, blocks.into_iter().map(extent).collect())
}

/// A thread that frees a block may read that a shard has it just before the shard is dissolved.
#[test]
fn a_block_that_comes_too_late_for_its_shard_is_found() {
    let heap = heap_of(64 * MIB);
    join(&heap);
    let inner = heap.inner();
    for find in [HeapInner::empty_all_caches, |inner: &HeapInner| {
        assert!(inner.occupancy().used.is_empty());
    }] {
        let block = heap.allocate(layout(MIB)).unwrap();
        let id = shard_of(&block);
        assert_ne!(id, 0);
        let (_, late) = free_later(inner, vec![block]);
        inner.empty_all_caches();
        late.into_iter()
            .for_each(|block| inner.front.shards.send_one(id, block));
        assert_eq!(heap.stats().cached, MIB);
        find(inner);
        assert_eq!(heap.stats().free, 64 * MIB);
    }
}

/// More than a cache may hold, as many threads may have sent together.
#[test]
fn no_request_is_refused_for_what_came_too_late_for_a_shard() {
    let heap = heap_of(64 * MIB);
    join(&heap);
    let inner = heap.inner();
    let blocks = (0..16).map(|_| heap.allocate(layout(MIB)).unwrap());
    let (id, late) = free_later(inner, blocks.collect());
    inner.empty_all_caches();
    late.into_iter()
        .for_each(|block| inner.front.shards.send_one(id, block));
    let last = heap.allocate(layout(5000)).unwrap();
    assert_eq!(shard_of(&last), id);
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(last);
            drop(heap.allocate(layout(64 * MIB)).unwrap());
        });
    });
    assert_all_is_free(&heap);
}

#[test]
fn blocks_are_resized_where_their_shard_can() {
    let heap = heap_of(64 * MIB);
    join(&heap);
    let mut block = heap.allocate(layout(100_000)).unwrap();
    assert!(
        block.resize_in_place(500_000),
        "the shard is empty behind it"
    );
    let free = own(&heap).unwrap().2;
    assert!(block.resize_in_place(50_000));
    assert_eq!(own(&heap).unwrap().2, free + 500_224 - 50_176);
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            join(&heap);
            assert!(!block.resize_in_place(100_000), "another thread's");
            assert!(!block.resize_in_place(5000), "another thread's");
            assert_eq!(block.len(), 50_000);
            drop(block);
        });
        other.join().unwrap();
    });
    assert_all_is_free(&heap);
}

#[test]
fn a_heap_ends_with_blocks_in_shards() {
    let heap = heap_of(64 * MIB);
    join(&heap);
    let driver = heap.driver().clone();
    let blocks = [5000, MIB].map(|bytes| heap.allocate(layout(bytes)).unwrap());
    assert!(blocks.iter().all(|block| shard_of(block) != 0));
    drop(heap);
    assert!(blocks.iter().all(|block| shard_of(block) == 0));
    let free = || driver.sim().unwrap().free_bytes(Location::HostNuma(0));
    let before = free();
    drop(blocks);
    assert_eq!(free(), before + 64 * MIB);
}

#[test]
fn a_picture_shows_what_shards_have_as_cached() {
    let heap = heap_of(64 * MIB);
    join(&heap);
    let blocks = [5000, MIB].map(|bytes| heap.allocate(layout(bytes)).unwrap());
    let totals = heap.occupancy().totals();
    assert_eq!(totals.used, 5120 + MIB);
    assert_eq!(totals.used + totals.cached, 4 * MIB);
    let stats = heap.stats();
    assert_eq!((stats.used, stats.cached), (totals.used, totals.cached));
    drop(blocks);
    assert_eq!(heap.occupancy().totals().used, 0);
}

/// Every block has its bytes alone, while segments come and go and other code takes all caches.
#[test]
fn no_two_threads_have_the_same_bytes() {
    const THREADS: u64 = 3;
    let heap = heap_of(96 * MIB);
    let stop = AtomicBool::new(false);
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS)
        .map(|_| mpsc::sync_channel::<(Block, u64)>(10))
        .unzip();
    thread::scope(|scope| {
        let work = (1..).zip(receivers).map(|(name, receiver)| {
            let (heap, senders) = (&heap, &senders);
            scope.spawn(move || {
                join(heap);
                let mut state = name;
                let mut next = |below: u64| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    (state >> 8) % below
                };
                let check = |(block, stamp): &(Block, u64)| {
                    assert_eq!(block.get::<u64>(0).unwrap(), *stamp);
                    assert_eq!(block.get::<u64>(block.len() - 8).unwrap(), !*stamp);
                };
                let mut blocks: Vec<(Block, u64)> = Vec::new();
                for step in 0..4000_u64 {
                    let most = [6000, 100_000, MIB][next(3) as usize];
                    let bytes = 2049 + next(most);
                    let stamp = name << 32 | step;
                    let mut block = heap.allocate(layout(bytes)).unwrap();
                    if next(4) == 0 {
                        let _ = block.resize_in_place(2049 + next(2 * bytes));
                    }
                    block.put(0, stamp).unwrap();
                    block.put(block.len() - 8, !stamp).unwrap();
                    blocks.push((block, stamp));
                    while blocks.len() > 20 {
                        let given = blocks.swap_remove(next(blocks.len() as u64) as usize);
                        check(&given);
                        // A third of them for others to free.
                        if next(3) == 0 {
                            let _ = senders[next(THREADS) as usize].try_send(given);
                        }
                    }
                    receiver.try_iter().for_each(|given| check(&given));
                }
            })
        });
        let work: Vec<_> = work.collect();
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                let totals = heap.occupancy().totals();
                assert_eq!(totals.used + totals.cached + totals.free, totals.backed);
                heap.inner().empty_all_caches();
            }
        });
        let results: Vec<_> = work.into_iter().map(|thread| thread.join()).collect();
        stop.store(true, SeqCst);
        assert!(results.iter().all(Result::is_ok));
    });
    assert_all_is_free(&heap);
}

mod idle;
