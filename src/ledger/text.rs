//! Ledgers as tables.

use std::collections::{BTreeMap, HashMap};

use crate::driver::Location;
use crate::entries::{Allocation, Party};
use crate::ledger::{Ledger, Total};
use crate::report::{Exporter, Report};
use crate::size::Bytes;
use crate::table::Table;
use crate::texts::escape;

impl Ledger {
    /// Returns a table of the allocations and one of the sums.
    pub fn to_text(&self) -> String {
        ledger(self)
    }
}

impl Report {
    /// Returns the report as tables.
    pub fn to_text(&self) -> String {
        report(self)
    }
}

/// Text of programs and other processes, in one line.
fn escaped(text: &str) -> String {
    escape(text).into_owned()
}

/// Formats an age: `850 ms`, `12 s`, `5 min`, `3 h`, `2 d`.
fn age(ms: u64) -> String {
    match ms / 1000 {
        0 => format!("{ms} ms"),
        s @ 1..120 => format!("{s} s"),
        s @ 120..7200 => format!("{} min", s / 60),
        s @ 7200..172_800 => format!("{} h", s / 3600),
        s => format!("{} d", s / 86_400),
    }
}

/// Formats the other processes that have an allocation: `to process 7 of user 0`, `from …`.
fn others(entry: &Allocation) -> String {
    let mut words = Vec::new();
    if let Some(imported) = &entry.imported {
        let from = imported.from.as_ref();
        let from = from.map_or("unknown", |party| party.name.as_str());
        words.push(format!("from {from}"));
    }
    match entry.exported_to.as_slice() {
        [] if entry.exports > 0 => words.push(format!("exported {}×", entry.exports)),
        [] => {}
        [party] => words.push(format!("to {}", party.name)),
        [.., last] => {
            let more = entry.exported_to.len() - 1;
            words.push(format!("to {} and {more} more", last.name));
        }
    }
    escaped(&words.join(", "))
}

/// Allocations that differ in size, age and address alone: one line of a table.
struct Alike<'a> {
    first: &'a Allocation,
    count: u64,
    bytes: u64,
    age_ms: u64,
    /// The cells that they share: from place to site.
    cells: [String; 6],
}

/// Returns groups of allocations that are alike, by their oldest.
fn alike(entries: &[Allocation]) -> Vec<Alike<'_>> {
    let mut groups: Vec<Alike<'_>> = Vec::new();
    let mut known: HashMap<([String; 6], bool), usize> = HashMap::new();
    for entry in entries {
        let key = (cells(entry), entry.mapped.is_empty());
        match known.get(&key) {
            Some(&group) => {
                let group = &mut groups[group];
                group.count += 1;
                group.bytes = group.bytes.saturating_add(entry.bytes);
                group.age_ms = group.age_ms.max(entry.age_ms);
            }
            None => {
                groups.push(Alike {
                    first: entry,
                    count: 1,
                    bytes: entry.bytes,
                    age_ms: entry.age_ms,
                    cells: key.0.clone(),
                });
                known.insert(key, groups.len() - 1);
            }
        }
    }
    groups
}

fn cells(entry: &Allocation) -> [String; 6] {
    let access = entry.mapped.first().map(|at| {
        let who = at.access.iter();
        let who: Vec<String> = who.map(|desc| desc.location.to_string()).collect();
        who.join(", ")
    });
    let lost = if entry.lost { " LOST" } else { "" };
    let label = entry.label.as_deref().unwrap_or("");
    let site = entry.site.as_ref().map(ToString::to_string);
    [
        entry.location.to_string(),
        format!("{}{lost}", entry.path),
        escaped(label),
        access.unwrap_or_default(),
        others(entry),
        escaped(&site.unwrap_or_default()),
    ]
}

impl Alike<'_> {
    fn row(self) -> Vec<String> {
        let address = match self.first.mapped.as_slice() {
            [] => "not mapped".into(),
            [at, ..] => format!("{:#x}", at.start),
        };
        let [location, path, label, access, others, site] = self.cells;
        vec![
            self.first.number.to_string(),
            self.count.to_string(),
            Bytes(self.bytes).to_string(),
            location,
            path,
            age(self.age_ms),
            label,
            address,
            access,
            others,
            site,
        ]
    }
}

/// Formats sums by location.
fn totals(totals: &[Total]) -> String {
    let mut table = Table::new(&[
        "WHERE",
        "DRIVER",
        ">ENTRIES",
        ">OWN",
        ">MANAGED",
        ">IMPORTED",
        "PATHS",
    ]);
    for total in totals {
        let paths = total.by_path.iter();
        let paths: Vec<String> = paths
            .map(|(path, bytes)| format!("{path} {}", Bytes(*bytes)))
            .collect();
        table.row([
            total.location.to_string(),
            escaped(&total.driver),
            total.allocations.to_string(),
            Bytes(total.own).to_string(),
            Bytes(total.managed).to_string(),
            Bytes(total.imported).to_string(),
            paths.join(", "),
        ]);
    }
    table.lines()
}

/// Formats a process's allocations and their sums.
fn ledger(ledger: &Ledger) -> String {
    let process = &ledger.process;
    let count = (ledger.allocations.len() as u64).saturating_add(ledger.omitted);
    let mut text = format!(
        "process {} ({}): {count} allocations\n",
        process.pid,
        escaped(&process.name)
    );
    if count == 0 {
        return text;
    }
    let mut table = Table::new(&[
        ">FIRST", ">COUNT", ">SIZE", "WHERE", "PATH", ">AGE", "LABEL", "ADDRESS", "ACCESS",
        "SHARED", "SITE",
    ]);
    for group in alike(&ledger.allocations) {
        table.row(group.row());
    }
    text += &table.lines();
    if ledger.omitted > 0 {
        text += &format!("and {} smaller ones\n", ledger.omitted);
    }
    text.push('\n');
    text += &totals(&ledger.totals);
    text
}

/// Formats a report over all processes.
fn report(report: &Report) -> String {
    let mut text = String::new();
    for process in &report.processes {
        text += &ledger(process);
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
    text += &capacities(report);
    text += &kept(report);
    text
}

/// Formats the memory of each node and GPU, with the part that no ledger accounts for.
fn capacities(report: &Report) -> String {
    let mut table = Table::new(&[
        "WHERE",
        ">TOTAL",
        ">IN USE",
        ">KERNEL",
        ">LEDGERS",
        ">MANAGED",
        ">NOT ACCOUNTED FOR",
    ]);
    let unknown = |bytes: Option<u64>| bytes.map_or("?".into(), |bytes| Bytes(bytes).to_string());
    for node in &report.nodes {
        table.row([
            Location::from(node.node).to_string(),
            Bytes(node.total).to_string(),
            Bytes(node.used).to_string(),
            unknown(node.kernel),
            Bytes(node.accounted).to_string(),
            String::new(),
            unknown(node.unaccounted),
        ]);
    }
    for gpu in &report.gpus {
        table.row([
            Location::Device(gpu.gpu).to_string(),
            unknown(gpu.total),
            unknown(gpu.used),
            String::new(),
            Bytes(gpu.accounted).to_string(),
            Bytes(gpu.managed).to_string(),
            unknown(gpu.unaccounted),
        ]);
    }
    let mut text = table.lines();
    for gpu in &report.gpus {
        if let Some(why) = &gpu.why {
            let location = Location::Device(gpu.gpu);
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
fn kept(report: &Report) -> String {
    if report.kept.is_empty() {
        return String::new();
    }
    // Parts of one memory have the same exporter and importers.
    let mut sums: BTreeMap<[String; 3], (u64, u64)> = BTreeMap::new();
    for kept in &report.kept {
        let importers = kept.importers.iter();
        let importers: Vec<String> = importers
            .map(|importer| format!("{} ({})", importer.process.pid, importer.process.name))
            .collect();
        let cells = [
            kept.location.to_string(),
            escaped(&words(&kept.exporter)),
            escaped(&importers.join(", ")),
        ];
        let (count, bytes) = sums.entry(cells).or_default();
        *count += 1;
        *bytes = bytes.saturating_add(kept.bytes);
    }
    let mut table = Table::new(&[">COUNT", ">SIZE", "WHERE", "EXPORTER", "KEPT BY"]);
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
        "\nImported memory that is in no ledger as a process's own:\n{}",
        table.lines()
    )
}

#[cfg(test)]
mod tests {
    use super::age;

    #[test]
    fn ages_have_one_unit() {
        for (ms, text) in [
            (0, "0 ms"),
            (999, "999 ms"),
            (1000, "1 s"),
            (119_999, "119 s"),
            (120_000, "2 min"),
            (7_200_000, "2 h"),
            (172_800_000, "2 d"),
        ] {
            assert_eq!(age(ms), text);
        }
    }
}
