//! Heaps that end while their background thread collects, scrubs and grows. A use of memory after it is
//! unmapped faults, or writes into a heap that was built at the same addresses meanwhile.

use std::thread;
use std::time::{Duration, Instant};

use egmem::heap::DebugOptions;
use egmem::{Block, Memory, Stream};

use super::*;

/// Rounds of each thread and kind of heap. CI runs fewer where programs are slow.
fn rounds() -> u64 {
    let cases = std::env::var("PROPTEST_CASES");
    cases
        .ok()
        .and_then(|cases| cases.parse().ok())
        .map_or(16, |cases: u64| cases.min(16))
}

/// The treatment of freed blocks' bytes by a heap.
#[derive(Clone, Copy)]
struct Kind {
    scrub: bool,
    debug: bool,
}

const KINDS: [Kind; 3] = [
    Kind {
        scrub: true,
        debug: false,
    },
    Kind {
        scrub: false,
        debug: true,
    },
    Kind {
        scrub: true,
        debug: true,
    },
];

impl Kind {
    /// A heap whose background thread is at work from its beginning to its end: it never has as much free
    /// memory as it is to have.
    fn busy_heap(self, driver: &Driver) -> Heap {
        let mut options = on(driver)
            .limit(64 * MIB)
            .chunk(2 * MIB)
            .reserve(8 * MIB)
            .grow_ahead(64 * MIB)
            .scrub_on_free(self.scrub);
        if self.debug {
            options = options.debug(DebugOptions::new().quarantine(MIB));
        }
        options.build(driver).unwrap()
    }
}

/// A heap with a live block, built where another one was a moment ago.
struct Neighbour {
    block: Block,
    pattern: u8,
}

impl Neighbour {
    fn new(driver: &Driver, pattern: u8) -> Self {
        let heap = on(driver)
            .limit(64 * MIB)
            .chunk(2 * MIB)
            .build(driver)
            .unwrap();
        let block = heap.allocate(layout(2 * MIB)).unwrap();
        block.fill(pattern).unwrap();
        Self { block, pattern }
    }

    fn check(&self) {
        let mut bytes = vec![0; self.block.len() as usize];
        self.block.read_at(0, &mut bytes).unwrap();
        let wrong = bytes.iter().position(|&byte| byte != self.pattern);
        assert_eq!(wrong, None, "another heap's block is written to");
    }
}

/// Where in a heap's life its last handle is dropped, and which blocks it leaves.
fn live_and_end(driver: &Driver, kind: Kind, random: &mut Random) {
    let stream = Stream::new(driver, 0).unwrap();
    let heap = kind.busy_heap(driver);
    let mut blocks: Vec<Block> = (0..random.below(8))
        .filter_map(|_| heap.allocate(layout(1 + random.below(MIB / 2))).ok())
        .collect();
    let stays = match random.below(3) {
        0 => blocks.pop(),
        _ => None,
    };
    for block in blocks {
        // SAFETY: the block is freed after the stream's work.
        unsafe { stream.memset_async(Memory::device_ptr(&block), 0xEE, block.len()) }.unwrap();
        block.free_after(&stream).unwrap();
    }
    if random.below(2) == 0 {
        stream.synchronize().unwrap();
    }
    let until = Instant::now() + Duration::from_micros(random.below(1000));
    while Instant::now() < until {
        thread::yield_now();
    }
    let other = heap.clone();
    let last = match random.below(3) {
        // Another thread is inside of the heap when this one drops its handle.
        0 => Some(thread::spawn(move || drop((other.collect(), other)))),
        _ => {
            drop(other);
            None
        }
    };
    drop(heap);
    // Whichever of these two comes last ends the heap.
    drop(stays);
    if let Some(last) = last {
        last.join().unwrap();
    }
}

fn heaps_end_beside_each_other(kind: Kind) {
    let driver = simulated();
    thread::scope(|scope| {
        for number in 1..=3_u64 {
            let driver = &driver;
            scope.spawn(move || {
                let mut random = Random(number * 0x9E37_79B9);
                let mut neighbour = Neighbour::new(driver, number as u8);
                for round in 0..rounds() {
                    live_and_end(driver, kind, &mut random);
                    let next = Neighbour::new(driver, (round + 2) as u8);
                    std::mem::replace(&mut neighbour, next).check();
                }
                neighbour.check();
            });
        }
    });
    nothing_held(&driver);
}

#[test]
fn a_heap_that_scrubs_ends_without_touching_unmapped_memory() {
    heaps_end_beside_each_other(KINDS[0]);
}

#[test]
fn a_heap_in_debug_mode_ends_without_touching_unmapped_memory() {
    heaps_end_beside_each_other(KINDS[1]);
}

#[test]
fn a_heap_that_scrubs_in_debug_mode_ends_without_touching_unmapped_memory() {
    heaps_end_beside_each_other(KINDS[2]);
}
