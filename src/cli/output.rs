//! Output of the commands to standard error, and text formats.

use std::path::Path;

use egmem::text::escape_lines;
use egmem::{Error, Result};

use crate::log;
pub use crate::stdio::{
    complain_painted, print, print_json, print_painted, print_while_read, progress,
};

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
