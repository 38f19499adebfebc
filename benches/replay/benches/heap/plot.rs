//! The medians as an SVG: one panel a workload, one bar a contestant, on a logarithmic scale.

use egmem_chart::{Bar, Bars, Picture};

use crate::table::Row;

const COLUMNS: usize = 3;
const PANEL: f64 = 400.0;
const MARGIN: f64 = 24.0;

/// The picture.
pub fn draw(rows: &[Row]) -> String {
    let panels: Vec<Bars> = rows
        .chunk_by(|a, b| a.workload == b.workload)
        .map(bars)
        .collect();
    let lines: Vec<&[Bars]> = panels.chunks(COLUMNS).collect();
    let height = |line: &[Bars]| line.iter().map(Bars::height).fold(0.0, f64::max) + MARGIN;
    let mut picture = Picture::new(
        2.0 * MARGIN + COLUMNS as f64 * PANEL,
        Picture::HEAD + lines.iter().map(|line| height(line)).sum::<f64>(),
        "The heap beside other allocators",
        "nanoseconds, medians; bars on a logarithmic scale of each panel's own; less is better",
        "",
    );
    let mut y = Picture::HEAD;
    for line in lines {
        for (column, panel) in line.iter().enumerate() {
            let x = MARGIN + column as f64 * PANEL;
            panel.draw(&mut picture, x, y, PANEL - MARGIN);
        }
        y += height(line);
    }
    picture.finish()
}

/// The bars of one workload: the heap's in one colour, the others' in another.
fn bars(rows: &[Row]) -> Bars {
    let bar = |row: &Row| Bar {
        name: row.contestant.to_owned(),
        value: row.median,
        text: figure(row.median),
        index: match row.contestant {
            "egmem" => 0,
            _ => 7,
        },
    };
    Bars {
        title: rows.first().map_or_else(String::new, |first| {
            format!("{}, ns by {}", first.workload, first.unit)
        }),
        logarithmic: true,
        bars: rows.iter().map(bar).collect(),
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
