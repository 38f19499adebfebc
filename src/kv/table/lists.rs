//! The lists of a group: its free pages, and its ready pages that nothing pins, from the least to the most recently used one.
//!
//! A page is in one of them at most, and so its slot has one pair of neighbours. Numbers in words are one more than a page's; 0 is
//! none.

use super::Table;
use super::slot::LINKS;
use crate::geometry::{GROUP, GROUPS};
use crate::words::{halves, pair};

/// Where a group has its lists: the oldest and the newest page, then the length.
const FREE: u64 = 8;
const LRU: u64 = 24;

/// Where the ends of a list lie.
#[derive(Clone, Copy, Debug)]
pub(super) struct List(u64);

impl Table<'_> {
    /// The free pages of a group, taken from the oldest on.
    pub(super) fn free_list(&self, group: u8) -> List {
        List(GROUPS + u64::from(group) * GROUP + FREE)
    }

    /// The evictable pages of a group.
    pub(super) fn lru(&self, group: u8) -> List {
        List(GROUPS + u64::from(group) * GROUP + LRU)
    }

    /// Returns the length, which is no more than there are pages.
    pub(super) fn len_of(&self, list: List) -> u64 {
        self.words.get(list.0 + 8).min(self.geometry.pages.into())
    }

    pub(super) fn oldest(&self, list: List) -> Option<u32> {
        halves(self.words.get(list.0)).0.checked_sub(1)
    }

    pub(super) fn newer(&self, page: u32) -> Option<u32> {
        let links = self.words.get(self.slot(page) + LINKS);
        halves(links).1.checked_sub(1)
    }

    /// Adds a page, which is in no list.
    pub(super) fn push_newest(&self, list: List, page: u32) {
        let (oldest, newest) = halves(self.words.get(list.0));
        self.words.put(self.slot(page) + LINKS, pair(newest, 0));
        if let Some(neighbour) = newest.checked_sub(1) {
            self.relink(neighbour, |(older, _)| (older, page + 1));
        }
        let oldest = if newest == 0 { page + 1 } else { oldest };
        self.words.put(list.0, pair(oldest, page + 1));
        self.words.add(list.0 + 8, 1);
    }

    /// As [`push_newest`](Self::push_newest), at the other end.
    pub(super) fn push_oldest(&self, list: List, page: u32) {
        let (oldest, newest) = halves(self.words.get(list.0));
        self.words.put(self.slot(page) + LINKS, pair(0, oldest));
        if let Some(neighbour) = oldest.checked_sub(1) {
            self.relink(neighbour, |(_, newer)| (page + 1, newer));
        }
        let newest = if oldest == 0 { page + 1 } else { newest };
        self.words.put(list.0, pair(page + 1, newest));
        self.words.add(list.0 + 8, 1);
    }

    /// Removes a page from the list that it is in. One that is in none is left alone.
    pub(super) fn unlink(&self, list: List, page: u32) {
        let slot = self.slot(page);
        let (older, newer) = halves(self.words.get(slot + LINKS));
        let ends = halves(self.words.get(list.0));
        if (older, newer) == (0, 0) && ends != (page + 1, page + 1) {
            return;
        }
        let older_is_right = match older.checked_sub(1) {
            Some(older) => self.links_of(older).1 == page + 1,
            None => ends.0 == page + 1,
        };
        let newer_is_right = match newer.checked_sub(1) {
            Some(newer) => self.links_of(newer).0 == page + 1,
            None => ends.1 == page + 1,
        };
        if !self.words.expect(older_is_right && newer_is_right) {
            return;
        }
        if let Some(neighbour) = older.checked_sub(1) {
            self.relink(neighbour, |(older, _)| (older, newer));
        }
        if let Some(neighbour) = newer.checked_sub(1) {
            self.relink(neighbour, |(_, newer)| (older, newer));
        }
        let oldest = if older == 0 { newer } else { ends.0 };
        let newest = if newer == 0 { older } else { ends.1 };
        if (oldest, newest) != ends {
            self.words.put(list.0, pair(oldest, newest));
        }
        self.words.add(list.0 + 8, -1);
        self.words.put(slot + LINKS, 0);
    }

    /// Empties both lists of a group, whatever the pages' links are.
    pub(super) fn clear_lists(&self, group: u8) {
        for List(at) in [self.free_list(group), self.lru(group)] {
            self.words.put(at, 0);
            self.words.put(at + 8, 0);
        }
    }

    fn links_of(&self, page: u32) -> (u32, u32) {
        halves(self.words.get(self.slot(page) + LINKS))
    }

    fn relink(&self, page: u32, change: impl FnOnce((u32, u32)) -> (u32, u32)) {
        let (older, newer) = change(self.links_of(page));
        self.words.put(self.slot(page) + LINKS, pair(older, newer));
    }
}
