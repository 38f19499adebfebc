//! A table that grows in place: an allocation never waits for a copy into a larger one.

use std::alloc::{Layout, handle_alloc_error};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// How many bytes get memory at a time. A multiple of all kernel page sizes.
const READY: usize = 64 << 10;
/// How many bytes become writable at a time: a system call that allocates no memory yet.
const OPEN: usize = 2 << 20;

/// Elements in a row, at addresses that are reserved for the maximum. Memory is added as elements are,
/// [`READY`] bytes at a time.
pub(super) struct Table<T> {
    start: NonNull<T>,
    len: usize,
    /// The kernel has been asked to populate this many bytes.
    ready: usize,
    /// This many bytes are writable.
    open: usize,
    /// This many bytes are reserved.
    room: usize,
    owns: PhantomData<T>,
}

// SAFETY: it owns its elements, as a Vec does.
unsafe impl<T: Send> Send for Table<T> {}
// SAFETY: the same.
unsafe impl<T: Sync> Sync for Table<T> {}

/// Part of a table to populate; the thread that asks the kernel for it needs no lock.
#[derive(Debug)]
pub(crate) struct Ahead {
    start: usize,
    bytes: usize,
    ready: usize,
}

impl<T: Copy> Table<T> {
    /// Creates an empty table for at most `most` elements.
    ///
    /// # Errors
    /// The kernel's error if it has no addresses for them.
    pub(super) fn new(most: usize) -> io::Result<Self> {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= 4096) };
        let room = most
            .checked_mul(size_of::<T>())
            .and_then(|bytes| bytes.checked_next_multiple_of(READY))
            .ok_or(io::ErrorKind::OutOfMemory)?
            .max(READY);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses replaces nothing.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), room, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            start,
            len: 0,
            ready: 0,
            open: 0,
            room,
            owns: PhantomData,
        })
    }

    /// Adds `more` elements, each made by `make` from its index.
    ///
    /// Aborts, as a Vec does, if the kernel has no memory left or the table is full.
    pub(super) fn extend(&mut self, more: usize, make: impl Fn(usize) -> T) {
        let end = self.len.saturating_add(more).saturating_mul(size_of::<T>());
        if end > self.ready {
            self.open(end);
            let ahead = self.ahead(end);
            ahead.populate();
            self.prepared(&ahead);
        }
        for index in self.len..self.len + more {
            // SAFETY: `open` made the addresses up to `end` writable; they belong to this table.
            unsafe { self.start.add(index).write(make(index)) };
        }
        self.len += more;
    }

    /// Returns the part to populate so that `more` further elements have memory; it may be written meanwhile.
    pub(super) fn prepare(&mut self, more: usize) -> Ahead {
        let most = self.room / size_of::<T>();
        let end = self.len.saturating_add(more).min(most) * size_of::<T>();
        self.open(end);
        self.ahead(end)
    }

    /// Notes that `ahead` is populated.
    pub(super) fn prepared(&mut self, ahead: &Ahead) {
        self.ready = self.ready.max(ahead.ready);
    }

    /// Returns how many elements fit in memory that is populated.
    #[inline]
    pub(super) fn spare(&self) -> usize {
        self.ready / size_of::<T>() - self.len
    }

    /// Returns the table's size, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.ready
    }

    fn ahead(&self, end: usize) -> Ahead {
        let ready = end.next_multiple_of(READY);
        Ahead {
            start: self.start.addr().get() + self.ready,
            bytes: ready.saturating_sub(self.ready),
            ready,
        }
    }

    /// Makes the bytes before `end` writable.
    fn open(&mut self, end: usize) {
        if end <= self.open {
            return;
        }
        let start = self.open;
        let open = end.max(start + OPEN).next_multiple_of(READY).min(self.room);
        // SAFETY: within the reserved addresses, where nothing has been written yet.
        let done = end <= self.room
            && unsafe {
                let from = self.start.as_ptr().cast::<u8>().add(start);
                libc::mprotect(
                    from.cast(),
                    open - start,
                    libc::PROT_READ | libc::PROT_WRITE,
                ) == 0
            };
        if !done {
            handle_alloc_error(Layout::new::<T>());
        }
        self.open = open;
    }
}

impl Ahead {
    /// Makes the kernel populate the memory. A kernel that cannot (before Linux 5.14), or has no memory, does
    /// so or fails when the memory is written.
    pub(crate) fn populate(&self) {
        if self.bytes > 0 {
            // SAFETY: the call changes no byte, whatever is mapped at the addresses by now.
            unsafe {
                libc::madvise(self.start as *mut _, self.bytes, libc::MADV_POPULATE_WRITE);
            }
        }
    }
}

impl<T> Deref for Table<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements were written.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Table<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: `len` elements were written, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this table alone; its elements are Copy, so none needs dropping.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.room) };
    }
}

impl<T> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table")
            .field("len", &self.len)
            .field("ready", &self.ready)
            .field("room", &self.room)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(most: usize) -> Table<u64> {
        Table::new(most).unwrap()
    }

    #[test]
    fn elements_stay_where_they_are() {
        let mut table = table(1 << 20);
        table.extend(1, |index| index as u64);
        let first = table.as_ptr();
        for _ in 0..9 {
            table.extend(100_000, |index| index as u64);
        }
        assert_eq!((table.len(), table.as_ptr()), (900_001, first));
        assert!(
            table
                .iter()
                .enumerate()
                .all(|(at, &value)| at as u64 == value)
        );
        table[900_000] = 7;
        assert_eq!(table[900_000], 7);
    }

    #[test]
    fn memory_comes_as_it_is_needed() {
        let mut table = table(1 << 33);
        assert_eq!((table.bytes(), table.spare()), (0, 0));
        table.extend(1, |_| 1);
        assert_eq!((table.bytes(), table.spare()), (READY, READY / 8 - 1));
        table.extend(READY / 8 - 1, |_| 1);
        assert_eq!((table.bytes(), table.spare()), (READY, 0));
        let ahead = table.prepare(READY / 8 + 1);
        assert_eq!((ahead.bytes, table.spare()), (2 * READY, 0));
        ahead.populate();
        table.prepared(&ahead);
        assert_eq!(table.spare(), 2 * READY / 8);
        table.extend(table.spare(), |_| 2);
        assert_eq!(table.bytes(), 3 * READY);
    }

    #[test]
    fn it_is_prepared_as_far_as_there_is_room() {
        let mut table = table(READY / 8 + 1);
        let ahead = table.prepare(usize::MAX);
        ahead.populate();
        table.prepared(&ahead);
        assert_eq!(table.spare(), 2 * READY / 8);
        table.extend(table.spare(), |index| index as u64);
        assert_eq!(table.last(), Some(&(2 * READY as u64 / 8 - 1)));
        assert_eq!(table.prepare(1).bytes, 0);
    }

    #[test]
    fn more_than_all_addresses_are_refused() {
        assert!(Table::<u64>::new(usize::MAX).is_err());
        assert!(Table::<u64>::new(1 << 58).is_err());
    }
}
