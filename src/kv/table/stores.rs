//! Pages of stores, from being written to ready or back to free; and pages that loads and copies of a process have: one pin for each
//! process, and its own count of users.

use super::slot::{CHECK, PINS, STATE, SUM, State, Status, WRITER};
use super::{Table, WRITING};
use crate::page::{Direction, Evicted, PageId};
use crate::words::halves;
use crate::{Error, Key, Result};

/// A use of pages that has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Use {
    /// A load, or a copy that was not submitted.
    Load,
    /// A copy of some bytes, or one that has failed.
    Copy(Direction, Option<u64>),
    /// A store that was not committed.
    Store,
}

/// The end of a use of pages.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct End {
    pub(crate) pages: Vec<PageId>,
    pub(crate) of: Use,
}

impl Table<'_> {
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
            failed += usize::from(state == State::Failed);
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
        self.set_state(slot, status, State::Abandoned);
        self.remove_key(page.number());
        // It is held already, as a pinned page is.
        self.count(status.group, WRITING, 1);
        self.private.counts.damaged += 1;
        true
    }

    /// Returns the slot of a page that a store of this member writes, and its state.
    pub(super) fn own_written(&self, id: PageId) -> Result<(u64, State)> {
        let found = self.slot_of(id);
        let is_own = |&(slot, status): &(u64, Status)| {
            status.state.is_stored() && self.words.get(slot + WRITER) == self.own.name()
        };
        let (slot, status) = found.filter(is_own).ok_or(Error::WrongState {
            page: id.number(),
            is: "another's since, or free",
            need: "of a store that was not committed",
        })?;
        Ok((slot, status.state))
    }

    /// Ready comes last: a page that is ready has its key, check and stamp.
    pub(super) fn make_ready(&mut self, id: PageId) {
        let (slot, page) = (self.slot(id.number()), id.number());
        let status = self.status(slot);
        self.stamp(page, slot);
        self.words.put(slot + CHECK, !self.words.get(slot + CHECK));
        self.set_state(slot, status, State::Ready);
        self.push_newest(self.lru(status.group), page);
        self.count(status.group, WRITING, -1);
        self.count_in_extent(page, 0, -1);
        self.private.counts.stores += 1;
    }

    /// Frees pages of a store, or leaves that to the end of the copies that still write them.
    pub(crate) fn abort(&mut self, pages: &[PageId]) {
        for &page in pages {
            if let Ok((slot, _)) = self.own_written(page) {
                self.set_state(slot, self.status(slot), State::Abandoned);
                self.remove_key(page.number());
                if self.words.get(slot + PINS) == 0 {
                    self.free_written(page.number());
                }
            }
        }
    }

    pub(super) fn free_written(&self, page: u32) {
        let group = self.status(self.slot(page)).group;
        self.set_free(page, group);
        self.count(group, WRITING, -1);
        self.count_in_extent(page, 0, -1);
        self.add_free(group, page);
    }

    /// Frees a ready page that nothing has pinned. Returns its key.
    pub(super) fn discard(&self, page: u32) -> Option<Key> {
        // First, so that a kill leaves a ready page, which a repair finds again.
        let key = self.remove_key(page)?;
        let group = self.status(self.slot(page)).group;
        self.set_free(page, group);
        self.unlink(self.lru(group), page);
        self.add_free(group, page);
        Some(key.key)
    }

    /// Frees a page of a group, and ends its names so far.
    pub(super) fn set_free(&self, page: u32, group: u8) {
        let slot = self.slot(page);
        let uses = halves(self.words.get(slot + STATE)).1.wrapping_add(1);
        let status = Status::new(State::Free, group, uses);
        self.words.put(slot + STATE, status.word());
        self.words.put(slot + CHECK, 0);
    }

    pub(super) fn add_free(&self, group: u8, page: u32) {
        self.push_oldest(self.free_list(group), page);
        self.count_in_extent(page, 1, 0);
    }

    /// Notes that a copy has failed: pages that it was to write cannot be committed.
    pub(crate) fn fail(&mut self, pages: &[PageId]) {
        for &page in pages {
            if let Some((slot, _)) = self.slot_of(page) {
                self.spoil(slot);
            }
        }
    }

    /// Notes in a slot that a copy into its page has failed, or has not ended, if the page is being written.
    pub(super) fn spoil(&self, slot: u64) {
        if let Some(status) = Status::of(self.words.get(slot + STATE))
            && status.state == State::Writing
        {
            self.set_state(slot, status, State::Failed);
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

    /// Returns the checksum of a page's contents; `None` without one, or if the page is another key's since.
    pub(crate) fn sum(&self, page: PageId) -> Option<u64> {
        let (slot, _) = self.slot_of(page)?;
        Some(self.words.get(slot + SUM)).filter(|&sum| sum != 0)
    }

    /// Sets the checksum of a page that is being written.
    pub(crate) fn set_sum(&mut self, page: PageId, sum: u64) {
        if let Some((slot, status)) = self.slot_of(page)
            && status.state.is_writing()
        {
            self.words.put(slot + SUM, sum);
        }
    }
}

/// How many slots are read side by side.
const AHEAD: usize = 32;

impl Table<'_> {
    /// Pins the pages of ready keys.
    ///
    /// # Errors
    /// The place of the first key that is not ready; nothing has changed then.
    pub(crate) fn pin(&mut self, keys: &[Key]) -> Result<Vec<PageId>, usize> {
        // A collected result would grow its list page by page.
        let mut pages = Vec::with_capacity(keys.len());
        for (index, key) in keys.iter().enumerate() {
            pages.push(self.page_of(key).ok_or(index)?);
        }
        self.add_users(&pages);
        self.set_pins(&pages);
        Ok(pages)
    }

    fn add_users(&mut self, pages: &[PageId]) {
        for page in pages {
            self.private.users[page.number() as usize] += 1;
        }
    }

    /// Has the processor read the slots of pages side by side: one after the other, it would wait for each.
    fn read_ahead(&self, pages: &[PageId]) {
        for page in pages
            .iter()
            .filter(|page| page.number() < self.geometry.pages)
        {
            let slot = self.geometry.slot_at(page.number());
            self.words.read_ahead(slot + STATE);
            self.words.read_ahead(slot + PINS);
        }
    }

    fn set_pins(&self, pages: &[PageId]) {
        for pages in pages.chunks(AHEAD) {
            self.read_ahead(pages);
            pages.iter().for_each(|page| self.set_pin(page.number()));
        }
    }

    /// The pin comes first: a page with a pin is in a list at worst, and a repair takes it out.
    fn set_pin(&self, page: u32) {
        let slot = self.slot(page);
        let (status, pins) = (self.status(slot), self.words.get(slot + PINS));
        if pins & self.own.bit() != 0 {
            return;
        }
        self.words.put(slot + PINS, pins | self.own.bit());
        if pins == 0 && status.state == State::Ready {
            self.unlink(self.lru(status.group), page);
            self.count_in_extent(page, 0, 1);
        }
    }

    /// Removes this member's pin from a page, and gives it back if no other is left.
    fn clear_pin(&self, page: u32) {
        let slot = self.slot(page);
        let (status, pins) = (self.status(slot), self.words.get(slot + PINS));
        let left = pins & !self.own.bit();
        if left == pins {
            return;
        }
        self.words.put(slot + PINS, left);
        match status.state {
            _ if left != 0 => {}
            State::Ready => {
                self.count_in_extent(page, 0, -1);
                self.stamp(page, slot);
                self.push_newest(self.lru(status.group), page);
            }
            State::Abandoned => self.free_written(page),
            _ => {}
        }
    }

    /// Takes pages for a copy, which keeps them until [`unpin`](Self::unpin).
    ///
    /// # Errors
    /// [`Error::WrongState`] unless each page is pinned by a member, or for a store being written, and still has the key that it
    /// was given out for.
    pub(crate) fn begin_copy(&mut self, pages: &[PageId], direction: Direction) -> Result<()> {
        let mut unpinned = Vec::new();
        for pages in pages.chunks(AHEAD) {
            self.read_ahead(pages);
            for &page in pages {
                if !self.expect_copyable(page, direction)? {
                    unpinned.push(page);
                }
            }
        }
        self.add_users(pages);
        self.set_pins(&unpinned);
        Ok(())
    }

    /// Returns whether this member has pinned the page.
    fn expect_copyable(&self, id: PageId, direction: Direction) -> Result<bool> {
        let is = match self.slot_of(id) {
            None if id.number() >= self.geometry.pages => "not of this tier",
            None => "another key's since, or free",
            Some((slot, status)) => {
                let pins = self.words.get(slot + PINS);
                let fits = match direction {
                    Direction::Load => status.state == State::Ready && pins != 0,
                    Direction::Store => status.state.is_stored(),
                };
                if fits {
                    return Ok(pins & self.own.bit() != 0);
                }
                status.state.name()
            }
        };
        let need = match direction {
            Direction::Load => "ready and pinned by a load",
            Direction::Store => "of a store that was not committed",
        };
        let page = id.number();
        Err(Error::WrongState { page, is, need })
    }

    /// Releases pages that [`pin`](Self::pin) or [`begin_copy`](Self::begin_copy) pinned. A page counts as used then.
    pub(crate) fn unpin(&mut self, pages: &[PageId]) {
        let mut last = Vec::new();
        for &page in pages.iter().rev() {
            let users = self.private.users.get_mut(page.number() as usize);
            let Some(users) = users.filter(|users| **users > 0) else {
                continue;
            };
            *users -= 1;
            if *users == 0 {
                last.push(page);
            }
        }
        for pages in last.chunks(AHEAD) {
            self.read_ahead(pages);
            for &page in pages {
                if self.slot_of(page).is_some() {
                    self.clear_pin(page.number());
                }
            }
        }
    }

    /// Ends a use of pages.
    pub(crate) fn end(&mut self, End { pages, of }: &End) {
        match *of {
            Use::Store => return self.abort(pages),
            Use::Copy(Direction::Load, Some(bytes)) => self.private.counts.loaded_bytes += bytes,
            Use::Copy(Direction::Store, Some(bytes)) => self.private.counts.stored_bytes += bytes,
            Use::Copy(Direction::Store, None) => self.fail(pages),
            Use::Copy(Direction::Load, None) | Use::Load => {}
        }
        self.unpin(pages);
    }
}
