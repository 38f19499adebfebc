//! The table, the JSON and the picture.

use std::path::Path;

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use egmem::size::Bytes;
use egmem::{Error, Result};
use egmem_chart::{Area, Chart, Line, Picture};
use serde_json::json;

use crate::{Row, WAYS};

fn median(seconds: &[f64]) -> f64 {
    let mut sorted = seconds.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn gb_per_second(bytes: u64, seconds: &[f64]) -> f64 {
    bytes as f64 / median(seconds) / 1e9
}

/// Returns a line for each size: GB/s until memory is there, and until it is given back.
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    let mut header = vec!["GB/s".to_owned()];
    for (_, name) in WAYS {
        header.extend([name.to_owned(), "back".to_owned()]);
    }
    table.set_header(header);
    for rows in rows.chunk_by(|one, next| one.bytes == next.bytes) {
        let mut cells = vec![Bytes(rows[0].bytes).to_string()];
        for (_, name) in WAYS {
            let found = rows.iter().find(|row| row.way == name);
            let cell = |seconds: fn(&Row) -> &[f64]| {
                found.map_or(String::new(), |row| {
                    format!("{:.1}", gb_per_second(row.bytes, seconds(row)))
                })
            };
            cells.extend([cell(|row| &row.have), cell(|row| &row.give_back)]);
        }
        table.add_row(cells);
    }
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn picture(rows: &[Row]) -> String {
    let line = |(_, name): (_, &'static str)| Line {
        name: name.into(),
        points: rows
            .iter()
            .filter(|row| row.way == name)
            .map(|row| {
                (
                    row.bytes as f64 / f64::from(1 << 20),
                    gb_per_second(row.bytes, &row.have),
                )
            })
            .collect(),
    };
    let chart = Chart::measured(
        "GB/s until the CPU and all GPUs can use it".into(),
        ("MiB", true),
        ("GB/s", true),
        WAYS.into_iter().map(line).collect(),
    );
    let top = Picture::HEAD + 40.0;
    let mut picture = Picture::new(
        846.0,
        top + 396.0,
        "Pinned memory, from nothing",
        "medians",
        "",
    );
    let (left, width, height) = (96.0, 520.0, 340.0);
    chart.draw(
        &mut picture,
        Area {
            left,
            top,
            width,
            height,
        },
    );
    picture.finish()
}

/// Writes `pinning.json` and `pinning.svg`.
///
/// # Errors
/// [`Error::System`].
pub fn write(folder: &Path, rows: &[Row]) -> Result<()> {
    let failed = |error: std::io::Error| Error::system("writing the results", &error);
    std::fs::create_dir_all(folder).map_err(failed)?;
    let rows_json = rows.iter().map(|row| json!({"bytes": row.bytes, "way": row.way, "have_s": row.have, "give_back_s": row.give_back}));
    let text = format!("{:#}\n", json!(rows_json.collect::<Vec<_>>()));
    std::fs::write(folder.join("pinning.json"), text).map_err(failed)?;
    std::fs::write(folder.join("pinning.svg"), picture(rows)).map_err(failed)
}
