//! `egmem topo` shows the node as text, JSON or SVG. `egmem ps` shows which of this user's processes use its memory.

use std::io::{IsTerminal, stdout};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use clap::Args;
use egmem::doctor::Reason;
use egmem::ledger::Report;
use egmem::text::escape_lines;
use egmem::{Error, Explained, Result, Topology, share};

use crate::common::Source;
use crate::output::{complain, print_painted, show};

/// `egmem topo`
#[derive(Args, Debug)]
pub struct Topo {
    #[command(flatten)]
    source: Source,
    /// Draw the machine of an hwloc XML file, as `lstopo FILE.xml` writes it
    #[arg(long, value_name = "FILE", conflicts_with = "sim")]
    xml: Option<PathBuf>,
    /// Draw as SVG to this file; - is standard output
    #[arg(long, value_name = "FILE|-", conflicts_with = "json")]
    svg: Option<PathBuf>,
    /// Print the topology as JSON
    #[arg(long)]
    json: bool,
}

impl Topo {
    /// Draws the node.
    pub fn run(&self) -> Result<()> {
        let topology = self.topology()?;
        let svg = self.svg.as_deref();
        let [text, drawing] = [Topology::to_text, Topology::to_svg];
        show(&topology, self.json, svg, text, drawing)
    }

    fn topology(&self) -> Result<Topology> {
        if let Some(path) = &self.xml {
            return read_xml(path);
        }
        match self.source.find()? {
            Ok(driver) => Topology::discover(&driver),
            Err(error @ (Error::NoDriver { .. } | Error::Driver(_))) => {
                let reason = Reason::from(error);
                complain(&format!(
                    "warning: {}; what to do: {}\nOnly the host's nodes are shown.\n",
                    reason.message, reason.remedy
                ));
                Ok(Topology::of_host())
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(feature = "hwloc")]
fn read_xml(path: &Path) -> Result<Topology> {
    let xml = std::fs::read_to_string(path)
        .map_err(|error| Error::system(format!("cannot read {}", path.display()), &error))?;
    Topology::from_xml(&xml)
}

#[cfg(not(feature = "hwloc"))]
fn read_xml(_path: &Path) -> Result<Topology> {
    let what = "hwloc XML files, because this program was built without hwloc";
    Err(Error::unsupported(what, None))
}

/// `egmem ps`
#[derive(Args, Debug)]
pub struct Ps {
    #[command(flatten)]
    source: Source,
    /// Show all that is known, in lines of any length; without it lines have at most 100 characters
    #[arg(short, long, conflicts_with_all = ["json", "svg"])]
    wide: bool,
    /// Show the report again every SECONDS, or every 2, until Ctrl-C ends it
    #[arg(
        long,
        value_name = "SECONDS",
        num_args = 0..=1,
        default_missing_value = "2",
        value_parser = clap::value_parser!(u64).range(1..),
        conflicts_with_all = ["json", "svg"]
    )]
    watch: Option<u64>,
    /// Draw as SVG to this file; - is standard output
    #[arg(long, value_name = "FILE|-", conflicts_with = "json")]
    svg: Option<PathBuf>,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

impl Ps {
    /// Shows the report.
    pub fn run(&self) -> share::Result<()> {
        // The ledgers can be shown without a driver.
        let driver = self.source.find()?.inspect_err(|error| {
            let why = Explained(error).advice();
            complain(&format!("warning: {why}\nGPUs are not shown.\n"));
        });
        let driver = driver.ok();
        let wide = self.wide;
        let text = if wide {
            Report::to_wide_text
        } else {
            Report::to_text
        };
        if let Some(seconds) = self.watch {
            // Until a signal ends the process or the reader of standard output is gone.
            let frame = || escape_lines(&text(&Report::gather(driver.as_ref()))).into_owned();
            let pause = || sleep(Duration::from_secs(seconds));
            return Ok(repeat(stdout().is_terminal(), frame, print_painted, pause)?);
        }
        let report = Report::gather(driver.as_ref());
        let svg = self.svg.as_deref();
        Ok(show(&report, self.json, svg, text, Report::to_svg)?)
    }
}

/// Clears a terminal and begins at its top.
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Writes what `frame` returns again and again, with `pause` in between, until `write` returns `false` or fails. On a terminal
/// each takes the place of the one before.
fn repeat(
    is_terminal: bool,
    mut frame: impl FnMut() -> String,
    mut write: impl FnMut(&str) -> Result<bool>,
    mut pause: impl FnMut(),
) -> Result<()> {
    loop {
        let frame = frame();
        let on_terminal = format!("{CLEAR}{frame}");
        let shown = if is_terminal {
            on_terminal
        } else {
            frame + "\n"
        };
        if !write(&shown)? {
            return Ok(());
        }
        pause();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// Returns what is written until the reader is gone after `frames`, and the number of pauses.
    fn written(is_terminal: bool, frames: usize) -> (Vec<String>, usize) {
        let (written, made, pauses) = (RefCell::new(Vec::new()), Cell::new(0), Cell::new(0));
        let done = repeat(
            is_terminal,
            || {
                made.set(made.get() + 1);
                format!("frame {}\n", made.get())
            },
            |text| {
                written.borrow_mut().push(text.to_owned());
                Ok(written.borrow().len() < frames)
            },
            || pauses.set(pauses.get() + 1),
        );
        done.unwrap();
        (written.into_inner(), pauses.get())
    }

    #[test]
    fn reports_follow_each_other_until_the_reader_is_gone() {
        let (frames, pauses) = written(false, 3);
        assert_eq!(frames, ["frame 1\n\n", "frame 2\n\n", "frame 3\n\n"]);
        assert_eq!(pauses, 2, "no pause after the last");
        let (frames, _) = written(true, 2);
        assert_eq!(frames[1], "\x1b[2J\x1b[Hframe 2\n");
    }

    #[test]
    fn a_failed_write_ends_it() {
        let failed = repeat(
            false,
            String::new,
            |_| Err(Error::invalid("standard output", "it is full")),
            || panic!("no pause"),
        );
        assert!(failed.is_err());
    }
}
