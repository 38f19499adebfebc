//! The table in a tier's memory: which page has which key, and in which state. Every process that has the tier changes this one.
//!
//! The truth is in the slots (state, key, check, stamp, pins, writer), in the extents' groups, and in the members. The index, the lists
//! and the counts follow from it: [`repair`](Table::repair) makes them again. Each change writes the truth in an order that is right
//! at every instruction, and what follows from it then: a process that is killed in between holds the lock, and the one that takes the lock over
//! repairs first.

mod extents;
mod index;
mod lists;
mod repair;
mod reserve;
mod slot;

use std::collections::HashMap;
use std::time::Instant;

use crate::geometry::{GROUP, GROUPS, Geometry};
use crate::hash::OfNumbers;
use crate::header::{CLOCK, SEED, USABLE};
use crate::members::{Members, Own};
use crate::page::{Direction, Evicted, PageId};
use crate::room::list_for;
use crate::words::{Words, halves};
use crate::{Error, Key, MemoryError, Result, Stats};

use slot::{CHECK, Named, PINS, STAMP, STATE, SUM, State, Status, WRITER};

/// Where a group has the number of its pages that are being written, and that of its pages.
const WRITING: u64 = 40;
const PAGES: u64 = 48;

/// What a process keeps of a tier in its own memory.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Private {
    /// The loads and copies of this process that have a page.
    users: HashMap<u32, u32, OfNumbers>,
    /// The pages that this process's stores are writing.
    writing: usize,
    counts: Stats,
    /// When ended members were last looked for.
    swept: Option<Instant>,
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

    fn members(&self) -> Members<'a> {
        Members::of(self.words)
    }

    /// Frees the pages up to `usable` that had no memory yet. They are given out after those that are free now.
    pub(crate) fn grow_to(&mut self, usable: u32) {
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
    #[inline]
    fn slot(&self, page: u32) -> u64 {
        /// No word lies there.
        const NOWHERE: u64 = u64::MAX - 1023;
        let (extent, place) = self.geometry.place_of(page);
        let group = match self.geometry.extents {
            1 if !self.geometry.has_groups() => Some(0),
            _ => self.group_of_extent(extent),
        };
        let group = group.and_then(|group| self.geometry.groups.get(usize::from(group)));
        let is_there = page < self.geometry.pages && group.is_some_and(|group| place < group.pages);
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
        let clock = self.words.get(CLOCK).wrapping_add(1);
        self.words.put(CLOCK, clock);
        let slot = self.slot(page);
        self.words.put(slot + STAMP, clock);
        self.note_use(page, clock);
        if self.words.get(slot + PINS) == 0 {
            let lru = self.lru(self.status(slot).group);
            self.unlink(lru, page);
            self.push_newest(lru, page);
        }
    }

    /// Makes pages that a store has written ready, the first one the most recently used.
    ///
    /// # Errors
    /// Those of [`expect_written`](Self::expect_written); nothing has changed then.
    pub(crate) fn commit(&mut self, pages: &[PageId]) -> Result<()> {
        self.expect_written(pages)?;
        for id in pages.iter().rev() {
            self.make_ready(*id);
        }
        Ok(())
    }

    /// Checks that all copies into pages of a store have ended well.
    ///
    /// # Errors
    /// [`Error::StillCopying`], [`Error::CopyFailed`], [`Error::WrongState`].
    pub(crate) fn expect_written(&self, pages: &[PageId]) -> Result<()> {
        let (mut copying, mut failed) = (0, 0);
        for &id in pages {
            let (slot, state) = self.own_written(id)?;
            copying += usize::from(self.words.get(slot + PINS) != 0);
            failed += usize::from(matches!(
                state,
                State::Writing {
                    has_failed: true,
                    ..
                }
            ));
        }
        if copying > 0 {
            return Err(Error::StillCopying { pages: copying });
        }
        if failed > 0 {
            return Err(Error::CopyFailed { pages: failed });
        }
        Ok(())
    }

    /// Takes the key from a damaged page that loads have pinned: no look-up finds it, no copy begins, and it becomes free
    /// with its last use. Returns whether it did: another thread or process may have done so.
    pub(crate) fn discard_damaged(&mut self, page: PageId) -> bool {
        let Some((slot, status)) = self.slot_of(page) else {
            return false;
        };
        if status.state != State::Ready || self.words.get(slot + PINS) == 0 {
            return false;
        }
        let state = State::Writing {
            is_abandoned: true,
            has_failed: true,
        };
        self.words.put(slot + STATE, status.with(state).word());
        self.remove_key(page.number());
        // It is held already, as a pinned page is.
        self.count(status.group, WRITING, 1);
        self.private.counts.damaged += 1;
        true
    }

    /// Returns the slot of a page that a store of this member writes, and its state.
    fn own_written(&self, id: PageId) -> Result<(u64, State)> {
        let found = self.slot_of(id);
        let is_own = |&(slot, status): &(u64, Status)| {
            let is_writing = matches!(
                status.state,
                State::Writing {
                    is_abandoned: false,
                    ..
                }
            );
            is_writing && self.words.get(slot + WRITER) == self.own.name()
        };
        let (slot, status) = found.filter(is_own).ok_or(Error::WrongState {
            page: id.number(),
            is: "another's since, or free",
            need: "of a store that was not committed",
        })?;
        Ok((slot, status.state))
    }

    /// Ready comes last: a page that is ready has its key, check and stamp.
    fn make_ready(&mut self, id: PageId) {
        let (slot, page) = (self.slot(id.number()), id.number());
        let status = self.status(slot);
        let clock = self.words.get(CLOCK).wrapping_add(1);
        self.words.put(CLOCK, clock);
        self.words.put(slot + STAMP, clock);
        self.words.put(slot + CHECK, !self.words.get(slot + CHECK));
        self.words
            .put(slot + STATE, status.with(State::Ready).word());
        self.push_newest(self.lru(status.group), page);
        self.count(status.group, WRITING, -1);
        self.count_in_extent(page, 0, -1);
        self.note_use(page, clock);
        self.private.writing = self.private.writing.saturating_sub(1);
        self.private.counts.stores += 1;
    }

    /// Frees pages of a store, or leaves that to the end of the copies that still write them.
    pub(crate) fn abort(&mut self, pages: &[PageId]) {
        for &page in pages {
            if self.own_written(page).is_ok() {
                self.abandon(page.number());
                self.private.writing = self.private.writing.saturating_sub(1);
            }
        }
    }

    /// Ends the store of a page that is being written.
    fn abandon(&self, page: u32) {
        let slot = self.slot(page);
        let status = self.status(slot);
        let State::Writing { has_failed, .. } = status.state else {
            return self.words.damage();
        };
        let is_abandoned = true;
        let state = State::Writing {
            is_abandoned,
            has_failed,
        };
        self.words.put(slot + STATE, status.with(state).word());
        self.remove_key(page);
        if self.words.get(slot + PINS) == 0 {
            self.free_written(page);
        }
    }

    fn free_written(&self, page: u32) {
        let group = self.status(self.slot(page)).group;
        self.set_free(page, group);
        self.count(group, WRITING, -1);
        self.count_in_extent(page, 0, -1);
        self.add_free(group, page);
    }

    /// Frees a ready page that nothing has pinned. Returns its key.
    fn discard(&self, page: u32) -> Option<Key> {
        // First, so that a kill leaves a ready page, which a repair finds again.
        let key = self.remove_key(page)?;
        let group = self.status(self.slot(page)).group;
        self.set_free(page, group);
        self.unlink(self.lru(group), page);
        self.add_free(group, page);
        Some(key.key())
    }

    /// Frees a page of a group, and ends its names so far.
    fn set_free(&self, page: u32, group: u8) {
        let slot = self.slot(page);
        let uses = halves(self.words.get(slot + STATE)).1.wrapping_add(1);
        let (state, uses) = (State::Free, PageId::new(page, group, uses).uses());
        self.words
            .put(slot + STATE, Status { state, group, uses }.word());
        self.words.put(slot + CHECK, 0);
    }

    fn add_free(&self, group: u8, page: u32) {
        self.push_oldest(self.free_list(group), page);
        self.count_in_extent(page, 1, 0);
    }

    /// Pins the pages of ready keys.
    ///
    /// # Errors
    /// [`Error::NotReady`]; nothing has changed then.
    pub(crate) fn pin(&mut self, keys: &[Key]) -> Result<Vec<PageId>> {
        let page = |(index, key): (usize, &Key)| {
            let not_ready = || Error::NotReady { key: *key, index };
            self.page_of(key).ok_or_else(not_ready)
        };
        let pages = keys.iter().enumerate().map(page);
        let pages = pages.collect::<Result<Vec<_>>>()?;
        self.add_users(&pages)?;
        Ok(pages)
    }

    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for more users of a page than can be counted; nothing
    /// has changed then.
    fn add_users(&mut self, pages: &[PageId]) -> Result<()> {
        // Each may be the same page.
        let more = u32::try_from(pages.len()).unwrap_or(u32::MAX);
        for page in pages {
            let users = self.private.users.get(&page.number()).copied().unwrap_or(0);
            if users.checked_add(more).is_none() {
                let why = format!("page {} has {users} loads and copies", page.number());
                return Err(MemoryError::invalid("pages", why).into());
            }
        }
        for page in pages {
            let users = self.private.users.entry(page.number()).or_default();
            *users += 1;
            if *users == 1 {
                self.set_pin(page.number());
            }
        }
        Ok(())
    }

    /// The pin comes first: a page with a pin is in a list at worst, and a repair takes it out.
    fn set_pin(&self, page: u32) {
        let slot = self.slot(page);
        let (status, pins) = (self.status(slot), self.words.get(slot + PINS));
        self.words.put(slot + PINS, pins | self.own.bit());
        if pins == 0 && status.state == State::Ready {
            self.unlink(self.lru(status.group), page);
            self.count_in_extent(page, 0, 1);
        }
    }

    /// Removes the pins of members from a page, and gives it back if no other is left.
    fn clear_pins(&self, page: u32, members: u64) {
        let slot = self.slot(page);
        let (status, pins) = (self.status(slot), self.words.get(slot + PINS));
        let left = pins & !members;
        if left == pins {
            return;
        }
        self.words.put(slot + PINS, left);
        match status.state {
            _ if left != 0 => {}
            State::Ready => {
                self.count_in_extent(page, 0, -1);
                self.use_now(page);
            }
            State::Writing {
                is_abandoned: true, ..
            } => self.free_written(page),
            _ => {}
        }
    }

    /// Takes pages for a copy, which keeps them until [`unpin`](Self::unpin).
    ///
    /// # Errors
    /// [`Error::WrongState`] unless each page is pinned by a member, or for a store being written, and still has the key that it
    /// was given out for.
    pub(crate) fn begin_copy(&mut self, pages: &[PageId], direction: Direction) -> Result<()> {
        let need = match direction {
            Direction::Load => "ready and pinned by a load",
            Direction::Store => "of a store that was not committed",
        };
        for &id in pages {
            let (is, fits) = match self.slot_of(id) {
                None if id.number() >= self.geometry.pages => ("not of this tier", false),
                None => ("another key's since, or free", false),
                Some((slot, status)) => {
                    let is_pinned = self.words.get(slot + PINS) != 0;
                    let fits = match direction {
                        Direction::Load => status.state == State::Ready && is_pinned,
                        Direction::Store => {
                            matches!(
                                status.state,
                                State::Writing {
                                    is_abandoned: false,
                                    ..
                                }
                            )
                        }
                    };
                    (status.state.name(), fits)
                }
            };
            if !fits {
                let page = id.number();
                return Err(Error::WrongState { page, is, need });
            }
        }
        self.add_users(pages)
    }

    /// Releases pages that [`pin`](Self::pin) or [`begin_copy`](Self::begin_copy) pinned. A page counts as used then.
    pub(crate) fn unpin(&mut self, pages: &[PageId]) {
        for &page in pages.iter().rev() {
            let Some(users) = self.private.users.get_mut(&page.number()) else {
                continue;
            };
            *users -= 1;
            if *users == 0 {
                self.private.users.remove(&page.number());
                if self.slot_of(page).is_some() {
                    self.clear_pins(page.number(), self.own.bit());
                }
            }
        }
    }

    /// Notes that a copy has failed: pages that it was to write cannot be committed.
    pub(crate) fn fail(&mut self, pages: &[PageId]) {
        for &page in pages {
            if let Some((slot, status)) = self.slot_of(page)
                && let State::Writing { is_abandoned, .. } = status.state
            {
                let has_failed = true;
                let state = State::Writing {
                    is_abandoned,
                    has_failed,
                };
                self.words.put(slot + STATE, status.with(state).word());
            }
        }
    }

    /// Frees the pages of ready keys that nothing has pinned. Returns them.
    pub(crate) fn remove(&mut self, keys: &[Key]) -> Vec<Evicted> {
        let mut removed = Vec::new();
        for &key in keys {
            if let Some(page) = self.page_of(&key)
                && self.words.get(self.slot(page.number()) + PINS) == 0
            {
                self.discard(page.number());
                removed.push(Evicted { key, page });
            }
        }
        removed
    }

    /// Returns the keys that are ready, the least recently used first; those that are pinned come last.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) without memory for the list.
    pub(crate) fn keys(&mut self) -> Result<Vec<(Key, PageId)>> {
        let stats = self.stats();
        let mut found = list_for(stats.ready as usize)?;
        for group in 0..self.geometry.groups.len() as u8 {
            let lru = self.lru(group);
            let mut next = self.oldest(lru);
            for _ in 0..self.len_of(lru) {
                let Some(page) = next else { break };
                found.push(page);
                next = self.newer(page);
            }
        }
        if self.geometry.has_groups() {
            found.sort_by_key(|&page| self.words.get(self.slot(page) + STAMP));
        }
        if stats.pinned > 0 {
            self.each_page(|page, slot, status| {
                let is_pinned = self.words.get(slot + PINS) != 0;
                if status.is_some_and(|status| status.state == State::Ready) && is_pinned {
                    found.push(page);
                }
            });
        }
        let named = |page: u32| {
            let slot = self.slot(page);
            let key = Named::read(self.words, slot, self.seed)?;
            Some((key.key(), self.id(page, self.status(slot))?))
        };
        Ok(found.into_iter().filter_map(named).collect())
    }

    /// Calls `visit` for each page that is there, with its slot and its status; `None`: its first word is wrong.
    fn each_page(&self, mut visit: impl FnMut(u32, u64, Option<Status>)) {
        let usable = self.words.get(USABLE).min(self.geometry.pages.into()) as u32;
        for extent in 0..self.geometry.extents {
            let group = self.group_of_extent(extent);
            let Some(group) = group.and_then(|group| self.geometry.groups.get(usize::from(group)))
            else {
                continue;
            };
            for page in self.geometry.pages_of(extent, group) {
                if page >= usable {
                    return;
                }
                let slot = self.geometry.slot_at(page);
                visit(page, slot, Status::of(self.words.get(slot + STATE)));
            }
        }
    }

    /// Counts a copy that has ended.
    pub(crate) fn count_copy(&mut self, direction: Direction, bytes: u64) {
        match direction {
            Direction::Load => self.private.counts.loaded_bytes += bytes,
            Direction::Store => self.private.counts.stored_bytes += bytes,
        }
    }

    /// Returns the checksum of a page's contents; `None` without one, or if the page is another key's since.
    pub(crate) fn sum(&self, page: PageId) -> Option<u64> {
        let (slot, _) = self.slot_of(page)?;
        Some(self.words.get(slot + SUM)).filter(|&sum| sum != 0)
    }

    /// Sets the checksum of a page that is being written.
    pub(crate) fn set_sum(&mut self, page: PageId, sum: u64) {
        if let Some((slot, status)) = self.slot_of(page)
            && matches!(status.state, State::Writing { .. })
        {
            self.words.put(slot + SUM, sum);
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
        Stats {
            pages: match self.geometry.has_groups() {
                true => usable,
                false => self.geometry.pages.into(),
            },
            page_bytes: self.geometry.page_bytes,
            usable,
            free,
            writing,
            ready: ready.min(self.geometry.pages.into()),
            pinned: ready.saturating_sub(evictable),
            ..self.private.counts
        }
    }

    /// Returns whether this process holds anything of the tier.
    pub(crate) fn holds_pages(&self) -> bool {
        !self.private.users.is_empty() || self.private.writing > 0
    }
}

#[cfg(test)]
mod tests;
