//! Statistics of a server.

use std::collections::BTreeMap;
use std::sync::Mutex;

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

/// The counts, and the gauges that change as events happen.
#[derive(Debug, Default)]
pub(super) struct Counters(Mutex<ServerStats>);

/// A function that returns one of the counters.
pub(super) type Gauge = fn(&mut ServerStats) -> &mut u64;

impl Counters {
    /// Increments a counter.
    pub fn count(&self, gauge: Gauge) {
        *gauge(&mut lock(&self.0)) += 1;
    }

    /// Decrements a gauge.
    pub fn lower(&self, gauge: Gauge) {
        *gauge(&mut lock(&self.0)) -= 1;
    }

    /// Counts a refusal.
    pub fn refused(&self, reason: &Refusal) {
        let refusals = &mut lock(&self.0).refusals;
        // An allocator may have reasons of its own, but only so many are counted.
        let word = match reason.word() {
            word if refusals.contains_key(word) || refusals.len() < 64 => word,
            _ => "other",
        };
        *refusals.entry(word.to_owned()).or_default() += 1;
    }

    /// Returns them, with the other gauges left at 0.
    pub fn read(&self) -> ServerStats {
        lock(&self.0).clone()
    }
}
