//! Address space: reserved ranges without memory, and files mapped into them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::window::{Freed, Window};
use crate::Access;
use crate::fork::Generation;

/// Linux lets no process map below this address (`vm.mmap_min_addr`).
const LOWEST: u64 = 64 << 10;
/// The end of the addresses that Linux gives a process by default.
const HIGHEST: u64 = if cfg!(target_arch = "x86_64") {
    1 << 47
} else {
    1 << 48
};

/// A reserved range of addresses, released when dropped, with everything mapped into it.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) len: u64,
    /// The window it was taken from; `None`: from the operating system.
    pub(super) window: Option<Arc<Window>>,
    /// The size of the guard before it and behind it, which belongs to it.
    pub(super) guard: u64,
    pub(super) born: Generation,
}

impl Range {
    /// Reserves `len` inaccessible bytes at a multiple of `alignment`.
    pub(super) fn reserve(len: u64, alignment: u64) -> io::Result<Self> {
        let alignment = alignment.max(GRANULARITY);
        let whole = len
            .checked_add(alignment)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let low = anonymous(0, whole, 0)?;
        let start = low.next_multiple_of(alignment);
        // Reserves too much and cuts the ends off, so the range is ours at every moment.
        for (cut, bytes) in [(low, start - low), (start + len, low + whole - start - len)] {
            drop(Self::own(cut, bytes));
        }
        Ok(Self::own(start, len))
    }

    /// As [`reserve`](Self::reserve), at the lowest free such address from `hint` on.
    pub(super) fn reserve_from(len: u64, alignment: u64, hint: u64) -> io::Result<Self> {
        let alignment = alignment.max(GRANULARITY);
        for gap in gaps(hint)? {
            let Some(start) = gap.start.max(hint).checked_next_multiple_of(alignment) else {
                break;
            };
            let fits = start.checked_add(len).is_some_and(|end| end <= gap.end);
            if !fits {
                continue;
            }
            // Another thread may have taken it, and a kernel before 4.17 treats the flag as a hint.
            if let Ok(at) = anonymous(start, len, libc::MAP_FIXED_NOREPLACE) {
                let range = Self::own(at, len);
                if at == start {
                    return Ok(range);
                }
            }
        }
        Err(io::Error::from_raw_os_error(libc::ENOMEM))
    }

    fn own(start: u64, len: u64) -> Self {
        Self {
            start,
            len,
            window: None,
            guard: 0,
            born: Generation::current(),
        }
    }

    pub(super) fn contains(&self, start: u64, len: u64) -> bool {
        start >= self.start
            && start
                .checked_add(len)
                .is_some_and(|end| end <= self.start + self.len)
    }

    /// Checks that nothing outside the range is accessed, even if a caller is wrong.
    fn expect_within(&self, start: u64, len: u64) -> io::Result<()> {
        if self.contains(start, len) {
            Ok(())
        } else {
            Err(io::Error::from_raw_os_error(libc::EINVAL))
        }
    }

    /// Maps `len` bytes of `file` from `offset` on at `start`, with the CPU's access.
    pub(super) fn place(
        &self,
        start: u64,
        len: u64,
        file: &File,
        offset: u64,
        access: Access,
    ) -> io::Result<()> {
        self.expect_within(start, len)?;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let (prot, fd) = (protection(access), file.as_raw_fd());
        // SAFETY: the range lies in a reservation that `self` owns, so nothing else is replaced; the
        // replacement is one step.
        answer(unsafe {
            libc::mmap64(
                start as *mut _,
                len as usize,
                prot,
                flags,
                fd,
                offset as i64,
            )
        })
        .map(drop)
    }

    /// Leaves the range out of forked children, which have nothing mapped there.
    pub(super) fn keep_from_children(&self) -> io::Result<()> {
        // SAFETY: the range is `self`'s; the advice changes what forked children have, and nothing in this process.
        match unsafe { libc::madvise(self.start as *mut _, self.len as usize, libc::MADV_DONTFORK) }
        {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Unmaps a part of the range, which stays reserved.
    pub(super) fn clear(&self, start: u64, len: u64) -> io::Result<()> {
        self.expect_within(start, len)?;
        anonymous(start, len, libc::MAP_FIXED).map(drop)
    }

    /// Changes the CPU's access to a part of the range.
    pub(super) fn protect(&self, start: u64, len: u64, access: Access) -> io::Result<()> {
        self.expect_within(start, len)?;
        // SAFETY: the range lies in a reservation that `self` owns; the contract of the driver call covers
        // remaining users.
        let done = unsafe { libc::mprotect(start as *mut _, len as usize, protection(access)) };
        if done == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // In a forked child another mapping may lie where the parent's managed memory is.
        if !self.born.is_current() {
            return;
        }
        if let Some(window) = &self.window {
            debug_assert!(window.all.contains(self.start, self.len));
            // If the kernel refuses, the addresses are not reused.
            if self.clear(self.start, self.len).is_ok() {
                window.give(Freed {
                    start: self.start,
                    len: self.len,
                    guard: self.guard,
                });
            }
        } else if self.len > 0 {
            // SAFETY: `self` alone owns the range; the driver's contract says that nothing uses it any more.
            unsafe { libc::munmap(self.start as *mut _, self.len as usize) };
        }
    }
}

/// Returns the unused address ranges of the process that end behind `from`, in order.
fn gaps(from: u64) -> io::Result<Vec<std::ops::Range<u64>>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mapped = maps.lines().filter_map(|line| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(start)?, number(end)?))
    });
    let mut gaps = Vec::new();
    let mut at = LOWEST;
    for (start, end) in mapped.chain([(HIGHEST, u64::MAX)]) {
        if start > at.max(from) {
            gaps.push(at..start.min(HIGHEST));
        }
        at = at.max(end);
    }
    Ok(gaps)
}

fn anonymous(start: u64, len: u64, flags: i32) -> io::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags;
    // SAFETY: without MAP_FIXED the call replaces nothing; with it, the caller owns the range
    // (`Range::clear`).
    answer(unsafe { libc::mmap64(start as *mut _, len as usize, libc::PROT_NONE, flags, -1, 0) })
}

fn answer(address: *mut libc::c_void) -> io::Result<u64> {
    if address == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(address as u64)
    }
}

const fn protection(access: Access) -> i32 {
    match access {
        Access::None => libc::PROT_NONE,
        Access::Read => libc::PROT_READ,
        Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
    }
}

/// Physical memory is created and mapped in units of this many bytes, at every location.
pub(super) const GRANULARITY: u64 = 2 << 20;

/// Returns whether a size or address is a positive multiple of the granularity.
pub(super) const fn is_granular(bytes: u64) -> bool {
    bytes != 0 && bytes.is_multiple_of(GRANULARITY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_and_hint_are_kept() {
        for shift in [12, 21, 30, 32] {
            let range = Range::reserve(2 << 20, 1 << shift).unwrap();
            assert!(range.start.is_multiple_of((1 << shift).max(GRANULARITY)));
        }
        let free = Range::reserve(4 << 20, 0).unwrap().start;
        let range = Range::reserve_from(2 << 20, 0, free).unwrap();
        assert_eq!(range.start, free);
        let above = Range::reserve_from(2 << 20, 0, free).unwrap();
        assert!(above.start >= free + (2 << 20));
        let aligned = Range::reserve_from(2 << 20, 1 << 30, free).unwrap();
        assert!(aligned.start > free && aligned.start.is_multiple_of(1 << 30));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert!(Range::reserve(1 << 62, 0).is_err());
        assert!(Range::reserve(u64::MAX - 4095, 1 << 30).is_err());
        assert!(Range::reserve_from(1 << 46, 0, HIGHEST - (1 << 46) + GRANULARITY).is_err());
        assert!(Range::reserve_from(GRANULARITY, 0, HIGHEST).is_err());
    }
}
