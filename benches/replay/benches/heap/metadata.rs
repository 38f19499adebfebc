//! The size of the contestants' own metadata.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use crate::entrant::Entrant;
use egmem_replay::contestants::{Contestant, Room, Visitor};

/// std's allocator, which counts live bytes on request.
pub struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicI64 = AtomicI64::new(0);

fn count(bytes: i64) {
    if COUNTS.load(Ordering::Relaxed) {
        LIVE.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: all is std's allocator's; counting touches no memory of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// The overhead of a contestant's metadata.
#[derive(Debug, Clone, Copy)]
pub struct Metadata {
    /// Beside the managed memory: the bytes taken from Rust's allocator and mapped, for each byte that lives.
    pub outside: f64,
    /// Within it: the span for each byte that lives, less one.
    pub inside: f64,
    /// Beside the managed memory again, when every other block was freed.
    pub outside_among_holes: f64,
}

/// `blocks` live blocks of 4 KiB, then half of them.
///
/// The mapped part of the metadata is the contestant's own figure: only the allocators know where glibc,
/// mimalloc and UMF keep theirs.
///
/// # Errors
/// If the contestant cannot be made.
pub fn measure(kind: Entrant, blocks: u32) -> io::Result<Metadata> {
    let room = Room {
        capacity: u64::from(blocks) * 4096 * 5 / 4 + (64 << 20),
        blocks,
        align: 16,
    };
    let before = LIVE.swap(0, Ordering::Relaxed);
    COUNTS.store(true, Ordering::Relaxed);
    let result = kind.with(room, BuildUp(blocks));
    COUNTS.store(false, Ordering::Relaxed);
    LIVE.store(before, Ordering::Relaxed);
    result
}

struct BuildUp(u32);

impl Visitor for BuildUp {
    type Output = Metadata;

    fn visit<C: Contestant + Send + 'static>(self, mut contestant: C) -> Metadata {
        let layout = Layout::from_size_align(4096, 16).expect("a layout");
        COUNTS.store(false, Ordering::Relaxed);
        // These lists are this function's, not the contestant's.
        let mut blocks = Vec::with_capacity(self.0 as usize);
        let mut others = Vec::with_capacity(self.0 as usize);
        COUNTS.store(true, Ordering::Relaxed);
        for _ in 0..self.0 {
            blocks.push(contestant.allocate(layout).expect("room for a block"));
        }
        let live = f64::from(self.0) * 4096.0;
        let books =
            |contestant: &C| LIVE.load(Ordering::Relaxed) as f64 + contestant.mapped() as f64;
        let outside = books(&contestant) / live;
        let starts = || blocks.iter().map(|block| contestant.start(block));
        let span = starts().max().unwrap_or(0) + 4096 - starts().min().unwrap_or(0);
        let free = |contestant: &mut C, block| {
            // SAFETY: allocated above with this layout.
            unsafe { contestant.free(block, layout) }
        };
        for (index, block) in blocks.drain(..).enumerate() {
            if index % 2 == 0 {
                others.push(block);
            } else {
                free(&mut contestant, block);
            }
        }
        let outside_among_holes = books(&contestant) / (live / 2.0);
        others
            .drain(..)
            .for_each(|block| free(&mut contestant, block));
        Metadata {
            outside,
            inside: span as f64 / live - 1.0,
            outside_among_holes,
        }
    }
}
