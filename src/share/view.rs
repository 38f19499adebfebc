//! Which bytes of several adjacent parts are shared: pure arithmetic.

use std::ops::Range;

use crate::memory::check_range;
use egmem_core::{Error, Result};

/// Usable bytes among parts: all from the first part's start, or a window on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    parts: Range<usize>,
    /// For a window: its start, from the start of the first of `parts`, in which it begins.
    offset: Option<u64>,
    len: u64,
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

    /// Returns the parts that it touches.
    pub fn parts(&self) -> Range<usize> {
        self.parts.clone()
    }

    /// Returns where a window begins in the first of them.
    pub const fn offset(&self) -> Option<u64> {
        self.offset
    }

    pub const fn is_window(&self) -> bool {
        self.offset.is_some()
    }

    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Returns a window of `len` bytes, `offset` bytes into this, whose parts have these sizes.
    pub fn window(&self, sizes: impl Iterator<Item = u64>, offset: u64, len: u64) -> Result<Self> {
        if len == 0 {
            let why = "a window of 0 bytes";
            return Err(Error::invalid_of("length", why, "1 byte or more"));
        }
        check_range(offset, len, self.len)?;
        let begin = self.offset.unwrap_or(0) + offset;
        let end = begin + len;
        let mut parts = 0..0;
        let mut within = 0;
        let mut start = 0_u64;
        for (index, size) in sizes.enumerate() {
            let next = start.saturating_add(size);
            if (start..next).contains(&begin) {
                parts.start = self.parts.start + index;
                within = begin - start;
            }
            if start < end {
                parts.end = self.parts.start + index + 1;
            }
            start = next;
        }
        Ok(Self {
            parts,
            offset: Some(within),
            len,
        })
    }

    /// Returns the part in which the word at `offset` begins, and its offset there. There is none beyond a
    /// window.
    pub fn word_at(&self, sizes: impl Iterator<Item = u64>, offset: u64) -> Result<(usize, u64)> {
        const WORD: u64 = size_of::<u64>() as u64;
        if self.is_window() {
            check_range(offset, WORD, self.len)?;
        }
        let at = self.offset.unwrap_or(0).saturating_add(offset);
        let mut start = 0_u64;
        for (index, size) in sizes.enumerate() {
            let next = start.saturating_add(size);
            if at < next {
                return Ok((self.parts.start + index, at - start));
            }
            start = next;
        }
        Err(Error::OutOfRange {
            offset,
            len: WORD,
            size: start,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the bytes of a view, each as its part and its offset there.
    fn bytes(view: &View, sizes: &[u64]) -> Vec<(usize, u64)> {
        let mine = view.parts().flat_map(|part| {
            let size = sizes.get(part).copied().unwrap_or(0);
            (0..size).map(move |at| (part, at))
        });
        mine.skip(view.offset().unwrap_or(0) as usize)
            .take(view.len() as usize)
            .collect()
    }

    fn sizes_of<'a>(view: &View, sizes: &'a [u64]) -> impl Iterator<Item = u64> + use<'a> {
        sizes[view.parts()].iter().copied()
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
                let fits = len > 0 && offset + len <= view.len();
                let window = view.window(sizes_of(&view, &sizes), offset, len);
                prop_assert_eq!(window.is_ok(), fits);
                let Ok(window) = window else { continue };
                let expected = &before[offset as usize..(offset + len) as usize];
                let found = bytes(&window, &sizes);
                prop_assert_eq!(&found[..], expected);
                let touched = found[0].0..found[found.len() - 1].0 + 1;
                prop_assert_eq!(window.parts(), touched);
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
            let limit = match view.is_window() {
                true => view.len().saturating_sub(7),
                // It may extend beyond its part; another test covers that.
                false => view.len(),
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
