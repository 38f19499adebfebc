//! Which names a peer may create.

use super::protocol::{MAX_NAME, check_prefix};
use super::{PeerList, PeerName};
use crate::{Error, Refusal, Result};

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
            check(prefix)?;
        }
        self.0.push((who, prefixes));
        Ok(self)
    }

    /// Returns the prefixes of a peer, in the order of the rules.
    pub fn prefixes(&self, peer: &PeerName) -> Vec<String> {
        let rules = self.0.iter().filter(|(who, _)| who.admits(peer));
        let peer = part(peer);
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
        let prefixes = self.prefixes(peer);
        let under =
            |prefix: &String| name.len() > prefix.len() && name.starts_with(prefix.as_str());
        prefixes.iter().any(under)
    }

    /// Checks that the peer may create this name, for an answer to the peer.
    ///
    /// # Errors
    /// [`Refusal::WrongPrefix`], with a message that lists the prefixes that this peer may use.
    pub fn check(&self, peer: &PeerName, name: &str) -> Result<(), (Refusal, String)> {
        if self.admits(peer, name) {
            return Ok(());
        }
        let prefixes = self.prefixes(peer);
        if prefixes.iter().all(|prefix| prefix.len() >= MAX_NAME) {
            let why = format!(
                "the name of this peer is too long for names below it, which have at most {MAX_NAME} \
                 bytes; give it a shorter prefix"
            );
            return Err((Refusal::WrongPrefix, why));
        }
        let more = match prefixes.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more prefixes"),
        };
        let shown = prefixes[..prefixes.len().min(SHOWN)].join(", ");
        let why = format!("{peer} may create names only under {shown}{more}");
        Err((Refusal::WrongPrefix, why))
    }
}

/// Returns the text that `{peer}` stands for. Followed by a slash, none is a prefix of another's.
fn part(peer: &PeerName) -> String {
    match peer {
        PeerName::Spiffe(id) => format!("{id}:"),
        other => other.to_string(),
    }
}

fn check(prefix: &str) -> Result<()> {
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
mod tests {
    use super::*;

    fn peer(name: &str) -> PeerName {
        name.parse().unwrap()
    }

    #[test]
    fn a_peer_creates_names_under_its_own_name_alone() {
        let names = Namespaces::own();
        for (who, name, may) in [
            ("uid:1000", "uid:1000/a", true),
            ("uid:1000", "uid:1000/", false),
            ("uid:1000", "uid:1000", false),
            ("uid:100", "uid:1000/a", false),
            ("uid:1000", "uid:100/a", false),
            ("local", "local/a", true),
            ("a.b", "a.b/c/d", true),
            ("a.b", "a.bc/d", false),
            ("a.b", "c", false),
        ] {
            assert_eq!(names.admits(&peer(who), name), may, "{who} {name}");
        }
        let (reason, why) = names.check(&peer("a.b"), "c").unwrap_err();
        assert_eq!(reason, Refusal::WrongPrefix);
        assert!(why.ends_with("under a.b/"), "{why}");
        names.check(&peer("a.b"), "a.b/c").unwrap();
    }

    #[test]
    fn rules_replace_the_own_prefix_and_add_up() {
        let who = |list: &str| PeerList::list([list]).unwrap();
        let names = Namespaces::own()
            .rule(who("*.gpu"), ["kv/", "jobs/{peer}/"])
            .and_then(|names| names.rule(who("a.gpu"), ["kv/", "x/"]))
            .and_then(|names| names.rule(who("uid:0"), [""]))
            .unwrap();
        assert_eq!(names.prefixes(&peer("a.gpu")), ["kv/", "jobs/a.gpu/", "x/"]);
        assert!(!names.admits(&peer("a.gpu"), "a.gpu/1"));
        assert!(!names.admits(&peer("b.gpu"), "jobs/a.gpu/1"));
        assert!(names.admits(&peer("uid:0"), "anything"));
        assert_eq!(names.prefixes(&peer("uid:1")), ["uid:1/"]);
        let many = Namespaces::own()
            .rule(PeerList::anyone(), (0..10).map(|n| format!("{n}/")))
            .unwrap();
        let (_, why) = many.check(&peer("local"), "a").unwrap_err();
        assert!(why.ends_with("7/ and 2 more prefixes"), "{why}");
    }

    #[test]
    fn a_spiffe_id_cannot_create_names_of_one_below_it() {
        let names = Namespaces::own();
        let (above, below) = (peer("spiffe://td/a"), peer("spiffe://td/a/b"));
        assert_eq!(names.prefixes(&above), ["spiffe://td/a:/"]);
        assert!(names.admits(&below, "spiffe://td/a/b:/x"));
        assert!(!names.admits(&above, "spiffe://td/a/b:/x"));
        assert!(!names.admits(&above, "spiffe://td/a/b/x"));
        let long = peer(&format!("spiffe://td/{}", "x".repeat(300)));
        let (reason, why) = names.check(&long, "x").unwrap_err();
        assert_eq!(reason, Refusal::WrongPrefix);
        assert!(why.contains("too long"), "{why}");
        let short = Namespaces::own().rule(PeerList::anyone(), ["x/"]).unwrap();
        short.check(&long, "x/1").unwrap();
    }

    #[test]
    fn prefixes_that_could_reach_into_others_are_refused() {
        for wrong in ["kv", "{peer}", "{peer}-", "a b/", "{user}/", "ä/", "*/"] {
            let rule = Namespaces::own().rule(PeerList::anyone(), [wrong]);
            assert!(rule.is_err(), "{wrong}");
        }
        assert!(Namespaces::own().rule(PeerList::anyone(), [""; 0]).is_err());
    }
}
