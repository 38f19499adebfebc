//! The records of this process, under one lock.
//!
//! A record costs a few short critical sections in the life of an allocation, each of them much shorter than a driver call.
//! Searching by address looks at all records: it is for diagnosis, and keeps allocating cheap.

use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Mutex, MutexGuard};

use super::record::Record;
use super::tiers::Known;
use crate::fork::Generation;
use crate::per_driver::lock;

/// The records of one process: a forked child has a registry of its own, since a thread of the parent may have held the
/// lock, and the parent's memory is not the child's.
#[derive(Debug)]
pub(super) struct Registry {
    /// [`Generation::forks`] of the process.
    forks: u32,
    slots: Mutex<Slots>,
    tiers: Mutex<Vec<Known>>,
}

#[derive(Debug)]
struct Slots {
    /// Boxed, because they move in and out.
    records: Vec<Option<Box<Record>>>,
    free: Vec<usize>,
    /// The number of records ever made.
    made: u64,
}

impl Slots {
    fn put(&mut self, record: Box<Record>) -> usize {
        match self.free.pop() {
            Some(slot) => {
                self.records[slot] = Some(record);
                slot
            }
            None => {
                self.records.push(Some(record));
                self.records.len() - 1
            }
        }
    }

    fn live(&self) -> impl Iterator<Item = &Record> {
        let records = self.records.iter().flatten().map(|record| &**record);
        records.filter(|record| record.is_live())
    }
}

static FIRST: Registry = Registry::new(0);

/// That of a forked child or of the process that it was forked from: null, or a box that is never freed. Without a lock,
/// which a thread of the parent may have held.
static LATER: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());

impl Registry {
    const fn new(forks: u32) -> Self {
        Self {
            forks,
            slots: Mutex::new(Slots {
                records: Vec::new(),
                free: Vec::new(),
                made: 0,
            }),
            tiers: Mutex::new(Vec::new()),
        }
    }

    /// Returns this process's registry.
    pub(super) fn current() -> &'static Self {
        match Generation::current().forks() {
            0 => &FIRST,
            forks => Self::of(&LATER, forks),
        }
    }

    /// Returns the registry of the process after so many forks, of which there is none yet or an earlier one.
    fn of(later: &AtomicPtr<Self>, forks: u32) -> &'static Self {
        let known = later.load(Acquire);
        // SAFETY: the pointer is null, or of a box that is never freed nor borrowed mutably.
        match unsafe { known.as_ref() } {
            Some(registry) if registry.forks == forks => return registry,
            _ => {}
        }
        let new = Box::into_raw(Box::new(Self::new(forks)));
        let now = match later.compare_exchange(known, new, AcqRel, Acquire) {
            Ok(_) => new,
            Err(of_another_thread) => {
                // SAFETY: the box was made here, and no other thread has seen it.
                drop(unsafe { Box::from_raw(new) });
                of_another_thread
            }
        };
        // SAFETY: as above, and not null.
        unsafe { &*now }
    }

    /// Returns whether it is this process's.
    pub(super) fn is_current(&self) -> bool {
        self.forks == Generation::current().forks()
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        lock(&self.slots)
    }

    /// Adds a new record; returns its slot and its number.
    pub(super) fn add(&self, mut record: Box<Record>) -> (usize, u64) {
        let mut slots = self.slots();
        let number = slots.made;
        slots.made += 1;
        record.number = number;
        (slots.put(record), number)
    }

    /// Puts a record back that was taken out; returns its slot.
    pub(super) fn put(&self, record: Box<Record>) -> usize {
        self.slots().put(record)
    }

    /// Changes a record, which its owner knows to be there.
    pub(super) fn change(&self, slot: usize, with: impl FnOnce(&mut Record)) {
        if let Some(Some(record)) = self.slots().records.get_mut(slot) {
            with(record);
        }
    }

    /// Takes a record out, unless its memory is lost. The caller drops it outside the lock.
    pub(super) fn take(&self, slot: usize) -> Option<Box<Record>> {
        let mut slots = self.slots();
        let record = slots.records.get_mut(slot)?;
        let taken = record.take_if(|record| record.lost.is_none())?;
        slots.free.push(slot);
        Some(taken)
    }

    /// Returns copies of the records that `wanted` selects, by their numbers.
    pub(super) fn copies(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Record> {
        let slots = self.slots();
        let mut copies: Vec<Record> = slots
            .live()
            .filter(|record| wanted(record))
            .cloned()
            .collect();
        drop(slots);
        copies.sort_by_key(|record| record.number);
        copies
    }

    /// Adds a tier, and forgets those that have ended.
    pub(super) fn add_tier(&self, tier: Known) {
        let mut tiers = lock(&self.tiers);
        tiers.retain(Known::is_alive);
        tiers.push(tier);
    }

    /// Returns the tiers that live, the oldest first, and forgets the others.
    pub(super) fn tiers(&self) -> Vec<Known> {
        let mut tiers = lock(&self.tiers);
        tiers.retain(Known::is_alive);
        tiers.clone()
    }

    /// Returns the number of records.
    pub(super) fn len(&self) -> usize {
        self.slots().live().count()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Weak};

    use super::super::tiers::{ShowTier, TierUse};
    use super::*;
    use crate::driver::{DevicePtr, Location};

    struct Tier;

    impl ShowTier for Tier {
        fn show(self: Arc<Self>) -> TierUse {
            TierUse::new(Location::Host, DevicePtr(0))
        }
    }

    #[test]
    fn tiers_that_have_ended_take_no_room() {
        let registry = Registry::new(0);
        let tier: Arc<dyn ShowTier> = Arc::new(Tier);
        let ended: Weak<dyn ShowTier> = Weak::<Tier>::new();
        for tier in [&ended, &ended, &Arc::downgrade(&tier), &ended] {
            let tier = Weak::clone(tier);
            registry.add_tier(Known { driver: 0, tier });
        }
        assert_eq!(lock(&registry.tiers).len(), 2, "the last is not looked at");
        assert_eq!(registry.tiers().len(), 1);
        assert_eq!(lock(&registry.tiers).len(), 1);
    }

    #[test]
    fn threads_of_a_child_have_one_registry() {
        static LATER: AtomicPtr<Registry> = AtomicPtr::new(ptr::null_mut());
        for forks in [7, 8] {
            let found: Vec<usize> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..8)
                    .map(|_| scope.spawn(|| ptr::from_ref(Registry::of(&LATER, forks)).addr()))
                    .collect();
                let found = threads.into_iter().map(|thread| thread.join().unwrap());
                found.collect()
            });
            let own = Registry::of(&LATER, forks);
            assert_eq!(own.forks, forks);
            assert_eq!(found, [ptr::from_ref(own).addr(); 8]);
        }
    }
}
