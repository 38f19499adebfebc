//! The slots of a tier: which page has which key, and in which state. No memory, no driver.

mod restore;

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

use crate::lru::Lru;
use crate::page::{Change, Direction, Evicted, PageId, Reserved, Slot, State};
use crate::room::list_for;
use crate::{Error, Key, MemoryError, Result, Stats};

/// The slots of all pages.
#[derive(Debug)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    /// The pages whose memory is there: the first ones.
    usable: u32,
    /// The pages whose keys are being written or ready, by the hash of their slot's key.
    index: HashTable<u32>,
    hasher: RandomState,
    /// Taken from the end.
    free: VecDeque<u32>,
    /// Ready pages without users.
    lru: Lru,
    writing: usize,
    /// The stamp of the latest use.
    clock: u64,
    counts: Stats,
}

impl Table {
    /// A table of free pages.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) without memory for it.
    pub(crate) fn new(pages: u32, page_bytes: u64) -> Result<Self> {
        let mut table = Self::without_memory(pages, page_bytes)?;
        table.grow_to(pages);
        Ok(table)
    }

    /// A table of pages whose memory comes later.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn without_memory(pages: u32, page_bytes: u64) -> Result<Self> {
        let mut slots = list_for(pages as usize)?;
        slots.extend((0..pages).map(Slot::free));
        let free = list_for(pages as usize)?.into();
        Ok(Self {
            slots,
            usable: 0,
            index: HashTable::new(),
            hasher: RandomState::new(),
            free,
            lru: Lru::new(pages)?,
            writing: 0,
            clock: 0,
            counts: Stats {
                pages: pages.into(),
                page_bytes,
                ..Stats::default()
            },
        })
    }

    /// Frees the pages up to `usable` that had no memory yet. They are given out after those that are free now.
    pub(crate) fn grow_to(&mut self, usable: u32) {
        for page in self.usable..usable {
            self.free.push_front(page);
        }
        self.usable = self.usable.max(usable);
    }

    /// Returns the page that is being written or ready for a key.
    fn find(&self, key: &Key) -> Option<u32> {
        let is_of = |page: &u32| self.slots[*page as usize].key == *key;
        self.index.find(self.hasher.hash_one(key), is_of).copied()
    }

    /// Indexes a page by its slot's key, which no page in the index has.
    fn insert(&mut self, page: u32) {
        let (slots, hasher) = (&self.slots, &self.hasher);
        let hash = |page: &u32| hasher.hash_one(slots[*page as usize].key);
        self.index.insert_unique(hash(&page), page, hash);
    }

    /// Removes a page from the index.
    fn remove_from_index(&mut self, page: u32) {
        let hash = self.hasher.hash_one(self.slots[page as usize].key);
        if let Ok(entry) = self.index.find_entry(hash, |&other| other == page) {
            entry.remove();
        }
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
        let page = self.find(key)?;
        (self.slots[page as usize].state == State::Ready).then_some(page)
    }

    /// Makes ready keys the most recently used ones, the first key last.
    pub(crate) fn touch(&mut self, keys: &[Key]) -> Vec<Change> {
        let mut touched = Vec::new();
        for key in keys.iter().rev() {
            if let Some(page) = self.page_of(key) {
                touched.push(self.use_now(page));
            }
        }
        touched
    }

    fn use_now(&mut self, page: u32) -> Change {
        self.clock += 1;
        let slot = &mut self.slots[page as usize];
        slot.stamp = self.clock;
        if slot.users == 0 {
            self.lru.push(page);
        }
        Change::Used(slot.id, slot.stamp)
    }

    /// Finds pages for the keys that are not there, and evicts others for them if need be: never one of `keys`.
    ///
    /// # Errors
    /// [`Error::Full`]; nothing has changed then.
    pub(crate) fn reserve(&mut self, keys: &[Key]) -> Result<Reserved> {
        let mut seen = HashSet::with_capacity(keys.len());
        let mut needed = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            if seen.insert(key) && self.find(key).is_none() {
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
                missing: self.slots.len() - self.usable as usize,
                is_growing: false,
                available: self.free.len() + victims.len(),
                pinned: self.pinned(),
                writing: self.writing,
            });
        }
        let mut reserved = Reserved::default();
        for page in victims {
            let Slot { key, id, .. } = self.slots[page as usize];
            self.discard(page);
            self.counts.evictions += 1;
            reserved.evicted.push(Evicted { key, page: id });
        }
        for index in needed {
            let Some(page) = self.free.pop_back() else {
                break;
            };
            let slot = &mut self.slots[page as usize];
            slot.state = State::Writing { abandoned: false };
            slot.key = keys[index];
            slot.has_failed = false;
            slot.sum = 0;
            reserved.placed.push((index, slot.id));
            self.insert(page);
            self.writing += 1;
        }
        Ok(reserved)
    }

    /// Frees a ready page without users.
    fn discard(&mut self, page: u32) {
        self.remove_from_index(page);
        self.slots[page as usize].set_free();
        self.lru.remove(page);
        self.free.push_back(page);
    }

    /// Makes pages that a store has written ready, the first one the most recently used.
    ///
    /// # Errors
    /// [`Error::StillCopying`], [`Error::CopyFailed`]; nothing has changed then.
    pub(crate) fn commit(&mut self, pages: &[PageId]) -> Result<Vec<Change>> {
        self.expect_written(pages)?;
        let mut ready = Vec::with_capacity(pages.len());
        for &page in pages.iter().rev() {
            let slot = &mut self.slots[page.number() as usize];
            slot.state = State::Ready;
            let key = slot.key;
            self.writing -= 1;
            self.counts.stores += 1;
            self.use_now(page.number());
            ready.push(Change::Ready(page, key, self.clock));
        }
        Ok(ready)
    }

    /// Checks that all copies into pages of a store have ended well.
    ///
    /// # Errors
    /// [`Error::StillCopying`], [`Error::CopyFailed`].
    pub(crate) fn expect_written(&self, pages: &[PageId]) -> Result<()> {
        let is_used = |page: &&PageId| self.slots[page.number() as usize].users > 0;
        let copying = pages.iter().filter(is_used).count();
        if copying > 0 {
            return Err(Error::StillCopying { pages: copying });
        }
        let has_failed = |page: &&PageId| self.slots[page.number() as usize].has_failed;
        let failed = pages.iter().filter(has_failed).count();
        if failed > 0 {
            return Err(Error::CopyFailed { pages: failed });
        }
        Ok(())
    }

    /// Sets the checksum of a page that a store has written, which is not 0. It is there before the page is ready.
    pub(crate) fn set_sum(&mut self, page: PageId, sum: u64) {
        self.slots[page.number() as usize].sum = sum;
    }

    /// Returns the checksum of a ready page, if the commit computed it.
    pub(crate) fn sum(&self, page: PageId) -> Option<u64> {
        let sum = self.slots[page.number() as usize].sum;
        (sum != 0).then_some(sum)
    }

    /// Takes the key from a damaged page that loads have pinned: no look-up finds it, no copy begins, and it becomes free
    /// with its last use. `None` if another thread has done so.
    pub(crate) fn discard_damaged(&mut self, page: PageId) -> Option<Change> {
        let slot = &mut self.slots[page.number() as usize];
        if slot.id != page || slot.state != State::Ready {
            return None;
        }
        slot.state = State::Writing { abandoned: true };
        self.remove_from_index(page.number());
        self.writing += 1;
        self.counts.damaged += 1;
        Some(Change::Writing(page))
    }

    /// Frees pages of a store, or leaves that to the end of the copies that still write them.
    pub(crate) fn abort(&mut self, pages: &[PageId]) -> Vec<Change> {
        let mut freed = Vec::new();
        for &page in pages {
            self.remove_from_index(page.number());
            let slot = &mut self.slots[page.number() as usize];
            slot.state = State::Writing { abandoned: true };
            if slot.users == 0 {
                freed.push(self.free_written(page));
            }
        }
        freed
    }

    fn free_written(&mut self, page: PageId) -> Change {
        self.slots[page.number() as usize].set_free();
        self.writing -= 1;
        self.free.push_back(page.number());
        Change::Freed(page)
    }

    /// Pins the pages of ready keys.
    ///
    /// # Errors
    /// [`Error::NotReady`]; nothing has changed then.
    pub(crate) fn pin(&mut self, keys: &[Key]) -> Result<Vec<PageId>> {
        let page = |(index, key): (usize, &Key)| match self.page_of(key) {
            Some(page) => Ok(self.slots[page as usize].id),
            None => Err(Error::NotReady { key: *key, index }),
        };
        let pages = keys
            .iter()
            .enumerate()
            .map(page)
            .collect::<Result<Vec<_>>>()?;
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
            let users = self.slots[page.number() as usize].users;
            if users.checked_add(more).is_none() {
                let why = format!("page {} has {users} loads and copies", page.number());
                return Err(MemoryError::invalid("pages", why).into());
            }
        }
        for page in pages {
            let users = &mut self.slots[page.number() as usize].users;
            // Only pages without users are in the list, which lies elsewhere in the CPU's caches.
            if *users == 0 {
                self.lru.remove(page.number());
            }
            *users += 1;
        }
        Ok(())
    }

    /// Takes pages for a copy, which keeps them until [`unpin`](Self::unpin).
    ///
    /// # Errors
    /// [`Error::WrongState`] unless each page is pinned, or for a store being written, and still has the key that it
    /// was given out for.
    pub(crate) fn begin_copy(&mut self, pages: &[PageId], direction: Direction) -> Result<()> {
        let need = match direction {
            Direction::Load => "ready and pinned by a load",
            Direction::Store => "of a store that was not committed",
        };
        for &id in pages {
            let page = id.number();
            let (is, fits) = match self.slots.get(page as usize) {
                None => ("not of this tier", false),
                Some(slot) if slot.id != id => ("another key's since, or free", false),
                Some(slot) => (
                    slot.state.name(),
                    match direction {
                        Direction::Load => slot.state == State::Ready && slot.users > 0,
                        Direction::Store => slot.state == State::Writing { abandoned: false },
                    },
                ),
            };
            if !fits {
                return Err(Error::WrongState { page, is, need });
            }
        }
        self.add_users(pages)
    }

    /// Releases pages that [`pin`](Self::pin) or [`begin_copy`](Self::begin_copy) pinned. A page counts as used then.
    pub(crate) fn unpin(&mut self, pages: &[PageId]) -> Vec<Change> {
        let mut changes = Vec::new();
        for &page in pages.iter().rev() {
            let slot = &mut self.slots[page.number() as usize];
            slot.users = slot.users.saturating_sub(1);
            match (slot.users, slot.state) {
                (0, State::Ready) => changes.push(self.use_now(page.number())),
                (0, State::Writing { abandoned: true }) => changes.push(self.free_written(page)),
                _ => {}
            }
        }
        changes
    }

    /// Notes that a copy has failed: pages that it was to write cannot be committed.
    pub(crate) fn fail(&mut self, pages: &[PageId]) {
        for page in pages {
            self.slots[page.number() as usize].has_failed = true;
        }
    }

    /// Frees the pages of ready keys that nothing has pinned. Returns these keys, too.
    pub(crate) fn remove(&mut self, keys: &[Key]) -> Vec<(Key, Change)> {
        let mut removed = Vec::new();
        for key in keys {
            if let Some(page) = self.page_of(key)
                && self.slots[page as usize].users == 0
            {
                removed.push((*key, Change::Freed(self.slots[page as usize].id)));
                self.discard(page);
            }
        }
        removed
    }

    /// Iterates over the keys that are ready, the least recently used first; those that are pinned come last.
    pub(crate) fn keys(&self) -> impl Iterator<Item = (Key, PageId)> + '_ {
        let pinned = |&(_, slot): &(usize, &Slot)| slot.state == State::Ready && slot.users > 0;
        let pinned = self.slots.iter().enumerate().filter(pinned);
        let pages = self.lru.iter().chain(pinned.map(|(page, _)| page as u32));
        pages.map(|page| {
            let Slot { key, id, .. } = self.slots[page as usize];
            (key, id)
        })
    }

    fn pinned(&self) -> usize {
        self.usable as usize - self.free.len() - self.writing - self.lru.len()
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
            usable: self.usable.into(),
            ready: (self.usable as usize - self.free.len() - self.writing) as u64,
            pinned: self.pinned() as u64,
            ..self.counts
        }
    }
}

#[cfg(test)]
mod tests;
