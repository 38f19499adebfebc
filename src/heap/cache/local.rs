//! One thread's cache of one heap: small blocks by class, larger ones by size.

use std::sync::Arc;

use super::kept::Kept;
use super::load::Contents;
use super::magazine::Magazine;
use super::medium::Medium;
use super::reserved::Visitor;
use super::shards::Own;
use crate::classes::{CLASSES, Class};

/// The small blocks of one class, in two magazines: a thread that allocates and frees around the boundary
/// of one exchanges none.
#[derive(Default)]
pub(crate) struct Shelf {
    /// Blocks are popped from and pushed to this one.
    loaded: Option<Box<Magazine>>,
    /// Full or empty, if present.
    spare: Option<Box<Magazine>>,
    /// The loaded one until the class's next allocation or free, which loads it again.
    parked: Option<Box<Magazine>>,
}

impl Shelf {
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<u64> {
        match self.loaded.as_mut()?.pop() {
            Some(offset) => Some(offset),
            None => {
                std::mem::swap(&mut self.loaded, &mut self.spare);
                self.loaded.as_mut()?.pop()
            }
        }
    }

    /// Loads the parked magazine again, if there is one.
    pub(crate) fn unpark(&mut self) {
        if let Some(parked) = self.parked.take() {
            self.loaded = Some(parked);
        }
    }

    /// Pushes a block of `class`. Returns a full magazine that has no place here, to be handed on.
    #[inline]
    pub(crate) fn push(&mut self, class: Class, offset: u64, kept: &Kept) -> Option<Box<Magazine>> {
        let rounds = Magazine::rounds(class);
        if let Some(loaded) = &mut self.loaded
            && loaded.len < rounds
        {
            loaded.offsets[loaded.len] = offset;
            loaded.len += 1;
            return None;
        }
        self.push_slowly(class, offset, kept)
    }

    #[cold]
    fn push_slowly(&mut self, class: Class, offset: u64, kept: &Kept) -> Option<Box<Magazine>> {
        if self.parked.is_some() {
            self.unpark();
            return self.push(class, offset, kept);
        }
        kept.note(Kept::small(class));
        let full = match &self.spare {
            Some(spare) if spare.len == 0 => None,
            _ => self.spare.take(),
        };
        std::mem::swap(&mut self.loaded, &mut self.spare);
        let loaded = self.loaded.get_or_insert_with(Magazine::empty);
        loaded.offsets[0] = offset;
        loaded.len = 1;
        full
    }

    /// Takes a magazine in when no blocks are left; drops the empty one, if any.
    pub(crate) fn load(&mut self, magazine: Box<Magazine>) {
        self.unpark();
        if let Some(empty) = self.loaded.replace(magazine) {
            self.spare.get_or_insert(empty);
        }
    }

    /// Returns an empty magazine to fill: the loaded one, if any.
    pub(crate) fn take_empty(&mut self) -> Box<Magazine> {
        self.loaded.take().unwrap_or_else(Magazine::empty)
    }

    fn all(&self) -> impl Iterator<Item = &Magazine> {
        let all = [&self.loaded, &self.spare, &self.parked];
        all.into_iter().flatten().map(|full| &**full)
    }

    fn take_all(&mut self) -> impl Iterator<Item = Box<Magazine>> {
        let all = [self.loaded.take(), self.spare.take(), self.parked.take()];
        all.into_iter().flatten().filter(|full| full.len > 0)
    }

    fn bytes(&self, class: Class) -> u64 {
        self.blocks() as u64 * class.bytes()
    }

    fn blocks(&self) -> usize {
        self.all().map(|full| full.len).sum()
    }
}

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
pub(crate) struct Grant {
    next: u8,
    /// How many requests came since the thread looked for idle classes, at most [`OFTEN`](Self::OFTEN).
    requests: u8,
}

impl Grant {
    const FIRST: Self = Self {
        next: 0,
        requests: 0,
    };

    /// So many requests between two looks are worth a slab.
    const OFTEN: u8 = 8;

    pub(crate) fn next(&mut self, class: Class) -> usize {
        let now = self.next.max(class.blocks_in_lines() as u8);
        // At most half a magazine.
        self.next = (now * 2).min(Magazine::rounds(class) as u8 / 2);
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
pub(crate) struct Local {
    pub(crate) small: [Shelf; CLASSES],
    pub(crate) grants: [Grant; CLASSES],
    pub(crate) medium: Medium,
    pub(crate) shard: Option<Box<Own>>,
    /// How often in a row this thread found that others use the core too.
    pub(crate) crowded: u32,
    /// How many ranges came from the core.
    pub(crate) fetched: u32,
    /// This thread's identity to the core's lock.
    pub(crate) visitor: Visitor,
    pub(crate) tally: Tally,
    /// The upper bound of the contents, for other threads.
    pub(crate) kept: Arc<Kept>,
    /// The heap's last handle was dropped: nothing is cached here any more.
    pub(crate) closed: bool,
}

impl Local {
    pub(crate) fn new() -> Self {
        let kept = Arc::<Kept>::default();
        Self {
            small: std::array::from_fn(|_| Shelf::default()),
            grants: [Grant::FIRST; CLASSES],
            medium: Medium::new(Arc::clone(&kept)),
            shard: None,
            crowded: 0,
            fetched: 0,
            kept,
            visitor: Visitor::new(),
            tally: Tally::default(),
            closed: false,
        }
    }

    /// Tightens [`Kept`] to the present contents. Drops empty magazines, because pushes to them set no bit.
    pub(crate) fn forget_what_is_gone(&mut self) {
        for (class, shelf) in Class::all().zip(&mut self.small) {
            if self.kept.has(Kept::small(class)) && shelf.blocks() == 0 {
                *shelf = Shelf::default();
                self.kept.forget(Kept::small(class));
            }
        }
        self.medium.forget_if_empty();
    }

    /// Calls `give` with the blocks that take a page each, of the classes that the thread has not used since the last
    /// call.
    pub(crate) fn give_idle(&mut self, mut give: impl FnMut(&mut Visitor, Class, Box<Magazine>)) {
        for class in Class::all().filter(|class| class.takes_page()) {
            let shelf = &mut self.small[class.index()];
            let grant = &mut self.grants[class.index()];
            grant.look();
            if shelf.parked.is_none() {
                shelf.parked = shelf.loaded.take();
                continue;
            }
            *grant = Grant::FIRST;
            shelf
                .take_all()
                .for_each(|full| give(&mut self.visitor, class, full));
            self.kept.forget(Kept::small(class));
        }
    }

    /// Takes all contents, and lends the visitor to return them to the core.
    pub(crate) fn empty(&mut self) -> (Contents<'_>, &mut Visitor) {
        self.grants = [Grant::FIRST; CLASSES];
        let contents = Contents {
            small: self.small.iter_mut().flat_map(Shelf::take_all).collect(),
            ranges: self.medium.take_all(),
            shard: self.shard.as_deref_mut(),
            kept: &self.kept,
        };
        (contents, &mut self.visitor)
    }

    /// Calls `name` with the offset and bytes of each block.
    pub(crate) fn each(&self, mut name: impl FnMut(u64, u64)) {
        for (class, shelf) in Class::all().zip(&self.small) {
            for full in shelf.all() {
                for &offset in full.offsets() {
                    name(offset, class.bytes());
                }
            }
        }
        self.medium.each(&mut name);
        let shard = self.shard.iter().flat_map(|own| own.shard.free_ranges());
        shard.for_each(|free| name(free.start, free.end - free.start));
    }

    /// Returns the bytes of all blocks, and the shard's free bytes.
    pub(crate) fn bytes(&self) -> u64 {
        let small = Class::all().zip(&self.small);
        let small: u64 = small.map(|(class, shelf)| shelf.bytes(class)).sum();
        small + self.medium.bytes() + self.kept.shard()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn each_grant_is_twice_the_last_up_to_half_a_magazine() {
        for class in Class::all() {
            let most = Magazine::rounds(class) / 2;
            let mut grant = Grant::FIRST;
            let mut expected = class.blocks_in_lines();
            for _ in 0..10 {
                assert_eq!(grant.next(class), expected);
                expected = most.min(2 * expected);
            }
            assert_eq!(expected, most);
        }
    }

    #[test]
    fn a_class_is_rare_until_it_is_requested_often_between_two_looks() {
        let mut grant = Grant::FIRST;
        for _ in 0..3 {
            (1..Grant::OFTEN).for_each(|_| assert!(grant.is_rare()));
            grant.look();
        }
        (0..Grant::OFTEN).for_each(|_| assert!(grant.is_rare()));
        assert!(!grant.is_rare());
        grant.look();
        assert!(!grant.is_rare(), "only an idle class is rare again");
    }

    proptest! {
        #[test]
        fn a_shelf_gives_back_what_was_put_in(steps in proptest::collection::vec(any::<bool>(), 0..2000), class in 0..CLASSES) {
            let (class, kept) = (Class::from_index(class), Kept::default());
            let rounds = Magazine::rounds(class);
            let mut shelf = Shelf::default();
            let mut there: Vec<u64> = Vec::new();
            for (offset, push) in steps.into_iter().enumerate() {
                if push {
                    there.push(offset as u64);
                    if let Some(full) = shelf.push(class, offset as u64, &kept) {
                        prop_assert_eq!(full.len, rounds);
                        there.retain(|offset| !full.offsets().contains(offset));
                    }
                    prop_assert!(there.len() <= 2 * rounds);
                } else if let Some(offset) = shelf.pop() {
                    let at = there.iter().position(|&other| other == offset);
                    there.swap_remove(at.expect("it was pushed exactly once"));
                } else {
                    prop_assert!(there.is_empty());
                }
            }
            let mut left: Vec<u64> = shelf.take_all().flat_map(|full| full.offsets().to_vec()).collect();
            left.sort_unstable();
            there.sort_unstable();
            prop_assert_eq!(left, there);
        }
    }
}
