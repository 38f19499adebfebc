//! The tables, the JSON and the picture.

use std::path::Path;

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use egmem::{Error, Result};
use egmem_chart::{Area, Chart, Line, Picture};
use serde_json::{Value, json};

use crate::neighbour::{CALLS, Waits};
use crate::steps::Blame;
use crate::{Place, growths};

/// The effect of one growth, and of giving its memory back, on the neighbours.
pub struct Row {
    pub name: &'static str,
    /// The bytes of a chunk, as they were created.
    pub chunk: Option<u64>,
    pub plain_chunk: Option<u64>,
    pub grow: Phase,
    pub free: Phase,
}

/// A part of the time.
pub struct Phase {
    pub seconds: f64,
    pub waits: Vec<Waits>,
    pub blame: Vec<Blame>,
}

fn gb_per_second(bytes: u64, seconds: f64) -> f64 {
    bytes as f64 / seconds / 1e9
}

fn empty(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header(header);
    table
}

fn finish(mut table: Table) -> Table {
    for column in table.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Returns the table of the latencies of the neighbours' calls.
pub fn waits(rows: &[Row], bytes: u64) -> Table {
    let mut table = empty(&[
        "growth", "phase", "MiB", "s", "GB/s", "call", "calls", "p50", "p99", "p99.9", "max ms",
        "waiting",
    ]);
    for row in rows {
        for (phase, name) in [(&row.grow, "grow"), (&row.free, "free")] {
            if row.name == growths::IDLE && name == "free" {
                continue;
            }
            for (call, waits) in CALLS.iter().zip(&phase.waits) {
                let mut cells = match *call == CALLS[0] {
                    true => vec![
                        row.name.into(),
                        name.into(),
                        row.chunk
                            .map_or(String::new(), |bytes| (bytes >> 20).to_string()),
                        format!("{:.2}", phase.seconds),
                        format!("{:.2}", gb_per_second(bytes, phase.seconds)),
                    ],
                    false => vec![String::new(); 5],
                };
                cells.push(call.name().into());
                cells.push(waits.calls.to_string());
                for ms in [waits.p50, waits.p99, waits.p999, waits.max] {
                    cells.push(format!("{ms:.2}"));
                }
                cells.push(format!("{:.0} %", 100.0 * waits.waiting));
                table.add_row(cells);
            }
        }
    }
    finish(table)
}

/// Returns the table of the calls that delayed each neighbour.
pub fn blame(rows: &[Row]) -> Table {
    let mut header = vec!["chunks", "step", "calls", "p50 ms", "max ms", "all ms"];
    header.extend(CALLS.iter().map(|call| call.name()));
    let mut table = empty(&header);
    for row in rows {
        for (at, blame) in row.grow.blame.iter().chain(&row.free.blame).enumerate() {
            let name = if at == 0 { row.name } else { "" };
            let mut cells = vec![
                name.into(),
                blame.kind.name().into(),
                blame.calls.to_string(),
            ];
            cells.extend([blame.p50, blame.max].map(|ms| format!("{ms:.3}")));
            cells.push(format!("{:.0}", blame.all));
            cells.extend(blame.held.iter().map(|ms| format!("{ms:.0}")));
            table.add_row(cells);
        }
    }
    finish(table)
}

/// All of it.
pub fn json(rows: &[Row], place: &Place) -> Value {
    let phase = |phase: &Phase| {
        let waits = CALLS.iter().zip(&phase.waits).map(|(call, waits)| {
            json!({
                "call": call.name(), "calls": waits.calls, "p50_ms": waits.p50, "p99_ms": waits.p99,
                "p999_ms": waits.p999, "max_ms": waits.max, "waiting": waits.waiting,
            })
        });
        json!({
            "seconds": phase.seconds, "gb_per_second": gb_per_second(place.bytes, phase.seconds),
            "neighbours": waits.collect::<Vec<_>>(), "steps": phase.blame,
        })
    };
    let row = |row: &Row| json!({ "growth": row.name, "chunk": row.chunk, "grow": phase(&row.grow), "free": phase(&row.free) });
    json!({
        "about": place.about(), "bytes": place.bytes,
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    })
}

/// The waits over the size of chunks.
fn picture(rows: &[Row], place: &Place) -> String {
    let chart = |title: &str, of: fn(&Waits) -> f64| {
        let line = |(index, call): (usize, &crate::neighbour::Call)| Line {
            name: call.name().into(),
            points: rows
                .iter()
                .filter_map(|row| {
                    let chunk = row.plain_chunk? as f64 / (1 << 20) as f64;
                    Some((chunk, of(row.grow.waits.get(index)?)))
                })
                .collect(),
        };
        Chart::measured(
            title.into(),
            ("MiB of a chunk", true),
            ("ms", true),
            CALLS.iter().enumerate().map(line).collect(),
        )
    };
    let charts = [
        chart("99.9 % of a neighbour's calls took at most", |waits| {
            waits.p999
        }),
        chart("its longest call took", |waits| waits.max),
    ];
    const EACH: f64 = 96.0 + 400.0 + 230.0;
    const TOP: f64 = Picture::HEAD + 40.0;
    let title = "What other processes wait for while one grows";
    let mut picture = Picture::new(2.0 * EACH, TOP + 356.0, title, &place.about(), "");
    for (index, chart) in charts.iter().enumerate() {
        let area = Area {
            left: EACH * index as f64 + 96.0,
            top: TOP,
            width: 400.0,
            height: 300.0,
        };
        chart.draw(&mut picture, area);
    }
    picture.finish()
}

/// Writes `neighbours.json` and `neighbours.svg`.
///
/// # Errors
/// [`Error::System`].
pub fn write(folder: &Path, rows: &[Row], place: &Place) -> Result<()> {
    let failed = |error: std::io::Error| Error::system("writing the results", &error);
    std::fs::create_dir_all(folder).map_err(failed)?;
    let text = format!("{:#}\n", json(rows, place));
    std::fs::write(folder.join("neighbours.json"), text).map_err(failed)?;
    std::fs::write(folder.join("neighbours.svg"), picture(rows, place)).map_err(failed)
}
