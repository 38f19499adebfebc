//! The index, pages for new keys, and which pages make room for them.
//!
//! The index: pages that are being written or ready, by the hash of their keys.
//!
//! A bucket has a page's number plus 1, and 32 bits of the hash, from which its place follows: searches and removals read no
//! slot of another key. Buckets are searched one after the other. A removal moves later ones back, so there are no tombstones.

use std::collections::HashSet;
use std::time::Duration;

use foldhash::fast::FixedState;

use super::slot::{CHECK, Named, PINS, SUM, State, WRITER};
use super::{Table, WRITING};
use crate::page::{Evicted, PageId, Reserved};
use crate::words::{halves, pair};
use crate::{Error, Key, MemoryError, Result};

/// A request for pages, and how far it has come.
#[derive(Default)]
pub(super) struct Request {
    /// The keys that have no page, by their place in the list.
    needed: Vec<(usize, Named)>,
    groups: Vec<OfGroup>,
    /// The ready pages of the request's other keys, which are not evicted.
    own: HashSet<u32, FixedState>,
    /// The extents of these pages, if there are several groups.
    own_extents: HashSet<u32, FixedState>,
    /// Another member is writing one of the keys.
    waits_for_other: bool,
    /// The extents that were unused at the time of asking.
    pub(super) unused: Option<Vec<u32>>,
    evicted: Vec<Evicted>,
}

/// What a request needs of a group, and has there.
#[derive(Clone, Copy, Default)]
struct OfGroup {
    needed: u64,
    /// The own pages that could be evicted.
    own: u64,
    /// The own pages at the old end of the group's list were passed up to this one.
    passed: Option<u32>,
}

impl Request {
    fn group(&self, group: u8) -> OfGroup {
        self.groups
            .get(usize::from(group))
            .copied()
            .unwrap_or_default()
    }

    pub(super) fn has_extent(&self, extent: u32) -> bool {
        self.own_extents.contains(&extent)
    }
}

impl Table<'_> {
    /// Finds pages for the keys that are not there, and evicts others for them if need be: never one of `keys`.
    ///
    /// # Errors
    /// [`Error::Full`]; without several groups nothing has changed then. [`InvalidArgument`](crate::MemoryError::InvalidArgument)
    /// for a group that the tier does not have.
    pub(crate) fn reserve(&mut self, keys: &[Key]) -> Result<Reserved> {
        let mut request = self.request(keys)?;
        // A process that has ended keeps nothing from anyone for long.
        let swept = match (self.has_room(&request), request.waits_for_other) {
            (false, _) => self.sweep_ended(Duration::ZERO)?,
            (true, true) => self.sweep_ended(Self::SWEEPS)?,
            (true, false) => false,
        };
        if swept {
            request = self.request(keys)?;
        }
        if !self.has_room(&request) {
            return Err(self.full(&request));
        }
        let mut placed = Vec::with_capacity(request.needed.len());
        for (index, key) in std::mem::take(&mut request.needed) {
            let Some(page) = self.take(key.key.group(), &mut request) else {
                let pages: Vec<PageId> = placed.into_iter().map(|(_, page)| page).collect();
                self.abort(&pages);
                return Err(self.full(&request));
            };
            placed.push((index, self.place(page, &key)));
        }
        let evicted = request.evicted;
        Ok(Reserved { placed, evicted })
    }

    /// Looks for the pages of keys.
    fn request(&self, keys: &[Key]) -> Result<Request> {
        let groups = self.geometry.groups.len();
        if let Some(key) = keys.iter().find(|key| usize::from(key.group()) >= groups) {
            let group = u64::from(key.group());
            return Err(MemoryError::invalid_index("group of a key", group, groups as u64).into());
        }
        let mut request = Request {
            groups: vec![OfGroup::default(); groups],
            ..Request::default()
        };
        // Two keys with one hash would be one of them: the other is not stored.
        let mut seen = HashSet::with_hasher(FixedState::default());
        for (index, key) in keys.iter().enumerate() {
            let named = self.named(key);
            match self.find(&named) {
                Some(page) => self.note_own(page, &mut request),
                None if seen.insert(named.hash) => {
                    request.groups[usize::from(key.group())].needed += 1;
                    request.needed.push((index, named));
                }
                None => {}
            }
        }
        Ok(request)
    }

    fn note_own(&self, page: u32, request: &mut Request) {
        let slot = self.slot(page);
        let status = self.status(slot);
        if status.state != State::Ready {
            request.waits_for_other |= self.words.get(slot + WRITER) != self.own.name();
        } else if request.own.insert(page) {
            let is_evictable = self.words.get(slot + PINS) == 0;
            if let Some(group) = request.groups.get_mut(usize::from(status.group)) {
                group.own += u64::from(is_evictable);
            }
            if self.geometry.has_groups() {
                request.own_extents.insert(self.geometry.place_of(page).0);
            }
        }
    }

    /// Returns how many pages a group has or can have without an extent of another.
    fn available(&self, group: u8, request: &Request) -> u64 {
        let evictable = self.len_of(self.lru(group));
        let own = request.group(group).own;
        self.len_of(self.free_list(group)) + evictable.saturating_sub(own)
    }

    /// Returns whether there are pages for all keys of a request: of several groups, there may still be too few, because extents are
    /// counted for each group that may have them.
    fn has_room(&self, request: &Request) -> bool {
        let missing = |group: u8| {
            let needed = request.group(group).needed;
            needed.saturating_sub(self.available(group, request))
        };
        let extents = |group: u8| missing(group).div_ceil(self.group(group).pages.into());
        let needed = self.sum_of_groups(extents);
        let takeable = || self.takeable(request, |group| missing(group) > 0).len() as u64;
        needed == 0 || self.geometry.has_groups() && needed <= takeable()
    }

    fn full(&mut self, request: &Request) -> Error {
        let stats = self.stats();
        let available = self.sum_of_groups(|group| match request.group(group).needed {
            0 => 0,
            _ => self.available(group, request),
        });
        Error::Full {
            needed: self.sum_of_groups(|group| request.group(group).needed) as usize,
            pages: stats.pages as usize,
            missing: stats.pages.saturating_sub(stats.usable) as usize,
            is_growing: false,
            available: available as usize,
            pinned: stats.pinned as usize,
            writing: stats.writing as usize,
            evicted: request.evicted.clone(),
        }
    }

    /// Takes a page for a key of a group: a free one, one of an extent that is not used, or else the least recently used one, alone or
    /// with an extent of older pages of another group.
    fn take(&mut self, group: u8, request: &mut Request) -> Option<u32> {
        let free = self.free_list(group);
        let has_groups = self.geometry.has_groups();
        if self.newer(free, None).is_none() && !(has_groups && self.take_unused(group, request)) {
            match self.evictable(group, request) {
                Some(page) if has_groups && self.take_older(page, group, request) => {}
                Some(page) => self.evict(page, request),
                None if has_groups && self.take_least_used(group, request) => {}
                None => return None,
            }
        }
        let page = self.newer(free, None)?;
        let status = self.status(self.slot(page));
        self.id(page, status)?;
        if !self
            .words
            .expect(status.state == State::Free && status.group == group)
        {
            return None;
        }
        self.unlink(free, page);
        self.count_in_extent(page, -1, 0);
        Some(page)
    }

    /// Returns the least recently used page of a group that a request may evict.
    fn evictable(&self, group: u8, request: &mut Request) -> Option<u32> {
        let passed = &mut request.groups.get_mut(usize::from(group))?.passed;
        // Its own pages stay where they are meanwhile.
        for _ in 0..=request.own.len() {
            match self.newer(self.lru(group), *passed) {
                Some(page) if request.own.contains(&page) => *passed = Some(page),
                next => return next,
            }
        }
        None
    }

    /// Frees a ready page for a request.
    pub(super) fn evict(&mut self, page: u32, request: &mut Request) {
        let slot = self.slot(page);
        let status = self.status(slot);
        let is_evictable = status.state == State::Ready && self.words.get(slot + PINS) == 0;
        if self.words.expect(is_evictable)
            && let Some(key) = self.discard(page)
        {
            self.private.counts.evictions += 1;
            let page = status.id(page);
            request.evicted.push(Evicted { key, page });
        }
    }

    /// Gives a page to a store for a key. It is being written before its key is there: its bytes may change from then on. The check
    /// comes last, so a page with the writer or the key of an earlier store is none of a living one.
    fn place(&mut self, page: u32, key: &Named) -> PageId {
        let slot = self.slot(page);
        let status = self.status(slot);
        self.set_state(slot, status, State::Writing);
        self.words.put(slot + PINS, 0);
        self.words.put(slot + WRITER, self.own.name());
        self.words.put(slot + SUM, 0);
        key.write(self.words, slot);
        self.words.put(slot + CHECK, !key.check(page));
        self.insert(page, key);
        self.count(status.group, WRITING, 1);
        self.count_in_extent(page, 0, 1);
        status.id(page)
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
