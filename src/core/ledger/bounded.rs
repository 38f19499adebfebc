//! Texts of other processes, cut when they are read: a process may send anything.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};

/// The most bytes of a name, a path or a label that is read.
pub const MAX_NAME: usize = 512;

/// Reads a text, of which at most [`MAX_NAME`] bytes are kept: it is cut between two characters.
///
/// # Errors
/// The deserializer's.
pub fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text::<D, MAX_NAME>(from)
}

/// As [`name`], for a text that may be missing.
///
/// # Errors
/// The deserializer's.
pub fn optional_name<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    struct Name(#[serde(deserialize_with = "name")] String);
    Ok(Option::<Name>::deserialize(from)?.map(|Name(text)| text))
}

/// Reads a text, of which at most `MOST` bytes are kept.
pub(super) fn text<'de, D: Deserializer<'de>, const MOST: usize>(
    from: D,
) -> Result<String, D::Error> {
    struct Cut<const MOST: usize>;

    impl<const MOST: usize> Visitor<'_> for Cut<MOST> {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text")
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
            Ok(cut(text, MOST).to_owned())
        }
    }
    from.deserialize_str(Cut::<MOST>)
}

/// Returns the beginning of a text: at most `most` bytes, in whole characters.
pub fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
