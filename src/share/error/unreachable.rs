//! Why a connection to a peer was not established.

use std::io::ErrorKind;

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
