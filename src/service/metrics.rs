//! A service's metrics in Prometheus' text form (OpenMetrics 1.0).

use std::fmt::Error as FmtError;
use std::sync::atomic::Ordering::Relaxed;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::reserve::{Counters, Levels};
use crate::driver::NodeId;

/// The media type of [`encode`]'s text.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Returns metrics by name, with a help text and a value: a row each.
macro_rules! rows {
    ($($name:literal, $help:literal => $value:expr;)*) => {
        vec![$(($name, $help, $value)),*]
    };
}
pub(super) use rows;

/// A number's name, what it is, and its value.
pub(crate) type Row = (&'static str, &'static str, u64);

/// One node's numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeNumbers {
    pub node: i32,
    pub levels: Levels,
    counts: Vec<Row>,
}

impl NodeNumbers {
    pub fn new(node: NodeId, levels: Levels, counters: &Counters) -> Self {
        Self {
            node: node.0,
            levels,
            counts: rows! {
                "chunks_made", "Pieces of memory made by the driver" => counters.made_chunks.load(Relaxed);
                "made_bytes", "Bytes made by the driver" => counters.made_bytes.load(Relaxed);
                "chunks_failed", "Pieces of memory that the driver or a limit refused"
                    => counters.failed_chunks.load(Relaxed);
                "taken_warm_bytes", "Bytes given out that were ready" => counters.taken_warm_bytes.load(Relaxed);
                "taken_cold_bytes", "Bytes given out that had to be made first"
                    => counters.taken_cold_bytes.load(Relaxed);
                "scrubbed_bytes", "Bytes zeroed for reuse" => counters.scrubbed_bytes.load(Relaxed);
                "scrub_failures", "Pieces that could not be zeroed" => counters.scrub_failures.load(Relaxed);
                "discarded_tainted_bytes", "Bytes given up because a holder may still have them mapped"
                    => counters.discarded_tainted_bytes.load(Relaxed);
                "discarded_policy_bytes", "Bytes given up by the reuse policy or because they were unused"
                    => counters.discarded_policy_bytes.load(Relaxed);
                "evicted_bytes", "Bytes in reserve given up for requests" => counters.evicted_bytes.load(Relaxed);
            },
        }
    }
}

/// All numbers of the metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// Gauges without labels: name, help, value.
    pub gauges: Vec<Row>,
    /// Counters since the start, likewise.
    pub counts: Vec<Row>,
    /// Bytes that peers are charged with, by use.
    pub charged: Vec<(&'static str, u64)>,
    /// Refusals by reason.
    pub refusals: Vec<(String, u64)>,
    pub nodes: Vec<NodeNumbers>,
}

/// Name, help, and the number's accessor.
type Level = (&'static str, &'static str, fn(&Levels) -> u64);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), FmtError> {
        for &(name, help, value) in &self.gauges {
            let gauge = ConstGauge::new(signed(value));
            let kind = gauge.metric_type();
            gauge.encode(encoder.encode_descriptor(name, help, None, kind)?)?;
        }
        for &(name, help, value) in &self.counts {
            let counter = ConstCounter::new(value);
            let kind = counter.metric_type();
            counter.encode(encoder.encode_descriptor(name, help, None, kind)?)?;
        }
        if !self.charged.is_empty() {
            let help = "Bytes that count against peers' quotas, by what they are";
            let kind = ConstGauge::new(0_i64).metric_type();
            let mut family = encoder.encode_descriptor("charged_bytes", help, None, kind)?;
            for &(state, value) in &self.charged {
                let labels = [("state", state)];
                ConstGauge::new(signed(value)).encode(family.encode_family(&labels)?)?;
            }
        }
        if !self.refusals.is_empty() {
            let help = "Requests refused, by reason";
            let kind = ConstCounter::new(0_u64).metric_type();
            let mut family = encoder.encode_descriptor("refusals", help, None, kind)?;
            for (reason, value) in &self.refusals {
                let labels = [("reason", reason.as_str())];
                ConstCounter::new(*value).encode(family.encode_family(&labels)?)?;
            }
        }
        let levels: Vec<Level> = rows! {
            "reserve_target_bytes", "Bytes to keep ready for any peer" => |l| l.target;
            "reserve_bytes", "Bytes ready for any peer" => |l| l.warm;
            "kept_bytes", "Bytes ready for the one peer that had them" => |l| l.kept;
            "dirty_bytes", "Bytes waiting to be zeroed" => |l| l.dirty;
            "pinned_bytes", "Bytes that the service has pinned" => |l| l.pinned;
        };
        for (name, help, level) in levels {
            let kind = ConstGauge::new(0_i64).metric_type();
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for node in &self.nodes {
                let labels = [("node", node.node)];
                ConstGauge::new(signed(level(&node.levels)))
                    .encode(family.encode_family(&labels)?)?;
            }
        }
        let names = self.nodes.first().map_or(&[][..], |node| &node.counts);
        for (at, &(name, help, _)) in names.iter().enumerate() {
            let kind = ConstCounter::new(0_u64).metric_type();
            let mut family = encoder.encode_descriptor(name, help, None, kind)?;
            for node in &self.nodes {
                let labels = [("node", node.node)];
                let value = node.counts.get(at).map_or(0, |&(_, _, value)| value);
                ConstCounter::new(value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Encodes the snapshot as text; every name begins with `egmem_`.
pub(crate) fn encode(snapshot: Snapshot) -> String {
    let mut registry = Registry::with_prefix("egmem");
    registry.register_collector(Box::new(snapshot));
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = text::encode(&mut out, &registry);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_comment_or_a_sample_and_the_end_is_marked() {
        let counters = Counters::default();
        counters.made_chunks.store(3, Relaxed);
        let levels = Levels {
            warm: 1 << 40,
            ..Levels::default()
        };
        let node = |id| NodeNumbers::new(NodeId(id), levels, &counters);
        let text = encode(Snapshot {
            gauges: vec![("ready", "Whether it is ready", 1)],
            counts: vec![("fetches", "Leases granted", u64::MAX)],
            charged: vec![("kept", 7)],
            refusals: vec![("quota\"\n".into(), 2)],
            nodes: vec![node(0), node(1)],
        });
        for line in [
            "egmem_ready 1",
            "egmem_fetches_total 18446744073709551615",
            "egmem_refusals_total{reason=\"quota\\\"\\n\"} 2",
            "egmem_charged_bytes{state=\"kept\"} 7",
            "egmem_reserve_bytes{node=\"0\"} 1099511627776",
            "egmem_chunks_made_total{node=\"1\"} 3",
            "# TYPE egmem_pinned_bytes gauge",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("egmem_"), "{line}");
            value.parse::<u64>().unwrap();
        }
    }
}
