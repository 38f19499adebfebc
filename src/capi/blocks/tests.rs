use std::alloc::Layout;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use egmem::driver::NodeId;
use egmem::{Block, Driver, Heap, Machine};

use super::*;

#[test]
fn a_terabyte_of_entries_takes_no_memory() {
    let table = Blocks::new(1 << 46, false).unwrap();
    let raw = RawBlock {
        offset: (1 << 46) - RawBlock::PAGE,
        bytes: 4096,
        key: 7,
    };
    assert!(table.put(raw));
    assert_eq!(table.take(raw.offset), Some(raw));
}

#[test]
fn more_than_an_address_space_is_an_error() {
    assert!(Blocks::new(u64::MAX, false).is_err());
}

#[test]
fn the_table_has_exactly_the_blocks_in_use() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
    let table = Blocks::new(heap.limit(), false).unwrap();
    let mut random = fastrand::Rng::with_seed(3);
    let mut live: BTreeMap<u64, RawBlock> = BTreeMap::new();
    for step in 0..20_000 {
        if live.len() > 500 || (!live.is_empty() && random.bool()) {
            let index = random.usize(..live.len());
            let (&offset, &raw) = live.iter().nth(index).unwrap();
            assert_eq!(table.take(offset), Some(raw));
            assert_eq!(table.take(offset), None);
            live.remove(&offset);
            // SAFETY: the list had it, so it was in use.
            drop(unsafe { Block::from_raw(&heap, raw) });
        } else {
            let bytes = match random.u8(..3) {
                0 => random.usize(1..=2048),
                1 => random.usize(2049..8000),
                _ => random.usize(1..100_000),
            };
            let layout = Layout::from_size_align(bytes, 16 << random.u8(..5)).unwrap();
            // As `egm_heap` does.
            let usable = match Heap::usable_size(layout) {
                small @ ..=2048 => small as usize,
                _ => bytes,
            };
            let layout = Layout::from_size_align(usable, layout.align()).unwrap();
            let raw = heap.allocate(layout).unwrap().into_raw();
            assert!(table.put(raw));
            live.insert(raw.offset, raw);
        }
        let probe = random.u64(..heap.limit());
        assert_eq!(table.get(probe), live.get(&probe).copied());
        if step % 1000 == 0 {
            assert!(live.values().all(|raw| table.get(raw.offset) == Some(*raw)));
        }
    }
    for raw in live.into_values() {
        // SAFETY: the list had it, so it was in use.
        drop(unsafe { Block::from_raw(&heap, raw) });
    }
}

#[test]
fn beyond_the_limit_there_is_nothing() {
    let table = Blocks::new(1 << 20, false).unwrap();
    assert_eq!(table.take(u64::MAX - 15), None);
    let raw = RawBlock {
        offset: 1 << 40,
        bytes: 4096,
        key: 0,
    };
    assert!(!table.put(raw));
    assert_eq!(table.get(1 << 40), None);
}

#[test]
fn of_two_frees_at_once_one_finds_the_block() {
    let table = Blocks::new(64 << 20, false).unwrap();
    let blocks = (0..64 << 20).step_by(4096).map(|offset| RawBlock {
        offset,
        bytes: 4096,
        key: 1, // of a range
    });
    let blocks: Vec<RawBlock> = blocks.collect();
    for _ in 0..20 {
        assert!(blocks.iter().all(|raw| !raw.is_small() && table.put(*raw)));
        let start = std::sync::Barrier::new(2);
        let free_all = || {
            start.wait();
            let found = blocks.iter().filter(|raw| table.take(raw.offset).is_some());
            found.count()
        };
        let found = std::thread::scope(|scope| {
            let other = scope.spawn(free_all);
            free_all() + other.join().unwrap()
        });
        assert_eq!(found, blocks.len());
    }
}

thread_local! {
    static OTHER_THREAD: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
}

/// Lets "another thread" run just before an entry is read.
pub(super) fn before_an_entry_is_read() {
    if let Some(other) = OTHER_THREAD.take() {
        other();
    }
}

#[test]
fn a_second_free_beside_an_allocation_takes_a_whole_entry() {
    let numbered = |number| RawBlock {
        offset: 4096,
        bytes: 4096 * number,
        key: number,
    };
    let table = Rc::new(Blocks::new(1 << 20, false).unwrap());
    assert!(table.put(numbered(1)));
    let other = Rc::clone(&table);
    OTHER_THREAD.set(Some(Box::new(move || {
        // The first free, and an allocation at the same address.
        if let Some(first) = other.take(4096) {
            assert_eq!(first, numbered(1));
            assert!(other.put(numbered(2)));
        }
    })));
    // Either free may be the first: each takes the table's current block.
    let taken = table.take(4096);
    let left = table.get(4096);
    assert_eq!((taken, left), (Some(numbered(1)), None));
}

#[test]
fn threads_share_a_page_of_small_blocks() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
    let table = Blocks::new(heap.limit(), false).unwrap();
    let layout = Layout::from_size_align(16, 16).unwrap();
    let all: Vec<RawBlock> = (0..256)
        .map(|_| heap.allocate(layout).unwrap().into_raw())
        .collect();
    std::thread::scope(|scope| {
        for part in all.chunks(64) {
            let table = &table;
            scope.spawn(move || {
                for _ in 0..50 {
                    part.iter().for_each(|raw| assert!(table.put(*raw)));
                    part.iter()
                        .for_each(|raw| assert_eq!(table.take(raw.offset), Some(*raw)));
                }
            });
        }
    });
    for raw in all {
        assert_eq!(table.get(raw.offset), None);
        // SAFETY: they are in use; the table only notes them.
        drop(unsafe { Block::from_raw(&heap, raw) });
    }
}
