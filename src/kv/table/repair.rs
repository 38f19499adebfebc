//! What follows from the slots, made again; and pages of members that have ended.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::slot::{CHECK, Named, PINS, STAMP, STATE, State, Status, WRITER};
use super::{PAGES, Table, WRITING};
use crate::geometry::{GROUP, GROUPS};
use crate::header::{CLOCK, DIRTY, USABLE};
use crate::words::{halves, make_room_in};
use crate::{Error, Result};

/// The contents that [`AttachOptions::open`](crate::AttachOptions::open) found in the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Found {
    /// How often the tier was attached, this time included.
    pub generation: u64,
    /// The ready pages that were kept.
    pub ready: u64,
    /// The pages that a process was writing when it ended. They are free now.
    pub unfinished: u64,
    /// The pages whose entry was damaged, or had the key of another page. They are free now, or after the last copy of a living process that
    /// uses them.
    pub damaged: u64,
    /// Whether there was no tier, and one was created.
    pub is_new: bool,
}

impl Table<'_> {
    /// Ended members are looked for as often at most, where nothing waits for their pages.
    pub(super) const SWEEPS: Duration = Duration::from_millis(100);

    /// Takes everything from members that have ended, if that was not done for a while.
    ///
    /// # Errors
    /// As [`repair`](Self::repair).
    pub(crate) fn sweep_if_due(&mut self) -> Result<()> {
        self.sweep_ended(Self::SWEEPS).map(drop)
    }

    /// Returns whether a repair was begun and did not end, or is needed first.
    pub(crate) fn is_dirty(&self) -> bool {
        self.words.get(DIRTY) != 0
    }

    /// Makes the index, the lists and the counts again, from slots with anything in them, and frees the pages that no member of `alive`
    /// is writing.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) without memory for the order of the pages. The next call repairs then.
    pub(crate) fn repair(&mut self, alive: u64) -> Result<Found> {
        self.words.put(DIRTY, 1);
        let usable = self.words.get(USABLE).min(self.geometry.pages.into());
        self.words.put(USABLE, usable);
        self.clear_index();
        for group in 0..self.geometry.groups.len() as u8 {
            self.clear_lists(group);
            for count in [WRITING, PAGES] {
                self.words.put(GROUPS + u64::from(group) * GROUP + count, 0);
            }
        }
        if !self.geometry.has_groups() {
            self.set_group_of_extent(0, Some(0), 0);
        }
        let (mut found, mut order) = (Found::default(), Vec::new());
        for extent in 0..self.geometry.extents {
            self.clear_extent(extent);
            let group = self.group_of_extent(extent);
            let is_whole = self.is_usable(extent) || !self.geometry.has_groups();
            let Some(group) = group.filter(|_| is_whole) else {
                self.set_group_of_extent(extent, None, self.first_uses(extent));
                continue;
            };
            let pages = self.geometry.pages_of(extent, &self.group(group));
            let pages = pages.start..pages.end.min(usable as u32);
            self.count(group, PAGES, pages.len() as i64);
            for page in pages {
                self.make_step(page.into());
                make_room_in(&mut order, 1)?;
                order.extend(self.repair_page(page, group, alive, &mut found));
            }
        }
        self.order(order);
        self.words.take_damage();
        self.words.put(DIRTY, 0);
        Ok(found)
    }

    /// Decides on one page. Returns its stamp and its number if it is ready.
    fn repair_page(
        &self,
        page: u32,
        group: u8,
        alive: u64,
        found: &mut Found,
    ) -> Option<(u64, u32)> {
        let slot = self.slot(page);
        let pins = self.words.get(slot + PINS);
        if pins & !alive != 0 {
            self.spoil(slot);
            self.words.put(slot + PINS, pins & alive);
        }
        let status = Status::of(self.words.get(slot + STATE));
        let status = status.filter(|status| status.group == group);
        if status.is_some_and(|status| status.state == State::Free) {
            self.add_repaired_free(page, group);
            return None;
        }
        let key = Named::read(self.words, slot, self.seed).filter(|key| key.key.group() == group);
        let check = self.words.get(slot + CHECK);
        let is_new = |key: &&Named| self.find(key).is_none();
        match (status.map(|status| status.state), &key) {
            (Some(State::Ready), Some(key)) if check == key.check(page) && is_new(&key) => {
                self.insert(page, key);
                found.ready += 1;
                if pins & alive != 0 {
                    self.count_in_extent(page, 0, 1);
                }
                return Some((self.words.get(slot + STAMP), page));
            }
            (Some(state), Some(key))
                if state.is_stored() && self.repair_written(page, key, alive) =>
            {
                return None;
            }
            // A page that a copy of a living member may still use does not become free here.
            (Some(state), _) if state.is_writing() => {
                found.unfinished += u64::from(pins & alive == 0);
            }
            _ => found.damaged += 1,
        }
        if pins & alive != 0 {
            self.keep_from_use(page, group);
            return None;
        }
        self.set_free(page, group);
        self.add_repaired_free(page, group);
        None
    }

    /// Keeps a page that is no key's, and that a copy of a living member may still use: its last unpin frees it.
    fn keep_from_use(&self, page: u32, group: u8) {
        let slot = self.slot(page);
        let (_, uses) = halves(self.words.get(slot + STATE));
        let status = Status::new(State::Abandoned, group, uses);
        self.words.put(slot + STATE, status.word());
        self.count(group, WRITING, 1);
        self.count_in_extent(page, 0, 1);
    }

    /// Keeps a page that a store of a living member writes. Returns whether it is one.
    fn repair_written(&self, page: u32, key: &Named, alive: u64) -> bool {
        let slot = self.slot(page);
        let is_stored = self.words.get(slot + CHECK) == !key.check(page)
            && self.is_writer(slot, alive)
            && self.find(key).is_none();
        if is_stored {
            self.insert(page, key);
            self.count(key.key.group(), WRITING, 1);
            self.count_in_extent(page, 0, 1);
        }
        is_stored
    }

    /// Returns whether one of `members` writes, or has written, a page.
    fn is_writer(&self, slot: u64, members: u64) -> bool {
        let writer = self.words.get(slot + WRITER).wrapping_sub(1);
        writer < 64 && members >> writer & 1 == 1
    }

    /// Adds a page that is free. The process that freed it may have ended before it cleared the check.
    fn add_repaired_free(&self, page: u32, group: u8) {
        self.words.put(self.slot(page) + CHECK, 0);
        self.words.put(self.slot(page) + PINS, 0);
        self.push_newest(self.free_list(group), page);
        self.count_in_extent(page, 1, 0);
    }

    /// Numbers the stamps of all ready pages anew, because any number may have been there, and fills the lists of use with those that nothing
    /// pins. A pinned page needs a new stamp too: an old one is later than the new clock, and a repair after its member has ended would
    /// make it the most recently used one. A process that is killed here leaves pages in the order in which they were, because the new
    /// stamps are no later than the ones before.
    fn order(&self, mut order: Vec<(u64, u32)>) {
        let compared = Cell::new(0_u64);
        order.sort_unstable_by(|one, other| {
            compared.set(compared.get() + 1);
            self.make_step(compared.get());
            one.cmp(other)
        });
        self.words.put(CLOCK, order.len() as u64);
        for ((_, page), stamp) in order.into_iter().zip(1..) {
            self.make_step(stamp);
            let slot = self.slot(page);
            self.words.put(slot + STAMP, stamp);
            self.note_use(page, stamp);
            if self.words.get(slot + PINS) == 0 {
                self.push_newest(self.lru(self.status(slot).group), page);
            }
        }
    }

    /// Takes everything from members that have ended, unless they were looked for within `pause`: repairs the table without them. Returns
    /// whether there were any.
    ///
    /// # Errors
    /// As [`repair`](Self::repair).
    pub(super) fn sweep_ended(&mut self, pause: Duration) -> Result<bool> {
        let is_due = self
            .private
            .swept
            .is_none_or(|swept| swept.elapsed() >= pause);
        if !is_due || !self.words.has_other_members(self.own) {
            return Ok(false);
        }
        self.private.swept = Some(Instant::now());
        let has_ended = self.words.ended_members(false).mask() != 0;
        if has_ended {
            self.take_over()?;
        }
        Ok(has_ended)
    }

    /// Begins as a member whose number another one may have had. Alone, it has the first `usable` pages. Members elsewhere have ended if
    /// `take_over` says so. Returns what there is.
    ///
    /// # Errors
    /// As [`repair`](Self::repair).
    pub(crate) fn join(&mut self, usable: u32, take_over: bool) -> Result<Found> {
        let ended = self.words.ended_members(take_over);
        let others = self.words.member_bits() & !ended.mask() & !self.own.bit();
        if others == 0 {
            self.words.put(USABLE, usable.into());
        }
        let found = self.repair(others)?;
        // Last, so that a kill before repeats it.
        self.words.forget_members(&ended);
        Ok(found)
    }

    /// Repairs the table if a call has met damage.
    ///
    /// # Errors
    /// [`Error::Damaged`] then; as [`repair`](Self::repair).
    #[inline]
    pub(crate) fn expect_undamaged(&mut self) -> Result<()> {
        if !self.words.take_damage() {
            return Ok(());
        }
        self.take_over()?;
        Err(Error::Damaged)
    }

    /// Repairs the table without the members that have ended.
    ///
    /// # Errors
    /// As [`repair`](Self::repair).
    pub(crate) fn take_over(&mut self) -> Result<()> {
        let ended = self.words.ended_members(false);
        self.repair(self.words.member_bits() & !ended.mask())?;
        self.words.forget_members(&ended);
        Ok(())
    }
}
