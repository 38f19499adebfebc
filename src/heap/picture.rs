//! Draws a heap's occupancy.

use std::fmt::Write;

use egmem_core::report::Drawing;

use super::{Occupancy, OccupancyTotals};
use crate::size::Bytes;

/// The most rows, the pixel columns of each, and a row's pixels.
const ROWS: u64 = 32;
const COLUMNS: u64 = 512;
const HEIGHT: u64 = 16;
/// The fewest bytes of a column, so that small heaps have few rows.
const LEAST_CELL: u64 = 256;
/// The left and top of the first row, and the distance between rows.
const LEFT: u64 = 96;
const TOP: u64 = 184;
const PITCH: u64 = 22;

/// The classes and names of used, deferred, cached, free and missing memory.
const KINDS: [(&str, &str); 5] = [
    ("c0", "used: in use by the program"),
    ("c1", "deferred: freed, waiting for GPU work"),
    ("c2", "cached: freed, in a thread's cache"),
    ("c3", "free: backed and free"),
    ("bg", "not backed: no physical memory"),
];

impl Occupancy {
    /// Returns a picture of the range under the heading `title`: a complete SVG file without external fonts
    /// or style sheets, at most about half a megabyte for any number of blocks.
    ///
    /// It shows the range from its start to the last byte that is backed or used, wrapped into rows like text. Each
    /// pixel column stands for the same number of bytes and is filled, from the bottom, with the shares of used,
    /// deferred, cached and free bytes. The legend states the bytes.
    pub fn to_svg(&self, title: &str) -> String {
        let (layers, totals) = (self.layers(), self.totals());
        let end = layers.last().map_or(0, |(range, _)| range.end);
        let cell = end.div_ceil(ROWS * COLUMNS).next_power_of_two();
        let cell = cell.max(LEAST_CELL);
        // The bytes of each column that are of a kind or of one before it.
        let mut cells = vec![[0_u64; 4]; end.div_ceil(cell) as usize];
        for (range, kind) in layers {
            let mut at = range.start;
            while at < range.end {
                let next = (at / cell + 1).saturating_mul(cell).min(range.end);
                let sums = &mut cells[(at / cell) as usize];
                sums[kind..].iter_mut().for_each(|sum| *sum += next - at);
                at = next;
            }
        }
        let mut svg = Drawing::default();
        svg.text((24.0, 34.0), "head", title);
        self.legend(&mut svg, &totals, cell);
        for (row, cells) in (0..).zip(cells.chunks(COLUMNS as usize)) {
            let (y, width) = (TOP + row * PITCH, cells.len());
            let start = Bytes(row * COLUMNS * cell).to_string();
            svg.text(((LEFT - 8) as f64, (y + 12) as f64), "soft end", &start);
            // From back to front: each area reaches down to the row's bottom.
            for (kind, (class, _)) in KINDS.iter().enumerate().take(4).rev() {
                let top = |sums: &[u64; 4]| {
                    // A column that has any of this kind has at least a pixel of it or of one before.
                    (u128::from(sums[kind]) * u128::from(HEIGHT)).div_ceil(cell.into()) as u64
                };
                let _ = write!(svg, r#"<path class="{class}" d="M{LEFT} {}"#, y + HEIGHT);
                for run in cells.chunk_by(|left, right| top(left) == top(right)) {
                    let _ = write!(svg, "V{}h{}", y + HEIGHT - top(&run[0]), run.len());
                }
                let _ = writeln!(svg, r#"V{}z"/>"#, y + HEIGHT);
            }
            let _ = writeln!(
                svg,
                r#"<rect class="frame" x="{LEFT}" y="{y}" width="{width}" height="{HEIGHT}"/>"#
            );
        }
        let rows = (cells.len() as u64).div_ceil(COLUMNS);
        svg.file((LEFT + COLUMNS + 24, TOP + rows * PITCH + 12), title)
    }

    fn legend(&self, svg: &mut Drawing, totals: &OccupancyTotals, cell: u64) {
        let about = format!(
            "{} backed of at most {}; largest free span {}, fragmentation {:.1} %; one column is {}",
            Bytes(totals.backed),
            Bytes(self.limit),
            Bytes(totals.largest_free),
            100.0 * totals.fragmentation(),
            Bytes(cell),
        );
        svg.text((24.0, 56.0), "soft", &about);
        let missing = self.limit.saturating_sub(totals.backed);
        let bytes = [
            totals.used,
            totals.deferred,
            totals.cached,
            totals.free,
            missing,
        ];
        for (row, ((class, name), bytes)) in (0..).zip(KINDS.into_iter().zip(bytes)) {
            let y = 70 + row * 20;
            let _ = writeln!(
                svg,
                r#"<rect class="{class}" x="{LEFT}" y="{y}" width="28" height="14"/><rect class="frame" x="{LEFT}" y="{y}" width="28" height="14"/>"#
            );
            let text = format!("{name}: {} ({bytes} bytes)", Bytes(bytes));
            svg.text(((LEFT + 38) as f64, (y + 11) as f64), "", &text);
        }
    }
}

#[allow(clippy::single_range_in_vec_init)] // the tests want lists of one range
#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::NodeId;
    use crate::occupancy::Chunk;

    /// Returns the pixels under the paths of a class, over all rows.
    fn area(svg: &str, class: &str) -> u64 {
        let begin = format!("<path class=\"{class}\" d=\"M");
        let mut pixels = 0;
        for path in svg.lines().filter_map(|line| line.strip_prefix(&begin)) {
            let (start, steps) = path.split_once('V').unwrap();
            let bottom: u64 = start.split_once(' ').unwrap().1.parse().unwrap();
            for step in steps.split('V') {
                if let Some((top, run)) = step.split_once('h') {
                    let run: u64 = run.parse().unwrap();
                    pixels += (bottom - top.parse::<u64>().unwrap()) * run;
                }
            }
        }
        pixels
    }

    #[test]
    fn a_column_is_as_full_as_its_bytes_and_the_legend_has_the_totals() {
        // Cells of 4 KiB: columns of 16 pixels, so that a pixel is 256 bytes.
        let mut occupancy = Occupancy {
            limit: 128 << 20,
            chunks: vec![Chunk {
                range: 0..64 << 20,
                node: NodeId(0),
            }],
            used: vec![0..8192, 16384..16384 + 1024],
            cached: vec![32768..32769],
            ..Occupancy::default()
        };
        let svg = occupancy.to_svg("<a> & \"b\"");
        assert!(svg.contains("one column is 4 KiB"), "{svg}");
        assert!(svg.contains("&lt;a&gt; &amp; &quot;b&quot;") && !svg.contains("<a>"));
        assert_eq!(area(&svg, "c0"), 16 + 16 + 4);
        // With those before it: what lies in front hides them.
        assert_eq!(area(&svg, "c2"), area(&svg, "c0") + 1);
        assert_eq!(area(&svg, "c3"), 16384 * 16);
        for text in [
            "program: 9 KiB (9216 bytes)",
            "memory: 64 MiB (67108864 bytes)",
        ] {
            assert!(svg.contains(text), "{text}: {svg}");
        }
        // The smallest block is seen.
        occupancy.used = vec![1 << 25..(1 << 25) + 1];
        assert_eq!(area(&occupancy.to_svg("heap"), "c0"), 1);
    }

    #[test]
    fn any_input_gives_a_picture_of_bounded_size() {
        // Uneven, so that neighbouring columns differ.
        let many = (0..400_000_u64).map(|at| at * 4096..at * 4096 + 1 + at * 7919 % 4096);
        for (limit, used) in [
            (0, vec![]),
            (u64::MAX, vec![u64::MAX - 1..u64::MAX, 0..1]),
            // Used ranges without backing are shown, not hidden.
            (1 << 20, vec![4096..8192]),
            (1 << 40, many.collect()),
        ] {
            let occupancy = Occupancy {
                limit,
                chunks: vec![Chunk {
                    range: 0..limit / 2,
                    node: NodeId(-1),
                }],
                used,
                ..Occupancy::default()
            };
            let svg = occupancy.to_svg("heap");
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
            assert!(svg.len() < 512 << 10, "{} bytes", svg.len());
            assert_eq!(area(&svg, "c0") > 0, !occupancy.used.is_empty(), "{svg}");
        }
    }
}
