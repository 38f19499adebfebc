//! The name of a page's contents.

use std::fmt;

use ring::digest::{Context, SHA256};

/// Distinguishes a tier's hash from the SHA-256 of the same bytes, which a caller may use as a key of 32 bytes.
const PREFIX: &[u8] = b"egmem-kv key\0";

/// The name of a page's contents: 32 bytes, such as the hash of a block of tokens and all tokens before it.
///
/// The tier compares keys and interprets nothing. Keys must be hashes of the contents and of all that they depend on
/// (model, layers, precision): two contents with one key are the same to the tier.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key([u8; Key::BYTES]);

impl Key {
    /// The bytes of a key.
    pub const BYTES: usize = 32;

    /// Creates a key of 32 bytes.
    pub const fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Creates a key of bytes of any length. 32 bytes are the key itself, as in [`new`](Self::new). For other lengths
    /// the key is a hash, SHA-256 after a prefix of the tier's, so that bytes of different lengths have different
    /// keys.
    ///
    /// The hash stays the same between releases with one format of the tier's memory: a restarted process finds its
    /// pages.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        if let Ok(bytes) = bytes.try_into() {
            return Self(bytes);
        }
        let mut hash = Context::new(&SHA256);
        hash.update(PREFIX);
        hash.update(bytes);
        let mut key = [0; Self::BYTES];
        // Both have 32 bytes.
        for (byte, hashed) in key.iter_mut().zip(hash.finish().as_ref()) {
            *byte = *hashed;
        }
        Self(key)
    }

    /// Returns the key's bytes.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl From<[u8; Key::BYTES]> for Key {
    fn from(bytes: [u8; Key::BYTES]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(")?;
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_different_lengths_differ() {
        let of = Key::from_bytes;
        assert_ne!(of(b"a"), of(b"a\0"));
        assert_ne!(of(b""), of(b"\0"));
        assert_eq!(of(&[9; 32]), Key::new([9; 32]));
        // A key of 31 bytes with its length behind it is another one than those 32 bytes.
        let mut with_length = [9; 32];
        with_length[31] = 31;
        assert_ne!(of(&[9; 31]), of(&with_length));
        // As vLLM's, which end in the number of a group.
        let long = |last: u8| [&[7; 35][..], &[last]].concat();
        assert_ne!(of(&long(0)), of(&long(1)));
        assert_ne!(of(&long(0)), of(&[7; 32]));
    }

    #[test]
    fn a_key_is_the_same_in_every_process() {
        // printf 'egmem-kv key\0block' | sha256sum
        let expected = "Key(842bb1d8e5823c27a4152f3b34e8ec44b2c4b478453cdfcef79bae251f809333)";
        assert_eq!(format!("{:?}", Key::from_bytes(b"block")), expected);
    }
}
