//! The table of quiesced points, for people and as CSV.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use crate::journal::say;
use crate::measure::Look;

/// One look at one service with all load stopped.
pub struct Row {
    /// Since the start.
    pub seconds: f64,
    pub service: &'static str,
    pub life: u32,
    pub look: Look,
}

/// The gauges that have columns.
const GAUGES: [&str; 8] = [
    "pinned_bytes",
    "kept_bytes",
    "reserve_bytes",
    "sessions",
    "leases",
    "names",
    "connections",
    "fds",
];

/// Rows as they come, printed and written.
pub struct Table {
    file: Option<File>,
    pub rows: Vec<Row>,
}

impl Table {
    /// A table that is also written to `path`, if there is one.
    pub fn new(path: Option<&Path>) -> Self {
        let mut file = path.map(|path| File::create(path).expect("EGMEM_SOAK_OUT can be written"));
        if let Some(file) = &mut file {
            let columns = "seconds,service,life,anonymous,resident,threads,fds,memory_fds";
            writeln!(file, "{columns},{}", GAUGES.join(",")).expect("written");
        }
        say(&format!(
            "{:>7} {:>8} {:>4} {:>9} {:>9} {:>7} {:>4} {:>5} {:>7} {:>6} {:>6} {:>5} {:>6} {:>5} {:>5} {:>4}",
            "s",
            "service",
            "life",
            "anon KiB",
            "RSS KiB",
            "threads",
            "fds",
            "mfds",
            "pin MiB",
            "kept",
            "reserv",
            "sess",
            "leases",
            "names",
            "conns",
            "pfds",
        ));
        Self {
            file,
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn add(&mut self, row: Row) {
        let look = &row.look;
        let mut line = format!(
            "{:>7.0} {:>8} {:>4} {:>9} {:>9} {:>7} {:>4} {:>5}",
            row.seconds,
            row.service,
            row.life,
            look.anonymous >> 10,
            look.resident >> 10,
            look.threads + look.idle_threads,
            look.fds,
            look.memory_fds,
        );
        for (gauge, width) in GAUGES.iter().zip([7, 6, 6, 5, 6, 5, 5, 4]) {
            let value = match gauge.ends_with("bytes") {
                true => look.gauge(gauge) >> 20,
                false => look.gauge(gauge),
            };
            let _ = write!(line, " {value:>width$}");
        }
        say(&line);
        if let Some(file) = &mut self.file {
            let gauges = GAUGES.map(|gauge| look.gauge(gauge).to_string()).join(",");
            writeln!(
                file,
                "{:.1},{},{},{},{},{},{},{},{gauges}",
                row.seconds,
                row.service,
                row.life,
                look.anonymous,
                look.resident,
                look.threads + look.idle_threads,
                look.fds,
                look.memory_fds,
            )
            .expect("written");
        }
        self.rows.push(row);
    }

    /// A service's rows in one life.
    pub fn of<'a>(&'a self, service: &'a str) -> impl Iterator<Item = &'a Row> {
        self.rows.iter().filter(move |row| row.service == service)
    }
}
