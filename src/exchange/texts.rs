//! Lists of texts in one allocation.

use std::fmt;

use serde::{Serialize, Serializer};

/// Follows each text. It is in no name and in no pattern.
const END: char = '\0';
/// Replaces [`END`] in a text. It is as short, so that a peer's texts do not grow, and in no pattern either.
const INSTEAD: char = '\u{1}';

/// A list of texts that takes only a few bytes more than the texts themselves.
///
/// A peer chooses how many texts it sends and how short they are. Each `String` would take 24 bytes and an
/// allocation, for two bytes of a frame.
///
/// ```
/// use egmem::exchange::protocol::Texts;
///
/// let texts = Texts::from_iter(["uid:1000", "*.cluster"]);
/// assert_eq!(texts.iter().collect::<Vec<_>>(), ["uid:1000", "*.cluster"]);
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Texts(String);

impl Texts {
    /// Creates an empty list.
    pub const fn new() -> Self {
        Self(String::new())
    }

    /// Appends a text; a NUL in it becomes U+0001.
    pub fn push(&mut self, text: &str) {
        // Once for both: `END` alone would double the capacity.
        self.0.reserve(text.len() + END.len_utf8());
        let mut pieces = text.split(END);
        self.0.push_str(pieces.next().unwrap_or_default());
        for piece in pieces {
            self.0.push(INSTEAD);
            self.0.push_str(piece);
        }
        self.0.push(END);
    }

    /// Iterates over the texts, in order.
    pub fn iter(&self) -> Iter<'_> {
        self.0.split_terminator(END)
    }

    /// Returns the number of texts.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Returns whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the bytes that the list has allocated.
    pub(crate) fn bytes(&self) -> usize {
        self.0.capacity()
    }

    /// Releases memory that the texts do not need.
    pub(crate) fn shrunk(mut self) -> Self {
        self.0.shrink_to_fit();
        self
    }
}

/// The texts of a list: see [`Texts::iter`].
pub type Iter<'a> = std::str::SplitTerminator<'a, char>;

impl<'a> IntoIterator for &'a Texts {
    type Item = &'a str;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

impl<S: AsRef<str>> FromIterator<S> for Texts {
    fn from_iter<I: IntoIterator<Item = S>>(texts: I) -> Self {
        let mut all = Self::new();
        texts.into_iter().for_each(|text| all.push(text.as_ref()));
        all.shrunk()
    }
}

impl fmt::Debug for Texts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

/// Serializes as a list of known length, which CBOR needs.
impl Serialize for Texts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde::ser::SerializeSeq;
        let mut list = serializer.serialize_seq(Some(self.len()))?;
        self.iter()
            .try_for_each(|text| list.serialize_element(text))?;
        list.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn short_texts_take_little_more_than_their_bytes() {
        let texts = Texts::from_iter(["ab"; 1024]);
        assert_eq!((texts.len(), texts.bytes()), (1024, 3 * 1024));
        assert_eq!(Texts::from_iter([""; 1024]).bytes(), 1024);
        assert!(Texts::new().is_empty());
    }

    #[test]
    fn a_text_takes_one_byte_more_even_while_the_list_grows() {
        for text in ["a".repeat(4096), "\0".repeat(4096)] {
            let mut list = Texts::new();
            list.push(&text);
            assert_eq!(list.bytes(), 4097);
            assert_eq!(
                list.iter().collect::<Vec<_>>(),
                [text.replace(END, "\u{1}")]
            );
        }
    }

    proptest! {
        #[test]
        fn texts_of_any_length_read_back(
            texts in vec(prop_oneof!["\\PC{0,80}", (0_usize..70_000).prop_map(|len| "ü".repeat(len))], 0..9)
        ) {
            let list = Texts::from_iter(&texts);
            prop_assert_eq!(list.iter().collect::<Vec<_>>(), texts.iter().collect::<Vec<_>>());
            prop_assert_eq!(list.len(), texts.len());
            let bytes: usize = texts.iter().map(|text| text.len() + 4).sum();
            prop_assert!(list.bytes() <= bytes);
        }
    }
}
