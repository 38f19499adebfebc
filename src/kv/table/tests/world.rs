//! Processes on one memory of a test.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use fastrand::Rng;

use crate::geometry::{Geometry, MEMBER, MEMBERS};
use crate::lock::{Lock, Patience};
use crate::members::{Members, Own};
use crate::page::{Direction, Evicted, PageId, Reserved};
use crate::table::slot::{CHECK, LINKS, Named, PINS, STAMP, State, Status, WRITER};
use crate::table::{PAGES, Private, Table, WRITING};
use crate::words::{Words, halves};
use crate::{Key, geometry, header};

const PATIENCE: Patience = Patience {
    time: Duration::from_secs(60),
    is_for_steps: true,
};

/// Keys that random calls use.
const KEYS: u64 = 30;

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
    memory: Vec<AtomicU64>,
    pub processes: Vec<Process>,
    /// Another program writes to the memory: nothing is asked of the calls' results but that they end.
    is_hostile: bool,
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

/// A call.
#[derive(Clone, Debug)]
pub enum Op {
    Reserve(Vec<Key>),
    /// The store with this number, modulo how many there are.
    Commit(usize),
    Abort(usize),
    Pin(Vec<Key>),
    /// A copy of pages of any process's store or pins.
    Copy(usize, usize, Direction),
    Unpin(usize, bool),
    Touch(Vec<Key>),
    Remove(Vec<Key>),
    Sweep,
    Repair,
    /// Another process comes, or this one goes.
    Join,
    Leave,
}

impl Op {
    pub fn random(world: &World, random: &mut Rng) -> Self {
        let any = random.usize(0..4);
        let groups = world.geometry.groups.len() as u8;
        let mut keys = || -> Vec<Key> {
            let count = random.usize(0..6);
            let keys = (0..count).map(|_| {
                let number = random.u64(0..KEYS);
                key(number).in_group(random.u8(0..groups))
            });
            keys.collect()
        };
        let keys = keys();
        match random.u32(0..24) {
            0..6 => Self::Reserve(keys),
            6..10 => Self::Commit(any),
            10 => Self::Abort(any),
            11..13 => Self::Pin(keys.into_iter().take(2).collect()),
            13..15 => Self::Copy(any, random.usize(0..4), Direction::Load),
            15 => Self::Copy(any, random.usize(0..4), Direction::Store),
            16..19 => Self::Unpin(any, random.u32(0..8) == 0),
            19 => Self::Touch(keys),
            20 => Self::Remove(keys),
            21 => Self::Sweep,
            22 if random.bool() => Self::Repair,
            22 => Self::Leave,
            _ => Self::Join,
        }
    }
}

/// Takes an item of a list by a number, modulo its length.
fn take<T>(list: &mut Vec<T>, at: usize) -> Option<T> {
    (!list.is_empty()).then(|| list.swap_remove(at % list.len()))
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
    fn join(&mut self, usable: u32) {
        let own = Members::of(&Words::over(&self.memory))
            .claim(false)
            .unwrap();
        self.processes.push(Process {
            own,
            private: Private::default(),
            stores: Vec::new(),
            pins: Vec::new(),
        });
        let who = self.processes.len() - 1;
        self.locked(who, |table, is_broken| {
            if is_broken {
                table.words.put(header::DIRTY, 1);
            }
            table.join(usable, false).unwrap()
        });
    }

    /// Calls as a process, as `Inner` does.
    pub fn with<T>(&mut self, who: usize, call: impl FnOnce(&mut Table<'_>) -> T) -> T {
        self.locked(who, |table, is_broken| {
            if is_broken {
                table.take_over().unwrap();
            }
            call(table)
        })
    }

    fn locked<T>(&mut self, who: usize, call: impl FnOnce(&mut Table<'_>, bool) -> T) -> T {
        let words = Words::over(&self.memory);
        let Process { own, private, .. } = &mut self.processes[who];
        if self.is_hostile {
            let mut table = Table::new(&words, &self.geometry, *own, private);
            let result = call(&mut table, false);
            if words.take_damage() {
                table.take_over().unwrap();
                self.repairs += 1;
            }
            return result;
        }
        let lock = Lock::acquire(&words, *own, PATIENCE).unwrap();
        Members::of(&words).expect_member(*own).unwrap();
        let mut table = Table::new(&words, &self.geometry, *own, private);
        let is_broken = lock.is_taken_over || table.is_dirty();
        let result = call(&mut table, is_broken);
        assert!(!words.take_damage());
        result
    }

    /// The word of a page's contents.
    fn contents(&self, page: PageId) -> &AtomicU64 {
        &self.memory[self.geometry.page_at(page) as usize / 8]
    }

    /// The contents of a key's page, which are not those of another's.
    fn contents_of(key: &Key) -> u64 {
        Named::of(key, 99).hash
    }

    fn write(&self, keys: &[Key], reserved: &Reserved) {
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

    /// A process makes a call.
    pub fn step(&mut self, who: usize, op: &Op) {
        match op {
            Op::Reserve(keys) => {
                if let Ok(reserved) = self.with(who, |table| table.reserve(keys)) {
                    self.write(keys, &reserved);
                    let pages = reserved.placed.iter().map(|&(_, page)| page).collect();
                    self.processes[who].stores.push(pages);
                }
            }
            Op::Commit(at) => {
                if let Some(pages) = take(&mut self.processes[who].stores, *at)
                    && self.with(who, |table| table.commit(&pages)).is_err()
                {
                    self.processes[who].stores.push(pages);
                }
            }
            Op::Abort(at) => {
                if let Some(pages) = take(&mut self.processes[who].stores, *at) {
                    self.with(who, |table| table.abort(&pages));
                }
            }
            Op::Pin(keys) => {
                if let Ok(pages) = self.with(who, |table| table.pin(keys)) {
                    self.processes[who].pins.push(pages);
                }
            }
            Op::Copy(of, at, direction) => {
                let of = &self.processes[of % self.processes.len()];
                let mut lists = match direction {
                    Direction::Load => of.pins.clone(),
                    Direction::Store => of.stores.clone(),
                };
                if let Some(pages) = take(&mut lists, *at)
                    && self
                        .with(who, |table| table.begin_copy(&pages, *direction))
                        .is_ok()
                {
                    self.processes[who].pins.push(pages);
                }
            }
            Op::Unpin(at, fails) => {
                if let Some(pages) = take(&mut self.processes[who].pins, *at) {
                    self.with(who, |table| {
                        if *fails {
                            table.fail(&pages);
                        }
                        table.unpin(&pages);
                    });
                }
            }
            Op::Touch(keys) => self.with(who, |table| table.touch(keys)),
            Op::Remove(keys) => drop(self.with(who, |table| table.remove(keys))),
            Op::Sweep => self.sweep(who),
            Op::Repair | Op::Join | Op::Leave if self.is_hostile => self.with(who, |table| {
                let keys = table.keys().unwrap();
                assert!(keys.iter().all(|&(_, page)| table.geometry.has(page)));
                table.sweep(table.words.get(header::CLOCK) & !table.own.bit());
                table.stats();
            }),
            Op::Repair => self.with(who, |table| table.take_over().unwrap()),
            Op::Join if self.processes.len() < 5 => self.join(self.geometry.pages),
            Op::Join => {}
            Op::Leave if self.processes.len() > 1 => {
                let bit = self.processes[who].own.bit();
                self.with(who, |table| table.sweep(bit));
                let own = self.processes[who].own;
                Members::of(&Words::over(&self.memory)).release(own);
                self.processes.remove(who);
            }
            Op::Leave => {}
        }
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
        let living = crate::owner::own().unwrap();
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
        let living = crate::owner::own().unwrap();
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
        self.with(who, |table| table.sweep_ended(Duration::ZERO));
    }

    /// The keys that are ready, as the slots say.
    pub fn ready(&self) -> HashSet<Key> {
        self.slots()
            .filter(|slot| slot.status.state == State::Ready)
            .map(|slot| slot.key)
            .collect()
    }

    /// The ready keys that living processes have pinned.
    pub fn pinned_keys(&self) -> HashSet<Key> {
        let held = |page: PageId| {
            let mut pins = self
                .processes
                .iter()
                .flat_map(|process| process.pins.iter().flatten());
            pins.any(|&pin| pin == page)
        };
        let slots = self
            .slots()
            .filter(|slot| slot.status.state == State::Ready);
        slots
            .filter(|slot| held(slot.status.id(slot.page)))
            .map(|slot| slot.key)
            .collect()
    }

    fn slots(&self) -> impl Iterator<Item = Slot> {
        let words = Words::over(&self.memory);
        let group_of = |extent: u32| {
            let (name, _) = halves(Words::over(&self.memory).get(self.geometry.extent_at(extent)));
            self.geometry.groups.get((name as usize).wrapping_sub(1))
        };
        let usable = words.get(header::USABLE) as u32;
        let groups =
            (0..self.geometry.extents).filter_map(move |extent| Some((extent, group_of(extent)?)));
        let pages = groups.flat_map(|(extent, group)| self.geometry.pages_of(extent, group));
        pages
            .filter(move |&page| page < usable)
            .map(move |page| Slot::read(&words, &self.geometry, page))
    }
}

/// A slot as it is.
struct Slot {
    page: u32,
    status: Status,
    key: Key,
    words: [u64; 16],
    is_right: bool,
}

impl Slot {
    fn read(words: &Words<'_>, geometry: &Geometry, page: u32) -> Self {
        let at = geometry.slot_at(page);
        let mut all = [0; 16];
        for (word, index) in all.iter_mut().zip(0..) {
            *word = words.get(at + 8 * index);
        }
        let key = Named::read(words, at, 0x1234_5678_9abc_def1);
        let status = Status::of(all[0]).unwrap();
        let check = key.as_ref().map_or(0, |key| key.check(page));
        Self {
            page,
            status,
            key: key.map_or(key_of_none(), |key| key.key()),
            is_right: match status.state {
                State::Free => all[CHECK as usize / 8] == 0 || geometry.has(status.id(page)),
                State::Ready => all[CHECK as usize / 8] == check,
                State::Writing { is_abandoned, .. } => {
                    is_abandoned || all[CHECK as usize / 8] == !check
                }
            },
            words: all,
        }
    }

    fn get(&self, at: u64) -> u64 {
        self.words[at as usize / 8]
    }
}

fn key_of_none() -> Key {
    Key::from_bytes(b"none")
}

impl World {
    /// Checks everything: what follows from the slots is as they are.
    pub fn check(&self) {
        let words = Words::over(&self.memory);
        assert_eq!((words.get(header::LOCK), words.get(header::DIRTY)), (0, 0));
        let slots: Vec<Slot> = self.slots().collect();
        let in_use = self
            .processes
            .iter()
            .fold(0, |bits, process| bits | process.own.bit());
        let names: Vec<u64> = self
            .processes
            .iter()
            .map(|process| process.own.name())
            .collect();
        let mut indexed = 0;
        for slot in &slots {
            assert!(slot.is_right, "page {}", slot.page);
            let pins = slot.get(PINS);
            assert_eq!(pins & !in_use, 0, "pins of nobody");
            match slot.status.state {
                State::Free => assert_eq!(pins, 0),
                State::Ready => {
                    let contents = self.contents(slot.status.id(slot.page)).load(Relaxed);
                    assert_eq!(contents, Self::contents_of(&slot.key), "another key's page");
                    indexed += 1;
                }
                state if state.is_stored() => {
                    assert!(names.contains(&slot.get(WRITER)), "written by nobody");
                    indexed += 1;
                }
                _ => assert_ne!(pins, 0, "lost"),
            }
        }
        self.check_lists(&words, &slots);
        self.check_extents(&words, &slots);
        self.check_index(&words, &slots, indexed);
        self.check_processes(&slots);
    }

    fn check_lists(&self, words: &Words<'_>, slots: &[Slot]) {
        for group in 0..self.geometry.groups.len() as u8 {
            let at = geometry::GROUPS + u64::from(group) * geometry::GROUP;
            let of_group = || slots.iter().filter(move |slot| slot.status.group == group);
            let writing = of_group().filter(|slot| slot.status.state.is_writing());
            assert_eq!(words.get(at + WRITING), writing.count() as u64);
            assert_eq!(words.get(at + PAGES), of_group().count() as u64);
            let free = of_group().filter(|slot| slot.status.state == State::Free);
            let free: HashSet<u32> = free.map(|slot| slot.page).collect();
            let lru =
                of_group().filter(|slot| slot.status.state == State::Ready && slot.get(PINS) == 0);
            let lru: HashSet<u32> = lru.map(|slot| slot.page).collect();
            for (at, expected) in [(at + 8, free), (at + 24, lru.clone())] {
                let (oldest, newest) = halves(words.get(at));
                let (mut next, mut last, mut listed, mut stamp) = (oldest, 0, Vec::new(), 0);
                while let Some(page) = next.checked_sub(1) {
                    assert!(listed.len() < slots.len(), "a circle");
                    let slot = self.geometry.slot_at(page);
                    let (older, newer) = halves(words.get(slot + LINKS));
                    assert_eq!(older, last);
                    if expected == lru {
                        assert!(words.get(slot + STAMP) >= stamp, "the order of use");
                        stamp = words.get(slot + STAMP);
                    }
                    listed.push(page);
                    (last, next) = (page + 1, newer);
                }
                assert_eq!((newest, words.get(at + 8)), (last, listed.len() as u64));
                assert_eq!(listed.len(), expected.len());
                assert_eq!(listed.into_iter().collect::<HashSet<_>>(), expected);
            }
        }
    }

    fn check_extents(&self, words: &Words<'_>, slots: &[Slot]) {
        if !self.geometry.has_groups() {
            return;
        }
        for extent in 0..self.geometry.extents {
            let at = self.geometry.extent_at(extent);
            if halves(words.get(at)).0 == 0 {
                continue;
            }
            let of_extent = || {
                slots
                    .iter()
                    .filter(|slot| self.geometry.place_of(slot.page).0 == extent)
            };
            let free = of_extent()
                .filter(|slot| slot.status.state == State::Free)
                .count();
            let is_held = |slot: &&Slot| slot.status.state.is_writing() || slot.get(PINS) != 0;
            let counts = (free as u32, of_extent().filter(is_held).count() as u32);
            assert_eq!(halves(words.get(at + 8)), counts, "extent {extent}");
        }
    }

    fn check_index(&self, words: &Words<'_>, slots: &[Slot], indexed: usize) {
        let buckets = (0..self.geometry.buckets).map(|at| words.get(self.geometry.bucket_at(at)));
        assert_eq!(buckets.filter(|&bucket| bucket != 0).count(), indexed);
        let mut private = Private::default();
        let own = self.processes[0].own;
        let table = Table::new(words, &self.geometry, own, &mut private);
        for slot in slots {
            let found = table.find(&table.named(&slot.key));
            let is_indexed = slot.status.state == State::Ready || slot.status.state.is_stored();
            assert_eq!(found == Some(slot.page), is_indexed, "{:?}", slot.key);
        }
        assert!(!words.take_damage());
    }

    /// Each process has what it thinks it has.
    fn check_processes(&self, slots: &[Slot]) {
        let slot_of = |page: &PageId| {
            let mut of_page = slots
                .iter()
                .filter(|slot| slot.status.id(slot.page) == *page);
            of_page
                .next()
                .expect("a page that a process has is another's")
        };
        for process in &self.processes {
            for page in process.pins.iter().flatten() {
                assert_ne!(
                    slot_of(page).get(PINS) & process.own.bit(),
                    0,
                    "a pin was lost"
                );
            }
            for page in process.stores.iter().flatten() {
                let slot = slot_of(page);
                let is_own = slot.get(WRITER) == process.own.name();
                assert!(slot.status.state.is_stored() && is_own, "a store was lost");
            }
            let bits = slots
                .iter()
                .filter(|slot| slot.get(PINS) & process.own.bit() != 0);
            let pins: HashSet<PageId> = process.pins.iter().flatten().copied().collect();
            assert_eq!(bits.count(), pins.len(), "a pin of no use");
        }
    }

    /// Checks which keys a call may have added, and removed.
    pub fn check_effect(&self, op: &Op, before: &HashSet<Key>, pinned: &HashSet<Key>) {
        let after = self.ready();
        assert!(pinned.is_subset(&after), "a pinned page was evicted");
        let (added, removed) = (
            after.difference(before).count(),
            before.difference(&after).count(),
        );
        match op {
            Op::Reserve(keys) => {
                let stay = keys.iter().filter(|key| before.contains(key));
                assert!(added == 0 && stay.into_iter().all(|key| after.contains(key)));
            }
            Op::Commit(_) => assert_eq!(removed, 0),
            Op::Remove(keys) => {
                let mut gone = before.difference(&after);
                assert!(added == 0 && gone.all(|key| keys.contains(key)));
            }
            _ => assert_eq!((added, removed), (0, 0), "{op:?}"),
        }
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
