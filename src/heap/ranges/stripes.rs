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
        let mut taken = idle.filter_map(|(_, stripe)| Some(stripe.try_lock().ok()?.take(class, out)));
        taken.find(|&taken| taken > 0).unwrap_or(0)
    }

    fn enter(&self, own: &mut OwnStripe) -> MutexGuard<'_, Slabs> {
        let stripe = self.stripes[usize::from(own.number)].get();
        if let Some(slabs) = stripe.and_then(|stripe| stripe.0.try_lock().ok()) {
            return slabs;
        }
        own.met = own.met.saturating_add(u8::from(stripe.is_some()));
        if own.number == 0
            && own.met >= OFTEN
            && let Some(number) = self.claim()
        {
            own.number = number;
        }
        self.lock(own.number)
    }

    fn claim(&self) -> Option<u8> {
        let free = (1..STRIPES as u8).find(|number| {
            let bit = 1 << number;
            self.claimed.fetch_or(bit, Relaxed) & bit == 0
        });
        free
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
