//! Blocks as plain numbers.

use std::collections::HashMap;

use super::*;
use crate::driver::NodeId;
use crate::{Driver, Machine};

fn heap() -> Heap {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap()
}

#[test]
fn a_block_without_an_owner_stays_in_use_until_it_has_one_again() {
    let heap = heap();
    for bytes in [1, 100, 2048, 2049, 1 << 20] {
        let layout = Layout::from_size_align(bytes, 1).unwrap();
        let raw = heap.allocate(layout).unwrap().into_raw();
        assert_eq!((raw.bytes, raw.is_small()), (bytes as u64, bytes <= 1024));
        assert_eq!(heap.stats().live_blocks, 1);
        // SAFETY: `into_raw` has just returned it.
        let block = unsafe { Block::from_raw(&heap, raw) };
        assert_eq!((block.offset(), block.len()), (raw.offset, raw.bytes));
        drop(block);
        assert_eq!((heap.stats().live_blocks, heap.stats().live), (0, 0));
    }
}

#[test]
fn all_usable_bytes_can_be_requested_at_the_same_cost() {
    for (bytes, align, usable) in [
        (1, 1, 16),
        (17, 16, 32),
        (129, 1, 144),
        (100, 64, 128),
        (2048, 16, 2048),
        (2049, 16, 2304),
        (4096, 4096, 4096),
    ] {
        let of = |bytes| Heap::usable_size(Layout::from_size_align(bytes, align).unwrap());
        assert_eq!(of(bytes), usable, "{bytes} {align}");
        assert_eq!(of(usable as usize), usable, "{bytes} {align}");
    }
}

#[test]
fn pages_tell_blocks_apart() {
    let heap = heap();
    let mut random = numbers(7);
    let mut live: Vec<RawBlock> = Vec::new();
    for step in 0..4000 {
        if live.len() > 300 {
            let at = random() as usize % live.len();
            let raw = live.swap_remove(at);
            // SAFETY: it was in use and leaves the list.
            drop(unsafe { Block::from_raw(&heap, raw) });
        }
        let bytes = 1 + random() as usize % 6000;
        let layout = Layout::from_size_align(bytes, 16 << (random() % 4)).unwrap();
        live.push(heap.allocate(layout).unwrap().into_raw());
        if step % 8 != 0 {
            continue;
        }
        let mut pages: HashMap<u64, RawBlock> = HashMap::new();
        for &raw in &live {
            if let Some(other) = pages.insert(raw.offset / RawBlock::PAGE, raw) {
                assert!(raw.is_small() && other.is_small() && raw.key == other.key);
            }
        }
    }
    for raw in live {
        // SAFETY: it was in use and leaves the list.
        drop(unsafe { Block::from_raw(&heap, raw) });
    }
    assert_eq!(heap.stats().live_blocks, 0);
}

/// Returns a generator of numbers (xorshift).
fn numbers(mut state: u64) -> impl FnMut() -> u64 {
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 8
    }
}
