//! A range of addresses without memory until it is written.

use std::io;
use std::ptr::{self, NonNull};

/// Where ranges start: buddies reach as high as their addresses are aligned.
const ALIGN: usize = 1 << 30;

/// Private memory, unmapped when dropped.
pub struct Range {
    base: NonNull<u8>,
    len: usize,
    mapped: (*mut libc::c_void, usize),
}

// SAFETY: memory belongs to no thread, and only the holder of the range uses its addresses.
unsafe impl Send for Range {}

impl Range {
    /// Maps `bytes`, rounded up to pages, from a multiple of 1 GiB on.
    ///
    /// # Errors
    /// The kernel's, if it has not that many addresses; invalid input if there cannot be.
    pub fn map(bytes: u64) -> io::Result<Self> {
        let too_big = || io::Error::from(io::ErrorKind::InvalidInput);
        let len = usize::try_from(bytes.max(1)).map_err(|_| too_big())?;
        let len = len.checked_next_multiple_of(4096).ok_or_else(too_big)?;
        let total = len.checked_add(ALIGN).ok_or_else(too_big)?;
        // SAFETY: a new private mapping at a place of the kernel's choice.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                total,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // An allocator that writes a header far from the next one must not take 2 MiB for each.
        // SAFETY: the range just mapped; the advice changes no contents.
        unsafe { libc::madvise(start, total, libc::MADV_NOHUGEPAGE) };
        let skip = start.addr().next_multiple_of(ALIGN) - start.addr();
        let base = NonNull::new(start.cast::<u8>().wrapping_add(skip)).ok_or_else(too_big)?;
        Ok(Self {
            base,
            len,
            mapped: (start, total),
        })
    }

    /// The first address.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length and not unmapped since.
        unsafe { libc::munmap(self.mapped.0, self.mapped.1) };
    }
}
