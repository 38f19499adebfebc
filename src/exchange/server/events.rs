//! What happens on a server, for its owner.

use std::time::Duration;

use crate::exchange::PeerName;

/// What has happened on a server.
///
/// They come over a bounded queue: a receiver that does not keep up loses the oldest and is told how
/// many.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerEvent {
    /// A peer's session begins.
    PeerCame {
        /// The peer.
        peer: PeerName,
        /// The session's number, which is no secret.
        session: u64,
    },
    /// A peer's session has ended.
    PeerGone {
        /// The peer.
        peer: PeerName,
        /// The session's number.
        session: u64,
    },
    /// A peer's session was ended by the server: the peer's certificate has expired or is not trusted
    /// any more, or the peer is not admitted any more. Its leases expire with it.
    Dismissed {
        /// The peer.
        peer: PeerName,
        /// The session's number.
        session: u64,
        /// Why.
        why: String,
    },
    /// A peer has a lease now.
    Fetched {
        /// The peer.
        peer: PeerName,
        /// The name of the memory.
        name: String,
        /// The lease.
        lease: u64,
    },
    /// A peer has unmapped memory and ended its lease.
    Released {
        /// The peer.
        peer: PeerName,
        /// The name of the memory.
        name: String,
        /// The lease.
        lease: u64,
    },
    /// A peer's lease has ended without its release, because the peer went silent, or may not have the
    /// memory any more: it may still have the memory mapped.
    LeaseExpired {
        /// The peer.
        peer: PeerName,
        /// The name of the memory.
        name: String,
        /// The lease.
        lease: u64,
        /// How long it had the lease.
        held: Duration,
    },
}
