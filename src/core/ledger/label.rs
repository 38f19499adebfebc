//! Names that programs give to their memory.

use std::fmt;
use std::sync::Arc;

use crate::text::cut;

/// A program's name for memory, such as `"kv cache"`. At most [`MAX`](Self::MAX) bytes are kept.
///
/// It is shown in the ledger, to processes of the same user, and in logs: it must not contain secrets.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Label(Arc<str>);

impl Label {
    /// The most bytes of a label; longer ones are cut between two characters.
    pub const MAX: usize = 128;

    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Label {
    fn from(text: &str) -> Self {
        Self(cut(text, Self::MAX).into())
    }
}

impl From<String> for Label {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::Label;

    #[test]
    fn long_labels_are_cut_between_characters() {
        assert_eq!(Label::from("kv cache").as_str(), "kv cache");
        let long = Label::from("ä".repeat(100) + "b");
        assert_eq!(long.as_str(), "ä".repeat(Label::MAX / 2));
        let odd = Label::from("x".to_owned() + &"ä".repeat(100));
        assert_eq!(odd.as_str().len(), Label::MAX - 1);
    }
}
