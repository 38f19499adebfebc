//! The report as text.

use std::fmt::Write;

use egmem_core::table::Table;

use crate::capability::{HANDLE_TYPES, Path};
use crate::driver::{HandleTypes, Location};
use crate::host;
use crate::size::Bytes;
use crate::texts::{count, escape, escape_lines, grouped, ranges};
use crate::{Answer, Reason, Report};

const WIDTH: usize = 80;

/// Formats a report for people, 80 columns wide, as `egmem doctor` shows it; with `all`, one row for every pair of
/// node and GPU. With `colours`, words have a terminal's escape sequences; all other control characters are escaped.
pub fn to_text(report: &Report, all: bool, colours: bool) -> String {
    let paint = Paint { on: colours };
    let mut text = String::new();
    if let Some(machine) = &report.simulated {
        let machine = escape(machine);
        let line = format!("SIMULATED {machine}: this says nothing about real hardware\n\n");
        text += &paint.words(&line, "SIMULATED", YELLOW);
    }
    let verdict = verdict(report);
    let verdict = paint.words(&verdict, "does NOT work", RED);
    text += &paint.words(&verdict, "works", GREEN);
    text += "\n\n";
    text += &escape_lines(&facts(report));
    if !report.capabilities.is_empty() {
        text += &capabilities(report, all, &paint);
    }
    if !report.advice.is_empty() {
        text += "\nAdvice\n";
        for advice in &report.advice {
            let advice = format!("{}: {}", advice.finding, advice.remedy);
            text += &hanging("  • ", &escape(&advice));
        }
    }
    text
}

const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";

/// Colours, if enabled. They are added after the layout, which does not count them.
struct Paint {
    on: bool,
}

impl Paint {
    fn words(&self, text: &str, words: &str, colour: &str) -> String {
        if self.on {
            text.replace(words, &format!("{colour}{words}\x1b[0m"))
        } else {
            text.to_owned()
        }
    }
}

fn verdict(report: &Report) -> String {
    let gpus = report.topology.gpus().len();
    match &report.driver.problem {
        Some(_) => "Extended GPU Memory does NOT work here: the driver cannot be used.".into(),
        None if gpus == 0 => "Extended GPU Memory does NOT work here: there is no GPU.".into(),
        None if report.works => format!(
            "Extended GPU Memory works, for {} of {}.",
            report.working_gpus.len(),
            count(gpus as u64, "GPU")
        ),
        None => "Extended GPU Memory does NOT work here.".into(),
    }
}

/// Returns the facts: a label, and a text that wraps.
fn facts(report: &Report) -> String {
    let mut rows = driver_rows(report);
    rows.extend(topology_rows(report));
    rows.extend(claims(report));
    rows.push(("IMEX channel", report.imex.to_string()));
    rows.extend(backings(report));
    if report.simulated.is_none() {
        rows.extend(host::rows(&report.host));
    }
    let width = rows.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    let mut last = "";
    let mut text = String::new();
    for (label, value) in rows {
        let shown = if label == last { "" } else { label };
        text += &hanging(&format!(" {shown:<width$}  "), &value);
        last = label;
    }
    text
}

fn driver_rows(report: &Report) -> Vec<(&'static str, String)> {
    let driver = &report.driver;
    let mut rows = Vec::new();
    if let Some(problem) = &driver.problem {
        rows.push(("Driver", problem.message.clone()));
        rows.push(("Driver", format!("→ {}", problem.remedy)));
    }
    let mut words = Vec::new();
    if report.simulated.is_some() {
        words.push("simulated".to_owned());
    }
    if let Some(cuda) = driver.cuda {
        words.push(format!("CUDA {cuda}"));
    }
    if let (Some(module), None) = (&report.host.driver_module, &report.simulated) {
        let kind = if module.open { "open" } else { "closed" };
        words.push(format!("kernel module {} ({kind})", module.version));
    }
    words.extend(driver.libraries.driver.clone());
    rows.push(("Driver", words.join(", ")));
    rows
}

fn topology_rows(report: &Report) -> Vec<(&'static str, String)> {
    let topology = &report.topology;
    let kinds = topology.gpus().iter().map(|gpu| {
        let node = match gpu.host_node() {
            Ok(node) => node.to_string(),
            Err(_) => "unknown".to_owned(),
        };
        let memory_node = gpu
            .memory_node
            .map(|node| format!(" (node {node})"))
            .unwrap_or_default();
        let kind = format!(
            "{}, {}{memory_node}, {}, host node {node}",
            gpu.name,
            Bytes(gpu.memory),
            gpu.link
        );
        (kind, gpu.ordinal)
    });
    let mut rows = by_kind("GPUs", kinds);
    let nodes = topology.nodes().iter().map(|node| {
        let mut text = format!("{}: {}", node.id, Bytes(node.memory_total));
        if let Some(free) = node.memory_free {
            write!(text, " ({} free)", Bytes(free)).ok();
        }
        match node.cpus.is_empty() {
            true => text += ", no CPUs",
            false => write!(text, ", CPUs {}", node.cpus).unwrap_or_default(),
        }
        ("Host nodes", text)
    });
    rows.extend(nodes);
    rows
}

/// Returns a row for each kind, with the ids that are of it.
fn by_kind(
    label: &'static str,
    ids: impl Iterator<Item = (String, i32)>,
) -> Vec<(&'static str, String)> {
    let row = |(kind, ids): (String, Vec<i32>)| (label, format!("{}: {kind}", ranges(&ids)));
    grouped(ids).into_iter().map(row).collect()
}

/// Returns the attributes' claims, which often differ from the trials.
fn claims(report: &Report) -> Vec<(&'static str, String)> {
    let kinds = report.hints.iter().map(|hints| {
        let claimed = |name: &str| {
            let hint = hints.attributes.iter().find(|hint| hint.name == name);
            match hint.and_then(|hint| hint.value) {
                Some(0) => "no",
                Some(_) => "yes",
                None => "unknown",
            }
        };
        let kind = format!(
            "VMM {}, pools {}, POSIX fd {}, fabric {} (hints only)",
            claimed("HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
            claimed("HOST_NUMA_MEMORY_POOLS_SUPPORTED"),
            claimed("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
            claimed("HANDLE_TYPE_FABRIC_SUPPORTED"),
        );
        (kind, hints.gpu)
    });
    by_kind("Attributes", kinds)
}

/// Returns what `Backing::Auto` takes on which nodes, and why.
fn backings(report: &Report) -> Vec<(&'static str, String)> {
    let kinds = report.backings.iter().map(|of_node| {
        let decision = match &of_node.chosen {
            Some(chosen) => chosen.to_string(),
            None => format!("none: {}", of_node.reason),
        };
        let kind = format!("{} → {decision}", column(&of_node.handle_types));
        (kind, of_node.node.0)
    });
    by_kind("Auto backing", kinds)
}

/// Rows with the same answer, and the GPUs and nodes that they cover.
struct Group {
    nodes: Vec<i32>,
    gpus: Vec<i32>,
    path: Path,
    cells: Vec<String>,
}

fn capabilities(report: &Report, all: bool, paint: &Paint) -> String {
    let mut reasons = Vec::new();
    let groups = groups(report, all, &mut reasons);
    let types = HANDLE_TYPES.map(|types| column(&types));
    let heads = ["Node", "GPU", "Path"].into_iter();
    let heads: Vec<&str> = heads.chain(types.iter().map(String::as_str)).collect();
    let mut table = Table::new(&heads);
    for group in groups {
        let place = [
            ranges(&group.nodes),
            ranges(&group.gpus),
            group.path.to_string(),
        ];
        table.row(place.into_iter().chain(group.cells));
    }
    let mut cells = indented(&table);
    let width = cells.lines().map(|line| line.chars().count()).max();
    let rule = "─".repeat(width.unwrap_or(0) + 1) + "\n";
    cells.insert_str(cells.find('\n').map_or(0, |end| end + 1), &rule);
    for (word, colour) in [("yes", GREEN), ("no ", RED), ("? ", YELLOW)] {
        cells = paint.words(&cells, word, colour);
    }
    let mut text =
        format!("\nTried: host memory for the CPU and the GPU, by how it can be shared\n{cells}");
    if !reasons.is_empty() {
        text.push('\n');
    }
    for (index, reason) in reasons.iter().enumerate() {
        let mark = format!("{:<5}", format!("[{}]", index + 1));
        text += &hanging(&mark, &escape(&reason.message));
        text += &hanging("     → ", &escape(&reason.remedy));
    }
    text
}

fn column(handle_types: &HandleTypes) -> String {
    match *handle_types {
        HandleTypes::NONE => "not shared".to_owned(),
        other => other.to_string(),
    }
}

fn groups<'a>(report: &'a Report, all: bool, reasons: &mut Vec<&'a Reason>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for node in report.topology.nodes() {
        for path in Path::ALL {
            let mut of_node: Vec<Group> = Vec::new();
            for gpu in report.topology.gpus() {
                let cells: Vec<String> = HANDLE_TYPES
                    .iter()
                    .map(|&handle_types| {
                        let tried = report.capabilities.iter().find(|tried| {
                            let trial = &tried.trial;
                            trial.location == Location::from(node.id)
                                && trial.gpu == gpu.ordinal
                                && trial.path == path
                                && trial.handle_types == handle_types
                        });
                        cell(tried.map(|tried| &tried.answer), reasons)
                    })
                    .collect();
                match of_node.iter_mut().find(|group| group.cells == cells) {
                    Some(group) if !all => group.gpus.push(gpu.ordinal),
                    _ => of_node.push(Group {
                        nodes: vec![node.id.0],
                        gpus: vec![gpu.ordinal],
                        path,
                        cells,
                    }),
                }
            }
            for group in of_node {
                let like = groups.iter_mut().find(|known| {
                    known.path == path && known.gpus == group.gpus && known.cells == group.cells
                });
                match like {
                    Some(known) if !all => known.nodes.extend(group.nodes),
                    _ => groups.push(group),
                }
            }
        }
    }
    groups
}

fn cell<'a>(answer: Option<&'a Answer>, reasons: &mut Vec<&'a Reason>) -> String {
    let (word, reason) = match answer {
        None => return "–".to_owned(),
        Some(Answer::Yes) => return "yes".to_owned(),
        Some(Answer::No { reason }) => ("no", reason),
        Some(Answer::Unknown { reason }) => ("?", reason),
    };
    let index = reasons
        .iter()
        .position(|&known| known == reason)
        .unwrap_or_else(|| {
            reasons.push(reason);
            reasons.len() - 1
        });
    format!("{word} [{}]", index + 1)
}

/// Wraps `text` to lines of at most [`WIDTH`], the first after `mark`, the others aligned with the text.
pub(crate) fn hanging(mark: &str, text: &str) -> String {
    let indent = mark.chars().count();
    let mut out = mark.to_owned();
    let mut column = indent;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > indent && column + 1 + length > WIDTH {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else if column > indent {
            out.push(' ');
            column += 1;
        }
        out += word;
        column += length;
    }
    out + "\n"
}

/// Formats a table, each line after a space.
pub(crate) fn indented(table: &Table) -> String {
    let lines = table.lines(None);
    lines.lines().map(|line| format!(" {line}\n")).collect()
}
