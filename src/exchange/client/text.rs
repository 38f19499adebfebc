//! Escapes and shortens a peer's texts.

use crate::protocol::{Ask, Refused};
use crate::text::bounded;
use crate::{Distrust, Error, Refusal, ShareError};

/// The most bytes of a text that a peer may send.
pub(super) const LONGEST: usize = 255;

/// Returns the beginning of a text, of at most `most` bytes.
pub(crate) fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Cuts a peer's text for people, and escapes its control characters.
pub(super) fn tidy(text: &str) -> String {
    bounded(text, LONGEST)
}

/// Converts a peer's refusal to an error.
pub(super) fn refused(peer: &str, what: impl Into<String>, why: &Refused) -> Error {
    Error::refused(
        peer,
        what,
        Refusal::from_word(&tidy(&why.reason)),
        tidy(&why.detail),
    )
}

/// Converts a peer's reason for ending the session to an error.
pub(super) fn dismissed(peer: &str, why: &Refused) -> Error {
    match Refusal::from_word(&tidy(&why.reason)) {
        Refusal::NotTrusted => {
            let why = format!("it no longer trusts this process: {}", tidy(&why.detail));
            Error::not_trusted(peer, Distrust::ByPeer, why)
        }
        _ => refused(peer, "the session", why),
    }
}

/// Completes a decoder's error with this peer.
pub(super) fn of(peer: &str, error: Error) -> Error {
    match error {
        Error::Share(ShareError::Protocol { detail, .. }) => Error::protocol(peer, detail),
        other => other,
    }
}

/// Describes a request, for messages.
pub(super) fn asked(ask: &Ask) -> String {
    match ask {
        Ask::Ping => "a heartbeat".into(),
        Ask::List(list) => format!("the list of names '{}…'", list.prefix),
        Ask::Wait(wait) => format!("waiting for '{}'", wait.name),
        Ask::Fetch(fetch) => format!("'{}'", fetch.name),
        Ask::Held(_) => "the leases that it has".into(),
        Ask::Release(release) => format!("the release of lease {}", release.lease),
        Ask::Probe(probe) => format!("a probe of lease {}", probe.lease),
        Ask::Watch(watch) => format!("a watch on names '{}…'", watch.prefix),
        Ask::Create(create) => format!("the creation of '{}'", create.name),
        Ask::Delete(delete) => format!("the deletion of '{}'", delete.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_cut_at_characters_and_cannot_steer_a_terminal() {
        let long = "ä".repeat(200);
        assert_eq!(cut(&long, LONGEST), "ä".repeat(127));
        assert_eq!(tidy("a\u{1b}[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
        let why = Refused {
            reason: "expired".into(),
            detail: "gone\u{7}".into(),
        };
        let error = refused("node-a", "'x'", &why);
        assert!(
            matches!(&error, Error::Refused { reason: Refusal::Expired, detail, .. } if detail == "gone\\u{7}"),
            "{error:?}"
        );
    }
}
