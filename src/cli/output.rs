//! Output of the commands to standard error, and text formats.

use std::io::{self, IsTerminal};
use std::path::Path;

use egmem::text::escape_lines;
use egmem::{Error, Result};

use crate::log;
use crate::stdio::{self, complain_painted};
pub use crate::stdio::{print, print_json, print_painted, print_while_read};

/// Writes `text` to standard error, with control characters escaped except line feeds and tabs. A service
/// does not wait for a reader. If standard error is closed, the text is lost; the standard library's macros
/// would panic.
pub fn complain(text: &str) {
    let text = escape_lines(text);
    match log::queue() {
        Some(queue) => queue.line(text.as_bytes()),
        None => complain_painted(&text),
    }
}

/// Shows on a terminal the step that is under way, in place of the previous text; "" clears it. A service does not
/// wait for the terminal.
pub fn progress(text: &str) {
    match log::queue() {
        Some(queue) if io::stderr().is_terminal() => queue.line(stdio::in_place(text).as_bytes()),
        Some(_) => {}
        None => stdio::progress(text),
    }
}

/// Shows a value as JSON, as text, or as a drawing in a file or on standard output.
pub fn show<T: serde::Serialize>(
    value: &T,
    json: bool,
    svg: Option<&Path>,
    text: fn(&T) -> String,
    drawing: fn(&T) -> String,
) -> Result<()> {
    match svg {
        _ if json => print_json(value),
        None => print(&text(value)),
        Some(path) if path.as_os_str() == "-" => print(&drawing(value)),
        Some(path) => std::fs::write(path, drawing(value))
            .map_err(|error| Error::system(format!("cannot write {}", path.display()), &error)),
    }
}
