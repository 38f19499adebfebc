//! A service's metrics in Prometheus' text form (OpenMetrics 1.0).

use std::fmt::{Display, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::LineWriter;
use super::audit::AuditFile;
use super::http::Pages;
use super::reserve::{Counters, Levels};
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

/// Writes metrics of one kind: name, help, value.
macro_rules! metrics {
    ($text:expr, $kind:expr; $($name:literal, $help:literal => $value:expr;)*) => {
        $($text.metric($kind, $name, $help, $value);)*
    };
}

impl Text {
    fn metric(&mut self, kind: Kind, name: &str, help: &str, value: u64) {
        self.head(kind, name, help);
        let _ = writeln!(self.0, "egmem_{name}{} {value}", kind.1);
    }

    /// Writes a metric with a sample for each value of a label.
    fn family<L: Display>(
        &mut self,
        kind: Kind,
        (name, help): (&str, &str),
        label: &str,
        samples: impl IntoIterator<Item = (L, u64)>,
    ) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_some() {
            self.head(kind, name, help);
        }
        for (of, value) in samples {
            let of = of.to_string().replace('\\', r"\\").replace('"', r#"\""#);
            let of = of.replace('\n', r"\n");
            let _ = writeln!(self.0, "egmem_{name}{}{{{label}=\"{of}\"}} {value}", kind.1);
        }
    }

    fn head(&mut self, (kind, _): Kind, name: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.0,
            "# HELP egmem_{name} {help}.\n# TYPE egmem_{name} {kind}"
        );
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
            "doubtful_bytes", "Bytes of deleted names that a silent holder may still have mapped"
                => charged.unconfirmed;
        }
        let help = "Bytes that count against peers' quotas, by what they are";
        let by_use = [
            ("named", charged.named),
            ("doubtful", charged.unconfirmed),
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
            "dropped_peers", "Connections ended because the peer was silent or slow"
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
        let levels: Vec<_> = self
            .nodes
            .iter()
            .map(|(node, of)| (node.0, of.levels()))
            .collect();
        let mut level = |name, help, of: fn(&Levels) -> u64| {
            let all = levels.iter().map(|(node, levels)| (node, of(levels)));
            text.family(GAUGE, (name, help), "node", all);
        };
        level(
            "reserve_target_bytes",
            "Bytes to keep ready for any peer",
            |l| l.target,
        );
        level("reserve_bytes", "Bytes ready for any peer", |l| l.warm);
        level(
            "kept_bytes",
            "Bytes ready for the one peer that had them",
            |l| l.kept,
        );
        level("dirty_bytes", "Bytes waiting to be zeroed", |l| l.dirty);
        level("pinned_bytes", "Bytes that the service has pinned", |l| {
            l.pinned
        });
        let mut count = |name, help, of: fn(&Counters) -> &AtomicU64| {
            let all = self.nodes.iter();
            let all = all.map(|(node, reserve)| (node.0, of(reserve.counters()).load(Relaxed)));
            text.family(COUNTER, (name, help), "node", all);
        };
        count("chunks_made", "Pieces of memory made by the driver", |c| {
            &c.made_chunks
        });
        count("made_bytes", "Bytes made by the driver", |c| &c.made_bytes);
        let help = "Pieces of memory that the driver or a limit refused";
        count("chunks_failed", help, |c| &c.failed_chunks);
        count("taken_warm_bytes", "Bytes given out that were ready", |c| {
            &c.taken_warm_bytes
        });
        let help = "Bytes given out that had to be made first";
        count("taken_cold_bytes", help, |c| &c.taken_cold_bytes);
        count("scrubbed_bytes", "Bytes zeroed for reuse", |c| {
            &c.scrubbed_bytes
        });
        count("scrub_failures", "Pieces that could not be zeroed", |c| {
            &c.scrub_failures
        });
        let help = "Bytes given up because a holder may still have them mapped";
        count("discarded_tainted_bytes", help, |c| {
            &c.discarded_tainted_bytes
        });
        let help = "Bytes given up by the reuse policy or because they were unused";
        count("discarded_policy_bytes", help, |c| {
            &c.discarded_policy_bytes
        });
        count(
            "evicted_bytes",
            "Bytes in reserve given up for requests",
            |c| &c.evicted_bytes,
        );
    }
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
