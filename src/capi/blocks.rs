//! The blocks of a heap that a C program has, by their offset: one entry for each page of the heap, read and written without a
//! lock.
//!
//! A C program frees a block by its address alone, so the other fields of [`RawBlock`] are kept here. At most one
//! large block begins in a page, or small ones with one key and one size, as [`RawBlock::PAGE`] says. So a page's
//! entry has the key and the size once, and one bit for each place where a block can begin. A bit is set exactly
//! while a block that begins there is in use: a free of any other address, and a second free, find no bit.
//!
//! Entries of one page are written by the threads that allocate and free its blocks. The thread that gets a large
//! block is alone in its page, so it stores the bit; all other changes of bits are atomic operations. Key and size
//! are written before a bit is set, with release, and read after it was seen, with acquire: a program that frees a
//! block twice, in a race with an allocation, gets the key of the block whose bit it takes.

use std::collections::HashMap;
use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use egmem::heap::RawBlock;

use crate::args::lock;

/// All blocks of a heap in debug mode, where pages do not tell blocks apart.
type Listed = Mutex<HashMap<u64, RawBlock>>;

/// Looks at the list, out of line, to keep the inlined functions of [`Blocks`] short.
#[cold]
#[inline(never)]
fn of_list<T>(list: &Listed, look: impl FnOnce(&mut HashMap<u64, RawBlock>) -> T) -> T {
    look(&mut lock(list))
}

/// A page's blocks.
#[derive(Default)]
#[repr(align(32))]
struct Page {
    /// A bit for each multiple of [`RawBlock::MIN_ALIGN`] in the page: whether a block in use begins there.
    begins: [AtomicU64; 2],
    key: AtomicU64,
    bytes: AtomicU64,
}

impl Page {
    /// Returns the block that begins at `offset`, whose bit the caller has seen set.
    #[inline]
    fn block(&self, offset: u64) -> RawBlock {
        #[cfg(test)]
        tests::before_an_entry_is_read();
        RawBlock {
            offset,
            bytes: self.bytes.load(Relaxed),
            key: self.key.load(Relaxed),
        }
    }
}

/// The blocks in use, by their offset: an entry for each page, found by one addition, because every free looks it up. The table
/// is a mapping of its own: all zero at first, and without memory until entries are written.
pub(crate) struct Blocks {
    first: NonNull<Page>,
    count: usize,
    /// Has all blocks instead, in debug mode.
    listed: Option<Listed>,
}

// SAFETY: it owns its pages, which are atomic numbers that threads may share; the list has a lock.
unsafe impl Send for Blocks {}
// SAFETY: as above; a reference lends references only.
unsafe impl Sync for Blocks {}

/// A place in a page: the word with its bit, and the bit.
#[inline]
fn bit_of(offset: u64) -> (usize, u64) {
    let unit = offset % RawBlock::PAGE / RawBlock::MIN_ALIGN;
    ((unit / 64) as usize, 1 << (unit % 64))
}

impl Blocks {
    /// Creates a table for a heap of `limit` bytes. It has addresses for all entries, and memory for those that are written;
    /// in debug mode for one alone.
    pub(crate) fn new(limit: u64, debug: bool) -> io::Result<Self> {
        let pages = if debug {
            1
        } else {
            limit.div_ceil(RawBlock::PAGE)
        };
        let count = usize::try_from(pages.max(1)).unwrap_or(usize::MAX);
        let bytes = count.checked_mul(size_of::<Page>());
        let bytes = bytes.ok_or(io::ErrorKind::OutOfMemory)?;
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
            listed: debug.then(Listed::default),
        })
    }

    /// Returns whether the heap is in debug mode.
    #[inline]
    pub(crate) fn is_debug(&self) -> bool {
        self.listed.is_some()
    }

    /// Returns a page's entry, unless it is beyond the limit.
    #[inline]
    fn get_page(&self, number: usize) -> Option<&Page> {
        // SAFETY: the mapping has `count` pages, at a page's start, so aligned; zeros are atomic numbers, and it lives as
        // long as `self`.
        (number < self.count).then(|| unsafe { self.first.add(number).as_ref() })
    }

    /// Notes a block, which is in use from now on. Returns `false` if it is not below the limit.
    #[inline]
    #[must_use]
    pub(crate) fn put(&self, raw: RawBlock) -> bool {
        if let Some(listed) = &self.listed {
            of_list(listed, |all| all.insert(raw.offset, raw));
            return true;
        }
        let number = (raw.offset / RawBlock::PAGE) as usize;
        let Some(page) = self.get_page(number) else {
            return false;
        };
        let (word, bit) = bit_of(raw.offset);
        page.key.store(raw.key, Relaxed);
        page.bytes.store(raw.bytes, Relaxed);
        if raw.is_small() {
            page.begins[word].fetch_or(bit, Release);
        } else {
            page.begins[word].store(bit, Release);
        }
        true
    }

    /// Returns the block in use that begins at `offset`.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Option<RawBlock> {
        if let Some(listed) = &self.listed {
            return of_list(listed, |all| all.get(&offset).copied());
        }
        let page = self.page(offset)?;
        let (word, bit) = bit_of(offset);
        let in_use = page.begins[word].load(Acquire) & bit != 0;
        in_use.then(|| page.block(offset))
    }

    #[inline]
    fn page(&self, offset: u64) -> Option<&Page> {
        if !offset.is_multiple_of(RawBlock::MIN_ALIGN) {
            return None;
        }
        self.get_page((offset / RawBlock::PAGE) as usize)
    }

    /// Removes the block in use that begins at `offset`, and returns it.
    ///
    /// Of two threads that free it at once, one finds no bit. Key and size are read after the bit was taken: until
    /// then the page may be another block's, if an earlier free of this one was followed by an allocation.
    #[inline]
    pub(crate) fn take(&self, offset: u64) -> Option<RawBlock> {
        if let Some(listed) = &self.listed {
            return of_list(listed, |all| all.remove(&offset));
        }
        let page = self.page(offset)?;
        let (word, bit) = bit_of(offset);
        let before = page.begins[word].fetch_and(!bit, Acquire);
        (before & bit != 0).then(|| page.block(offset))
    }

    /// Returns the most bytes of memory that the table has for a heap that had `backed` bytes at once; 0 in debug
    /// mode.
    pub(crate) fn metadata(&self, backed: u64) -> u64 {
        if self.is_debug() {
            return 0;
        }
        backed.div_ceil(RawBlock::PAGE) * size_of::<Page>() as u64
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this size, and nothing borrows from it.
        unsafe { libc::munmap(self.first.as_ptr().cast(), self.count * size_of::<Page>()) };
    }
}

#[cfg(test)]
mod tests;
