//! Reports as tables.

use std::collections::BTreeMap;

use crate::driver::Location;
use crate::entries::Party;
use crate::holders_text::holders;
use crate::report::{Exporter, Report};
use crate::size::Bytes;
use crate::table::Table;
use crate::text::{COLUMNS, escaped, ledger, place, some_bytes};

impl Report {
    /// Returns the report as tables: lines of at most 100 characters, in which long names are cut. Errors are not cut.
    pub fn to_text(&self) -> String {
        report(self, Some(COLUMNS))
    }

    /// Returns the tables with all that is known, in lines of any length.
    pub fn to_wide_text(&self) -> String {
        report(self, None)
    }
}

/// Formats a report over all processes.
fn report(report: &Report, most: Option<usize>) -> String {
    let mut text = String::new();
    for process in &report.processes {
        text += &ledger(process, most);
        text.push('\n');
    }
    if report.processes.is_empty() {
        text += "No process of this user offers its ledger: run programs with EGMEM_PS=1.\n\n";
    }
    for silent in &report.silent {
        let who = match silent.pid {
            Some(pid) => format!("process {pid} did not answer"),
            None => "processes are missing".into(),
        };
        text += &format!("{who}: {}\n", escaped(&silent.why));
    }
    text += &capacities(report, most);
    text += &kept(report, most);
    text += &holders(report, most);
    text
}

/// The columns that need words, the first where the kernel tells its own use.
const ORDINARY: &str = "ORDINARY: programs' plain memory, page cache, kernel. ";
const EGMEM: &str = "EGMEM: the allocations above.\n";

/// Formats the memory of each node and GPU, with the part that no ledger accounts for.
fn capacities(report: &Report, most: Option<usize>) -> String {
    let mut table =
        Table::with("WHERE, >TOTAL, >IN USE, >ORDINARY, >EGMEM, >MANAGED, >NOT ACCOUNTED FOR");
    let unknown =
        |bytes: Option<u64>| bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string());
    for node in &report.nodes {
        table.row([
            place(node.node.into()),
            Bytes(node.total).to_string(),
            Bytes(node.used).to_string(),
            node.kernel
                .map_or_else(String::new, |bytes| Bytes(bytes).to_string()),
            Bytes(node.accounted).to_string(),
            String::new(),
            unknown(node.unaccounted),
        ]);
    }
    for gpu in &report.gpus {
        table.row([
            place(Location::Device(gpu.gpu)),
            unknown(gpu.total),
            unknown(gpu.used),
            String::new(),
            Bytes(gpu.accounted).to_string(),
            some_bytes(gpu.managed),
            unknown(gpu.unaccounted),
        ]);
    }
    let mut text = table.lines(most);
    if report.nodes.iter().any(|node| node.kernel.is_some()) {
        text += ORDINARY;
    }
    text += EGMEM;
    for gpu in &report.gpus {
        if let Some(why) = &gpu.why {
            let location = place(Location::Device(gpu.gpu));
            text += &format!("{location}: {}\n", escaped(why));
        }
    }
    for warning in &report.warnings {
        text += &format!("{}\n", escaped(warning));
    }
    text
}

fn words(exporter: &Exporter) -> String {
    let name = |party: &Option<Party>| match party {
        Some(party) => party.name.clone(),
        None => "unknown".into(),
    };
    match exporter {
        Exporter::Ended(party) => format!("ended: {}", party.name),
        Exporter::Running(party) => format!("runs: {}", party.name),
        Exporter::Elsewhere(party) => format!("elsewhere: {}", name(party)),
        Exporter::Unknown(party) => name(party),
    }
}

/// Formats imported memory that no process has as its own.
fn kept(report: &Report, most: Option<usize>) -> String {
    if report.kept.is_empty() {
        return String::new();
    }
    // Parts of one memory have the same exporter and importers.
    let mut sums: BTreeMap<[String; 3], (u64, u64)> = BTreeMap::new();
    for kept in &report.kept {
        let importers = kept.importers.iter();
        let importers: Vec<String> = importers
            .map(|importer| format!("{} ({})", importer.process.pid, importer.process.title()))
            .collect();
        let cells = [
            place(kept.location),
            escaped(&words(&kept.exporter)),
            escaped(&importers.join(", ")),
        ];
        let (count, bytes) = sums.entry(cells).or_default();
        *count += 1;
        *bytes = bytes.saturating_add(kept.bytes);
    }
    let mut table = Table::with(">COUNT, >SIZE, WHERE, ~EXPORTER, ~KEPT BY");
    for ([location, exporter, importers], (count, bytes)) in sums {
        table.row([
            count.to_string(),
            Bytes(bytes).to_string(),
            location,
            exporter,
            importers,
        ]);
    }
    format!(
        "\nImported memory that no process above has allocated:\n{}",
        table.lines(most)
    )
}
