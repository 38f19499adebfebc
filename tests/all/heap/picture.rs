//! The picture of where blocks lie.

use egmem::{Block, Memory, Stream};

use super::*;

#[test]
fn blocks_in_use_kept_and_waiting_are_told_apart() {
    for driver in drivers() {
        let heap = on(&driver).build(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let freed: Vec<Block> = (0..40)
            .flat_map(|_| [100, 5000])
            .map(|bytes| heap.allocate(layout(bytes)).unwrap())
            .collect();
        let small = heap.allocate(layout(100)).unwrap();
        let large = heap.allocate(layout(5000)).unwrap();
        let waits = heap.allocate(layout(MIB)).unwrap();
        let at = waits.offset();
        waits.free_after(&stream).unwrap();
        drop(freed);
        let picture = heap.occupancy();
        let totals = picture.totals();
        assert_eq!(totals.used, 112 + 5120);
        for block in [&small, &large] {
            let begins = |range: &&std::ops::Range<u64>| range.contains(&block.offset());
            assert_eq!(picture.used.iter().filter(begins).count(), 1);
        }
        assert_eq!(picture.deferred.len(), 1);
        assert_eq!(picture.deferred[0], at..at + MIB);
        let stats = heap.stats();
        assert!(totals.cached > 40 * 112, "{totals:?}");
        assert_eq!(totals.cached, stats.cached);
        let all = totals.used + totals.cached + totals.deferred + totals.free;
        assert_eq!(all, totals.backed);
        stream.synchronize().unwrap();
        heap.trim().unwrap();
        let totals = heap.occupancy().totals();
        assert_eq!((totals.cached, totals.deferred), (0, 0));
        assert_eq!(totals.used, 112 + 5120);
    }
}

#[test]
fn caches_of_other_threads_are_shown_as_kept_too() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let (send, receive) = std::sync::mpsc::channel::<()>();
    let (ready, wait) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let heap = &heap;
        scope.spawn(move || {
            drop(heap.allocate(layout(10_000)).unwrap());
            ready.send(()).unwrap();
            receive.recv().unwrap();
        });
        wait.recv().unwrap();
        let totals = heap.occupancy().totals();
        assert_eq!((totals.used, totals.deferred), (0, 0));
        assert!(totals.cached >= 10_000);
        send.send(()).unwrap();
    });
}

#[test]
fn a_block_of_a_spread_heap_lies_where_its_chunk_does() {
    let heap = spread();
    let blocks: Vec<Block> = (0..10)
        .map(|_| heap.allocate(layout(3 * MIB)).unwrap())
        .collect();
    let chunks = heap.occupancy().chunks;
    let mut nodes = std::collections::HashSet::new();
    for block in &blocks {
        let chunk = chunks
            .iter()
            .find(|chunk| chunk.range.contains(&block.offset()))
            .unwrap();
        assert_eq!(block.location(), chunk.node.into());
        nodes.insert(chunk.node);
    }
    assert!(nodes.len() > 1, "{nodes:?}");
}
