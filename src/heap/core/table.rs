//! A table that grows in place: an allocation never waits for a copy into a larger one.

use std::alloc::{Layout, handle_alloc_error};
use std::io;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// How many bytes get memory at a time. A multiple of all kernel page sizes.
const READY: usize = 64 << 10;
/// How many bytes become writable at a time: a system call that allocates no memory yet.
const OPEN: usize = 2 << 20;

/// Elements in a row, at addresses that are reserved for the maximum. Memory is added as elements are,
/// [`READY`] bytes at a time.
///
/// Several threads may each have a view of the elements, which accesses those that are its own;
/// [`split`](Self::split) says how they come to it. The first view alone adds elements.
pub(super) struct View<T> {
    cells: Cells<T>,
    mapping: Arc<Mapping<T>>,
}

/// The addresses, and the elements there.
struct Mapping<T> {
    start: NonNull<T>,
    /// This many bytes are reserved.
    room: usize,
    owns: PhantomData<T>,
}

/// How far a table has grown.
pub(super) struct Growth {
    /// The kernel has been asked to populate this many bytes.
    ready: usize,
    /// This many bytes are writable.
    open: usize,
}

/// A table's address and the number of its elements, or of the first of them. In a local variable it is not
/// read again after each write to an element.
#[derive(Clone, Copy)]
struct Cells<T> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: a view is the only one that accesses its elements, as if it owned them. Through the mapping, which
// views share, no element is accessed; they are Copy, so none is dropped.
unsafe impl<T: Send> Send for View<T> {}
// SAFETY: the same; a shared reference to a view only reads.
unsafe impl<T: Sync> Sync for View<T> {}

/// A view's elements, borrowed.
pub(super) struct Elements<'a, T> {
    cells: Cells<T>,
    borrows: PhantomData<&'a mut T>,
}

/// Part of a table to populate; the thread that asks the kernel for it needs no lock.
pub(crate) struct Ahead {
    start: usize,
    bytes: usize,
    ready: usize,
}

impl<T: Copy> View<T> {
    /// Creates an empty table for at most `most` elements.
    ///
    /// # Errors
    /// The kernel's error if it has no addresses for them.
    pub(super) fn new(most: usize) -> io::Result<(Self, Growth)> {
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
        let owns = PhantomData;
        let view = Self {
            cells: Cells { start, len: 0 },
            mapping: Arc::new(Mapping { start, room, owns }),
        };
        Ok((view, Growth { ready: 0, open: 0 }))
    }

    /// Returns another view of the table.
    ///
    /// # Safety
    /// Each element has one view at a time, at first the one that added it; no other accesses it. It gets
    /// another view while one thread has exclusive references to both.
    pub(super) unsafe fn split(&self) -> Self {
        Self {
            cells: self.cells,
            mapping: Arc::clone(&self.mapping),
        }
    }

    /// Makes the elements that `other` can access accessible, to take some of them over.
    pub(super) fn learn(&mut self, other: &Self) {
        self.cells.len = self.cells.len.max(other.cells.len);
    }

    /// Adds `more` elements, each made by `make` from its index. Only for the first view, with its growth.
    ///
    /// Aborts, as a Vec does, if the kernel has no memory left or the table is full.
    pub(super) fn extend(&mut self, growth: &mut Growth, more: usize, make: impl Fn(usize) -> T) {
        let first = self.cells.len;
        let end = first.saturating_add(more).saturating_mul(size_of::<T>());
        if end > growth.ready {
            self.open(growth, end);
            let ahead = self.ahead(growth, end);
            ahead.populate();
            growth.prepared(&ahead);
        }
        for index in first..first + more {
            // SAFETY: `open` made the addresses up to `end` writable; they belong to this table, and no view
            // can access elements beyond the length yet.
            unsafe { self.cells.start.add(index).write(make(index)) };
        }
        self.cells.len += more;
    }

    /// Returns how many elements there are, in all views, if this is the first.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.cells.len
    }

    /// Returns whether at most half of the elements that fit exist, in all views, if this is the first.
    pub(super) fn is_half_empty(&self) -> bool {
        self.len() <= self.mapping.room / size_of::<T>() / 2
    }

    /// Returns the part to populate so that `more` further elements have memory; it may be written meanwhile.
    pub(super) fn prepare(&self, growth: &mut Growth, more: usize) -> Ahead {
        let most = self.mapping.room / size_of::<T>();
        let end = self.len().saturating_add(more).min(most) * size_of::<T>();
        self.open(growth, end);
        self.ahead(growth, end)
    }

    /// Returns how many elements fit in memory that is populated.
    #[inline]
    pub(super) fn spare(&self, growth: &Growth) -> usize {
        growth.ready / size_of::<T>() - self.len()
    }

    fn ahead(&self, growth: &Growth, end: usize) -> Ahead {
        let ready = end.next_multiple_of(READY);
        Ahead {
            start: self.cells.start.addr().get() + growth.ready,
            bytes: ready.saturating_sub(growth.ready),
            ready,
        }
    }

    /// Makes the bytes before `end` writable.
    fn open(&self, growth: &mut Growth, end: usize) {
        if end <= growth.open {
            return;
        }
        let (start, room) = (growth.open, self.mapping.room);
        let open = end.max(start + OPEN).next_multiple_of(READY).min(room);
        // SAFETY: within the reserved addresses, where nothing has been written yet.
        let done = end <= room
            && unsafe {
                let from = self.cells.start.as_ptr().cast::<u8>().add(start);
                libc::mprotect(
                    from.cast(),
                    open - start,
                    libc::PROT_READ | libc::PROT_WRITE,
                ) == 0
            };
        if !done {
            handle_alloc_error(Layout::new::<T>());
        }
        growth.open = open;
    }

    /// Borrows the elements.
    #[inline]
    pub(super) fn elements(&mut self) -> Elements<'_, T> {
        Elements {
            cells: self.cells,
            borrows: PhantomData,
        }
    }
}

impl<T: Copy> Cells<T> {
    #[inline]
    fn at(self, index: usize) -> NonNull<T> {
        if index >= self.len {
            no_element(index, self.len);
        }
        // SAFETY: elements before `len` are in the mapping.
        unsafe { self.start.add(index) }
    }
}

/// Panics. Takes values: an `assert!` at each access would take references, for which the index, the address and the
/// length are stored on the stack before each check.
#[cold]
#[inline(never)]
#[track_caller]
fn no_element(index: usize, len: usize) -> ! {
    panic!("no element {index} of {len}");
}

impl<T: Copy> Index<usize> for View<T> {
    type Output = T;

    #[inline]
    fn index(&self, index: usize) -> &T {
        // SAFETY: elements before `len` were written and stay mapped while this view exists. This one is the
        // view's own, as `split` says, and the view is borrowed.
        unsafe { self.cells.at(index).as_ref() }
    }
}

impl<T: Copy> IndexMut<usize> for View<T> {
    #[inline]
    fn index_mut(&mut self, index: usize) -> &mut T {
        // SAFETY: as in `index`; the view is borrowed mutably.
        unsafe { self.cells.at(index).as_mut() }
    }
}

impl<T: Copy> Index<usize> for Elements<'_, T> {
    type Output = T;

    #[inline]
    fn index(&self, index: usize) -> &T {
        // SAFETY: as for the view, which is borrowed mutably while this exists.
        unsafe { self.cells.at(index).as_ref() }
    }
}

impl<T: Copy> IndexMut<usize> for Elements<'_, T> {
    #[inline]
    fn index_mut(&mut self, index: usize) -> &mut T {
        // SAFETY: as in `index`; this is borrowed mutably.
        unsafe { self.cells.at(index).as_mut() }
    }
}

impl Growth {
    /// Notes that `ahead` is populated.
    pub(super) fn prepared(&mut self, ahead: &Ahead) {
        self.ready = self.ready.max(ahead.ready);
    }

    /// Returns the table's size, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.ready
    }
}

impl Ahead {
    /// Makes the kernel populate the memory. A kernel that cannot (before Linux 5.14), or has no memory, does
    /// so or fails when the memory is written.
    pub(crate) fn populate(&self) {
        if self.bytes > 0 {
            // SAFETY: the call changes no byte, even if other memory is mapped at the addresses by now.
            unsafe {
                libc::madvise(self.start as *mut _, self.bytes, libc::MADV_POPULATE_WRITE);
            }
        }
    }
}

impl<T> Drop for Mapping<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this table alone; its elements are Copy, so none needs dropping.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.room) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(most: usize) -> (View<u64>, Growth) {
        View::new(most).unwrap()
    }

    #[test]
    fn elements_stay_where_they_are() {
        let (mut table, mut growth) = table(1 << 20);
        table.extend(&mut growth, 1, |index| index as u64);
        let first = &raw const table[0];
        for _ in 0..9 {
            table.extend(&mut growth, 100_000, |index| index as u64);
        }
        assert_eq!((table.len(), &raw const table[0]), (900_001, first));
        assert!((0..900_001).all(|at| table[at] == at as u64));
        table.elements()[900_000] = 7;
        assert_eq!(table[900_000], 7);
    }

    #[test]
    fn memory_comes_as_it_is_needed() {
        let (mut table, mut growth) = table(1 << 33);
        assert_eq!((growth.bytes(), table.spare(&growth)), (0, 0));
        table.extend(&mut growth, 1, |_| 1);
        assert_eq!(
            (growth.bytes(), table.spare(&growth)),
            (READY, READY / 8 - 1)
        );
        table.extend(&mut growth, READY / 8 - 1, |_| 1);
        assert_eq!((growth.bytes(), table.spare(&growth)), (READY, 0));
        let ahead = table.prepare(&mut growth, READY / 8 + 1);
        assert_eq!((ahead.bytes, table.spare(&growth)), (2 * READY, 0));
        ahead.populate();
        growth.prepared(&ahead);
        assert_eq!(table.spare(&growth), 2 * READY / 8);
        table.extend(&mut growth, 2 * READY / 8, |_| 2);
        assert_eq!((growth.bytes(), table.spare(&growth)), (3 * READY, 0));
    }

    #[test]
    fn it_is_prepared_as_far_as_there_is_room() {
        let (mut table, mut growth) = table(READY / 8 + 1);
        let ahead = table.prepare(&mut growth, usize::MAX);
        ahead.populate();
        growth.prepared(&ahead);
        assert_eq!(table.spare(&growth), 2 * READY / 8);
        table.extend(&mut growth, 2 * READY / 8, |index| index as u64);
        assert_eq!(table[2 * READY / 8 - 1], 2 * READY as u64 / 8 - 1);
        assert_eq!(table.prepare(&mut growth, 1).bytes, 0);
    }

    #[test]
    fn views_share_what_is_there_until_the_last_is_gone() {
        let (mut one, mut growth) = table(1 << 20);
        one.extend(&mut growth, 4, |_| 1);
        // SAFETY: elements 4 to 7 are the other's, the rest the first one's.
        let mut other = unsafe { one.split() };
        one.extend(&mut growth, 4, |_| 2);
        other.learn(&one);
        one[0] = 3;
        other[4] = 5;
        drop(one);
        assert_eq!((other[4], other[7]), (5, 2));
    }

    #[test]
    #[should_panic(expected = "no element 4 of 4")]
    fn an_element_that_does_not_exist_is_not_accessed() {
        let (mut table, mut growth) = table(1 << 20);
        table.extend(&mut growth, 4, |_| 1);
        table.elements()[4] = 1;
    }

    #[test]
    fn more_than_all_addresses_are_refused() {
        assert!(View::<u64>::new(usize::MAX).is_err());
        assert!(View::<u64>::new(1 << 58).is_err());
    }
}
