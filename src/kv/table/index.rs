//! The index: pages that are being written or ready, by the hash of their keys.
//!
//! A bucket has a page's number plus 1, and 32 bits of the hash, from which its place follows: searches and removals read no
//! slot of another key. Buckets are searched one after the other. A removal moves later ones back, so there are no tombstones.

use super::Table;
use super::slot::Named;
use crate::words::{halves, pair};

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
