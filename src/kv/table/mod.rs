//! The table in a tier's memory: which page has which key, and in which state. Every process that has the tier changes this one.
//!
//! The truth is in the slots (state, key, check, stamp, pins, writer), in the extents' groups, and in the members. The index, the lists
//! and the counts follow from it: [`repair`](Table::repair) makes them again. Each change writes the truth in an order that is right
//! at every instruction, and what follows from it then: a process that is killed in between holds the lock, and the one that takes the lock over
//! repairs first.

mod lists;
mod repair;
mod reserve;
mod slot;
mod stores;

use std::time::Instant;

use crate::geometry::{GROUP, GROUPS, Geometry};
use crate::header::{CLOCK, SEED, STEPS, USABLE};
use crate::members::Own;
use crate::page::PageId;
use crate::words::{Words, list_for};
use crate::{Key, Result, Stats};

pub use repair::Found;
use slot::{Named, PINS, STAMP, STATE, State, Status};
pub(crate) use stores::{End, Use};

/// Where a group has the number of its pages that are being written, and that of its pages.
const WRITING: u64 = 40;
const PAGES: u64 = 48;

/// What a process keeps of a tier in its own memory.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Private {
    /// The loads and copies of this process that have each page: fewer than 2^64, as each takes memory.
    users: Vec<u64>,
    counts: Stats,
    /// Ends of uses that could not be written when they happened.
    pub(crate) late: Vec<End>,
    /// When ended members were last looked for.
    swept: Option<Instant>,
}

impl Private {
    /// Has a number for each page: 8 bytes, which the kernel gives once they are written.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) without addresses for them.
    pub(crate) fn new(geometry: &Geometry) -> Result<Self> {
        let pages = geometry.pages as usize;
        // What follows would end the process instead.
        drop(list_for::<u64>(pages)?);
        Ok(Self {
            users: vec![0; pages],
            ..Self::default()
        })
    }
}

/// The table during one call, under the lock.
pub(crate) struct Table<'a> {
    words: &'a Words<'a>,
    geometry: &'a Geometry,
    own: Own,
    private: &'a mut Private,
    seed: u64,
}

impl<'a> Table<'a> {
    /// The table, for the holder of the lock.
    pub(crate) fn new(
        words: &'a Words<'a>,
        geometry: &'a Geometry,
        own: Own,
        private: &'a mut Private,
    ) -> Self {
        Self {
            seed: words.get(SEED),
            words,
            geometry,
            own,
            private,
        }
    }

    /// Begins a call: repairs the table if it must be, frees the pages up to `usable` that had no memory yet, and ends uses of pages that
    /// earlier calls could not end.
    ///
    /// # Errors
    /// As [`repair`](Self::repair).
    #[inline(always)]
    pub(crate) fn begin(&mut self, usable: u32) -> Result<()> {
        if self.is_dirty() {
            self.take_over()?;
        }
        self.grow_to(usable);
        if !self.private.late.is_empty() {
            self.end_late();
        }
        Ok(())
    }

    #[cold]
    fn end_late(&mut self) {
        for end in std::mem::take(&mut self.private.late) {
            self.end(&end);
        }
    }

    /// Frees the pages up to `usable` that had no memory yet. They are given out after those that are free now.
    fn grow_to(&mut self, usable: u32) {
        let before = self.words.get(USABLE);
        if u64::from(usable) <= before {
            return;
        }
        self.words.put(USABLE, usable.into());
        if !self.geometry.has_groups() {
            for page in before as u32..usable {
                self.push_newest(self.free_list(0), page);
            }
            self.count(0, PAGES, i64::from(usable) - before as i64);
        }
    }

    /// Returns where the slot of a page lies; beyond all memory for a number that no page has now.
    #[inline(always)]
    fn slot(&self, page: u32) -> u64 {
        /// No word lies there.
        const NOWHERE: u64 = u64::MAX - 1023;
        let has_group = || {
            let (extent, place) = self.geometry.place_of(page);
            let group = self.group_of_extent(extent).map(usize::from);
            let group = group.and_then(|group| self.geometry.groups.get(group));
            group.is_some_and(|group| place < group.pages)
        };
        let is_there = page < self.geometry.pages && (!self.geometry.has_groups() || has_group());
        match self.words.expect(is_there) {
            true => self.geometry.slot_at(page),
            false => NOWHERE,
        }
    }

    #[inline]
    fn status(&self, slot: u64) -> Status {
        const FREE: Status = Status {
            state: State::Free,
            group: 0,
            uses: 0,
        };
        Status::of(self.words.get(slot + STATE)).unwrap_or_else(|| {
            self.words.damage();
            FREE
        })
    }

    fn set_state(&self, slot: u64, status: Status, state: State) {
        self.words
            .put(slot + STATE, Status { state, ..status }.word());
    }

    /// Returns the slot of a page as it was given out, and its state. `None` if it is free, or another key's since.
    fn slot_of(&self, id: PageId) -> Option<(u64, Status)> {
        if !self.geometry.has(id) {
            return None;
        }
        if self.geometry.has_groups() {
            let (extent, _) = self.geometry.place_of(id.number());
            self.group_of_extent(extent)
                .filter(|&group| group == id.group())?;
        }
        let slot = self.geometry.slot_at(id.number());
        let status = Status::of(self.words.get(slot + STATE))?;
        (status.id(id.number()) == id && status.state != State::Free).then_some((slot, status))
    }

    /// Adds to a count of a group.
    fn count(&self, group: u8, count: u64, more: i64) {
        self.words
            .add(GROUPS + u64::from(group) * GROUP + count, more);
    }

    fn sum_of_groups(&self, get: impl Fn(u8) -> u64) -> u64 {
        let groups = 0..self.geometry.groups.len() as u8;
        groups.map(get).fold(0, u64::saturating_add)
    }

    fn named(&self, key: &Key) -> Named {
        Named::of(key, self.seed)
    }

    /// Returns how many of the first keys are ready.
    pub(crate) fn lookup(&mut self, keys: &[Key]) -> usize {
        let is_ready = |key: &&Key| self.page_of(key).is_some();
        let found = keys.iter().take_while(is_ready).count();
        self.private.counts.hits += found as u64;
        self.private.counts.misses += (keys.len() - found) as u64;
        found
    }

    /// Returns the ready page of a key.
    fn page_of(&self, key: &Key) -> Option<PageId> {
        let page = self.find(&self.named(key))?;
        let status = self.status(self.slot(page));
        // The index has pages of the key's group alone, but another process may have written anything.
        let is_right = self.words.expect(status.group == key.group());
        let id = self.id(page, status)?;
        (status.state == State::Ready && is_right).then_some(id)
    }

    /// Returns the name of a page; `None` if its slot has a group that cannot have it there.
    fn id(&self, page: u32, status: Status) -> Option<PageId> {
        let id = status.id(page);
        self.words.expect(self.geometry.has(id)).then_some(id)
    }

    /// Makes ready keys the most recently used ones, the first key last.
    pub(crate) fn touch(&mut self, keys: &[Key]) {
        for key in keys.iter().rev() {
            if let Some(page) = self.page_of(key) {
                self.use_now(page.number());
            }
        }
    }

    /// Stamps a ready page, and makes it the most recently used one if nothing pins it.
    fn use_now(&self, page: u32) {
        let slot = self.slot(page);
        self.stamp(page, slot);
        if self.words.get(slot + PINS) == 0 {
            let lru = self.lru(self.status(slot).group);
            self.unlink(lru, page);
            self.push_newest(lru, page);
        }
    }

    /// Notes in a page's slot that it was used now.
    fn stamp(&self, page: u32, slot: u64) {
        let clock = self.words.get(CLOCK).wrapping_add(1);
        self.words.put(CLOCK, clock);
        self.words.put(slot + STAMP, clock);
        self.note_use(page, clock);
    }

    /// Returns the keys that are ready, the least recently used first; those that are pinned come last.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) without memory for the list.
    pub(crate) fn keys(&mut self) -> Result<Vec<(Key, PageId)>> {
        self.sweep_if_due()?;
        let mut found = list_for(self.stats().ready as usize)?;
        let usable = self.words.get(USABLE).min(self.geometry.pages.into()) as u32;
        for extent in 0..self.geometry.extents {
            let Some(group) = self.group_of_extent(extent) else {
                continue;
            };
            let pages = self.geometry.pages_of(extent, &self.group(group));
            for page in pages.take_while(|&page| page < usable) {
                self.make_step(page.into());
                let slot = self.geometry.slot_at(page);
                let status = Status::of(self.words.get(slot + STATE));
                if status.is_some_and(|status| status.state == State::Ready) {
                    let is_pinned = self.words.get(slot + PINS) != 0;
                    found.push((is_pinned, self.words.get(slot + STAMP), page));
                }
            }
        }
        found.sort_unstable();
        let named = |(_, _, page): (bool, u64, u32)| {
            let slot = self.slot(page);
            let key = Named::read(self.words, slot, self.seed)?;
            Some((key.key, self.id(page, self.status(slot))?))
        };
        Ok(found.into_iter().filter_map(named).collect())
    }

    /// Lets members that wait for the lock see that work on many pages goes on.
    fn make_step(&self, number: u64) {
        if number.is_multiple_of(1 << 16) {
            self.words.add(STEPS, 1);
        }
    }

    /// Returns the counts. Of a tier of several groups, its pages are those of the extents that groups have now.
    pub(crate) fn stats(&self) -> Stats {
        let group =
            |group: u8, count: u64| self.words.get(GROUPS + u64::from(group) * GROUP + count);
        let usable = self.sum_of_groups(|at| group(at, PAGES));
        let free = self.sum_of_groups(|group| self.len_of(self.free_list(group)));
        let writing = self.sum_of_groups(|at| group(at, WRITING));
        let evictable = self.sum_of_groups(|group| self.len_of(self.lru(group)));
        let ready = usable.saturating_sub(free).saturating_sub(writing);
        let mut stats = self.private.counts;
        stats.pages = match self.geometry.has_groups() {
            true => usable,
            false => self.geometry.pages.into(),
        };
        stats.page_bytes = self.geometry.page_bytes;
        (stats.usable, stats.free, stats.writing) = (usable, free, writing);
        stats.ready = ready.min(self.geometry.pages.into());
        stats.pinned = ready.saturating_sub(evictable);
        stats
    }
}

#[cfg(test)]
mod tests;
