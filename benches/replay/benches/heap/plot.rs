//! The medians as an SVG: one panel a workload, one bar a contestant, on a logarithmic scale.

use egmem_chart::{Area, Bar, Bars, Chart, Line, Picture};

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

/// Lines over the number of threads, for workloads of at least three such numbers.
pub fn over_threads(rows: &[Row]) -> String {
    const AREA: (f64, f64) = (420.0, 300.0);
    const EACH: f64 = 420.0;
    let split = |row: &Row| {
        let (name, threads) = row.workload.rsplit_once("threads: ")?;
        let threads: f64 = threads.parse().ok()?;
        Some((name.trim_end_matches([',', ' ', '/']).to_owned(), threads))
    };
    let mut names: Vec<String> = rows
        .iter()
        .filter_map(split)
        .map(|(name, _)| name)
        .collect();
    names.dedup();
    let charts: Vec<Chart> = names
        .iter()
        .filter_map(|name| {
            let mut lines: Vec<Line> = Vec::new();
            for row in rows {
                let Some((_, threads)) = split(row).filter(|(other, _)| other == name) else {
                    continue;
                };
                let point = (threads, row.median);
                match lines.iter_mut().find(|line| line.name == row.contestant) {
                    Some(line) => line.points.push(point),
                    None => lines.push(Line {
                        name: row.contestant.to_owned(),
                        points: vec![point],
                    }),
                }
            }
            let enough = lines.iter().any(|line| line.points.len() > 2);
            let title = format!("{name}, ns by all threads");
            enough.then(|| Chart::measured(title, ("threads", true), ("", true), lines))
        })
        .collect();
    let mut picture = Picture::new(
        MARGIN + AREA.0 + 330.0,
        Picture::HEAD + EACH * charts.len() as f64,
        "The heap beside other allocators, over threads",
        "nanoseconds an operation by all threads together, medians; less is better",
        "",
    );
    for (index, chart) in charts.iter().enumerate() {
        let area = Area {
            left: 96.0,
            top: Picture::HEAD + 40.0 + EACH * index as f64,
            width: AREA.0,
            height: AREA.1,
        };
        chart.draw(&mut picture, area);
    }
    picture.finish()
}
