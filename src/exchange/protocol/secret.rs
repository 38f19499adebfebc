//! Bytes that may be secret: never displayed, wiped when dropped.

use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// The most bytes of a secret.
pub const MAX_SECRET: usize = 64;

/// A fabric handle or a session's token.
pub type Secret = Wiped<MAX_SECRET>;

/// At most `MAX` bytes that are never displayed, and wiped when dropped. Comparison takes constant time.
#[derive(Clone)]
pub struct Wiped<const MAX: usize>(Zeroizing<Vec<u8>>);

impl<const MAX: usize> Wiped<MAX> {
    /// Returns the value with these bytes; `None` for more than `MAX`.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= MAX).then(|| Self(Zeroizing::new(bytes.to_vec())))
    }

    /// Returns the bytes.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl<const MAX: usize> PartialEq for Wiped<MAX> {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl<const MAX: usize> Eq for Wiped<MAX> {}

impl<const MAX: usize> fmt::Debug for Wiped<MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wiped({} bytes, redacted)", self.0.len())
    }
}

/// As a byte string.
impl<const MAX: usize> Serialize for Wiped<MAX> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de, const MAX: usize> Deserialize<'de> for Wiped<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes<const MAX: usize>;
        impl<const MAX: usize> Visitor<'_> for Bytes<MAX> {
            type Value = Wiped<MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX} bytes")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
                Wiped::new(bytes).ok_or_else(|| E::invalid_length(bytes.len(), &self))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{decode, encode};

    #[test]
    fn secrets_are_bounded_and_not_shown() {
        let most = Secret::new(&[7; MAX_SECRET]).unwrap();
        assert_eq!(decode::<Secret>(&encode(&most)).unwrap(), most);
        assert!(Secret::new(&[7; MAX_SECRET + 1]).is_none());
        // A byte string of one byte more than is allowed.
        let mut long = vec![0x58, 65];
        long.extend([7; MAX_SECRET + 1]);
        assert!(decode::<Secret>(&long).is_err());
        let shown = format!("{:?}", Secret::new(b"key").unwrap());
        assert_eq!(shown, "Wiped(3 bytes, redacted)");
    }
}
