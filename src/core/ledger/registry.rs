//! The records of this process, under one lock.
//!
//! A record costs a few short critical sections in the life of an allocation, each of them much shorter than a driver call.
//! Searching by address looks at all records: it is for diagnosis, and keeps allocating cheap.

use std::sync::{Mutex, MutexGuard, OnceLock};

use super::record::Record;
use crate::fork::Generation;
use crate::per_driver::lock;

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

    /// Returns the number of records.
    pub(super) fn len(&self) -> usize {
        self.slots().live().count()
    }
}
