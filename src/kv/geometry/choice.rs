//! The choice of the extents' size.

use super::{ALIGN, Geometry, Group, MAX_EXTENTS, SLOT, expect_page_bytes};
use crate::{MemoryError, Result};

/// The sizes that are tried, from the smallest on, at each multiple of 4 KiB.
const TRIES: u64 = 1 << 16;
/// Ten-thousandths of the budget that every group's slots and pages are to fill, if it had all extents.
const ENOUGH: u64 = 9_920;
/// As many extents at least, where the budget allows: extents are what groups take from each other.
const EXTENTS: u64 = 32;

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
        let most = (bytes / EXTENTS).max(least).min(least + TRIES * ALIGN);
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
