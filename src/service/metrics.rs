//! A service's metrics in Prometheus' text form (OpenMetrics 1.0).

use std::fmt::Display;
use std::sync::atomic::Ordering::Relaxed;

use super::http::Pages;
use super::lines::{AuditFile, LineWriter};
use super::reserve::{Counts, Levels};
use super::state::ServiceState;
use crate::exchange::server::ServerStats;

/// The media type of the text.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A metric's type, and the end of its samples' name.
type Kind = (&'static str, &'static str);
const GAUGE: Kind = ("gauge", "");
const COUNTER: Kind = ("counter", "_total");

/// The text while it is written; every name begins with `egmem_`.
#[derive(Default)]
struct Text(String);

/// Writes metrics of one kind: name, help, and a value, or a field with a sample for each node.
macro_rules! metrics {
    ($text:expr, $kind:expr; $($name:literal, $help:literal => $value:expr;)*) => {
        $($text.metric($kind, $name, $help, $value);)*
    };
    ($text:expr, $kind:expr, $nodes:expr, $of:ident; $($name:literal, $help:literal => $field:ident;)*) => {
        $({
            let samples = $nodes.iter().map(|numbers| (numbers.node, numbers.$of.$field));
            $text.family($kind, ($name, $help), "node", samples);
        })*
    };
}

impl Text {
    fn metric(&mut self, kind: Kind, name: &str, help: &str, value: u64) {
        self.family(kind, (name, help), "", [("", value)]);
    }

    /// Writes a metric with a sample for each value of a label.
    fn family<L: Display>(
        &mut self,
        (kind, end): Kind,
        (name, help): (&str, &str),
        label: &str,
        samples: impl IntoIterator<Item = (L, u64)>,
    ) {
        let mut head = format!("# HELP egmem_{name} {help}.\n# TYPE egmem_{name} {kind}\n");
        for (of, value) in samples {
            self.0 += &std::mem::take(&mut head);
            let of = of.to_string().replace('\\', r"\\").replace('"', r#"\""#);
            let of = of.replace('\n', r"\n");
            let label = if label.is_empty() {
                String::new()
            } else {
                format!("{{{label}=\"{of}\"}}")
            };
            self.0 += &format!("egmem_{name}{end}{label} {value}\n");
        }
    }
}

impl Pages for ServiceState {
    fn metrics(&self) -> String {
        let stats = self.server().map(|server| server.stats());
        let stats = stats.unwrap_or_default();
        let mut text = Text::default();
        self.gauges(&mut text, &stats);
        self.counts(&mut text, &stats);
        self.nodes(&mut text);
        text.0 + "# EOF\n"
    }

    /// Returns whether the service is ready, or the reason why not.
    fn readiness(&self) -> Result<(), String> {
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
}

impl ServiceState {
    /// Writes the numbers that rise and fall.
    fn gauges(&self, text: &mut Text, stats: &ServerStats) {
        let (charged, owners) = self.ledger.all();
        if let Some(registered) = self.is_registered() {
            let help = "Whether the directory knows this service";
            text.metric(GAUGE, "directory_registered", help, registered.into());
        }
        metrics! { text, GAUGE;
            "ready", "Whether the service is ready" => self.readiness().is_ok().into();
            "draining", "Whether the service is ending" => self.draining.load(Relaxed).into();
            "connections", "Open connections" => stats.connections;
            "handshakes", "Open connections that have not been greeted yet" => stats.handshakes;
            "fds", "File descriptors open for peers" => stats.fds;
            "sessions", "Sessions, with and without a connection" => stats.sessions;
            "leases", "Leases that are held" => stats.leases;
            "names", "Published names" => stats.names;
            "published_bytes", "Published memory, padding included" => stats.bytes;
            "owners", "Peers that have created names" => owners as u64;
            "unconfirmed_bytes", "Bytes of deleted names that a silent holder may still have mapped"
                => charged.unconfirmed;
        }
        let help = "Bytes that count against peers' quotas, by what they are";
        let by_use = [
            ("named", charged.named),
            ("unconfirmed", charged.unconfirmed),
            ("dirty", charged.dirty),
            ("kept", charged.kept),
        ];
        text.family(GAUGE, ("charged_bytes", help), "state", by_use);
    }

    /// Writes the numbers that only rise.
    fn counts(&self, text: &mut Text, stats: &ServerStats) {
        let asked = &self.asked;
        metrics! { text, COUNTER;
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
            "dropped_peers", "Connections ended because the peer was silent or slow, or had no room for a notice"
                => stats.dropped_peers;
            "resumed", "Sessions that went on after a broken connection" => stats.resumed;
            "requests", "Requests" => stats.requests;
            "fetches", "Leases granted" => stats.fetches;
            "released", "Leases released by their holders" => stats.released;
            "expired", "Leases that ended because their holder went silent" => stats.expired;
        }
        let refusals = stats
            .refusals
            .iter()
            .map(|(reason, &count)| (reason, count));
        let help = "Requests refused, by reason";
        text.family(COUNTER, ("refusals", help), "reason", refusals);
    }

    /// Writes the numbers of each node.
    fn nodes(&self, text: &mut Text) {
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|(node, reserve)| NodeNumbers {
            node: node.0,
            levels: reserve.levels(),
            counts: reserve.counts(),
        });
        let nodes: Vec<_> = nodes.collect();
        metrics! { text, GAUGE, &nodes, levels;
            "reserve_target_bytes", "Bytes to keep ready for any peer" => target;
            "reserve_bytes", "Bytes ready for any peer" => warm;
            "kept_bytes", "Bytes ready for the one peer that had them" => kept;
            "dirty_bytes", "Bytes waiting to be zeroed" => dirty;
            "pinned_bytes", "Bytes that the service has pinned" => pinned;
        }
        metrics! { text, COUNTER, &nodes, counts;
            "chunks_made", "Pieces of memory made by the driver" => made_chunks;
            "made_bytes", "Bytes made by the driver" => made_bytes;
            "chunks_failed", "Pieces of memory that the driver or a limit refused" => failed_chunks;
            "taken_warm_bytes", "Bytes given out that were ready" => taken_warm_bytes;
            "taken_cold_bytes", "Bytes given out that had to be made first" => taken_cold_bytes;
            "scrubbed_bytes", "Bytes zeroed for reuse" => scrubbed_bytes;
            "scrub_failures", "Pieces that could not be zeroed" => scrub_failures;
            "discarded_tainted_bytes", "Bytes given up because a holder may still have them mapped"
                => discarded_tainted_bytes;
            "discarded_policy_bytes", "Bytes given up by the reuse policy or because they were unused"
                => discarded_policy_bytes;
            "evicted_bytes", "Bytes in reserve given up for requests" => evicted_bytes;
        }
    }
}

/// A node's number, and its reserve's.
struct NodeNumbers {
    node: i32,
    levels: Levels,
    counts: Counts,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_comments_and_samples() {
        let mut text = Text::default();
        text.metric(GAUGE, "ready", "Whether it is ready", 1);
        text.metric(COUNTER, "fetches", "Leases granted", u64::MAX);
        let samples = [("quota\"\n\\", 2), ("limit", 3)];
        text.family(COUNTER, ("refusals", "By reason"), "reason", samples);
        text.family(
            GAUGE,
            ("none", "None"),
            "node",
            [0; 0].map(|node| (node, 0)),
        );
        let expected = r#"# HELP egmem_ready Whether it is ready.
# TYPE egmem_ready gauge
egmem_ready 1
# HELP egmem_fetches Leases granted.
# TYPE egmem_fetches counter
egmem_fetches_total 18446744073709551615
# HELP egmem_refusals By reason.
# TYPE egmem_refusals counter
egmem_refusals_total{reason="quota\"\n\\"} 2
egmem_refusals_total{reason="limit"} 3
"#;
        assert_eq!(text.0, expected);
    }
}
