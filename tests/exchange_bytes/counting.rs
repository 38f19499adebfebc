//! An allocator that counts: unlike the resident set it is the same in each run, under sanitizers and
//! emulators too, and sees memory that is given back.

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

/// Pages of this process that are in memory, in bytes; `None` where they say nothing: sanitizers and
/// emulators have their own beside the program's.
pub fn resident() -> Option<usize> {
    let odd = ["EGMEM_TEST_RUNNER", "EGMEM_SANITIZER"];
    if odd.iter().any(|name| std::env::var_os(name).is_some()) {
        return None;
    }
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: usize = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes << 10)
}
