//! Slabs for many threads: each stripe has slabs of its own, under a lock of its own.
//!
//! All threads begin at stripe 0. One that often finds the lock taken claims a stripe that no other thread has, and takes its
//! blocks from there. A block returns to the stripe of its slab, whichever thread frees it. A thread that needs another slab
//! first takes the blocks that are free in stripes without a thread, and only then a range from the core.
//!
//! Locks: the core's comes before a stripe's; of these a thread holds one, or [all](Stripes::hold).

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock};

use super::extents::Ranges;
use super::nodes::RangeId;
use super::pages::{Owner, PageMap};
use super::slabs::{Given, STRIPES, SlabId, Slabs};
use crate::classes::{CLASSES, Class};
use crate::per_driver::lock;

/// A thread that found its stripe's lock taken so often claims a stripe.
const OFTEN: u8 = 16;

/// So many blocks are freed at a time: a magazine's.
const PART: usize = 64;

/// All slabs of a heap, and the table that finds the slab or the range of a block.
pub(crate) struct Stripes {
    pub(crate) pages: PageMap,
    /// Made when a thread first needs it.
    stripes: [OnceLock<Box<Stripe>>; STRIPES],
    /// A bit for each stripe that a thread has claimed.
    claimed: AtomicU64,
}

// On cache lines of its own: 128 bytes, since x86 fetches lines in pairs.
#[repr(align(128))]
struct Stripe(Mutex<Slabs>);

/// The stripe that a thread takes blocks from. It is given back by [`Stripes::leave`].
#[derive(Default)]
pub(crate) struct OwnStripe {
    number: u8,
    /// How often the lock was taken.
    met: u8,
}

/// The slabs of all stripes, which no other thread changes meanwhile.
pub(crate) struct HeldSlabs<'a>(Vec<MutexGuard<'a, Slabs>>);

impl Stripes {
    /// Creates the state of a heap with addresses below `limit`, in bytes, without slabs.
    pub(super) fn new(limit: u64) -> Self {
        Self {
            pages: PageMap::new(limit),
            stripes: [const { OnceLock::new() }; STRIPES],
            claimed: AtomicU64::new(0),
        }
    }

    fn lock(&self, number: u8) -> MutexGuard<'_, Slabs> {
        let new = || Box::new(Stripe(Mutex::new(Slabs::new(number))));
        lock(&self.stripes[usize::from(number)].get_or_init(new).0)
    }

    /// Iterates over the stripes that exist.
    fn each(&self) -> impl Iterator<Item = (u8, &Mutex<Slabs>)> {
        let stripes = (0..).zip(&self.stripes);
        stripes.filter_map(|(number, stripe)| Some((number, &stripe.get()?.0)))
    }

    /// Locks all stripes.
    pub(crate) fn hold(&self) -> HeldSlabs<'_> {
        HeldSlabs(self.each().map(|(_, stripe)| lock(stripe)).collect())
    }

    /// Writes the offsets of free blocks to `out`, without new slabs; returns their number.
    pub(crate) fn take(&self, own: &mut OwnStripe, class: Class, out: &mut [u64]) -> usize {
        let taken = self.enter(own).take(class, out);
        if taken > 0 || own.number == 0 {
            return taken;
        }
        // Blocks of threads that are gone or have claimed a stripe since, unless others are busy with them.
        let claimed = self.claimed.load(Relaxed);
        let idle = self.each().filter(|(number, _)| claimed >> number & 1 == 0);
        let mut taken =
            idle.filter_map(|(_, stripe)| Some(stripe.try_lock().ok()?.take(class, out)));
        taken.find(|&taken| taken > 0).unwrap_or(0)
    }

    fn enter(&self, own: &mut OwnStripe) -> MutexGuard<'_, Slabs> {
        let stripe = self.stripes[usize::from(own.number)].get();
        if let Some(slabs) = stripe.and_then(|stripe| stripe.0.try_lock().ok()) {
            return slabs;
        }
        if stripe.is_some() {
            self.note_meeting(own);
        }
        self.lock(own.number)
    }

    /// Notes that the thread found the lock of its stripe taken.
    fn note_meeting(&self, own: &mut OwnStripe) {
        own.met = own.met.saturating_add(1);
        if own.number == 0
            && own.met >= OFTEN
            && let Some(number) = self.claim()
        {
            own.number = number;
        }
    }

    fn claim(&self) -> Option<u8> {
        (1..STRIPES as u8).find(|number| {
            let bit = 1 << number;
            self.claimed.fetch_or(bit, Relaxed) & bit == 0
        })
    }

    /// Gives a thread's stripe back for the next thread.
    pub(crate) fn leave(&self, own: &mut OwnStripe) {
        self.claimed.fetch_and(!(1 << own.number), Relaxed);
        *own = OwnStripe::default();
    }

    /// Writes the offsets of free blocks to `out`; returns their number. It is smaller only if memory runs
    /// out. Unless `exhaustive`, it may be smaller although single pages are free.
    pub(super) fn fill(
        &self,
        own: &OwnStripe,
        class: Class,
        ranges: &mut Ranges,
        out: &mut [u64],
        exhaustive: bool,
    ) -> usize {
        let mut slabs = self.lock(own.number);
        let mut filled = slabs.take(class, out);
        while filled < out.len() && slabs.add(class, ranges, &self.pages, exhaustive) {
            filled += slabs.take(class, &mut out[filled..]);
        }
        drop(slabs);
        for (_, stripe) in self.each() {
            if filled == out.len() {
                break;
            }
            filled += lock(stripe).take(class, &mut out[filled..]);
        }
        filled
    }

    /// Frees blocks, and adds slabs that have no block in use any more to `empty`. Returns how many blocks were not in use.
    pub(crate) fn give(&self, offsets: &[u64], empty: &mut Vec<SlabId>) -> usize {
        let parts = offsets.chunks(PART);
        parts.map(|part| self.give_part(part, empty)).sum()
    }

    /// Takes the lock of each stripe once.
    fn give_part(&self, offsets: &[u64], empty: &mut Vec<SlabId>) -> usize {
        let mut all = [(SlabId::default(), 0); PART];
        let mut found = 0;
        for &offset in offsets {
            if let Some(Owner::Slab(id)) = self.pages.get(offset) {
                all[found] = (id, offset);
                found += 1;
            }
        }
        let mut unknown = offsets.len() - found;
        let mut rest = &mut all[..found];
        while let Some(&(first, _)) = rest.first() {
            let mut slabs = self.lock(first.stripe());
            let mut others = 0;
            for at in 0..rest.len() {
                let (id, offset) = rest[at];
                if id.stripe() != first.stripe() {
                    rest[others] = rest[at];
                    others += 1;
                    continue;
                }
                match slabs.give(id, offset) {
                    Given::Free => {}
                    Given::Last => empty.push(id),
                    Given::Unknown => unknown += 1,
                }
            }
            rest = &mut rest[..others];
        }
        unknown
    }

    /// Frees those of the slabs that have no block in use, if their classes keep `kept` slabs with free blocks.
    pub(super) fn end(&self, empty: &[SlabId], kept: usize, ranges: &mut Ranges) {
        for &id in empty {
            self.lock(id.stripe()).end_if_empty(id, kept, ranges);
        }
    }

    /// Frees all slabs that have no block in use.
    pub(super) fn release_empty(&self, ranges: &mut Ranges) {
        self.each()
            .for_each(|(_, stripe)| lock(stripe).release_empty(ranges));
    }
}

impl HeldSlabs<'_> {
    fn sum(&self, f: impl Fn(&Slabs) -> u64) -> u64 {
        self.0.iter().map(|slabs| f(slabs)).sum()
    }

    /// Returns the bytes of free blocks, and those at the ends of slabs, too few for a block.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.sum(|slabs| slabs.free), self.sum(|slabs| slabs.ends))
    }

    /// Returns the bytes of blocks that were ever freed.
    pub(super) fn given(&self) -> u64 {
        let given = self.0.iter().map(|slabs| slabs.given);
        given.fold(0, u64::wrapping_add)
    }

    /// Returns the bytes of blocks in use in the slab, if the range in use `node` is this slab.
    pub(super) fn in_use(&self, id: SlabId, node: RangeId) -> Option<u64> {
        self.of(id)?.in_use(id, node)
    }

    /// Returns the slab's class, if a block in use begins at `offset`.
    #[cfg(test)]
    pub(super) fn block_at(&self, id: SlabId, offset: u64) -> Option<Class> {
        self.of(id)?.block_at(id, offset)
    }

    fn of(&self, id: SlabId) -> Option<&Slabs> {
        let mut stripes = self.0.iter();
        Some(stripes.find(|slabs| slabs.stripe == id.stripe())?)
    }

    /// Iterates over the ranges of slabs with at most so many bytes in use. `None` if there are more slabs than
    /// `most`, with or without blocks.
    pub(super) fn nodes_with_at_most(
        &self,
        in_use: u64,
        most: usize,
    ) -> Option<impl Iterator<Item = RangeId>> {
        let all: usize = self.0.iter().map(|slabs| slabs.count()).sum();
        let nodes = self.0.iter().flat_map(|slabs| slabs.nodes());
        let few = nodes.filter(move |(_, used)| *used <= in_use);
        (all <= most).then(|| few.map(|(node, _)| node))
    }

    /// Iterates over free blocks, and over the unusable ends.
    pub(crate) fn free_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().flat_map(|slabs| slabs.free_ranges())
    }

    /// Returns, for each class, how many blocks are free and how many there are.
    pub(crate) fn class_counts(&self) -> [(u64, u64); CLASSES] {
        let mut counts = [(0, 0); CLASSES];
        self.0.iter().for_each(|slabs| slabs.add_to(&mut counts));
        counts
    }

    /// Returns the size of the tables, in bytes.
    pub(crate) fn metadata(&self) -> usize {
        self.0.iter().map(|slabs| slabs.metadata()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classes::SLAB;
    use crate::ranges::Core;

    const MEMORY: u64 = 8 << 20;

    fn core() -> Core {
        let mut core = Core::new(0, MEMORY).unwrap();
        core.add(0..MEMORY, true);
        core
    }

    /// A thread that found the lock taken so often that it claims a stripe, if there is one.
    fn claimed(stripes: &Stripes) -> OwnStripe {
        let mut own = OwnStripe::default();
        for _ in 0..OFTEN {
            assert_eq!(own.number, 0);
            stripes.note_meeting(&mut own);
        }
        own
    }

    #[test]
    fn a_thread_that_finds_the_lock_taken_claims_a_stripe_until_it_ends() {
        let stripes = Stripes::new(MEMORY);
        let [mut first, second] = [claimed(&stripes), claimed(&stripes)];
        assert_eq!((first.number, second.number), (1, 2));
        stripes.leave(&mut first);
        assert_eq!(first.number, 0);
        assert_eq!(claimed(&stripes).number, 1);
        let rest: Vec<u8> = (3..STRIPES).map(|_| claimed(&stripes).number).collect();
        assert!(rest.into_iter().eq(3..STRIPES as u8));
        assert_eq!(claimed(&stripes).number, 0, "all are claimed");
    }

    #[test]
    fn blocks_return_to_the_stripes_of_their_slabs() {
        let mut core = core();
        let class = Class::of(64, 1).unwrap();
        let stripes = std::sync::Arc::clone(core.slabs());
        let mut owns = [OwnStripe::default(), claimed(&stripes), claimed(&stripes)];
        let mut blocks = Vec::new();
        for own in &owns {
            let mut out = [0; 40];
            assert_eq!(core.fill(own, class, &mut out), out.len());
            blocks.extend(out);
        }
        // No two of a stripe beside each other.
        blocks.sort_by_key(|offset| offset / class.bytes() % 40);
        let mut empty = Vec::new();
        let (some, rest) = blocks.split_at(100);
        assert_eq!(stripes.give(some, &mut empty), 0);
        assert_eq!(stripes.give(some, &mut empty), some.len(), "freed twice");
        assert_eq!(stripes.give(rest, &mut empty), 0);
        assert_eq!(stripes.give(&[MEMORY, 3], &mut empty), 2, "none are there");
        assert!(empty.iter().any(|id| id.stripe() == 2));
        for own in &mut owns {
            let number = own.number;
            let mut out = [0; 40];
            assert_eq!(stripes.take(own, class, &mut out), out.len());
            let at = |&offset: &u64| stripes.pages.get(offset);
            assert!(out.iter().all(
                |offset| matches!(at(offset), Some(Owner::Slab(id)) if id.stripe() == number)
            ));
        }
    }

    #[test]
    fn what_no_thread_has_serves_others_before_a_new_slab() {
        let mut core = core();
        let class = Class::of(128, 1).unwrap();
        let stripes = std::sync::Arc::clone(core.slabs());
        let mut gone = claimed(&stripes);
        let mut out = [0; 8];
        assert_eq!(core.fill(&gone, class, &mut out), out.len());
        let mut other = claimed(&stripes);
        let mut taken = [0; 8];
        assert_eq!(
            stripes.take(&mut other, class, &mut taken),
            0,
            "a thread has them"
        );
        stripes.leave(&mut gone);
        assert_eq!(stripes.take(&mut other, class, &mut taken), taken.len());
    }

    #[test]
    fn the_last_free_block_of_any_stripe_is_found() {
        let mut core = core();
        let class = Class::of(SLAB / 64, 1).unwrap();
        let stripes = std::sync::Arc::clone(core.slabs());
        let owns = [claimed(&stripes), claimed(&stripes)];
        let mut out = vec![0; (MEMORY / class.bytes()) as usize + 1];
        let filled = core.exhaustively(|core| core.fill(&owns[0], class, &mut out));
        assert!(filled > out.len() / 2);
        assert_eq!(core.give(&out[..1], 1), 0);
        let mut again = [0; 2];
        let filled = core.exhaustively(|core| core.fill(&owns[1], class, &mut again));
        assert_eq!((filled, again[0]), (1, out[0]));
    }

    #[test]
    fn slabs_without_blocks_end_but_for_those_to_be_kept() {
        let mut core = core();
        let class = Class::of(2048, 1).unwrap();
        let own = OwnStripe::default();
        let mut out = [0; 100];
        for kept in [0, 1] {
            assert_eq!(core.fill(&own, class, &mut out), out.len());
            assert_eq!(core.give(&out, kept), 0);
            assert_eq!(core.used() > 0, kept > 0);
        }
        core.release_empty_slabs();
        assert_eq!(core.used(), 0);
    }
}
