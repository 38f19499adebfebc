//! The exchange's error: what failed, why, and what to do.

mod reason;

pub use reason::{End, Mismatch, Refusal};

use std::time::Duration;

use crate::driver::Explain;
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
