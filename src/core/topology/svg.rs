//! A topology as an SVG drawing: host nodes as panels, their GPUs below, links between.

mod peers;

use std::fmt::Write;

use super::text::count;
use super::{Gpu, LinkKind, NumaNode, Topology};
use crate::driver::NodeId;
use crate::size::Bytes;
use crate::text::escape_xml;

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
/// The width of a character of the small font, rounded up.
const CHAR: f64 = 6.9;

/// Light by default; a viewer that prefers dark gets dark. The drawing loads no font and uses no feature that
/// converters to other formats lack, such as variables.
const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1c2430}\n\
.title{font-size:20px;font-weight:600}.name{font-size:15px;font-weight:600}\
.small{font-size:12px}.soft{fill:#5b6676}.mid{text-anchor:middle}\n\
circle{fill:#5b6676}.bg{fill:#ffffff}.panel{fill:#eef3f9;stroke:#9db0c6}.bar{fill:#d3deeb}.used{fill:#5b8fc7}\
.gpu{fill:#eaf6e4;stroke:#76b043}.c2c{stroke:#5c9a2b}.pcie{stroke:#8a93a0}.nvlink{stroke:#b8860b}\n\
@media (prefers-color-scheme:dark){text{fill:#e8edf4}.soft{fill:#a3afbf}circle{fill:#a3afbf}.bg{fill:#12161c}\
.panel{fill:#1d2631;stroke:#48607a}.bar{fill:#324254}.gpu{fill:#1c2a18;stroke:#5f9136}\
.c2c{stroke:#86c552}.pcie{stroke:#8c98a8}.nvlink{stroke:#e0b040}}";

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
        let mut body = String::new();
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
                y += peers::draw(&mut body, &groups, &middles, y - GAP) + GAP / 2.0;
            }
        }
        let legend = self.legend();
        for line in &legend {
            text(&mut body, MARGIN, y + 4.0, "small soft", line);
            y += 20.0;
        }
        let height = y + MARGIN - 12.0;

        let mut svg = String::new();
        let title = escape_xml(&headline);
        put(
            &mut svg,
            format_args!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" viewBox=\"0 0 {width:.0} \
             {height:.0}\" width=\"{width:.0}\" height=\"{height:.0}\">\n<title>{title}</title>\n\
             <style>{STYLE}</style>\n\
             <rect width=\"100%\" height=\"100%\" class=\"bg\"/>\n"
            ),
        );
        text(&mut svg, MARGIN, 42.0, "title", &headline);
        text(
            &mut svg,
            MARGIN,
            64.0,
            "small soft",
            &format!("source: {}", self.source),
        );
        svg.push_str(&body);
        svg.push_str("</svg>\n");
        svg
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
fn draw_column(out: &mut String, column: &Column<'_>, x: f64, y: f64) -> Vec<(i32, f64)> {
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
    let dash = if column.node.is_some() {
        ""
    } else {
        " stroke-dasharray=\"6 5\""
    };
    put(
        out,
        format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{PANEL_HEIGHT}\" rx=\"10\" \
         class=\"panel\"{dash}/>\n"
        ),
    );
    match column.node {
        Some(node) => draw_node(out, node, x, y, width),
        None => text(
            out,
            middle,
            y + PANEL_HEIGHT / 2.0 + 5.0,
            "name mid",
            "host node unknown",
        ),
    }
    middles
}

fn draw_node(out: &mut String, node: &NumaNode, x: f64, y: f64, width: f64) {
    let (left, inner) = (x + 16.0, width - 32.0);
    text(
        out,
        left,
        y + 28.0,
        "name",
        &format!("NUMA node {}", node.id),
    );
    let cpus = match node.cpus.len() {
        0 => "no CPUs".into(),
        n => format!("{}: {}", count(n, "CPU"), node.cpus),
    };
    text(out, left, y + 49.0, "small", &fit(&cpus, inner));
    let memory = match (node.memory_total, node.memory_free) {
        (0, _) => "memory: size unknown".into(),
        (total, None) => format!("memory: {}", Bytes(total)),
        (total, Some(free)) => format!("memory: {}, {} free", Bytes(total), Bytes(free)),
    };
    text(out, left, y + 72.0, "small", &fit(&memory, inner));
    bar(out, left, y + 80.0, inner, "bar");
    if let (total @ 1.., Some(free)) = (node.memory_total, node.memory_free) {
        let used = total.saturating_sub(free) as f64 / total as f64;
        bar(out, left, y + 80.0, inner * used, "used");
    }
    text(
        out,
        left,
        y + 120.0,
        "small soft",
        &fit(&distances(node), inner),
    );
}

fn bar(out: &mut String, x: f64, y: f64, width: f64, class: &str) {
    if width >= 1.0 {
        put(
            out,
            format_args!(
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"14\" rx=\"3\" \
             class=\"{class}\"/>\n"
            ),
        );
    }
}

/// Formats the distances to other nodes, equal ones together.
fn distances(node: &NumaNode) -> String {
    let mut by_distance: Vec<(u32, Vec<String>)> = Vec::new();
    for (to, distance) in node.distances.iter().filter(|(to, _)| **to != node.id) {
        match by_distance.iter_mut().find(|(known, _)| known == distance) {
            Some((_, ids)) => ids.push(to.to_string()),
            None => by_distance.push((*distance, vec![to.to_string()])),
        }
    }
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

fn draw_link(out: &mut String, link: LinkKind, x: f64, y: f64) {
    let (class, dash, thickness) = match link {
        LinkKind::NvlinkC2c => ("c2c", "", 7),
        LinkKind::Pcie => ("pcie", "", 3),
        LinkKind::Unknown => ("pcie", " stroke-dasharray=\"3 5\"", 2),
    };
    let bottom = y + LINK_HEIGHT;
    put(
        out,
        format_args!(
            "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x:.1}\" y2=\"{bottom:.1}\" class=\"{class}\" \
         stroke-width=\"{thickness}\"{dash}/>\n"
        ),
    );
    text(
        out,
        x + 9.0,
        y + LINK_HEIGHT / 2.0 + 4.0,
        "small soft",
        &link.to_string(),
    );
}

fn draw_gpu(out: &mut String, gpu: &Gpu, x: f64, y: f64) {
    put(
        out,
        format_args!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{GPU_WIDTH}\" height=\"{GPU_HEIGHT}\" rx=\"10\" \
         class=\"gpu\"/>\n"
        ),
    );
    let (left, inner) = (x + 12.0, GPU_WIDTH - 24.0);
    text(out, left, y + 26.0, "name", &format!("GPU {}", gpu.ordinal));
    text(out, left, y + 47.0, "small", &fit(&gpu.name, inner));
    let memory = match gpu.memory {
        0 => "memory unknown".into(),
        bytes => Bytes(bytes).to_string(),
    };
    let memory = match gpu.memory_node {
        Some(node) => format!("{memory}, node {node}"),
        None => memory,
    };
    text(out, left, y + 67.0, "small", &fit(&memory, inner));
    text(
        out,
        left,
        y + 88.0,
        "small soft",
        &fit(&gpu.pci_bus_id, inner),
    );
}

fn text(out: &mut String, x: f64, y: f64, class: &str, content: &str) {
    if !content.is_empty() {
        let content = escape_xml(content);
        put(
            out,
            format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" class=\"{class}\">{content}</text>\n"),
        );
    }
}

fn put(out: &mut String, what: std::fmt::Arguments<'_>) {
    let _ = out.write_fmt(what); // to a String it cannot fail
}

/// Returns the text, shortened with an ellipsis if it would be wider than `width`.
fn fit(text: &str, width: f64) -> String {
    let most = (width / CHAR).max(1.0) as usize;
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_to_its_width() {
        assert_eq!(fit("0-71", 100.0), "0-71");
        assert_eq!(fit("0,2,4,6,8,10,12,14,16", 70.0), "0,2,4,6,8…");
        assert_eq!(fit("long", 0.0), "…");
    }
}
