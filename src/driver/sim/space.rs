//! Address space: reserved ranges without memory, files mapped into them, and the window from which reservations are taken.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use super::by_address::ByAddress;
use crate::fork::Generation;
use crate::{Access, Error, Result, lock};

/// Physical memory is created and mapped in units of this many bytes, at every location.
pub(super) const GRANULARITY: u64 = 2 << 20;

/// Returns whether a size or address is a positive multiple of the granularity.
pub(super) const fn is_granular(bytes: u64) -> bool {
    bytes != 0 && bytes.is_multiple_of(GRANULARITY)
}

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
    pub start: u64,
    pub len: u64,
    /// The window it was taken from; `None`: from the operating system.
    window: Option<Arc<Window>>,
    born: Generation,
}

impl Range {
    /// Reserves `len` inaccessible bytes at a multiple of `alignment`.
    pub fn reserve(len: u64, alignment: u64) -> io::Result<Self> {
        let alignment = alignment.max(GRANULARITY);
        let whole = len
            .checked_add(alignment)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let low = anonymous(0, whole, 0)?;
        let start = low.next_multiple_of(alignment);
        // Reserves too much and cuts the ends off, so the range is ours at every moment.
        for (cut, bytes) in [(low, start - low), (start + len, low + whole - start - len)] {
            drop(Self::own(cut, bytes));
        }
        Ok(Self::own(start, len))
    }

    /// As [`reserve`](Self::reserve), at the lowest free such address from `hint` on.
    pub fn reserve_from(len: u64, alignment: u64, hint: u64) -> io::Result<Self> {
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
        Err(io::ErrorKind::OutOfMemory.into())
    }

    fn own(start: u64, len: u64) -> Self {
        Self {
            start,
            len,
            window: None,
            born: Generation::current(),
        }
    }

    pub fn contains(&self, start: u64, len: u64) -> bool {
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
            Err(io::ErrorKind::InvalidInput.into())
        }
    }

    /// Maps `len` bytes of `file` from `offset` on at `start`, with the CPU's access.
    pub fn place(
        &self,
        start: u64,
        len: u64,
        file: &File,
        offset: u64,
        access: Access,
    ) -> io::Result<()> {
        self.expect_within(start, len)?;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let (prot, fd, offset) = (protection(access), file.as_raw_fd(), offset as i64);
        let (at, len) = (start as *mut _, len as usize);
        // SAFETY: the range lies in a reservation that `self` owns, so nothing else is replaced; the
        // replacement is one step.
        answer(unsafe { libc::mmap64(at, len, prot, flags, fd, offset) }).map(drop)
    }

    /// Leaves the range out of forked children, which have nothing mapped there.
    pub fn keep_from_children(&self) -> io::Result<()> {
        // SAFETY: the range is `self`'s; the advice changes what forked children have, and nothing in this process.
        done(unsafe { libc::madvise(self.start as *mut _, self.len as usize, libc::MADV_DONTFORK) })
    }

    /// Unmaps a part of the range, which stays reserved.
    pub fn clear(&self, start: u64, len: u64) -> io::Result<()> {
        self.expect_within(start, len)?;
        anonymous(start, len, libc::MAP_FIXED).map(drop)
    }

    /// Changes the CPU's access to a part of the range.
    pub fn protect(&self, start: u64, len: u64, access: Access) -> io::Result<()> {
        self.expect_within(start, len)?;
        // SAFETY: the range lies in a reservation that `self` owns; the contract of the driver call covers
        // remaining users.
        done(unsafe { libc::mprotect(start as *mut _, len as usize, protection(access)) })
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
                window.give(self.start, self.len);
            }
        } else if self.len > 0 {
            // SAFETY: `self` alone owns the range; the driver's contract says that nothing uses it any more.
            unsafe { libc::munmap(self.start as *mut _, self.len as usize) };
        }
    }
}

/// Returns the unused address ranges of the process that end behind `from`, in order.
fn gaps(from: u64) -> io::Result<Vec<std::ops::Range<u64>>> {
    // A mapped file's name may have any bytes.
    let maps = std::fs::read("/proc/self/maps")?;
    let maps = String::from_utf8_lossy(&maps);
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

fn done(result: i32) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns whether parts that `next` finds cover a range without a gap: it returns the end of the part at an address.
pub(super) fn is_covered(start: u64, end: u64, mut next: impl FnMut(u64) -> Option<u64>) -> bool {
    let mut at = start;
    while at < end {
        let Some(after) = next(at) else { return false };
        at = after;
    }
    true
}

const fn protection(access: Access) -> i32 {
    match access {
        Access::None => libc::PROT_NONE,
        Access::Read => libc::PROT_READ,
        Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
    }
}

/// How reservations lie in a window: `EGMEM_SIM_PLACEMENT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Placement {
    /// `packed`: from the lowest address on, without gaps.
    #[default]
    Packed,
    /// `guarded`: with inaccessible addresses on both sides, so that an access beyond an end faults. The next
    /// reservation of the same size reuses a freed one at once: a use after free faults or meets another's
    /// memory.
    Guarded,
}

impl Placement {
    /// Reads the placement from the environment.
    pub fn from_env() -> Result<Self> {
        let Some(value) = std::env::var_os("EGMEM_SIM_PLACEMENT") else {
            return Ok(Self::default());
        };
        match value.to_str() {
            Some("packed") => Ok(Self::Packed),
            Some("guarded") => Ok(Self::Guarded),
            _ => {
                let why = format!("{value:?} is neither `packed` nor `guarded`");
                Err(Error::invalid("EGMEM_SIM_PLACEMENT", why))
            }
        }
    }
}

/// The size of a window: more than any test reserves; a reservation that does not fit gets separate
/// addresses.
const WINDOW: u64 = 64 << 30;
/// The size of a window with guards, which also serves reservations that would need a window of their own.
const GUARDED_WINDOW: u64 = 1 << 40;
/// The offset of the first reservation in its window: the real driver's is at 12 GiB and 32 MiB, so no larger
/// alignment is met by chance.
const FIRST: u64 = 32 << 20;
/// The alignment of a window.
const WINDOW_ALIGNMENT: u64 = 1 << 30;

/// Addresses set aside for reservations.
#[derive(Debug)]
pub(super) struct Window {
    all: Range,
    /// The inaccessible bytes on each side of a reservation, which belong to it: 0 if packed.
    guard: u64,
    places: Mutex<Places>,
}

/// The addresses in a window.
#[derive(Debug)]
struct Places {
    free: FreeRanges,
    /// Start and length of guarded reservations that were freed, the most recent last. They still own their guards.
    freed: Vec<(u64, u64)>,
}

impl Window {
    /// Reserves addresses for the window, without memory.
    pub fn new(placement: Placement) -> io::Result<Self> {
        let (bytes, guard) = match placement {
            Placement::Packed => (WINDOW, 0),
            Placement::Guarded => (GUARDED_WINDOW, GRANULARITY),
        };
        let all = Range::reserve(bytes, WINDOW_ALIGNMENT)?;
        let places = Mutex::new(Places {
            free: FreeRanges::whole(all.start + FIRST, all.len - FIRST),
            freed: Vec::new(),
        });
        Ok(Self { all, guard, places })
    }

    /// Takes the most recently freed range of a size, or else the lowest free one; with a `hint` the lowest one from there
    /// on. `None`: the window has no room, or the hint is outside it.
    pub fn take(self: &Arc<Self>, len: u64, alignment: u64, hint: u64) -> Option<Range> {
        if hint != 0 && !self.all.contains(hint, 0) {
            return None;
        }
        let alignment = alignment.max(GRANULARITY);
        let mut places = lock(&self.places);
        let Places { free, freed } = &mut *places;
        let fits = |&(start, have): &(u64, u64)| have == len && start.is_multiple_of(alignment);
        let reusable = freed.iter().rposition(fits).filter(|_| hint == 0);
        let mut start = reusable.map(|index| freed.remove(index).0);
        if start.is_none() && hint == 0 {
            start = free.take_aligned(len, alignment, 0, self.guard);
        }
        if start.is_none() {
            // Freed ranges and their guards serve other sizes.
            for (start, len) in freed.drain(..) {
                free.give(start - self.guard, len + 2 * self.guard);
            }
            start = free.take_aligned(len, alignment, hint, self.guard);
        }
        Some(Range {
            start: start?,
            len,
            window: Some(Arc::clone(self)),
            born: Generation::current(),
        })
    }

    /// Returns a range to the window.
    fn give(&self, start: u64, len: u64) {
        let mut places = lock(&self.places);
        match self.guard {
            0 => places.free.give(start, len),
            _ => places.freed.push((start, len)),
        }
    }
}

/// Free ranges, by start, never adjacent to each other: taken first fit, merged when given back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FreeRanges(ByAddress<u64>);

impl FreeRanges {
    /// Returns the set that contains `start..start + len`.
    pub fn whole(start: u64, len: u64) -> Self {
        let mut whole = Self::default();
        whole.0.insert(start, len);
        whole
    }

    /// Takes `len` bytes from the first range that has them; returns their start.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        self.take_aligned(len, 1, 0, 0)
    }

    /// Iterates over the free ranges of at least `len` bytes: start and length.
    pub fn fitting(&self, len: u64) -> impl Iterator<Item = (u64, u64)> {
        let all = self.0.entries().iter().copied();
        all.filter(move |&(_, have)| have >= len)
    }

    /// Takes `len` bytes and `guard` bytes on both sides of them, at the lowest multiple of `alignment` from `from` on;
    /// returns the start of the `len` bytes.
    pub fn take_aligned(&mut self, len: u64, alignment: u64, from: u64, guard: u64) -> Option<u64> {
        let start = self.0.entries().iter().find_map(|&(start, have)| {
            let at = (start + guard).max(from);
            let at = at.checked_next_multiple_of(alignment)?;
            let end = at.checked_add(len)?.checked_add(guard)?;
            (end <= start + have).then_some(at)
        })?;
        self.take_at(start - guard, len + 2 * guard)
            .then_some(start)
    }

    /// Takes `start..start + len` if all of it is free.
    pub fn take_at(&mut self, start: u64, len: u64) -> bool {
        let Some(&(at, have)) = self.0.up_to(start) else {
            return false;
        };
        let before = start - at;
        let Some(after) = have.checked_sub(before).and_then(|n| n.checked_sub(len)) else {
            return false;
        };
        self.0.remove(at);
        if before > 0 {
            self.0.insert(at, before);
        }
        if after > 0 {
            self.0.insert(start + len, after);
        }
        true
    }

    /// Frees a range. No part of it may be free already.
    pub fn give(&mut self, mut start: u64, mut len: u64) {
        if let Some(&(before, have)) = self.0.up_to(start) {
            debug_assert!(before + have <= start, "given back twice");
            if before + have == start {
                self.0.remove(before);
                (start, len) = (before, have + len);
            }
        }
        if let Some(after) = self.0.remove(start + len) {
            len += after;
        }
        self.0.insert(start, len);
    }

    /// Returns whether all of `start..start + len` is free.
    pub fn is_whole(&self, start: u64, len: u64) -> bool {
        self.0.get(start).is_some_and(|&have| have >= len)
    }
}

#[cfg(test)]
mod tests;
