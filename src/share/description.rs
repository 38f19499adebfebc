//! The description that an importer of memory needs besides its handles, and which bytes of adjacent parts are shared: no
//! memory is accessed.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::Identity;
use crate::driver::{Access, Location, refuse};
use crate::memory::check_range;
use crate::size::Granularity;
use egmem_core::{Error, Result};

/// The most parts of shared memory.
pub const MAX_PARTS: usize = 4096;

/// One physical memory of several that are mapped side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Part {
    /// The memory's identity.
    pub identity: Identity,
    /// Its size in bytes, as created: a multiple of 2 MiB.
    pub bytes: u64,
    /// Its location on its own machine.
    pub location: Location,
}

/// A description of shared memory without its handles: it contains no secret.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Description {
    /// Usable bytes, from [`offset`](Self::offset) on.
    pub len: u64,
    /// The start of a window, in bytes from the first part's start, if other code uses the memory too. A
    /// window begins in the first part and ends in the last, and nothing around it is padding.
    ///
    /// `None`: the usable bytes begin where the first part does, and padding follows them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The access that an importer is asked to keep to; a handle itself allows everything.
    pub access: Access,
    /// The physical memories, in the order of addresses: 1 to [`MAX_PARTS`].
    pub parts: Vec<Part>,
}

impl Description {
    /// Returns whether this is a window on memory that other code uses too.
    pub const fn is_window(&self) -> bool {
        self.offset.is_some()
    }

    /// Returns the size of all parts, in bytes.
    pub fn padded(&self) -> u64 {
        let bytes = self.parts.iter().map(|part| part.bytes);
        bytes.fold(0, u64::saturating_add)
    }

    /// Returns where the parts are, each location once and in ascending order.
    pub fn locations(&self) -> Vec<Location> {
        let mut locations: Vec<_> = self.parts.iter().map(|part| part.location).collect();
        locations.sort_unstable();
        locations.dedup();
        locations
    }

    /// Checks a description from an untrusted source.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the first fault: no parts or too many, a size that is 0 or not a
    /// multiple of 2 MiB, more bytes than an address space has, a `len` of 0, beyond the parts or ending
    /// before the last one, a window that does not begin in the first part and end in the last, the same part
    /// twice, or no access.
    pub fn check(&self) -> Result<()> {
        let wrong = |why| Error::invalid("description", why);
        let count = self.parts.len();
        refuse! { wrong; !(1..=MAX_PARTS).contains(&count) => "{count} parts, not 1 to {MAX_PARTS}"; }
        let mut before = 0_u64;
        let mut sum = 0_u64;
        for Part { bytes, .. } in &self.parts {
            before = sum;
            sum = sum.saturating_add(*bytes);
            refuse! { wrong;
                *bytes == 0 || !Granularity::TWO_MIB.divides(*bytes) => "a part of {bytes} bytes";
                sum > isize::MAX as u64 => "more bytes than an address space";
            }
        }
        let (start, len) = (self.offset.unwrap_or(0), self.len);
        // All the memory may have a last part that is padding only: room for a probe.
        let least = before + u64::from(self.is_window());
        let ends = start
            .checked_add(len)
            .is_some_and(|end| (least..=sum).contains(&end));
        let right = len != 0 && start < self.parts[0].bytes && ends;
        let at = || (self.offset).map_or(String::new(), |offset| format!(" at {offset}"));
        let mut identities: Vec<_> = self.parts.iter().map(|part| part.identity).collect();
        identities.sort_unstable();
        refuse! { wrong;
            !right => "{len} bytes{} in parts of {sum} bytes together", at();
            identities.windows(2).any(|pair| pair[0] == pair[1]) => "the same memory twice";
            self.access == Access::None => "no access";
        }
        Ok(())
    }
}

/// Usable bytes among parts: all from the first part's start, or a window on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    /// The parts that it touches.
    pub parts: Range<usize>,
    /// For a window: its start, from the start of the first of `parts`, in which it begins.
    pub offset: Option<u64>,
    pub len: u64,
}

impl View {
    /// Returns all of `count` parts, with `len` usable bytes.
    pub fn whole(count: usize, len: u64) -> Self {
        Self {
            parts: 0..count,
            offset: None,
            len,
        }
    }

    /// Returns a window of `len` bytes, `offset` bytes into this, whose parts have these sizes.
    pub fn window(
        &self,
        sizes: impl Iterator<Item = u64> + Clone,
        offset: u64,
        len: u64,
    ) -> Result<Self> {
        if len == 0 {
            let why = "a window of 0 bytes";
            return Err(Error::invalid_of("length", why, "1 byte or more"));
        }
        check_range(offset, len, self.len)?;
        let begin = self.offset.unwrap_or(0) + offset;
        let (first, within) = part_at(sizes.clone(), begin, len)?;
        let (last, _) = part_at(sizes, begin + len - 1, len)?;
        let before = self.parts.start;
        Ok(Self {
            parts: before + first..before + last + 1,
            offset: Some(within),
            len,
        })
    }

    /// Returns the part in which the word at `offset` begins, and its offset there. There is none beyond a
    /// window.
    pub fn word_at(&self, sizes: impl Iterator<Item = u64>, offset: u64) -> Result<(usize, u64)> {
        const WORD: u64 = size_of::<u64>() as u64;
        if self.offset.is_some() {
            check_range(offset, WORD, self.len)?;
        }
        let at = self.offset.unwrap_or(0).saturating_add(offset);
        let (index, within) = part_at(sizes, at, WORD)?;
        Ok((self.parts.start + index, within))
    }
}

/// Returns the index of the part with the byte at `offset`, where `len` bytes begin or end, and the byte's offset there.
fn part_at(sizes: impl Iterator<Item = u64>, offset: u64, len: u64) -> Result<(usize, u64)> {
    let mut size = 0_u64;
    for (index, part) in sizes.enumerate() {
        let start = size;
        size = size.saturating_add(part);
        if offset < size {
            return Ok((index, offset - start));
        }
    }
    Err(Error::OutOfRange { offset, len, size })
}

#[cfg(test)]
mod tests {
    use super::super::{BootId, InstanceId};
    use super::*;

    fn description(len: u64, parts: &[u64]) -> Description {
        let part = |(allocation, &bytes): (usize, &u64)| Part {
            identity: Identity {
                boot: BootId::from_bytes([1; 16]),
                instance: InstanceId::from_bytes([2; 16]),
                allocation: allocation as u64,
                generation: 0,
            },
            bytes,
            location: Location::HostNuma(0),
        };
        Description {
            len,
            offset: None,
            access: Access::ReadWrite,
            parts: parts.iter().enumerate().map(part).collect(),
        }
    }

    const GRANULE: u64 = 2 << 20;

    #[test]
    fn what_can_be_is_accepted() {
        for (len, parts) in [
            (1, &[GRANULE][..]),
            (GRANULE, &[GRANULE]),
            (GRANULE + 1, &[GRANULE, 4 * GRANULE]),
            (GRANULE, &[GRANULE, GRANULE]),
        ] {
            description(len, parts).check().unwrap();
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (len, parts) in [
            (0, &[GRANULE][..]),
            (1, &[]),
            (GRANULE + 1, &[GRANULE]),
            (GRANULE - 1, &[GRANULE, GRANULE]),
            (2 * GRANULE + 1, &[GRANULE, GRANULE]),
            (GRANULE, &[GRANULE, GRANULE, GRANULE]),
            (1, &[0]),
            (1, &[4096]),
            (1 << 62, &[1 << 62, 1 << 62]),
        ] {
            assert!(description(len, parts).check().is_err(), "{len} {parts:?}");
        }
        let mut twice = description(GRANULE + 1, &[GRANULE, GRANULE]);
        twice.parts[1].identity = twice.parts[0].identity;
        assert!(twice.check().is_err());
        let mut none = description(1, &[GRANULE]);
        none.access = Access::None;
        assert!(none.check().is_err());
    }

    fn window(offset: u64, len: u64, parts: &[u64]) -> Description {
        Description {
            offset: Some(offset),
            ..description(len, parts)
        }
    }

    #[test]
    fn a_window_begins_in_the_first_part_and_ends_in_the_last() {
        for (offset, len, parts) in [
            (0, 1, &[GRANULE][..]),
            (0, GRANULE, &[GRANULE]),
            (GRANULE - 1, 1, &[GRANULE]),
            (GRANULE - 1, 2, &[GRANULE, GRANULE]),
            (GRANULE - 1, GRANULE + 2, &[GRANULE, GRANULE, GRANULE]),
            (1, 3 * GRANULE - 1, &[GRANULE, GRANULE, GRANULE]),
        ] {
            window(offset, len, parts).check().unwrap();
        }
        for (offset, len, parts) in [
            (0, 0, &[GRANULE][..]),
            (1, GRANULE, &[GRANULE]),
            (GRANULE, 1, &[GRANULE]),
            (GRANULE, 1, &[GRANULE, GRANULE]),
            (0, GRANULE, &[GRANULE, GRANULE]),
            (1, 2 * GRANULE, &[GRANULE, GRANULE]),
            (1, u64::MAX, &[GRANULE]),
            (u64::MAX, 2, &[GRANULE]),
            (0, 1, &[]),
        ] {
            let window = window(offset, len, parts);
            assert!(window.check().is_err(), "{offset} {len} {parts:?}");
        }
    }

    #[test]
    fn what_is_sent_is_what_is_read() {
        let whole = description(GRANULE, &[GRANULE]);
        for (sent, keys) in [
            (
                window(4096, 77, &[GRANULE]),
                &["access", "len", "offset", "parts"][..],
            ),
            (whole, &["access", "len", "parts"]),
        ] {
            let json = serde_json::to_value(&sent).unwrap();
            let read: Description = serde_json::from_value(json.clone()).unwrap();
            assert_eq!(read, sent);
            let found: Vec<_> = json.as_object().unwrap().keys().collect();
            assert_eq!(found, keys);
        }
    }

    mod views {
        use proptest::prelude::*;

        use super::super::*;

        /// Returns the bytes of a view, each as its part and its offset there.
        fn bytes(view: &View, sizes: &[u64]) -> Vec<(usize, u64)> {
            let mine = view.parts.clone().flat_map(|part| {
                let size = sizes.get(part).copied().unwrap_or(0);
                (0..size).map(move |at| (part, at))
            });
            mine.skip(view.offset.unwrap_or(0) as usize)
                .take(view.len as usize)
                .collect()
        }

        fn sizes_of<'a>(
            view: &View,
            sizes: &'a [u64],
        ) -> impl Iterator<Item = u64> + Clone + use<'a> {
            sizes[view.parts.clone()].iter().copied()
        }

        proptest! {
            /// Windows on windows are exactly their bytes, and touch no further part.
            #[test]
            fn a_window_is_the_bytes_it_names(
                sizes in proptest::collection::vec(1_u64..40, 1..6),
                padding in 0_u64..40,
                windows in proptest::collection::vec((0_u64..100, 0_u64..100), 1..4),
            ) {
                let all: u64 = sizes.iter().sum();
                let padding = padding.min(sizes[sizes.len() - 1]).min(all - 1);
                let mut view = View::whole(sizes.len(), all - padding);
                for (offset, len) in windows {
                    let before = bytes(&view, &sizes);
                    let fits = len > 0 && offset + len <= view.len;
                    let window = view.window(sizes_of(&view, &sizes), offset, len);
                    prop_assert_eq!(window.is_ok(), fits);
                    let Ok(window) = window else { continue };
                    let expected = &before[offset as usize..(offset + len) as usize];
                    let found = bytes(&window, &sizes);
                    prop_assert_eq!(&found[..], expected);
                    let touched = found[0].0..found[found.len() - 1].0 + 1;
                    prop_assert_eq!(window.parts.clone(), touched);
                    view = window;
                }
            }

            #[test]
            fn a_word_is_where_its_first_byte_is(
                sizes in proptest::collection::vec(1_u64..40, 1..6),
                window in prop::option::of((0_u64..60, 1_u64..60)),
                offset in 0_u64..250,
            ) {
                let all: u64 = sizes.iter().sum();
                let mut view = View::whole(sizes.len(), all);
                if let Some((offset, len)) = window
                    && let Ok(window) = view.window(sizes_of(&view, &sizes), offset, len)
                {
                    view = window;
                }
                let bytes = bytes(&view, &sizes);
                let limit = match view.offset.is_some() {
                    true => view.len.saturating_sub(7),
                    // It may extend beyond its part; another test covers that.
                    false => view.len,
                };
                let found = view.word_at(sizes_of(&view, &sizes), offset).ok();
                let expected = (offset < limit).then(|| bytes[offset as usize]);
                prop_assert_eq!(found, expected);
            }
        }

        #[test]
        fn numbers_that_overflow_are_refused() {
            let view = View::whole(1, 100);
            for (offset, len) in [(u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX), (100, 0)] {
                view.window([100].into_iter(), offset, len).unwrap_err();
            }
            let window = view.window([100].into_iter(), 50, 50).unwrap();
            for offset in [u64::MAX, u64::MAX - 7, 43, 50] {
                window.word_at([100].into_iter(), offset).unwrap_err();
                view.word_at([100].into_iter(), offset.max(100))
                    .unwrap_err();
            }
            assert_eq!(window.word_at([100].into_iter(), 42).unwrap(), (0, 92));
        }
    }
}
