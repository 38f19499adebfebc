//! The errors' texts.

use std::fmt::{self, Write};

use super::Error;
use crate::text::Escaping;

/// One line without control characters: fields may contain text of a peer or the system.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // It escapes its own text, and a heap's damage has several lines.
            Self::Memory(error) => error.fmt(f),
            other => other.describe(&mut Escaping(f)),
        }
    }
}

impl Error {
    fn describe(&self, f: &mut Escaping<'_, '_>) -> fmt::Result {
        match self {
            Self::Memory(error) => write!(f, "{error}"),
            Self::NotTrusted { peer, why, .. } => write!(f, "{peer} is not trusted: {why}"),
            Self::Unreachable { peer, why, .. } => write!(f, "cannot connect to {peer}: {why}"),
            Self::PeerLost { peer, why } => write!(f, "{peer} is lost: {why}"),
            Self::Protocol { peer, detail } => write!(f, "{peer} breaks the protocol: {detail}"),
            Self::TimedOut { what, after } => write!(f, "{what} took longer than {after:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use crate::driver::Explained;
    use crate::text::is_unsafe;
    use crate::{Distrust, Error, MemoryError, Unreachable};

    /// Returns errors of every kind that contains text from elsewhere.
    fn all(t: &str) -> Vec<Error> {
        let s = || t.to_owned();
        vec![
            MemoryError::invalid("argument", t).into(),
            Error::NotTrusted {
                peer: s(),
                cause: Distrust::Name,
                why: s(),
            },
            Error::Unreachable {
                peer: s(),
                cause: Unreachable::Network,
                why: s(),
            },
            Error::PeerLost {
                peer: s(),
                why: s(),
            },
            Error::Protocol {
                peer: s(),
                detail: s(),
            },
            Error::TimedOut {
                what: s(),
                after: Duration::ZERO,
            },
        ]
    }

    proptest! {
        #[test]
        fn no_text_of_an_error_steers_a_terminal(text in "[\\x00-\\x1f\\x7f-\\u{9f}\u{61c}\u{200e}-\u{200f}\u{2028}-\u{202e}\u{2066}-\u{2069}a-zä]{1,24}") {
            for error in all(&text) {
                let shown = error.to_string();
                prop_assert!(!shown.contains(is_unsafe), "{shown:?}");
                let shown = Explained(&error).to_string();
                prop_assert!(!shown.contains(is_unsafe), "{shown:?}");
            }
        }
    }
}
