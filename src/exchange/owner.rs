//! The owner of a name.

use std::fmt;
use std::str::FromStr;

use super::PeerName;
use crate::by_text::serde_by_text;
use crate::{Error, Result};

/// The text of [`Owner::Server`]. Peer names contain no `@`.
const SERVER: &str = "@server";

/// The peer that published a name, as the server authenticated it at the name's creation.
///
/// The text form is `@server` or the [`PeerName`].
///
/// ```
/// use egmem::exchange::{Owner, PeerName};
///
/// assert_eq!("uid:1000".parse::<Owner>()?, Owner::Peer(PeerName::User(1000)));
/// assert_eq!(Owner::Server.to_string(), "@server");
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// The server itself: the process that exports its own memory, or a service's configuration.
    #[default]
    Server,
    /// The peer that had the name created.
    Peer(PeerName),
}

impl Owner {
    /// Returns whether the server itself is the owner.
    pub const fn is_server(&self) -> bool {
        matches!(self, Self::Server)
    }

    /// Returns the owner, unless it is the server itself.
    pub const fn peer(&self) -> Option<&PeerName> {
        match self {
            Self::Server => None,
            Self::Peer(peer) => Some(peer),
        }
    }
}

impl From<PeerName> for Owner {
    fn from(peer: PeerName) -> Self {
        Self::Peer(peer)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server => f.write_str(SERVER),
            Self::Peer(peer) => write!(f, "{peer}"),
        }
    }
}

impl FromStr for Owner {
    type Err = Error;

    /// Parses `@server`, or a peer name as [`PeerName`] does.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            SERVER => Ok(Self::Server),
            peer => peer.parse().map(Self::Peer),
        }
    }
}

serde_by_text!(Owner);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_reads_back_and_other_texts_are_refused() {
        for text in ["@server", "uid:7", "local", "node-a.example.org", "server"] {
            let owner: Owner = text.parse().unwrap();
            assert_eq!(owner.to_string(), text);
            assert_eq!(owner.is_server(), text == SERVER);
            let json = serde_json::to_string(&owner).unwrap();
            assert_eq!(serde_json::from_str::<Owner>(&json).unwrap(), owner);
        }
        for text in ["", "@", "@SERVER", "uid:", "a b", "a\u{1b}[2J"] {
            assert!(text.parse::<Owner>().is_err(), "{text:?}");
            let json = serde_json::to_string(text).unwrap();
            assert!(serde_json::from_str::<Owner>(&json).is_err(), "{text:?}");
        }
    }
}
