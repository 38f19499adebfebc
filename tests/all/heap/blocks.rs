//! Blocks: where they lie, and that none touches another.

use egmem::driver::{Access, Call, Code, Location};
use egmem::proof::Prover;
use egmem::{Block, Error, Stream};

use super::*;

#[test]
fn blocks_of_all_sizes_lie_apart_and_keep_their_bytes() {
    for driver in drivers() {
        let heap = on(&driver).build(&driver).unwrap();
        let mut random = Random(7);
        let mut blocks: Vec<(Block, u8)> = Vec::new();
        for round in 0..3000_u64 {
            if random.below(3) < 2 {
                let most = [100, 3000, 70_000, 3_000_000][random.below(4) as usize];
                let bytes = 1 + random.below(most);
                let align = 1 << random.below(13);
                let Ok(block) = heap.allocate(aligned(bytes, align)) else {
                    blocks.clear();
                    continue;
                };
                assert_eq!(block.device_ptr().0 % align, 0);
                assert_eq!(block.len(), bytes);
                assert_eq!(block.device_ptr().0, heap.device_ptr().0 + block.offset());
                let byte = round as u8;
                // Both ends: all of it would take most of the time.
                block.put(0, byte).unwrap();
                block.put(bytes - 1, byte).unwrap();
                blocks.push((block, byte));
            } else if !blocks.is_empty() {
                let which = random.below(blocks.len() as u64) as usize;
                let (block, byte) = blocks.swap_remove(which);
                assert_eq!(block.get::<u8>(0).unwrap(), byte);
                assert_eq!(block.get::<u8>(block.len() - 1).unwrap(), byte);
            }
            if round % 500 == 0 {
                let mut ranges: Vec<_> = blocks
                    .iter()
                    .map(|(block, _)| (block.offset(), block.offset() + block.len()))
                    .collect();
                ranges.sort_unstable();
                assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            }
        }
        let stats = heap.stats();
        assert_eq!(stats.live_blocks, blocks.len() as u64);
        let live: u64 = blocks.iter().map(|(block, _)| block.len()).sum();
        assert_eq!(stats.live, live);
        assert!(stats.used >= live, "{stats:?}");
        drop(blocks);
        assert_eq!(heap.stats().live_blocks, 0);
    }
}

#[test]
fn alignments_up_to_gigabytes_are_those_of_addresses() {
    let driver = simulated();
    let heap = on(&driver).limit(4096 * MIB).build(&driver).unwrap();
    let mut blocks = Vec::new();
    for log in 0..=30 {
        let block = heap.allocate(aligned(100, 1 << log)).unwrap();
        assert_eq!(block.device_ptr().0 % (1 << log), 0, "2^{log}");
        blocks.push(block);
    }
    // The heap backs the bytes of blocks, not those that alignment skips.
    assert!(heap.backed() <= 128 * MIB, "{}", heap.backed());
}

#[test]
fn sizes_are_not_rounded_up_by_more_than_an_eighth() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    for bytes in [129, 1000, 2047, 2049, 4097, 65_537, 1_000_001, 5_000_001] {
        let block = heap.allocate(layout(bytes)).unwrap();
        let stats = heap.stats();
        assert!(stats.used >= bytes);
        assert!((stats.used - bytes) * 8 <= bytes, "{bytes}: {}", stats.used);
        drop(block);
    }
}

#[test]
fn cpu_and_gpu_see_the_same_bytes_in_every_chunk() {
    for driver in drivers() {
        let heap = on(&driver).build(&driver).unwrap();
        let prover = Prover::new(&driver, 0).unwrap();
        let blocks: Vec<Block> = (0..10)
            .map(|_| heap.allocate(aligned(3 * MIB, 4096)).unwrap())
            .collect();
        assert!(heap.backed() >= 30 * MIB);
        for block in &blocks {
            prover.read(block).unwrap();
            prover.write(block, 5).unwrap();
        }
    }
}

#[test]
fn a_refused_wait_for_a_gpus_zeros_is_made_up_for() {
    let driver = simulated();
    let heap = on(&driver).access(Location::Host, Access::None);
    let heap = heap.build(&driver).unwrap();
    let sim = driver.sim().unwrap();
    drop(heap.allocate_zeroed(layout(5000)).unwrap());
    assert_eq!(sim.count(Call::StreamQuery), 0);
    sim.fail(Call::StreamSynchronize, 1, Code::UNKNOWN);
    heap.allocate_zeroed(layout(5000)).unwrap_err();
    assert_eq!(sim.count(Call::StreamQuery), 1);
}

#[test]
fn a_block_that_is_wanted_zeroed_is_zero_whoever_had_it() {
    for driver in drivers() {
        let heap = on(&driver).build(&driver).unwrap();
        for bytes in [48, 5000, 300_000] {
            for _ in 0..3 {
                let block = heap.allocate(layout(bytes)).unwrap();
                block.fill(0xaa).unwrap();
                drop(block);
                let block = heap.allocate_zeroed(layout(bytes)).unwrap();
                let mut found = vec![1_u8; bytes as usize];
                block.read_at(0, &mut found).unwrap();
                assert!(found.iter().all(|&byte| byte == 0));
            }
        }
    }
}

/// The heap zeroes in the relaxed capture mode: in the default mode, waiting for a stream invalidates the captures of
/// other threads.
#[test]
fn a_gpu_zeroes_what_the_cpu_may_not_write_and_spoils_no_capture() {
    for driver in drivers() {
        let options = on(&driver).access(Location::Host, Access::Read);
        let heap = options.build(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let block = heap.allocate(layout(5000)).unwrap();
        // SAFETY: the block is this test's alone.
        unsafe { stream.memset_async(block.device_ptr(), 0xaa, 5000) }.unwrap();
        stream.synchronize().unwrap();
        let at = block.offset();
        drop(block);
        let exchanges = || Some(driver.sim()?.count(Call::ThreadExchangeStreamCaptureMode));
        let before = exchanges();
        let block = heap.allocate_zeroed(layout(5000)).unwrap();
        assert_eq!(
            exchanges(),
            before.map(|before| before + 2),
            "there and back"
        );
        assert_eq!(block.offset(), at, "the same bytes again");
        let mut found = vec![1_u8; 5000];
        block.read_at(0, &mut found).unwrap();
        assert!(found.iter().all(|&byte| byte == 0));
    }
}

#[test]
fn scrubbed_blocks_leave_nothing_to_the_next_owner() {
    for driver in drivers() {
        let heap = on(&driver).scrub_on_free(true).build(&driver).unwrap();
        for bytes in [48, 5000, 300_000, 3_000_000] {
            let block = heap.allocate(layout(bytes)).unwrap();
            block.fill(0xaa).unwrap();
            let at = block.offset();
            drop(block);
            let block = heap.allocate(layout(bytes)).unwrap();
            assert_eq!(
                block.offset(),
                at,
                "the same bytes again, or this tests nothing"
            );
            let mut found = vec![1_u8; bytes as usize];
            block.read_at(0, &mut found).unwrap();
            assert!(found.iter().all(|&byte| byte == 0));
        }
    }
}

#[test]
fn no_bytes_are_refused() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let error = heap.allocate(layout(0)).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
}
