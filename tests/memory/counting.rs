//! An allocator that counts: unlike the resident set it is the same in each run, and sees memory that is
//! given back.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

pub struct Counting;

fn more(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(live, Relaxed);
}

// SAFETY: every call is passed on to the system's allocator as it is, whose results are returned; the
// counters do not allocate and do not unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        more(layout.size());
        // SAFETY: the caller keeps to `alloc`'s contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        more(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the block came from `System` by one of these functions, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // For a moment there may be both.
        more(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as for `dealloc`; the caller answers for the new size.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Bytes that are allocated now.
pub fn live() -> usize {
    LIVE.load(Relaxed)
}

/// The most that were allocated since [`reset`].
pub fn peak() -> usize {
    PEAK.load(Relaxed)
}

/// Starts again to look for the most.
pub fn reset() {
    PEAK.store(live(), Relaxed);
}

/// Bytes of this process's own pages that are in memory: heap and stacks, not programs and memory files.
pub fn anonymous() -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix("Anonymous:"));
    let kibibytes = line.unwrap().trim().strip_suffix(" kB").unwrap();
    kibibytes.parse::<usize>().unwrap() << 10
}

/// Gives all pages back to the kernel on which nothing is allocated.
pub fn trim() {
    // SAFETY: it takes the allocator's own locks and touches free memory alone.
    unsafe { libc::malloc_trim(0) };
}
