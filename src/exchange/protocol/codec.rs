//! Encodes and decodes messages.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
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
