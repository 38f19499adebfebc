//! Sharing's error: what failed, why, and what to do.

use std::io::{self, ErrorKind};
use std::time::Duration;

use crate::driver::{Explain, error_texts};
use crate::{DriverError, MemoryError};

/// A result with sharing's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why fds did not arrive with their message.
pub(crate) const LOST: &str =
    "file descriptors were lost on their way: this process may have too many open (ulimit -n)";

/// The failures of a connection to another process; [`Error::remedy`] says what to do.
///
/// Its text has no control characters, even if a peer or the system sent some.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A failure of memory: the driver, the system, an argument.
    Memory(MemoryError),
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

// That of memory escapes its own text.
error_texts! { Error, Self::Memory(error) => error, {
    Self::Memory(error) => ("{error}"), error.remedy();
    Self::NotTrusted { peer, cause: _cause, why } => ("{peer} is not trusted: {why}"), _cause.remedy();
    Self::Unreachable { peer, cause: _cause, why } => ("cannot connect to {peer}: {why}"), _cause.remedy();
    Self::PeerLost { peer, why } => ("{peer} is lost: {why}"),
        "check the peer's process and its log, and the network; what was imported from it before stays mapped until it is \
         freed, but its contents are no longer maintained";
    Self::Protocol { peer, detail } => ("{peer} breaks the protocol: {detail}"),
        "check that the address is an egmem exchange and that both ends run compatible versions";
    Self::TimedOut { what, after } => ("{what} took longer than {after:?}"),
        "check that the peer runs, or wait longer";
} }

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.memory().and_then(std::error::Error::source)
    }
}

impl From<MemoryError> for Error {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
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

    /// Creates the error of a message that could not be sent or received within a time limit.
    pub(crate) fn of_message(error: &io::Error, what: &str, peer: &str, within: Duration) -> Self {
        let what = format!("{what} ({peer})");
        match error.kind() {
            ErrorKind::WouldBlock => Self::timed_out(what, within),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                Self::peer_lost(peer, error.to_string())
            }
            ErrorKind::InvalidData if error.to_string() != LOST => {
                Self::protocol(peer, error.to_string())
            }
            _ => MemoryError::system(what, error).into(),
        }
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

/// Returns the conversion of a system call's error.
pub(crate) fn failed<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> MemoryError {
    move |error| MemoryError::system(what, &error.into())
}

impl Explain for Error {
    fn remedy(&self) -> &'static str {
        self.remedy()
    }

    fn untold_call(&self) -> Option<DriverError> {
        self.memory().and_then(Explain::untold_call)
    }
}

/// Why a peer is not trusted, or does not trust this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Distrust {
    /// The user of its process is not on the list.
    User,
    /// Its certificate does not have the expected name.
    Name,
    /// Its certificate is expired, or not valid yet.
    Validity,
    /// Its certificate is revoked.
    Revoked,
    /// No authority that this process trusts has issued its certificate.
    Authority,
    /// This end's revocation list has expired, or does not cover its certificate.
    RevocationList,
    /// Another fault of its certificate, or of TLS.
    Certificate,
    /// The peer does not trust this process.
    ByPeer,
}

crate::driver::remedies! {
    Distrust {
        Self::User =>
            "run both ends as the same user, or list the peer's user: `--server-user` and \
             `share::Peers` for a server's, `[local] users` of `egmem serve` for a client's",
        Self::Name =>
            "connect by a name that the certificate has, expect one of them (`--expect-peer`, \
             `Tls::expect_peer`), or issue it anew for the expected name (`egmem certs issue --san`)",
        Self::Validity =>
            "renew the certificate and load it, or set the clocks right",
        Self::Revoked =>
            "issue another certificate (`egmem certs issue`): this one stays revoked",
        Self::Authority =>
            "give both ends certificates of one authority (`egmem certs issue`), and its ca.pem",
        Self::RevocationList =>
            "get the authority's new revocation list and load it",
        Self::Certificate =>
            "compare the certificate (`openssl x509 -text`) with what this end requires",
        Self::ByPeer =>
            "check this process's certificate (`openssl x509 -text`): authority, validity, revocation; \
             the peer's log says more",
    }
}

/// Why a connection to a peer was not established.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unreachable {
    /// The machine responds, but no process listens at the address.
    NobodyListens,
    /// There is no socket at the path.
    NoSocket,
    /// This process's user may not use the socket.
    Denied,
    /// The host's name has no address.
    UnknownHost,
    /// The network, or a device on the way.
    Network,
}

crate::driver::remedies! {
    Unreachable {
        Self::NobodyListens => "start the server, or correct the address: nobody listens there",
        Self::NoSocket => "start the server, or correct the path: no socket is there",
        Self::Denied =>
            "run as a user that the server admits (`[local] users` of `egmem serve`), and check that \
             this user may enter the socket's folder and write to the socket",
        Self::UnknownHost =>
            "correct the host's name, or check the name service (getent hosts)",
        Self::Network =>
            "check that the host is up, and that its firewall and the network let the port through",
    }
}

impl Unreachable {
    /// Returns the cause of a connect call's error.
    pub const fn of(error: ErrorKind) -> Self {
        match error {
            ErrorKind::ConnectionRefused => Self::NobodyListens,
            ErrorKind::NotFound => Self::NoSocket,
            ErrorKind::PermissionDenied => Self::Denied,
            _ => Self::Network,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_of_connect_has_its_cause() {
        for (kind, cause) in [
            (ErrorKind::ConnectionRefused, Unreachable::NobodyListens),
            (ErrorKind::NotFound, Unreachable::NoSocket),
            (ErrorKind::PermissionDenied, Unreachable::Denied),
            (ErrorKind::HostUnreachable, Unreachable::Network),
        ] {
            assert_eq!(Unreachable::of(kind), cause, "{kind}");
        }
    }
}
