//! The table in the tier's memory, which a process that attaches later reads.
//!
//! A slot is 64 bytes: a word with the state and a count of its changes, the stamp of the latest use, the key, and a check of
//! the key. A page is marked as being written before any of its bytes change, and as ready after key and check are
//! there, so a process that is killed at any instruction leaves no ready page with another key's bytes.

use std::sync::atomic::{Ordering, fence};

use crate::Result;
use crate::geometry::Geometry;
use crate::memory::CpuView;
use crate::table::Change;

/// Where the parts of a slot lie.
const STATE: u64 = 0;
const STAMP: u64 = 8;
const KEY: u64 = 16;
const CHECK: u64 = 48;

const FREE: u64 = 0;
const WRITING: u64 = 1;
const READY: u64 = 2;

/// Writes a change of a slot.
///
/// # Errors
/// Those of the view.
pub(crate) fn write(view: &CpuView<'_>, geometry: &Geometry, change: Change) -> Result<()> {
    let (page, state) = match change {
        Change::Freed(page) => (page, FREE),
        Change::Writing(page) => (page, WRITING),
        Change::Ready(page, key, stamp) => {
            let slot = view.slice(geometry.slot_at(page), crate::geometry::SLOT)?;
            slot.put(STAMP, stamp)?;
            slot.write_at(KEY, key.as_bytes())?;
            slot.put(CHECK, check(key.as_bytes(), page.0))?;
            (page, READY)
        }
        Change::Used(page, stamp) => {
            view.put(geometry.slot_at(page) + STAMP, stamp)?;
            return Ok(());
        }
    };
    let at = geometry.slot_at(page) + STATE;
    let count = view.get::<u64>(at)? >> 2;
    // What was written before stays before, and what comes after stays after.
    fence(Ordering::SeqCst);
    view.put(at, count.wrapping_add(1) << 2 | state)?;
    fence(Ordering::SeqCst);
    Ok(())
}

/// Returns the check of a slot: a hash (FNV-1a over words, then mixed) of its key and its page.
pub(crate) fn check(key: &[u8; 32], page: u32) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ u64::from(page);
    for word in key.chunks_exact(8) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        hash = (hash ^ u64::from_le_bytes(bytes)).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    }
    hash
}
