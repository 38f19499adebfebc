//! Blocks that are larger than their requests: a thread's cache gives them out while threads share the core.

use allocator_api2::alloc::Allocator;
use egmem::{Block, Stream};
use proptest::prelude::*;

use super::*;

/// A block of this size serves requests from [`LEAST`] on, of which the smallest rounds up to that.
const HAS: u64 = 2300 * 256;
const LEAST: u64 = 2046 * 256;

fn cycle(heap: &Heap, bytes: u64) {
    drop(heap.allocate(layout(bytes)).unwrap());
}

/// Makes this thread share the core with another one, and cache one block of [`HAS`] bytes; returns its offset.
fn keep_one(heap: &Heap) -> u64 {
    heap.reserve(64 * MIB).unwrap();
    cycle(heap, 8 * MIB);
    std::thread::scope(|scope| scope.spawn(|| cycle(heap, 8 * MIB)).join().unwrap());
    let block = heap.allocate(layout(HAS)).unwrap();
    let offset = block.offset();
    drop(block);
    assert_eq!(heap.stats().cached, HAS);
    offset
}

/// Asserts that a thread caches the whole block, and that the core gets the whole block back.
fn has_all_back(heap: &Heap) {
    let stats = heap.stats();
    assert_eq!((stats.live_blocks, stats.live, stats.cached), (0, 0, HAS));
    assert_eq!(heap.occupancy().totals().cached, HAS);
    let all = heap.allocate(layout(64 * MIB)).unwrap();
    assert_eq!((all.offset(), heap.stats().cached), (0, 0));
}

fn kept() -> (Heap, u64) {
    let driver = simulated();
    let heap = on(&driver).limit(64 * MIB).build(&driver).unwrap();
    let offset = keep_one(&heap);
    (heap, offset)
}

#[test]
fn a_block_takes_all_that_it_has_whatever_was_requested() {
    let (heap, offset) = kept();
    let smaller = heap.allocate(layout(LEAST - 256)).unwrap();
    assert_ne!(
        smaller.offset(),
        offset,
        "it would waste more than an eighth"
    );
    assert_eq!(heap.stats().cached, HAS);
    drop(smaller);
    cycle(&heap, 64 * MIB); // takes what threads keep
    let offset = keep_one(&heap);
    let block = heap.allocate(layout(LEAST)).unwrap();
    assert_eq!((block.offset(), block.len()), (offset, LEAST));
    let stats = heap.stats();
    assert_eq!(
        (stats.live, stats.cached, stats.free),
        (LEAST, 0, 64 * MIB - HAS)
    );
    assert_eq!(heap.occupancy().totals().used, HAS);
    drop(block);
    has_all_back(&heap);
}

#[test]
fn a_block_keeps_what_it_has_without_an_owner_and_behind_gpu_work() {
    let (heap, offset) = kept();
    let raw = heap.allocate(layout(LEAST)).unwrap().into_raw();
    assert_eq!(
        (raw.offset, raw.bytes, raw.is_small()),
        (offset, LEAST, false)
    );
    // SAFETY: `into_raw` has just returned it.
    drop(unsafe { Block::from_raw(&heap, raw) });
    let stream = Stream::new(heap.driver(), 0).unwrap();
    let block = heap.allocate(layout(LEAST)).unwrap();
    assert_eq!(block.offset(), offset);
    block.free_after(&stream).unwrap();
    assert_eq!(heap.occupancy().totals().deferred, HAS);
    heap.collect_all().unwrap();
    assert_eq!((heap.stats().free, heap.stats().cached), (64 * MIB, 0));
}

#[test]
fn a_block_grows_into_what_it_has_and_gives_back_what_it_loses() {
    let (heap, offset) = kept();
    let mut block = heap.allocate(layout(LEAST)).unwrap();
    for bytes in [LEAST + 1, HAS - 1, HAS] {
        assert!(block.resize_in_place(bytes));
        assert_eq!((block.offset(), block.len()), (offset, bytes));
        assert_eq!(
            (heap.stats().live, heap.stats().free),
            (bytes, 64 * MIB - HAS)
        );
    }
    drop(block);
    let mut block = heap.allocate(layout(LEAST)).unwrap();
    assert!(block.resize_in_place(HAS + 1));
    assert_eq!(heap.stats().free, 64 * MIB - HAS - 256);
    assert!(block.resize_in_place(LEAST));
    assert_eq!(heap.stats().free, 64 * MIB - LEAST);
    drop(block);
    assert_eq!(heap.stats().cached, LEAST);
}

#[test]
fn a_block_is_scrubbed_to_its_end() {
    let driver = simulated();
    let options = on(&driver).limit(64 * MIB).scrub_on_free(true);
    let heap = options.build(&driver).unwrap();
    let offset = keep_one(&heap);
    let mut block = heap.allocate(layout(LEAST)).unwrap();
    assert!(block.resize_in_place(HAS));
    block.fill(7).unwrap();
    // What it loses, and what it has beyond its user's bytes.
    assert!(block.resize_in_place(HAS - 4096));
    drop(block);
    let block = heap.allocate(layout(HAS - 8192)).unwrap();
    assert_eq!(block.offset(), offset);
    block.fill(7).unwrap();
    drop(block);
    let all = heap.allocate(layout(64 * MIB)).unwrap();
    assert!((0..HAS / 8).all(|word| all.get::<u64>(offset + word * 8).unwrap() == 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Collections know only their addresses and layouts.
    #[test]
    fn a_collections_block_keeps_what_it_has(
        first in LEAST..=HAS,
        sizes in proptest::collection::vec(LEAST..=HAS, 0..4),
    ) {
        let (heap, offset) = kept();
        let mut memory = Allocator::allocate(&&heap, layout(first)).unwrap().cast::<u8>();
        let address = memory.as_ptr() as u64;
        prop_assert_eq!(address, heap.device_ptr().0 + offset);
        let (mut bytes, mut has) = (first, HAS);
        for new in sizes {
            // SAFETY: the memory is in use with this layout, and only the result is used afterwards.
            memory = unsafe {
                match new >= bytes {
                    true => heap.grow(memory, layout(bytes), layout(new)),
                    false => heap.shrink(memory, layout(bytes), layout(new)),
                }
            }
            .unwrap()
            .cast();
            prop_assert_eq!(memory.as_ptr() as u64, address, "in place");
            let granules = new.next_multiple_of(256);
            has = if new > bytes { has.max(granules) } else { granules };
            bytes = new;
            prop_assert_eq!(heap.occupancy().totals().used, has);
        }
        // SAFETY: the memory is in use with this layout, and is not used afterwards.
        unsafe { heap.deallocate(memory, layout(bytes)) };
        prop_assert_eq!(heap.stats().cached, has);
    }
}
