//! The table in the tier's memory, which a process that attaches later reads.
//!
//! A slot is 64 bytes: a word with the state and a count of its changes, the stamp of the latest use, the key, and a check of
//! the key. A page is marked as being written before any of its bytes change, and as ready after key and check are
//! there, so a process that is killed at any instruction leaves no ready page with another key's bytes.

use std::sync::atomic::{Ordering, fence};

use crate::geometry::{Geometry, SLOT};
use crate::hash::hash;
use crate::memory::CpuView;
use crate::page::{Change, PageId};
use crate::table::Table;
use crate::{Found, Key, Result};

/// Where the parts of a slot lie.
const STATE: u64 = 0;
const STAMP: u64 = 8;
const KEY: u64 = 16;
const CHECK: u64 = 48;

const FREE: u64 = 0;
const WRITING: u64 = 1;
const READY: u64 = 2;

/// The words of a slot.
const WORDS: usize = SLOT as usize / 8;
/// The slots that are read at a time.
const READ: usize = 64;

/// Writes a change of a slot.
///
/// # Errors
/// Those of the view.
pub(crate) fn write(view: &CpuView<'_>, geometry: &Geometry, change: Change) -> Result<()> {
    let (page, state) = match change {
        Change::Freed(page) => (page, FREE),
        Change::Writing(page) => (page, WRITING),
        Change::Ready(page, key, stamp) => {
            let slot = view.slice(geometry.slot_at(page), SLOT)?;
            slot.put(STAMP, stamp)?;
            slot.write_at(KEY, key.as_bytes())?;
            slot.put(CHECK, check(key.as_bytes(), page.number()))?;
            (page, READY)
        }
        Change::Used(page, stamp) => {
            view.put(geometry.slot_at(page) + STAMP, stamp)?;
            return Ok(());
        }
    };
    let at = geometry.slot_at(page) + STATE;
    let count = view.get::<u64>(at)? >> 2;
    // Earlier writes stay before this one, and later writes after it.
    fence(Ordering::SeqCst);
    view.put(at, count.wrapping_add(1) << 2 | state)?;
    fence(Ordering::SeqCst);
    if state == WRITING {
        // The page's bytes change from now on. With the check of its last key, damage to the state could make that key ready.
        let slot = view.slice(geometry.slot_at(page), SLOT)?;
        let mut key = [0; Key::BYTES];
        slot.read_at(KEY, &mut key)?;
        slot.put(CHECK, !check(&key, page.number()))?;
        fence(Ordering::SeqCst);
    }
    Ok(())
}

/// Reads the table in memory, which may have anything in it, into a new one, and marks all pages as free that are not ready.
///
/// # Errors
/// Those of the view; [`System`](crate::MemoryError::System) without memory for the pages.
pub(crate) fn read(view: &CpuView<'_>, geometry: &Geometry, table: &mut Table) -> Result<Found> {
    let mut found = Found::default();
    let mut slots = [[0_u64; WORDS]; READ];
    for first in (0..geometry.pages).step_by(READ) {
        let count = (geometry.pages - first).min(READ as u32) as usize;
        let slots = &mut slots[..count];
        view.read_at(
            geometry.slot_at(PageId::first(first)),
            slots.as_flattened_mut(),
        )?;
        for (page, slot) in (first..).zip(slots) {
            let state = slot[STATE as usize / 8] & 3;
            let key = key_of(slot);
            let is_whole = slot[CHECK as usize / 8] == check(key.as_bytes(), page);
            let page = PageId::first(page);
            match state {
                FREE => continue,
                READY if is_whole => {
                    table.restore(page, key, slot[STAMP as usize / 8]);
                    found.ready += 1;
                    continue;
                }
                WRITING => found.unfinished += 1,
                _ => found.damaged += 1,
            }
            write(view, geometry, Change::Freed(page))?;
        }
    }
    for change in table.end_restore()? {
        // A page with the key of another.
        if let Change::Freed(_) = change {
            found.ready -= 1;
            found.damaged += 1;
        }
        write(view, geometry, change)?;
    }
    Ok(found)
}

fn key_of(slot: &[u64; WORDS]) -> Key {
    let mut key = [0; Key::BYTES];
    let words = &slot[KEY as usize / 8..CHECK as usize / 8];
    for (bytes, word) in key.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_ne_bytes();
    }
    Key::new(key)
}

/// Returns the check of a slot: a hash of its page and its key.
pub(crate) fn check(key: &[u8; Key::BYTES], page: u32) -> u64 {
    let mut words = [u64::from(page), 0, 0, 0, 0];
    for (word, bytes) in words[1..].iter_mut().zip(key.as_chunks().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    hash(&words)
}
