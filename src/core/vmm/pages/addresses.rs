//! Addresses that the kernel keeps for pages.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::per_driver::lock;
use crate::{Error, Result};

/// Addresses without memory, given back when dropped.
#[derive(Debug)]
pub struct Addresses {
    start: u64,
    size: u64,
    /// Where pages are mapped, by the start: a new mapping would replace them.
    taken: Mutex<BTreeMap<u64, u64>>,
    /// Whether pages there are lost: the driver still uses them.
    lost: AtomicBool,
}

impl Addresses {
    /// Reserves `size` bytes, whole pages, from a multiple of `alignment` on, a power of two; at `hint` if that is free.
    ///
    /// # Errors
    /// [`Error::System`] if there is no such hole.
    pub fn reserve(size: u64, alignment: u64, hint: u64) -> Result<Self> {
        let what = || format!("reserving {size} bytes of addresses");
        let all = size
            .checked_add(alignment)
            .filter(|&all| all <= isize::MAX as u64)
            .ok_or_else(|| Error::failed(what(), "they exceed the address space"))?;
        let base = map(
            hint,
            all,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            None,
        )
        .map_err(|error| Error::system(what(), &error))?;
        let start = base.next_multiple_of(alignment);
        let end = start + size;
        // The parts before and behind are not needed.
        unmap(base, start - base);
        unmap(end, base + all - end);
        Ok(Self {
            start,
            size,
            taken: Mutex::default(),
            lost: AtomicBool::new(false),
        })
    }

    /// Returns the first address.
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// Takes a range for a mapping.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if something is mapped in it.
    pub fn take(&self, range: &Range<u64>) -> Result<()> {
        let mut taken = lock(&self.taken);
        let before = taken.range(..range.end).next_back();
        if before.is_some_and(|(_, &end)| end > range.start) {
            return Err(Error::invalid("range", "memory is mapped there already"));
        }
        taken.insert(range.start, range.end);
        Ok(())
    }

    /// Returns a range in which nothing is mapped any more.
    pub fn give_back(&self, range: &Range<u64>) {
        lock(&self.taken).remove(&range.start);
    }

    /// Keeps the addresses until the process ends.
    pub fn keep(&self) {
        self.lost.store(true, Relaxed);
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        if !self.lost.load(Relaxed) {
            unmap(self.start, self.size);
        }
    }
}

/// Maps memory: anonymous, or a file from its start on. With MAP_FIXED the caller owns the addresses.
pub(super) fn map(
    at: u64,
    size: u64,
    protection: libc::c_int,
    flags: libc::c_int,
    file: Option<libc::c_int>,
) -> io::Result<u64> {
    let (at, size, fd) = (
        ptr::with_exposed_provenance_mut(at as usize),
        size as usize,
        file.unwrap_or(-1),
    );
    // SAFETY: without MAP_FIXED nothing is replaced; with it, the caller owns the addresses, which no reference points to.
    let base = unsafe { libc::mmap(at, size, protection, flags, fd, 0) };
    match base {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        base => Ok(base.expose_provenance() as u64),
    }
}

fn unmap(start: u64, size: u64) {
    if size == 0 {
        return;
    }
    // SAFETY: the range is this module's own, and no mapping of pages is left in it.
    let result = unsafe {
        libc::munmap(
            ptr::with_exposed_provenance_mut(start as usize),
            size as usize,
        )
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        tracing::error!(%error, size, "cannot give addresses back: they stay reserved until the process ends");
    }
}
