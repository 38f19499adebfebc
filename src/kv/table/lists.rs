//! The lists and the index of a tier.
//!
//! The lists of a group: its free pages, and its ready pages that nothing pins, from the least to the most recently used one.
//!
//! A page is in one of them at most, and so its slot has one pair of neighbours. Numbers in words are one more than a page's; 0 is
//! none.
//!
//! The index: pages that are being written or ready, by the hash of their keys.
//!
//! A bucket has a page's number plus 1, and 32 bits of the hash, from which its place follows: searches and removals read no
//! slot of another key. Buckets are searched one after the other. A removal moves later ones back, so there are no tombstones.

use super::Table;
use super::slot::{LINKS, Named};
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

impl Table<'_> {
    /// Returns the page that is being written or ready for a key.
    pub(super) fn find(&self, key: &Named) -> Option<u32> {
        let tag = tag(key.hash);
        for bucket in self.buckets_from(tag) {
            let word = self.words.get(bucket);
            if word == 0 {
                return None;
            }
            let (name, found) = halves(word);
            if found == tag {
                let page = name.wrapping_sub(1);
                if key.is_in(self.words, self.slot(page)) {
                    return Some(page);
                }
            }
        }
        self.words.damage();
        None
    }

    /// Indexes a page by its key, which no page in the index has.
    pub(super) fn insert(&self, page: u32, key: &Named) {
        let tag = tag(key.hash);
        let mut buckets = self.buckets_from(tag);
        match buckets.find(|&bucket| self.words.get(bucket) == 0) {
            Some(bucket) => self.words.put(bucket, pair(page + 1, tag)),
            None => self.words.damage(),
        }
    }

    /// Removes a page from the index, by the key in its slot. Returns the key; `None` if it is no key.
    pub(super) fn remove_key(&self, page: u32) -> Option<Named> {
        let key = Named::read(self.words, self.slot(page), self.seed);
        match &key {
            Some(key) => self.unindex(page, key),
            None => self.words.damage(),
        }
        key
    }

    fn unindex(&self, page: u32, key: &Named) {
        let word = pair(page + 1, tag(key.hash));
        let first = u64::from(tag(key.hash));
        let probes = self.geometry.probes();
        let at = |bucket: u64| self.words.get(self.geometry.bucket_at(bucket));
        let Some(mut hole) = (first..first + probes).find(|&bucket| at(bucket) == word) else {
            return self.words.damage();
        };
        let mask = self.geometry.buckets - 1;
        for bucket in hole + 1..hole + probes {
            let word = at(bucket);
            if word == 0 {
                break;
            }
            // A page may move back to the hole unless its search begins behind it.
            let (_, tag) = halves(word);
            let from_first = bucket.wrapping_sub(tag.into()) & mask;
            if from_first >= bucket - hole {
                self.words.put(self.geometry.bucket_at(hole), word);
                hole = bucket;
            }
        }
        self.words.put(self.geometry.bucket_at(hole), 0);
    }

    /// Empties the index.
    pub(super) fn clear_index(&self) {
        for bucket in 0..self.geometry.buckets {
            self.make_step(bucket);
            self.words.put(self.geometry.bucket_at(bucket), 0);
        }
    }

    /// Iterates over where the buckets lie that may have a hash.
    fn buckets_from(&self, tag: u32) -> impl Iterator<Item = u64> {
        let first = u64::from(tag);
        let buckets = first..first + self.geometry.probes();
        buckets.map(|bucket| self.geometry.bucket_at(bucket))
    }
}

/// The part of a hash that a bucket has.
const fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32
}
