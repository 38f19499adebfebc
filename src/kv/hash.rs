//! Hashes for finding damage and numbers. They are no protection against anyone who knows them.

use std::hash::{BuildHasherDefault, Hasher};

/// Returns the hash of words: FNV-1a over whole words, mixed after each.
pub(crate) fn hash(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^ hash >> 29
    })
}

/// Hashes single numbers, for sets and maps of pages and of hashes.
pub(crate) type OfNumbers = BuildHasherDefault<Number>;

/// The hash of one number.
#[derive(Default)]
pub(crate) struct Number(u64);

impl Hasher for Number {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        // The high bits depend on all, and sets use both ends.
        let hash = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = hash ^ hash >> 32;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
