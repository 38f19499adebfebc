//! Output of the commands to standard error, text formats, and exit statuses.

use std::io::{self, IsTerminal};
use std::path::Path;
use std::time::{Duration, Instant};

use egmem::size::Bytes;
use egmem::text::escape_lines;
use egmem::{Error, Result};

use crate::common::{self, complain_painted};
pub use crate::common::{print, print_json, print_painted};
use crate::log;

/// Success.
pub const DONE: u8 = 0;
/// Any failure without a status of its own.
pub const FAILED: u8 = 1;
/// Wrong usage.
pub const WRONG_USAGE: u8 = 2;
/// A peer had not released memory at the deadline.
pub const STILL_HELD: u8 = 3;

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
        Some(queue) if io::stderr().is_terminal() => queue.line(common::in_place(text).as_bytes()),
        Some(_) => {}
        None => common::progress(text),
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

/// How long a text stays at least.
const INTERVAL: Duration = Duration::from_millis(100);

/// How many bytes are done of a total, on standard error if that is a terminal. It goes away when dropped.
pub struct ByteProgress {
    doing: &'static str,
    begun: Instant,
    /// When the next text may be shown.
    next: Instant,
}

impl ByteProgress {
    /// Begins; `doing` says what happens to the bytes: "writing".
    pub fn new(doing: &'static str) -> Self {
        let begun = Instant::now();
        Self {
            doing,
            begun,
            next: begun,
        }
    }

    /// Shows that `done` bytes are done; `total` is `None` if it is unknown.
    pub fn show(&mut self, done: u64, total: Option<u64>) {
        let now = Instant::now();
        if now >= self.next {
            self.next = now + INTERVAL;
            progress(&text(self.doing, done, total, now - self.begun));
        }
    }
}

impl Drop for ByteProgress {
    fn drop(&mut self) {
        progress("");
    }
}

fn text(doing: &str, done: u64, total: Option<u64>, took: Duration) -> String {
    let mut text = format!("{doing}: {}", Bytes(done));
    if let Some(total) = total {
        let percent = u128::from(done) * 100 / u128::from(total.max(1));
        text += &format!(" of {} ({percent} %)", Bytes(total));
    }
    // Nothing has a rate at its begin.
    if took >= INTERVAL {
        text += &format!(", {:.2} GB/s", done as f64 / took.as_secs_f64() / 1e9);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_bytes_percent_and_rate() {
        let two = Duration::from_secs(2);
        assert_eq!(
            text("writing", 3 << 30, Some(16 << 30), two),
            "writing: 3 GiB of 16 GiB (18 %), 1.61 GB/s"
        );
        assert_eq!(
            text("writing", 0, Some(16 << 30), Duration::ZERO),
            "writing: 0 B of 16 GiB (0 %)"
        );
        assert_eq!(
            text("writing", 1 << 30, None, two),
            "writing: 1 GiB, 0.54 GB/s"
        );
        assert_eq!(
            text("writing", 0, Some(0), two),
            "writing: 0 B of 0 B (0 %), 0.00 GB/s"
        );
        let all = text("writing", u64::MAX, Some(u64::MAX), two);
        assert!(all.contains("(100 %)"), "{all}");
    }
}
