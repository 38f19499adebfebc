//! The name of a page's contents.

use std::fmt;

use crate::{MemoryError, Result};

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

    /// Creates a key of at most 32 bytes. A shorter one is padded with zeros and has its length in the last byte, so
    /// shorter keys never equal each other by padding.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for more than 32 bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut key = [0; Self::BYTES];
        if bytes.len() > Self::BYTES {
            let why = format!("{} bytes are too many", bytes.len());
            return Err(MemoryError::invalid_of("key", why, "0 to 32 bytes").into());
        }
        key[..bytes.len()].copy_from_slice(bytes);
        if bytes.len() < Self::BYTES {
            key[Self::BYTES - 1] = bytes.len() as u8;
        }
        Ok(Self(key))
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
    fn short_keys_differ_by_their_length() {
        let of = |bytes: &[u8]| Key::from_bytes(bytes).unwrap();
        assert_ne!(of(b"a"), of(b"a\0"));
        assert_ne!(of(b""), of(b"\0"));
        assert_eq!(of(&[9; 32]), Key::new([9; 32]));
        assert_eq!(of(&[9; 31]).as_bytes()[31], 31);
        assert!(Key::from_bytes(&[0; 33]).is_err());
    }
}
