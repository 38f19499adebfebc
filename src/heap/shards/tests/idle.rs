//! Free memory in shards, while the heap grows and gives memory back.

use std::time::Duration;

use super::*;
use crate::grower::Decay;

#[test]
fn a_heap_grows_until_a_quarter_of_it_is_free_in_shards() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let options = Heap::on(NodeId(0)).limit(64 * MIB).chunk(4 * MIB);
    let heap = &options.build(&driver).unwrap();
    heap.reserve(32 * MIB).unwrap();
    let allocate = |bytes| heap.allocate(layout(bytes)).unwrap();
    let (send, receive) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            join(heap);
            (0..10).for_each(|_| send.send(allocate(MIB)).unwrap());
            assert_eq!(own(heap).unwrap().2, 2 * MIB, "of three segments");
            drop(send);
            let _ = ended.recv();
        });
        let _end = end;
        let mut shards = receive.iter().collect::<Vec<Block>>();
        let mut blocks: Vec<Block> = (0..10).map(|_| allocate(2 * MIB)).collect();
        assert_eq!(heap.stats().free, 0);
        let takings = || heap.stats().cache_takings;
        let before = takings();
        // 6 MiB are free in the shard, then 10.
        shards.truncate(6);
        blocks.extend((0..2).map(|_| allocate(2 * MIB)));
        assert_eq!((heap.backed(), takings()), (36 * MIB, before));
        shards.truncate(2);
        blocks.push(allocate(2 * MIB));
        assert_eq!((heap.backed(), takings()), (36 * MIB, before + 1));
    });
}

/// The core has nothing free: all idle memory lies in the shard and its post.
#[test]
fn idle_memory_in_shards_goes_back_to_the_machine() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let options = Heap::on(NodeId(0)).limit(64 * MIB).chunk(4 * MIB);
    let heap = options.build(&driver).unwrap();
    heap.reserve(64 * MIB).unwrap();
    join(&heap);
    let allocate = |bytes| heap.allocate(layout(bytes)).unwrap();
    let mut own: Vec<Block> = (0..20).map(|_| allocate(MIB)).collect();
    assert!(own.iter().all(|block| shard_of(block) != 0));
    let rest: Vec<Block> = (0..22).map(|_| allocate(2 * MIB)).collect();
    assert_eq!(heap.stats().free, 0);
    let mut decay = Decay::new(Duration::from_secs(8), 0, 0);
    let mut look = || {
        decay.look(heap.inner());
        heap.backed() / MIB
    };
    // Free whenever the heap is looked at, but needed in between.
    for _ in 0..40 {
        own.truncate(12);
        assert_eq!(look(), 64);
        own.extend((0..8).map(|_| allocate(MIB)));
    }
    let last = own.pop();
    thread::scope(|scope| {
        scope.spawn(|| drop(own));
    });
    let mut idle = || (0..40).map(|_| look()).last();
    assert_eq!(idle(), Some(48), "one block holds its chunk");
    drop((last, rest));
    assert_eq!(idle(), Some(0));
}
