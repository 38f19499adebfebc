//! The errors' texts.

use std::fmt::{self, Write};

use super::{Error, Refusal};
use crate::text::Escaping;

/// One line without control characters: fields may contain text of a peer, a file or the system.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(&mut Escaping(f))
    }
}

impl Error {
    fn describe(&self, f: &mut Escaping<'_, '_>) -> fmt::Result {
        match self {
            // It escapes its own text.
            Self::Share(error) => fmt::Display::fmt(error, f.0),
            Self::Insecure { address } => write!(
                f,
                "{address} is not on this machine, and the connection would be without TLS"
            ),
            Self::TlsAtOneEnd { peer, here } => match here {
                true => write!(f, "{peer} does not speak TLS, and this process does"),
                false => write!(f, "{peer} speaks TLS, and this process does not"),
            },
            Self::Tls { what, detail } => write!(f, "TLS: {what}: {detail}"),
            Self::Refused {
                peer,
                what,
                reason,
                detail,
            } => {
                let colon = if detail.is_empty() { "" } else { ": " };
                match reason {
                    // Not for lack of a right.
                    Refusal::TimedOut => write!(f, "{what} at {peer} took too long{colon}{detail}"),
                    _ => write!(f, "{peer} refuses {what}: {reason}{colon}{detail}"),
                }
            }
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
            Self::Interrupted => f.write_str("the program broke the wait off"),
            Self::LimitReached { what, limit } => {
                write!(f, "the limit of {limit} {what} is reached")
            }
            Self::Directory { directory, detail } => write!(f, "directory {directory}: {detail}"),
        }
    }
}
