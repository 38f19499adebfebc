//! The states of a followed name.

use std::fmt;

use crate::Error;
use crate::client::{LeaseState, RemoteBuffer};

/// The current state of a followed name.
#[derive(Debug)]
#[non_exhaustive]
pub enum Followed {
    /// Memory that was not returned before: imported, mapped, and with its own lease.
    Memory(Box<RemoteBuffer>),
    /// No memory at present. The caller should drop the memory returned before.
    Gone(Absence),
}

/// Why a followed name has no memory at present.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Absence {
    /// This client cannot fetch anything under the name: it was never published, it was withdrawn or deleted,
    /// or this client has no right to it. The server does not tell which.
    NotThere,
    /// The server is gone, or silent for longer than a lease; the error says how this is known. The client
    /// keeps reconnecting.
    Away(Error),
    /// The lease on the memory returned last is being withdrawn, or is lost.
    Lease(LeaseState),
    /// The client cannot fetch the memory at present.
    ///
    /// - If the error may pass, the next attempt follows after a pause. The error may also be one of the request
    ///   that looks the name up. A failed request is not reported while a lease on the returned memory is held.
    /// - If this client cannot use this memory ([`Error::Mismatched`], [`Error::NoCommonHandle`],
    ///   [`Error::Refused`] with `read_only`, `wrong_owner` or `no_common_handle`), the next attempt follows when
    ///   the name gets other memory, another owner or other access, or after a new connection.
    /// - [`Error::Stale`]: the server granted other memory than it listed, or withdrew it at once, three times.
    ///   The next attempt follows after a pause.
    Unavailable(Error),
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotThere => f.write_str("nothing that this client may fetch is under the name"),
            Self::Away(why) => write!(f, "the server is away: {why}"),
            Self::Lease(state) => write!(f, "the lease is {state}"),
            Self::Unavailable(why) => write!(f, "not available: {why}"),
        }
    }
}
