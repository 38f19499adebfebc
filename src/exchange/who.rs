//! Lists of peers with a right.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::peer::{LOCAL, PeerName, USER, check_dns};
use super::spiffe;
use super::texts::Texts;
use crate::{Error, Result};

/// The most patterns in a [`Who`].
pub const MAX_PATTERNS: usize = 1024;

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
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for anything else, and for more than
    /// [`MAX_PATTERNS`].
    pub fn list<S: AsRef<str>>(patterns: impl IntoIterator<Item = S>) -> Result<Self> {
        let mut list = Texts::new();
        for (count, pattern) in patterns.into_iter().enumerate() {
            if count == MAX_PATTERNS {
                let why = format!("more than {MAX_PATTERNS}");
                return Err(Error::invalid("list of peers", why));
            }
            list.push(&normal(pattern.as_ref())?);
        }
        Ok(Self(list.shrunk()))
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
        }
        Self(self.0.shrunk())
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

    fn cert(name: &str) -> PeerName {
        PeerName::certificate(name).unwrap()
    }

    #[test]
    fn a_made_up_name_becomes_no_pattern_and_no_other_peer() {
        for name in ["*", "a*.test", "local", "uid:0", "spiffe://a.test/b"] {
            let who = Who::only(PeerName::Certificate(name.into()));
            assert!(who.0.iter().next().is_none(), "{name}");
        }
        assert!(Who::only(cert("a.test")).admits(&cert("a.test")));
        assert!(Who::only(PeerName::User(0)).admits(&PeerName::User(0)));
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
