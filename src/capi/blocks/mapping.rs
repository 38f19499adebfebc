//! Values in a mapping of their own: all zero at first, and without memory until they are written.

use std::io;
use std::marker::PhantomData;
use std::ptr::{NonNull, null_mut};

/// Types of which zeros are a value.
///
/// # Safety
/// Zeros are a value of the type, it may be shared by threads, and it needs no `Drop`.
pub(super) unsafe trait Zeroed: Sync {}

/// Values side by side.
pub(super) struct Mapping<T> {
    first: NonNull<T>,
    count: usize,
    _values: PhantomData<T>,
}

// SAFETY: it owns its values, which threads may share.
unsafe impl<T: Zeroed> Send for Mapping<T> {}
// SAFETY: as above; a reference lends references only.
unsafe impl<T: Zeroed> Sync for Mapping<T> {}

impl<T: Zeroed> Mapping<T> {
    /// Reserves addresses for `count` values, at least one.
    pub(super) fn new(count: usize) -> io::Result<Self> {
        let bytes = Self::bytes(count).ok_or(io::ErrorKind::OutOfMemory)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, which replaces none.
        let first = unsafe { libc::mmap(null_mut(), bytes, access, kind, -1, 0) };
        if first == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first = NonNull::new(first.cast()).ok_or(io::ErrorKind::Other)?;
        Ok(Self {
            first,
            count,
            _values: PhantomData,
        })
    }

    fn bytes(count: usize) -> Option<usize> {
        count.max(1).checked_mul(size_of::<T>())
    }

    /// Returns a value, unless there are fewer.
    #[inline]
    pub(super) fn get(&self, number: usize) -> Option<&T> {
        // SAFETY: the mapping has `count` values, at a page's start, so aligned; zeros are a value, and it lives as
        // long as `self`.
        (number < self.count).then(|| unsafe { self.first.add(number).as_ref() })
    }
}

impl<T> Drop for Mapping<T> {
    fn drop(&mut self) {
        let bytes = self.count.max(1) * size_of::<T>();
        // SAFETY: it was mapped with this size, and nothing borrows from it.
        unsafe { libc::munmap(self.first.as_ptr().cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;

    // SAFETY: atomic.
    unsafe impl Zeroed for AtomicU64 {}

    #[test]
    fn a_terabyte_of_zeros_takes_no_memory() {
        let mapping = Mapping::<AtomicU64>::new(1 << 37).unwrap();
        let last = (1 << 37) - 1;
        assert_eq!(mapping.get(last).unwrap().fetch_add(7, Relaxed), 0);
        assert_eq!(mapping.get(last).unwrap().load(Relaxed), 7);
        assert!(mapping.get(last + 1).is_none());
    }

    #[test]
    fn more_than_an_address_space_is_an_error() {
        assert!(Mapping::<AtomicU64>::new(usize::MAX).is_err());
        assert!(Mapping::<AtomicU64>::new(usize::MAX / 8).is_err());
    }
}
