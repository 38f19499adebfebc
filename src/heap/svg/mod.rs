//! Draws a heap's occupancy as an SVG picture whose size depends on its pixels, not on the number of blocks.
//!
//! The range is wrapped into rows like text. Each pixel column of a row stands for the same number of bytes;
//! its height is filled, from the bottom, with the shares of used, deferred, cached and free bytes. So the
//! picture is readable without colours, and with a million blocks.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::ops::Range;

use egmem_core::svg::Drawing;

use super::occupancy::{Layers, Occupancy, OccupancyTotals};
use crate::size::Bytes;

/// Pixel columns in a row.
const COLUMNS: u64 = 512;
/// The most rows.
const ROWS: u64 = 32;
/// The fewest bytes of a column, so that small heaps have few rows.
const LEAST_CELL: u64 = 256;
/// Pixels of a row's height.
const HEIGHT: u64 = 16;
/// The distance between rows.
const PITCH: u64 = 22;
/// The left and top of the first row.
const LEFT: u64 = 96;
const TOP: u64 = 86;
const WIDTH: u64 = LEFT + COLUMNS + 216;

const STYLE: &str = "\
.u{fill:#1f5fa8}.f{fill:#dfe9f5}.n{fill:#fff}.box{fill:none;stroke:#8a97a8}.m{stroke:#1c2430}";
const DARK: &str = ".u{fill:#6db0ff}.f{fill:#26344a}.n{fill:#12161c}.m{stroke:#e8edf4}";

/// Patterns, so that kinds differ by more than colour.
const PATTERNS: &str = r##"<pattern id="egmem-heap-d" width="4" height="4" patternUnits="userSpaceOnUse"><rect width="4" height="4" fill="#e8a33d"/><path d="M0 1h2M2 3h2" stroke="#5a3a00"/></pattern>
<pattern id="egmem-heap-c" width="4" height="4" patternUnits="userSpaceOnUse"><rect width="4" height="4" fill="#9cc3ea"/><path d="M1 0v4" stroke="#1f5fa8"/></pattern>
<pattern id="egmem-heap-n" width="6" height="6" patternUnits="userSpaceOnUse"><path d="M0 6L6 0" stroke="#9aa4b1"/></pattern>"##;

/// How used, deferred, cached and free bytes are filled, in this order.
const FILLS: [&str; 4] = [
    r#"class="u""#,
    r##"fill="url(#egmem-heap-d)""##,
    r##"fill="url(#egmem-heap-c)""##,
    r#"class="f""#,
];

/// The used, deferred, cached and free bytes of a column.
type Cell = [u64; 4];

impl Occupancy {
    /// Returns a picture of the range under the heading `title`: a complete SVG file without external fonts
    /// or style sheets, at most about half a megabyte for any number of blocks.
    ///
    /// It shows the range from its start to the last byte that is backed or used; the legend states bytes.
    pub fn to_svg(&self, title: &str) -> String {
        let layers = Layers::of(self);
        let totals = layers.totals();
        let all = [
            &layers.backed,
            &layers.used,
            &layers.deferred,
            &layers.cached,
        ];
        let ends = all.into_iter().flatten().map(|range| range.end);
        let scale = Scale::new(ends.max().unwrap_or(0));
        let height = TOP + scale.rows * PITCH + 150;
        let mut svg = Drawing::default();
        let words = self.words(&totals);
        let _ = writeln!(svg, "<desc>{words}</desc>\n<defs>\n{PATTERNS}\n</defs>");
        svg.text((24.0, 34.0), "head", title);
        svg.text((24.0, 56.0), "soft", &self.subtitle(&totals, &scale));
        let cells = count(&layers, &scale);
        for row in 0..scale.rows {
            self.draw_row(&mut svg, row, &cells, &scale);
        }
        if scale.rows == 0 {
            svg.text((24.0, TOP as f64), "", "Nothing is backed yet.");
        }
        legend(&mut svg, TOP + scale.rows * PITCH + 28, &totals, self.limit);
        svg.file((WIDTH, height), title, STYLE, DARK)
    }

    /// Describes the picture in words.
    fn words(&self, totals: &OccupancyTotals) -> String {
        format!(
            "Of at most {} bytes, {} are backed: {} used, {} deferred, {} cached, {} free. \
             The largest free span has {} bytes.",
            self.limit,
            totals.backed,
            totals.used,
            totals.deferred,
            totals.cached,
            totals.free,
            totals.largest_free,
        )
    }

    fn subtitle(&self, totals: &OccupancyTotals, scale: &Scale) -> String {
        format!(
            "{} backed of at most {}; largest free span {}, fragmentation {:.1} %; one column is {}",
            Bytes(totals.backed),
            Bytes(self.limit),
            Bytes(totals.largest_free),
            100.0 * totals.fragmentation(),
            Bytes(scale.cell),
        )
    }

    fn draw_row(&self, svg: &mut Drawing, row: u64, cells: &[Cell], scale: &Scale) {
        let y = TOP + row * PITCH;
        let bytes = scale.row(row);
        let columns = scale.columns(row);
        let first = (row * COLUMNS) as usize;
        let cells = &cells[first..first + columns as usize];
        let sum = |kind: usize| cells.iter().map(|cell| cell[kind]).sum::<u64>();
        let [used, deferred, cached, free] = [0, 1, 2, 3].map(sum);
        let length = bytes.end - bytes.start;
        let _ = write!(
            svg,
            r#"<g><title>offsets {start} to {end}: used {used}, deferred {deferred}, cached {cached}, free {free} bytes</title>
<text class="soft end" x="{label}" y="{text}">{at}</text><text class="soft" x="{right}" y="{text}">{share:.0} % used{nodes}</text>
<rect class="n" x="{LEFT}" y="{y}" width="{columns}" height="{HEIGHT}"/><rect fill="url(#egmem-heap-n)" x="{LEFT}" y="{y}" width="{columns}" height="{HEIGHT}"/>
"#,
            start = bytes.start,
            end = bytes.end,
            label = LEFT - 8,
            text = y + 12,
            at = Bytes(bytes.start),
            right = LEFT + COLUMNS + 10,
            share = 100.0 * used as f64 / length as f64,
            nodes = self.nodes(&bytes),
        );
        let heights: Vec<Cell> = cells.iter().map(|cell| heights(cell, scale.cell)).collect();
        // From back to front: each area reaches down to the row's bottom.
        for (kind, fill) in FILLS.into_iter().enumerate().rev() {
            // A column without this kind needs no step: a layer in front hides it anyway.
            let tops = heights.iter().map(|cell| match cell[kind] {
                0 => 0,
                _ => cell[..=kind].iter().sum(),
            });
            skyline(svg, fill, y, tops);
        }
        let _ = writeln!(
            svg,
            r#"<rect class="box" x="{LEFT}" y="{y}" width="{columns}" height="{HEIGHT}"/></g>"#
        );
    }

    /// Lists the nodes whose memory is behind `bytes`.
    fn nodes(&self, bytes: &Range<u64>) -> String {
        let nodes: BTreeSet<i32> = self
            .chunks
            .iter()
            .filter(|chunk| chunk.range.start < bytes.end && bytes.start < chunk.range.end)
            .map(|chunk| chunk.node.0)
            .collect();
        let mut text = String::new();
        for (index, node) in nodes.iter().enumerate().take(4) {
            let before = match (index, nodes.len()) {
                (0, 1) => " · node ",
                (0, _) => " · nodes ",
                _ => ", ",
            };
            let _ = write!(text, "{before}{node}");
        }
        if nodes.len() > 4 {
            text.push_str(", …");
        }
        text
    }
}

/// Converts bytes to columns.
struct Scale {
    /// The bytes of a column: a power of two.
    cell: u64,
    rows: u64,
    end: u64,
}

impl Scale {
    fn new(end: u64) -> Self {
        let cell = end.div_ceil(ROWS * COLUMNS).next_power_of_two();
        let cell = cell.max(LEAST_CELL);
        Self {
            cell,
            rows: end.div_ceil(cell * COLUMNS),
            end,
        }
    }

    /// Returns the offsets that a row shows.
    fn row(&self, row: u64) -> Range<u64> {
        let length = self.cell * COLUMNS;
        let start = row * length;
        start..start.saturating_add(length).min(self.end)
    }

    /// Returns the columns of a row; the last row may be short.
    fn columns(&self, row: u64) -> u64 {
        let bytes = self.row(row);
        (bytes.end - bytes.start).div_ceil(self.cell)
    }
}

/// Returns the pixels for each kind. A kind that is present gets at least one.
fn heights(bytes: &Cell, cell: u64) -> Cell {
    let mut heights = bytes.map(|bytes| {
        let share = bytes as f64 / cell as f64 * HEIGHT as f64;
        (share.round() as u64).max(u64::from(bytes > 0))
    });
    while heights.iter().sum::<u64>() > HEIGHT {
        if let Some(highest) = heights.iter_mut().max() {
            *highest -= 1;
        }
    }
    heights
}

fn count(layers: &Layers, scale: &Scale) -> Vec<Cell> {
    let columns = (0..scale.rows).map(|row| scale.columns(row)).sum::<u64>();
    let mut cells = vec![Cell::default(); columns as usize];
    let kinds = [&layers.used, &layers.deferred, &layers.cached, &layers.free];
    for (kind, ranges) in kinds.into_iter().enumerate() {
        for range in ranges {
            let mut start = range.start;
            while start < range.end {
                let index = start / scale.cell;
                let end = index.saturating_add(1).saturating_mul(scale.cell);
                let end = end.min(range.end);
                cells[index as usize][kind] += end - start;
                start = end;
            }
        }
    }
    cells
}

/// Draws the area under `tops`, a height for each column; nothing if no column has any of this kind.
fn skyline(svg: &mut Drawing, fill: &str, y: u64, tops: impl Iterator<Item = u64>) {
    let mut steps: Vec<(u64, u64)> = Vec::new();
    for top in tops {
        match steps.last_mut() {
            Some((height, run)) if *height == top => *run += 1,
            _ => steps.push((top, 1)),
        }
    }
    if steps.iter().all(|&(height, _)| height == 0) {
        return;
    }
    let bottom = y + HEIGHT;
    let _ = write!(svg, r#"<path {fill} d="M{LEFT} {bottom}"#);
    for (height, run) in steps {
        let _ = write!(svg, "V{}h{run}", bottom - height);
    }
    let _ = writeln!(svg, "V{bottom}z\"/>");
}

fn legend(svg: &mut Drawing, y: u64, totals: &OccupancyTotals, limit: u64) {
    let [used, deferred, cached, free] = FILLS;
    let none = r##"fill="url(#egmem-heap-n)""##;
    let missing = limit.saturating_sub(totals.backed);
    let kinds = [
        ("used", used, totals.used, "in use by the program"),
        (
            "deferred",
            deferred,
            totals.deferred,
            "freed, waiting for GPU work",
        ),
        (
            "cached",
            cached,
            totals.cached,
            "freed, in a thread's cache",
        ),
        ("free", free, totals.free, "backed and free"),
        ("not backed", none, missing, "no physical memory"),
    ];
    for (index, (name, fill, bytes, words)) in kinds.into_iter().enumerate() {
        let y = y + index as u64 * 22;
        let _ = writeln!(
            svg,
            r#"<rect {fill} x="{LEFT}" y="{y}" width="28" height="14"/><rect class="box" x="{LEFT}" y="{y}" width="28" height="14"/><text x="{}" y="{}">{name}: {} ({bytes} bytes), {words}</text>"#,
            LEFT + 38,
            y + 11,
            Bytes(bytes),
        );
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // the tests want lists of one range
mod tests;
