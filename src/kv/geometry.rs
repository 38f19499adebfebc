//! Where a tier's header, index, slots and pages lie in its memory.

use std::sync::Arc;

use crate::page::PageId;
use crate::words::list_for;
use crate::{MemoryError, Result};

/// The bytes of the header.
pub(crate) const HEADER: u64 = 4096;
/// Where the members lie, and the bytes of one.
pub(crate) const MEMBERS: u64 = HEADER;
pub(crate) const MEMBER: u64 = 64;
/// The most members.
pub(crate) const MAX_MEMBERS: u32 = 64;
/// Where the groups lie, and the bytes of one.
pub(crate) const GROUPS: u64 = 8192;
pub(crate) const GROUP: u64 = 64;
/// The most groups.
pub(crate) const MAX_GROUPS: usize = 64;
/// Where the extents' entries lie, and the bytes of one.
pub(crate) const EXTENTS: u64 = 12288;
pub(crate) const EXTENT: u64 = 32;
/// The bytes of a slot.
pub(crate) const SLOT: u64 = 128;
/// The bytes of a bucket of the index.
const BUCKET: u64 = 8;
/// Extents and their pages begin at multiples of this.
const ALIGN: u64 = 4096;
/// No tier has as many slots one after the other: with a random hash the chance is below 2^-100, in a table that is at most three
/// quarters full.
const MAX_PROBES: u64 = 4096;

/// The most pages of a tier.
pub(crate) const MAX_PAGES: u64 = 1 << 30;
/// The most bytes of a page.
pub(crate) const MAX_PAGE_BYTES: u64 = 1 << 32;
/// The most extents.
pub(crate) const MAX_EXTENTS: u64 = 4096;

/// A kind of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) page_bytes: u64,
    /// The pages of an extent.
    pub(crate) pages: u32,
    /// Where they begin in it. The slots are in front of them.
    pages_at: u64,
}

impl Group {
    /// A group whose extents have some pages.
    const fn of(pages: u64, page_bytes: u64) -> Self {
        Self {
            page_bytes,
            pages: pages as u32,
            pages_at: (pages * SLOT).next_multiple_of(ALIGN),
        }
    }

    /// A group with as many pages as an extent takes.
    fn fitting(extent_bytes: u64, page_bytes: u64) -> Self {
        let most = (extent_bytes / (page_bytes + SLOT)).min(MAX_PAGES);
        let fits = |pages: &u64| Self::of(*pages, page_bytes).bytes() <= extent_bytes;
        // The padding behind the slots is less than 4 KiB.
        let pages = (0..=most).rev().find(fits).unwrap_or(0);
        Self::of(pages, page_bytes)
    }

    /// The bytes of the slots and the pages.
    const fn bytes(&self) -> u64 {
        self.pages_at + self.pages as u64 * self.page_bytes
    }
}

/// The header, members, groups, extents' entries and the index, then the extents: each has slots, then pages side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) groups: Arc<[Group]>,
    /// The numbers of pages: as many for each extent as it has pages of the smallest size.
    pub(crate) pages: u32,
    stride: u32,
    /// The bytes of a page of group 0.
    pub(crate) page_bytes: u64,
    /// Where the pages of group 0 begin in the first extent.
    pub(crate) pages_at: u64,
    pub(crate) extents: u32,
    pub(crate) extent_bytes: u64,
    extents_at: u64,
    index_at: u64,
    /// A power of two.
    pub(crate) buckets: u64,
    /// The bytes of everything.
    pub(crate) total: u64,
}

impl Geometry {
    /// A tier of one group, in one extent.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no page, pages of no byte, and for too many of either.
    pub(crate) fn new(pages: u64, page_bytes: u64) -> Result<Self> {
        if pages == 0 || pages > MAX_PAGES {
            let valid = format!("1 to {MAX_PAGES}");
            return Err(MemoryError::invalid_of("pages", format!("{pages} pages"), valid).into());
        }
        expect_page_bytes(page_bytes)?;
        let group = Group::of(pages, page_bytes);
        Ok(Self::over([group].into(), 1, group.bytes()))
    }

    /// A tier of groups that share extents.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for extents out of range, or without a page of each group.
    pub(crate) fn of_extents(extents: u64, extent_bytes: u64, sizes: &[u64]) -> Result<Self> {
        let invalid = |what, why: String| Err(MemoryError::invalid(what, why).into());
        if sizes.is_empty() || sizes.len() > MAX_GROUPS {
            return invalid("page_sizes", format!("{} sizes of pages", sizes.len()));
        }
        sizes
            .iter()
            .try_for_each(|&bytes| expect_page_bytes(bytes))?;
        let is_aligned = extent_bytes.is_multiple_of(ALIGN);
        if extents == 0 || extents > MAX_EXTENTS || extent_bytes > 1 << 48 || !is_aligned {
            return invalid(
                "bytes",
                format!("{extents} extents of {extent_bytes} bytes"),
            );
        }
        let mut groups = list_for(sizes.len())?;
        groups.extend(
            sizes
                .iter()
                .map(|&bytes| Group::fitting(extent_bytes, bytes)),
        );
        let most = groups.iter().map(|group| group.pages).max().unwrap_or(0);
        let least = groups.iter().map(|group| group.pages).min().unwrap_or(0);
        if least == 0 || u64::from(most) * extents > MAX_PAGES {
            let why = format!("extents of {extent_bytes} bytes have {least} to {most} pages");
            return invalid("bytes", why);
        }
        Ok(Self::over(groups.into(), extents, extent_bytes))
    }

    fn over(groups: Arc<[Group]>, extents: u64, extent_bytes: u64) -> Self {
        let stride = groups.iter().map(|group| group.pages).max().unwrap_or(0);
        let pages = extents * u64::from(stride);
        let buckets = (pages * 4).div_ceil(3).next_power_of_two();
        let index_at = EXTENTS + (extents * EXTENT).next_multiple_of(64);
        let extents_at = (index_at + buckets * BUCKET).next_multiple_of(ALIGN);
        Self {
            pages: pages as u32,
            stride,
            page_bytes: groups[0].page_bytes,
            pages_at: extents_at + groups[0].pages_at,
            groups,
            extents: extents as u32,
            extent_bytes,
            extents_at,
            index_at,
            buckets,
            // At most 2^35 for the index, and 2^63 for the extents.
            total: extents_at + extents * extent_bytes,
        }
    }

    /// Returns how many pages of one size fit into a memory; 1 if none does.
    pub(crate) fn fitting(bytes: u64, page_bytes: u64) -> u64 {
        let fits = |pages| Self::new(pages, page_bytes).is_ok_and(|all| all.total <= bytes);
        // Those below `fit` fit, and those from `beyond` on do not.
        let (mut fit, mut beyond) = (1, MAX_PAGES + 1);
        while beyond - fit > 1 {
            let middle = fit.midpoint(beyond);
            match fits(middle) {
                true => fit = middle,
                false => beyond = middle,
            }
        }
        fit
    }

    /// Returns whether extents serve several groups.
    pub(crate) fn has_groups(&self) -> bool {
        self.groups.len() > 1
    }

    /// Returns the bytes of everything in front of the first pages, with these: the first page, or the first extent.
    pub(crate) fn front(&self) -> u64 {
        match self.has_groups() {
            true => self.extents_at + self.extent_bytes,
            false => self.pages_at + self.page_bytes,
        }
    }

    /// Returns the number below which all pages lie in the first `bytes` bytes: those of whole extents, if there are several groups.
    pub(crate) fn pages_within(&self, bytes: u64) -> u32 {
        let pages = match self.has_groups() {
            true => {
                bytes.saturating_sub(self.extents_at) / self.extent_bytes * u64::from(self.stride)
            }
            false => bytes.saturating_sub(self.pages_at) / self.page_bytes,
        };
        pages.min(self.pages.into()) as u32
    }

    /// Returns the extent of a page, and its place there.
    #[inline]
    pub(crate) fn place_of(&self, page: u32) -> (u32, u32) {
        match self.extents {
            1 => (0, page),
            _ => (page / self.stride, page % self.stride),
        }
    }

    /// Returns the numbers of an extent's pages, as one of a group.
    pub(crate) fn pages_of(&self, extent: u32, group: &Group) -> std::ops::Range<u32> {
        let first = extent * self.stride;
        first..first + group.pages
    }

    /// Returns where the slot of a page lies.
    #[inline]
    pub(crate) fn slot_at(&self, page: u32) -> u64 {
        let (extent, place) = self.place_of(page);
        self.extents_at + u64::from(extent) * self.extent_bytes + u64::from(place) * SLOT
    }

    /// Returns where an extent's entry lies.
    pub(crate) const fn extent_at(&self, extent: u32) -> u64 {
        EXTENTS + extent as u64 * EXTENT
    }

    /// Returns where the index lies.
    pub(crate) const fn index(&self) -> std::ops::Range<u64> {
        self.index_at..self.index_at + self.buckets * BUCKET
    }

    /// Returns where a bucket of the index lies.
    #[inline]
    pub(crate) const fn bucket_at(&self, bucket: u64) -> u64 {
        self.index_at + (bucket & (self.buckets - 1)) * BUCKET
    }

    /// Returns how many buckets are looked at for one key.
    pub(crate) const fn probes(&self) -> u64 {
        if self.buckets < MAX_PROBES {
            self.buckets
        } else {
            MAX_PROBES
        }
    }

    /// Returns whether there can be such a page.
    pub(crate) fn has(&self, page: PageId) -> bool {
        let (_, place) = self.place_of(page.number());
        let group = self.groups.get(usize::from(page.group()));
        page.number() < self.pages && group.is_some_and(|group| place < group.pages)
    }

    /// Returns where a page lies, which is one of the tier's.
    pub(crate) fn page_at(&self, page: PageId) -> u64 {
        let (extent, place) = self.place_of(page.number());
        let group = self.group_of(page);
        let at = self.extents_at + u64::from(extent) * self.extent_bytes + group.pages_at;
        at + u64::from(place) * group.page_bytes
    }

    /// Returns the bytes of a page, which is one of the tier's.
    pub(crate) fn page_bytes_of(&self, page: PageId) -> u64 {
        self.group_of(page).page_bytes
    }

    fn group_of(&self, page: PageId) -> Group {
        let group = self.groups.get(usize::from(page.group()));
        group.copied().unwrap_or(self.groups[0])
    }
}

fn expect_page_bytes(bytes: u64) -> Result<()> {
    if bytes == 0 || bytes > MAX_PAGE_BYTES {
        let why = format!("pages of {bytes} bytes");
        let valid = format!("1 to {MAX_PAGE_BYTES}");
        return Err(MemoryError::invalid_of("page_bytes", why, valid).into());
    }
    Ok(())
}

/// The sizes that are tried, from the smallest on, at each multiple of 4 KiB.
const TRIES: u64 = 1 << 16;
/// Ten-thousandths of the budget that every group's slots and pages are to fill, if it had all extents.
const ENOUGH: u64 = 9_920;
/// As many extents at least, where the budget allows: extents are what groups take from each other.
const LEAST_EXTENTS: u64 = 32;

impl Geometry {
    /// A tier of groups that share at most `bytes` bytes.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for sizes out of range, and for too few bytes: each group needs
    /// room for an extent.
    pub(crate) fn of_bytes(bytes: u64, sizes: &[u64]) -> Result<Self> {
        sizes.iter().try_for_each(|&size| expect_page_bytes(size))?;
        let largest = sizes.iter().copied().max().unwrap_or(1);
        // No extent is smaller than its largest page with its slot.
        let least = (bytes / MAX_EXTENTS)
            .max(largest + ALIGN)
            .next_multiple_of(ALIGN);
        let most = (bytes / LEAST_EXTENTS)
            .max(least)
            .min(least + TRIES * ALIGN);
        let sizes_tried = (least..=most).step_by(ALIGN as usize);
        let mut best = (0, least);
        for extent_bytes in sizes_tried {
            let filled = least_filled(bytes, extent_bytes, sizes);
            if filled > best.0 {
                best = (filled, extent_bytes);
            }
            if filled >= ENOUGH {
                break;
            }
        }
        let extent_bytes = best.1;
        let groups = sizes.len().max(1) as u64;
        let most = (bytes / extent_bytes).min(MAX_EXTENTS);
        // The index takes less than another extent or a few.
        let fits = |extents| {
            let tier = Self::of_extents(extents, extent_bytes, sizes);
            tier.map(|tier| (tier.total <= bytes).then_some(tier))
                .transpose()
        };
        let tier = (groups..=most).rev().find_map(fits);
        let too_few = || {
            let why = format!("{bytes} bytes for {groups} sizes of pages of up to {largest} bytes");
            MemoryError::invalid("bytes", why).into()
        };
        tier.unwrap_or_else(|| Err(too_few()))
    }
}

/// Returns how many ten-thousandths of the budget the group fills that fills the least, before the index.
fn least_filled(bytes: u64, extent_bytes: u64, sizes: &[u64]) -> u64 {
    let extents = (bytes / extent_bytes).min(MAX_EXTENTS);
    let filled = |&page_bytes: &u64| {
        let pages = u64::from(Group::fitting(extent_bytes, page_bytes).pages);
        let all = u128::from(extents * pages) * u128::from(page_bytes + SLOT);
        (all * 10_000 / u128::from(bytes.max(1))) as u64
    };
    sizes.iter().map(filled).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn nothing_overlaps_and_all_fits(pages in 1..=MAX_PAGES, page_bytes in 1..=MAX_PAGE_BYTES) {
            let geometry = Geometry::new(pages, page_bytes).unwrap();
            let first = PageId::first(0);
            let last = PageId::first(geometry.pages - 1);
            prop_assert_eq!(u64::from(geometry.pages), pages);
            prop_assert!(geometry.bucket_at(geometry.buckets - 1) + BUCKET <= geometry.slot_at(0));
            prop_assert!(geometry.buckets * 3 >= pages * 4);
            prop_assert!(geometry.slot_at(last.number()) + SLOT <= geometry.page_at(first));
            prop_assert_eq!(geometry.page_at(last) + page_bytes, geometry.total);
            prop_assert_eq!(geometry.pages_within(geometry.front()), 1);
            prop_assert_eq!(geometry.pages_within(geometry.front() - 1), 0);
            prop_assert_eq!(geometry.pages_within(geometry.total - 1), geometry.pages - 1);
            prop_assert_eq!(geometry.pages_within(u64::MAX), geometry.pages);
            prop_assert!(geometry.has(last) && !geometry.has(PageId::first(geometry.pages)));
            prop_assert!(!geometry.has(PageId::new(0, 1, 0)));
        }

        #[test]
        fn extents_lie_side_by_side(
            extents in 1..=64_u64,
            sizes in prop::collection::vec(1..=1_u64 << 20, 1..9),
            extent in 300..=1000_u64,
        ) {
            let geometry = Geometry::of_extents(extents, extent * ALIGN, &sizes).unwrap();
            for (group, &bytes) in geometry.groups.iter().zip(&sizes) {
                prop_assert_eq!(group.page_bytes, bytes);
                prop_assert!(group.bytes() <= extent * ALIGN);
                prop_assert!(Group::of(u64::from(group.pages) + 1, bytes).bytes() > extent * ALIGN);
                let last = geometry.pages_of(geometry.extents - 1, group).end - 1;
                prop_assert_eq!(geometry.place_of(last), (geometry.extents - 1, group.pages - 1));
                prop_assert!(geometry.slot_at(last) + SLOT <= geometry.total);
            }
            let first = PageId::first(geometry.stride * (geometry.extents - 1));
            prop_assert_eq!(geometry.slot_at(first.number()), geometry.total - extent * ALIGN);
            prop_assert_eq!(geometry.page_at(first), geometry.slot_at(first.number()) + geometry.groups[0].pages_at);
        }
    }

    proptest! {
        #[test]
        fn as_many_pages_fit_as_fit(bytes in 8192_u64..1 << 24, page_bytes in 1_u64..100_000) {
            let pages = Geometry::fitting(bytes, page_bytes);
            let total = |pages| Geometry::new(pages, page_bytes).map(|all| all.total);
            if pages > 1 {
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
        let mib = 1 << 20;
        for (extents, bytes, sizes) in [
            (0, mib, &[1][..]),
            (MAX_EXTENTS + 1, mib, &[1]),
            (1, mib - 1, &[1]),
            (1, mib, &[1, mib]),
            (1, mib, &[]),
            (1, mib, &[1, 0]),
            (1, mib, &[1; 65]),
            (1, !4095, &[1]),
            (4096, 1 << 38, &[1]),
        ] {
            assert!(
                Geometry::of_extents(extents, bytes, sizes).is_err(),
                "{extents} {bytes}"
            );
        }
    }
}

#[cfg(test)]
mod choice_tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Sizes of pages of real models, and odd ones.
    const SIZES: [u64; 9] = [
        16 << 10,
        36_864,
        64 << 10,
        294_912,
        256 << 10,
        8_256,
        1_179_648,
        1 << 20,
        2 << 20,
    ];

    #[test]
    fn each_group_can_use_the_budget() {
        for gib in [4, 5, 7, 16, 48, 100, 480, 2000] {
            let budget = gib * GIB + 12_345;
            let tier = Geometry::of_bytes(budget, &SIZES).unwrap();
            assert!(tier.total <= budget && tier.extents >= 32);
            for group in &*tier.groups {
                let pages = u64::from(tier.extents) * u64::from(group.pages);
                let part = (pages * group.page_bytes) as f64 / budget as f64;
                assert!(part >= 0.97, "{gib} GiB, {group:?}: {part}");
            }
        }
    }

    #[test]
    fn a_budget_has_room_for_each_group() {
        assert!(Geometry::of_bytes(8 << 20, &SIZES).is_err());
        assert!(Geometry::of_bytes(1 << 20, &[]).is_err());
        let tier = Geometry::of_bytes(64 << 20, &SIZES).unwrap();
        assert!(tier.extents >= 9 && tier.total <= 64 << 20);
        assert!(Geometry::of_bytes(0, &[16]).is_err());
        assert!(Geometry::of_bytes(1 << 20, &[16, 32]).is_ok());
    }
}
