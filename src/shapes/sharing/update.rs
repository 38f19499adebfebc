//! The exporter's update about a vector: a line of text before the chunks.

use std::fmt;

use crate::{Error, Result};

/// The most bytes of the text.
pub(super) const MAX_TEXT: usize = 256;

/// The most chunks of one update; more come in several. Each has one fd.
pub(super) const MAX_CHUNKS: usize = 32;

/// The beginning of the text: the kind of message and its version.
const KIND: &str = "egmem-growable 1";

/// A vector, as far as it was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Update {
    /// The size of an element in bytes.
    pub(super) element: u64,
    /// The most elements that the vector can have.
    pub(super) max_len: u64,
    /// Elements at the end of this update.
    pub(super) len: u64,
    /// Bytes of the chunks that were sent before.
    pub(super) before: u64,
    /// Chunks that follow.
    pub(super) chunks: u64,
    /// Updates that follow at once.
    pub(super) more: u64,
}

impl fmt::Display for Update {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            element,
            max_len,
            len,
            before,
            chunks,
            more,
        } = self;
        write!(
            f,
            "{KIND} {element} {max_len} {len} {before} {chunks} {more}"
        )
    }
}

impl Update {
    /// Reads a text of another process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another kind of text, and for more chunks than an update has.
    pub(super) fn read(text: &str) -> Result<Self> {
        let wrong = |why: &str| Error::invalid("update of a growable vector", why);
        let rest = text
            .strip_prefix(KIND)
            .ok_or_else(|| wrong("the other process sent another kind of text"))?;
        let numbers: Vec<u64> = rest
            .split_ascii_whitespace()
            .map_while(|word| word.parse().ok())
            .collect();
        let &[element, max_len, len, before, chunks, more] = &numbers[..] else {
            return Err(wrong("the other process sent other than six numbers"));
        };
        if chunks > MAX_CHUNKS as u64 || (more > 0 && chunks == 0) {
            return Err(wrong(
                "the other process announced too many chunks, or none",
            ));
        }
        Ok(Self {
            element,
            max_len,
            len,
            before,
            chunks,
            more,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UPDATE: Update = Update {
        element: 4,
        max_len: u64::MAX,
        len: 7,
        before: 2 << 20,
        chunks: 3,
        more: 1,
    };

    #[test]
    fn an_update_is_read_as_it_was_written() {
        let text = UPDATE.to_string();
        assert!(text.len() < MAX_TEXT);
        assert_eq!(Update::read(&text), Ok(UPDATE));
    }

    #[test]
    fn invalid_updates_are_refused() {
        for text in [
            "",
            "egmem-growable 2 4 9 7 0 0 0",
            "egmem-growable 1",
            "egmem-growable 1 4 9 7 0 0",
            "egmem-growable 1 4 9 7 0 0 0 0",
            "egmem-growable 1 4 9 7 0 0 -1",
            "egmem-growable 1 4 9 7 0 x 0",
            "egmem-growable 1 4 9 7 0 33 0",
            "egmem-growable 1 4 9 7 0 0 1",
            "egmem-growable 1 4 9 7 0 0 99999999999999999999",
        ] {
            let error = Update::read(text).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{text}");
        }
    }
}
