//! Processes on one memory of a test.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use fastrand::Rng;

use crate::geometry::{Geometry, MEMBER, MEMBERS};
use crate::header::Lock;
use crate::members::Own;
use crate::page::{Evicted, PageId, Reserved};
use crate::table::slot::{Named, State};
use crate::table::{Private, Table};
use crate::words::Words;
use crate::{Key, geometry, header};

const PATIENCE: Duration = Duration::from_secs(60);

pub fn key(number: u64) -> Key {
    Key::from_bytes(&number.to_le_bytes())
}

/// A process, and what it holds.
#[derive(Clone)]
pub struct Process {
    pub own: Own,
    pub private: Private,
    pub stores: Vec<Vec<PageId>>,
    pub pins: Vec<Vec<PageId>>,
}

pub struct World {
    pub geometry: Geometry,
    pub memory: Vec<AtomicU64>,
    pub processes: Vec<Process>,
    /// Another program writes to the memory: nothing is asked of the calls' results but that they end.
    pub is_hostile: bool,
    /// Calls that met damage.
    pub repairs: u32,
}

impl Clone for World {
    fn clone(&self) -> Self {
        let memory = self.memory.iter();
        Self {
            geometry: self.geometry.clone(),
            memory: memory
                .map(|word| AtomicU64::new(word.load(Relaxed)))
                .collect(),
            processes: self.processes.clone(),
            is_hostile: self.is_hostile,
            repairs: self.repairs,
        }
    }
}

impl World {
    pub fn new(geometry: Geometry, processes: usize) -> Self {
        let usable = geometry.pages;
        Self::with_memory(geometry, processes, usable)
    }

    /// A tier whose first pages have memory.
    pub fn with_memory(geometry: Geometry, processes: usize, usable: u32) -> Self {
        let words = geometry.total.div_ceil(8);
        let mut world = Self {
            memory: (0..words).map(|_| AtomicU64::new(0)).collect(),
            geometry,
            processes: Vec::new(),
            is_hostile: false,
            repairs: 0,
        };
        Words::over(&world.memory).put(header::SEED, 0x1234_5678_9abc_def1);
        for _ in 0..processes {
            world.join(usable);
        }
        world.check();
        world
    }

    /// A process joins.
    pub fn join(&mut self, usable: u32) {
        let words = Words::over(&self.memory);
        let (own, _) = words.claim_member(false).unwrap();
        self.processes.push(Process {
            own,
            private: Private::new(&self.geometry).unwrap(),
            stores: Vec::new(),
            pins: Vec::new(),
        });
        let who = self.processes.len() - 1;
        self.locked(who, |table| table.join(usable, false).unwrap());
    }

    /// Calls as a process, as `Tier` does.
    pub fn with<T>(&mut self, who: usize, call: impl FnOnce(&mut Table<'_>) -> T) -> T {
        self.locked(who, |table| {
            if table.is_dirty() {
                table.take_over().unwrap();
            }
            call(table)
        })
    }

    fn locked<T>(&mut self, who: usize, call: impl FnOnce(&mut Table<'_>) -> T) -> T {
        let words = Words::over(&self.memory);
        let Process { own, private, .. } = &mut self.processes[who];
        if self.is_hostile {
            let mut table = Table::new(&words, &self.geometry, *own, private);
            let result = call(&mut table);
            if words.take_damage() {
                table.take_over().unwrap();
                self.repairs += 1;
            }
            return result;
        }
        let _lock = Lock::acquire(&words, *own, PATIENCE, false).unwrap();
        let mut table = Table::new(&words, &self.geometry, *own, private);
        let result = call(&mut table);
        assert!(!words.take_damage());
        result
    }

    /// The word of a page's contents.
    pub fn contents(&self, page: PageId) -> &AtomicU64 {
        &self.memory[self.geometry.page_at(page) as usize / 8]
    }

    /// The contents of a key's page, which are not those of another's.
    pub fn contents_of(key: &Key) -> u64 {
        Named::of(key, 99).hash
    }

    pub fn write(&self, keys: &[Key], reserved: &Reserved) {
        for &(index, page) in &reserved.placed {
            self.contents(page)
                .store(Self::contents_of(&keys[index]), Relaxed);
        }
    }

    pub fn write_and_commit(&mut self, who: usize, keys: &[Key], reserved: &Reserved) {
        self.write(keys, reserved);
        let pages: Vec<PageId> = reserved.placed.iter().map(|&(_, page)| page).collect();
        self.with(who, |table| table.commit(&pages).unwrap());
    }

    pub fn store_keys(&mut self, who: usize, keys: &[Key]) -> Vec<Evicted> {
        let reserved = self.with(who, |table| table.reserve(keys).unwrap());
        self.write_and_commit(who, keys, &reserved);
        reserved.evicted
    }

    pub fn store(&mut self, who: usize, numbers: &[u64]) {
        let keys: Vec<Key> = numbers.iter().map(|&number| key(number)).collect();
        self.store_keys(who, &keys);
    }

    /// Ends a process without another word, and any that was about to join. Returns the keys that it alone has pinned.
    pub fn die(&mut self, who: usize) -> HashSet<Key> {
        let before = self.pinned_keys();
        self.end(who);
        &before - &self.pinned_keys()
    }

    fn end(&mut self, who: usize) {
        // One that left was removed from the list only at its end.
        if who < self.processes.len() {
            self.processes.remove(who);
        }
        let words = Words::over(&self.memory);
        let living = crate::members::own().unwrap();
        for number in 0..64 {
            let at = MEMBERS + number * MEMBER;
            let mut names = self.processes.iter().map(|process| process.own.name());
            // Another start time: this process's number was given out again.
            if words.get(at) == living && names.all(|name| name != number + 1) {
                words.put(at, living ^ 1);
            }
        }
    }

    /// Gives the numbers that nobody has to members that live.
    pub fn take_all_numbers(&self) {
        let words = Words::over(&self.memory);
        let living = crate::members::own().unwrap();
        for number in 0..64 {
            words.swap(MEMBERS + number * MEMBER, 0, living);
        }
    }

    /// The process that goes on: a new one, if none is left.
    pub fn next(&mut self) -> usize {
        if self.processes.is_empty() {
            self.join(self.geometry.pages);
        }
        0
    }

    pub fn sweep(&mut self, who: usize) {
        self.with(who, |table| table.sweep_ended(Duration::ZERO).unwrap());
    }

    /// Writes any value, or one that is nearly right, to a word of the table behind the members.
    pub fn scribble(&mut self, random: &mut Rng) {
        self.is_hostile = true;
        let first = geometry::GROUPS / 8;
        let at = match random.u32(0..4) {
            0 => header::CLOCK / 8,
            1 => first + random.u64(0..64),
            2 => first + random.u64(0..self.memory.len() as u64 - first),
            _ => self.geometry.slot_at(random.u32(0..self.geometry.pages)) / 8 + random.u64(0..16),
        };
        let word = &self.memory[at as usize % self.memory.len()];
        let value = match random.u32(0..5) {
            0 => random.u64(..),
            1 => word.load(Relaxed) ^ 1 << random.u32(0..64),
            2 => u64::MAX,
            3 => random.u64(0..16) | random.u64(0..16) << 32,
            _ => self.memory[random.usize(0..self.memory.len())].load(Relaxed),
        };
        word.store(value, Relaxed);
    }

    /// All processes end, and another one comes.
    pub fn settle(&mut self) {
        self.is_hostile = false;
        while !self.processes.is_empty() {
            self.end(0);
        }
        self.join(self.geometry.pages);
        // The contents of pages are not what is asked here.
        let slots: Vec<(PageId, Key)> = self
            .slots()
            .filter(|slot| slot.status.state == State::Ready)
            .map(|slot| (slot.status.id(slot.page), slot.key))
            .collect();
        for (page, key) in slots {
            self.contents(page).store(Self::contents_of(&key), Relaxed);
        }
    }
}
