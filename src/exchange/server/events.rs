//! A server's events, for its owner.

use std::time::Duration;

use crate::PeerName;

/// An event of a server.
///
/// Events pass through a bounded queue: a receiver that does not keep up loses the oldest and learns how
/// many.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServerEvent {
    /// A peer's session has begun.
    PeerCame {
        /// The peer.
        peer: PeerName,
        /// The session's number, which is not a secret.
        session: u64,
    },
    /// A peer's session has ended.
    PeerGone {
        /// The peer.
        peer: PeerName,
        /// The session's number.
        session: u64,
    },
    /// The server has ended a peer's session: the peer's certificate has expired or is no longer trusted, or
    /// the peer is no longer admitted. Its leases expire with it.
    Dismissed {
        /// The peer.
        peer: PeerName,
        /// The session's number.
        session: u64,
        /// The reason.
        why: String,
    },
    /// A peer has got a lease.
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
    /// A peer's lease has ended without a release, because the peer fell silent, or lost its right to the
    /// memory: it may still have the memory mapped.
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
