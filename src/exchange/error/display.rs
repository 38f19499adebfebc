//! The errors' texts.

use std::fmt::{self, Write};

use super::Error;
use crate::text::Escaping;

/// One line without control characters: fields may contain text of a peer, a file or the system.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // It escapes its own text.
            Self::Share(error) => error.fmt(f),
            other => other.describe(&mut Escaping(f)),
        }
    }
}

impl Error {
    fn describe(&self, f: &mut Escaping<'_, '_>) -> fmt::Result {
        match self {
            Self::Share(error) => write!(f, "{error}"),
            Self::Insecure { address } => write!(
                f,
                "{address} is not on this machine, and the connection would be without TLS"
            ),
            Self::Tls { what, detail } => write!(f, "TLS: {what}: {detail}"),
            Self::Refused {
                peer,
                what,
                reason,
                detail,
            } => write!(
                f,
                "{peer} refuses {what}: {reason}{}{detail}",
                if detail.is_empty() { "" } else { ": " }
            ),
            Self::Mismatched { name, peer, what } => {
                write!(f, "'{name}' of {peer} does not match: {what}")
            }
            Self::Stale { what, why } => write!(f, "{what} is stale: {why}"),
            Self::Import {
                what,
                peer,
                end,
                source,
            } => write!(f, "{what} of {peer} cannot be imported ({end}): {source}"),
            Self::DataPlane { what, peer, detail } => write!(
                f,
                "{what} is not the same memory here and at {peer}: {detail}"
            ),
            Self::NoCommonHandle { reasons } => {
                write!(f, "no handle type works for all: {}", reasons.join("; "))
            }
            Self::LimitReached { what, limit } => {
                write!(f, "the limit of {limit} {what} is reached")
            }
            Self::Directory { directory, detail } => write!(f, "directory {directory}: {detail}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::driver::Explained;
    use crate::text::is_unsafe;
    use crate::{End, Error, MemoryError, Refusal};

    /// Returns errors of every kind that contains text from elsewhere.
    fn all(t: &str) -> Vec<Error> {
        let s = || t.to_owned();
        vec![
            Error::invalid_of("argument", t, t),
            Error::Insecure { address: s() },
            Error::Tls {
                what: s(),
                detail: s(),
            },
            Error::Refused {
                peer: s(),
                what: s(),
                reason: Refusal::from_word(t),
                detail: s(),
            },
            Error::Stale {
                what: s(),
                why: s(),
            },
            Error::Import {
                what: s(),
                peer: s(),
                end: End::Here,
                source: Box::new(MemoryError::failed(s(), s())),
            },
            Error::DataPlane {
                what: s(),
                peer: s(),
                detail: s(),
            },
            Error::NoCommonHandle {
                reasons: vec![s(), s()],
            },
            Error::Directory {
                directory: s(),
                detail: s(),
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
            let refusal = Refusal::from_word(&text).to_string();
            prop_assert!(!refusal.contains(is_unsafe), "{refusal:?}");
        }
    }
}
