//! Pages: their names and their states.

use crate::Key;

/// A page of a tier for one key: the page's number and group, and how often the page has become free before. Once the page is given
/// to another key, the tier refuses this value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    number: u32,
    group: u8,
    uses: u32,
}

impl PageId {
    /// The bits of a group, from bit 32 of an integer on.
    const GROUP: u32 = 6;
    /// The bits of `uses`, behind them: one less than there is room for, so that all bits are a positive `i64` too, as arrays of
    /// numbers have.
    const USES: u32 = (1 << 25) - 1;

    pub(crate) const fn new(number: u32, group: u8, uses: u32) -> Self {
        let uses = uses & Self::USES;
        Self {
            number,
            group,
            uses,
        }
    }

    /// A page of group 0 before it was free again for the first time.
    #[cfg(test)]
    pub(crate) const fn first(number: u32) -> Self {
        Self::new(number, 0, 0)
    }

    /// Returns the page's number, from 0 on.
    pub const fn number(self) -> u32 {
        self.number
    }

    /// Returns the page's group, which decides its size: 0 in a tier with one size of pages.
    pub const fn group(self) -> u8 {
        self.group
    }

    /// Returns how often the page had become free.
    pub(crate) const fn uses(self) -> u32 {
        self.uses
    }

    /// Returns the value as an integer below 2^63, for other languages: the number, from bit 32 on the group, and from bit 38 on how
    /// often the page has become free. For the first key of a page of group 0 it is the number.
    pub const fn to_bits(self) -> u64 {
        ((self.uses as u64) << Self::GROUP | self.group as u64) << 32 | self.number as u64
    }

    /// Returns the value of [`to_bits`](Self::to_bits). A tier refuses one that it has not given out.
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            number: bits as u32,
            group: (bits >> 32) as u8 & ((1 << Self::GROUP) - 1),
            // Bit 63 makes it a value that no tier gives out.
            uses: (bits >> (32 + Self::GROUP)) as u32,
        }
    }
}

/// A key whose page made room for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// The key, which the tier has no longer.
    pub key: Key,
    /// The page.
    pub page: PageId,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From pages to a GPU.
    Load,
    /// From a GPU to pages.
    Store,
}

/// The pages for the keys of a store.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    /// The keys that were not there, by their index in the list, with their pages.
    pub(crate) placed: Vec<(usize, PageId)>,
    pub(crate) evicted: Vec<Evicted>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_back() {
        for page in [
            PageId::new(0, 0, 0),
            PageId::new(u32::MAX, 63, PageId::USES),
            PageId::new(5, 3, 9),
        ] {
            assert_eq!(PageId::from_bits(page.to_bits()), page);
            assert!(page.to_bits() < 1 << 63);
        }
        assert_eq!(PageId::first(7).to_bits(), 7);
        assert_eq!(PageId::new(7, 0, 1 << 25), PageId::first(7));
        assert_ne!(PageId::from_bits(1 << 63), PageId::first(0));
    }
}
