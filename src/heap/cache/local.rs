//! One thread's cache of one heap: small blocks by class, larger ones by size.

use std::sync::Arc;

use super::bound::CacheBound;
use super::medium::Medium;
use super::reserved::Visitor;
use super::shards::Own;
use crate::classes::{CLASSES, Class};

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
        self.next = (now * 2).min(class.magazine() as u8 / 2);
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

/// A stack of small blocks' offsets.
#[derive(Default)]
struct Stack {
    len: usize,
    offsets: Box<[u64]>,
}

/// The small blocks of one class: room for two magazines (Bonwick and Adams, "Magazines and Vmem", 2001), of which one
/// comes or goes at a time.
#[derive(Default)]
pub(crate) struct Shelf {
    stack: Stack,
    /// The stack until the class's next allocation or free, if it has room.
    parked: Stack,
}

impl Shelf {
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u64> {
        let len = self.stack.len.checked_sub(1)?;
        self.stack.len = len;
        self.stack.offsets.get(len).copied()
    }

    /// Returns `false` if there is no room before [`make_room`](Self::make_room).
    #[inline]
    pub(crate) fn push(&mut self, offset: u64) -> bool {
        let Some(free) = self.stack.offsets.get_mut(self.stack.len) else {
            return false;
        };
        *free = offset;
        self.stack.len += 1;
        true
    }

    /// Takes the stack out of use; returns `false` if it was out before and the class was not used since.
    fn park(&mut self) -> bool {
        let was_used = self.parked.offsets.is_empty();
        if was_used {
            self.parked = std::mem::take(&mut self.stack);
        }
        was_used
    }

    /// Uses the parked stack again, if there is one.
    pub(crate) fn unpark(&mut self) {
        if !self.parked.offsets.is_empty() {
            self.stack = std::mem::take(&mut self.parked);
        }
    }

    /// Makes room for a block of `class`; returns the magazine of the oldest blocks if there was none.
    pub(crate) fn make_room(&mut self, class: Class) -> Option<Vec<u64>> {
        self.unpark();
        let Stack { len, offsets } = &mut self.stack;
        if offsets.is_empty() {
            *offsets = vec![0; 2 * class.magazine()].into();
        }
        if *len < offsets.len() {
            return None;
        }
        let oldest = offsets[..class.magazine()].to_vec();
        offsets.copy_within(class.magazine().., 0);
        *len -= oldest.len();
        Some(oldest)
    }

    /// Lets `fill` write up to `most` offsets to an empty shelf of `class`; it returns how many it wrote. The last is handed
    /// out first.
    pub(crate) fn fill(
        &mut self,
        class: Class,
        most: usize,
        fill: impl FnOnce(&mut [u64]) -> usize,
    ) {
        self.make_room(class);
        self.stack.len = fill(&mut self.stack.offsets[..most]);
    }

    fn all(&self) -> impl Iterator<Item = u64> {
        let stacks = [&self.stack, &self.parked].into_iter();
        stacks.flat_map(|stack| stack.offsets[..stack.len].iter().copied())
    }

    fn take_all(&mut self) -> Vec<u64> {
        let all = self.all().collect();
        *self = Self::default();
        all
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
    /// This thread's identity to the core's lock.
    pub(crate) visitor: Visitor,
    /// The upper bound of the contents, for other threads.
    pub(crate) bound: Arc<CacheBound>,
    pub(crate) small: [Shelf; CLASSES],
    pub(crate) refills: [RefillSize; CLASSES],
}

impl Local {
    pub(crate) fn new() -> Self {
        let bound = Arc::<CacheBound>::default();
        Self {
            small: std::array::from_fn(|_| Shelf::default()),
            refills: [RefillSize::FIRST; CLASSES],
            medium: Medium::new(Arc::clone(&bound)),
            shard: None,
            crowded: 0,
            fetched: 0,
            bound,
            visitor: Visitor::new(),
            tally: Tally::default(),
            closed: false,
        }
    }

    /// Tightens [`CacheBound`] to the present contents. Drops empty stacks, because pushes to them set no bit.
    pub(crate) fn forget_what_is_gone(&mut self) {
        for (class, shelf) in Class::all().zip(&mut self.small) {
            if self.bound.has(CacheBound::small(class)) && shelf.all().next().is_none() {
                *shelf = Shelf::default();
                self.bound.forget(CacheBound::small(class));
            }
        }
        self.medium.forget_if_empty();
    }

    /// Takes the small blocks of a class that the thread has not used since the last call; `None` if it has.
    pub(crate) fn take_idle(&mut self, class: Class) -> Option<Vec<u64>> {
        let shelf = &mut self.small[class.index()];
        let refill = &mut self.refills[class.index()];
        refill.look();
        if shelf.park() {
            return None;
        }
        *refill = RefillSize::FIRST;
        Some(shelf.take_all())
    }

    /// Takes all small blocks.
    pub(crate) fn take_small(&mut self) -> impl Iterator<Item = u64> {
        self.refills = [RefillSize::FIRST; CLASSES];
        self.small.iter_mut().flat_map(Shelf::take_all)
    }

    /// Calls `name` with the offset and bytes of each block.
    pub(crate) fn each(&self, mut name: impl FnMut(u64, u64)) {
        for (class, shelf) in Class::all().zip(&self.small) {
            shelf.all().for_each(|offset| name(offset, class.bytes()));
        }
        self.medium.each(&mut name);
        let shard = self.shard.iter().flat_map(|own| own.shard.free_ranges());
        shard.for_each(|free| name(free.start, free.end - free.start));
    }

    /// Returns the bytes of all blocks, and the shard's free bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let small = Class::all().zip(&self.small);
        let small: u64 = small
            .map(|(class, shelf)| shelf.all().count() as u64 * class.bytes())
            .sum();
        small + self.medium.bytes() + self.bound.shard()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_grant_is_twice_the_last_up_to_half_a_magazine() {
        for class in Class::all() {
            let most = class.magazine() / 2;
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

    proptest! {
        #[test]
        fn a_shelf_gives_back_what_was_put_in(steps in proptest::collection::vec(any::<bool>(), 0..2000), class in 0..CLASSES) {
            let class = Class::from_index(class);
            let capacity = class.magazine();
            let mut shelf = Shelf::default();
            let mut there: Vec<u64> = Vec::new();
            for (offset, push) in steps.into_iter().enumerate() {
                if push {
                    if !shelf.push(offset as u64) {
                        let oldest = shelf.make_room(class).unwrap_or_default();
                        prop_assert!(oldest.is_empty() || oldest.len() == capacity);
                        there.retain(|offset| !oldest.contains(offset));
                        prop_assert!(shelf.push(offset as u64));
                    }
                    there.push(offset as u64);
                    prop_assert!(there.len() <= 2 * capacity);
                } else if let Some(offset) = shelf.pop() {
                    let at = there.iter().position(|&other| other == offset);
                    there.swap_remove(at.expect("it was pushed exactly once"));
                } else {
                    prop_assert!(there.is_empty());
                }
            }
            let mut left = shelf.take_all();
            left.sort_unstable();
            there.sort_unstable();
            prop_assert_eq!(left, there);
        }
    }
}
