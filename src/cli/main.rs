//! The program `egmem`.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Without its path, the program is found as the shell found it.
    let program = std::env::current_exe().unwrap_or_else(|_| "egmem".into());
    egmem_cli::run(&[program.into()], std::env::args_os().skip(1)).into()
}
