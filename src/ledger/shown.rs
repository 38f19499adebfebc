//! Reports as tables; ledgers and reports as drawings: a bar for each location, with a part for each allocation.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::driver::Location;
use crate::entries::{AllocPath, Allocation, Party};
use crate::holders::{Holder, Holders, Why};
use crate::parts::{Cause, possible_causes};
use crate::report::{Exporter, Report};
use crate::size::Bytes;
use crate::text::{COLUMNS, escaped, ledger, place, some_bytes};
use crate::texts::{count, hanging};
use crate::writers::{Drawing, Table, end_cut};
use crate::{Ledger, drawn_once};

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
        let kernel = node.kernel.map(|bytes| Bytes(bytes).to_string());
        table.row([
            place(node.node.into()),
            Bytes(node.total).to_string(),
            Bytes(node.used).to_string(),
            kernel.unwrap_or_default(),
            Bytes(node.accounted).to_string(),
            String::new(),
            unknown(node.unaccounted),
        ]);
    }
    let mut whys = String::new();
    for gpu in &report.gpus {
        let location = place(Location::Device(gpu.gpu));
        if let Some(why) = &gpu.why {
            whys += &format!("{location}: {}\n", escaped(why));
        }
        table.row([
            location,
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
    text += &whys;
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
    let mut sums = BTreeMap::<[String; 3], (u64, u64)>::new();
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
        let width = most.unwrap_or(usize::MAX);
        let causes = possible_causes(holders).into_iter();
        text += "\nWhat is not known can be:\n";
        text.extend(causes.map(|cause| hanging("- ", &escaped(&cause), width)));
    }
    text
}

/// Formats the processes that may hold memory, and commands that show more of each reason.
fn processes(holders: &Holders, most: Option<usize>) -> String {
    let mut table =
        Table::with(">PID, ~PROCESS, ~USER, ~ON GPUS, >DRIVER'S, >MANAGED, >SHARED, ~WHY");
    let shown = if most.is_some() { ROWS } else { usize::MAX };
    let rows = holders.processes.iter().take(shown);
    let mut reasons: Vec<Why> = rows
        .clone()
        .flat_map(|holder| holder.why.iter().copied())
        .collect();
    reasons.sort_unstable();
    reasons.dedup();
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
    let line = |why: Why| {
        let words = format!("{}: {}", why.words(), why.command()?);
        Some(hanging("- ", &words, most.unwrap_or(usize::MAX)))
    };
    let lines: String = reasons.into_iter().filter_map(line).collect();
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

/// Measures of a drawing.
const MARGIN: f64 = 24.0;
const TOP: f64 = 86.0;
/// Where bars begin, and how long they are.
const LEFT: f64 = MARGIN + 150.0;
const BAR: f64 = 720.0;
const HEIGHT: f64 = 34.0;
const PITCH: f64 = 62.0;
const WIDTH: f64 = LEFT + BAR + 170.0;
/// The most parts of a bar; the smallest share the last.
const PARTS: usize = 400;

impl Ledger {
    /// Returns a drawing: a bar for each location, with a part for each allocation. It is a complete SVG file without
    /// external fonts or style sheets.
    pub fn to_svg(&self) -> String {
        let ledgers = std::slice::from_ref(self);
        draw(self.process.title(), ledgers, Bars::new())
    }
}

impl Report {
    /// Returns a drawing: a bar for each node and GPU, to the scale of its memory, with a part for each allocation. It is a
    /// complete SVG file without external fonts or style sheets.
    pub fn to_svg(&self) -> String {
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|node| (node.node.into(), Some(node.total), Some(node.used)));
        let gpus = self.gpus.iter();
        let gpus = gpus.map(|gpu| (Location::Device(gpu.gpu), gpu.total, gpu.used));
        let bar = |(location, total, used)| {
            let parts = Vec::new();
            ((false, location), Bar { parts, total, used })
        };
        let bars: Bars<'_> = nodes.chain(gpus).map(bar).collect();
        draw("Whose memory it is", &self.processes, bars)
    }
}

/// The classes of the paths' parts, and their names.
const KINDS: [(&str, &str); 7] = [
    ("c0", "vmm"),
    ("c4", "heap"),
    ("c5", "shapes"),
    ("c2", "pool"),
    ("c1", "imported"),
    ("c6", "pinned, device"),
    ("c3", "not accounted for"),
];

const fn class(path: AllocPath) -> &'static str {
    match path {
        AllocPath::Vmm => "c0",
        AllocPath::HeapChunk => "c4",
        AllocPath::ShapeChunk => "c5",
        AllocPath::Pool => "c2",
        AllocPath::Import | AllocPath::ImportedPool => "c1",
        _ => "c6",
    }
}

/// The allocations at one location, the bytes that it has, and how many of them are in use by all processes. `None`: unknown.
#[derive(Default)]
struct Bar<'a> {
    parts: Vec<(&'a Ledger, &'a Allocation)>,
    total: Option<u64>,
    used: Option<u64>,
}

/// Bars in the order of whether they have managed memory, which takes no certain room at its location, and of the location.
type Bars<'a> = BTreeMap<(bool, Location), Bar<'a>>;

fn sum(parts: &[(&Ledger, &Allocation)]) -> u64 {
    let bytes = parts.iter().map(|(_, entry)| entry.bytes);
    bytes.fold(0, u64::saturating_add)
}

/// Draws the ledgers under a heading. Bars of locations with a capacity are to that scale, others to the largest.
fn draw<'a>(title: &str, ledgers: &'a [Ledger], mut bars: Bars<'a>) -> String {
    for (ledger, entry) in drawn_once(ledgers) {
        let place = (entry.path == AllocPath::Managed, entry.location);
        bars.entry(place).or_default().parts.push((ledger, entry));
    }
    let largest = bars.values().map(|bar| sum(&bar.parts)).max();
    let mut svg = Drawing::default();
    svg.text((MARGIN, 34.0), "head", title);
    let mut x = MARGIN;
    for (class, name) in KINDS {
        svg.rect((x, 50.0), (12.0, 12.0), &format!("class=\"{class}\""), "");
        svg.text((x + 18.0, 60.0), "soft", name);
        x += 34.0 + 8.0 * name.len() as f64;
    }
    if bars.is_empty() {
        svg.text((MARGIN, TOP), "", "No allocations.");
    }
    let mut y = TOP;
    for ((is_managed, location), bar) in &mut bars {
        let managed = if *is_managed { "managed, " } else { "" };
        svg.text((MARGIN, y + 22.0), "name", &format!("{managed}{location}"));
        draw_bar(&mut svg, bar, largest.unwrap_or(0), y);
        y += PITCH;
    }
    svg.file((WIDTH as u64, y as u64 + 40), title)
}

fn draw_bar(svg: &mut Drawing, bar: &mut Bar<'_>, largest: u64, y: f64) {
    let bytes = sum(&bar.parts);
    let scale = bar.total.unwrap_or(largest).max(bytes).max(1);
    let size = |bytes: u64| (bytes as f64 / scale as f64 * BAR, HEIGHT);
    let total = bar.total.map(|total| format!(" of {}", Bytes(total)));
    let known = format!("{}{}", Bytes(bytes), total.unwrap_or_default());
    svg.text((LEFT + BAR + 10.0, y + 22.0), "soft", &known);
    svg.rect((LEFT, y), (BAR, HEIGHT), r#"class="box""#, "");
    if let Some(used) = bar.used {
        let (all, known) = (Bytes(used), Bytes(bytes));
        let title = format!("{all} in use, of which {known} are accounted for");
        svg.rect((LEFT, y), size(used.min(scale)), r#"class="c3""#, &title);
    }
    bar.parts.sort_by_key(|(_, entry)| Reverse(entry.bytes));
    let (shown, rest) = bar.parts.split_at(bar.parts.len().min(PARTS));
    let mut x = LEFT;
    for (ledger, entry) in shown {
        let class = format!("class=\"part {}\"", class(entry.path));
        let size = size(entry.bytes);
        svg.rect((x, y), size, &class, &described(ledger, entry));
        x += size.0;
    }
    if !rest.is_empty() {
        let title = format!("{} smaller allocations: {}", rest.len(), Bytes(sum(rest)));
        svg.rect((x, y), size(sum(rest)), r#"class="part c6""#, &title);
    }
}

/// Describes an allocation in a line.
fn described(ledger: &Ledger, entry: &Allocation) -> String {
    let label = entry.label.as_deref().unwrap_or("no label");
    let (bytes, path, process) = (Bytes(entry.bytes), entry.path, &ledger.process);
    let (pid, title) = (process.pid, process.title());
    format!("{bytes}: {label} ({path}), process {pid} ({title})")
}
