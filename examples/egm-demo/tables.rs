//! The report as tables, for people.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use egmem::doctor::measure::{Bandwidth, Kind, OPERATIONS, Proof, Rate};
use egmem::size::Bytes;

use super::report::{Gpu, Node};

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(header);
    table
}

fn align_right(table: &mut Table, from: usize) {
    for column in table.column_iter_mut().skip(from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// The host NUMA nodes.
pub fn nodes(nodes: &[Node]) -> Table {
    let mut table = table(["node", "CPUs", "memory", "free"]);
    for node in nodes {
        table.add_row([
            node.id.to_string(),
            if node.cpus.is_empty() {
                "–".into()
            } else {
                node.cpus.clone()
            },
            match node.memory_total {
                0 => "unknown".into(),
                bytes => Bytes(bytes).to_string(),
            },
            node.memory_free
                .map_or("unknown".into(), |bytes| Bytes(bytes).to_string()),
        ]);
    }
    align_right(&mut table, 2);
    table
}

/// The GPUs.
pub fn gpus(gpus: &[Gpu]) -> Table {
    let mut table = table([
        "GPU",
        "name",
        "PCI",
        "memory",
        "host node",
        "own node",
        "link",
    ]);
    let node = |id: Option<i32>, none: &str| id.map_or(none.to_owned(), |id| id.to_string());
    for gpu in gpus {
        table.add_row([
            gpu.ordinal.to_string(),
            gpu.name.clone(),
            gpu.pci_bus_id.clone(),
            Bytes(gpu.memory).to_string(),
            node(gpu.host_numa, "unknown"),
            node(gpu.memory_node, "–"),
            format!(
                "{}{}",
                gpu.link,
                if gpu.coherent { ", coherent" } else { "" }
            ),
        ]);
    }
    table
}

/// The proofs: a row for each node and path, a column for each GPU, and below the reasons.
pub fn proofs(proofs: &[Proof], malloc_async: &[Proof]) -> String {
    let mut gpus: Vec<i32> = proofs.iter().map(|proof| proof.gpu).collect();
    gpus.sort_unstable();
    gpus.dedup();
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(
        ["node".to_owned(), "path".to_owned()]
            .into_iter()
            .chain(gpus.iter().map(|gpu| format!("GPU {gpu}"))),
    );
    // Each reason once, in the order met; cells refer to it by number.
    let mut reasons: Vec<String> = Vec::new();
    let mut add = |way: fn(&Proof) -> &'static str, proofs: &[Proof]| {
        let mut lines: Vec<(i32, &'static str)> = Vec::new();
        for proof in proofs {
            if !lines.contains(&(proof.node, way(proof))) {
                lines.push((proof.node, way(proof)));
            }
        }
        for (node, name) in lines {
            let cells = gpus.iter().map(|&gpu| {
                let found = proofs
                    .iter()
                    .find(|proof| (proof.node, way(proof), proof.gpu) == (node, name, gpu));
                found.map_or("–".to_owned(), |proof| outcome(proof, &mut reasons))
            });
            let row: Vec<String> = [node.to_string(), name.to_owned()]
                .into_iter()
                .chain(cells)
                .collect();
            table.add_row(row);
        }
    };
    add(way, proofs);
    add(|_| "cudaMallocAsync (optional)", malloc_async);
    let mut text = table.to_string();
    for (index, reason) in reasons.iter().enumerate() {
        let _ = write!(text, "\n[{}] {reason}", index + 1);
    }
    text
}

fn way(proof: &Proof) -> &'static str {
    match (proof.path, proof.api.as_str()) {
        (Kind::Pool, "runtime") => "pool (runtime API)",
        (path, _) => path.name(),
    }
}

fn outcome(proof: &Proof, reasons: &mut Vec<String>) -> String {
    let Some(reason) = &proof.reason else {
        return "verified".into();
    };
    let reason = format!("{reason}; {}", proof.remedy.as_deref().unwrap_or_default());
    let index = match reasons.iter().position(|known| *known == reason) {
        Some(index) => index,
        None => {
            reasons.push(reason);
            reasons.len() - 1
        }
    };
    format!("NO [{}]", index + 1)
}

/// The bandwidth matrix.
pub fn bandwidth(bandwidth: &Bandwidth) -> Table {
    let [to_gpu, to_host, reads, writes] = OPERATIONS;
    let mut table = table(["node", "GPU", "memory", to_gpu, to_host, reads, writes]);
    for row in &bandwidth.rows {
        let compared = row.is_compared().then(|| row.beside(&bandwidth.rows));
        let base = compared.flatten().map(|base| base.rates());
        let rates = row.rates();
        let cells = (0..rates.len()).map(|i| rate(rates[i], base.and_then(|base| base[i])));
        let cells: Vec<String> = [
            row.node.to_string(),
            row.gpu.to_string(),
            row.memory.name().to_owned(),
        ]
        .into_iter()
        .chain(cells)
        .collect();
        table.add_row(cells);
    }
    align_right(&mut table, 3);
    table
}

/// A rate, and by how much it differs from cudaHostAlloc's.
fn rate(rate: Option<Rate>, base: Option<Rate>) -> String {
    match (rate, base) {
        (None, _) => "–".into(),
        (Some(rate), None) => format!("{:.1}", rate.median),
        (Some(rate), Some(base)) => {
            let difference = 100.0 * (rate.median / base.median - 1.0);
            format!("{:.1} ({difference:+.1} %)", rate.median)
        }
    }
}
