//! The result of a replay, as a table and as JSON.

use std::fmt::Write;
use std::path::Path;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use egmem::size::Bytes;
use serde::Serialize;

use super::Replay;
use super::entrant::{Entrant, Setting};
use super::heap::Ground;
use super::play::{Facts, Script};
use super::trace::{Notes, Trace};

/// All of it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The log's name.
    pub trace: String,
    /// The lines that were read and those that were left out.
    pub log: Notes,
    /// Allocations and frees that are replayed.
    pub operations: usize,
    /// The log's threads.
    pub log_threads: usize,
    /// The log's most live bytes.
    pub peak: u64,
    /// The log's most live blocks.
    pub peak_blocks: u32,
    /// The most bytes that each allocator may give out.
    pub capacity: u64,
    /// The alignment of blocks in bytes.
    pub align: u32,
    /// How often the log was replayed for the median.
    pub repeat: u32,
    /// Whether by the log's threads.
    pub threads: bool,
    /// Whether the heap's memory is simulated; none if no heap took part.
    pub simulated: Option<bool>,
    /// The node of the heap's memory.
    pub node: Option<i32>,
    /// One for each allocator.
    pub results: Vec<Outcome>,
}

/// The result of one allocator.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// Its name.
    pub allocator: String,
    /// Nanoseconds for each operation: the median of all replays but the first.
    pub ns: f64,
    /// The quickest of them.
    pub ns_least: f64,
    /// The slowest of them.
    pub ns_most: f64,
    /// The first replay, in which an allocator grows.
    pub ns_first: f64,
    /// Whether it manages a range of its own. If not, its span says nothing.
    pub bounded: bool,
    /// The span by the live bytes, both at their most.
    pub span_by_peak: Option<f64>,
    /// Figures besides time.
    #[serde(flatten)]
    pub facts: Facts,
    /// Why the first allocation failed that did, where the allocator tells.
    pub refused: Option<String>,
    /// The use of its memory at the moment when most of it was in use, as SVG.
    #[serde(skip)]
    pub picture: Option<String>,
}

impl Outcome {
    /// `times` are those of whole replays in nanoseconds, the first one first.
    pub fn new(name: String, bounded: bool, facts: Facts, times: &[f64], script: &Script) -> Self {
        let operations = script.trace.events.len().max(1) as f64;
        let mut times: Vec<f64> = times.iter().map(|time| time / operations).collect();
        let first = times.remove(0);
        times.sort_by(f64::total_cmp);
        let middle = times.len() / 2;
        let median = match times.len() {
            0 => first,
            even if even % 2 == 0 => (times[middle - 1] + times[middle]) / 2.0,
            _ => times[middle],
        };
        let span = bounded && facts.peak_live > 0;
        Self {
            allocator: name,
            ns: median,
            ns_least: times.first().copied().unwrap_or(first),
            ns_most: times.last().copied().unwrap_or(first),
            ns_first: first,
            bounded,
            span_by_peak: span.then(|| facts.peak_span as f64 / facts.peak_live as f64),
            facts,
            refused: None,
            picture: None,
        }
    }
}

impl Report {
    /// A report without results yet.
    pub fn new(path: &Path, trace: &Trace, options: &Replay, setting: &Setting) -> Self {
        Self {
            trace: path.display().to_string(),
            log: trace.notes.clone(),
            operations: trace.events.len(),
            log_threads: trace.threads.len(),
            peak: trace.peak,
            peak_blocks: trace.peak_blocks,
            capacity: setting.room.capacity,
            align: options.align,
            repeat: options.repeat,
            threads: options.threads,
            simulated: setting.ground.as_ref().map(Ground::is_simulated),
            node: setting.ground.as_ref().map(Ground::node),
            results: Vec::new(),
        }
    }

    /// An allocator that gave out the same bytes twice.
    pub fn broken(&self) -> Option<&str> {
        let broken = self.results.iter().find(|result| result.facts.overlaps > 0);
        broken.map(|result| result.allocator.as_str())
    }

    /// As text: the log's counts, a line for each allocator, and the meaning of the columns.
    pub fn to_text(&self) -> String {
        let mut text = self.head();
        let mut table = Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled)
            .set_header([
                "ALLOCATOR",
                "NS/OP",
                "FIRST",
                "PEAK LIVE",
                "PEAK SPAN",
                "SPAN/PEAK",
                "FAILED",
                "FRAGMENTED",
            ]);
        for result in &self.results {
            let facts = &result.facts;
            let or_dash = |value: Option<String>| value.unwrap_or_else(|| "–".into());
            table.add_row([
                result.allocator.clone(),
                format!("{:.1}", result.ns),
                format!("{:.1}", result.ns_first),
                Bytes(facts.peak_live).to_string(),
                or_dash(result.bounded.then(|| Bytes(facts.peak_span).to_string())),
                or_dash(result.span_by_peak.map(|ratio| format!("{ratio:.3}"))),
                facts.failed.to_string(),
                or_dash(
                    facts
                        .worst_fragmentation
                        .map(|worst| format!("{:.1} %", 100.0 * worst)),
                ),
            ]);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for line in table.lines() {
            let _ = writeln!(text, "{}", line.trim_end().trim_start_matches(' '));
        }
        for result in &self.results {
            if let Some(why) = &result.refused {
                let _ = writeln!(text, "{} failed first with: {why}", result.allocator);
            }
        }
        let _ = write!(
            text,
            "\nNS/OP: CPU time for an allocation or a free, median of {}{}; FIRST: in the first replay,\n\
             while the allocator grows. SPAN: from the first byte given out to the last. FRAGMENTED: 1 − largest\n\
             free range / all free bytes, at the worst. –: not known, or without meaning.\n",
            counted(self.repeat.into(), "replay", "replays"),
            match self.threads {
                true => format!(
                    " by {}, over all of them",
                    counted(self.log_threads as u64, "thread", "threads")
                ),
                false => String::new(),
            },
        );
        if cfg!(debug_assertions) {
            text.push_str("This program was built without optimisation: its times say little.\n");
        }
        text + &self.others()
    }

    fn head(&self) -> String {
        let log = &self.log;
        let mut text = format!(
            "{}: {}, {} and {} by {}; at most {} live in {}\n",
            self.trace,
            counted(log.lines, "line", "lines"),
            counted(log.allocations, "allocation", "allocations"),
            counted(log.frees + log.implied_frees, "free", "frees"),
            counted(self.log_threads as u64, "thread", "threads"),
            Bytes(self.peak),
            counted(self.peak_blocks.into(), "block", "blocks"),
        );
        for (count, one, many, rest) in [
            (log.headers, "header", "headers", ""),
            (log.blank, "empty line", "empty lines", " left out"),
            (
                log.failures,
                "allocation that had failed",
                "allocations that had failed",
                " left out",
            ),
            (
                log.empty,
                "allocation or free of nothing",
                "allocations and frees of nothing",
                " left out",
            ),
            (
                log.unknown_frees,
                "free",
                "frees",
                " left out: unknown to the log, or freed twice",
            ),
            (
                log.others,
                "entry left out that is",
                "entries left out that are",
                " not about blocks",
            ),
            (
                log.other_devices,
                "entry of another device",
                "entries of other devices",
                " left out",
            ),
            (log.bad, "line", "lines", " left out that cannot be read"),
            (
                log.implied_frees,
                "free",
                "frees",
                " put in, where an address came again without one",
            ),
            (
                log.other_sizes,
                "free that tells",
                "frees that tell",
                " another size than the allocation",
            ),
            (log.never_freed, "block", "blocks", " never freed"),
            (
                log.times_back,
                "time that goes back",
                "times that go back",
                "",
            ),
        ] {
            if count > 0 {
                let _ = writeln!(text, "  {}{rest}", counted(count, one, many));
            }
        }
        let _ = writeln!(
            text,
            "Aligned to {}, of {} at most.",
            Bytes(u64::from(self.align)),
            Bytes(self.capacity),
        );
        if let Some(node) = self.node {
            let _ = match self.simulated {
                Some(true) => writeln!(
                    text,
                    "SIMULATED: the heap's memory, on node {node} of a simulated machine. Times are this CPU's and \
                     real;\nwhere the heap grows, in FIRST, they are the simulated driver's and say nothing."
                ),
                _ => writeln!(text, "The heap's memory is on node {node}."),
            };
        }
        text.push('\n');
        text
    }

    /// Allocators that could have taken part.
    fn others(&self) -> String {
        let taken = |name: &String| self.results.iter().any(|result| result.allocator == *name);
        let all = Entrant::all().into_iter().map(Entrant::name);
        let others: Vec<String> = all.filter(|name| !taken(name)).collect();
        let mut text = String::new();
        if !others.is_empty() {
            let _ = writeln!(text, "This build also has {}.", others.join(", "));
        }
        text
    }
}

/// A number and its unit: "1 block", "2 blocks".
pub fn counted(count: u64, one: &str, many: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        _ => format!("{count} {many}"),
    }
}
