//! Formats a topology as aligned text.

use std::fmt::{self, Write};

use super::{Gpu, NumaNode, Topology, TopologySource};
use crate::size::Bytes;
use crate::table::Table;
use crate::text::count;

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text())
    }
}

impl Topology {
    /// Returns the source, without the driver if that has reported no GPU.
    fn told_by(&self) -> String {
        match (self.source, self.gpus.is_empty()) {
            (TopologySource::Hwloc, true) => "hwloc".into(),
            (TopologySource::Kernel, true) => "the kernel".into(),
            (source, _) => source.to_string(),
        }
    }

    /// Returns the text that [`Display`](fmt::Display) shows: a line for each host node, its GPUs below it,
    /// then the distances between nodes and the links between GPUs. It ends with a line break.
    pub fn to_text(&self) -> String {
        let mut out = self.headline();
        if self.source != TopologySource::Simulated {
            out.push_str(&format!(" (told by {})", self.told_by()));
        }
        out.push('\n');
        let nodes = align(self.nodes.iter().map(node_cells).collect());
        let gpus = align(self.gpus.iter().map(gpu_cells).collect());
        for (node, line) in self.nodes.iter().zip(&nodes) {
            out.push('\n');
            out.push_str(line);
            out.push('\n');
            let near = self.gpus.iter().zip(&gpus);
            tree(
                &mut out,
                near.filter(|(gpu, _)| gpu.host_numa == Some(node.id)),
            );
        }
        let is_elsewhere =
            |gpu: &Gpu| !self.nodes.iter().any(|node| gpu.host_numa == Some(node.id));
        if self.gpus.iter().any(is_elsewhere) {
            out.push_str("\nhost node unknown\n");
            let rest = self.gpus.iter().zip(&gpus);
            tree(&mut out, rest.filter(|(gpu, _)| is_elsewhere(gpu)));
        }
        if self.nodes.len() > 1 && self.nodes.iter().all(|node| !node.distances.is_empty()) {
            out.push_str("\ndistances between nodes (10: local)\n");
            out.push_str(&self.distance_table());
        }
        out.push_str(&self.peer_table());
        out
    }

    /// Returns a heading and a line for each group of GPUs that are linked alike; nothing for a GPU alone.
    fn peer_table(&self) -> String {
        let groups = self.peer_groups();
        if self.has_no_peers() {
            return "\nlinks between GPUs: none gives access to another GPU's memory\n".into();
        }
        if groups.is_empty() {
            return String::new();
        }
        let mut rows: Vec<Vec<String>> = groups
            .into_iter()
            .map(|group| vec![format!("  GPUs {}", group.list()), group.words])
            .collect();
        let count = self.gpus.len();
        if self.gpus.iter().any(|gpu| gpu.peers.len() + 1 < count) {
            rows.push(vec!["  other pairs".into(), "no access".into()]);
        }
        format!("\nlinks between GPUs\n{}\n", align(rows).join("\n"))
    }

    /// Describes the topology's machine in one line.
    pub(super) fn headline(&self) -> String {
        let size = format!(
            "{}, {}",
            count(self.nodes.len() as u64, "host NUMA node"),
            count(self.gpus.len() as u64, "GPU")
        );
        match (&self.machine, self.source) {
            (Some(name), TopologySource::Simulated) => format!("{name} (SIMULATED): {size}"),
            _ => size,
        }
    }

    fn distance_table(&self) -> String {
        let ids = self.node_ids();
        let head = std::iter::once(String::new()).chain(ids.iter().map(|id| id.to_string()));
        let mut rows = vec![head.collect::<Vec<_>>()];
        for node in &self.nodes {
            let distance = |to| node.distances.get(to).map_or("-".into(), u32::to_string);
            let cells = std::iter::once(node.id.to_string()).chain(ids.iter().map(distance));
            rows.push(cells.collect());
        }
        let width = rows.iter().flatten().map(String::len).max().unwrap_or(0);
        let mut out = String::new();
        for row in rows {
            for cell in row {
                let _ = write!(out, "  {cell:>width$}"); // to a String it cannot fail
            }
            out.push('\n');
        }
        out
    }
}

fn node_cells(node: &NumaNode) -> Vec<String> {
    vec![
        format!("node {}", node.id),
        match node.cpus.len() {
            0 if !node.cpus_known => "CPUs unknown".into(),
            0 => "no CPUs".into(),
            n => format!("{} ({})", count(n as u64, "CPU"), node.cpus),
        },
        match node.memory_total {
            0 => "memory unknown".into(),
            bytes => Bytes(bytes).to_string(),
        },
        match node.memory_free {
            Some(free) => format!("{} free", Bytes(free)),
            None => String::new(),
        },
        match node.allowed {
            true => String::new(),
            false => "not in this process's cpuset.mems".into(),
        },
    ]
}

fn gpu_cells(gpu: &Gpu) -> Vec<String> {
    vec![
        format!("GPU {}", gpu.ordinal),
        gpu.name.clone(),
        match gpu.memory {
            0 => "memory unknown".into(),
            bytes => Bytes(bytes).to_string(),
        },
        match gpu.memory_node {
            Some(node) => format!("is node {node}"),
            None => String::new(),
        },
        match gpu.coherent {
            true => format!("{}, coherent", gpu.link),
            false => gpu.link.to_string(),
        },
        gpu.pci_bus_id.clone(),
        match gpu.host_numa {
            Some(_) => format!("(node by {})", gpu.host_numa_source),
            None => String::new(),
        },
    ]
}

/// Pads each row's cells to the widest of their column; leaves out columns that are empty in all rows.
fn align(rows: Vec<Vec<String>>) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let mut table = Table::new(&vec![""; columns]);
    rows.into_iter().for_each(|row| table.whole_row(row));
    let lines = table.lines(None);
    lines.lines().skip(1).map(str::to_owned).collect()
}

fn tree<'a>(out: &mut String, gpus: impl Iterator<Item = (&'a Gpu, &'a String)>) {
    let mut gpus = gpus.peekable();
    while let Some((_, line)) = gpus.next() {
        let branch = if gpus.peek().is_some() {
            "├─"
        } else {
            "└─"
        };
        let _ = writeln!(out, "  {branch} {line}"); // to a String it cannot fail
    }
}
