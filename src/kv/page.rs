//! Pages and keys: their names and their states.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::iter;

use ring::digest::{Context, SHA256};

/// A page of a tier for one key: the page's number and group, and how often the page has become free before, modulo 2^25. Once the page
/// is given to another key, the tier refuses this value, until the page has become free 2^25 times more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    number: u32,
    group: u8,
    uses: u32,
}

impl PageId {
    /// The bits of a group, from bit 32 of an integer on.
    const GROUP: u32 = 6;
    /// The bits of `uses`, behind them: one less than there is room for, so that all bits are a positive `i64` too, as arrays of
    /// numbers have.
    const USES: u32 = (1 << 25) - 1;

    pub(crate) const fn new(number: u32, group: u8, uses: u32) -> Self {
        let uses = uses & Self::USES;
        Self {
            number,
            group,
            uses,
        }
    }

    /// A page of group 0 before it was free again for the first time.
    #[cfg(test)]
    pub(crate) const fn first(number: u32) -> Self {
        Self::new(number, 0, 0)
    }

    /// Returns the page's number, from 0 on.
    pub const fn number(self) -> u32 {
        self.number
    }

    /// Returns the page's group, which decides its size: 0 in a tier with one size of pages.
    pub const fn group(self) -> u8 {
        self.group
    }

    /// Returns how often the page had become free.
    pub(crate) const fn uses(self) -> u32 {
        self.uses
    }

    /// Returns the value as an integer below 2^63, for other languages: the number, from bit 32 on the group, and from bit 38 on how
    /// often the page has become free. For the first key of a page of group 0 it is the number.
    pub const fn to_bits(self) -> u64 {
        ((self.uses as u64) << Self::GROUP | self.group as u64) << 32 | self.number as u64
    }

    /// Returns the value of [`to_bits`](Self::to_bits). A tier refuses one that it has not given out.
    pub const fn from_bits(bits: u64) -> Self {
        Self {
            number: bits as u32,
            group: (bits >> 32) as u8 & ((1 << Self::GROUP) - 1),
            // Bit 63 makes it a value that no tier gives out.
            uses: (bits >> (32 + Self::GROUP)) as u32,
        }
    }
}

/// A key whose page made room for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// The key, which the tier has no longer.
    pub key: Key,
    /// The page.
    pub page: PageId,
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From pages to a GPU.
    Load,
    /// From a GPU to pages.
    Store,
}

/// The pages for the keys of a store.
#[derive(Debug, Default)]
pub(crate) struct Reserved {
    /// The keys that were not there, by their index in the list, with their pages.
    pub(crate) placed: Vec<(usize, PageId)>,
    pub(crate) evicted: Vec<Evicted>,
}

/// Distinguishes a tier's hash from the SHA-256 of the same bytes, which a caller may use as a key of 32 bytes.
const PREFIX: &[u8] = b"egmem-kv key\0";

/// The name of a page's contents: up to 64 bytes, such as the hash of a block of tokens and all tokens before it.
///
/// The tier compares keys and interprets nothing. Keys must be hashes of the contents and of all that they depend on
/// (model, layers, precision): two contents with one key are the same to the tier.
///
/// A key has a [group](Self::in_group), which decides the size of its page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// The key's bytes, and zeros behind them.
    bytes: [u8; Self::MAX_BYTES],
    len: u8,
    group: u8,
}

impl Key {
    /// The bytes of a [digest](Self::digest).
    pub const BYTES: usize = 32;

    /// The most bytes of a key.
    pub const MAX_BYTES: usize = 64;

    /// Creates a key of 32 bytes.
    pub const fn new(bytes: [u8; Self::BYTES]) -> Self {
        let mut key = [0; Self::MAX_BYTES];
        key.split_at_mut(Self::BYTES).0.copy_from_slice(&bytes);
        Self {
            bytes: key,
            len: Self::BYTES as u8,
            group: 0,
        }
    }

    /// Creates a key of bytes of any length. Up to 64 bytes are the key itself; keys of different lengths differ. Of
    /// more bytes the key is their [digest](Self::digest).
    pub fn from_bytes(bytes: &[u8]) -> Self {
        if bytes.len() > Self::MAX_BYTES {
            return Self::new(Self::digest(bytes));
        }
        let mut key = [0; Self::MAX_BYTES];
        key[..bytes.len()].copy_from_slice(bytes);
        Self {
            bytes: key,
            len: bytes.len() as u8,
            group: 0,
        }
    }

    /// Returns 32 bytes for any others: 32 bytes themselves, and of another number a SHA-256 after a prefix of the
    /// tier's. It stays the same between releases with one format of the tier's memory.
    pub fn digest(bytes: &[u8]) -> [u8; Self::BYTES] {
        if let Ok(bytes) = bytes.try_into() {
            return bytes;
        }
        let mut hash = Context::new(&SHA256);
        hash.update(PREFIX);
        hash.update(bytes);
        let mut digest = [0; Self::BYTES];
        // Both have 32 bytes.
        for (byte, hashed) in digest.iter_mut().zip(hash.finish().as_ref()) {
            *byte = *hashed;
        }
        digest
    }

    /// Returns the same bytes as a key of another group: the place of its size in the tier's
    /// [`page_sizes`](crate::TierOptions::page_sizes). The default is 0. Equal bytes in two groups are two keys. A group that the
    /// tier does not have has no pages.
    pub const fn in_group(self, group: u8) -> Self {
        Self { group, ..self }
    }

    /// Returns the key's group.
    pub const fn group(&self) -> u8 {
        self.group
    }

    /// Iterates over the key as words: its length with its group in the second byte, then its bytes.
    #[inline]
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        let bytes = self.bytes.as_chunks().0.iter();
        let bytes = bytes.take(usize::from(self.len).div_ceil(8));
        let first = u64::from(self.len) | u64::from(self.group) << 8;
        iter::once(first).chain(bytes.map(|bytes| u64::from_ne_bytes(*bytes)))
    }

    /// Returns the key of [`words`](Self::words), which more may follow; `None` if they are none of a key's.
    pub(crate) fn of_words(mut words: impl Iterator<Item = u64>) -> Option<Self> {
        let first = words.next()?;
        let (len, group) = (first & 0xff, first >> 8);
        if len > Self::MAX_BYTES as u64 || group >= 1 << PageId::GROUP {
            return None;
        }
        let mut bytes = [0; Self::MAX_BYTES];
        let used = bytes
            .as_chunks_mut()
            .0
            .iter_mut()
            .take(len.div_ceil(8) as usize);
        for (bytes, word) in used.zip(words) {
            *bytes = word.to_ne_bytes();
        }
        // Keys with other bytes behind theirs would be equal to others, with other hashes.
        let is_padded = bytes[len as usize..].iter().all(|&byte| byte == 0);
        let (len, group) = (len as u8, group as u8);
        is_padded.then_some(Self { bytes, len, group })
    }

    /// Returns the key's bytes.
    pub const fn as_bytes(&self) -> &[u8] {
        self.bytes.split_at(self.len as usize).0
    }
}

impl From<[u8; Key::BYTES]> for Key {
    fn from(bytes: [u8; Key::BYTES]) -> Self {
        Self::new(bytes)
    }
}

/// The zeros behind the bytes are left out.
impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
        self.group.hash(state);
    }
}

/// Writes text as it is, in quotes, and other bytes as hexadecimal digits.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.as_bytes();
        let is_text = bytes.iter().all(|byte| matches!(byte, b' '..=b'~'));
        if let Ok(text) = std::str::from_utf8(bytes)
            && is_text
        {
            return write!(f, "{text:?}");
        }
        bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group {
            0 => write!(f, "Key({self})"),
            group => write!(f, "Key({self} of group {group})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_back() {
        for page in [
            PageId::new(0, 0, 0),
            PageId::new(u32::MAX, 63, PageId::USES),
            PageId::new(5, 3, 9),
        ] {
            assert_eq!(PageId::from_bits(page.to_bits()), page);
            assert!(page.to_bits() < 1 << 63);
        }
        assert_eq!(PageId::first(7).to_bits(), 7);
        assert_eq!(PageId::new(7, 0, 1 << 25), PageId::first(7));
        assert_ne!(PageId::from_bits(1 << 63), PageId::first(0));
    }
}

#[cfg(test)]
mod key_tests {
    use super::*;

    #[test]
    fn keys_of_different_lengths_differ() {
        let of = Key::from_bytes;
        assert_ne!(of(b"a"), of(b"a\0"));
        assert_ne!(of(b""), of(b"\0"));
        assert!(of(b"a") < of(b"a\0") && of(b"a\0") < of(b"b"));
        assert_eq!(of(&[9; 32]), Key::new([9; 32]));
        // As vLLM's, which end in the number of a group.
        let long = |last: u8| [&[7; 35][..], &[last]].concat();
        assert_ne!(of(&long(0)), of(&long(1)));
        assert_ne!(of(&long(0)), of(&[7; 32]));
    }

    #[test]
    fn equal_bytes_in_two_groups_are_two_keys() {
        let key = Key::from_bytes(b"a");
        let other = key.in_group(3);
        assert_ne!(key, other);
        assert_eq!(key, other.in_group(0));
        assert_eq!((other.group(), other.as_bytes()), (3, &b"a"[..]));
        assert_eq!(format!("{other:?}"), "Key(\"a\" of group 3)");
    }

    #[test]
    fn keys_of_up_to_64_bytes_are_kept() {
        for len in [0, 1, 31, 32, 33, 63, 64] {
            let bytes: Vec<u8> = (1..=len).collect();
            assert_eq!(Key::from_bytes(&bytes).as_bytes(), bytes);
        }
        let long = [5; 65];
        assert_eq!(Key::from_bytes(&long).as_bytes(), Key::digest(&long));
        assert_ne!(Key::from_bytes(&long), Key::from_bytes(&[5; 66]));
    }

    #[test]
    fn a_digest_is_the_same_in_every_process() {
        // printf 'egmem-kv key\0block' | sha256sum
        let expected = "Key(842bb1d8e5823c27a4152f3b34e8ec44b2c4b478453cdfcef79bae251f809333)";
        assert_eq!(format!("{:?}", Key::new(Key::digest(b"block"))), expected);
        assert_eq!(format!("{:?}", Key::from_bytes(b"block")), "Key(\"block\")");
    }
}
