//! What an error carries besides texts: why a peer refuses a request, which of two ends a failure is at, and how memory
//! differs from what was expected.

use std::fmt;
use std::io::ErrorKind;

use egmem_core::size::Bytes;

use crate::MemoryError;
use crate::driver::{Code, HandleType, Location, NodeId};
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
    /// A limit of the peer is reached: connections, sessions, names, leases, requests.
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

/// Where to look when an operation between two processes fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum End {
    /// In this process, on this machine.
    Here,
    /// At the other end.
    There,
    /// At both ends, or between them: the IMEX domain, the links.
    Between,
    /// At the way between two processes of one machine: a fabric handle was refused there, and no POSIX fd came.
    SameMachine,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Here => "look at this end",
            Self::There => "look at its end",
            Self::Between => "look at both ends and the fabric between them",
            Self::SameMachine => {
                "both ends are on this machine, and no POSIX fd came, only a fabric handle"
            }
        })
    }
}

impl End {
    /// Returns what to do; `None` at this end, where the cause's own remedy applies.
    pub(super) const fn remedy(self) -> Option<&'static str> {
        Some(match self {
            Self::Here => return None,
            Self::There => "check that the exporter still has the memory, and fetch it again",
            Self::Between => {
                "check that both nodes are in one IMEX domain and its links are up (nvidia-imex-ctl -N); \
                 fetch it again, because the exporter may have ended meanwhile"
            }
            Self::SameMachine => {
                "take a POSIX fd: have the server listen at a unix: address too, and mount the folder of that socket into \
                 this container at the same path"
            }
        })
    }

    /// Returns where to look when memory that arrived as `via`, from this machine or from another, cannot be imported
    /// for this reason.
    pub(crate) fn of(error: &MemoryError, via: HandleType, same_machine: bool) -> Self {
        match error {
            MemoryError::InvalidArgument { what, .. }
                if matches!(*what, "description" | "handles") =>
            {
                Self::There
            }
            // The exporter has ended before it sent all handles.
            MemoryError::System {
                kind: ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe,
                ..
            } => Self::There,
            // The handle refers to nothing, or to nothing reachable.
            MemoryError::Driver(source) => match source.code {
                Code::OUT_OF_MEMORY | Code::NOT_PERMITTED => Self::Here,
                _ if via == HandleType::Fabric && same_machine => Self::SameMachine,
                _ if via == HandleType::Fabric => Self::Between,
                Code::INVALID_VALUE | Code::INVALID_HANDLE | Code::UNKNOWN => Self::There,
                _ => Self::Here,
            },
            _ => Self::Here,
        }
    }
}

/// How memory under a name differs from the caller's request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// Another peer owns the name.
    #[error("its owner is {found}, expected {expected}")]
    Owner {
        /// The expected owner, as `exchange::Owner` writes it.
        expected: String,
        /// The actual owner.
        found: String,
    },
    /// The memory has another size.
    #[error("its size is {} ({found} bytes), expected {} ({expected} bytes)", Bytes(*.found), Bytes(*.expected))]
    Size {
        /// The expected bytes.
        expected: u64,
        /// Usable bytes.
        found: u64,
    },
    /// The memory lies on another node.
    #[error("it lies on {}, expected {}", join(.found), Location::HostNuma(.expected.0))]
    Node {
        /// The expected host node.
        expected: NodeId,
        /// The locations of its parts, each once.
        found: Vec<Location>,
    },
}

impl Mismatch {
    /// Returns what to do about it.
    pub(super) const fn remedy(&self) -> &'static str {
        match self {
            Self::Owner { .. } => {
                "do not use the memory: ask the administrator why another peer has the name, or choose \
                 another name"
            }
            Self::Size { .. } | Self::Node { .. } => {
                "delete the name and create it again, or change the expectation"
            }
        }
    }
}

fn join(locations: &[Location]) -> String {
    let texts: Vec<_> = locations.iter().map(Location::to_string).collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Call;

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

    #[test]
    fn each_failure_points_somewhere() {
        let driver = |code| MemoryError::driver(Call::MemImportFromShareableHandle, code);
        for (error, via, end) in [
            (driver(Code::INVALID_VALUE), HandleType::PosixFd, End::There),
            (
                driver(Code::INVALID_VALUE),
                HandleType::Fabric,
                End::Between,
            ),
            (driver(Code::OUT_OF_MEMORY), HandleType::Fabric, End::Here),
            (
                MemoryError::invalid("description", ""),
                HandleType::PosixFd,
                End::There,
            ),
            (
                MemoryError::invalid("access", ""),
                HandleType::PosixFd,
                End::Here,
            ),
        ] {
            assert_eq!(End::of(&error, via, false), end, "{error} {via}");
            let here = match end {
                End::Between => End::SameMachine,
                end => end,
            };
            assert_eq!(End::of(&error, via, true), here, "{error} {via}");
        }
    }
}
