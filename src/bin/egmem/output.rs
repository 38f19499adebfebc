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

/// Formats ids as ranges: `0–3, 7`.
pub fn ranges(ids: &[i32]) -> String {
    let mut ranges: Vec<(i32, i32)> = Vec::new();
    for &id in ids {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == id => *last = id,
            _ => ranges.push((id, id)),
        }
    }
    let texts: Vec<String> = ranges
        .iter()
        .map(|(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first}–{last}"),
        })
        .collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::ranges;

    #[test]
    fn neighbours_become_a_range() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[4]), "4");
        assert_eq!(ranges(&[0, 1]), "0, 1");
        assert_eq!(ranges(&[0, 1, 2, 3, 7, 9, 10]), "0–3, 7, 9, 10");
    }
}
