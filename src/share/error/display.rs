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
