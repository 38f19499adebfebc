//! One thread's cache of one heap: small blocks by class, larger ones by size.

use std::sync::Arc;

use super::magazine::{CacheBound, Magazine};
use super::medium::Medium;
use super::reserved::Visitor;
use super::shards::Own;
use crate::classes::{CLASSES, Class};
use crate::ranges::OwnStripe;

/// Counts one thread's allocations and frees. Either may exceed the other: another thread may free.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) allocated: u64,
    pub(crate) freed: u64,
    /// Bytes requested.
    pub(crate) allocated_bytes: u64,
    pub(crate) freed_bytes: u64,
}

impl Tally {
    #[inline]
    pub(crate) const fn allocate(&mut self, bytes: u64) {
        self.allocated = self.allocated.wrapping_add(1);
        self.allocated_bytes = self.allocated_bytes.wrapping_add(bytes);
    }

    #[inline]
    pub(crate) const fn free(&mut self, bytes: u64) {
        self.freed = self.freed.wrapping_add(1);
        self.freed_bytes = self.freed_bytes.wrapping_add(bytes);
    }

    /// Counts a block's change of size.
    pub(crate) const fn resize(&mut self, old: u64, new: u64) {
        self.allocated_bytes = self.allocated_bytes.wrapping_add(new);
        self.freed_bytes = self.freed_bytes.wrapping_add(old);
    }

    pub(crate) const fn add(&mut self, other: &Self) {
        self.allocated = self.allocated.wrapping_add(other.allocated);
        self.freed = self.freed.wrapping_add(other.freed);
        self.allocated_bytes = self.allocated_bytes.wrapping_add(other.allocated_bytes);
        self.freed_bytes = self.freed_bytes.wrapping_add(other.freed_bytes);
    }

    /// Returns the blocks in use, if this is the sum of all threads' tallies. 0 if unsafe code has freed more
    /// blocks than there were.
    pub(crate) const fn live(&self) -> u64 {
        self.allocated.saturating_sub(self.freed)
    }

    /// Returns the bytes requested for these blocks.
    pub(crate) const fn live_bytes(&self) -> u64 {
        self.allocated_bytes.saturating_sub(self.freed_bytes)
    }

    /// Returns whether no blocks are in use. `false` if more were freed than allocated: some may be left
    /// then.
    pub(crate) const fn is_even(&self) -> bool {
        self.allocated == self.freed
    }
}

/// How many blocks of a class a thread gets from the core next: at first the fewest that fill cache lines, then twice
/// as many each time, so that a thread that needs few withholds few from others.
#[derive(Clone, Copy)]
pub(crate) struct RefillSize {
    next: u8,
    /// How many requests came since the thread looked for idle classes, at most [`OFTEN`](Self::OFTEN).
    requests: u8,
}

impl RefillSize {
    const FIRST: Self = Self {
        next: 0,
        requests: 0,
    };

    /// So many requests between two looks are worth a slab.
    const OFTEN: u8 = 8;

    pub(crate) fn next(&mut self, class: Class) -> usize {
        let now = self.next.max(class.blocks_in_lines() as u8);
        // At most half a magazine.
        self.next = (now * 2).min(Magazine::part(class) as u8 / 2);
        now.into()
    }

    /// Counts a request. Returns whether the thread seldom uses the class, so that its block should be a range if it may be:
    /// cached, it would stay in the middle of free memory.
    pub(crate) fn is_rare(&mut self) -> bool {
        let rare = self.requests < Self::OFTEN;
        self.requests += u8::from(rare);
        rare
    }

    /// Begins to count anew, unless the class is used often.
    fn look(&mut self) {
        if self.requests < Self::OFTEN {
            self.requests = 0;
        }
    }
}

/// A thread's cache of a heap.
// In this order: each allocation and free touches the first two.
#[repr(C)]
pub(crate) struct Local {
    pub(crate) tally: Tally,
    /// The heap's last handle was dropped: nothing is cached here any more.
    pub(crate) closed: bool,
    /// How often in a row this thread found that others use the core too.
    pub(crate) crowded: u32,
    /// How many ranges came from the core.
    pub(crate) fetched: u32,
    pub(crate) medium: Medium,
    pub(crate) shard: Option<Box<Own>>,
    /// Where the thread takes small blocks from.
    pub(crate) stripe: OwnStripe,
    /// This thread's identity to the core's lock.
    pub(crate) visitor: Visitor,
    /// The upper bound of the contents, for other threads.
    pub(crate) bound: Arc<CacheBound>,
    pub(crate) small: [Magazine; CLASSES],
    pub(crate) refills: [RefillSize; CLASSES],
}

impl Local {
    pub(crate) fn new() -> Self {
        let bound = Arc::<CacheBound>::default();
        Self {
            small: std::array::from_fn(|_| Magazine::default()),
            refills: [RefillSize::FIRST; CLASSES],
            medium: Medium::new(Arc::clone(&bound)),
            shard: None,
            crowded: 0,
            fetched: 0,
            stripe: OwnStripe::default(),
            bound,
            visitor: Visitor::new(),
            tally: Tally::default(),
            closed: false,
        }
    }

    /// Returns the number of the thread's shard; 0 if it has none.
    #[inline]
    pub(crate) fn shard_id(&self) -> u8 {
        self.shard.as_ref().map_or(0, |own| own.id)
    }

    /// Tightens [`CacheBound`] to the present contents. Drops empty magazines, because pushes to them set no bit.
    pub(crate) fn forget_what_is_gone(&mut self) {
        for (class, magazine) in Class::all().zip(&mut self.small) {
            if self.bound.has(CacheBound::small(class)) && magazine.offsets().is_empty() {
                *magazine = Magazine::default();
                self.bound.forget(CacheBound::small(class));
            }
        }
        self.medium.forget_if_empty();
    }

    /// Calls `give` with the blocks that take a page each, of the classes that the thread has not used since the last
    /// call.
    pub(crate) fn give_idle(&mut self, mut give: impl FnMut(&mut Visitor, &[u64])) {
        for class in Class::all().filter(|class| class.takes_page()) {
            let magazine = &mut self.small[class.index()];
            let refill = &mut self.refills[class.index()];
            refill.look();
            if magazine.park() {
                continue;
            }
            *refill = RefillSize::FIRST;
            let offsets = magazine.take();
            if !offsets.is_empty() {
                give(&mut self.visitor, &offsets);
            }
            self.bound.forget(CacheBound::small(class));
        }
    }

    /// Takes all small blocks.
    pub(crate) fn take_small(&mut self) -> impl Iterator<Item = Vec<u64>> {
        self.refills = [RefillSize::FIRST; CLASSES];
        self.small.iter_mut().map(Magazine::take)
    }

    /// Calls `name` with the offset and bytes of each block.
    pub(crate) fn each(&self, mut name: impl FnMut(u64, u64)) {
        for (class, magazine) in Class::all().zip(&self.small) {
            for &offset in magazine.offsets() {
                name(offset, class.bytes());
            }
        }
        self.medium.each(&mut name);
        let shard = self.shard.iter().flat_map(|own| own.shard.free_ranges());
        shard.for_each(|free| name(free.start, free.end - free.start));
    }

    /// Returns the bytes of all blocks, and the shard's free bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let small = Class::all().zip(&self.small);
        let small = small.map(|(class, magazine)| magazine.offsets().len() as u64 * class.bytes());
        small.sum::<u64>() + self.medium.bytes() + self.bound.shard()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_grant_is_twice_the_last_up_to_half_a_magazine() {
        for class in Class::all() {
            let most = Magazine::part(class) / 2;
            let mut refill = RefillSize::FIRST;
            let mut expected = class.blocks_in_lines();
            for _ in 0..10 {
                assert_eq!(refill.next(class), expected);
                expected = most.min(2 * expected);
            }
            assert_eq!(expected, most);
        }
    }

    #[test]
    fn a_class_is_rare_until_it_is_requested_often_between_two_looks() {
        let mut refill = RefillSize::FIRST;
        for _ in 0..3 {
            (1..RefillSize::OFTEN).for_each(|_| assert!(refill.is_rare()));
            refill.look();
        }
        (0..RefillSize::OFTEN).for_each(|_| assert!(refill.is_rare()));
        assert!(!refill.is_rare());
        refill.look();
        assert!(!refill.is_rare(), "only an idle class is rare again");
    }
}
