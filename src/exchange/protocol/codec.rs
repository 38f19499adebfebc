//! Messages to bytes and back.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

use super::scan::scan;
use crate::text::bounded;
use crate::{Error, Result};

/// How many bytes of a decoder's complaint are passed on: it may quote what the peer sent.
const MAX_DETAIL: usize = 160;

/// The bytes of a message, in CBOR; they are wiped when dropped, and no copy is left elsewhere.
///
/// Of a type that CBOR cannot write, of which this protocol has none, there are no bytes.
pub fn encode<T: Serialize + ?Sized>(message: &T) -> Zeroizing<Vec<u8>> {
    // Counted first: a vector that grows leaves its bytes behind in what it frees.
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

/// The message that these bytes are, all of them.
///
/// Of definite lengths, without tags, at most 16 levels deep; what is built is at most a small
/// multiple of the input, whatever that claims. What the decoder needs meanwhile is wiped.
///
/// # Errors
/// [`Error::Protocol`] of `peer` for anything else.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    scan(bytes).map_err(|(at, why)| fault(&format!("{why} at byte {at}")))?;
    // As long as the input, so that every string goes through it and nothing is left elsewhere.
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
    Error::Protocol {
        peer: "peer".into(),
        detail: bounded(detail, MAX_DETAIL),
    }
}

/// Counts what would be written.
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
