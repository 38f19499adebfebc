//! Output of the commands to standard error, and text formats.

use egmem::text::escape_lines;

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
