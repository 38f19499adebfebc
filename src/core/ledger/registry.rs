//! The records of this process, under one lock.
//!
//! A record costs two or three short critical sections in the life of an allocation, each of them much shorter than a
//! driver call. Searching by address looks at all records: it is for diagnosis, and keeps allocating cheap.

use std::backtrace::Backtrace;
use std::panic::Location as Caller;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use super::allocation::{AllocPath, Allocation, CallSite, Imported, MappedAt, Party};
use super::grants::Grants;
use super::label::Label;
use crate::driver::{DevicePtr, Location, WeakDriver};
use crate::fork::Generation;
use crate::per_driver::lock;
use crate::vmm::identity::Identity;

/// The most processes that a record names.
pub const MAX_PARTIES: usize = 16;

/// A range of addresses where memory is mapped.
#[derive(Clone, Debug)]
pub(super) struct Range {
    pub(super) start: DevicePtr,
    pub(super) bytes: u64,
    pub(super) grants: Arc<Grants>,
}

/// One allocation.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) number: u64,
    /// [`Driver::address`](crate::Driver::address): the entry's owner keeps the driver alive.
    pub(super) driver: usize,
    pub(super) driver_name: &'static str,
    pub(super) bytes: u64,
    pub(super) location: Location,
    pub(super) path: AllocPath,
    pub(super) label: Option<Label>,
    pub(super) since: Instant,
    pub(super) site: Option<&'static Caller<'static>>,
    pub(super) backtrace: Option<Arc<Backtrace>>,
    pub(super) mapped: Vec<Range>,
    pub(super) exports: u64,
    pub(super) exported_to: Vec<Party>,
    pub(super) identity: Option<Identity>,
    pub(super) imported: Option<Box<Imported>>,
    /// Set once the driver has refused to take the memory back. The owner is gone, so this keeps the driver's address
    /// from being reused.
    pub(super) lost: Option<WeakDriver>,
}

impl Record {
    /// Returns whether the memory exists: what a simulated driver did not take back ends with that driver, what CUDA did
    /// not, with the process.
    fn is_live(&self) -> bool {
        let lost = self.lost.as_ref();
        self.driver == 0 || lost.is_none_or(WeakDriver::is_alive)
    }

    /// Adds a process that a handle was sent to; the oldest makes room.
    pub(super) fn add_party(&mut self, to: Party) {
        self.exported_to.retain(|known| *known != to);
        if self.exported_to.len() >= MAX_PARTIES {
            self.exported_to.remove(0);
        }
        self.exported_to.push(to);
    }

    /// Returns the record's values. Formats frames, which takes milliseconds: not under the lock.
    pub(super) fn to_allocation(&self, now: Instant) -> Allocation {
        let mapped = |range: &Range| MappedAt {
            start: range.start.0,
            bytes: range.bytes,
            access: range.grants.list(),
        };
        let site = |caller: &'static Caller<'static>| CallSite {
            file: caller.file().to_owned(),
            line: caller.line(),
            backtrace: self.backtrace.as_ref().map(|frames| frames.to_string()),
        };
        let age = now.saturating_duration_since(self.since).as_millis();
        Allocation {
            number: self.number,
            driver: self.driver_name.to_owned(),
            bytes: self.bytes,
            location: self.location,
            path: self.path,
            label: self.label.as_ref().map(|label| label.as_str().to_owned()),
            age_ms: u64::try_from(age).unwrap_or(u64::MAX),
            site: self.site.map(site),
            mapped: self.mapped.iter().map(mapped).collect(),
            exports: self.exports,
            exported_to: self.exported_to.clone(),
            identity: self.identity,
            imported: self.imported.as_deref().cloned(),
            lost: self.lost.is_some(),
        }
    }
}

/// The records of one process: a forked child has a registry of its own, since a thread of the parent may have held the
/// lock, and the parent's memory is not the child's.
#[derive(Debug)]
pub(super) struct Registry {
    /// [`Generation::forks`] of the process.
    forks: u32,
    slots: Mutex<Slots>,
    /// That of a child.
    next: OnceLock<Box<Registry>>,
}

#[derive(Debug)]
struct Slots {
    records: Vec<Option<Record>>,
    free: Vec<usize>,
    /// The number of records ever made.
    made: u64,
}

static FIRST: Registry = Registry::new(0);

impl Registry {
    const fn new(forks: u32) -> Self {
        Self {
            forks,
            slots: Mutex::new(Slots {
                records: Vec::new(),
                free: Vec::new(),
                made: 0,
            }),
            next: OnceLock::new(),
        }
    }

    /// Returns this process's registry.
    pub(super) fn current() -> &'static Self {
        let forks = Generation::current().forks();
        let mut registry = &FIRST;
        while registry.forks < forks {
            let next = registry.forks + 1;
            registry = registry.next.get_or_init(|| Box::new(Self::new(next)));
        }
        registry
    }

    /// Returns whether it is this process's.
    pub(super) fn is_current(&self) -> bool {
        self.forks == Generation::current().forks()
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        lock(&self.slots)
    }

    /// Adds a record; returns its slot.
    pub(super) fn add(&self, mut record: Record) -> usize {
        let mut slots = self.slots();
        record.number = slots.made;
        slots.made += 1;
        match slots.free.pop() {
            Some(slot) => {
                slots.records[slot] = Some(record);
                slot
            }
            None => {
                slots.records.push(Some(record));
                slots.records.len() - 1
            }
        }
    }

    /// Changes a record, which its owner knows to be there.
    pub(super) fn change(&self, slot: usize, with: impl FnOnce(&mut Record)) {
        if let Some(Some(record)) = self.slots().records.get_mut(slot) {
            with(record);
        }
    }

    /// Removes a record, unless its memory is lost.
    pub(super) fn remove(&self, slot: usize) {
        let mut slots = self.slots();
        let is_lost =
            |record: &Option<Record>| record.as_ref().is_none_or(|record| record.lost.is_some());
        if slots.records.get(slot).is_none_or(is_lost) {
            return;
        }
        let removed = slots.records[slot].take();
        slots.free.push(slot);
        drop(slots);
        // Its texts are freed outside the lock.
        drop(removed);
    }

    /// Returns copies of the records that `wanted` selects, by their numbers.
    pub(super) fn copies(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Record> {
        let slots = self.slots();
        let records = slots
            .records
            .iter()
            .flatten()
            .filter(|record| record.is_live());
        let mut copies: Vec<Record> = records.filter(|record| wanted(record)).cloned().collect();
        drop(slots);
        copies.sort_by_key(|record| record.number);
        copies
    }

    /// Returns the number of records.
    pub(super) fn len(&self) -> usize {
        let slots = self.slots();
        let records = slots.records.iter().flatten();
        records.filter(|record| record.is_live()).count()
    }
}
