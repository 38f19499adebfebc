//! Reports as tables.

use std::collections::{BTreeMap, BTreeSet};

use crate::driver::Location;
use crate::entries::Party;
use crate::holders::{Holder, Holders};
use crate::parts::{Cause, possible_causes};
use crate::report::{Exporter, Report};
use crate::size::Bytes;
use crate::table::{Table, end_cut};
use crate::text::{COLUMNS, escaped, ledger, place, some_bytes};
use crate::texts::count;

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

/// Formats bytes that may be unknown.
fn unknown(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string())
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

/// The most processes of a table that is not wide.
const ROWS: usize = 20;

/// The unexplained memory from which on possible causes are named: a kernel without GPUs has some, too.
const WORTH_A_WORD: u64 = 64 << 20;

/// Formats the processes and the parts of the memory in use; nothing for a simulated machine.
fn holders(report: &Report, most: Option<usize>) -> String {
    let Some(holders) = &report.holders else {
        return String::new();
    };
    let mut text = processes(holders, most);
    text += &parts(report, most);
    let unknown = report
        .parts
        .iter()
        .filter(|part| part.cause == Cause::NotKnown);
    if unknown.map(|part| part.bytes).max() >= Some(WORTH_A_WORD) {
        text += "\nWhat is not known can be:\n";
        for cause in possible_causes(holders) {
            text += &wrapped(&escaped(&cause), most);
        }
    }
    text
}

/// Formats the processes that may hold memory, and commands that show more of each reason.
fn processes(holders: &Holders, most: Option<usize>) -> String {
    let mut table =
        Table::with(">PID, ~PROCESS, ~USER, ~ON GPUS, >DRIVER'S, >MANAGED, >SHARED, ~WHY");
    let shown = if most.is_some() { ROWS } else { usize::MAX };
    let rows = holders.processes.iter().take(shown);
    let reasons: BTreeSet<_> = rows.clone().flat_map(|holder| &holder.why).collect();
    for holder in rows {
        table.row(cells(holder, most.is_some()));
    }
    let mut text = String::new();
    if !holders.processes.is_empty() {
        text += "\nProcesses with GPUs, the driver's memory, or shared memory:\n";
        text += &table.lines(most);
    }
    let more = holders.processes.len().saturating_sub(shown) as u64 + holders.omitted;
    if more > 0 {
        text += &format!("and {more} more\n");
    }
    if holders.not_looked_at > 0 {
        text += &format!(
            "not looked at: {}\n",
            count(holders.not_looked_at, "process")
        );
    }
    let mut lines = String::new();
    for why in reasons {
        if let Some(command) = why.command() {
            lines += &wrapped(&format!("{}: {command}", why.words()), most);
        }
    }
    if !lines.is_empty() {
        text += &format!("\nReasons, and what shows more:\n{lines}");
    }
    text
}

fn cells(holder: &Holder, is_narrow: bool) -> [String; 8] {
    let title = escaped(holder.title());
    let gpus = holder.gpus.iter();
    let gpus: Vec<String> = gpus
        .map(|on| format!("{}: {}", on.index, unknown(on.bytes)))
        .collect();
    let why = holder.why.iter().map(|why| why.words().to_owned());
    let mut why: Vec<String> = why.collect();
    if let Some(pid) = holder.inner_pid {
        why.push(format!("pid {pid} there"));
    }
    why.extend(holder.container.as_deref().map(escaped));
    let user = holder.user.as_deref().map(escaped);
    let user = user.or_else(|| holder.uid.map(|uid| uid.to_string()));
    [
        holder.pid.to_string(),
        end_cut(&title, if is_narrow { 20 } else { usize::MAX }),
        user.unwrap_or_default(),
        gpus.join(", "),
        some_bytes(holder.driver_mapped.unwrap_or(0)),
        some_bytes(holder.managed_mapped.unwrap_or(0)),
        some_bytes(holder.shared_mapped.saturating_add(holder.shared_unmapped)),
        why.join(", "),
    ]
}

/// Formats the memory in use by cause.
fn parts(report: &Report, most: Option<usize>) -> String {
    if report.parts.is_empty() {
        return String::new();
    }
    let mut table = Table::with("WHERE, >IN USE, CAUSE, ~SHOWN BY");
    for part in &report.parts {
        let is_gpu = matches!(part.location, Location::Device(_));
        table.row([
            place(part.location),
            Bytes(part.bytes).to_string(),
            part.cause.words().to_owned(),
            part.cause.command(is_gpu).unwrap_or_default().to_owned(),
        ]);
    }
    format!("\n{}", table.lines(most))
}

/// Breaks a text into lines of at most `most` characters, the first with a mark of a list.
fn wrapped(text: &str, most: Option<usize>) -> String {
    let most = most.unwrap_or(usize::MAX);
    let (mut lines, mut line) = (String::new(), String::from("-"));
    for word in text.split(' ') {
        if line.chars().count() + 1 + word.chars().count() > most {
            lines += &line;
            lines.push('\n');
            line = " ".into();
        }
        line.push(' ');
        line += word;
    }
    lines + &line + "\n"
}
