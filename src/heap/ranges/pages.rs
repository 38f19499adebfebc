//! Maps an offset to the block or slab there: one entry for each page of the heap, read and written without
//! a lock.
//!
//! Ranges that are blocks are at least as large as a page, so at most one begins in each; slabs consist of
//! whole pages. A slab names all of its pages; a range is named only if it will be looked up by its offset
//! alone. Entries are not cleared: an entry is valid only while the caller owns a block in that page.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use super::nodes::RangeId;
use super::slabs::SlabId;
use crate::classes::PAGE;

/// Pages in one leaf of the table, which covers 1 MiB: small, so that large blocks far apart need few bytes
/// of it.
const LEAF: usize = 512;
/// Leaves in one part, which covers 1 GiB.
const PART: usize = 1024;
const SLAB: u32 = 1 << 31;

type Leaf = [AtomicU32; LEAF];
type Part = [OnceLock<Box<Leaf>>; PART];

/// The owner of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The range that begins there.
    Range(RangeId),
    /// The slab that contains the page.
    Slab(SlabId),
}

/// The table: a radix tree of parts and leaves, which are added when first needed.
pub(crate) struct PageMap {
    parts: Box<[OnceLock<Box<Part>>]>,
    /// The table's size, in bytes.
    metadata: AtomicUsize,
}

impl PageMap {
    /// Creates a table for offsets below `limit`, in bytes.
    pub(super) fn new(limit: u64) -> Self {
        let parts = limit.div_ceil(PAGE * (LEAF * PART) as u64);
        let parts: Box<[_]> = (0..parts).map(|_| OnceLock::new()).collect();
        let metadata = AtomicUsize::new(size_of_val(&*parts));
        Self { parts, metadata }
    }

    /// Names the owner of `offset`; the caller owns the memory there.
    #[inline]
    pub(crate) fn set(&self, offset: u64, owner: Owner) {
        let entry = 1 + match owner {
            Owner::Range(node) => node.number(),
            Owner::Slab(slab) => slab.0 | SLAB,
        };
        let page = (offset / PAGE) as usize;
        let leaf = match self.leaf(page) {
            Some(leaf) => leaf,
            None => match self.new_leaf(page) {
                Some(leaf) => leaf,
                None => return, // not below the limit
            },
        };
        leaf[page % LEAF].store(entry, Relaxed);
    }

    /// Returns the owner that was named at `offset` last.
    #[inline]
    pub(crate) fn get(&self, offset: u64) -> Option<Owner> {
        let page = (offset / PAGE) as usize;
        match self.leaf(page)?[page % LEAF].load(Relaxed).checked_sub(1)? {
            slab if slab & SLAB != 0 => Some(Owner::Slab(SlabId(slab & !SLAB))),
            node => Some(Owner::Range(RangeId::from_number(node))),
        }
    }

    #[inline]
    fn leaf(&self, page: usize) -> Option<&Leaf> {
        let part = self.parts.get(page / (LEAF * PART))?.get()?;
        Some(part[page / LEAF % PART].get()?)
    }

    #[cold]
    fn new_leaf(&self, page: usize) -> Option<&Leaf> {
        let part = self.parts.get(page / (LEAF * PART))?.get_or_init(|| {
            self.metadata.fetch_add(size_of::<Part>(), Relaxed);
            Box::new([const { OnceLock::new() }; PART])
        });
        Some(part[page / LEAF % PART].get_or_init(|| {
            self.metadata.fetch_add(size_of::<Leaf>(), Relaxed);
            Box::new([const { AtomicU32::new(0) }; LEAF])
        }))
    }

    /// Returns the table's size, in bytes.
    pub(super) fn metadata(&self) -> usize {
        self.metadata.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_named_last_is_found() {
        let pages = PageMap::new((1 << 30) + 1);
        let before = pages.metadata();
        let range = Owner::Range(RangeId::from_number(7));
        for offset in [0, PAGE, (1 << 20) - 1, 1 << 20, (1 << 30) - 1, 1 << 30] {
            assert_eq!(pages.get(offset), None);
            pages.set(offset, Owner::Slab(SlabId(3)));
            assert_eq!(pages.get(offset), Some(Owner::Slab(SlabId(3))));
            pages.set(offset, range);
            assert_eq!(pages.get(offset / PAGE * PAGE), Some(range));
        }
        // Two parts and four leaves.
        let taken = 2 * size_of::<Part>() + 4 * size_of::<Leaf>();
        assert_eq!(pages.metadata() - before, taken);
    }

    #[test]
    fn beyond_the_limit_there_is_nothing() {
        let pages = PageMap::new(1);
        pages.set(1 << 30, Owner::Slab(SlabId(0)));
        assert_eq!(pages.get(1 << 30), None);
    }
}
