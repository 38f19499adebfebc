//! For all requests, contestants give out blocks that are apart and aligned, and take them back.

use std::alloc::Layout;
use std::collections::BTreeMap;

use super::{Contestant, Kind, Room, Shared, SharedVisitor, Visitor};

const CAPACITY: u64 = 64 << 20;
const BLOCKS: u32 = 2000;
const ALIGN: usize = 4096;

fn room() -> Room {
    Room {
        capacity: CAPACITY,
        blocks: BLOCKS,
        align: ALIGN as u64,
    }
}

/// Numbers that look like chance: xorshift.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Blocks of many sizes and alignments come and go.
struct Use;

impl Visitor for Use {
    type Output = ();

    fn visit<C: Contestant + Send + 'static>(self, mut contestant: C) {
        let mut chance = Chance(7);
        let mut live: Vec<(C::Block, Layout)> = Vec::new();
        // From a live block's start to its end.
        let mut ranges: BTreeMap<u64, u64> = BTreeMap::new();
        let mut most = 0;
        for _ in 0..20_000 {
            if live.len() < BLOCKS as usize && chance.below(100) < 60 {
                let align = 1 << chance.below(13);
                let size = 1 + chance.below(20_000) as usize;
                let layout = Layout::from_size_align(size, align).expect("a layout");
                let Some(block) = contestant.allocate(layout) else {
                    continue;
                };
                let start = contestant.start(&block);
                let end = start + size as u64;
                assert_eq!(start % align as u64, 0, "aligned to {align}");
                let before = ranges.range(..end).next_back();
                assert!(before.is_none_or(|(_, &its)| its <= start), "apart");
                ranges.insert(start, end);
                live.push((block, layout));
                most = most.max(live.len());
            } else if !live.is_empty() {
                let index = chance.below(live.len() as u64) as usize;
                let (block, layout) = live.swap_remove(index);
                ranges.remove(&contestant.start(&block));
                // SAFETY: allocated above with this layout.
                unsafe { contestant.free(block, layout) };
            }
        }
        assert!(most > 1000, "{most} blocks at once say too little");
        for (block, layout) in live {
            // SAFETY: allocated above with this layout.
            unsafe { contestant.free(block, layout) };
        }
        // All was given back: there is room for something large.
        let layout = Layout::from_size_align(CAPACITY as usize / 4, 16).expect("a layout");
        let block = contestant.allocate(layout).expect("room when all is free");
        // SAFETY: just allocated with this layout.
        unsafe { contestant.free(block, layout) };
    }
}

#[test]
fn blocks_are_apart_and_aligned() {
    for kind in Kind::available() {
        println!("{kind}");
        kind.with(room(), Use).expect("a contestant");
    }
}

/// One thread allocates, another frees.
struct Pass;

impl SharedVisitor for Pass {
    type Output = ();

    fn visit<S: Shared + Send + 'static>(self, contestant: S) {
        let layout = Layout::from_size_align(1000, 16).expect("a layout");
        let (sender, receiver) = std::sync::mpsc::sync_channel::<S::Block>(100);
        std::thread::scope(|scope| {
            let contestant = &contestant;
            scope.spawn(move || {
                for _ in 0..100_000 {
                    let block = contestant.allocate(layout).expect("room");
                    sender.send(block).expect("a receiver");
                }
            });
            scope.spawn(move || {
                for block in receiver {
                    // SAFETY: allocated by the other thread with this layout.
                    unsafe { contestant.free(block, layout) };
                }
            });
        });
    }
}

#[test]
fn another_thread_frees() {
    for kind in Kind::available() {
        println!("{kind}");
        // 100 000 blocks pass through room for a tenth of them.
        let room = Room {
            capacity: 10 << 20,
            ..room()
        };
        kind.with_shared(room, Pass).expect("a contestant");
    }
}
