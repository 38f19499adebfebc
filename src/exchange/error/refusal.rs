//! Why a peer refuses a request.

use std::fmt;

use crate::text::escape;

/// Defines the reasons: `Variant = "word on the wire", "text for people";`.
macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident = $word:literal, $text:literal;)*) => {
        /// Why a peer refuses a request, on the wire a lower-case word with underscores.
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Refusal {
            $($(#[$doc])* $variant,)*
            /// A reason that this version does not know.
            Other(String),
        }

        impl Refusal {
            /// Returns the word on the wire.
            pub fn word(&self) -> &str {
                match self {
                    $(Self::$variant => $word,)*
                    Self::Other(word) => word,
                }
            }

            /// Returns the reason with this word.
            pub fn from_word(word: &str) -> Self {
                match word {
                    $($word => Self::$variant,)*
                    other => Self::Other(other.into()),
                }
            }
        }

        impl fmt::Display for Refusal {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$variant => f.write_str($text),)*
                    // A peer's own word.
                    Self::Other(word) => f.write_str(&escape(word)),
                }
            }
        }
    };
}

refusals! {
    /// There is no such name, lease, group or ticket.
    NotFound = "not_found", "it does not exist";
    /// The peer's identity is not on the list.
    Forbidden = "forbidden", "this peer has no right to it";
    /// The memory may only be read.
    ReadOnly = "read_only", "it may only be read";
    /// The service's configuration defines the name, so no request can delete it.
    Configured = "configured", "the service's configuration defines it";
    /// The peer's certificate is no longer trusted.
    NotTrusted = "not_trusted", "the certificate is no longer trusted";
    /// The peer does not know the request.
    Unsupported = "unsupported", "it does not know the request";
    /// The two ends have no protocol version in common.
    Version = "version", "no common protocol version";
    /// The request is invalid.
    Invalid = "invalid", "the request is invalid";
    /// A limit of the peer is reached: connections, names, leases, bytes.
    Limit = "limit", "a limit is reached";
    /// More than the quota allows.
    Quota = "quota", "over the quota";
    /// The name exists already.
    Exists = "exists", "the name exists already";
    /// The name has another owner than the one named in the request.
    WrongOwner = "wrong_owner", "another peer owns the name";
    /// The name is being withdrawn, or the peer is ending.
    Closing = "closing", "it is being withdrawn";
    /// No handle type works between the two.
    NoCommonHandle = "no_common_handle", "no common handle type";
    /// Ranks of a group ask for different gathers under the same number.
    RanksDisagree = "ranks_disagree", "ranks of the group ask for different gathers";
    /// The lease has ended.
    Expired = "expired", "the lease has ended";
    /// The instance in the request no longer exists.
    Stale = "stale", "the instance no longer exists";
    /// Out of memory.
    NoMemory = "no_memory", "out of memory";
    /// An operation did not finish in time.
    TimedOut = "timed_out", "it took too long";
    /// Another failure at the peer.
    Internal = "internal", "an internal failure";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_travel_both_ways() {
        assert_eq!(Refusal::ReadOnly.word(), "read_only");
        assert_eq!(Refusal::from_word("read_only"), Refusal::ReadOnly);
        let other = Refusal::from_word("of_tomorrow");
        assert_eq!(other, Refusal::Other("of_tomorrow".into()));
        assert_eq!(
            (other.word(), other.to_string()),
            ("of_tomorrow", "of_tomorrow".into())
        );
    }
}
