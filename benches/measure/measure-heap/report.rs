//! The machine that was measured, and results as tables, JSON, CSV and pictures.

use std::fs;
use std::path::{Path, PathBuf};

use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use egmem::{Error, Result};
use serde::Serialize;

use crate::Place;

/// The machine.
#[derive(Clone, Debug, Serialize)]
pub struct About {
    /// Whether the driver is the simulator: then no time means anything, and none is shown.
    pub simulated: bool,
    pub gpu: String,
    /// CUDA's version.
    pub cuda: String,
    /// The kernel driver's, where it is known.
    pub driver: Option<String>,
    /// The NUMA node that the memory is on.
    pub node: i32,
    /// Hardware threads that this process may use.
    pub cpus: usize,
}

impl About {
    pub fn of(place: &Place) -> Result<Self> {
        Ok(Self {
            simulated: place.driver.is_simulated(),
            gpu: place.driver.device_name(place.gpu)?,
            cuda: place.driver.driver_version()?.to_string(),
            driver: kernel_driver().filter(|_| !place.driver.is_simulated()),
            node: place.node.0,
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
        })
    }

    pub fn first_line(&self) -> String {
        if self.simulated {
            return format!(
                "SIMULATED {}: everything runs in small, and no time is shown, because none would mean anything",
                self.gpu
            );
        }
        format!(
            "{}, driver {}, CUDA {}, memory of node {}, {} CPUs",
            self.gpu,
            self.driver.as_deref().unwrap_or("unknown"),
            self.cuda,
            self.node,
            self.cpus
        )
    }
}

/// The version in `/proc/driver/nvidia/version`, such as 580.159.04.
fn kernel_driver() -> Option<String> {
    let text = fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_version =
        |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(is_version).map(str::to_string)
}

/// The results of a part.
pub trait Results: Serialize {
    /// The title of the table.
    fn title(&self) -> String;
    /// The columns. Those of `times` are left out where there are none.
    fn header(&self) -> Vec<&'static str>;
    /// The rows, in the columns' order.
    fn rows(&self) -> Vec<Vec<String>>;
    /// The conclusions from the rows.
    fn verdicts(&self) -> Vec<String>;
    /// How many columns at the start are no times.
    fn facts(&self) -> usize;
    /// The picture.
    fn draw(&self, about: &About) -> Option<String>;
}

/// Where results go.
pub struct Out {
    pub folder: Option<PathBuf>,
    pub about: About,
}

#[derive(Serialize)]
struct File<'a, R> {
    about: &'a About,
    results: &'a R,
}

impl Out {
    /// Prints `results` and writes them to `heap-NAME.json`, `.csv` and `.svg`.
    ///
    /// # Errors
    /// [`Error::System`] where a file cannot be written.
    pub fn put<R: Results>(&self, name: &str, results: &R) -> Result<()> {
        let simulated = self.about.simulated;
        let columns = match simulated {
            true => results.facts(),
            false => results.header().len(),
        };
        let header = &results.header()[..columns];
        let rows = results.rows();
        let mut table = Table::new();
        table.load_preset(UTF8_FULL_CONDENSED).set_header(header);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for row in &rows {
            table.add_row(&row[..columns]);
        }
        let label = if simulated { " (SIMULATED)" } else { "" };
        println!("\n{name}{label}: {}\n{table}", results.title());
        // Times of the simulator are neither shown nor written.
        if simulated {
            return Ok(());
        }
        for verdict in results.verdicts() {
            println!("{verdict}");
        }
        let Some(folder) = &self.folder else {
            return Ok(());
        };
        fs::create_dir_all(folder).map_err(|error| refused(folder, &error))?;
        let write = |ending: &str, text: String| {
            let path = folder.join(format!("heap-{name}.{ending}"));
            fs::write(&path, text).map_err(|error| refused(&path, &error))
        };
        let file = File {
            about: &self.about,
            results,
        };
        let json = serde_json::to_string_pretty(&file)
            .map_err(|error| Error::invalid("results", error.to_string()))?;
        write("json", json + "\n")?;
        let mut csv = header.join(",") + "\n";
        for row in &rows {
            csv += &row.join(",");
            csv.push('\n');
        }
        write("csv", csv)?;
        match results.draw(&self.about) {
            Some(svg) => write("svg", svg),
            None => Ok(()),
        }
    }
}

fn refused(path: &Path, error: &std::io::Error) -> Error {
    Error::system(format!("writing {}", path.display()), error)
}
