//! The common end of every command's help, shell completions and manual pages.

#[cfg(test)]
mod reference;

use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;
use egmem::{Error, Result};

use crate::output::print;

/// The default exit status.
const EXIT: &str = "Exit status: 0 done, 1 failed, 2 for wrong usage.";
const LOG: &str = "Environment: RUST_LOG selects what is logged in place of -v, by target and level: \
                   RUST_LOG=warn,egmem_exchange=debug.";

/// Adds to every command's help the exit status, unless the command has its own text, and the environment.
pub fn complete(command: Command) -> Command {
    let told = command.get_long_about().or(command.get_about());
    let end = match told.is_some_and(|text| text.to_string().contains("Exit status")) {
        true => LOG.to_owned(),
        false => format!("{EXIT}\n{LOG}"),
    };
    command.after_help(end).mut_subcommands(complete)
}

/// `egmem completions`
#[derive(Args, Debug)]
pub struct Completions {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

impl Completions {
    /// Prints the script.
    pub fn run(&self, mut command: Command) -> Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "egmem", &mut script);
        print(&String::from_utf8_lossy(&script))
    }
}

/// `egmem man`
#[derive(Args, Debug)]
pub struct Man {
    /// The folder for egmem.1 and a page for each command; created if missing
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Man {
    /// Writes the pages over existing ones.
    pub fn run(&self, mut command: Command) -> Result<()> {
        command.build();
        std::fs::create_dir_all(&self.out).map_err(|error| {
            Error::system(format!("cannot make {}", self.out.display()), &error)
        })?;
        pages(&command, "egmem", &self.out)
    }
}

/// Writes the page of a command called `name`, and those of its subcommands: `egmem-certs-init.1`.
fn pages(command: &Command, name: &str, folder: &Path) -> Result<()> {
    let path = folder.join(format!("{name}.1"));
    let failed = |error| Error::system(format!("cannot write {}", path.display()), &error);
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone())
        .render(&mut page)
        .map_err(failed)?;
    std::fs::write(&path, page).map_err(failed)?;
    let shown = |command: &&Command| !command.is_hide_set() && command.get_name() != "help";
    for command in command.get_subcommands().filter(shown) {
        pages(command, &format!("{name}-{}", command.get_name()), folder)?;
    }
    Ok(())
}
