//! Sharing's error: what failed, why, and what to do.

mod distrust;
mod texts;
mod unreachable;

use std::time::Duration;

pub use distrust::Distrust;
pub use unreachable::Unreachable;

use crate::driver::Explain;
use crate::{DriverError, MemoryError};

/// A result with sharing's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The failures of a connection to another process; [`Error::remedy`] says what to do.
///
/// Its text has no control characters, even if a peer or the system sent some.
// The texts of the variants are in texts.rs, which escapes all of them.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A failure of memory: the driver, the system, an argument.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A peer is not trusted, or does not trust this process.
    NotTrusted {
        /// The peer: an address, a process, a certificate's name.
        peer: String,
        /// The reason, for programs.
        cause: Distrust,
        /// The reason, for people.
        why: String,
    },
    /// No connection to a peer was established.
    Unreachable {
        /// The peer's address.
        peer: String,
        /// The cause, for programs.
        cause: Unreachable,
        /// The cause, for people.
        why: String,
    },
    /// A connected peer has disconnected, fallen silent, or become unreachable.
    PeerLost {
        /// The peer.
        peer: String,
        /// The event that shows it.
        why: String,
    },
    /// A peer violated the protocol; the connection is closed.
    Protocol {
        /// The peer.
        peer: String,
        /// A description of the bytes that it sent.
        detail: String,
    },
    /// An operation did not finish in time.
    TimedOut {
        /// The operation.
        what: String,
        /// The time limit.
        after: Duration,
    },
}

impl Error {
    /// Creates the error of a connected peer that is lost, with the cause.
    pub fn peer_lost(peer: impl Into<String>, why: impl Into<String>) -> Self {
        let (peer, why) = (peer.into(), why.into());
        Self::PeerLost { peer, why }
    }

    /// Creates the error of a peer that violates the protocol, with a description of its message.
    pub fn protocol(peer: impl Into<String>, detail: impl Into<String>) -> Self {
        let (peer, detail) = (peer.into(), detail.into());
        Self::Protocol { peer, detail }
    }

    /// Creates the error of an operation that did not finish in time.
    pub fn timed_out(what: impl Into<String>, after: Duration) -> Self {
        let what = what.into();
        Self::TimedOut { what, after }
    }

    /// Returns the memory's error that this error carries, if it does.
    pub const fn memory(&self) -> Option<&MemoryError> {
        match self {
            Self::Memory(error) => Some(error),
            _ => None,
        }
    }

    /// Returns the failed driver call behind the error, if any.
    pub const fn driver_error(&self) -> Option<DriverError> {
        match self {
            Self::Memory(error) => error.driver_error(),
            _ => None,
        }
    }
}

impl Explain for Error {
    fn remedy(&self) -> &'static str {
        self.remedy()
    }

    fn untold_call(&self) -> Option<DriverError> {
        match self {
            Self::Memory(error) => error.untold_call(),
            _ => None,
        }
    }
}
