//! Pages that loads and copies of a process have: one pin for each process, and its own count of users.

use std::collections::hash_map::Entry;

use super::Table;
use super::slot::{PINS, State};
use crate::page::{Direction, PageId};
use crate::{Error, Key, Result};

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
        Ok(pages)
    }

    fn add_users(&mut self, pages: &[PageId]) {
        for page in pages {
            *self.private.users.entry(page.number()).or_default() += 1;
            self.set_pin(page.number());
        }
    }

    /// The pin comes first: a page with a pin is in a list at worst, and a repair takes it out.
    pub(super) fn set_pin(&self, page: u32) {
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

    /// Removes the pins of members from a page, and gives it back if no other is left.
    pub(super) fn clear_pins(&self, page: u32, members: u64) {
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
                self.stamp(page, slot);
                self.push_newest(self.lru(status.group), page);
            }
            state if state.is_writing() && !state.is_stored() => self.free_written(page),
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
                        Direction::Store => status.state.is_stored(),
                    };
                    (status.state.name(), fits)
                }
            };
            if !fits {
                let page = id.number();
                return Err(Error::WrongState { page, is, need });
            }
        }
        self.add_users(pages);
        Ok(())
    }

    /// Releases pages that [`pin`](Self::pin) or [`begin_copy`](Self::begin_copy) pinned. A page counts as used then.
    pub(crate) fn unpin(&mut self, pages: &[PageId]) {
        for &page in pages.iter().rev() {
            let Entry::Occupied(mut users) = self.private.users.entry(page.number()) else {
                continue;
            };
            *users.get_mut() -= 1;
            if *users.get() == 0 {
                users.remove();
                if self.slot_of(page).is_some() {
                    self.clear_pins(page.number(), self.own.bit());
                }
            }
        }
    }

    /// Returns whether this process holds anything of the tier.
    pub(crate) fn holds_pages(&self) -> bool {
        !self.private.users.is_empty() || self.private.writing > 0
    }
}
