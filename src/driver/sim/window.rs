//! A window of addresses for reservations, packed or with guards between them.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use super::ranges::FreeRanges;
use super::space::GRANULARITY;
use super::space::Range;
use crate::fork::Generation;
use crate::{Error, Result, lock};

/// How reservations lie in a window: `EGMEM_SIM_PLACEMENT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Placement {
    /// `packed`: from the lowest address on, without gaps. A hint is where the search starts.
    #[default]
    Packed,
    /// `guarded`: with inaccessible addresses on both sides, so that an access beyond an end faults. The next
    /// reservation of the same size reuses a freed one at once: a use after free faults or meets another's
    /// memory.
    Guarded,
}

impl Placement {
    /// Reads the placement from the environment.
    pub(super) fn from_env() -> Result<Self> {
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

/// Addresses set aside for reservations.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) all: Range,
    placement: Placement,
    places: Mutex<Places>,
}

/// The addresses in a window.
#[derive(Debug)]
struct Places {
    free: FreeRanges,
    /// Guarded places that were freed, the most recent last. They still own their guards.
    freed: Vec<Freed>,
}

/// A freed place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Freed {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) guard: u64,
}

impl Places {
    /// Returns the most recently freed place of a size that is at a multiple of `alignment`.
    fn reuse(&mut self, len: u64, alignment: u64) -> Option<Freed> {
        let fits = |freed: &Freed| freed.len == len && freed.start.is_multiple_of(alignment);
        let at = self.freed.iter().rposition(fits)?;
        Some(self.freed.remove(at))
    }

    fn take_guarded(&mut self, len: u64, alignment: u64, hint: u64) -> Option<Freed> {
        let whole = len.checked_add(alignment.checked_mul(2)?)?;
        let before = match hint {
            0 => self.free.take_aligned(whole, alignment, 0)?,
            _ => {
                let before = hint.checked_sub(alignment)?;
                self.free.take_at(before, whole).then_some(before)?
            }
        };
        Some(Freed {
            start: before + alignment,
            len,
            guard: alignment,
        })
    }

    /// Merges the freed places and their guards, so that they serve other sizes.
    fn merge_freed(&mut self) {
        for Freed { start, len, guard } in std::mem::take(&mut self.freed) {
            self.free.give(start - guard, len + 2 * guard);
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

impl Window {
    /// Reserves addresses for the window, without memory.
    pub(super) fn new(placement: Placement) -> io::Result<Self> {
        let bytes = match placement {
            Placement::Packed => WINDOW,
            Placement::Guarded => GUARDED_WINDOW,
        };
        let all = Range::reserve(bytes, WINDOW_ALIGNMENT)?;
        let places = Mutex::new(Places {
            free: FreeRanges::whole(all.start + FIRST, all.len - FIRST),
            freed: Vec::new(),
        });
        Ok(Self {
            all,
            placement,
            places,
        })
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        lock(&self.places)
    }

    /// Takes the lowest free range from `hint` on. `None`: the window has no room, the hint is outside it, or
    /// a guarded range cannot be exactly there.
    pub(super) fn take(self: &Arc<Self>, len: u64, alignment: u64, hint: u64) -> Option<Range> {
        let alignment = alignment.max(GRANULARITY);
        let mut places = self.places();
        let place = match (self.placement, hint) {
            (Placement::Packed, _) if hint == 0 || self.all.contains(hint, 0) => {
                Self::unguarded(places.free.take_aligned(len, alignment, hint)?, len)
            }
            (Placement::Packed, _) => return None,
            (Placement::Guarded, 0) => places
                .reuse(len, alignment)
                .or_else(|| places.take_guarded(len, alignment, 0))
                .or_else(|| {
                    places.merge_freed();
                    places.take_guarded(len, alignment, 0)
                })?,
            (Placement::Guarded, _) => {
                places.merge_freed();
                places.take_guarded(len, alignment, hint)?
            }
        };
        Some(Range {
            start: place.start,
            len,
            window: Some(Arc::clone(self)),
            guard: place.guard,
            born: Generation::current(),
        })
    }

    const fn unguarded(start: u64, len: u64) -> Freed {
        let guard = 0;
        Freed { start, len, guard }
    }

    /// Returns a place to the window.
    pub(super) fn give(&self, place: Freed) {
        let mut places = self.places();
        match self.placement {
            Placement::Packed => places.free.give(place.start, place.len),
            Placement::Guarded => places.freed.push(place),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::Access;

    #[test]
    fn a_window_packs_and_takes_back() {
        let window = Arc::new(Window::new(Placement::Packed).unwrap());
        let first = window.take(6 << 20, 0, 0).unwrap();
        let second = window.take(2 << 20, 4 << 20, 0).unwrap();
        assert_eq!(second.start - first.start, 8 << 20);
        let third = window.take(2 << 20, 0, 0).unwrap();
        assert_eq!(third.start - first.start, 6 << 20);
        let at = first.start;
        assert!(!at.is_multiple_of(WINDOW_ALIGNMENT));
        // The search goes up from the hint.
        let above = window.take(2 << 20, 0, at).unwrap();
        assert_eq!(above.start, second.start + second.len);
        drop((first, above));
        assert_eq!(window.take(2 << 20, 0, at).unwrap().start, at);
        let above = window.take(2 << 20, 0, at + (4 << 20)).unwrap();
        assert_eq!(above.start, at + (4 << 20));
        assert!(
            window
                .take(2 << 20, 0, window.all.start - (2 << 20))
                .is_none()
        );
        assert!(window.take(WINDOW - FIRST, 0, 0).is_none());
        drop((second, third, above));
        assert!(window.take(WINDOW - FIRST, 0, 0).is_some());
    }

    /// Returns whether the kernel can read a byte there.
    fn is_readable(address: u64) -> bool {
        let (_reader, writer) = io::pipe().unwrap();
        // SAFETY: the kernel checks the address, and only reads it.
        unsafe { libc::write(writer.as_raw_fd(), address as *const _, 1) == 1 }
    }

    #[test]
    fn a_guarded_range_has_guards_and_is_used_again_at_once() {
        let window = Arc::new(Window::new(Placement::Guarded).unwrap());
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 << 20).unwrap();
        let take = |len, alignment| window.take(len, alignment, 0).unwrap();
        let ranges = [take(2 << 20, 0), take(2 << 20, 8 << 20), take(2 << 20, 0)];
        for range in &ranges {
            let (start, end) = (range.start, range.start + range.len);
            range
                .place(start, 2 << 20, &file, 0, Access::ReadWrite)
                .unwrap();
            assert!(is_readable(start) && is_readable(end - 1));
            assert!(!is_readable(start - 1) && !is_readable(end));
            let apart =
                |other: &Range| other.start.abs_diff(start) >= 6 << 20 || other.start == start;
            assert!(ranges.iter().all(apart));
        }
        assert!(ranges[1].start.is_multiple_of(8 << 20));
        let [first, second, third] = ranges;
        let (at, last) = (first.start, third.start);
        drop((first, third));
        assert!(!is_readable(at) && !is_readable(last));
        assert_eq!(take(2 << 20, 0).start, last, "the last freed comes first");
        let larger = take(4 << 20, 0);
        assert_ne!(larger.start, at);
        let again = take(2 << 20, 0);
        drop((again, larger, second));
        // All of it except its two guards.
        let whole = GUARDED_WINDOW - FIRST - (4 << 20);
        assert!(window.take(whole, 0, 0).is_some());
    }
}
