//! Tests that start themselves.

use std::process::Command;

/// Returns the command of this test program, by way of the emulator where there is one.
pub fn this_program() -> Command {
    let program = std::env::current_exe().unwrap();
    let runner = std::env::var("EGMEM_TEST_RUNNER").unwrap_or_default();
    let mut words = runner.split_whitespace();
    match words.next() {
        Some(first) => {
            let mut command = Command::new(first);
            command.args(words).arg(program);
            command
        }
        None => Command::new(program),
    }
}
