//! The message and the remedy of each error.

use std::fmt;

use super::Error;
use crate::driver::error_texts;
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

error_texts! { Error {
    Self::Memory(error) => ("{error}"), error.remedy();
    Self::NotTrusted { peer, why, cause: _cause } => ("{peer} is not trusted: {why}"), _cause.remedy();
    Self::Unreachable { peer, why, cause: _cause } => ("cannot connect to {peer}: {why}"), _cause.remedy();
    Self::PeerLost { peer, why } => ("{peer} is lost: {why}"),
        "check the peer's process and its log, and the network; what was imported from it before stays mapped until it is freed, but its \
         contents are no longer maintained";
    Self::Protocol { peer, detail } => ("{peer} breaks the protocol: {detail}"),
        "check that the address is an egmem exchange and that both ends run compatible versions";
    Self::TimedOut { what, after } => ("{what} took longer than {after:?}"),
        "check that the peer runs, or wait longer";
} }
