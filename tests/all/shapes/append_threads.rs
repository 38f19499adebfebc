//! The work of a kernel's threads on an appender, done by threads of the CPU: `egmem_append.cuh` in Rust.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use egmem::driver::DevicePtr;

const CLOSED: u64 = 1 << 63;

/// A record, which the CPU's threads write as two words.
pub type Record = [u64; 2];

/// Returns the record that an item makes.
pub fn record(item: u64) -> Record {
    [item, !item]
}

/// An appender's counters at its address.
#[derive(Clone, Copy)]
pub struct Threads {
    control: DevicePtr,
    records: DevicePtr,
    cursor: DevicePtr,
    shift: u64,
}

/// # Safety
/// The word at `address` is mapped for the CPU while the result is used.
unsafe fn word<'a>(address: DevicePtr) -> &'a AtomicU64 {
    let at = std::ptr::with_exposed_provenance_mut(address.0 as usize);
    // SAFETY: the caller's promise.
    unsafe { AtomicU64::from_ptr(at) }
}

impl Threads {
    /// # Safety
    /// `control` is the address of an appender that lives as long as the result is used, and whose counters and records
    /// the CPU may access.
    pub unsafe fn open(control: DevicePtr) -> Self {
        // SAFETY: the caller's promise.
        let constant = |n: u64| unsafe { word(control.add(256 + 8 * n)) }.load(Relaxed);
        assert_eq!(constant(0), u64::from_le_bytes(*b"EGMAPND1"));
        assert_eq!(constant(2), size_of::<Record>() as u64);
        Self {
            control,
            records: DevicePtr(constant(1)),
            cursor: DevicePtr(constant(3)),
            shift: constant(4),
        }
    }

    /// Returns the address of the cursor's counters.
    pub fn cursor(&self) -> DevicePtr {
        self.cursor
    }

    pub fn end(&self) -> &AtomicU64 {
        // SAFETY: as `open` was promised.
        unsafe { word(self.control) }
    }

    pub fn wanted(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { word(self.control.add(128)) }
    }

    pub fn next(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { word(self.cursor) }
    }

    pub fn limit(&self) -> &AtomicU64 {
        // SAFETY: as above.
        unsafe { word(self.cursor.add(128)) }
    }

    fn want(&self, records: u64) {
        if self.wanted().load(Acquire) < records {
            self.wanted().store(records, Release);
        }
    }

    fn reserve(&self, count: u64) -> u64 {
        let first = self.next().fetch_add(count, Relaxed);
        if first >> self.shift != (first + count) >> self.shift {
            self.want(first + count);
        }
        first
    }

    fn look(&self, limit: u64, late: bool) {
        let end = self.end().load(Acquire);
        if end & !CLOSED > limit {
            // Not by fetch_max, which ThreadSanitizer does not see.
            let larger = |known: u64| (known < end & !CLOSED).then_some(end & !CLOSED);
            let _ = self.limit().fetch_update(AcqRel, Acquire, larger);
        } else if end & CLOSED != 0 || late {
            self.limit().fetch_or(CLOSED, AcqRel);
        } else {
            self.want(self.next().load(Acquire));
        }
    }

    fn has_memory(&self, index: u64, patience: Duration) -> bool {
        let start = Instant::now();
        loop {
            let limit = self.limit().load(Acquire);
            if index < limit & !CLOSED {
                return true;
            }
            if limit & CLOSED != 0 {
                return false;
            }
            let late = start.elapsed() >= patience;
            if index == limit || late {
                self.look(limit, late);
            }
            std::thread::yield_now();
        }
    }

    /// Appends the items' records, reserved together; returns for each whether it was written.
    pub fn append(&self, items: &[u64], patience: Duration) -> Vec<bool> {
        let first = self.reserve(items.len() as u64);
        let each = (first..).zip(items).map(|(index, &item)| {
            let came = self.has_memory(index, patience);
            if came {
                let at = self.records.add(index * size_of::<Record>() as u64);
                for (n, value) in record(item).into_iter().enumerate() {
                    // SAFETY: the record has memory, which the appender keeps.
                    unsafe { word(at.add(8 * n as u64)) }.store(value, Relaxed);
                }
            }
            came
        });
        each.collect()
    }
}
