//! Why a peer refuses a request.

use std::fmt;

use crate::text::escape;

/// Defines the reasons: `Variant = "word on the wire", "text for people", "remedy";`.
macro_rules! refusals {
    ($($(#[$doc:meta])* $variant:ident = $word:literal, $text:literal, $remedy:literal;)*) => {
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

            pub(super) const fn remedy(&self) -> &'static str {
                match self {
                    $(Self::$variant => $remedy,)*
                    Self::Other(_) => Self::Internal.remedy(),
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
    /// There is no such name or lease.
    NotFound = "not_found", "it does not exist", "check the name with `egmem ls`, or wait for it";
    /// The peer's identity is not on the list.
    Forbidden = "forbidden", "this peer has no right to it",
        "have this peer's certificate name or user put on the other's list";
    /// The name begins with none of the prefixes under which the peer may create names.
    WrongPrefix = "wrong_prefix", "the name has no prefix of this peer",
        "begin the name with a prefix of this peer, which the message shows; an administrator allows others \
         (`[[create.prefix]]` of `egmem serve`)";
    /// The memory may only be read.
    ReadOnly = "read_only", "it may only be read",
        "fetch it read-only (`--read-only`), or have its owner publish it read-write";
    /// The service's configuration defines the name, so no request can delete it.
    Configured = "configured", "the service's configuration defines it",
        "remove its [[buffer]] from the service's configuration and restart the service";
    /// The peer's certificate is no longer trusted.
    NotTrusted = "not_trusted", "the certificate is no longer trusted",
        "renew this process's certificate and load it again";
    /// The peer does not know the request.
    Unsupported = "unsupported", "it does not know the request", "update the older of the two";
    /// The two ends have no protocol version in common.
    Version = "version", "no common protocol version", "update the older of the two";
    /// The request is invalid.
    Invalid = "invalid", "the request is invalid", "";
    /// A limit of the peer is reached: connections, names, leases, bytes.
    Limit = "limit", "a limit is reached", "release what is not needed, or have the peer's limits raised";
    /// More than the quota allows.
    Quota = "quota", "over the quota", "release what is not needed, or have the peer's limits raised";
    /// The name exists already.
    Exists = "exists", "the name exists already", "choose another name, or delete the old one";
    /// The name has another owner than the one named in the request.
    WrongOwner = "wrong_owner", "another peer owns the name",
        "do not use the memory: ask the administrator why another peer has the name";
    /// The name is being withdrawn, or the peer is ending.
    Closing = "closing", "it is being withdrawn", "fetch the name again later";
    /// No handle type works between the two.
    NoCommonHandle = "no_common_handle", "no common handle type", "give both nodes an IMEX channel of one domain";
    /// The lease has ended.
    Expired = "expired", "the lease has ended", "fetch the name again later";
    /// The instance in the request no longer exists.
    Stale = "stale", "the instance no longer exists", "fetch the name again later";
    /// Out of memory.
    NoMemory = "no_memory", "out of memory", "ask for less, or for another node";
    /// An operation did not finish in time.
    TimedOut = "timed_out", "it took too long", "try again, or wait longer";
    /// Another failure at the peer.
    Internal = "internal", "an internal failure", "see the peer's log";
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
