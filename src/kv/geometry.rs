//! Where a tier's header, table and pages lie in its memory.

use crate::page::PageId;
use crate::{MemoryError, Result};

/// The bytes of the header.
pub(crate) const HEADER: u64 = 4096;
/// The bytes of a slot of the table.
pub(crate) const SLOT: u64 = 96;
/// The pages begin at a multiple of this.
const PAGES_AT: u64 = 4096;

/// The most pages of a tier.
pub(crate) const MAX_PAGES: u64 = 1 << 30;
/// The most bytes of a page.
pub(crate) const MAX_PAGE_BYTES: u64 = 1 << 32;

/// The header, then a slot for each page, then the pages side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) pages: u32,
    pub(crate) page_bytes: u64,
    /// Where the pages begin.
    pub(crate) pages_at: u64,
    /// The bytes of everything.
    pub(crate) total: u64,
}

impl Geometry {
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no page, pages of no byte, and for too many of either.
    pub(crate) fn new(pages: u64, page_bytes: u64) -> Result<Self> {
        if pages == 0 || pages > MAX_PAGES {
            let valid = format!("1 to {MAX_PAGES}");
            return Err(MemoryError::invalid_of("pages", format!("{pages} pages"), valid).into());
        }
        if page_bytes == 0 || page_bytes > MAX_PAGE_BYTES {
            let why = format!("pages of {page_bytes} bytes");
            let valid = format!("1 to {MAX_PAGE_BYTES}");
            return Err(MemoryError::invalid_of("page_bytes", why, valid).into());
        }
        // At most 2^12 + 2^37 + 2^12 + 2^62.
        let pages_at = (HEADER + pages * SLOT).next_multiple_of(PAGES_AT);
        Ok(Self {
            pages: pages as u32,
            page_bytes,
            pages_at,
            total: pages_at + pages * page_bytes,
        })
    }

    /// Returns how many pages fit into a memory.
    pub(crate) fn fitting(bytes: u64, page_bytes: u64) -> u64 {
        // The padding before the pages takes less than a page of 4 KiB.
        let least = bytes.saturating_sub(HEADER + PAGES_AT) / page_bytes.saturating_add(SLOT);
        let fits = |pages: &u64| Self::new(*pages, page_bytes).is_ok_and(|all| all.total <= bytes);
        let most = least.saturating_add(PAGES_AT / SLOT + 1).min(MAX_PAGES);
        let least = least.min(MAX_PAGES);
        (least..=most).rev().find(fits).unwrap_or(least)
    }

    /// Returns the bytes of the header, the table and the first page.
    pub(crate) const fn front(&self) -> u64 {
        self.pages_at + self.page_bytes
    }

    /// Returns how many pages lie in the first `bytes` bytes.
    pub(crate) fn pages_within(&self, bytes: u64) -> u32 {
        let pages = bytes.saturating_sub(self.pages_at) / self.page_bytes;
        pages.min(self.pages.into()) as u32
    }

    /// Returns where the slot of a page lies.
    pub(crate) fn slot_at(&self, page: PageId) -> u64 {
        HEADER + u64::from(page.number()) * SLOT
    }

    /// Returns the bytes of a page of the tier.
    pub(crate) const fn page_bytes_of(&self, _page: PageId) -> u64 {
        self.page_bytes
    }

    /// Returns where a page lies, which is one of the tier's.
    pub(crate) fn page_at(&self, page: PageId) -> u64 {
        self.pages_at + u64::from(page.number()) * self.page_bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn nothing_overlaps_and_all_fits(pages in 1..=MAX_PAGES, page_bytes in 1..=MAX_PAGE_BYTES) {
            let geometry = Geometry::new(pages, page_bytes).unwrap();
            let last = PageId::first(geometry.pages - 1);
            prop_assert_eq!(u64::from(geometry.pages), pages);
            prop_assert!(geometry.slot_at(PageId::first(0)) >= HEADER);
            prop_assert!(geometry.slot_at(last) + SLOT <= geometry.page_at(PageId::first(0)));
            prop_assert_eq!(geometry.page_at(last) + page_bytes, geometry.total);
            prop_assert_eq!(geometry.pages_within(geometry.front()), 1);
            prop_assert_eq!(geometry.pages_within(geometry.front() - 1), 0);
            prop_assert_eq!(geometry.pages_within(geometry.total - 1), geometry.pages - 1);
            prop_assert_eq!(geometry.pages_within(u64::MAX), geometry.pages);
        }
    }

    proptest! {
        #[test]
        fn as_many_pages_fit_as_fit(bytes in 8192_u64..1 << 24, page_bytes in 1_u64..100_000) {
            let pages = Geometry::fitting(bytes, page_bytes);
            let total = |pages| Geometry::new(pages, page_bytes).map(|all| all.total);
            if pages > 0 {
                prop_assert!(total(pages).unwrap() <= bytes);
            }
            prop_assert!(total(pages + 1).unwrap() > bytes);
        }
    }

    #[test]
    fn sizes_out_of_range_are_refused() {
        for (pages, page_bytes) in [(0, 1), (1, 0), (MAX_PAGES + 1, 1), (1, MAX_PAGE_BYTES + 1)] {
            assert!(Geometry::new(pages, page_bytes).is_err());
        }
    }
}
