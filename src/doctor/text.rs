//! The report as text.

use egmem_core::report::Table;

use crate::capability::{HANDLE_TYPES, Path, Trial};
use crate::driver::{HandleTypes, Location};
use crate::host::HostFacts;
use crate::size::Bytes;
use crate::texts::{self, count, escape, escape_lines, grouped, ranges};
use crate::{Answer, Reason, Report};

const WIDTH: usize = 80;

/// Formats a report for people, 80 columns wide, as `egmem doctor` shows it; with `all`, one row for every pair of
/// node and GPU. With `colours`, words have a terminal's escape sequences; all other control characters are escaped.
pub fn to_text(report: &Report, all: bool, colours: bool) -> String {
    let mut text = String::new();
    if let Some(machine) = &report.simulated {
        let machine = escape(machine);
        let line = format!("SIMULATED {machine}: this says nothing about real hardware\n\n");
        text += &paint(colours, &line, "SIMULATED", YELLOW);
    }
    let verdict = verdict(report);
    let verdict = paint(colours, &verdict, "does NOT work", RED);
    text += &paint(colours, &verdict, "works", GREEN);
    text += "\n\n";
    text += &escape_lines(&facts(report));
    if !report.capabilities.is_empty() {
        text += &capabilities(report, all, colours);
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

/// Colours words, if enabled: after the layout, which does not count the sequences.
fn paint(is_on: bool, text: &str, words: &str, colour: &str) -> String {
    if !is_on {
        return text.to_owned();
    }
    text.replace(words, &format!("{colour}{words}\x1b[0m"))
}

fn verdict(report: &Report) -> String {
    let gpus = report.topology.gpus().len() as u64;
    let why = match &report.driver.problem {
        None if report.works => {
            let (working, all) = (report.working_gpus.len(), count(gpus, "GPU"));
            return format!("Extended GPU Memory works, for {working} of {all}.");
        }
        Some(_) => ": the driver cannot be used.",
        None if gpus == 0 => ": there is no GPU.",
        None => ".",
    };
    format!("Extended GPU Memory does NOT work here{why}")
}

/// Returns the facts: a label, and a text that wraps.
fn facts(report: &Report) -> String {
    let mut rows = driver_rows(report);
    rows.extend(topology_rows(report));
    rows.extend(claims(report));
    rows.push(("IMEX channel", report.imex.to_string()));
    rows.extend(backings(report));
    if report.simulated.is_none() {
        rows.extend(host_rows(&report.host));
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

/// Joins the texts that are known.
fn joined(texts: impl IntoIterator<Item = Option<String>>, between: &str) -> Option<String> {
    let known: Vec<String> = texts.into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join(between))
}

fn driver_rows(report: &Report) -> Vec<(&'static str, String)> {
    let driver = &report.driver;
    let problem = driver.problem.iter();
    let problem = problem.flat_map(|why| [why.message.clone(), format!("→ {}", why.remedy)]);
    let module = report.host.driver_module.as_ref();
    let module = module.filter(|_| report.simulated.is_none()).map(|module| {
        let kind = if module.open { "open" } else { "closed" };
        format!("kernel module {} ({kind})", module.version)
    });
    let words = [
        report.simulated.as_ref().map(|_| "simulated".into()),
        driver.cuda.map(|cuda| format!("CUDA {cuda}")),
        module,
        driver.libraries.driver.clone(),
    ];
    let rows = problem.chain([joined(words, ", ").unwrap_or_default()]);
    rows.map(|text| ("Driver", text)).collect()
}

fn topology_rows(report: &Report) -> Vec<(&'static str, String)> {
    let topology = &report.topology;
    let kinds = topology.gpus().iter().map(|gpu| {
        let own = gpu.memory_node.map(|node| format!(" (node {node})"));
        let (own, memory) = (own.unwrap_or_default(), Bytes(gpu.memory));
        let node = gpu.host_node();
        let node = node.map_or("unknown".into(), |node| node.to_string());
        let (name, link) = (&gpu.name, gpu.link);
        let kind = format!("{name}, {memory}{own}, {link}, host node {node}");
        (kind, gpu.ordinal)
    });
    let nodes = topology.nodes().iter().map(|node| {
        let free = node
            .memory_free
            .map(|free| format!(" ({} free)", Bytes(free)));
        let cpus = match node.cpus.is_empty() {
            true => "no CPUs".into(),
            false => format!("CPUs {}", node.cpus),
        };
        let (memory, free) = (Bytes(node.memory_total), free.unwrap_or_default());
        ("Host nodes", format!("{}: {memory}{free}, {cpus}", node.id))
    });
    by_kind("GPUs", kinds).into_iter().chain(nodes).collect()
}

/// Returns a label and a text for each known fact of the host.
fn host_rows(host: &HostFacts) -> Vec<(&'static str, String)> {
    let pages = host
        .page_size
        .map(|bytes| format!("{} pages", Bytes(bytes)));
    let kernel = host.kernel.as_ref();
    let kernel = kernel.map(|kernel| format!("{kernel} {}", host.architecture));
    let kernel = kernel.and_then(|kernel| joined([Some(kernel), pages], ", "));
    let nice = match host.cap_sys_nice {
        Some(true) => ", with CAP_SYS_NICE",
        Some(false) => ", without CAP_SYS_NICE",
        None => "",
    };
    let container = host.container.as_ref();
    let container = container.map_or("none seen".into(), |container| format!("{container}{nice}"));
    let room = host.cgroup_memory_room;
    let room = room.map_or(String::new(), |room| format!(", {} left", Bytes(room)));
    let group = match host.cgroup_memory_limit.map(Bytes) {
        Some(limit) => format!("at most {limit} of memory{room}; registered memory counts"),
        None => "no memory limit".into(),
    };
    let memlock = host.memlock.map(|memlock| {
        let most = memlock.soft.map(|soft| format!("at most {}", Bytes(soft)));
        let exempt = match host.cap_ipc_lock {
            Some(true) => " (CAP_IPC_LOCK: no limit counts)",
            _ => "",
        };
        most.unwrap_or("unlimited".into()) + exempt
    });
    let most = host
        .max_mappings
        .map(|most| format!("at most {most} in a process"));
    let visible = host.cuda_visible_devices.as_ref();
    let visible = visible.map(|visible| format!("CUDA_VISIBLE_DEVICES={visible}"));
    let rows = [
        ("Kernel", kernel),
        ("Container", Some(container)),
        ("Control group", Some(group)),
        ("NUMA", numa(host)),
        ("Huge pages", huge_pages(host)),
        ("Memlock", memlock),
        ("Mappings", most),
        ("Environment", visible),
    ];
    let known = |(label, text): (_, Option<String>)| Some((label, text?));
    rows.into_iter().filter_map(known).collect()
}

fn numa(host: &HostFacts) -> Option<String> {
    let cpus = host.allowed_cpus.as_ref();
    let cpus = cpus.map(|cpus| format!("CPUs {cpus}"));
    let nodes = host.allowed_nodes.as_ref().map(|nodes| {
        let ids: Vec<i32> = nodes.iter().map(|node| node.0).collect();
        let s = if ids.len() == 1 { "" } else { "s" };
        format!("node{s} {}", ranges(&ids))
    });
    let allowed = joined([cpus, nodes], " and ").map(|all| format!("allowed: {all}"));
    let balancing = host.numa_balancing.map(|is_on| {
        let state = if is_on { "on" } else { "off" };
        format!("balancing {state}")
    });
    joined([allowed, balancing], "; ")
}

fn huge_pages(host: &HostFacts) -> Option<String> {
    let pools = host.huge_pages.iter().filter(|pool| pool.total > 0);
    let pools = pools.map(|pool| {
        let (free, total) = (pool.free, pool.total);
        Some(format!(
            "{free} of {total} free ({})",
            Bytes(pool.page_bytes)
        ))
    });
    let pools = joined(pools, ", ").unwrap_or("none reserved".into());
    let setting = |name, setting: &Option<String>| Some(format!("{name}: {}", setting.as_ref()?));
    let transparent = setting("transparent", &host.transparent_huge_pages);
    let shared = setting("shared", &host.shared_huge_pages);
    joined([Some(pools), transparent, shared], ", ")
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

fn capabilities(report: &Report, all: bool, colours: bool) -> String {
    let mut reasons = Vec::new();
    let groups = groups(report, all, &mut reasons);
    let types = HANDLE_TYPES.map(|types| column(&types));
    let heads = ["Node", "GPU", "Path"].into_iter();
    let heads: Vec<&str> = heads.chain(types.iter().map(String::as_str)).collect();
    let mut table = Table::new(&heads);
    for ((path, gpus, cells, _), nodes) in groups {
        let place = [ranges(&nodes), ranges(&gpus), path.to_string()];
        table.row(place.into_iter().chain(cells));
    }
    let mut cells = indented(&table);
    let width = cells.lines().map(|line| line.chars().count()).max();
    let rule = "─".repeat(width.unwrap_or(0) + 1) + "\n";
    cells.insert_str(cells.find('\n').map_or(0, |end| end + 1), &rule);
    for (word, colour) in [("yes", GREEN), ("no ", RED), ("? ", YELLOW)] {
        cells = paint(colours, &cells, word, colour);
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

/// A path, GPUs, their answers, and the node unless others with the same answers are beside it.
type Row = (Path, Vec<i32>, Vec<String>, Option<i32>);

/// Returns rows with the nodes that they are of; with `all`, one for each pair of node and GPU.
fn groups<'a>(
    report: &'a Report,
    all: bool,
    reasons: &mut Vec<&'a Reason>,
) -> Vec<(Row, Vec<i32>)> {
    let mut rows: Vec<(Row, i32)> = Vec::new();
    for node in report.topology.nodes() {
        for path in Path::ALL {
            let gpus = report.topology.gpus().iter().map(|gpu| gpu.ordinal);
            let cells = gpus.map(|gpu| {
                let cells = HANDLE_TYPES.map(|handle_types| {
                    let trial = Trial {
                        location: Location::from(node.id),
                        gpu,
                        path,
                        handle_types,
                    };
                    let tried = report.capabilities.iter().find(|of| of.trial == trial);
                    cell(tried.map(|tried| &tried.answer), reasons)
                });
                ((cells.to_vec(), all.then_some(gpu)), gpu)
            });
            let id = node.id.0;
            let row = |((cells, _), gpus)| ((path, gpus, cells, all.then_some(id)), id);
            rows.extend(grouped(cells).into_iter().map(row));
        }
    }
    grouped(rows)
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

/// Wraps `text`, the first line after `mark`.
pub(crate) fn hanging(mark: &str, text: &str) -> String {
    texts::hanging(mark, text, WIDTH)
}

/// Formats a table, each line after a space.
pub(crate) fn indented(table: &Table) -> String {
    let lines = table.lines(None);
    lines.lines().map(|line| format!(" {line}\n")).collect()
}
