//! The records of this process, under one lock.
//!
//! A record costs a few short critical sections in the life of an allocation, each of them much shorter than a driver call.
//! Searching by address looks at all records: it is for diagnosis, and keeps allocating cheap.

use std::backtrace::Backtrace;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;

use super::Known;
use super::allocation::{AllocPath, Allocation, Grants, Imported, MappedAt, Party};
use super::site::{Label, Site};
use crate::backing::Chosen;
use crate::driver::{DevicePtr, Location, WeakDriver};
use crate::fork::{Generation, PerProcess};
use crate::per_driver::lock;
use crate::vmm::identity::Identity;

/// Returns the milliseconds since the machine started, as of the kernel's last tick, which is at most 10 ms ago: the time now
/// takes ten times as long to read, a twentieth of the time that a small allocation takes here.
pub(super) fn now_ms() -> u64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a live value of the type that the call writes.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// The most processes that a record names.
pub const MAX_PARTIES: usize = 16;

/// A range of addresses where memory is mapped.
#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) start: DevicePtr,
    pub(super) bytes: u64,
    pub(super) grants: Grants,
}

/// The ranges of an allocation, in the order of addresses: a single one takes no memory of its own.
pub(super) type Ranges = SmallVec<[Range; 1]>;

/// The data that few allocations have: apart, so that the records are short.
#[derive(Clone, Debug, Default)]
pub(super) struct Rare {
    pub(super) backtrace: Option<Arc<Backtrace>>,
    pub(super) exports: u64,
    exported_to: Vec<Party>,
    pub(super) identity: Option<Identity>,
    pub(super) imported: Option<Imported>,
    pub(super) backing: Option<Chosen>,
}

impl Rare {
    /// Adds a process that a handle was sent to; the oldest makes room.
    pub(super) fn add_party(&mut self, to: Party) {
        self.exported_to.retain(|known| *known != to);
        if self.exported_to.len() >= MAX_PARTIES {
            self.exported_to.remove(0);
        }
        self.exported_to.push(to);
    }
}

/// One allocation.
#[derive(Clone, Debug)]
pub(super) struct Record {
    /// The registry sets it.
    pub(super) number: u64,
    /// [`Driver::address`](crate::Driver::address): the entry's owner keeps the driver alive.
    pub(super) driver: usize,
    pub(super) driver_name: &'static str,
    pub(super) bytes: u64,
    pub(super) location: Location,
    pub(super) path: AllocPath,
    pub(super) label: Option<Label>,
    /// In milliseconds of [`now_ms`].
    pub(super) since: u64,
    pub(super) site: Site,
    pub(super) mapped: Ranges,
    /// Several chunks share the record: their ranges side by side are one.
    pub(super) in_chunks: bool,
    pub(super) rare: Option<Box<Rare>>,
    /// Set once the driver has refused to take the memory back. The owner is gone, so this keeps the driver's address
    /// from being reused.
    pub(super) lost: Option<WeakDriver>,
}

impl Record {
    /// Returns whether the memory exists: memory that a simulated driver did not take back ends with that driver, CUDA's
    /// with the process.
    pub(super) fn is_live(&self) -> bool {
        let lost = self.lost.as_ref();
        self.driver == 0 || lost.is_none_or(WeakDriver::is_alive)
    }

    /// Returns where the range at an address is in the list, or would be.
    pub(super) fn find(&self, start: DevicePtr) -> Result<usize, usize> {
        self.mapped
            .binary_search_by_key(&start, |range| range.start)
    }

    pub(super) fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    /// Returns milliseconds since the memory was allocated.
    pub(super) fn age_ms(&self, now: u64) -> u64 {
        now.saturating_sub(self.since)
    }

    /// Returns where the memory is mapped. Chunks side by side with the same access are one range.
    fn mapped_at(&self) -> Vec<MappedAt> {
        let mut all: Vec<MappedAt> = Vec::new();
        for range in self.mapped.iter() {
            let access = range.grants.list();
            match all.last_mut() {
                Some(last)
                    if self.in_chunks
                        && last.start + last.bytes == range.start.0
                        && last.access == access =>
                {
                    last.bytes += range.bytes;
                }
                _ => all.push(MappedAt {
                    start: range.start.0,
                    bytes: range.bytes,
                    access,
                }),
            }
        }
        all
    }

    /// Returns the record's values.
    pub(super) fn to_allocation(&self, now: u64) -> Allocation {
        let rare = self.rare.as_deref().cloned().unwrap_or_default();
        let mut site = self.site.to_call_site();
        if let (Some(site), Some(native)) = (&mut site, &rare.backtrace)
            && site.backtrace.is_none()
        {
            *site = site.clone().backtrace(&native.to_string());
        }
        Allocation {
            number: self.number,
            driver: self.driver_name.to_owned(),
            bytes: self.bytes,
            location: self.location,
            path: self.path,
            label: self.label.as_ref().map(|label| label.as_str().to_owned()),
            age_ms: self.age_ms(now),
            site,
            mapped: self.mapped_at(),
            exports: rare.exports,
            exported_to: rare.exported_to,
            identity: rare.identity,
            imported: rare.imported,
            backing: rare.backing,
            lost: self.lost.is_some(),
        }
    }
}

/// The records of one process: a forked child has a registry of its own, since a thread of the parent may have held the
/// lock, and the parent's memory is not the child's.
#[derive(Debug)]
pub(super) struct Registry {
    born: Generation,
    slots: Mutex<Slots>,
    tiers: Mutex<Vec<Known>>,
    /// Whether the process had its [first entry](super::on_first_entry).
    pub(super) hooked: AtomicBool,
}

#[derive(Debug, Default)]
struct Slots {
    /// Boxed, because they move in and out.
    records: Vec<Option<Box<Record>>>,
    free: Vec<usize>,
    /// The number of records ever made.
    made: u64,
}

impl Slots {
    fn live(&self) -> impl Iterator<Item = &Record> {
        let records = self.records.iter().flatten().map(|record| &**record);
        records.filter(|record| record.is_live())
    }
}

static CURRENT: PerProcess<Registry> = PerProcess::new();

impl Registry {
    fn new() -> Self {
        Self {
            born: Generation::current(),
            slots: Mutex::default(),
            tiers: Mutex::default(),
            hooked: AtomicBool::new(false),
        }
    }

    /// Returns this process's registry.
    pub(super) fn current() -> &'static Self {
        CURRENT.get(|_| Self::new())
    }

    /// Returns whether it is this process's.
    pub(super) fn is_current(&self) -> bool {
        self.born.is_current()
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
        if let Some(slot) = slots.free.pop() {
            slots.records[slot] = Some(record);
            return (slot, number);
        }
        slots.records.push(Some(record));
        (slots.records.len() - 1, number)
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
    pub(super) fn copies(&self, wanted: &dyn Fn(&Record) -> bool) -> Vec<Record> {
        let slots = self.slots();
        let mut copies: Vec<Record> = slots
            .live()
            .filter(|record| wanted(record))
            .cloned()
            .collect();
        drop(slots);
        copies.sort_unstable_by_key(|record| record.number);
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
    use std::sync::Weak;

    use super::super::{ShowTier, TierUse};
    use super::*;

    struct Tier;

    impl ShowTier for Tier {
        fn show(self: Arc<Self>) -> TierUse {
            TierUse::new(Location::Host, DevicePtr(0))
        }
    }

    #[test]
    fn tiers_that_have_ended_take_no_room() {
        let registry = Registry::new();
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
}
