//! The lists and the extents of a tier.
//!
//! The lists of a group: its free pages, and its ready pages that nothing pins, from the least to the most recently used one.
//!
//! A page is in one of them at most, and so its slot has one pair of neighbours. Numbers in words are one more than a page's; 0 is
//! none.
//!
//! Extents: which group has them, and how groups take them from each other.
//!
//! An entry has the group plus 1 and the first `uses` of its pages; how many of its pages are free, and how many are held, that is being
//! written or pinned; and when one of them was used last. A tier of one group has one extent, and no counts.

use super::reserve::Request;
use super::slot::{CHECK, LINKS, PINS, STAMP, STATE, State, Status};
use super::{PAGES, Table};
use crate::geometry::{GROUP, GROUPS, Group};
use crate::header::{CLOCK, USABLE};
use crate::page::PageId;
use crate::words::{halves, pair};

/// Where a group has its lists: the oldest and the newest page, then the length.
const FREE: u64 = 8;
const LRU: u64 = 24;

/// The directions of a list.
const OLDER: bool = false;
const NEWER: bool = true;

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

    /// Returns the page that was used next after one; the oldest one after none.
    pub(super) fn newer(&self, list: List, than: Option<u32>) -> Option<u32> {
        let than = than.map_or(0, |page| page + 1);
        self.neighbour(list, than, NEWER).checked_sub(1)
    }

    /// Adds a page, which is in no list.
    pub(super) fn push_newest(&self, list: List, page: u32) {
        self.link(list, page, (self.neighbour(list, 0, OLDER), 0));
    }

    /// As [`push_newest`](Self::push_newest), at the other end.
    pub(super) fn push_oldest(&self, list: List, page: u32) {
        self.link(list, page, (0, self.neighbour(list, 0, NEWER)));
    }

    fn link(&self, list: List, page: u32, (older, newer): (u32, u32)) {
        let links = pair(older, newer);
        self.words.put(self.slot(page) + LINKS, links);
        self.set_neighbour(list, older, NEWER, page + 1);
        self.set_neighbour(list, newer, OLDER, page + 1);
        self.words.add(list.0 + 8, 1);
    }

    /// Removes a page from the list that it is in. One that is in none is left alone.
    pub(super) fn unlink(&self, list: List, page: u32) {
        let slot = self.slot(page);
        let (older, newer) = halves(self.words.get(slot + LINKS));
        let found = [
            self.neighbour(list, older, NEWER),
            self.neighbour(list, newer, OLDER),
        ];
        if (older, newer) == (0, 0) && found != [page + 1; 2] {
            return;
        }
        if !self.words.expect(found == [page + 1; 2]) {
            return;
        }
        self.set_neighbour(list, older, NEWER, newer);
        self.set_neighbour(list, newer, OLDER, older);
        self.words.add(list.0 + 8, -1);
        self.words.put(slot + LINKS, 0);
    }

    /// Returns where the neighbour of a page lies in one direction, and whether it is the word's high half; of no page, that end of the
    /// list.
    #[inline(always)]
    fn link_at(&self, list: List, of: u32, to: bool) -> (u64, bool) {
        match of.checked_sub(1) {
            Some(page) => (self.slot(page) + LINKS, to == NEWER),
            None => (list.0, to == OLDER),
        }
    }

    #[inline(always)]
    fn neighbour(&self, list: List, of: u32, to: bool) -> u32 {
        let (at, is_high) = self.link_at(list, of, to);
        let (low, high) = halves(self.words.get(at));
        if is_high { high } else { low }
    }

    #[inline(always)]
    fn set_neighbour(&self, list: List, of: u32, to: bool, page: u32) {
        let (at, is_high) = self.link_at(list, of, to);
        let (low, high) = halves(self.words.get(at));
        let links = if is_high {
            pair(low, page)
        } else {
            pair(page, high)
        };
        self.words.put(at, links);
    }

    /// Empties both lists of a group, whatever the pages' links are.
    pub(super) fn clear_lists(&self, group: u8) {
        for List(at) in [self.free_list(group), self.lru(group)] {
            self.words.put(at, 0);
            self.words.put(at + 8, 0);
        }
    }
}

/// Where the parts of an entry lie.
const OWNER: u64 = 0;
const COUNTS: u64 = 8;
const USED: u64 = 16;

/// The pages of another group that are looked at for an extent to take, and the pages of that extent.
const CANDIDATES: usize = 8;
const SAMPLES: u32 = 32;

impl Table<'_> {
    /// Returns the group that has an extent.
    #[inline]
    pub(super) fn group_of_extent(&self, extent: u32) -> Option<u8> {
        let (name, _) = halves(self.words.get(self.geometry.extent_at(extent)));
        let group = name.checked_sub(1)?;
        let is_there = (group as usize) < self.geometry.groups.len();
        self.words.expect(is_there).then_some(group as u8)
    }

    pub(super) fn group(&self, group: u8) -> Group {
        let groups = &self.geometry.groups;
        *groups.get(usize::from(group)).unwrap_or(&groups[0])
    }

    /// Writes the group of an extent; `None`: it has none.
    pub(super) fn set_group_of_extent(&self, extent: u32, group: Option<u8>, first_uses: u32) {
        let name = group.map_or(0, |group| u32::from(group) + 1);
        let at = self.geometry.extent_at(extent);
        self.words.put(at + OWNER, pair(name, first_uses));
    }

    pub(super) fn first_uses(&self, extent: u32) -> u32 {
        halves(self.words.get(self.geometry.extent_at(extent))).1
    }

    /// Forgets the counts of an extent.
    pub(super) fn clear_extent(&self, extent: u32) {
        self.words.put(self.geometry.extent_at(extent) + COUNTS, 0);
        self.words.put(self.geometry.extent_at(extent) + USED, 0);
    }

    /// Adds to the numbers of a page's extent: of its free pages, and of those that are held.
    pub(super) fn count_in_extent(&self, page: u32, free: i32, held: i32) {
        if !self.geometry.has_groups() {
            return;
        }
        let at = self.geometry.extent_at(self.geometry.place_of(page).0) + COUNTS;
        let (frees, helds) = halves(self.words.get(at));
        let counts = pair(
            frees.wrapping_add_signed(free),
            helds.wrapping_add_signed(held),
        );
        self.words.put(at, counts);
    }

    /// Notes when a page of an extent was used.
    pub(super) fn note_use(&self, page: u32, clock: u64) {
        if self.geometry.has_groups() {
            let extent = self.geometry.place_of(page).0;
            self.words
                .put(self.geometry.extent_at(extent) + USED, clock);
        }
    }

    /// Returns the extents that no group has, and those of other groups than `but` whose pages may be taken.
    pub(super) fn takeable(&self, request: &Request, but: impl Fn(u8) -> bool) -> Vec<u32> {
        let is_takeable = |&extent: &u32| match self.group_of_extent(extent) {
            None => self.is_usable(extent),
            Some(group) => !but(group) && self.may_take(extent, request),
        };
        (0..self.geometry.extents).filter(is_takeable).collect()
    }

    /// Returns whether all numbers of an extent's pages have memory.
    pub(super) fn is_usable(&self, extent: u32) -> bool {
        let numbers = self.geometry.pages / self.geometry.extents;
        u64::from((extent + 1) * numbers) <= self.words.get(USABLE)
    }

    /// Returns whether nothing holds a page of an extent, and the request's keys have none there.
    fn may_take(&self, extent: u32, request: &Request) -> bool {
        let (_, held) = halves(self.words.get(self.geometry.extent_at(extent) + COUNTS));
        held == 0 && !request.has_extent(extent)
    }

    /// Takes an extent for a group that has no free page: one without a group, or whose pages are all free. Returns whether there
    /// was one.
    pub(super) fn take_unused(&mut self, group: u8, request: &mut Request) -> bool {
        let mut unused = request.unused.take().unwrap_or_else(|| {
            let is_unused = |extent: &u32| self.is_unused(*extent);
            let takeable = self.takeable(request, |_| false);
            takeable.into_iter().rev().filter(is_unused).collect()
        });
        // Another group of the request may have one by now.
        while unused.pop_if(|extent| !self.is_unused(*extent)).is_some() {}
        let found = unused.pop();
        request.unused = Some(unused);
        found.is_some_and(|extent| self.give(extent, group, request))
    }

    fn state(&self, page: u32) -> State {
        self.status(self.slot(page)).state
    }

    fn is_unused(&self, extent: u32) -> bool {
        let Some(group) = self.group_of_extent(extent) else {
            return self.is_usable(extent);
        };
        let (free, _) = halves(self.words.get(self.geometry.extent_at(extent) + COUNTS));
        free == self.group(group).pages
    }

    /// Takes an extent of another group with pages that are older than a group's own oldest page. Returns whether there was one.
    pub(super) fn take_older(&mut self, oldest: u32, group: u8, request: &mut Request) -> bool {
        let stamp = |page: u32| self.words.get(self.slot(page) + STAMP);
        let own = stamp(oldest);
        for other in 0..self.geometry.groups.len() as u8 {
            let lru = self.lru(other);
            let mut next = self.newer(lru, None).filter(|_| other != group);
            for _ in 0..CANDIDATES {
                let Some(page) = next.filter(|&page| stamp(page) < own) else {
                    break;
                };
                let extent = self.geometry.place_of(page).0;
                if self.may_take(extent, request) && self.is_mostly_older(extent, own) {
                    return self.give(extent, group, request);
                }
                next = self.newer(lru, Some(page));
            }
        }
        false
    }

    /// Returns whether half of an extent's pages are free, or were used before `stamp`.
    fn is_mostly_older(&self, extent: u32, stamp: u64) -> bool {
        let Some(group) = self.group_of_extent(extent) else {
            return false;
        };
        let group = self.group(group);
        let pages = self.geometry.pages_of(extent, &group);
        let step = (group.pages / SAMPLES).max(1) as usize;
        let is_older = |page: &u32| {
            self.state(*page) == State::Free || self.words.get(self.slot(*page) + STAMP) < stamp
        };
        let sampled = pages.step_by(step);
        2 * sampled.clone().filter(is_older).count() >= sampled.len()
    }

    /// Takes the extent of another group that was not used for the longest time. Returns whether there was one.
    pub(super) fn take_least_used(&mut self, group: u8, request: &mut Request) -> bool {
        let takeable = self.takeable(request, |other| other == group);
        let used = |extent: &u32| self.words.get(self.geometry.extent_at(*extent) + USED);
        let least = takeable.into_iter().min_by_key(used);
        least.is_some_and(|extent| self.give(extent, group, request))
    }

    /// Gives an extent without held pages to a group; its ready pages are evicted. Returns `false` if it has held ones after all.
    fn give(&mut self, extent: u32, group: u8, request: &mut Request) -> bool {
        if let Some(last) = self.group_of_extent(extent)
            && !self.release(extent, last, request)
        {
            return false;
        }
        // The slots come first: while the extent has no group, nothing in it counts.
        let (clock, uses) = (self.words.get(CLOCK), self.first_uses(extent));
        let pages = self.geometry.pages_of(extent, &self.group(group));
        for page in pages.clone() {
            let slot = self.geometry.slot_at(page);
            let status = Status::new(State::Free, group, uses);
            self.words.put(slot + STATE, status.word());
            self.words.put(slot + CHECK, 0);
            self.words.put(slot + PINS, 0);
        }
        self.set_group_of_extent(extent, Some(group), uses);
        for page in pages.clone() {
            self.push_newest(self.free_list(group), page);
        }
        self.clear_extent(extent);
        self.count_in_extent(pages.start, pages.len() as i32, 0);
        self.note_use(pages.start, clock);
        self.count(group, PAGES, pages.len() as i64);
        true
    }

    /// Takes an extent from its group. Returns `false` if some of its pages are held: nothing has changed then.
    fn release(&mut self, extent: u32, group: u8, request: &mut Request) -> bool {
        let pages = self.geometry.pages_of(extent, &self.group(group));
        let is_held = |page: u32| {
            self.state(page).is_writing() || self.words.get(self.slot(page) + PINS) != 0
        };
        if !self.words.expect(!pages.clone().any(is_held)) {
            return false;
        }
        let mut most_uses = 0;
        for page in pages.clone() {
            if self.state(page) == State::Ready {
                self.evict(page, request);
            }
            self.unlink(self.free_list(group), page);
            most_uses = most_uses.max(self.status(self.slot(page)).uses);
        }
        // Names of the extent's pages so far are refused, whichever group has them next.
        let uses = PageId::new(0, 0, most_uses.wrapping_add(1)).uses();
        self.set_group_of_extent(extent, None, uses);
        self.count(group, PAGES, -(pages.len() as i64));
        true
    }
}
