//! A survey as text.

use std::fmt::Write;

use egmem_core::table::Table;

use super::gather::Survey;
use super::rows::{Fabric, Figure, Pinned, Placed, Problem, Section};
use crate::measure::{BandwidthRow, Kind, Rate};
use crate::size::Bytes;
use crate::text::{hanging, indented};
use crate::texts::{grouped, ranges};

/// The most rows of a table that shows all kinds of memory.
const MANY: usize = 20;

pub(super) fn page(survey: &Survey) -> String {
    let mut text = format!(
        "egmem {} report, version {}\n\n",
        survey.egmem, survey.version
    );
    text += survey.findings.trim_end();
    if !survey.doctor["driver"]["problem"].is_null() {
        return text + "\n\nNothing is proved and measured without a driver.\n";
    }
    text += "\n\nProofs: the CPU writes, the GPU checks and rewrites, the CPU checks\n";
    text += &proofs(survey);
    text += &section("Bandwidth in GB/s, medians", &survey.bandwidth, |rows| {
        rates(rows, 1)
    });
    let title = "Latency of 8 bytes in µs, medians";
    text += &section(title, &survey.latency, |rows| rates(rows, 2));
    text += &section("Pinning cold memory", &survey.pinning, |rows| {
        rows.iter().map(pinned).collect()
    });
    text += &section("Placement", &survey.placement, |rows| {
        rows.iter().map(placed).collect()
    });
    text += &section("Fabric handles", &survey.fabric, fabric);
    text
}

fn section<R>(title: &str, section: &Section<R>, rows: impl FnOnce(&[R]) -> String) -> String {
    let rows = if section.rows.is_empty() {
        String::new()
    } else {
        rows(&section.rows)
    };
    format!("\n{title}\n{rows}{}", problems(&section.problems))
}

fn proofs(survey: &Survey) -> String {
    let proofs = &survey.proofs.rows;
    let held = proofs.iter().filter(|proof| proof.verified).count();
    let mut text = format!("  {held} of {} held\n", proofs.len());
    let failed = proofs.iter().filter(|proof| !proof.verified);
    text += &counted(failed.map(|proof| {
        let parts = [&proof.reason, &proof.remedy].map(|part| part.as_deref().unwrap_or_default());
        let [path, api] = [proof.path.name(), &proof.api];
        format!("{path} ({api}): {} → {}", parts[0], parts[1])
    }));
    text + &problems(&survey.proofs.problems)
}

/// Formats each problem once, with the number of nodes and GPUs that have it.
fn problems(problems: &[Problem]) -> String {
    counted(problems.iter().map(|problem| {
        let what = match problem.what.as_str() {
            "" => String::new(),
            what => format!("{what}: "),
        };
        let reason = &problem.reason;
        format!("{what}{} → {}", reason.message, reason.remedy)
    }))
}

/// Formats each reason once, with the number of times that it comes.
fn counted(reasons: impl Iterator<Item = String>) -> String {
    let reasons = grouped(reasons.map(|reason| (reason, ()))).into_iter();
    let line = |(reason, times): (String, Vec<()>)| match times.len() {
        1 => hanging("  ✗ ", &reason),
        count => hanging("  ✗ ", &format!("{count} × {reason}")),
    };
    reasons.map(line).collect()
}

/// Formats figures as a table; of many rows, those of the library's buffers.
fn rates(rows: &[BandwidthRow<Figure>], digits: usize) -> String {
    let is_simulated = |row: &BandwidthRow<Figure>| row.rates().contains(&Some(Figure::Simulated));
    if rows.iter().any(is_simulated) {
        return format!(
            "  simulated: all {} rows ran, without figures\n",
            rows.len()
        );
    }
    let mut table =
        Table::with(" node, GPU, memory, >to GPU, >to host, >kernel reads, >kernel writes");
    for row in rows {
        let buffer = matches!(row.memory, Kind::Vmm | Kind::Registered);
        if rows.len() > MANY && !buffer {
            continue;
        }
        let figures = row.rates().map(|figure| median(figure, digits));
        let place = [
            format!(" {}", row.node),
            row.gpu.to_string(),
            row.memory.name().to_owned(),
        ];
        table.row(place.into_iter().chain(figures));
    }
    indented(&table)
}

fn median(figure: Option<Figure>, digits: usize) -> String {
    match figure {
        Some(Figure::Measured(Rate { median, .. })) => format!("{median:.digits$}"),
        Some(Figure::Simulated) => "simulated".to_owned(),
        None => "–".to_owned(),
    }
}

fn pinned(row: &Pinned) -> String {
    let mut text = format!(
        "  node {}, {}, {}: ",
        row.node,
        row.backing.name(),
        Bytes(row.bytes)
    );
    match (row.allocate_s, row.release_s) {
        (Figure::Measured(allocate), Figure::Measured(release)) => {
            let rate = row.bytes as f64 / allocate / 1e9;
            writeln!(
                text,
                "{allocate:.3} s ({rate:.1} GB/s), released in {release:.3} s"
            )
            .ok();
        }
        _ => text += "simulated\n",
    }
    text
}

fn placed(row: &Placed) -> String {
    let verdict = match row.on_node {
        Some(true) => "on the node".to_owned(),
        Some(false) => "NOT on the node".to_owned(),
        None => "unclear".to_owned(),
    };
    let taken = row.taken.iter().filter(|of| of.bytes > 0);
    let taken = taken.map(|of| format!("{} less on node {}", Bytes(of.bytes), of.node));
    let taken: Vec<_> = taken.collect();
    let taken = if taken.is_empty() {
        "no node has less".to_owned()
    } else {
        taken.join(", ")
    };
    let (node, kind, bytes) = (row.node, row.backing.name(), Bytes(row.bytes));
    hanging(
        "  ",
        &format!("node {node}, {kind}, {bytes}: {verdict} ({taken})"),
    )
}

/// Formats one line for each node.
fn fabric(rows: &[Fabric]) -> String {
    let nodes = grouped(rows.iter().map(|row| (row.node, row.gpu)));
    let line = |(node, gpus): &(i32, Vec<i32>)| {
        format!(
            "  node {node}, GPU {}: exported, imported, proved\n",
            ranges(gpus)
        )
    };
    nodes.iter().map(line).collect()
}
