//! The medians as an SVG: one panel a workload, one bar a contestant, on a logarithmic scale.

use std::fmt::Write;

use crate::table::Row;

const COLUMNS: usize = 3;
const PANEL: usize = 400;
const LABEL: usize = 128;
const VALUE: usize = 56;
const BAR: usize = 14;
const STEP: usize = 18;
const HEAD: usize = 40;
const MARGIN: usize = 24;
const TITLE: usize = 64;

/// The picture.
pub fn draw(rows: &[Row]) -> String {
    let panels: Vec<&[Row]> = rows.chunk_by(|a, b| a.workload == b.workload).collect();
    let lines: Vec<&[&[Row]]> = panels.chunks(COLUMNS).collect();
    let heights: Vec<usize> = lines
        .iter()
        .map(|line| {
            line.iter()
                .map(|panel| HEAD + panel.len() * STEP)
                .max()
                .unwrap_or(0)
        })
        .collect();
    let width = 2 * MARGIN + COLUMNS * PANEL;
    let height = TITLE + heights.iter().sum::<usize>() + MARGIN;
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _ = write!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="11" fill="#222">
<title>The heap beside other allocators</title>
<rect width="{width}" height="{height}" fill="#fff"/>
<text x="{MARGIN}" y="28" font-size="16" font-weight="bold">The heap beside other allocators</text>
<text x="{MARGIN}" y="46" fill="#555">nanoseconds, medians; bars on a logarithmic scale of each panel's own; less is better</text>
"##
    );
    let mut y = TITLE;
    for (line, height) in lines.iter().zip(heights) {
        for (column, rows) in line.iter().enumerate() {
            panel(&mut svg, MARGIN + column * PANEL, y, rows);
        }
        y += height;
    }
    svg.push_str("</svg>\n");
    svg
}

fn panel(svg: &mut String, x: usize, y: usize, rows: &[Row]) {
    let Some(first) = rows.first() else { return };
    let _ = writeln!(
        svg,
        r##"<text x="{x}" y="{}" font-size="12" font-weight="bold">{} <tspan font-weight="normal" fill="#555">ns by {}</tspan></text>"##,
        y + 22,
        escape(&first.workload),
        first.unit,
    );
    let medians = || rows.iter().map(|row| row.median.max(0.1).ln());
    // The least bar has some length too.
    let low = medians().fold(f64::INFINITY, f64::min) - 0.7;
    let high = medians().fold(f64::NEG_INFINITY, f64::max);
    let room = (PANEL - LABEL - VALUE - MARGIN) as f64;
    for (index, (row, value)) in rows.iter().zip(medians()).enumerate() {
        let top = y + HEAD - 10 + index * STEP;
        let length = (value - low) / (high - low) * room;
        let colour = if row.contestant == "egmem" {
            "#2f7a35"
        } else {
            "#8fa3bf"
        };
        let _ = writeln!(
            svg,
            r##"<text x="{label}" y="{text}" text-anchor="end">{name}</text><rect x="{start}" y="{top}" width="{length:.1}" height="{BAR}" fill="{colour}"/><text x="{end:.1}" y="{text}">{median}</text>"##,
            label = x + LABEL - 6,
            text = top + BAR - 3,
            name = escape(row.contestant),
            start = x + LABEL,
            end = (x + LABEL + 4) as f64 + length,
            median = figure(row.median),
        );
    }
}

/// Three digits that matter.
fn figure(value: f64) -> String {
    if value < 100.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
