//! Pages that an earlier process left in the memory.

use std::hash::BuildHasher;

use hashbrown::hash_table::Entry;

use super::Table;
use crate::page::{Change, PageId, Slot, State};
use crate::room::{list_for, make_room_in, no_room_in_index};
use crate::{Key, Result};

/// If a restored stamp is later, all stamps are renumbered.
const LAST_STAMP: u64 = 1 << 62;

impl Table {
    /// Makes a free page ready that an earlier process has written. [`end_restore`](Self::end_restore) follows the
    /// last one.
    pub(crate) fn restore(&mut self, page: PageId, key: Key, stamp: u64) {
        if let Some(slot) = self.slots.get_mut(page.number() as usize) {
            slot.state = State::Ready;
            slot.key = key;
            slot.stamp = stamp;
        }
    }

    /// Indexes and orders the pages that [`restore`](Self::restore) has made ready. Of pages with the same key it
    /// frees all but the first, and it gives smaller stamps to all if they are too large to count on from.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(crate) fn end_restore(&mut self) -> Result<Vec<Change>> {
        let is_ready = |slot: &&Slot| slot.state == State::Ready;
        let ready = self.slots.iter().filter(is_ready).count();
        let room = self.index.try_reserve(ready, |_| 0); // empty: nothing is hashed again
        room.map_err(no_room_in_index)?;
        let (mut order, mut changes) = (list_for(ready)?, Vec::new());
        for page in 0..self.slots.len() {
            let Slot {
                state,
                key,
                stamp,
                id,
                ..
            } = self.slots[page];
            if state != State::Ready {
                continue;
            }
            let (slots, hasher) = (&self.slots, &self.hasher);
            let is_of = |page: &u32| slots[*page as usize].key == key;
            let hash = |page: &u32| hasher.hash_one(slots[*page as usize].key);
            match self.index.entry(hasher.hash_one(key), is_of, hash) {
                Entry::Vacant(entry) => {
                    entry.insert(id.number());
                    order.push((stamp, id.number()));
                }
                Entry::Occupied(_) => {
                    self.slots[page].state = State::Free;
                    make_room_in(&mut changes, 1)?;
                    changes.push(Change::Freed(id));
                }
            }
        }
        order.sort_unstable();
        let is_late = order.last().is_some_and(|&(stamp, _)| stamp > LAST_STAMP);
        if is_late {
            make_room_in(&mut changes, order.len())?;
        }
        for ((stamp, page), new) in order.into_iter().zip(1..) {
            self.clock = if is_late { new } else { stamp };
            if is_late {
                let slot = &mut self.slots[page as usize];
                slot.stamp = new;
                changes.push(Change::Used(slot.id, new));
            }
            self.lru.push(page);
        }
        let slots = &self.slots;
        self.free
            .retain(|&page| slots[page as usize].state == State::Free);
        Ok(changes)
    }
}
