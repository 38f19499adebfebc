//! The slots of a tier: which page has which key, and in which state. No memory, no driver.

use std::collections::{HashMap, HashSet};

use crate::lru::Lru;
use crate::{Error, Key, Result, Stats};

/// A page of a tier: its number, from 0 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId(pub u32);

/// A key whose page made room for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// The key, which the tier has no longer.
    pub key: Key,
    /// The page.
    pub page: PageId,
}

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    /// A store has it. `abandoned`: the store is gone, and copies into the page still run.
    Writing {
        abandoned: bool,
    },
    Ready,
}

impl State {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Writing { .. } => "being written",
            Self::Ready => "ready",
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    /// Of a page that is being written or ready.
    key: Key,
    /// Loads and copies that have the page.
    users: u32,
    /// When a ready page was used last.
    stamp: u64,
    /// A copy into a page that is being written has failed.
    has_failed: bool,
}

/// What a copy does with its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From pages to a GPU.
    Load,
    /// From a GPU to pages.
    Store,
}

/// What has changed in a slot, to be written to the memory's table in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Freed(PageId),
    Writing(PageId),
    Ready(PageId, Key, u64),
    /// A ready page was used, with its new stamp.
    Used(PageId, u64),
}

/// The pages for the keys of a store.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    /// The keys that were not there, by their index in the list, with their pages.
    pub(crate) placed: Vec<(usize, PageId)>,
    pub(crate) evicted: Vec<Evicted>,
}

/// The slots of all pages.
#[derive(Debug)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    /// Of keys that are being written or ready.
    index: HashMap<Key, u32>,
    /// Taken from the end.
    free: Vec<u32>,
    /// Ready pages without users.
    lru: Lru,
    writing: usize,
    /// The stamp of the latest use.
    clock: u64,
    counts: Stats,
}

impl Table {
    pub(crate) fn new(pages: u32, page_bytes: u64) -> Self {
        let slot = Slot {
            state: State::Free,
            key: Key::new([0; Key::BYTES]),
            users: 0,
            stamp: 0,
            has_failed: false,
        };
        Self {
            slots: vec![slot; pages as usize],
            index: HashMap::new(),
            free: (0..pages).rev().collect(),
            lru: Lru::new(pages),
            writing: 0,
            clock: 0,
            counts: Stats {
                pages: pages.into(),
                page_bytes,
                ..Stats::default()
            },
        }
    }

    /// Creates the slots of a tier that has ready pages, the least recently used first: distinct pages below `pages` with
    /// distinct keys, which `index` has.
    pub(crate) fn with_ready(
        pages: u32,
        page_bytes: u64,
        ready: Vec<(PageId, Key, u64)>,
        index: HashMap<Key, u32>,
    ) -> Self {
        let mut table = Self::new(pages, page_bytes);
        table.index = index;
        for (PageId(page), key, stamp) in ready {
            let Some(slot) = table.slots.get_mut(page as usize) else {
                continue;
            };
            slot.state = State::Ready;
            slot.key = key;
            slot.stamp = stamp;
            table.lru.push(page);
            table.clock = table.clock.max(stamp);
        }
        let slots = &table.slots;
        table
            .free
            .retain(|&page| slots[page as usize].state == State::Free);
        table
    }

    /// Returns how many of the first keys are ready.
    pub(crate) fn lookup(&mut self, keys: &[Key]) -> usize {
        let found = keys.iter().take_while(|key| self.is_ready(key)).count();
        self.counts.hits += found as u64;
        self.counts.misses += (keys.len() - found) as u64;
        found
    }

    fn is_ready(&self, key: &Key) -> bool {
        self.page_of(key).is_some()
    }

    /// Returns the ready page of a key.
    fn page_of(&self, key: &Key) -> Option<u32> {
        let page = *self.index.get(key)?;
        (self.slots[page as usize].state == State::Ready).then_some(page)
    }

    /// Makes ready keys the most recently used ones, the first key last.
    pub(crate) fn touch(&mut self, keys: &[Key]) -> Vec<Change> {
        let mut touched = Vec::new();
        for key in keys.iter().rev() {
            if let Some(page) = self.page_of(key) {
                touched.push(Change::Used(PageId(page), self.use_now(page)));
            }
        }
        touched
    }

    fn use_now(&mut self, page: u32) -> u64 {
        self.clock += 1;
        let slot = &mut self.slots[page as usize];
        slot.stamp = self.clock;
        if slot.users == 0 {
            self.lru.push(page);
        }
        self.clock
    }

    /// Finds pages for the keys that are not there, and evicts others for them if need be: never one of `keys`.
    ///
    /// # Errors
    /// [`Error::Full`]; nothing has changed then.
    pub(crate) fn reserve(&mut self, keys: &[Key]) -> Result<Reserved> {
        let mut seen = HashSet::with_capacity(keys.len());
        let mut needed = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            if seen.insert(key) && !self.index.contains_key(key) {
                needed.push(index);
            }
        }
        let short = needed.len().saturating_sub(self.free.len());
        let evictable = |page: &u32| !seen.contains(&self.slots[*page as usize].key);
        let victims: Vec<u32> = self.lru.iter().filter(evictable).take(short).collect();
        if victims.len() < short {
            return Err(Error::Full {
                needed: needed.len(),
                pages: self.slots.len(),
                available: self.free.len() + victims.len(),
                pinned: self.pinned(),
                writing: self.writing,
            });
        }
        let mut reserved = Reserved::default();
        for page in victims {
            let key = self.slots[page as usize].key;
            self.discard(page);
            self.counts.evictions += 1;
            let page = PageId(page);
            reserved.evicted.push(Evicted { key, page });
        }
        for index in needed {
            let Some(page) = self.free.pop() else { break };
            let slot = &mut self.slots[page as usize];
            slot.state = State::Writing { abandoned: false };
            slot.key = keys[index];
            slot.has_failed = false;
            self.index.insert(keys[index], page);
            self.writing += 1;
            reserved.placed.push((index, PageId(page)));
        }
        Ok(reserved)
    }

    /// Frees a ready page without users.
    fn discard(&mut self, page: u32) {
        let slot = &mut self.slots[page as usize];
        slot.state = State::Free;
        self.index.remove(&slot.key);
        self.lru.remove(page);
        self.free.push(page);
    }

    /// Makes pages that a store has written ready, the first one the most recently used.
    ///
    /// # Errors
    /// [`Error::StillCopying`], [`Error::CopyFailed`]; nothing has changed then.
    pub(crate) fn commit(&mut self, pages: &[PageId]) -> Result<Vec<Change>> {
        let is_used = |page: &&PageId| self.slots[page.0 as usize].users > 0;
        let copying = pages.iter().filter(is_used).count();
        if copying > 0 {
            return Err(Error::StillCopying { pages: copying });
        }
        let has_failed = |page: &&PageId| self.slots[page.0 as usize].has_failed;
        let failed = pages.iter().filter(has_failed).count();
        if failed > 0 {
            return Err(Error::CopyFailed { pages: failed });
        }
        let mut ready = Vec::with_capacity(pages.len());
        for &PageId(page) in pages.iter().rev() {
            let slot = &mut self.slots[page as usize];
            slot.state = State::Ready;
            let key = slot.key;
            self.writing -= 1;
            self.counts.stores += 1;
            ready.push(Change::Ready(PageId(page), key, self.use_now(page)));
        }
        Ok(ready)
    }

    /// Frees pages of a store, or leaves that to the end of the copies that still write them.
    pub(crate) fn abort(&mut self, pages: &[PageId]) -> Vec<Change> {
        let mut freed = Vec::new();
        for &PageId(page) in pages {
            let slot = &mut self.slots[page as usize];
            self.index.remove(&slot.key);
            slot.state = State::Writing { abandoned: true };
            if slot.users == 0 {
                self.free_written(page);
                freed.push(Change::Freed(PageId(page)));
            }
        }
        freed
    }

    fn free_written(&mut self, page: u32) {
        self.slots[page as usize].state = State::Free;
        self.writing -= 1;
        self.free.push(page);
    }

    /// Pins the pages of ready keys.
    ///
    /// # Errors
    /// [`Error::NotReady`]; nothing has changed then.
    pub(crate) fn pin(&mut self, keys: &[Key]) -> Result<Vec<PageId>> {
        let page = |(index, key): (usize, &Key)| match self.page_of(key) {
            Some(page) => Ok(PageId(page)),
            None => Err(Error::NotReady { key: *key, index }),
        };
        let pages = keys
            .iter()
            .enumerate()
            .map(page)
            .collect::<Result<Vec<_>>>()?;
        self.add_users(&pages);
        Ok(pages)
    }

    fn add_users(&mut self, pages: &[PageId]) {
        for &PageId(page) in pages {
            self.slots[page as usize].users += 1;
            self.lru.remove(page);
        }
    }

    /// Takes pages for a copy, which keeps them until [`unpin`](Self::unpin).
    ///
    /// # Errors
    /// [`Error::WrongState`] unless each page is pinned, or for a store being written.
    pub(crate) fn begin_copy(&mut self, pages: &[PageId], direction: Direction) -> Result<()> {
        for &PageId(page) in pages {
            let slot = self.slots.get(page as usize);
            let (is, users) = slot.map_or(("not of this tier", 0), |slot| {
                (slot.state.name(), slot.users)
            });
            let state = slot.map(|slot| slot.state);
            let need = match direction {
                Direction::Load => "ready and pinned by a load",
                Direction::Store => "of a store that was not committed",
            };
            let fits = match direction {
                Direction::Load => state == Some(State::Ready) && users > 0,
                Direction::Store => state == Some(State::Writing { abandoned: false }),
            };
            if !fits {
                return Err(Error::WrongState { page, is, need });
            }
        }
        self.add_users(pages);
        Ok(())
    }

    /// Ends what [`pin`](Self::pin) or [`begin_copy`](Self::begin_copy) began. A page counts as used then.
    pub(crate) fn unpin(&mut self, pages: &[PageId]) -> Vec<Change> {
        let mut changes = Vec::new();
        for &PageId(page) in pages.iter().rev() {
            let slot = &mut self.slots[page as usize];
            slot.users = slot.users.saturating_sub(1);
            match (slot.users, slot.state) {
                (0, State::Ready) => {
                    changes.push(Change::Used(PageId(page), self.use_now(page)));
                }
                (0, State::Writing { abandoned: true }) => {
                    self.free_written(page);
                    changes.push(Change::Freed(PageId(page)));
                }
                _ => {}
            }
        }
        changes
    }

    /// Notes that a copy has failed: pages that it was to write cannot be committed.
    pub(crate) fn fail(&mut self, pages: &[PageId]) {
        for &PageId(page) in pages {
            self.slots[page as usize].has_failed = true;
        }
    }

    /// Frees the pages of ready keys that nothing has pinned.
    pub(crate) fn remove(&mut self, keys: &[Key]) -> Vec<Change> {
        let mut removed = Vec::new();
        for key in keys {
            if let Some(page) = self.page_of(key)
                && self.slots[page as usize].users == 0
            {
                self.discard(page);
                removed.push(Change::Freed(PageId(page)));
            }
        }
        removed
    }

    /// Iterates over the keys that are ready, the least recently used first; those that are pinned come last.
    pub(crate) fn keys(&self) -> impl Iterator<Item = (Key, PageId)> + '_ {
        let pinned = |&(_, slot): &(usize, &Slot)| slot.state == State::Ready && slot.users > 0;
        let pinned = self.slots.iter().enumerate().filter(pinned);
        let pages = self.lru.iter().chain(pinned.map(|(page, _)| page as u32));
        pages.map(|page| (self.slots[page as usize].key, PageId(page)))
    }

    fn pinned(&self) -> usize {
        self.slots.len() - self.free.len() - self.writing - self.lru.len()
    }

    /// Counts a copy that has ended.
    pub(crate) fn count_copy(&mut self, direction: Direction, bytes: u64) {
        match direction {
            Direction::Load => self.counts.loaded_bytes += bytes,
            Direction::Store => self.counts.stored_bytes += bytes,
        }
    }

    pub(crate) fn stats(&self) -> Stats {
        Stats {
            free: self.free.len() as u64,
            writing: self.writing as u64,
            ready: (self.slots.len() - self.free.len() - self.writing) as u64,
            pinned: self.pinned() as u64,
            ..self.counts
        }
    }
}
