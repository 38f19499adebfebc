//! The entry of a page: which key it has, and in which state.
//!
//! A slot is 128 bytes. The first 64 are all that a search for a key of up to 32 bytes reads.

use crate::Key;
use crate::geometry::MAX_GROUPS;
use crate::page::PageId;
use crate::words::Words;

/// Where the parts of a slot lie.
pub(super) const STATE: u64 = 0;
/// When a ready page was used last.
pub(super) const STAMP: u64 = 8;
/// [`Named::check`] of a ready page, its complement of one that is being written, and 0 of a free one: damage to a state makes no
/// other key ready.
pub(super) const CHECK: u64 = 16;
/// The length of the key, and its group in the next byte; then the key.
pub(super) const KEY: u64 = 24;
/// A bit for each member that has pinned the page.
pub(super) const PINS: u64 = 96;
/// The neighbours in the list that the page is in.
pub(super) const LINKS: u64 = 104;
/// The member that writes the page, plus 1.
pub(super) const WRITER: u64 = 112;
/// A checksum of the contents; 0: none.
pub(super) const SUM: u64 = 120;

/// The state of a page: the low 16 bits of a slot's first word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum State {
    Free = 0,
    /// A store has it.
    Writing = 1,
    Ready = 2,
    /// A store has it, and a copy into it has failed.
    Failed = 0x201,
    /// It is no key's: its store is gone, and copies into it still run.
    Abandoned = 0x301,
}

impl State {
    pub(super) const fn is_writing(self) -> bool {
        !matches!(self, Self::Free | Self::Ready)
    }

    /// Returns whether a store has the page.
    pub(super) const fn is_stored(self) -> bool {
        matches!(self, Self::Writing | Self::Failed)
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Ready => "ready",
            _ => "being written",
        }
    }
}

/// The first word of a slot: state 16 bits, group 16, uses 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) state: State,
    pub(super) group: u8,
    pub(super) uses: u32,
}

impl Status {
    /// Returns the status of a word; `None` of one that no tier writes.
    #[inline]
    pub(super) const fn of(word: u64) -> Option<Self> {
        let state = match word as u16 {
            0 => State::Free,
            1 => State::Writing,
            2 => State::Ready,
            0x201 => State::Failed,
            0x301 => State::Abandoned,
            _ => return None,
        };
        let group = (word >> 16) as u16;
        if group as usize >= MAX_GROUPS {
            return None;
        }
        Some(Self {
            state,
            group: group as u8,
            uses: (word >> 32) as u32,
        })
    }

    pub(super) const fn word(self) -> u64 {
        self.state as u64 | (self.group as u64) << 16 | (self.uses as u64) << 32
    }

    /// Returns a status with the low bits of `uses` that a name has.
    pub(super) const fn new(state: State, group: u8, uses: u32) -> Self {
        let uses = PageId::new(0, group, uses).uses();
        Self { state, group, uses }
    }

    /// Returns the name of the page with this number.
    pub(super) const fn id(self, number: u32) -> PageId {
        PageId::new(number, self.group, self.uses)
    }
}

/// A key with its hash in one tier.
pub(super) struct Named {
    pub(super) key: Key,
    pub(super) hash: u64,
}

impl Named {
    /// Multiplies each word into the hash, by both halves of the product.
    pub(super) fn of(key: &Key, seed: u64) -> Self {
        let hash = key.words().fold(seed, |hash, word| {
            let product = u128::from(hash ^ word) * u128::from(FACTOR);
            (product as u64).rotate_left(23) ^ (product >> 64) as u64
        });
        Self { key: *key, hash }
    }

    /// Returns the key of a slot; `None` if its words are none of a key's.
    pub(super) fn read(words: &Words<'_>, slot: u64, seed: u64) -> Option<Self> {
        let at = (slot + KEY..).step_by(8);
        let key = Key::of_words(at.map(|at| words.get(at)))?;
        Some(Self::of(&key, seed))
    }

    /// Returns whether a slot has this key.
    #[inline]
    pub(super) fn is_in(&self, words: &Words<'_>, slot: u64) -> bool {
        let mut own = self.key.words().zip((slot + KEY..).step_by(8));
        own.all(|(word, at)| words.get(at) == word)
    }

    /// Writes the key to a slot.
    pub(super) fn write(&self, words: &Words<'_>, slot: u64) {
        for (word, at) in self.key.words().zip((slot + KEY..).step_by(8)) {
            words.put(at, word);
        }
    }

    /// Returns the check of the slot that has the key in a page: never 0, and never its own complement's.
    pub(super) fn check(&self, page: u32) -> u64 {
        let product = u128::from(self.hash ^ u64::from(page) << 32) * u128::from(FACTOR);
        ((product >> 64) as u64 ^ product as u64) | 1
    }
}

/// Odd, with bits in no pattern.
const FACTOR: u64 = 0xd6e8_feb8_6659_fd93;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn words_of_states() {
        for state in [
            State::Free,
            State::Writing,
            State::Failed,
            State::Abandoned,
            State::Ready,
        ] {
            let (group, uses) = (63, u32::MAX >> 7);
            let status = Status { state, group, uses };
            assert_eq!(Status::of(status.word()), Some(status));
        }
        for word in [3, 0x100, 0x101, 0x102, 0x401, 64 << 16] {
            assert_eq!(Status::of(word), None, "{word:x}");
        }
    }

    #[test]
    fn keys_of_every_length_come_back() {
        let memory: [AtomicU64; 16] = Default::default();
        let words = Words::over(&memory);
        let bytes: Vec<u8> = (1..=64).collect();
        let mut hashes = Vec::new();
        for len in 0..=64 {
            let key = Key::from_bytes(&bytes[..len]).in_group(len as u8 % 64);
            let named = Named::of(&key, 7);
            named.write(&words, 0);
            let read = Named::read(&words, 0, 7).unwrap();
            assert_eq!((read.key, read.hash), (key, named.hash));
            assert!(read.is_in(&words, 0) && named.check(1) != named.check(2));
            assert!(!Named::of(&key.in_group(63), 7).is_in(&words, 0) || len % 64 == 63);
            hashes.push(named.hash >> 32);
        }
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 65);
        words.put(KEY, 65);
        assert!(Named::read(&words, 0, 7).is_none());
        words.put(KEY, 64 << 8);
        assert!(Named::read(&words, 0, 7).is_none());
    }
}
