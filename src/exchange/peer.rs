//! Names of peers, and lists of peers with a right.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::spiffe;
use super::texts::Texts;
use crate::{Error, Result};

/// The most patterns in a [`Who`].
pub const MAX_PATTERNS: usize = 1024;
/// The longest name of a certificate in bytes (RFC 1035).
const MAX_DNS: usize = 253;
/// The text of [`PeerName::Local`].
const LOCAL: &str = "local";
/// The prefix of a user's number.
const USER: &str = "uid:";

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
            Some(uid) if uid.bytes().all(|byte| byte.is_ascii_digit()) => uid
                .parse()
                .map(Self::User)
                .map_err(|_| Error::invalid("peer name", "no user id after uid:")),
            Some(_) => Err(Error::invalid("peer name", "no user id after uid:")),
            None => Self::certificate(text),
        }
    }
}

/// Checks for labels of letters, digits, `-` and `_`, with dots between.
fn check_dns(name: &str) -> Result<()> {
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

/// The pattern for every peer.
const ANYONE: &str = "*";

/// Returns a pattern's normal form: two patterns that admit the same peers by the same rule have the same.
fn normal(pattern: &str) -> Result<String> {
    if pattern == ANYONE {
        return Ok(pattern.into());
    }
    if let Some(suffix) = pattern.strip_prefix('*') {
        check_dns(suffix.strip_prefix('.').unwrap_or(""))?;
        return Ok(pattern.to_ascii_lowercase());
    }
    let below = pattern.strip_suffix("/*");
    match below.filter(|base| base.starts_with(spiffe::SCHEME)) {
        None => Ok(pattern.parse::<PeerName>()?.to_string()),
        Some(base) => match spiffe::check_any(base) {
            Ok(_) => Ok(pattern.into()),
            Err(why) => Err(Error::invalid("peer name", why)),
        },
    }
}

/// Returns whether a pattern in its normal form admits the peer. No peer's name contains a `*`.
fn admits(pattern: &str, peer: &PeerName) -> bool {
    if pattern == ANYONE {
        return true;
    }
    match peer {
        PeerName::Certificate(name) => match pattern.strip_prefix('*') {
            Some(suffix) => name.len() > suffix.len() && name.ends_with(suffix),
            None => **name == *pattern,
        },
        PeerName::Spiffe(id) => match pattern.strip_suffix('*') {
            Some(prefix) => id.len() > prefix.len() && id.starts_with(prefix),
            None => **id == *pattern,
        },
        PeerName::User(uid) => {
            let user = pattern.strip_prefix(USER).and_then(|uid| uid.parse().ok());
            user == Some(*uid)
        }
        PeerName::Local => pattern == LOCAL,
    }
}

/// The peers with a right: a list of names and patterns.
///
/// ```
/// use egmem::exchange::{PeerName, Who};
///
/// let who = Who::list(["node7.cluster", "*.gpu.cluster", "uid:1000"])?;
/// assert!(who.admits(&"node7.cluster".parse()?));
/// assert!(who.admits(&"a.gpu.cluster".parse()?));
/// assert!(who.admits(&PeerName::User(1000)));
/// assert!(!who.admits(&"gpu.cluster".parse()?));
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Who(Texts);

impl Who {
    /// Returns the list of every peer that the transport admits.
    pub fn anyone() -> Self {
        Self(Texts::from_iter([ANYONE]))
    }

    /// Returns the empty list. The default.
    pub const fn nobody() -> Self {
        Self(Texts::new())
    }

    /// Returns the list of the peers that match one of these patterns: a certificate's name; `*.suffix` for
    /// certificate names with that suffix and any number of further labels; a SPIFFE id;
    /// `spiffe://domain/path/*` or `spiffe://domain/*` for SPIFFE ids below that path; `uid:1000` for a user
    /// at a Unix socket; `local` for plain TCP; or `*` for any peer.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for anything else, and for more than [`MAX_PATTERNS`].
    pub fn list<S: AsRef<str>>(patterns: impl IntoIterator<Item = S>) -> Result<Self> {
        let mut list = Texts::new();
        for (count, pattern) in patterns.into_iter().enumerate() {
            if count == MAX_PATTERNS {
                let why = format!("more than {MAX_PATTERNS}");
                return Err(Error::invalid("list of peers", why));
            }
            list.push(&normal(pattern.as_ref())?);
        }
        list.shrink();
        Ok(Self(list))
    }

    /// Returns the list of this peer only.
    pub fn only(peer: PeerName) -> Self {
        Self::nobody().and(peer)
    }

    /// Adds a peer to the list.
    pub fn and(mut self, peer: PeerName) -> Self {
        let name = peer.to_string();
        // A name that a program made up must become neither a pattern nor another peer's name.
        let others = name.parse::<PeerName>().is_ok_and(|named| named != peer);
        if !name.contains('*') && !others {
            self.0.push(&name);
            self.0.shrink();
        }
        self
    }

    /// Returns whether one of the patterns is `*`.
    pub(super) fn is_anyone(&self) -> bool {
        self.0.iter().any(|pattern| pattern == ANYONE)
    }

    /// Returns the patterns, as [`list`](Self::list) takes them.
    pub(super) fn patterns(&self) -> &Texts {
        &self.0
    }

    /// Returns whether the list admits the peer.
    pub fn admits(&self, peer: &PeerName) -> bool {
        self.0.iter().any(|pattern| admits(pattern, peer))
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, pattern) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{pattern}")?;
        }
        Ok(())
    }
}

/// As a list of patterns.
impl Serialize for Who {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.patterns().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Who {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let patterns = Vec::<String>::deserialize(deserializer)?;
        Self::list(patterns).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_made_up_name_becomes_no_pattern_and_no_other_peer() {
        for name in ["*", "a*.test", "local", "uid:0", "spiffe://a.test/b"] {
            let who = Who::only(PeerName::Certificate(name.into()));
            assert!(who.0.iter().next().is_none(), "{name}");
        }
        assert!(Who::only(cert("a.test")).admits(&cert("a.test")));
        assert!(Who::only(PeerName::User(0)).admits(&PeerName::User(0)));
    }

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

    #[test]
    fn patterns_admit_the_peers_that_they_name() {
        let who = Who::list(["a.b", "*.c.d", "uid:7"]).unwrap();
        for yes in [
            cert("a.b"),
            cert("A.B"),
            cert("x.c.d"),
            cert("x.y.c.d"),
            PeerName::User(7),
        ] {
            assert!(who.admits(&yes), "{yes}");
        }
        for no in [
            cert("c.d"),
            cert("xc.d"),
            cert("b"),
            PeerName::User(8),
            PeerName::Local,
        ] {
            assert!(!who.admits(&no), "{no}");
        }
        assert!(Who::anyone().admits(&PeerName::Local));
        assert!(Who::list(["*"]).unwrap().admits(&cert("x")));
        assert!(!Who::nobody().admits(&PeerName::User(0)));
        let made_up = PeerName::Certificate("*".into());
        assert!(!Who::only(made_up).admits(&PeerName::Local));
        assert!(Who::list(["local"]).unwrap().admits(&PeerName::Local));
        assert!(
            Who::only(cert("a"))
                .and(PeerName::Local)
                .admits(&PeerName::Local)
        );
    }

    #[test]
    fn patterns_that_match_nothing_are_refused() {
        for wrong in ["", "**", "*a", "*.", "a.*", "uid:x", "*.*"] {
            assert!(Who::list([wrong]).is_err(), "{wrong:?}");
        }
        assert!(Who::list(vec!["a"; MAX_PATTERNS + 1]).is_err());
    }

    #[test]
    fn spiffe_ids_are_admitted_one_by_one_and_below_a_path() {
        let peer = |id: &str| id.parse::<PeerName>().unwrap();
        let who = Who::list(["spiffe://td/a", "spiffe://td/ns/x/*", "spiffe://other/*"]).unwrap();
        for yes in [
            "spiffe://td/a",
            "spiffe://td/ns/x/sa/y",
            "spiffe://other/any",
        ] {
            assert_eq!(peer(yes).to_string(), yes);
            assert!(who.admits(&peer(yes)), "{yes}");
        }
        // Paths are case-sensitive, and a path is not below itself.
        for no in [
            "spiffe://td/A",
            "spiffe://td/a/b",
            "spiffe://td/ns/x",
            "spiffe://td/ns/xy/z",
            "spiffe://others/any",
        ] {
            assert!(!who.admits(&peer(no)), "{no}");
        }
        assert!(!who.admits(&cert("td")));
        assert!(
            !Who::list(["*.td"])
                .unwrap()
                .admits(&peer("spiffe://x.td/a"))
        );
        assert!(Who::anyone().admits(&peer("spiffe://td/a")));
        for wrong in [
            "spiffe://td",
            "spiffe://*",
            "spiffe://td/a*",
            "spiffe://td/*/b",
            "spiffe:///*",
        ] {
            assert!(Who::list([wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_list_reads_back() {
        let list = ["*", "*.c.d", "uid:7", "local", "a.b", "spiffe://t/a/*"];
        let who = Who::list(list).unwrap();
        let json = serde_json::to_string(&who).unwrap();
        assert_eq!(
            json,
            r#"["*","*.c.d","uid:7","local","a.b","spiffe://t/a/*"]"#
        );
        assert_eq!(serde_json::from_str::<Who>(&json).unwrap(), who);
        assert_eq!(who.to_string(), list.join(", "));
    }
}
