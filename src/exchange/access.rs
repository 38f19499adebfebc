//! Names of peers, lists of them, owners of names, and the names that each peer may create.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::protocol::{MAX_NAME, check_prefix};
use crate::{Error, Refusal, Result};

/// Implements serde's traits by `Display` and `FromStr`.
macro_rules! serde_by_text {
    ($type:ty) => {
        impl serde::Serialize for $type {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(from)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use serde_by_text;

/// Parses digits: `parse` also takes a plus sign.
pub(crate) fn number<T: FromStr>(digits: &str) -> Option<T> {
    let digits = Some(digits).filter(|digits| !digits.starts_with('+'))?;
    digits.parse().ok()
}

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
        if !check_spiffe(id)? {
            let why = format!("the SPIFFE id '{id}' has no path, so it names no workload");
            return Err(Error::invalid("peer name", why));
        }
        Ok(Self::Spiffe(id.into()))
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
        if text.starts_with(SPIFFE) {
            return Self::spiffe(text);
        }
        match text.strip_prefix(USER) {
            Some(uid) => {
                let wrong = || Error::invalid("peer name", "no user id after uid:");
                number(uid).map(Self::User).ok_or_else(wrong)
            }
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

/// The prefix of a SPIFFE id.
const SPIFFE: &str = "spiffe://";
/// The longest SPIFFE id in bytes.
pub(crate) const MAX_SPIFFE: usize = 2048;
/// The longest trust domain in bytes.
const MAX_DOMAIN: usize = 255;

/// Checks a SPIFFE id with or without a path. Returns whether it has one: that of a workload has.
fn check_spiffe(id: &str) -> Result<bool> {
    let wrong = |why: &str| {
        let shown: String = id.chars().take(80).collect();
        let why = format!("'{shown}' is not a SPIFFE id: {why}");
        Err(Error::invalid("peer name", why))
    };
    if id.len() > MAX_SPIFFE {
        return wrong("it is longer than 2048 bytes");
    }
    let Some(rest) = id.strip_prefix(SPIFFE) else {
        return wrong("it does not begin with spiffe://");
    };
    let (domain, path) = match rest.split_once('/') {
        Some((domain, path)) => (domain, Some(path)),
        None => (rest, None),
    };
    let in_domain = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'-' | b'_');
    if !(1..=MAX_DOMAIN).contains(&domain.len()) || !domain.bytes().all(in_domain) {
        return wrong(
            "a trust domain has 1 to 255 lower-case letters, digits, '.', '-' and '_', and no port",
        );
    }
    let in_path = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    let segment = |segment: &str| {
        !segment.is_empty() && !matches!(segment, "." | "..") && segment.bytes().all(in_path)
    };
    if path.is_some_and(|path| !path.split('/').all(segment)) {
        return wrong(
            "its path has segments of letters, digits, '.', '-' and '_', none of them empty, '.' or '..'",
        );
    }
    Ok(path.is_some())
}

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

/// The most patterns in a [`PeerList`].
pub const MAX_PATTERNS: usize = 1024;

/// The pattern for every peer.
const ANYONE: &str = "*";
/// Between two patterns. None contains a comma or a space.
const BETWEEN: &str = ", ";

/// Returns a pattern's normal form: two patterns that admit the same peers by the same rule have the same.
fn normal(pattern: &str) -> Result<String> {
    if pattern == ANYONE {
        return Ok(pattern.into());
    }
    if let Some(suffix) = pattern.strip_prefix('*') {
        check_dns(suffix.strip_prefix('.').unwrap_or(""))?;
        return Ok(pattern.to_ascii_lowercase());
    }
    match pattern.strip_suffix("/*") {
        Some(base) if base.starts_with(SPIFFE) => check_spiffe(base).map(|_| pattern.into()),
        _ => Ok(pattern.parse::<PeerName>()?.to_string()),
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
        PeerName::User(_) | PeerName::Local => peer.to_string() == pattern,
    }
}

/// The peers with a right: a list of names and patterns.
///
/// ```
/// use egmem::exchange::{PeerName, PeerList};
///
/// let who = PeerList::list(["node7.cluster", "*.gpu.cluster", "uid:1000"])?;
/// assert!(who.admits(&"node7.cluster".parse()?));
/// assert!(who.admits(&"a.gpu.cluster".parse()?));
/// assert!(who.admits(&PeerName::User(1000)));
/// assert!(!who.admits(&"gpu.cluster".parse()?));
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
// In normal form, with [`BETWEEN`] between them: little more than their bytes.
pub struct PeerList(String);

impl PeerList {
    /// Returns the list of every peer that the transport admits.
    pub fn anyone() -> Self {
        Self(ANYONE.into())
    }

    /// Returns the empty list. The default.
    pub const fn nobody() -> Self {
        Self(String::new())
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
        let mut list = Self::nobody();
        for (count, pattern) in patterns.into_iter().enumerate() {
            if count == MAX_PATTERNS {
                let why = format!("more than {MAX_PATTERNS}");
                return Err(Error::invalid("list of peers", why));
            }
            list.push(&normal(pattern.as_ref())?);
        }
        list.0.shrink_to_fit();
        Ok(list)
    }

    /// Returns the list of this peer only.
    pub fn only(peer: PeerName) -> Self {
        Self::nobody().and(peer)
    }

    /// Adds a peer to the list.
    pub fn and(mut self, peer: PeerName) -> Self {
        let name = peer.to_string();
        // A name that a program made up must become neither a pattern nor another peer's name.
        if name.parse::<PeerName>().is_ok_and(|named| named == peer) {
            self.push(&name);
        }
        self.0.shrink_to_fit();
        self
    }

    fn push(&mut self, pattern: &str) {
        if !self.0.is_empty() {
            self.0.push_str(BETWEEN);
        }
        self.0.push_str(pattern);
    }

    /// Returns the patterns, as [`list`](Self::list) takes them.
    pub(super) fn patterns(&self) -> impl Iterator<Item = &str> {
        self.0.split(BETWEEN).filter(|pattern| !pattern.is_empty())
    }

    /// Returns whether the list admits the peer.
    pub fn admits(&self, peer: &PeerName) -> bool {
        self.patterns().any(|pattern| admits(pattern, peer))
    }
}

impl fmt::Display for PeerList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for PeerList {
    type Err = Error;

    /// Parses patterns with a comma and a space between them; the empty text is nobody.
    fn from_str(text: &str) -> Result<Self> {
        let patterns = text.split(BETWEEN).filter(|_| !text.is_empty());
        Self::list(patterns)
    }
}

/// As a list of patterns.
impl Serialize for PeerList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.patterns())
    }
}

impl<'de> Deserialize<'de> for PeerList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let patterns = Vec::<String>::deserialize(deserializer)?;
        Self::list(patterns).map_err(de::Error::custom)
    }
}

/// Stands for the peer's own name in a prefix.
const PEER: &str = "{peer}";
/// The prefix of a peer without a rule.
const OWN: &str = "{peer}/";
/// The most prefixes that a refusal lists.
const SHOWN: usize = 8;

/// Which names each peer may create: those with one of the peer's prefixes.
///
/// A peer without a [rule](Self::rule) has one prefix: its own name and a slash, such as `uid:1000/`. For a
/// SPIFFE id a colon comes before the slash, as in `spiffe://td/a:/`: ids contain slashes, and without the
/// colon `spiffe://td/a` could create names of `spiffe://td/a/b`. No other peer can create a name there,
/// because no other peer's prefix begins with `uid:1000/` or `spiffe://td/a:/`.
///
/// ```
/// use egmem::exchange::{Namespaces, PeerName, PeerList};
///
/// let names = Namespaces::own().rule(PeerList::list(["*.gpu.cluster"])?, ["kv/", "{peer}/"])?;
/// let (node, user): (PeerName, _) = ("a.gpu.cluster".parse()?, PeerName::User(1000));
/// assert_eq!(names.prefixes(&node), ["kv/", "a.gpu.cluster/"]);
/// assert!(names.admits(&user, "uid:1000/weights") && !names.admits(&user, "kv/1"));
/// # Ok::<(), egmem::exchange::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespaces(Vec<(PeerList, Vec<String>)>);

impl Namespaces {
    /// Allows each peer to create names under its own name only. The default.
    pub const fn own() -> Self {
        Self(Vec::new())
    }

    /// Gives the peers that `who` admits these prefixes instead of their own; several rules for a peer add
    /// up. `{peer}` in a prefix stands for the peer's name, with a colon after a SPIFFE id. The empty prefix
    /// allows every name.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no prefix, and for one that is not empty
    /// but has characters that names cannot have or no slash at its end. Without the slash `{peer}` could match the
    /// names of a peer with a longer name.
    pub fn rule<S: Into<String>>(
        mut self,
        who: PeerList,
        prefixes: impl IntoIterator<Item = S>,
    ) -> Result<Self> {
        let prefixes: Vec<String> = prefixes.into_iter().map(Into::into).collect();
        if prefixes.is_empty() {
            return Err(Error::invalid("prefixes", "the list is empty"));
        }
        for prefix in &prefixes {
            check_own(prefix)?;
        }
        self.0.push((who, prefixes));
        Ok(self)
    }

    /// Returns the prefixes of a peer, in the order of the rules.
    pub fn prefixes(&self, peer: &PeerName) -> Vec<String> {
        let rules = self.0.iter().filter(|(who, _)| who.admits(peer));
        // Followed by a slash, none is a prefix of another's.
        let peer = match peer {
            PeerName::Spiffe(id) => format!("{id}:"),
            other => other.to_string(),
        };
        let mut filled: Vec<String> = Vec::new();
        for prefix in rules.flat_map(|(_, prefixes)| prefixes) {
            let prefix = prefix.replace(PEER, &peer);
            if !filled.contains(&prefix) {
                filled.push(prefix);
            }
        }
        if filled.is_empty() {
            filled.push(OWN.replace(PEER, &peer));
        }
        filled
    }

    /// Returns whether the peer may create this name.
    pub fn admits(&self, peer: &PeerName, name: &str) -> bool {
        self.check(peer, name).is_ok()
    }

    /// Checks that the peer may create this name, for an answer to the peer.
    ///
    /// # Errors
    /// [`Refusal::WrongPrefix`], with a message that lists the prefixes that this peer may use.
    pub fn check(&self, peer: &PeerName, name: &str) -> Result<(), (Refusal, String)> {
        let prefixes = self.prefixes(peer);
        let under = |prefix: &String| name.len() > prefix.len() && name.starts_with(&**prefix);
        if prefixes.iter().any(under) {
            return Ok(());
        }
        if prefixes.iter().all(|prefix| prefix.len() >= MAX_NAME) {
            let why = format!(
                "the name of this peer is too long for names below it, which have at most {MAX_NAME} \
                 bytes; give it a shorter prefix"
            );
            return Err((Refusal::WrongPrefix, why));
        }
        let shown = &prefixes[..prefixes.len().min(SHOWN)];
        let mut why = format!("{peer} may create names only under {}", shown.join(", "));
        if prefixes.len() > SHOWN {
            why += &format!(" and {} more prefixes", prefixes.len() - SHOWN);
        }
        Err((Refusal::WrongPrefix, why))
    }
}

/// Checks a prefix of a rule.
fn check_own(prefix: &str) -> Result<()> {
    let wrong = |why: &str| Error::invalid("prefix", format!("'{prefix}': {why}"));
    if prefix.is_empty() {
        return Ok(());
    }
    if !prefix.ends_with('/') {
        return Err(wrong("it does not end with a slash"));
    }
    if prefix.replace(PEER, "").contains(['{', '}']) {
        return Err(wrong("only {peer} is replaced"));
    }
    check_prefix(&prefix.replace(PEER, "")).map_err(|error| wrong(&error.to_string()))
}

#[cfg(test)]
mod tests;
