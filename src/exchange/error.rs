//! The exchange's error: what failed, why, and what to do.

use std::fmt;
use std::io::ErrorKind;
use std::time::Duration;

use egmem_core::size::Bytes;

use crate::driver::{Code, Explain, HandleType, Location, NodeId};
use crate::text::escape;
use crate::{Distrust, DriverError, MemoryError, ShareError};

/// A result with the exchange's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The failures of the exchange; [`Error::remedy`] says what to do.
///
/// Its text has no control characters, even if a peer or a file sent some.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A failure of sharing with another process, of this machine or of another, or of memory:
    /// [`memory`](Self::memory).
    #[error(transparent)]
    Share(#[from] ShareError),
    /// Handles would be sent unencrypted over a network.
    #[error("{} is not on this machine, and the connection would be without TLS", escape(.address))]
    Insecure {
        /// The address.
        address: String,
    },
    /// Certificates, keys or their files cannot be used.
    #[error("TLS: {}: {}", escape(.what), escape(.detail))]
    Tls {
        /// The object that cannot be used: a file, a certificate.
        what: String,
        /// The fault.
        detail: String,
    },
    /// One end of a connection uses TLS, and the other does not.
    #[error(
        "{} {}",
        escape(.peer),
        if *.here { "does not speak TLS, and this process does" } else { "speaks TLS, and this process does not" }
    )]
    TlsAtOneEnd {
        /// The peer.
        peer: String,
        /// Whether this process uses it.
        here: bool,
    },
    /// A peer understood a request and refused it.
    #[error("{}", refused(.peer, .what, .reason, .detail))]
    Refused {
        /// The peer.
        peer: String,
        /// The request.
        what: String,
        /// The reason, for programs.
        reason: Refusal,
        /// The reason, for people.
        detail: String,
    },
    /// Memory under a name differs from the caller's request: none of it is mapped.
    #[error("'{}' of {} does not match: {}", escape(.name), escape(.peer), escape(&.what.to_string()))]
    Mismatched {
        /// The name.
        name: String,
        /// The server.
        peer: String,
        /// The difference.
        what: Box<Mismatch>,
    },
    /// Handles or leases belong to an earlier run of their exporter.
    #[error("{} is stale: {}", escape(.what), escape(.why))]
    Stale {
        /// The object.
        what: String,
        /// The property that has changed.
        why: String,
    },
    /// Memory that a peer shares cannot be imported into this process.
    #[error("{} of {} cannot be imported ({end}): {source}", escape(.what), escape(.peer))]
    Import {
        /// The memory's name.
        what: String,
        /// The peer that shares it.
        peer: String,
        /// Where to look.
        end: End,
        /// The cause.
        source: Box<MemoryError>,
    },
    /// Memory is imported, but the two ends do not see the same bytes.
    #[error("{} is not the same memory here and at {}: {}", escape(.what), escape(.peer), escape(.detail))]
    DataPlane {
        /// The memory's name.
        what: String,
        /// The other end.
        peer: String,
        /// Which direction fails.
        detail: String,
    },
    /// No handle type works for all participants.
    #[error("no handle type works for all: {}", escape(&.reasons.join("; ")))]
    NoCommonHandle {
        /// Each participant's reasons.
        reasons: Vec<String>,
    },
    /// The program broke a wait off: [`blocking::Check`](crate::blocking::Check).
    #[error("the program broke the wait off")]
    Interrupted,
    /// A limit of this process, set by its options, is reached.
    #[error("the limit of {limit} {what} is reached")]
    LimitReached {
        /// The limited resource.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The directory cannot look a name up.
    #[error("directory {}: {}", escape(.directory), escape(.detail))]
    Directory {
        /// The directory's address.
        directory: String,
        /// The fault.
        detail: String,
    },
    /// Ranks of a group did not come in time, or have ended.
    #[error("{} missing", ranks(.missing, *.size))]
    RanksMissing {
        /// The missing ranks.
        missing: Vec<u32>,
        /// The number of ranks in the group.
        size: u32,
    },
    /// Other ranks of a group have failed; this one has not.
    #[error("{}", escape(&.reasons.join("; ")))]
    RanksFailed {
        /// Each failed rank and its reason.
        reasons: Vec<String>,
    },
    /// A contribution is not sealed with this group's secret, for its rank and this gather: the secrets differ, or it was
    /// changed, replayed or swapped on its way.
    #[error(
        "the contribution of rank {rank} is not sealed with this group's secret for this gather"
    )]
    Forged {
        /// The rank whose contribution it should be.
        rank: u32,
    },
    /// The transport of a group's ranks has failed, or returned what it should not.
    #[error("the ranks' all-gather: {}", escape(.detail))]
    AllGather {
        /// The fault.
        detail: String,
    },
}

impl Error {
    /// Returns what to do about it, in a sentence; nothing where the text says it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Share(error) => error.remedy(),
            Self::Insecure { .. } => {
                "give certificates (`egmem certs init`, `egmem certs issue`), or allow plain TCP, which \
                 anyone on the network path can read: `--plain-anywhere`, `plain_anywhere = true` of `egmem serve`, \
                 `Security::PlainAnywhere`"
            }
            Self::TlsAtOneEnd { here: false, .. } => {
                "give ca, cert and key: certificates of an authority that the other end trusts"
            }
            Self::TlsAtOneEnd { here: true, .. } => {
                "give the other end certificates too, or connect to an address of it that has TLS"
            }
            Self::Tls { .. } => "check the file's path, form, owner and dates",
            Self::Refused { reason, .. } => reason.remedy(),
            Self::Mismatched { what, .. } => what.remedy(),
            Self::Stale { .. } => "look the name up and fetch it again",
            Self::Import { end, source, .. } => end.remedy().unwrap_or_else(|| source.remedy()),
            Self::DataPlane { .. } => {
                "the control connection works, the memory's does not: check the IMEX domain's state and \
                 the links on both nodes (nvidia-imex-ctl -N, nvidia-smi nvlink -s)"
            }
            Self::NoCommonHandle { .. } => {
                "give every node an IMEX channel of one domain, or keep to the processes of one machine"
            }
            Self::Interrupted => "call it again; a creation or deletion may have happened",
            Self::LimitReached { .. } => "raise the limit, or use less",
            Self::Directory { .. } => {
                "check the directory's address and credentials; exporters can be asked directly meanwhile"
            }
            Self::RanksMissing { .. } => {
                "check that each missing rank has started, with the same size, address and secret, and has not ended"
            }
            Self::RanksFailed { .. } => "see the failed ranks' own errors",
            Self::Forged { .. } => {
                "give all ranks the same secret; if they have it, something between them changes their messages"
            }
            Self::AllGather { .. } => {
                "see the transport's own log; let all ranks call it equally often"
            }
        }
    }

    /// Creates an error about an invalid argument.
    pub fn invalid(what: &'static str, why: impl Into<String>) -> Self {
        MemoryError::invalid(what, why).into()
    }

    /// Creates an error about an invalid argument, with the valid range or values.
    pub fn invalid_of(
        what: &'static str,
        why: impl Into<String>,
        valid: impl Into<String>,
    ) -> Self {
        MemoryError::invalid_of(what, why, valid).into()
    }

    /// Creates an error from an operating system error.
    pub fn system(what: impl Into<String>, error: &std::io::Error) -> Self {
        MemoryError::system(what, error).into()
    }

    /// Creates an error of a system facility that has no system error, such as a thread.
    pub fn failed(what: impl Into<String>, detail: impl Into<String>) -> Self {
        MemoryError::failed(what, detail).into()
    }

    /// Creates the error of a transport between ranks.
    pub fn all_gather(detail: impl std::fmt::Display) -> Self {
        Self::AllGather {
            detail: detail.to_string(),
        }
    }

    /// Creates an error about a certificate, a key or a file of them.
    pub(crate) fn tls(what: impl Into<String>, detail: impl std::fmt::Display) -> Self {
        Self::Tls {
            what: what.into(),
            detail: detail.to_string(),
        }
    }

    pub(crate) fn peer_lost(peer: impl Into<String>, why: impl Into<String>) -> Self {
        ShareError::peer_lost(peer, why).into()
    }

    pub(crate) fn protocol(peer: impl Into<String>, detail: impl Into<String>) -> Self {
        ShareError::protocol(peer, detail).into()
    }

    pub(crate) fn not_trusted(peer: impl Into<String>, cause: Distrust, why: String) -> Self {
        let peer = peer.into();
        ShareError::NotTrusted { peer, cause, why }.into()
    }

    pub(crate) fn timed_out(what: impl Into<String>, after: Duration) -> Self {
        ShareError::timed_out(what, after).into()
    }

    /// Creates the error of a request that a peer refused.
    pub(crate) fn refused(
        peer: impl Into<String>,
        what: impl Into<String>,
        reason: Refusal,
        detail: impl Into<String>,
    ) -> Self {
        Self::Refused {
            peer: peer.into(),
            what: what.into(),
            reason,
            detail: detail.into(),
        }
    }

    /// Returns why a peer refused the request, if it did.
    pub(crate) const fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused { reason, .. } => Some(reason),
            _ => None,
        }
    }

    /// Returns whether a peer or this process gave the request up after its time.
    pub(crate) const fn is_timed_out(&self) -> bool {
        matches!(self, Self::Share(ShareError::TimedOut { .. }))
            || matches!(self.refusal(), Some(Refusal::TimedOut))
    }

    /// Returns whether the connection broke before the answer.
    pub(crate) const fn is_peer_lost(&self) -> bool {
        matches!(self, Self::Share(ShareError::PeerLost { .. }))
    }

    /// Returns whether the peer could not be reached, or did not answer.
    pub(crate) const fn is_unreachable(&self) -> bool {
        use ShareError::{TimedOut, Unreachable};
        self.is_peer_lost() || matches!(self, Self::Share(Unreachable { .. } | TimedOut { .. }))
    }

    /// Returns whether the machine responds and no process listens at the address: a server has ended then.
    pub(crate) const fn nobody_listens(&self) -> bool {
        use crate::Unreachable::{NoSocket, NobodyListens};
        matches!(
            self.share(),
            Some(ShareError::Unreachable {
                cause: NobodyListens | NoSocket,
                ..
            })
        )
    }

    /// Returns the error of sharing that this error carries, if it does.
    pub const fn share(&self) -> Option<&ShareError> {
        match self {
            Self::Share(error) => Some(error),
            _ => None,
        }
    }

    /// Returns the memory's error that this error carries, if it does.
    pub const fn memory(&self) -> Option<&MemoryError> {
        match self {
            Self::Share(error) => error.memory(),
            Self::Import { source, .. } => Some(source),
            _ => None,
        }
    }

    /// Returns the failed driver call behind the error, if any.
    pub const fn driver_error(&self) -> Option<DriverError> {
        match self {
            Self::Share(error) => error.driver_error(),
            Self::Import { source, .. } => source.driver_error(),
            _ => None,
        }
    }
}

/// The text of a refusal.
fn refused(peer: &str, what: &str, reason: &Refusal, detail: &str) -> String {
    let colon = if detail.is_empty() { "" } else { ": " };
    let text = match reason {
        // Not for lack of a right.
        Refusal::TimedOut => format!("{what} at {peer} took too long{colon}{detail}"),
        _ => format!("{peer} refuses {what}: {reason}{colon}{detail}"),
    };
    escape(&text).into_owned()
}

/// Formats missing ranks: `rank 1 of 2 is`, `ranks 1, 3 of 4 are`.
fn ranks(missing: &[u32], size: u32) -> String {
    const SHOWN: usize = 16;
    let shown = missing.iter().take(SHOWN).map(u32::to_string);
    let mut text = shown.collect::<Vec<_>>().join(", ");
    if missing.len() > SHOWN {
        text += &format!(" and {} more", missing.len() - SHOWN);
    }
    match missing {
        [_] => format!("rank {text} of {size} is"),
        _ => format!("ranks {text} of {size} are"),
    }
}

impl Explain for Error {
    fn remedy(&self) -> &'static str {
        self.remedy()
    }

    fn untold_call(&self) -> Option<DriverError> {
        match self {
            Self::Share(error) => error.untold_call(),
            // An import's text has its source's, without the call.
            Self::Import { source, .. } => source.untold_call(),
            _ => None,
        }
    }
}

impl From<MemoryError> for Error {
    fn from(error: MemoryError) -> Self {
        Self::Share(error.into())
    }
}

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

            const fn remedy(&self) -> &'static str {
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
    /// The peer does not serve the request.
    Unsupported = "unsupported", "it does not serve the request",
        "connect to an address of `egmem serve`, which creates and deletes memory";
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
    const fn remedy(self) -> Option<&'static str> {
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
    const fn remedy(&self) -> &'static str {
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
    use crate::driver::{Call, Code, Explained, Location};

    #[test]
    fn each_layer_carries_the_errors_of_those_below() {
        let source = DriverError {
            call: Call::MemCreate,
            code: Code::OUT_OF_MEMORY,
        };
        let memory = MemoryError::OutOfMemory {
            location: Location::HostNuma(0),
            requested: 1 << 20,
            source,
        };
        let share = ShareError::from(memory.clone());
        let error = Error::from(share.clone());
        assert_eq!(Error::from(memory.clone()), error);
        assert_eq!(error.share(), Some(&share));
        for found in [share.memory(), error.memory()] {
            assert_eq!(found, Some(&memory));
        }
        let found = [share.driver_error(), error.driver_error()];
        assert_eq!(found, [Some(source); 2]);
        // All have the text of the first, with its driver call and its remedy.
        let text = Explained(&memory).to_string();
        assert!(text.contains(&source.to_string()), "{text}");
        assert_eq!(Explained(&share).to_string(), text);
        assert_eq!(Explained(&error).to_string(), text);
    }

    #[test]
    fn other_ranks_texts_cannot_steer_a_terminal() {
        let reasons = vec!["rank 1: a\u{1b}[2Jb".into(), "c\nd".into()];
        let text = Error::RanksFailed { reasons }.to_string();
        assert_eq!(text, "rank 1: a\\u{1b}[2Jb; c\\nd");
        let missing = |missing: Vec<u32>| Error::RanksMissing { missing, size: 40 }.to_string();
        assert_eq!(missing(vec![3]), "rank 3 of 40 is missing");
        let many = missing((0..40).collect());
        assert!(many.ends_with("15 and 24 more of 40 are missing"), "{many}");
    }
}

#[cfg(test)]
mod reasons {
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
