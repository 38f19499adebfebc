//! A topology as an SVG drawing: host nodes as panels, their GPUs below, links between.

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
/// A row of panels is broken beyond this width.
const MAX_ROW: f64 = 1500.0;
const PANEL_MIN: f64 = 280.0;
const PANEL_HEIGHT: f64 = 136.0;
const LINK_HEIGHT: f64 = 64.0;
const GPU_WIDTH: f64 = 168.0;
const GPU_GAP: f64 = 16.0;
const GPU_HEIGHT: f64 = 104.0;
const HEAD: f64 = 84.0;
/// The height of a bar that links GPUs, with its text.
const LEVEL: f64 = 34.0;
/// The width of a character of the small font, rounded up.
const CHAR: f64 = 6.9;

const STYLE: &str = "\
.title{font-size:20px;font-weight:600}.name{font-size:15px;font-weight:600}\
.small{font-size:12px}.mid{text-anchor:middle}\n\
circle{fill:#5b6676}.panel{fill:#eef3f9;stroke:#9db0c6}.bar{fill:#d3deeb}.used{fill:#5b8fc7}\
.gpu{fill:#eaf6e4;stroke:#76b043}.c2c{stroke:#5c9a2b}.pcie{stroke:#8a93a0}.nvlink{stroke:#b8860b}";
const DARK: &str = "\
circle{fill:#a3afbf}\
.panel{fill:#1d2631;stroke:#48607a}.bar{fill:#324254}.gpu{fill:#1c2a18;stroke:#5f9136}\
.c2c{stroke:#86c552}.pcie{stroke:#8c98a8}.nvlink{stroke:#e0b040}";

/// One panel and its GPUs.
struct Column<'a> {
    node: Option<&'a NumaNode>,
    gpus: Vec<&'a Gpu>,
}

impl Column<'_> {
    fn gpus_width(&self) -> f64 {
        let count = self.gpus.len() as f64;
        count * GPU_WIDTH + (count - 1.0).max(0.0) * GPU_GAP
    }

    fn width(&self) -> f64 {
        self.gpus_width().max(PANEL_MIN)
    }
}

impl Topology {
    /// Returns an SVG drawing of the node: its host NUMA nodes with CPUs and memories, its GPUs with theirs,
    /// and the links with their kinds: between CPU and GPU, and between GPUs.
    ///
    /// It is a complete file, needs no fonts or style sheets, and follows the viewer's light or dark mode.
    pub fn to_svg(&self) -> String {
        let rows = self.rows();
        let row_width = |row: &Vec<Column>| {
            row.iter().map(Column::width).sum::<f64>() + (row.len() as f64 - 1.0) * GAP
        };
        let headline = self.headline();
        let widest = rows.iter().map(row_width).fold(560.0, f64::max);
        let width = widest.max(headline.chars().count() as f64 * 11.0) + 2.0 * MARGIN;

        let groups = self.peer_groups();
        let mut body = Drawing::default();
        let mut y = HEAD;
        for row in &rows {
            let mut x = MARGIN + (width - 2.0 * MARGIN - row_width(row)) / 2.0;
            let has_gpus = row.iter().any(|column| !column.gpus.is_empty());
            let mut middles = Vec::new();
            for column in row {
                middles.extend(draw_column(&mut body, column, x, y));
                x += column.width() + GAP;
            }
            y += PANEL_HEIGHT + GAP;
            if has_gpus {
                y += LINK_HEIGHT + GPU_HEIGHT;
                y += draw_peers(&mut body, &groups, &middles, y - GAP) + GAP / 2.0;
            }
        }
        let legend = self.legend();
        for line in &legend {
            body.text((MARGIN, y + 4.0), "small soft", line);
            y += 20.0;
        }
        let height = y + MARGIN - 12.0;

        body.text((MARGIN, 42.0), "title", &headline);
        let source = format!("source: {}", self.source);
        body.text((MARGIN, 64.0), "small soft", &source);
        body.file(
            (width.round() as u64, height.round() as u64),
            &headline,
            STYLE,
            DARK,
        )
    }

    fn rows(&self) -> Vec<Vec<Column<'_>>> {
        let near = |id: Option<NodeId>| -> Vec<&Gpu> {
            let known = |gpu: &Gpu| gpu.host_numa.filter(|id| self.node(*id).is_ok());
            self.gpus.iter().filter(|gpu| known(gpu) == id).collect()
        };
        let mut columns: Vec<Column> = self
            .nodes
            .iter()
            .map(|node| Column {
                node: Some(node),
                gpus: near(Some(node.id)),
            })
            .collect();
        let unknown = near(None);
        if !unknown.is_empty() {
            columns.push(Column {
                node: None,
                gpus: unknown,
            });
        }
        let mut rows: Vec<Vec<Column>> = Vec::new();
        let mut used = f64::INFINITY;
        for column in columns {
            let width = column.width() + GAP;
            if used + width > MAX_ROW {
                rows.push(Vec::new());
                used = 0.0;
            }
            used += width;
            if let Some(row) = rows.last_mut() {
                row.push(column);
            }
        }
        rows
    }

    fn legend(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.has_no_peers() {
            lines.push("links between GPUs: none gives access to another GPU's memory".into());
        }
        if self.gpus.iter().any(|gpu| gpu.memory_node.is_some()) {
            lines.push(
                "a GPU's 'node' is the NUMA node of its own memory; EGM lies on the host nodes"
                    .into(),
            );
        }
        lines
    }
}

/// Returns the GPUs with the middles of their boxes.
fn draw_column(out: &mut Drawing, column: &Column<'_>, x: f64, y: f64) -> Vec<(i32, f64)> {
    let mut middles = Vec::new();
    let width = column.width();
    let middle = x + width / 2.0;
    let mut gpu_x = middle - column.gpus_width() / 2.0;
    for gpu in &column.gpus {
        draw_link(out, gpu.link, gpu_x + GPU_WIDTH / 2.0, y + PANEL_HEIGHT);
        draw_gpu(out, gpu, gpu_x, y + PANEL_HEIGHT + LINK_HEIGHT);
        middles.push((gpu.ordinal, gpu_x + GPU_WIDTH / 2.0));
        gpu_x += GPU_WIDTH + GPU_GAP;
    }
    let class = match column.node {
        Some(_) => r#"class="panel" rx="10""#,
        None => r#"class="panel" rx="10" stroke-dasharray="6 5""#,
    };
    out.rect((x, y), (width, PANEL_HEIGHT), class, "");
    match column.node {
        Some(node) => draw_node(out, node, x, y, width),
        None => {
            let at = (middle, y + PANEL_HEIGHT / 2.0 + 5.0);
            out.text(at, "name mid", "host node unknown");
        }
    }
    middles
}

fn draw_node(out: &mut Drawing, node: &NumaNode, x: f64, y: f64, width: f64) {
    let (left, inner) = (x + 16.0, width - 32.0);
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
    texts(out, (left, y), inner, &rows);
    let bar = (left, y + 80.0);
    out.rect(bar, (inner, 14.0), r#"class="bar" rx="3""#, "");
    if let (total @ 1.., Some(free)) = (node.memory_total, node.memory_free) {
        let used = inner * (total.saturating_sub(free) as f64 / total as f64);
        if used >= 1.0 {
            out.rect(bar, (used, 14.0), r#"class="used" rx="3""#, "");
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

fn draw_link(out: &mut Drawing, link: LinkKind, x: f64, y: f64) {
    let class = match link {
        LinkKind::NvlinkC2c => r#"class="c2c" stroke-width="7""#,
        LinkKind::Pcie => r#"class="pcie" stroke-width="3""#,
        LinkKind::Unknown => r#"class="pcie" stroke-width="2" stroke-dasharray="3 5""#,
    };
    out.line((x, y), (x, y + LINK_HEIGHT), class);
    let at = (x + 9.0, y + LINK_HEIGHT / 2.0 + 4.0);
    out.text(at, "small soft", &link.to_string());
}

fn draw_gpu(out: &mut Drawing, gpu: &Gpu, x: f64, y: f64) {
    out.rect(
        (x, y),
        (GPU_WIDTH, GPU_HEIGHT),
        r#"class="gpu" rx="10""#,
        "",
    );
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
    texts(out, (x + 12.0, y), GPU_WIDTH - 24.0, &rows);
}

/// Draws a text for each row (distance from `y`, class, text), shortened to `width`.
fn texts(out: &mut Drawing, (x, y): Point, width: f64, rows: &[(f64, &str, String)]) {
    let most = (width / CHAR).max(1.0) as usize;
    for (down, class, content) in rows {
        out.text((x, y + down), class, &end_cut(content, most));
    }
}

/// Draws for each group a bar below `y` with a line up to each of its GPUs in this row, whose ordinals and middles
/// `gpus` has. Returns the height drawn.
fn draw_peers(out: &mut Drawing, groups: &[PeerGroup], gpus: &[(i32, f64)], y: f64) -> f64 {
    let mut level = y;
    for group in groups {
        let here = gpus.iter().filter(|(gpu, _)| group.gpus.contains(gpu));
        let here: Vec<f64> = here.map(|(_, middle)| *middle).collect();
        let (Some(left), Some(right)) = (here.first(), here.last()) else {
            continue;
        };
        level += LEVEL;
        let class = match group.kind {
            PeerLinkKind::Nvlink => r#"class="nvlink" stroke-linecap="round" stroke-width="5""#,
            PeerLinkKind::Pcie => r#"class="pcie" stroke-linecap="round" stroke-width="3""#,
            PeerLinkKind::Unknown => r#"class="pcie" stroke-width="2" stroke-dasharray="3 5""#,
        };
        out.line((*left, level), (*right, level), class);
        for x in &here {
            out.line((*x, y), (*x, level), class);
            let _ = writeln!(out, r#"<circle cx="{x:.1}" cy="{level:.1}" r="4"/>"#);
        }
        // The GPUs are named where others are in another row.
        let words = match here.len() == group.gpus.len() {
            true => group.words.clone(),
            false => format!("{}: GPUs {}", group.words, group.list()),
        };
        out.text((left + 6.0, level - 6.0), "small soft", &words);
    }
    level - y
}
