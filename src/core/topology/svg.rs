//! A topology as an SVG drawing: a row for each host node, with its panel, its GPUs beside it, and links between.

use std::fmt::Write;

use super::peer_groups::PeerGroup;
use super::{Gpu, LinkKind, NumaNode, PeerLinkKind, Topology};
use crate::driver::NodeId;
use crate::size::Bytes;
use crate::svg::{Drawing, Point};
use crate::table::end_cut;
use crate::text::{count, grouped};

const MARGIN: f64 = 28.0;
const GAP: f64 = 24.0;
const HEAD: f64 = 84.0;
/// A host node's panel and a GPU's box: width, and height or the least of it.
const PANEL: Point = (300.0, 136.0);
const GPU: Point = (190.0, 104.0);
/// Where links to GPUs begin, and where they end.
const PANEL_END: f64 = MARGIN + PANEL.0;
const GPU_START: f64 = PANEL_END + 180.0;
/// The distance between bars that link GPUs.
const LEVEL: f64 = 34.0;
/// The width of a character of the small font, rounded up.
const CHAR: f64 = 6.9;

const STYLE: &str = "\
.title{font-size:20px;font-weight:600}.name{font-size:15px;font-weight:600}\
.small{font-size:12px}\n\
circle{fill:#5b6676}.panel{fill:#eef3f9;stroke:#9db0c6}.bar{fill:#d3deeb}.used{fill:#5b8fc7}\
.gpu{fill:#eaf6e4;stroke:#76b043}.c2c{stroke:#5c9a2b}.pcie{stroke:#8a93a0}.nvlink{stroke:#b8860b}";
const DARK: &str = "\
circle{fill:#a3afbf}\
.panel{fill:#1d2631;stroke:#48607a}.bar{fill:#324254}.gpu{fill:#1c2a18;stroke:#5f9136}\
.c2c{stroke:#86c552}.pcie{stroke:#8c98a8}.nvlink{stroke:#e0b040}";

impl Topology {
    /// Returns an SVG drawing of the node: its host NUMA nodes with CPUs and memories, its GPUs with theirs,
    /// and the links with their kinds: between CPU and GPU, and between GPUs.
    ///
    /// It is a complete file, needs no fonts or style sheets, and follows the viewer's light or dark mode.
    pub fn to_svg(&self) -> String {
        let headline = self.headline();
        let mut svg = Drawing::default();
        svg.text((MARGIN, 42.0), "title", &headline);
        let source = format!("source: {}", self.source);
        svg.text((MARGIN, 64.0), "small soft", &source);
        let mut middles = Vec::new();
        let mut y = HEAD;
        for (node, gpus) in self.rows() {
            let top = |count: usize| y + count as f64 * (GPU.1 + GAP);
            let height = PANEL.1.max(top(gpus.len()) - GAP - y);
            draw_panel(&mut svg, node, y, height);
            for (index, gpu) in gpus.iter().enumerate() {
                draw_gpu(&mut svg, gpu, top(index));
                middles.push((gpu.ordinal, top(index) + GPU.1 / 2.0));
            }
            y += height + GAP;
        }
        let mut right = GPU_START + GPU.0;
        for group in self.peer_groups() {
            right += LEVEL;
            draw_peers(&mut svg, &group, &middles, right);
        }
        for line in self.legend() {
            svg.text((MARGIN, y + 4.0), "small soft", line);
            y += 20.0;
        }
        let width = right.max(headline.chars().count() as f64 * 11.0) + MARGIN;
        let size = (width.round() as u64, y.round() as u64 + 16);
        svg.file(size, &headline, STYLE, DARK)
    }

    /// Returns each host node with its GPUs, and the GPUs whose node is not known.
    fn rows(&self) -> Vec<(Option<&NumaNode>, Vec<&Gpu>)> {
        let near = |id: Option<NodeId>| -> Vec<&Gpu> {
            let known = |gpu: &Gpu| gpu.host_numa.filter(|id| self.node(*id).is_ok());
            self.gpus.iter().filter(|gpu| known(gpu) == id).collect()
        };
        let nodes = self.nodes.iter();
        let mut rows: Vec<_> = nodes
            .map(|node| (Some(node), near(Some(node.id))))
            .collect();
        rows.push((None, near(None)));
        rows.retain(|(node, gpus)| node.is_some() || !gpus.is_empty());
        rows
    }

    fn legend(&self) -> Vec<&'static str> {
        let mut lines = Vec::new();
        if self.has_no_peers() {
            lines.push("links between GPUs: none gives access to another GPU's memory");
        }
        if self.gpus.iter().any(|gpu| gpu.memory_node.is_some()) {
            lines.push(
                "a GPU's 'node' is the NUMA node of its own memory; EGM lies on the host nodes",
            );
        }
        lines
    }
}

fn draw_panel(svg: &mut Drawing, node: Option<&NumaNode>, y: f64, height: f64) {
    let (at, size) = ((MARGIN, y), (PANEL.0, height));
    let Some(node) = node else {
        svg.rect(
            at,
            size,
            r#"class="panel" rx="10" stroke-dasharray="6 5""#,
            "",
        );
        return svg.text((MARGIN + 16.0, y + 28.0), "name", "host node unknown");
    };
    svg.rect(at, size, r#"class="panel" rx="10""#, "");
    let (left, inner) = (MARGIN + 16.0, PANEL.0 - 32.0);
    let cpus = match node.cpus.len() {
        0 if !node.cpus_known => "CPUs unknown".into(),
        0 => "no CPUs".into(),
        n => format!("{}: {}", count(n as u64, "CPU"), node.cpus),
    };
    let memory = match (node.memory_total, node.memory_free) {
        (0, _) => "memory: size unknown".into(),
        (total, None) => format!("memory: {}", Bytes(total)),
        (total, Some(free)) => format!("memory: {}, {} free", Bytes(total), Bytes(free)),
    };
    let rows = [
        (28.0, "name", format!("NUMA node {}", node.id)),
        (49.0, "small", cpus),
        (72.0, "small", memory),
        (120.0, "small soft", distances(node)),
    ];
    texts(svg, (left, y), inner, &rows);
    let bar = (left, y + 80.0);
    svg.rect(bar, (inner, 14.0), r#"class="bar" rx="3""#, "");
    if let (total @ 1.., Some(free)) = (node.memory_total, node.memory_free) {
        let used = inner * (total.saturating_sub(free) as f64 / total as f64);
        if used >= 1.0 {
            svg.rect(bar, (used, 14.0), r#"class="used" rx="3""#, "");
        }
    }
}

/// Formats the distances to other nodes, equal ones together.
fn distances(node: &NumaNode) -> String {
    let others = node.distances.iter().filter(|(to, _)| **to != node.id);
    let mut by_distance = grouped(others.map(|(to, distance)| (*distance, to.to_string())));
    by_distance.sort_by_key(|(distance, _)| *distance);
    let parts: Vec<String> = by_distance
        .iter()
        .map(|(distance, ids)| format!("to {}: {distance}", ids.join(", ")))
        .collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!("distance {}", parts.join("; ")),
    }
}

/// Draws a GPU, and the link to its host node.
fn draw_gpu(svg: &mut Drawing, gpu: &Gpu, y: f64) {
    let class = match gpu.link {
        LinkKind::NvlinkC2c => r#"class="c2c" stroke-width="7""#,
        LinkKind::Pcie => r#"class="pcie" stroke-width="3""#,
        LinkKind::Unknown => r#"class="pcie" stroke-width="2" stroke-dasharray="3 5""#,
    };
    let middle = y + GPU.1 / 2.0;
    svg.line((PANEL_END, middle), (GPU_START, middle), class);
    let at = (PANEL_END + 12.0, middle - 9.0);
    svg.text(at, "small soft", &gpu.link.to_string());
    svg.rect((GPU_START, y), GPU, r#"class="gpu" rx="10""#, "");
    let memory = match gpu.memory {
        0 => "memory unknown".into(),
        bytes => Bytes(bytes).to_string(),
    };
    let memory = match gpu.memory_node {
        Some(node) => format!("{memory}, node {node}"),
        None => memory,
    };
    let rows = [
        (26.0, "name", format!("GPU {}", gpu.ordinal)),
        (47.0, "small", gpu.name.clone()),
        (67.0, "small", memory),
        (88.0, "small soft", gpu.pci_bus_id.clone()),
    ];
    texts(svg, (GPU_START + 12.0, y), GPU.0 - 24.0, &rows);
}

/// Draws a text for each row (distance from `y`, class, text), shortened to `width`.
fn texts(svg: &mut Drawing, (x, y): Point, width: f64, rows: &[(f64, &str, String)]) {
    let most = (width / CHAR).max(1.0) as usize;
    for (down, class, content) in rows {
        svg.text((x, y + down), class, &end_cut(content, most));
    }
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
        svg.line((GPU_START + GPU.0, *y), (x, *y), class);
        let _ = writeln!(svg, r#"<circle cx="{x:.1}" cy="{y:.1}" r="4"/>"#);
    }
    let (x, y) = (x - 8.0, last - 8.0);
    let _ = writeln!(
        svg,
        r#"<g transform="translate({x:.1} {y:.1}) rotate(-90)">"#
    );
    svg.text((0.0, 0.0), "small soft", &group.words);
    let _ = writeln!(svg, "</g>");
}
