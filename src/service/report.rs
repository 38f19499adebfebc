//! Collects the numbers for a service's metrics.

use std::sync::atomic::Ordering::Relaxed;

use super::LineWriter;
use super::audit::AuditFile;
use super::http::Pages;
use super::metrics::{self, NodeNumbers, Row, Snapshot, rows};
use super::state::ServiceState;
use crate::exchange::server::ServerStats;

impl ServiceState {
    /// Returns whether the service is ready, or the reason why not.
    pub fn readiness(&self) -> Result<(), String> {
        if self.draining.load(Relaxed) {
            return Err("draining".into());
        }
        match *self.unready.borrow() {
            0 => Ok(()),
            count => Err(format!(
                "{count} reserves or steps of the start are not done"
            )),
        }
    }

    /// Returns all current numbers.
    pub fn snapshot(&self) -> Snapshot {
        let stats = self
            .server()
            .map(|server| server.stats())
            .unwrap_or_default();
        let (charged, owners) = self.ledger.all();
        let nodes = self
            .nodes
            .iter()
            .map(|(node, reserve)| NodeNumbers::new(*node, reserve.levels(), reserve.counters()));
        Snapshot {
            gauges: self.gauges(&stats, charged.unconfirmed, owners),
            counts: self.counts(&stats),
            charged: vec![
                ("named", charged.named),
                ("doubtful", charged.unconfirmed),
                ("dirty", charged.dirty),
                ("kept", charged.kept),
            ],
            refusals: stats.refusals.into_iter().collect(),
            nodes: nodes.collect(),
        }
    }

    /// Returns the numbers that rise and fall.
    fn gauges(&self, stats: &ServerStats, unconfirmed: u64, owners: usize) -> Vec<Row> {
        let mut gauges = Vec::new();
        if let Some(registered) = self.is_registered() {
            let help = "Whether the directory knows this service";
            gauges.push(("directory_registered", help, u64::from(registered)));
        }
        gauges.extend(rows! {
            "ready", "Whether the service is ready" => u64::from(self.readiness().is_ok());
            "draining", "Whether the service is ending" => u64::from(self.draining.load(Relaxed));
            "connections", "Open connections" => stats.connections;
            "handshakes", "Open connections that have not been greeted yet" => stats.handshakes;
            "fds", "File descriptors open for peers" => stats.fds;
            "peer_bytes", "Bytes kept for peers" => stats.peer_bytes;
            "sessions", "Sessions, with and without a connection" => stats.sessions;
            "leases", "Leases that are held" => stats.leases;
            "names", "Published names" => stats.names;
            "published_bytes", "Published memory, padding included" => stats.bytes;
            "owners", "Peers that have created names" => owners as u64;
            "doubtful_bytes", "Bytes of deleted names that a silent holder may still have mapped"
                => unconfirmed;
        });
        gauges
    }

    /// Returns the numbers that only rise.
    fn counts(&self, stats: &ServerStats) -> Vec<Row> {
        let asked = &self.asked;
        rows! {
        "created", "Names created by request" => asked.created.load(Relaxed);
        "deleted", "Names deleted by request" => asked.deleted.load(Relaxed);
        "creations_refused", "Requests for memory that were refused"
            => asked.refused.load(Relaxed);
        "forgiven_bytes", "Bytes of unconfirmed releases that no longer count after too long a silence"
            => asked.forgiven_bytes.load(Relaxed);
        "dropped_log_lines", "Lines of the log that were not read in time"
            => self.log.get().map_or(0, LineWriter::dropped);
        "dropped_audit_lines", "Lines of the audit log that could not be written"
            => self.audit.as_ref().map_or(0, AuditFile::dropped);
        "accepted", "Connections accepted" => stats.accepted;
        "failed_handshakes", "Connections that did not get to a welcome"
            => stats.failed_handshakes;
        "dropped_handshakes", "Connections that gave way to newer ones before a welcome"
            => stats.dropped_handshakes;
        "protocol_errors", "Connections ended because the peer broke the protocol"
            => stats.protocol_errors;
        "dropped_peers", "Connections ended because the peer was silent or slow"
            => stats.dropped_peers;
        "resumed", "Sessions that went on after a broken connection" => stats.resumed;
        "requests", "Requests" => stats.requests;
        "fetches", "Leases granted" => stats.fetches;
        "released", "Leases released by their holders" => stats.released;
        "expired", "Leases that ended because their holder went silent" => stats.expired;
            }
    }
}

impl Pages for ServiceState {
    fn metrics(&self) -> String {
        metrics::encode(self.snapshot())
    }

    fn readiness(&self) -> Result<(), String> {
        self.readiness()
    }
}
