//! Blocks that become larger or smaller where they lie.

use egmem::{Block, Stream};

use super::*;

#[test]
fn a_block_takes_free_space_behind_it_and_gives_it_back() {
    for driver in drivers() {
        let heap = on(&driver).limit(8 * MIB).build(&driver).unwrap();
        let mut block = heap.allocate(layout(MIB)).unwrap();
        let wall = heap.allocate(layout(MIB)).unwrap();
        block.fill(1).unwrap();
        wall.fill(2).unwrap();
        assert!(!block.resize_in_place(MIB + 1), "over another block");
        assert_eq!((block.len(), heap.stats().live), (MIB, 2 * MIB));
        drop(wall);
        heap.trim_to(8 * MIB).unwrap(); // takes the threads' caches, and nothing else
        assert!(block.resize_in_place(5 * MIB));
        block.put(5 * MIB - 1, 3_u8).unwrap();
        assert_eq!(block.get::<u8>(MIB - 1).unwrap(), 1);
        assert!(!block.resize_in_place(9 * MIB), "more than there is");
        let rest = heap.allocate(layout(3 * MIB)).unwrap();
        assert_eq!(rest.offset(), 5 * MIB);
        assert!(block.resize_in_place(4 * MIB));
        let stats = heap.stats();
        assert_eq!((stats.live, stats.live_blocks), (7 * MIB, 2));
        assert_eq!(stats.free, MIB);
        assert_eq!(heap.allocate(layout(MIB)).unwrap().offset(), 4 * MIB);
        drop((block, rest));
        assert_eq!(heap.stats().live, 0);
        assert_eq!(heap.allocate(layout(8 * MIB)).unwrap().offset(), 0);
    }
}

/// Chunks come behind the last block, on one node or on several in turn, and no byte of it moves.
#[test]
fn a_block_at_the_end_of_memory_grows_into_reserved_addresses() {
    let driver = simulated();
    for heap in [on(&driver).build(&driver).unwrap(), spread()] {
        let limit = heap.limit();
        let mut block = heap.allocate(layout(MIB)).unwrap();
        block.put(MIB - 8, 7_u64).unwrap();
        let address = block.device_ptr();
        for bytes in [9 * MIB, 9 * MIB + 1, limit / 2, limit] {
            assert!(block.resize_in_place(bytes), "{bytes}");
            block.put(bytes - 1, 9_u8).unwrap();
            assert_eq!((block.device_ptr(), block.len()), (address, bytes));
            let stats = heap.stats();
            assert_eq!((stats.live, stats.live_blocks), (bytes, 1));
            assert!(
                stats.backed < bytes + 8 * MIB,
                "{} for {bytes}",
                stats.backed
            );
        }
        assert_eq!(block.get::<u64>(MIB - 8).unwrap(), 7);
        assert!(!block.resize_in_place(limit + 1));
        assert!(block.resize_in_place(MIB));
        heap.trim().unwrap();
        assert_eq!(heap.backed(), 8 * MIB);
    }
    nothing_held(&driver);
}

#[test]
fn a_block_does_not_grow_over_another_nor_beyond_the_soft_limit() {
    let driver = simulated();
    let refuse = |_: &egmem::heap::Pressure| egmem::heap::Relief::Refuse;
    let heap = on(&driver).soft_limit(16 * MIB, refuse);
    let heap = heap.build(&driver).unwrap();
    let mut block = heap.allocate(layout(MIB)).unwrap();
    assert!(block.resize_in_place(12 * MIB));
    assert!(!block.resize_in_place(17 * MIB));
    assert_eq!((block.len(), heap.backed()), (12 * MIB, 16 * MIB));
    let wall = heap.allocate(layout(3 * MIB)).unwrap();
    assert_eq!(wall.offset(), 12 * MIB, "this tests nothing otherwise");
    assert!(!block.resize_in_place(12 * MIB + 1));
    assert_eq!(heap.backed(), 16 * MIB, "nothing is added in vain");

    // A refusal by the driver leaves all as it was.
    let heap = on(&driver).build(&driver).unwrap();
    let mut block = heap.allocate(layout(8 * MIB)).unwrap();
    let sim = driver.sim().unwrap();
    sim.fail(
        egmem::driver::Call::MemCreate,
        1,
        egmem::driver::Code::NOT_PERMITTED,
    );
    assert!(!block.resize_in_place(9 * MIB));
    assert_eq!((block.len(), heap.backed()), (8 * MIB, 8 * MIB));
    assert!(block.resize_in_place(9 * MIB));
}

#[test]
fn a_small_block_keeps_to_its_class() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut block = heap.allocate(layout(1025)).unwrap();
    assert!(block.resize_in_place(1152));
    assert!(!block.resize_in_place(1153));
    assert!(!block.resize_in_place(0));
    assert!(!block.resize_in_place(u64::MAX));
    assert_eq!(block.len(), 1152);
    assert!(block.resize_in_place(1));
    assert_eq!(heap.stats().live, 1);
    drop(block);
    let stats = heap.stats();
    assert_eq!((stats.live, stats.live_blocks), (0, 0));
}

#[test]
fn bytes_that_a_scrubbing_heap_takes_from_a_block_are_zero() {
    let driver = simulated();
    let heap = on(&driver).scrub_on_free(true).build(&driver).unwrap();
    let mut block = heap.allocate(layout(MIB)).unwrap();
    block.fill(0xaa).unwrap();
    assert!(block.resize_in_place(MIB / 2));
    let rest = heap.allocate(layout(MIB / 2)).unwrap();
    assert_eq!(rest.offset(), MIB / 2, "this tests nothing otherwise");
    for at in (0..MIB / 2).step_by(8) {
        assert_eq!(rest.get::<u64>(at).unwrap(), 0, "at {at}");
    }
    assert_eq!(block.get::<u8>(MIB / 2 - 1).unwrap(), 0xaa);
}

#[test]
fn a_block_of_a_heap_that_is_gone_can_be_resized() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut block = heap.allocate(layout(MIB)).unwrap();
    drop(heap);
    assert!(block.resize_in_place(2 * MIB));
    assert!(block.resize_in_place(100_000));
    block.fill(1).unwrap();
    drop(block);
    nothing_held(&driver);
}

#[cfg(feature = "portable")]
#[test]
fn no_block_grows_out_of_a_chunk_that_is_shared() {
    let driver = simulated();
    let heap = on(&driver).shareable().build(&driver).unwrap();
    heap.reserve(16 * MIB).unwrap();
    let mut block = heap.allocate(layout(MIB)).unwrap();
    let chunk = (block.offset() / (8 * MIB) + 1) * (8 * MIB) - block.offset();
    assert!(block.resize_in_place(chunk));
    assert!(!block.resize_in_place(chunk + 1));
}

#[test]
fn resized_blocks_lie_apart_and_keep_their_bytes() {
    let driver = simulated();
    let heap = on(&driver).limit(32 * MIB).build(&driver).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let mut random = Random(11);
    let mut blocks: Vec<(Block, u8)> = Vec::new();
    let (mut grown, mut shrunk) = (0, 0);
    for round in 0..6000_u64 {
        let most = [2000, 20_000, 2_000_000][random.below(3) as usize];
        let bytes = 1 + random.below(most);
        match random.below(8) {
            0..3 => {
                let Ok(block) = heap.allocate(layout(bytes)) else {
                    blocks.clear();
                    continue;
                };
                block.put(0, round as u8).unwrap();
                blocks.push((block, round as u8));
            }
            3 if !blocks.is_empty() => {
                let which = random.below(blocks.len() as u64) as usize;
                let (block, _) = blocks.swap_remove(which);
                match bytes % 2 {
                    0 => drop(block),
                    _ => block.free_after(&stream).unwrap(),
                }
            }
            _ if !blocks.is_empty() => {
                let which = random.below(blocks.len() as u64) as usize;
                let (block, byte) = &mut blocks[which];
                let (at, old) = (block.offset(), block.len());
                if block.resize_in_place(bytes) {
                    *(if bytes > old { &mut grown } else { &mut shrunk }) += 1;
                    assert_eq!((block.offset(), block.len()), (at, bytes));
                    block.put(bytes - 1, *byte).unwrap();
                } else {
                    assert!(bytes > old, "{old} to {bytes}");
                    assert_eq!(block.len(), old);
                }
                assert_eq!(block.get::<u8>(0).unwrap(), *byte);
            }
            _ => {}
        }
        if round % 500 == 0 {
            let ends = |(block, _): &(Block, u8)| (block.offset(), block.offset() + block.len());
            let mut ranges: Vec<_> = blocks.iter().map(ends).collect();
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        }
    }
    assert!(
        grown > 100 && shrunk > 100,
        "{grown} and {shrunk}: this tests little"
    );
    let live: u64 = blocks.iter().map(|(block, _)| block.len()).sum();
    assert_eq!(heap.stats().live, live);
    drop(blocks);
    heap.collect_all().unwrap();
    assert_eq!(heap.stats().live, 0);
    heap.trim().unwrap();
    assert_eq!(heap.backed(), 0, "something stays in use");
}
