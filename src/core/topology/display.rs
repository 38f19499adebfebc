//! A topology as aligned text, and as an SVG drawing.

use std::fmt::{self, Write};

use super::{Gpu, LinkKind, NumaNode, PeerLinkKind, Topology, TopologySource, add_once};
use crate::driver::NodeId;
use crate::report::{Drawing, Point, Table, end_cut};
use crate::size::Bytes;
use crate::text::{count, grouped};

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text())
    }
}

const NO_PEERS: &str = "links between GPUs: none gives access to another GPU's memory";
const NO_NODE: &str = "host node unknown";

impl Topology {
    /// Returns the text that [`Display`](fmt::Display) shows: a line for each host node, its GPUs below it,
    /// then the distances between nodes and the links between GPUs. It ends with a line break.
    pub fn to_text(&self) -> String {
        let mut out = self.headline();
        if self.source != TopologySource::Simulated {
            out += &format!(" (told by {})", self.told_by());
        }
        out.push('\n');
        let nodes = align(self.nodes.iter().map(|node| {
            let [cpus, memory, free] = node_words(node);
            let cpus = match node.cpus.len() {
                0 => cpus,
                _ => format!("{cpus} ({})", node.cpus),
            };
            let allowed = if node.allowed {
                ""
            } else {
                "not in this process's cpuset.mems"
            };
            vec![
                format!("node {}", node.id),
                cpus,
                memory,
                free,
                allowed.into(),
            ]
        }));
        let gpus = align(self.gpus.iter().map(gpu_cells));
        for (row, (_, near)) in self.rows().iter().enumerate() {
            let head = nodes.get(row).map_or(NO_NODE, String::as_str);
            out += &format!("\n{head}\n");
            for (index, gpu) in near.iter().enumerate() {
                let is_last = index + 1 == near.len();
                let branch = if is_last { "└─" } else { "├─" };
                out += &format!("  {branch} {}\n", gpus[*gpu]);
            }
        }
        out + &self.distance_table() + &self.peer_table()
    }

    /// Returns the source, without the driver if that has reported no GPU.
    fn told_by(&self) -> String {
        match (self.source, self.gpus.is_empty()) {
            (TopologySource::Hwloc, true) => "hwloc".into(),
            (TopologySource::Kernel, true) => "the kernel".into(),
            (source, _) => source.to_string(),
        }
    }

    /// Describes the topology's machine in one line.
    fn headline(&self) -> String {
        let nodes = count(self.nodes.len() as u64, "host NUMA node");
        let gpus = count(self.gpus.len() as u64, "GPU");
        match (&self.machine, self.source) {
            (Some(name), TopologySource::Simulated) => {
                format!("{name} (SIMULATED): {nodes}, {gpus}")
            }
            _ => format!("{nodes}, {gpus}"),
        }
    }

    /// Returns each host node with the positions of its GPUs, and the GPUs whose node is not known.
    fn rows(&self) -> Vec<(Option<&NumaNode>, Vec<usize>)> {
        let near = |id: Option<NodeId>| -> Vec<usize> {
            let known = |gpu: &Gpu| gpu.host_numa.filter(|id| self.node(*id).is_ok());
            let gpus = self.gpus.iter().enumerate();
            let gpus = gpus.filter(|(_, gpu)| known(gpu) == id);
            gpus.map(|(position, _)| position).collect()
        };
        let nodes = self
            .nodes
            .iter()
            .map(|node| (Some(node), near(Some(node.id))));
        let elsewhere = Some((None, near(None))).filter(|(_, gpus)| !gpus.is_empty());
        nodes.chain(elsewhere).collect()
    }

    /// Returns a heading and the distances between several nodes, if all are known.
    fn distance_table(&self) -> String {
        let ids = self.node_ids();
        if ids.len() < 2 || self.nodes.iter().any(|node| node.distances.is_empty()) {
            return String::new();
        }
        let heads: Vec<String> = ids.iter().map(|id| format!(">{id}")).collect();
        let heads = std::iter::once(">").chain(heads.iter().map(String::as_str));
        let mut table = Table::new(&heads.collect::<Vec<_>>());
        for node in &self.nodes {
            let distance = |to| node.distances.get(to).map_or("-".into(), u32::to_string);
            table.row(std::iter::once(node.id.to_string()).chain(ids.iter().map(distance)));
        }
        format!(
            "\ndistances between nodes (10: local)\n{}",
            table.lines(None)
        )
    }

    /// Returns a heading and a line for each group of GPUs that are linked alike; nothing for a GPU alone.
    fn peer_table(&self) -> String {
        if self.has_no_peers() {
            return format!("\n{NO_PEERS}\n");
        }
        let groups = self.peer_groups().into_iter().map(|group| {
            let gpus: Vec<String> = group.gpus.iter().map(i32::to_string).collect();
            vec![format!("  GPUs {}", gpus.join(", ")), group.words]
        });
        let others = self
            .gpus
            .iter()
            .any(|gpu| gpu.peers.len() + 1 < self.gpus.len());
        let others = others.then(|| vec!["  other pairs".into(), "no access".into()]);
        match align(groups.chain(others)) {
            lines if lines.is_empty() => String::new(),
            lines => format!("\nlinks between GPUs\n{}\n", lines.join("\n")),
        }
    }
}

/// Describes a node's CPUs, its memory, and how much of that is free.
fn node_words(node: &NumaNode) -> [String; 3] {
    [
        match node.cpus.len() {
            0 if !node.cpus_known => "CPUs unknown".into(),
            0 => "no CPUs".into(),
            n => count(n as u64, "CPU"),
        },
        bytes(node.memory_total),
        node.memory_free
            .map_or_else(String::new, |free| format!("{} free", Bytes(free))),
    ]
}

fn bytes(bytes: u64) -> String {
    match bytes {
        0 => "memory unknown".into(),
        bytes => Bytes(bytes).to_string(),
    }
}

fn gpu_cells(gpu: &Gpu) -> Vec<String> {
    let node = gpu.memory_node.map(|node| format!("is node {node}"));
    let by = gpu
        .host_numa
        .map(|_| format!("(node by {})", gpu.host_numa_source));
    let coherent = if gpu.coherent { ", coherent" } else { "" };
    vec![
        format!("GPU {}", gpu.ordinal),
        gpu.name.clone(),
        bytes(gpu.memory),
        node.unwrap_or_default(),
        format!("{}{coherent}", gpu.link),
        gpu.pci_bus_id.clone(),
        by.unwrap_or_default(),
    ]
}

/// Pads each row's cells to the widest of their column; leaves out columns that are empty in all rows.
fn align(rows: impl Iterator<Item = Vec<String>>) -> Vec<String> {
    let rows: Vec<Vec<String>> = rows.collect();
    let mut table = Table::new(&vec![""; rows.first().map_or(0, Vec::len)]);
    rows.into_iter().for_each(|row| table.whole_row(row));
    table
        .lines(None)
        .lines()
        .skip(1)
        .map(str::to_owned)
        .collect()
}

/// GPUs that all have the same kind of link to each other.
pub(super) struct PeerGroup {
    /// Ordinals, ascending: at least two.
    pub(super) gpus: Vec<i32>,
    kind: PeerLinkKind,
    /// The kind and the abilities of the links.
    pub(super) words: String,
}

impl Topology {
    /// Groups the links by which memory can be accessed: GPUs that all have links of one kind to each other are a
    /// group, and so is each other pair. A link that differs by direction counts as the lower GPU's.
    pub(super) fn peer_groups(&self) -> Vec<PeerGroup> {
        let links = self.gpus.iter().flat_map(|gpu| {
            let up = gpu.peer_links.iter();
            let up = up.filter(|link| link.access && link.gpu > gpu.ordinal);
            up.map(|link| ((link.kind, link.words()), [gpu.ordinal, link.gpu]))
        });
        let mut groups = Vec::new();
        for ((kind, words), pairs) in grouped(links) {
            for gpus in connected(&pairs) {
                let own = pairs.iter().filter(|[gpu, _]| gpus.contains(gpu));
                let own: Vec<Vec<i32>> = own.map(|pair| pair.to_vec()).collect();
                let is_complete = own.len() == gpus.len() * (gpus.len() - 1) / 2;
                let sets = if is_complete { vec![gpus] } else { own };
                groups.extend(sets.into_iter().map(|gpus| PeerGroup {
                    gpus,
                    kind,
                    words: words.clone(),
                }));
            }
        }
        groups
    }

    /// Returns whether no GPU of several can access another's memory.
    fn has_no_peers(&self) -> bool {
        self.gpus.len() > 1 && self.gpus.iter().all(|gpu| gpu.peers.is_empty())
    }
}

/// Returns the sets of GPUs that the links connect, over any number of links.
fn connected(pairs: &[[i32; 2]]) -> Vec<Vec<i32>> {
    let mut sets: Vec<Vec<i32>> = Vec::new();
    for pair in pairs {
        let mut joined = Vec::new();
        pair.iter().for_each(|gpu| add_once(&mut joined, *gpu));
        sets.retain(|set| {
            let is_linked = pair.iter().any(|gpu| set.contains(gpu));
            if is_linked {
                set.iter().for_each(|gpu| add_once(&mut joined, *gpu));
            }
            !is_linked
        });
        add_once(&mut sets, joined);
    }
    sets
}

const MARGIN: f64 = 28.0;
const HEAD: f64 = 84.0;
/// The height of a box, and the distance between rows.
const BOX: f64 = 104.0;
const PITCH: f64 = BOX + 24.0;
/// The width of a host node's panel and of a GPU's box, and where the boxes begin.
const PANEL: f64 = 300.0;
const GPU: f64 = 190.0;
const GPU_START: f64 = MARGIN + PANEL + 180.0;
/// The distance between bars that link GPUs.
const LEVEL: f64 = 34.0;
/// The width of a character, rounded up.
const CHAR: f64 = 6.9;

impl Topology {
    /// Returns an SVG drawing of the node: its host NUMA nodes with CPUs and memories, its GPUs with theirs,
    /// and the links with their kinds: between CPU and GPU, and between GPUs.
    ///
    /// It is a complete file, needs no fonts or style sheets, and follows the viewer's light or dark mode.
    pub fn to_svg(&self) -> String {
        let headline = self.headline();
        let mut svg = Drawing::default();
        svg.text((MARGIN, 42.0), "head", &headline);
        svg.text((MARGIN, 64.0), "soft", &format!("source: {}", self.source));
        let (mut y, mut middles) = (HEAD, Vec::new());
        for (node, gpus) in self.rows() {
            let height = PITCH * gpus.len().max(1) as f64;
            draw_box(
                &mut svg,
                (MARGIN, y),
                (PANEL, height - PITCH + BOX),
                &panel(node),
            );
            for (index, gpu) in gpus.into_iter().map(|gpu| &self.gpus[gpu]).enumerate() {
                let top = y + PITCH * index as f64;
                draw_gpu(&mut svg, gpu, top);
                middles.push((gpu.ordinal, top + BOX / 2.0));
            }
            y += height;
        }
        let mut right = GPU_START + GPU;
        for group in self.peer_groups() {
            right += LEVEL;
            draw_peers(&mut svg, &group, &middles, right);
        }
        let own = "a GPU's 'node' is the NUMA node of its own memory; EGM lies on the host nodes";
        let has_own = self.gpus.iter().any(|gpu| gpu.memory_node.is_some());
        for (line, is_so) in [(NO_PEERS, self.has_no_peers()), (own, has_own)] {
            if is_so {
                svg.text((MARGIN, y + 4.0), "soft", line);
                y += 20.0;
            }
        }
        let width = right.max(headline.chars().count() as f64 * 11.0) + MARGIN;
        svg.file((width.round() as u64, y.round() as u64 + 16), &headline)
    }
}

/// Returns the lines of a host node's panel.
fn panel(node: Option<&NumaNode>) -> Vec<String> {
    let Some(node) = node else {
        return vec![NO_NODE.into()];
    };
    let [cpus, memory, free] = node_words(node);
    let others = node.distances.iter().filter(|(to, _)| **to != node.id);
    let mut distances = Vec::new();
    for group in grouped(others.map(|(to, distance)| (*distance, to.to_string()))) {
        add_once(&mut distances, group);
    }
    let distances = distances
        .iter()
        .map(|(distance, ids)| format!("distance to {}: {distance}", ids.join(", ")));
    vec![
        format!("NUMA node {}", node.id),
        format!("{cpus}: {}", node.cpus),
        format!("{memory}, {free}"),
        distances.collect::<Vec<_>>().join("; "),
    ]
}

/// Draws a box with lines of text, the first one as its name, shortened to its width.
fn draw_box(svg: &mut Drawing, (x, y): Point, size: Point, lines: &[String]) {
    svg.rect((x, y), size, r#"class="box" rx="10""#, "");
    let most = ((size.0 - 28.0) / CHAR) as usize;
    for (row, line) in lines.iter().enumerate() {
        let class = if row == 0 { "name" } else { "" };
        let line = end_cut(line.trim_end_matches([',', ':', ' ']), most);
        svg.text((x + 14.0, y + 26.0 + 21.0 * row as f64), class, &line);
    }
}

/// Draws a GPU, and the link to its host node.
fn draw_gpu(svg: &mut Drawing, gpu: &Gpu, y: f64) {
    let class = match gpu.link {
        LinkKind::NvlinkC2c => r#"class="c2c" stroke-width="7""#,
        LinkKind::Pcie => r#"class="pcie" stroke-width="3""#,
        LinkKind::Unknown => r#"class="pcie" stroke-width="2" stroke-dasharray="3 5""#,
    };
    let (start, middle) = (MARGIN + PANEL, y + BOX / 2.0);
    svg.line((start, middle), (GPU_START, middle), class);
    svg.text((start + 12.0, middle - 9.0), "soft", &gpu.link.to_string());
    let node = gpu.memory_node.map(|node| format!(", node {node}"));
    let lines = [
        format!("GPU {}", gpu.ordinal),
        gpu.name.clone(),
        bytes(gpu.memory) + &node.unwrap_or_default(),
        gpu.pci_bus_id.clone(),
    ];
    draw_box(svg, (GPU_START, y), (GPU, BOX), &lines);
}

/// Draws a bar at `x` with a line to each GPU of a group; `gpus` has the ordinals and the middles, from above.
fn draw_peers(svg: &mut Drawing, group: &PeerGroup, gpus: &[(i32, f64)], x: f64) {
    let own = gpus.iter().filter(|(gpu, _)| group.gpus.contains(gpu));
    let own: Vec<f64> = own.map(|(_, middle)| *middle).collect();
    let (Some(first), Some(last)) = (own.first(), own.last()) else {
        return;
    };
    let class = match group.kind {
        PeerLinkKind::Nvlink => r#"class="nvlink" stroke-linecap="round" stroke-width="5""#,
        PeerLinkKind::Pcie => r#"class="pcie" stroke-linecap="round" stroke-width="3""#,
        PeerLinkKind::Unknown => r#"class="pcie" stroke-width="2" stroke-dasharray="3 5""#,
    };
    svg.line((x, *first), (x, *last), class);
    for y in &own {
        svg.line((GPU_START + GPU, *y), (x, *y), class);
        let _ = writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="4"/>"#);
    }
    let (x, y) = (x - 8.0, last - 8.0);
    let _ = writeln!(
        svg,
        r#"<g transform="translate({x:.1} {y:.1}) rotate(-90)">"#
    );
    svg.text((0.0, 0.0), "soft", &group.words);
    let _ = writeln!(svg, "</g>");
}
