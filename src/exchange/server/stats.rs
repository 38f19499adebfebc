//! Statistics of a server.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::Refusal;
use crate::per_driver::lock;

/// A server's statistics: gauges, then counts since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerStats {
    /// Open connections, including those that have not said hello yet.
    pub connections: u64,
    /// Those of them that have not been greeted yet.
    pub handshakes: u64,
    /// Sessions, with and without a connection.
    pub sessions: u64,
    /// Live leases.
    pub leases: u64,
    /// Published names.
    pub names: u64,
    /// Published memory in bytes, including padding; for windows only their own bytes.
    pub bytes: u64,
    /// Open file descriptors that are being sent to peers.
    pub fds: u64,
    /// Running tasks and blocking calls of the server. 0 after [`close`](super::Server::close).
    pub tasks: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections that failed before their hello was answered by a welcome.
    pub failed_handshakes: u64,
    /// Those of them that gave way to newer ones.
    pub dropped_handshakes: u64,
    /// Connections ended because the peer violated the protocol.
    pub protocol_errors: u64,
    /// Connections ended because the peer was silent, or did not read in time.
    pub dropped_peers: u64,
    /// Sessions that were resumed after a broken connection.
    pub resumed: u64,
    /// Requests.
    pub requests: u64,
    /// Leases granted.
    pub fetches: u64,
    /// Leases released by their holders.
    pub released: u64,
    /// Leases that ended because their holder fell silent.
    pub expired: u64,
    /// Sessions that moved from TCP to a Unix socket.
    pub moved: u64,
    /// Refusals, by reason.
    pub refusals: BTreeMap<String, u64>,
}

/// Counters that change as events happen. Atomic, because each request changes one.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub connections: AtomicU64,
    pub handshakes: AtomicU64,
    pub accepted: AtomicU64,
    pub failed_handshakes: AtomicU64,
    pub dropped_handshakes: AtomicU64,
    pub protocol_errors: AtomicU64,
    pub dropped_peers: AtomicU64,
    pub resumed: AtomicU64,
    pub requests: AtomicU64,
    pub fetches: AtomicU64,
    pub released: AtomicU64,
    pub expired: AtomicU64,
    pub moved: AtomicU64,
    refusals: Mutex<BTreeMap<String, u64>>,
}

/// A function that returns one of the counters.
pub(super) type Gauge = fn(&Counters) -> &AtomicU64;

impl Counters {
    /// Increments a counter.
    pub fn count(&self, gauge: Gauge) {
        gauge(self).fetch_add(1, Relaxed);
    }

    /// Decrements a counter.
    pub fn lower(&self, gauge: Gauge) {
        gauge(self).fetch_sub(1, Relaxed);
    }

    /// Counts a refusal.
    pub fn refused(&self, reason: &Refusal) {
        let mut refusals = lock(&self.refusals);
        // An allocator may have reasons of its own, but only so many are counted.
        let word = match reason.word() {
            word if refusals.contains_key(word) || refusals.len() < 64 => word,
            _ => "other",
        };
        *refusals.entry(word.to_owned()).or_default() += 1;
    }

    /// Returns the counts, with the gauges left at 0.
    pub fn read(&self) -> ServerStats {
        let refusals = lock(&self.refusals);
        ServerStats {
            connections: self.connections.load(Relaxed),
            handshakes: self.handshakes.load(Relaxed),
            accepted: self.accepted.load(Relaxed),
            failed_handshakes: self.failed_handshakes.load(Relaxed),
            dropped_handshakes: self.dropped_handshakes.load(Relaxed),
            protocol_errors: self.protocol_errors.load(Relaxed),
            dropped_peers: self.dropped_peers.load(Relaxed),
            resumed: self.resumed.load(Relaxed),
            requests: self.requests.load(Relaxed),
            fetches: self.fetches.load(Relaxed),
            released: self.released.load(Relaxed),
            expired: self.expired.load(Relaxed),
            moved: self.moved.load(Relaxed),
            refusals: refusals.clone(),
            ..ServerStats::default()
        }
    }
}
