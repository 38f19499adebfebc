//! Requests that are refused repeatedly while other threads keep blocks.

use std::sync::Barrier;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use egmem::{Backing, Block, Error};

use super::*;

const KIB: u64 = 1 << 10;

/// Returns a heap of 8 MiB, filled with blocks of 64 KiB except for the memory that a thread takes for small blocks.
fn full() -> (Heap, Vec<Block>) {
    full_of(Backing::Auto)
}

fn full_of(backing: Backing) -> (Heap, Vec<Block>) {
    let driver = simulated();
    let heap = on(&driver).backing(backing).limit(8 * MIB);
    let heap = heap.reserve(8 * MIB);
    let heap = heap.build(&driver).unwrap();
    drop(heap.allocate(layout(64)).unwrap());
    let all = std::iter::from_fn(|| heap.allocate(layout(64 * KIB)).ok());
    let blocks = all.collect();
    (heap, blocks)
}

/// How often caches are taken for `refused`, called many times beside a thread that keeps small blocks.
fn takings(heap: &Heap, refused: impl Fn() -> bool) -> u64 {
    let turns = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let few: Vec<Block> = (0..10)
                .filter_map(|_| heap.allocate(layout(64)).ok())
                .collect();
            drop(few);
            turns.wait();
            turns.wait();
        });
        turns.wait();
        let before = heap.stats().cache_takings;
        for round in 0..1000 {
            assert!(refused(), "in round {round}");
        }
        let taken = heap.stats().cache_takings - before;
        turns.wait();
        taken
    })
}

#[test]
fn requests_beyond_the_limit_take_no_cache() {
    let (heap, blocks) = full();
    let taken = takings(&heap, || heap.allocate(layout(MIB)).is_err());
    assert_eq!(taken, 0);
    let taken = takings(&heap, || heap.reserve(4 * MIB).is_err());
    assert_eq!(taken, 0);
    drop(blocks);
    heap.allocate(layout(7 * MIB)).unwrap();
}

#[test]
fn requests_that_fragmentation_refuses_take_the_caches_seldom() {
    let (heap, mut blocks) = full();
    let mut keep = false;
    blocks.retain(|_| {
        keep = !keep;
        keep
    });
    // Enough for it is free, but never in one piece.
    let taken = takings(&heap, || heap.allocate(layout(128 * KIB)).is_err());
    assert!(taken <= 4, "{taken} times");
    // At once when it is there, whichever cache keeps it.
    let (first, second) = (blocks.remove(0), blocks.remove(0));
    thread::scope(|scope| {
        scope.spawn(|| drop(second)).join().unwrap();
    });
    heap.allocate(layout(128 * KIB)).unwrap();
    drop(first);
}

#[test]
fn requests_that_fragmentation_refuses_take_the_caches_seldom_while_others_are_met() {
    for backing in [Backing::Driver, Backing::Registered] {
        let (heap, mut blocks) = full_of(backing);
        let mut keep = false;
        blocks.retain(|_| {
            keep = !keep;
            keep
        });
        let taken = takings(&heap, || {
            drop(heap.allocate(layout(64 * KIB)).unwrap());
            heap.allocate(layout(128 * KIB)).is_err()
        });
        assert!(taken <= 4, "{taken} times with {backing:?}");
        drop(blocks);
        heap.allocate(layout(7 * MIB)).unwrap();
    }
}

#[test]
fn small_blocks_that_no_frame_is_left_for_take_the_caches_seldom() {
    let (heap, mut blocks) = full();
    let mut rest: Vec<Block> = Vec::new();
    // Every hole, and every small block of one class.
    for bytes in [16 * KIB, 4 * KIB, 2304, 500] {
        rest.extend(std::iter::from_fn(|| heap.allocate(layout(bytes)).ok()));
    }
    let taken = takings(&heap, || heap.allocate(layout(500)).is_err());
    assert!(taken <= 4, "{taken} times");
    blocks.pop();
    heap.allocate(layout(500)).unwrap();
}

/// A thread that allocates and frees on orders from the test.
struct Worker {
    orders: Sender<Order>,
    answers: Receiver<Option<Error>>,
}

enum Order {
    Allocate(Layout),
    Free(usize),
}

fn serve(heap: &Heap, orders: &Receiver<Order>, answers: &Sender<Option<Error>>) {
    let mut blocks: Vec<Block> = Vec::new();
    for order in orders {
        let answer = match order {
            Order::Allocate(layout) => heap.allocate(layout).map(|block| blocks.push(block)).err(),
            Order::Free(_) if blocks.is_empty() => None,
            Order::Free(which) => {
                blocks.swap_remove(which % blocks.len());
                None
            }
        };
        if answers.send(answer).is_err() {
            return;
        }
    }
}

/// After a refusal, the core still has no room for the request once it has taken the caches of all threads.
#[test]
fn refused_requests_do_not_fit_after_all_caches_are_taken() {
    let driver = simulated();
    let heap = on(&driver).limit(4 * MIB).reserve(4 * MIB);
    let heap = &heap.build(&driver).unwrap();
    let mut random = Random(29);
    let (mut refused, before) = (0, heap.stats().cache_takings);
    thread::scope(|scope| {
        let workers: Vec<Worker> = (0..3)
            .map(|_| {
                let (orders, to_do) = channel();
                let (done, answers) = channel();
                scope.spawn(move || serve(heap, &to_do, &done));
                Worker { orders, answers }
            })
            .collect();
        for _ in 0..6000 {
            let worker = &workers[random.below(3) as usize];
            let most = [300, 3000, 200_000][random.below(3) as usize];
            let bytes = 1 + random.below(most);
            let order = match random.below(9) {
                0..5 => Order::Allocate(layout(bytes)),
                _ => Order::Free(random.below(1 << 20) as usize),
            };
            worker.orders.send(order).unwrap();
            if worker.answers.recv().unwrap().is_some() {
                refused += 1;
                heap.trim_to(u64::MAX).unwrap();
                let stats = heap.stats();
                let class = stats.classes.iter().find(|class| class.bytes >= bytes);
                let same =
                    class.filter(|class| bytes <= 2048 && class.bytes - bytes <= bytes / 8 + 15);
                assert_eq!(same.map_or(0, |class| class.free), 0, "for {bytes} bytes");
                assert!(bytes <= 2048 || stats.largest_free < bytes.next_multiple_of(256));
            }
        }
    });
    let taken = heap.stats().cache_takings - before - refused; // `trim_to` takes them too
    assert!(refused > 100, "{refused}: this tests nothing");
    println!("{refused} refusals took the caches {taken} times");
}
