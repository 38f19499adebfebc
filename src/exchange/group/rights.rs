//! Which peers may join which groups.

use crate::protocol::{check_name, check_prefix};
use crate::{Error, PeerName, Result, Who};

/// The rights of a server's peers to join groups. Without an entry, no peer has any.
#[derive(Clone, Debug, Default)]
pub struct Rights(Vec<(String, Who)>);

impl Rights {
    /// Creates rights from these entries. Each applies to the groups whose names match its pattern: a name,
    /// or the beginning of names followed by `*`.
    ///
    /// # Errors
    ///
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument), which quotes a pattern that matches no name.
    pub fn new(entries: impl IntoIterator<Item = (String, Who)>) -> Result<Self> {
        let entry = |(pattern, who): (String, Who)| {
            let checked = match pattern.strip_suffix('*') {
                Some(prefix) => check_prefix(prefix),
                None => check_name(&pattern),
            };
            checked.map_err(|error| {
                let why = format!("'{pattern}' matches no name of a group: {error}");
                Error::invalid("pattern of group names", why)
            })?;
            Ok((pattern, who))
        };
        let entries: Result<_> = entries.into_iter().map(entry).collect();
        entries.map(Self)
    }

    /// Whether the peer may join groups of this name.
    pub fn admits(&self, group: &str, peer: &PeerName) -> bool {
        self.0.iter().any(|(pattern, who)| {
            let matches = match pattern.strip_suffix('*') {
                Some(prefix) => group.starts_with(prefix),
                None => pattern == group,
            };
            matches && who.admits(peer)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_an_entry_no_peer_may_join() {
        assert!(!Rights::default().admits("g", &PeerName::User(0)));
    }

    #[test]
    fn a_right_holds_for_the_names_of_its_pattern() {
        let one = || Who::only(PeerName::User(1));
        let two = Who::only(PeerName::User(2));
        let rights = [("job/*", one()), ("g", one()), ("job/7", two)];
        let rights = Rights::new(rights.map(|(name, who)| (name.to_owned(), who))).unwrap();
        for (name, uid, may) in [
            ("job/7", 1, true),
            ("job/7", 2, true),
            ("job/8", 2, false),
            ("job/", 1, true),
            ("job", 1, false),
            ("g", 1, true),
            ("g/1", 1, false),
            ("g", 3, false),
        ] {
            assert_eq!(
                rights.admits(name, &PeerName::User(uid)),
                may,
                "{name} {uid}"
            );
        }
        let all = Rights::new([("*".to_owned(), Who::anyone())]).unwrap();
        assert!(all.admits("any", &PeerName::Local));
    }

    #[test]
    fn patterns_that_match_no_name_are_errors() {
        for wrong in ["", "a b", "**", "*a", "a*b"] {
            let error = Rights::new([(wrong.to_owned(), Who::anyone())]).unwrap_err();
            assert!(error.to_string().contains(&format!("'{wrong}'")), "{error}");
        }
    }
}
