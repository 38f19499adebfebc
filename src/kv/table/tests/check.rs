//! The contents of a test's memory, and whether they are right.

use std::collections::HashSet;
use std::sync::atomic::Ordering::Relaxed;

use super::op::Op;
use super::world::World;
use crate::geometry::{self, Geometry};
use crate::page::PageId;
use crate::table::slot::{CHECK, LINKS, Named, PINS, STAMP, State, Status, WRITER};
use crate::table::{PAGES, Private, Table, WRITING};
use crate::words::{Words, halves};
use crate::{Key, header};

impl World {
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

    pub fn slots(&self) -> impl Iterator<Item = Slot> {
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
pub struct Slot {
    pub page: u32,
    pub status: Status,
    pub key: Key,
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
            key: key.map_or(key_of_none(), |key| key.key),
            is_right: match status.state {
                State::Free => all[CHECK as usize / 8] == 0,
                State::Ready => all[CHECK as usize / 8] == check,
                State::Writing | State::Failed => all[CHECK as usize / 8] == !check,
                State::Abandoned => true,
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
        let mut stamps = HashSet::new();
        for slot in &slots {
            assert!(slot.is_right, "page {}", slot.page);
            let pins = slot.get(PINS);
            assert_eq!(pins & !in_use, 0, "pins of nobody");
            match slot.status.state {
                State::Free => assert_eq!(pins, 0),
                State::Ready => {
                    let contents = self.contents(slot.status.id(slot.page)).load(Relaxed);
                    assert_eq!(contents, Self::contents_of(&slot.key), "another key's page");
                    let stamp = slot.get(STAMP);
                    assert!(stamp <= words.get(header::CLOCK), "a stamp of the future");
                    assert!(stamps.insert(stamp), "two pages used at one time");
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
            let written = slots.iter().filter(|slot| {
                slot.status.state.is_stored() && slot.get(WRITER) == process.own.name()
            });
            let stores = process.stores.iter().flatten();
            assert_eq!(written.count(), stores.count(), "a page of no store");
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
}
