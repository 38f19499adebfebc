//! Names of peers.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::spiffe;
use crate::{Error, Result};

/// The longest name of a certificate in bytes (RFC 1035).
const MAX_DNS: usize = 253;
/// The text of [`PeerName::Local`].
pub(super) const LOCAL: &str = "local";
/// The prefix of a user's number.
pub(super) const USER: &str = "uid:";

/// A peer, as the transport has authenticated it. Clones share the name, which may have 2048 bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PeerName {
    /// The first DNS name of its certificate, in lower case.
    Certificate(Arc<str>),
    /// The SPIFFE id of its certificate: `spiffe://trust-domain/path`. It takes precedence over a DNS name.
    Spiffe(Arc<str>),
    /// The user at the other end of a Unix socket.
    User(u32),
    /// A process that connects over plain TCP: on the loopback interface, any process of this machine.
    Local,
}

impl PeerName {
    /// Returns the peer whose certificate has this name.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a text that is not a DNS name, has a
    /// wildcard, or could be mistaken for another kind of peer (`local`).
    pub fn certificate(name: &str) -> Result<Self> {
        let name = name.to_ascii_lowercase();
        if name == LOCAL {
            return Err(Error::invalid("peer name", "local is not a name"));
        }
        check_dns(&name)?;
        Ok(Self::Certificate(name.into()))
    }

    /// Returns the peer with this SPIFFE id, such as `spiffe://cluster.example/ns/team-x/sa/trainer`.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a text that is not the SPIFFE id of a
    /// workload: another scheme, no path, a trust domain with upper-case letters or a port, a query, a
    /// fragment, an empty segment, more than 2048 bytes.
    pub fn spiffe(id: &str) -> Result<Self> {
        match spiffe::check(id) {
            Ok(()) => Ok(Self::Spiffe(id.into())),
            Err(why) => Err(Error::invalid("peer name", why)),
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Certificate(name) | Self::Spiffe(name) => f.write_str(name),
            Self::User(uid) => write!(f, "{USER}{uid}"),
            Self::Local => f.write_str(LOCAL),
        }
    }
}

impl FromStr for PeerName {
    type Err = Error;

    /// Parses a certificate's DNS name or SPIFFE id, `uid:1000` or `local`.
    fn from_str(text: &str) -> Result<Self> {
        if text == LOCAL {
            return Ok(Self::Local);
        }
        if text.starts_with(spiffe::SCHEME) {
            return Self::spiffe(text);
        }
        match text.strip_prefix(USER) {
            // `parse` also takes a plus sign.
            Some(uid) => match uid.parse() {
                Ok(number) if !uid.starts_with('+') => Ok(Self::User(number)),
                _ => Err(Error::invalid("peer name", "no user id after uid:")),
            },
            None => Self::certificate(text),
        }
    }
}

/// Checks for labels of letters, digits, `-` and `_`, with dots between.
pub(super) fn check_dns(name: &str) -> Result<()> {
    let label = |label: &str| {
        let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        (1..=63).contains(&label.len()) && label.bytes().all(good)
    };
    if name.len() > MAX_DNS || !name.split('.').all(label) {
        return Err(Error::invalid_of(
            "peer name",
            "it is not a DNS name",
            "labels of 1 to 63 letters, digits, '-' and '_' with dots between, 253 bytes at most",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cert(name: &str) -> PeerName {
        PeerName::certificate(name).unwrap()
    }

    #[test]
    fn peers_are_read_and_shown() {
        for (text, peer) in [
            ("a.b", cert("A.b")),
            ("uid:0", PeerName::User(0)),
            ("local", PeerName::Local),
        ] {
            assert_eq!(text.parse::<PeerName>().unwrap(), peer);
            assert_eq!(peer.to_string(), text);
        }
        for wrong in [
            "",
            "uid:",
            "uid:-1",
            "uid:+1",
            "uid:4294967296",
            "LOCAL",
            "a..b",
            ".a",
            "a.",
            "*",
            "*.a",
            "a b",
            "a\n",
            "a:b",
        ] {
            assert!(wrong.parse::<PeerName>().is_err(), "{wrong:?}");
        }
        assert!(PeerName::certificate("local").is_err());
        assert!(PeerName::certificate("uid:1").is_err());
    }
}
