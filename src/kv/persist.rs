//! The table in the tier's memory, which a process that attaches later reads.
//!
//! A slot is 96 bytes: a word with the state and a count of its changes, the stamp of the latest use, a check of the key,
//! its length, and the key. A page is marked as being written before any of its bytes change, and as ready after key and check are
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
const CHECK: u64 = 16;
const LEN: u64 = 24;
const KEY: u64 = 32;

const FREE: u64 = 0;
const WRITING: u64 = 1;
const READY: u64 = 2;

/// The words of a key: its length and its bytes.
const KEY_WORDS: usize = 1 + Key::MAX_BYTES / 8;
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
            slot.write_at(LEN, &words(&key))?;
            slot.put(CHECK, check(&words(&key), page.number()))?;
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
        let mut key = KeyWords::default();
        slot.read_at(LEN, &mut key)?;
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
            let of_key = |key: &Key| slot[CHECK as usize / 8] == check(&words(key), page);
            let key = key.filter(of_key);
            let page = PageId::first(page);
            match (state, key) {
                (FREE, _) => continue,
                (READY, Some(key)) => {
                    table.restore(page, key, slot[STAMP as usize / 8]);
                    found.ready += 1;
                    continue;
                }
                (WRITING, _) => found.unfinished += 1,
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

/// The length and the bytes of a key, with zeros behind them.
type KeyWords = [u64; KEY_WORDS];

fn words(key: &Key) -> KeyWords {
    let mut words = KeyWords::default();
    words[0] = key.as_bytes().len() as u64;
    for (word, bytes) in words[1..].iter_mut().zip(key.as_bytes().chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(whole);
    }
    words
}

/// Returns the key of a slot; `None` if its length is none of a key's.
fn key_of(slot: &[u64; WORDS]) -> Option<Key> {
    let mut bytes = [0; Key::MAX_BYTES];
    let words = &slot[KEY as usize / 8..];
    for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_ne_bytes();
    }
    let len = usize::try_from(slot[LEN as usize / 8]).ok()?;
    bytes.get(..len).map(Key::from_bytes)
}

/// Returns the check of a slot: a hash of its page and its key.
fn check(key: &KeyWords, page: u32) -> u64 {
    let mut all = [0; 1 + KEY_WORDS];
    all[0] = u64::from(page);
    all[1..].copy_from_slice(key);
    hash(&all)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::{Buffer, Driver, Key, Tier};
    use egmem_core::Machine;

    #[test]
    fn keys_of_every_length_are_found_again() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let memory = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
        let attach = || Tier::attach(Arc::clone(&memory)).page_bytes(16).open();
        let bytes: Vec<u8> = (1..=66).collect();
        let keys: Vec<Key> = (0..=66).map(|len| Key::from_bytes(&bytes[..len])).collect();
        let tier = attach().unwrap();
        tier.prepare_store(&keys).unwrap().commit().unwrap();
        drop(tier);
        let tier = attach().unwrap();
        assert_eq!(tier.found().ready, keys.len() as u64);
        let found: Vec<Key> = tier.keys().into_iter().map(|(key, _)| key).rev().collect();
        assert_eq!(found, keys);
        assert_eq!(found[36].as_bytes(), &bytes[..36]);
    }
}
