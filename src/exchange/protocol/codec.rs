//! Encodes and decodes messages, and checks the form of names.

use std::{fmt, io};

use serde::de::{self, DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use crate::text::bounded;
use crate::{Error, Result};

/// How many bytes of a decoder's message an error contains: it may quote the peer.
const MAX_DETAIL: usize = 160;

/// Encodes a message in CBOR; the bytes are wiped when dropped, and no copy is left elsewhere.
///
/// Returns no bytes for a type that CBOR cannot represent; this protocol has none.
pub fn encode<T: Serialize + ?Sized>(message: &T) -> Zeroizing<Vec<u8>> {
    // Counted first: a vector that grows leaves its bytes behind in freed memory.
    let mut count = Count(0);
    let mut bytes = Zeroizing::new(Vec::new());
    if ciborium::into_writer(message, &mut count).is_ok() {
        bytes.reserve_exact(count.0);
        if ciborium::into_writer(message, &mut *bytes).is_err() {
            bytes.clear();
        }
    }
    bytes
}

/// Decodes a message from exactly these bytes.
///
/// The result takes at most a small multiple of the input's size, for any lengths that the input claims. The decoder's
/// scratch memory is wiped.
///
/// # Errors
/// [`Protocol`](crate::ShareError::Protocol) of `peer` for anything else.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    // As long as the input, so that every string goes through it and no copy is left elsewhere.
    let mut scratch = Zeroizing::new(vec![0; bytes.len().max(64)]);
    let mut rest = bytes;
    let message = ciborium::de::from_reader_with_buffer(&mut rest, &mut scratch)
        .map_err(|error| fault(&error.to_string()))?;
    if !rest.is_empty() {
        return Err(fault("bytes after the message"));
    }
    Ok(message)
}

fn fault(detail: &str) -> Error {
    Error::protocol("peer", bounded(detail, MAX_DETAIL))
}

/// Counts the bytes that would be written.
struct Count(usize);

impl io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The most bytes of a secret.
pub const MAX_SECRET: usize = 64;

/// A fabric handle or a session's token: at most [`MAX_SECRET`] bytes that are never displayed, and wiped when dropped.
/// Comparison takes constant time.
#[derive(Clone)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Returns the value with these bytes; `None` for more than [`MAX_SECRET`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= MAX_SECRET).then(|| Self(Zeroizing::new(bytes.to_vec())))
    }

    /// Returns the bytes.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({} bytes, redacted)", self.0.len())
    }
}

/// As a byte string.
impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Secret;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_SECRET} bytes")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
                Secret::new(bytes).ok_or_else(|| E::invalid_length(bytes.len(), &self))
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

/// The longest name in bytes; names consist of `A–Z a–z 0–9 . _ - / :` and have at least one byte.
pub const MAX_NAME: usize = 255;
/// The form of names, for errors.
const VALID: &str = "1 to 255 of A–Z a–z 0–9 . _ - / :";

/// Checks a name of memory: 1 to [`MAX_NAME`] bytes of `A–Z a–z 0–9 . _ - / :`.
///
/// ```
/// use egmem::exchange::protocol::check_name;
///
/// assert!(check_name("job-7/rank:0").is_ok());
/// assert!(check_name("").is_err());
/// assert!(check_name("a b").is_err());
/// ```
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) with the fault, without the name.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::invalid_of("name", "it is empty", VALID));
    }
    check_prefix(name)
}

/// Checks a prefix of names: as [`check_name`], but it may be empty.
///
/// # Errors
/// As [`check_name`].
pub fn check_prefix(prefix: &str) -> Result<()> {
    if prefix.len() > MAX_NAME {
        let why = format!("it has {} bytes", prefix.len());
        return Err(Error::invalid_of("name", why, VALID));
    }
    let is_bad = |byte: u8| !byte.is_ascii_alphanumeric() && !b"._-/:".contains(&byte);
    if let Some(at) = prefix.bytes().position(is_bad) {
        let why = format!("byte {at} may not be in a name");
        return Err(Error::invalid_of("name", why, VALID));
    }
    Ok(())
}
