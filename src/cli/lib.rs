//! The command line `egmem`: what works on this machine, its topology, its service and memory by name.
//!
//! The program `egmem` and the script of the Python package call [`run`]. It belongs to a whole process: it starts the log,
//! handles signals, and ends the process where it must not wait for a driver.

mod certs;
mod common;
mod connect;
mod doctor;
mod fetch;
mod help;
mod log;
mod names;
mod output;
mod serve;
mod signals;
mod topo;

use std::ffi::OsString;
use std::iter::once;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use egmem::exchange::Result;
use egmem::{Error as MemoryError, Explained, text};

use output::{DONE, FAILED, WRONG_USAGE};

/// How long the exit waits for a reader of a service's log.
const LAST: Duration = Duration::from_secs(1);

/// Extended GPU Memory: CPU memory that the CPU and every GPU of the node can use.
#[derive(Parser, Debug)]
#[command(name = "egmem", version)]
struct Cli {
    /// Log to standard error: -v for steps, -vv for each trial
    #[arg(short, long, global = true, action = ArgAction::Count)]
    verbose: u8,
    /// Write every driver call and allocation with its time to this file, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE", global = true)]
    trace: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Report what works here, why the rest does not, and what to do about it
    ///
    /// Exit status: 0 if Extended GPU Memory works for at least one GPU, 1 if not, 2 for wrong usage.
    Doctor(doctor::Doctor),
    /// Report what works and how fast it is, without names and addresses, to post it in a public issue
    ///
    /// The doctor's report and the topology; for each node and GPU proofs that both see the same bytes, bandwidth and
    /// latency; how long memory takes to pin, on which node it lies, and fabric handles. A part that fails, crashes or takes
    /// too long is an entry with its reason. It uses up to 4 GiB of a node's memory, a quarter of what is free at most.
    Report(doctor::Report),
    /// Draw the node: its sockets, memories, GPUs and links
    Topo(topo::Topo),
    /// Run this node's allocator service: its memory outlives the processes that use it
    ///
    /// SIGTERM or SIGINT drains it, a second one ends it at once, SIGHUP reloads certificates and lists of
    /// peers. Exit status: 0 drained, 1 failed, 2 for wrong usage or a wrong configuration, 3 if memory was
    /// still held at the end of the drain's time, 143 or 130 if a second signal (SIGTERM, SIGINT) ended it at
    /// once.
    Serve(serve::Serve),
    /// List the names that a server shows
    Ls(names::Ls),
    /// Fetch memory by name: import, map and grant it, then check, read, write or hold it
    Fetch(fetch::Fetch),
    /// Delete memory that this peer has created, by name
    ///
    /// Exit status: 0 deleted, 1 failed, 2 for wrong usage, 3 if it was still held at the deadline.
    Delete(names::Delete),
    /// Show whose memory it is: allocations of processes that offer their ledgers, and all other processes with GPUs
    ///
    /// A process of this user offers its ledger with the environment variable EGMEM_PS=1; egmem serve always does. Of all
    /// other processes the report shows what the kernel and NVML tell, as far as permitted: run it as root, outside of
    /// containers. It divides the memory in use on each node and GPU up by cause, with commands that show more, and shows
    /// imported memory whose exporter has ended.
    Ps(topo::Ps),
    /// Create certificates: a private authority, and one certificate for each node and user
    Certs(certs::Certs),
    /// Print a script that completes this program's commands and options in a shell
    ///
    /// For example: egmem completions bash > /etc/bash_completion.d/egmem
    Completions(help::Completions),
    /// Write manual pages: egmem.1 and one for each command
    Man(help::Man),
    /// Run trials for a parent `egmem doctor`, so that a crash ends only this process
    #[command(hide = true)]
    Probe(doctor::Probe),
}

impl Command {
    /// Runs the command, and returns the exit status.
    fn run(self, program: &[OsString], verbose: u8, definition: clap::Command) -> Result<u8> {
        match self {
            Self::Doctor(doctor) => return Ok(doctor.run(program, verbose)?),
            Self::Serve(serve) => return serve.run(),
            Self::Delete(delete) => return delete.run(),
            Self::Report(report) => report.run(program, verbose)?,
            Self::Topo(topo) => topo.run()?,
            Self::Ls(ls) => ls.run()?,
            Self::Fetch(fetch) => fetch.run()?,
            Self::Ps(ps) => ps.run()?,
            Self::Certs(certs) => certs.run()?,
            Self::Completions(completions) => completions.run(definition)?,
            Self::Man(man) => man.run(definition)?,
            Self::Probe(probe) => probe.run()?,
        }
        Ok(DONE)
    }
}

/// Writes clap's help or error, which quotes arguments: without control characters in them.
fn show_usage(
    error: &clap::Error,
    words: &[OsString],
    parse: impl Fn(&[OsString]) -> clap::error::Result<Cli>,
) {
    let texts = words.iter().map(|word| word.to_string_lossy());
    if !texts.clone().any(|word| word.contains(text::is_unsafe)) {
        // A failed write to a closed standard error cannot be reported.
        let _ = error.print();
        return;
    }
    let escaped: Vec<_> = texts
        .map(|word| text::escape(&word).into_owned().into())
        .collect();
    match parse(&escaped) {
        Err(error) => drop(error.print()),
        Ok(_) => output::complain(&error.render().to_string()),
    }
}

/// Runs the command that `arguments` name, without the program's name, and returns the exit status.
///
/// `program` holds the words that start this program again: `egmem doctor` runs its trials in children.
pub fn run(program: &[OsString], arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let command = help::complete(Cli::command());
    let words: Vec<OsString> = once("egmem".into()).chain(arguments).collect();
    let parse = |words: &[OsString]| {
        let matches = command.clone().try_get_matches_from(words);
        matches.and_then(|matches| Cli::from_arg_matches(&matches))
    };
    let cli = match parse(&words) {
        Ok(cli) => cli,
        Err(error) => {
            show_usage(&error, &words, parse);
            return u8::try_from(error.exit_code()).unwrap_or(WRONG_USAGE);
        }
    };
    let service = matches!(cli.command, Command::Serve(_));
    if let Err(error) = log::start(cli.verbose, service, cli.trace.as_deref()) {
        output::complain(&format!("error: {}\n", Explained(&error).advice()));
        return FAILED;
    }
    let status = cli.command.run(program, cli.verbose, command);
    let status = status.unwrap_or_else(|error| {
        output::complain(&format!("error: {}\n", Explained(&error).advice()));
        // Not an error that an import carries: that is no fault of the command line.
        match error.share().and_then(|error| error.memory()) {
            Some(MemoryError::InvalidArgument { .. }) => WRONG_USAGE,
            _ => FAILED,
        }
    });
    log::flush(LAST);
    status
}
