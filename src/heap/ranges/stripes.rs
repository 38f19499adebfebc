//! Slabs for many threads: each stripe has slabs of its own, under a lock of its own.
//!
//! All threads begin at stripe 0. One that often finds the lock taken claims a stripe that no other thread has, and takes its
//! blocks from there. A block returns to the stripe of its slab, whichever thread frees it. A thread that needs another slab
//! first takes the blocks that are free in stripes that are not claimed, and only then a range from the core.
//!
//! Locks: the core's comes before a stripe's. A thread holds one stripe's at a time, or [all](Stripes::hold) while it has the core.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock};

use super::extents::Ranges;
use super::nodes::RangeId;
use super::pages::{Owner, PageMap};
use super::slabs::{STRIPES, Slab, SlabId, Slabs};
use crate::classes::{CLASSES, Class};
use crate::per_driver::lock;

/// A thread that finds the lock of stripe 0 taken this many times in [`VISITS`] claims a stripe.
const OFTEN: u8 = 16;
const VISITS: u8 = 255;

/// The most blocks that are freed at a time: half of a magazine.
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
    /// How often the lock was taken, and how often it was tried.
    met: u8,
    visits: u8,
}

/// The slabs of all stripes by number, which no other thread changes meanwhile.
pub(crate) struct HeldSlabs<'a>(Vec<Option<MutexGuard<'a, Slabs>>>);

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

    /// Locks all stripes. The caller has the core: two threads would wait for each other.
    pub(crate) fn hold(&self) -> HeldSlabs<'_> {
        let stripes = self.stripes.iter();
        HeldSlabs(stripes.map(|stripe| Some(lock(&stripe.get()?.0))).collect())
    }

    /// Writes the offsets of free blocks to `out`, without new slabs; returns their number.
    pub(crate) fn take(&self, own: &mut OwnStripe, class: Class, out: &mut [u64]) -> usize {
        let taken = self.enter(own).take(class, out);
        if taken > 0 {
            return taken;
        }
        // Takes those of threads that have ended or claimed a stripe since, unless others are busy with them.
        let claimed = self.claimed.load(Relaxed);
        let idle = self.each().filter(|(number, _)| claimed >> number & 1 == 0);
        let mut taken =
            idle.filter_map(|(_, stripe)| Some(stripe.try_lock().ok()?.take(class, out)));
        taken.find(|&taken| taken > 0).unwrap_or(0)
    }

    /// Locks the thread's stripe, or if others often have it, one that the thread claims.
    fn enter(&self, own: &mut OwnStripe) -> MutexGuard<'_, Slabs> {
        let stripe = self.stripes[usize::from(own.number)].get();
        own.visits += 1;
        if own.visits == VISITS {
            (own.visits, own.met) = (0, 0);
        }
        if let Some(slabs) = stripe.and_then(|stripe| stripe.0.try_lock().ok()) {
            return slabs;
        }
        own.met += u8::from(stripe.is_some());
        if own.number == 0 && own.met >= OFTEN {
            own.met = 0;
            own.number = self.claim().unwrap_or(0);
        }
        self.lock(own.number)
    }

    /// Returns the lowest stripe that no thread has claimed, if there is one.
    fn claim(&self) -> Option<u8> {
        let free = |claimed: u64| !(claimed | 1);
        let claim = |claimed: u64| {
            let lowest = free(claimed) & free(claimed).wrapping_neg();
            (lowest != 0).then_some(claimed | lowest)
        };
        let before = self.claimed.fetch_update(Relaxed, Relaxed, claim).ok()?;
        Some(free(before).trailing_zeros() as u8)
    }

    /// Gives a thread's stripe back for the next thread, without slabs that have no block in use.
    pub(super) fn leave(&self, own: &mut OwnStripe, ranges: &mut Ranges) {
        if own.number > 0 {
            self.lock(own.number).release_empty(ranges);
            self.claimed.fetch_and(!(1 << own.number), Relaxed);
        }
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
        let others = (0..STRIPES as u8).filter(|&number| number != own.number);
        let mut has_room = std::iter::once(own.number).chain(others);
        let number = has_room.find(|&number| self.lock(number).has_room());
        let mut slabs = self.lock(number.unwrap_or(own.number));
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

    /// Frees blocks, and adds slabs that have no block in use any more to `empty`, if their classes have more than `kept` slabs
    /// with free blocks. Returns how many blocks were not in use.
    pub(crate) fn give(&self, offsets: &[u64], kept: usize, empty: &mut Vec<SlabId>) -> usize {
        let parts = offsets.chunks(PART);
        parts.map(|part| self.give_part(part, kept, empty)).sum()
    }

    /// Takes the lock of each stripe once.
    fn give_part(&self, offsets: &[u64], kept: usize, empty: &mut Vec<SlabId>) -> usize {
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
                match slabs.give(id, offset, kept) {
                    Some(false) => {}
                    Some(true) => empty.push(id),
                    None => unknown += 1,
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
    fn all(&self) -> impl Iterator<Item = &Slabs> {
        self.0.iter().flatten().map(|slabs| &**slabs)
    }

    fn of(&self, id: SlabId) -> Option<&Slabs> {
        self.0.get(usize::from(id.stripe()))?.as_deref()
    }

    fn slabs(&self) -> impl Iterator<Item = &Slab> {
        self.all().flat_map(Slabs::there)
    }

    /// Returns the bytes of free blocks, and those at the ends of slabs, too few for a block.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let sum = |f: fn(&Slabs) -> u64| self.all().map(f).sum();
        (sum(|slabs| slabs.free), sum(|slabs| slabs.ends))
    }

    /// Returns the bytes of blocks that were ever freed.
    pub(super) fn given(&self) -> u64 {
        let given = self.all().map(|slabs| slabs.given);
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

    /// Iterates over the ranges of slabs with at most so many bytes in use. `None` if there are more slabs than `most`.
    pub(super) fn nodes_with_at_most(
        &self,
        in_use: u64,
        most: usize,
    ) -> Option<impl Iterator<Item = RangeId>> {
        let few = self.slabs().filter(move |slab| slab.in_use() <= in_use);
        let is_few = self.slabs().nth(most).is_none();
        is_few.then(|| few.map(|slab| slab.node))
    }

    /// Iterates over free blocks, and over the unusable ends.
    pub(crate) fn free_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.slabs().flat_map(Slab::free_ranges)
    }

    /// Returns, for each class, how many blocks are free and how many there are.
    pub(crate) fn class_counts(&self) -> [(u64, u64); CLASSES] {
        let mut counts = [(0, 0); CLASSES];
        for slab in self.slabs() {
            let (free, all) = &mut counts[slab.class.index()];
            *free += u64::from(slab.free);
            *all += u64::from(slab.blocks);
        }
        counts
    }

    /// Returns the size of the tables, in bytes.
    pub(crate) fn metadata(&self) -> usize {
        self.all().map(Slabs::metadata).sum()
    }
}

#[cfg(test)]
impl OwnStripe {
    pub(super) fn claimed(number: u8) -> Self {
        Self {
            number,
            ..Self::default()
        }
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

    fn claimed(stripes: &Stripes) -> OwnStripe {
        OwnStripe::claimed(stripes.claim().unwrap_or(0))
    }

    #[test]
    fn a_thread_that_finds_the_lock_taken_claims_a_stripe() {
        let stripes = Stripes::new(MEMORY);
        let near = |visits| OwnStripe {
            met: OFTEN - 1,
            visits,
            ..OwnStripe::default()
        };
        let [mut one, mut alone, mut seldom] = [near(0), near(0), near(VISITS - 1)];
        drop(stripes.enter(&mut alone));
        assert_eq!(alone.number, 0);
        let held = stripes.lock(0);
        let entered = stripes.enter(&mut one);
        assert_eq!((one.number, entered.stripe), (1, 1));
        drop(held);
        drop(stripes.enter(&mut seldom));
        assert_eq!((seldom.met, seldom.visits), (0, 0), "it counts anew");
    }

    #[test]
    fn a_stripe_is_claimed_by_one_thread_until_it_leaves() {
        let mut core = core();
        let stripes = std::sync::Arc::clone(core.slabs());
        assert!((1..STRIPES as u8).all(|number| stripes.claim() == Some(number)));
        assert_eq!(stripes.claim(), None);
        let mut own = OwnStripe::claimed(7);
        let class = Class::of(64, 1).unwrap();
        let mut out = [0; 10];
        assert_eq!(core.fill(&own, class, &mut out), out.len());
        assert_eq!(core.give(&out, 1), 0);
        core.leave(&mut own);
        assert_eq!(core.used(), 0, "its empty slabs ended");
        assert_eq!((own.number, stripes.claim()), (0, Some(7)));
        core.leave(&mut own);
        assert_eq!(stripes.claim(), None, "nobody claims stripe 0");
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
        assert_eq!(stripes.give(some, 0, &mut empty), 0);
        assert_eq!(stripes.give(some, 0, &mut empty), some.len(), "freed twice");
        assert_eq!(stripes.give(rest, 0, &mut empty), 0);
        assert_eq!(
            stripes.give(&[MEMORY, 3], 0, &mut empty),
            2,
            "none are there"
        );
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
    fn blocks_in_stripes_that_nobody_claims_are_taken_without_a_new_slab() {
        let mut core = core();
        let class = Class::of(128, 1).unwrap();
        let stripes = std::sync::Arc::clone(core.slabs());
        let (mut first, mut second) = (OwnStripe::default(), claimed(&stripes));
        let mut out = [0; 2];
        assert_eq!(core.fill(&first, class, &mut out), out.len());
        assert_eq!(core.fill(&second, class, &mut out), out.len());
        let mut third = claimed(&stripes);
        let mut all = [0; 1000];
        // Those of stripe 0 alone, which has a page.
        assert_eq!(stripes.take(&mut third, class, &mut all), 2048 / 128 - 2);
        assert_eq!(stripes.take(&mut third, class, &mut all), 0);
        assert_eq!(stripes.take(&mut first, class, &mut all), 0);
        core.leave(&mut second);
        assert!(stripes.take(&mut first, class, &mut all) > 0);
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
        // The last slab with free blocks is not worth a visit to the core.
        assert_eq!(core.fill(&own, class, &mut out[..1]), 1);
        let mut empty = Vec::new();
        assert_eq!(core.slabs().give(&out[..1], 1, &mut empty), 0);
        assert!(empty.is_empty());
        core.release_empty_slabs();
        assert_eq!(core.used(), 0);
    }
}
