//! Why a peer refuses a request.

use std::fmt;

use crate::text::escape;

/// Why a peer refuses a request, on the wire a lower-case word with underscores.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// There is no such name, lease, group or ticket.
    NotFound,
    /// The peer's identity is not on the list.
    Forbidden,
    /// The memory may only be read.
    ReadOnly,
    /// The service's configuration defines the name, so no request can delete it.
    Configured,
    /// The peer's certificate is no longer trusted.
    NotTrusted,
    /// The peer does not know the request.
    Unsupported,
    /// The two ends have no protocol version in common.
    Version,
    /// The request is invalid.
    Invalid,
    /// A limit of the peer is reached: connections, names, leases, bytes.
    Limit,
    /// More than the quota allows.
    Quota,
    /// The name exists already.
    Exists,
    /// The name has another owner than the one named in the request.
    WrongOwner,
    /// The name is being withdrawn, or the peer is ending.
    Closing,
    /// No handle type works between the two.
    NoCommonHandle,
    /// Ranks of a group ask for different gathers under the same number.
    RanksDisagree,
    /// The lease has ended.
    Expired,
    /// The instance in the request no longer exists.
    Stale,
    /// Out of memory.
    NoMemory,
    /// An operation did not finish in time.
    TimedOut,
    /// Another failure at the peer.
    Internal,
    /// A reason that this version does not know.
    Other(String),
}

impl Refusal {
    const WORDS: [(Self, &str, &str); 20] = [
        (Self::NotFound, "not_found", "it does not exist"),
        (Self::Forbidden, "forbidden", "this peer has no right to it"),
        (Self::ReadOnly, "read_only", "it may only be read"),
        (
            Self::Configured,
            "configured",
            "the service's configuration defines it",
        ),
        (
            Self::NotTrusted,
            "not_trusted",
            "the certificate is no longer trusted",
        ),
        (
            Self::Unsupported,
            "unsupported",
            "it does not know the request",
        ),
        (Self::Version, "version", "no common protocol version"),
        (Self::Invalid, "invalid", "the request is invalid"),
        (Self::Limit, "limit", "a limit is reached"),
        (Self::Quota, "quota", "over the quota"),
        (Self::Exists, "exists", "the name exists already"),
        (
            Self::WrongOwner,
            "wrong_owner",
            "another peer owns the name",
        ),
        (Self::Closing, "closing", "it is being withdrawn"),
        (
            Self::NoCommonHandle,
            "no_common_handle",
            "no common handle type",
        ),
        (
            Self::RanksDisagree,
            "ranks_disagree",
            "ranks of the group ask for different gathers",
        ),
        (Self::Expired, "expired", "the lease has ended"),
        (Self::Stale, "stale", "the instance no longer exists"),
        (Self::NoMemory, "no_memory", "out of memory"),
        (Self::TimedOut, "timed_out", "it took too long"),
        (Self::Internal, "internal", "an internal failure"),
    ];

    /// Returns the word on the wire.
    pub fn word(&self) -> &str {
        match self {
            Self::Other(word) => word,
            known => Self::WORDS
                .iter()
                .find(|(reason, ..)| reason == known)
                .map_or("internal", |(_, word, _)| word),
        }
    }

    /// Returns the reason with this word.
    pub fn from_word(word: &str) -> Self {
        Self::WORDS
            .iter()
            .find(|(_, known, _)| *known == word)
            .map_or_else(|| Self::Other(word.into()), |(reason, ..)| reason.clone())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Self::WORDS.iter().find(|(reason, ..)| reason == self);
        match known {
            Some((.., words)) => f.write_str(words),
            // A peer's own word.
            None => f.write_str(&escape(self.word())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_travel_both_ways() {
        for (reason, word, _) in Refusal::WORDS {
            assert_eq!(reason.word(), word);
            assert_eq!(Refusal::from_word(word), reason);
        }
        let other = Refusal::from_word("of_tomorrow");
        assert_eq!(other, Refusal::Other("of_tomorrow".into()));
        assert_eq!(
            (other.word(), other.to_string()),
            ("of_tomorrow", "of_tomorrow".into())
        );
    }
}
