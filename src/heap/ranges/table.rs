//! A table that grows in place: an allocation never waits for a copy into a larger one.

use std::alloc::{Layout, handle_alloc_error};
use std::io;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

/// How many bytes become writable, and get memory, at a time. A multiple of all kernel page sizes.
const READY: usize = 64 << 10;

/// Elements in a row, at addresses that are reserved for the maximum. Memory is added as elements are,
/// [`READY`] bytes at a time.
///
/// Several threads may each have a view of the elements, which accesses those that are its own;
/// [`split`](Self::split) says how they come to it. The first view alone adds elements.
pub(super) struct View<T> {
    cells: Cells<T>,
    mapping: Arc<Mapping>,
    /// How many bytes are writable and have memory; `None` in all views but the first.
    ready: Option<usize>,
}

/// The addresses. What lies there is the views'.
struct Mapping {
    start: NonNull<u8>,
    /// This many bytes are reserved.
    room: usize,
}

// SAFETY: through it bytes become writable and get memory, which any thread may have the kernel do, and the last owner unmaps them.
unsafe impl Send for Mapping {}
// SAFETY: the same.
unsafe impl Sync for Mapping {}

/// A part of a table that [`populate`](Self::populate) gives memory, while elements may be added to it.
pub(crate) struct Ahead {
    mapping: Arc<Mapping>,
    bytes: Range<usize>,
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

impl<T: Copy> View<T> {
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
        let start = NonNull::<u8>::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            cells: Cells {
                start: start.cast(),
                len: 0,
            },
            mapping: Arc::new(Mapping { start, room }),
            ready: Some(0),
        })
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
            ready: None,
        }
    }

    /// Makes the elements that `other` can access accessible, to take some of them over.
    pub(super) fn learn(&mut self, other: &Self) {
        self.cells.len = self.cells.len.max(other.cells.len);
    }

    /// Adds `more` elements, each made by `make` from its index. Only for the first view.
    ///
    /// Aborts, as a Vec does, if the kernel has no memory left or the table is full.
    pub(super) fn extend(&mut self, more: usize, make: impl Fn(usize) -> T) {
        let first = self.cells.len;
        let end = first.saturating_add(more).saturating_mul(size_of::<T>());
        if self.ready.is_none_or(|ready| end > ready) {
            match self.ahead(more) {
                Some(ahead) if ahead.populate() => self.populated(&ahead),
                _ => handle_alloc_error(Layout::new::<T>()),
            }
        }
        for index in first..first + more {
            // SAFETY: the addresses up to `end` are writable, as `ready` says; they belong to this table, and no view
            // can access elements beyond the length yet.
            unsafe { self.cells.start.add(index).write(make(index)) };
        }
        self.cells.len += more;
    }

    /// Returns the part to populate before `more` elements are added. `None` if they have memory or there is no room for them,
    /// and for all views but the first.
    pub(super) fn ahead(&self, more: usize) -> Option<Ahead> {
        let ready = self.ready?;
        let end = self.cells.len.saturating_add(more);
        let end = end.checked_mul(size_of::<T>())?;
        let end = end.checked_next_multiple_of(READY)?;
        (ready < end && end <= self.mapping.room).then(|| Ahead {
            mapping: Arc::clone(&self.mapping),
            bytes: ready..end,
        })
    }

    /// Notes that a part of this table is populated. Other parts may have been since it was [taken](Self::ahead).
    pub(super) fn populated(&mut self, ahead: &Ahead) {
        debug_assert!(Arc::ptr_eq(&self.mapping, &ahead.mapping));
        self.ready = self.ready.map(|ready| ready.max(ahead.bytes.end));
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

    /// Returns how many bytes have memory, if this is the first view.
    pub(super) fn bytes(&self) -> usize {
        self.ready.unwrap_or(0)
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

impl Ahead {
    /// Makes the bytes writable, and the kernel provide memory for them: one call takes less than the faults would. Returns
    /// whether they are writable.
    pub(crate) fn populate(&self) -> bool {
        let (start, bytes) = (self.bytes.start, self.bytes.len());
        // SAFETY: the bytes are within the mapping, as `ahead` has checked, and it lives as long as `self`.
        let from = unsafe { self.mapping.start.as_ptr().add(start) };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: as above. Only the table uses the mapping, and it never takes access away: bytes that another thread has
        // made writable meanwhile, and writes, stay so.
        if unsafe { libc::mprotect(from.cast(), bytes, access) } != 0 {
            return false;
        }
        // A kernel that cannot (before Linux 5.14), or has no memory, provides it or fails when it is written.
        // SAFETY: as above; pages that exist stay, with their bytes.
        unsafe { libc::madvise(from.cast(), bytes, libc::MADV_POPULATE_WRITE) };
        true
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this table alone; its elements are Copy, so none needs dropping.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.room) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(most: usize) -> View<u64> {
        View::new(most).unwrap()
    }

    #[test]
    fn elements_stay_where_they_are() {
        let mut table = table(1 << 20);
        table.extend(1, |index| index as u64);
        let first = &raw const table[0];
        for _ in 0..9 {
            table.extend(100_000, |index| index as u64);
        }
        assert_eq!((table.len(), &raw const table[0]), (900_001, first));
        assert!((0..900_001).all(|at| table[at] == at as u64));
        table.elements()[900_000] = 7;
        assert_eq!(table[900_000], 7);
    }

    #[test]
    fn memory_comes_as_it_is_needed_as_far_as_there_is_room() {
        let mut table = table(READY / 8 + 1);
        for (more, bytes) in [(0, 0), (1, READY), (READY / 8 - 1, READY), (1, 2 * READY)] {
            table.extend(more, |_| 1);
            assert_eq!(table.bytes(), bytes);
        }
        assert!(table.ahead(READY / 8 - 1).is_none(), "they have memory");
        assert!(table.ahead(READY / 8).is_none(), "there is no room");
        assert!(table.ahead(usize::MAX).is_none());
    }

    #[test]
    fn a_part_is_populated_while_elements_are_added_to_it() {
        let mut table = table(1 << 20);
        let ahead = table.ahead(READY / 8 * 2).unwrap();
        table.extend(READY / 8 * 3, |index| index as u64);
        assert!(ahead.populate());
        table.populated(&ahead);
        assert_eq!(table.bytes(), 3 * READY);
        assert!((0..READY / 8 * 3).all(|at| table[at] == at as u64));
        let ahead = table.ahead(READY / 8).unwrap();
        drop(table);
        assert!(ahead.populate(), "it keeps the mapping");
    }

    #[test]
    fn views_share_what_is_there_until_the_last_is_gone() {
        let mut one = table(1 << 20);
        one.extend(4, |_| 1);
        // SAFETY: elements 4 to 7 are the other's, the rest the first one's.
        let mut other = unsafe { one.split() };
        one.extend(4, |_| 2);
        other.learn(&one);
        assert!(other.ahead(READY).is_none());
        one[0] = 3;
        other[4] = 5;
        drop(one);
        assert_eq!((other[4], other[7]), (5, 2));
    }

    #[test]
    #[should_panic(expected = "no element 4 of 4")]
    fn an_element_that_does_not_exist_is_not_accessed() {
        let mut table = table(1 << 20);
        table.extend(4, |_| 1);
        table.elements()[4] = 1;
    }

    #[test]
    fn more_than_all_addresses_are_refused() {
        assert!(View::<u64>::new(usize::MAX).is_err());
        assert!(View::<u64>::new(1 << 58).is_err());
    }
}
