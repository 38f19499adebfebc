//! The bandwidth matrix as an SVG heat map: one panel an operation, one colour scale for all.

use std::collections::BTreeSet;
use std::fmt::Write;

use egmem::doctor::measure::{Bandwidth, Kind, OPERATIONS, Rate};
use egmem::text::escape_xml;

const CELL_WIDTH: usize = 64;
const CELL_HEIGHT: usize = 30;
const LABEL_WIDTH: usize = 168;
const PANEL_GAP: usize = 36;
const PANEL_HEAD: usize = 52;
const MARGIN: usize = 28;
const TITLE: usize = 84;
/// The width and height that title and legend need.
const LEAST_WIDTH: usize = 820;
const LEGEND: usize = 84;

/// Dark violet to yellow through blue and green: equal steps look equal, in grey too.
///
/// Source: five points of the colour map "viridis" by Smith and van der Walt.
const COLOURS: [[f64; 3]; 5] = [
    [68.0, 1.0, 84.0],
    [59.0, 82.0, 139.0],
    [33.0, 145.0, 140.0],
    [94.0, 201.0, 98.0],
    [253.0, 231.0, 37.0],
];

/// The picture. `machine` names the machine that was measured.
pub fn draw(bandwidth: &Bandwidth, machine: &str) -> String {
    let gpus: BTreeSet<i32> = bandwidth.rows.iter().map(|row| row.gpu).collect();
    let mut lines: Vec<(i32, Kind)> = Vec::new();
    for row in &bandwidth.rows {
        if !lines.contains(&(row.node, row.memory)) {
            lines.push((row.node, row.memory));
        }
    }
    lines.sort_by_key(|line| line.0);
    let top = bandwidth
        .rows
        .iter()
        .flat_map(|row| row.rates())
        .flatten()
        .fold(0.0, |top: f64, rate| top.max(rate.median));
    let scale = Scale::up_to(top);

    let panel_width = LABEL_WIDTH + gpus.len() * CELL_WIDTH;
    let panel_height = PANEL_HEAD + lines.len() * CELL_HEIGHT;
    let width = (2 * MARGIN + 2 * panel_width + PANEL_GAP).max(LEAST_WIDTH);
    let height = TITLE + 2 * panel_height + PANEL_GAP + LEGEND + MARGIN;
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="13" fill="#222">
<title>Bandwidth between host memory and GPUs, GB/s</title>
<rect width="{width}" height="{height}" fill="#fff"/>
<text x="{MARGIN}" y="30" font-size="17" font-weight="bold">Bandwidth between host memory and GPUs, GB/s</text>
<text x="{MARGIN}" y="50" fill="#555">{machine}</text>
<text x="{MARGIN}" y="69" fill="#555">{size} at a time, median of {repeats}</text>
"##,
        machine = escape_xml(machine),
        size = egmem::size::Bytes(bandwidth.bytes),
        repeats = bandwidth.repeats,
    );
    for (index, operation) in OPERATIONS.iter().enumerate() {
        let x = MARGIN + index % 2 * (panel_width + PANEL_GAP);
        let y = TITLE + index / 2 * (panel_height + PANEL_GAP);
        let _ = writeln!(
            svg,
            r#"<g><text x="{x}" y="{}" font-weight="bold" font-size="14">{operation}</text>"#,
            y + 20,
        );
        for (column, gpu) in gpus.iter().enumerate() {
            let middle = x + LABEL_WIDTH + column * CELL_WIDTH + CELL_WIDTH / 2;
            let _ = writeln!(
                svg,
                r#"<text x="{middle}" y="{}" text-anchor="middle">GPU {gpu}</text>"#,
                y + PANEL_HEAD - 8,
            );
        }
        for (line, &(node, memory)) in lines.iter().enumerate() {
            let cell_y = y + PANEL_HEAD + line * CELL_HEIGHT;
            let _ = writeln!(
                svg,
                r#"<text x="{}" y="{}" text-anchor="end">node {node} · {}</text>"#,
                x + LABEL_WIDTH - 10,
                cell_y + CELL_HEIGHT / 2 + 5,
                memory.name(),
            );
            for (column, &gpu) in gpus.iter().enumerate() {
                let cell_x = x + LABEL_WIDTH + column * CELL_WIDTH;
                let rate = bandwidth
                    .rows
                    .iter()
                    .find(|row| (row.node, row.gpu, row.memory) == (node, gpu, memory))
                    .and_then(|row| row.rates()[index]);
                cell(&mut svg, cell_x, cell_y, rate, &scale);
            }
        }
        svg.push_str("</g>\n");
    }
    legend(&mut svg, MARGIN, height - LEGEND, &scale);
    svg.push_str("</svg>\n");
    svg
}

fn cell(svg: &mut String, x: usize, y: usize, rate: Option<Rate>, scale: &Scale) {
    let (fill, ink, text) = match rate {
        Some(rate) => {
            let colour = scale.colour(rate.median);
            (hex(colour), ink_on(colour), format!("{:.1}", rate.median))
        }
        None => ("#e6e6e6".to_owned(), "#555", "–".to_owned()),
    };
    let _ = writeln!(
        svg,
        r##"<rect x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" fill="{fill}" stroke="#fff"/><text x="{}" y="{}" text-anchor="middle" fill="{ink}">{text}</text>"##,
        x + CELL_WIDTH / 2,
        y + CELL_HEIGHT / 2 + 5,
    );
}

fn legend(svg: &mut String, x: usize, y: usize, scale: &Scale) {
    const WIDTH: usize = 320;
    const STEPS: usize = 64;
    for step in 0..STEPS {
        let value = scale.top * (step as f64 + 0.5) / STEPS as f64;
        let _ = writeln!(
            svg,
            r#"<rect x="{}" y="{}" width="{}" height="16" fill="{}"/>"#,
            x + step * WIDTH / STEPS,
            y + 20,
            WIDTH / STEPS,
            hex(scale.colour(value)),
        );
    }
    for tick in 0..=scale.ticks {
        let value = scale.top * f64::from(tick) / f64::from(scale.ticks);
        let at = x as f64 + WIDTH as f64 * value / scale.top;
        let unit = if tick == scale.ticks { " GB/s" } else { "" };
        let anchor = if tick == 0 { "start" } else { "middle" };
        let _ = writeln!(
            svg,
            r##"<line x1="{at}" y1="{}" x2="{at}" y2="{}" stroke="#222"/><text x="{at}" y="{}" text-anchor="{anchor}">{}{unit}</text>"##,
            y + 36,
            y + 41,
            y + 56,
            (value * 100.0).round() / 100.0,
        );
    }
    let _ = writeln!(
        svg,
        r##"<rect x="{}" y="{}" width="28" height="16" fill="#e6e6e6"/><text x="{}" y="{}" fill="#555">– : out of reach of the GPU's kernels</text>"##,
        x + WIDTH + 90,
        y + 20,
        x + WIDTH + 126,
        y + 33,
    );
}

/// A colour scale from 0 to a round number.
struct Scale {
    top: f64,
    ticks: u32,
}

impl Scale {
    /// The scale whose top is the least of 1, 2, 2.5, 4, 5, 6 or 8 times a power of ten that holds
    /// `value`.
    fn up_to(value: f64) -> Self {
        let value = if value.is_finite() && value > 0.0 {
            value
        } else {
            1.0
        };
        let power = 10_f64.powf(value.log10().floor());
        let (step, ticks) = [
            (1.0, 5),
            (2.0, 4),
            (2.5, 5),
            (4.0, 4),
            (5.0, 5),
            (6.0, 6),
            (8.0, 4),
        ]
        .into_iter()
        .find(|&(step, _)| step * power >= value)
        .unwrap_or((10.0, 5));
        Self {
            top: step * power,
            ticks,
        }
    }

    fn colour(&self, value: f64) -> [u8; 3] {
        let last = COLOURS.len() - 1;
        let at = (value / self.top).clamp(0.0, 1.0) * last as f64;
        let below = (at as usize).min(last - 1);
        let part = at - below as f64;
        std::array::from_fn(|channel| {
            let (low, high) = (COLOURS[below][channel], COLOURS[below + 1][channel]);
            (low + (high - low) * part).round() as u8
        })
    }
}

fn hex([red, green, blue]: [u8; 3]) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Black or white, whichever is easier to read on the colour.
fn ink_on([red, green, blue]: [u8; 3]) -> &'static str {
    let light = 0.299 * f64::from(red) + 0.587 * f64::from(green) + 0.114 * f64::from(blue);
    if light > 140.0 { "#111" } else { "#fff" }
}
