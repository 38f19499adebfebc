//! Escapes texts from peers, files and the system for terminals, logs and error messages.
//!
//! A control character can move a terminal's cursor or forge a line of a log, and a bidirectional control can
//! reorder the text that a person reads. [`escape`] replaces such a character by its escape (`\u{1b}`), so no
//! information is lost.
//!
//! ```
//! use egmem::text::escape;
//!
//! assert_eq!(escape("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
//! assert_eq!(escape("größe 2 µs"), "größe 2 µs");
//! ```

use std::borrow::Cow;
use std::fmt::{self, Write};

/// The most bytes that are kept of a peer's free text.
pub const MAX_TEXT: usize = 255;

/// Returns whether a character is escaped: controls (C0, C1, DEL), bidirectional controls, line and paragraph
/// separators.
pub const fn is_unsafe(c: char) -> bool {
    matches!(
        c,
        '\0'..='\u{1f}'
            | '\u{7f}'..='\u{9f}'
            | '\u{61c}'
            | '\u{200e}'
            | '\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}'
    )
}

/// Escapes every [unsafe](is_unsafe) character. Escaping twice gives the same result as once.
pub fn escape(text: &str) -> Cow<'_, str> {
    escape_but(text, &[])
}

/// Escapes every [unsafe](is_unsafe) character except line feeds and tabs, for texts of several lines.
pub fn escape_lines(text: &str) -> Cow<'_, str> {
    escape_but(text, &['\n', '\t'])
}

/// Escapes JSON, where an unsafe character can only be part of a string: as `\u001b`. Keeps line feeds.
pub fn escape_json(json: &str) -> Cow<'_, str> {
    let is_bad = |c| is_unsafe(c) && c != '\n';
    // All of them are in the basic plane. Writing to a string cannot fail.
    let escaped = |c, out: &mut String| write!(out, "\\u{:04x}", u32::from(c));
    replaced(json, is_bad, |c, out| escaped(c, out).unwrap_or_default())
}

/// Escapes for XML, between tags and in attributes in double quotes. Replaces an [unsafe](is_unsafe)
/// character by U+FFFD, and so one that XML does not allow.
pub fn escape_xml(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if is_unsafe(c) || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Escapes, then cuts the text to at most `most` bytes, including the `…` that marks the cut.
pub fn bounded(text: &str, most: usize) -> String {
    let prefix = cut(text, most.saturating_add(1));
    let escaped = escape(prefix);
    if prefix.len() == text.len() && escaped.len() <= most {
        return escaped.into_owned();
    }
    let mark = if most >= '…'.len_utf8() { "…" } else { "" };
    let kept = cut(&escaped, most - mark.len());
    format!("{kept}{mark}")
}

/// Returns the beginning of a text: at most `most` bytes, in whole characters.
pub fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Parses a PCI address, such as `0000:01:00.0`: domain, which may be missing, bus, device and function.
pub fn pci_address(text: &str) -> Option<(u32, u8, u8, u8)> {
    let (address, function) = text.trim().rsplit_once('.')?;
    let parts: Vec<&str> = address.split(':').collect();
    let (domain, bus, device) = match parts[..] {
        [domain, bus, device] => (domain, bus, device),
        [bus, device] => ("0", bus, device),
        _ => return None,
    };
    let domain = u32::from_str_radix(domain, 16).ok()?;
    let byte = |text| u8::from_str_radix(text, 16).ok();
    Some((domain, byte(bus)?, byte(device)?, byte(function)?))
}

/// Parses an id of 32 hexadecimal digits, with dashes anywhere; `None` for another text.
pub fn hex_id(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.chars().filter(|&c| c != '-').collect();
    let is_id = digits.len() == 32 && digits.chars().all(|c| c.is_ascii_hexdigit());
    let id = u128::from_str_radix(&digits, 16).ok().filter(|_| is_id);
    id.map(u128::to_be_bytes)
}

/// Bytes, displayed in the largest binary unit that keeps the number short: `1.5 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let exponent = (63 - self.0.leading_zeros()) as usize / 10;
        let unit = 1_u64 << (10 * exponent);
        if self.0.is_multiple_of(unit) {
            write!(f, "{} {}", self.0 / unit, UNITS[exponent - 1])
        } else {
            write!(
                f,
                "{:.2} {}",
                self.0 as f64 / unit as f64,
                UNITS[exponent - 1]
            )
        }
    }
}

/// Formats a number of things: `1 block`, `2 blocks`, `2 processes`.
pub fn count(number: u64, thing: &str) -> String {
    let s = match number {
        1 => "",
        _ if thing.ends_with('s') => "es",
        _ => "s",
    };
    format!("{number} {thing}{s}")
}

/// Groups values by keys, in the order in which the keys come first.
pub fn grouped<K: PartialEq, V>(pairs: impl IntoIterator<Item = (K, V)>) -> Vec<(K, Vec<V>)> {
    let mut groups: Vec<(K, Vec<V>)> = Vec::new();
    for (key, value) in pairs {
        match groups.iter_mut().find(|(known, _)| *known == key) {
            Some((_, values)) => values.push(value),
            None => groups.push((key, vec![value])),
        }
    }
    groups
}

/// Formats ascending ids as ranges: `0–3, 7`.
pub fn ranges(ids: &[i32]) -> String {
    let text = |run: &[i32]| match run {
        [first, _, .., last] => format!("{first}–{last}"),
        ids => ids
            .iter()
            .map(i32::to_string)
            .collect::<Vec<_>>()
            .join(", "),
    };
    let runs = ids.chunk_by(|one, next| one.checked_add(1) == Some(*next));
    runs.map(text).collect::<Vec<_>>().join(", ")
}

/// Wraps `text` to lines of at most `most` characters, the first after `mark`, the others aligned with the text. A word stays
/// whole.
pub fn hanging(mark: &str, text: &str, most: usize) -> String {
    let indent = mark.chars().count();
    let mut out = mark.to_owned();
    let mut column = indent;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > indent && column + 1 + length > most {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else if column > indent {
            out.push(' ');
            column += 1;
        }
        out += word;
        column += length;
    }
    out + "\n"
}

fn escape_but<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let is_bad = |c: char| is_unsafe(c) && !kept.contains(&c);
    replaced(text, is_bad, |c, out| out.extend(c.escape_default()))
}

/// Replaces characters by what `escaped` adds.
fn replaced(
    text: &str,
    is_bad: impl Fn(char) -> bool,
    escaped: impl Fn(char, &mut String),
) -> Cow<'_, str> {
    if !text.contains(&is_bad) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_bad(c) {
            escaped(c, &mut out);
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// Writes to `f` with every unsafe character of the formatted text escaped.
pub struct Escaping<'a, 'b>(pub &'a mut fmt::Formatter<'b>);

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write_str(&escape(text))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn neighbours_become_a_range() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[4]), "4");
        assert_eq!(ranges(&[0, 1]), "0, 1");
        assert_eq!(ranges(&[0, 1, 2, 3, 7, 9, 10]), "0–3, 7, 9, 10");
        assert_eq!(ranges(&[0, i32::MAX]), "0, 2147483647");
    }

    #[test]
    fn controls_are_shown_and_other_texts_stay() {
        for (text, shown) in [
            ("", ""),
            ("größe: 5 µs → 7", "größe: 5 µs → 7"),
            ("\u{1b}[31m\u{7}\0", "\\u{1b}[31m\\u{7}\\u{0}"),
            ("a\r\nb\tc", "a\\r\\nb\\tc"),
            ("\u{7f}\u{9b}2J", "\\u{7f}\\u{9b}2J"),
            ("\u{202e}gpj.exe\u{2066}", "\\u{202e}gpj.exe\\u{2066}"),
            ("\u{200e}\u{200f}\u{61c}", "\\u{200e}\\u{200f}\\u{61c}"),
            ("\u{2028}\u{2029}", "\\u{2028}\\u{2029}"),
        ] {
            assert_eq!(escape(text), shown);
        }
        assert_eq!(escape_lines("a\tb\n\u{1b}"), "a\tb\n\\u{1b}");
        assert_eq!(
            escape_xml("a<b>&\"\u{7}\u{202e}\u{ffff}é"),
            "a&lt;b&gt;&amp;&quot;\u{fffd}\u{fffd}\u{fffd}é"
        );
        assert_eq!(bounded("ääää", 6), "ä…");
        assert_eq!(bounded("abc", 3), "abc");
        assert_eq!(bounded("a\n", usize::MAX), "a\\n");
        let json = serde_json::to_string("\u{7f}\u{202e}\n").unwrap();
        let escaped = escape_json(&json);
        assert_eq!(escaped, "\"\\u007f\\u202e\\n\"");
        assert_eq!(
            serde_json::from_str::<String>(&escaped).unwrap(),
            "\u{7f}\u{202e}\n"
        );
    }

    #[test]
    fn pci_addresses_are_read() {
        for (text, address) in [
            ("0000:01:00.0", Some((0, 1, 0, 0))),
            ("00010000:c1:1F.7", Some((0x1_0000, 0xc1, 0x1f, 7))),
            ("c1:00.0\n", Some((0, 0xc1, 0, 0))),
            ("0000:01:00", None),
            ("01.0", None),
            ("0:0:01:00.0", None),
            ("0000:100:00.0", None),
            ("0000:0g:00.0", None),
            ("", None),
        ] {
            assert_eq!(pci_address(text), address, "{text}");
        }
    }

    #[test]
    fn ids_of_hexadecimal_digits_are_read() {
        let id = *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xaa\xbb\xcc\xdd\xee\xff";
        for (text, read) in [
            ("00112233-4455-6677-8899-aabbccddeeff", Some(id)),
            ("00112233445566778899AABBCCDDEEFF", Some(id)),
            ("0112233-4455-6677-8899-aabbccddeeff", None),
            ("000112233-4455-6677-8899-aabbccddeeff", None),
            ("+0112233-4455-6677-8899-aabbccddeeff", None),
            ("g0112233-4455-6677-8899-aabbccddeeff", None),
            ("", None),
        ] {
            assert_eq!(hex_id(text), read, "{text}");
        }
    }

    proptest! {
        #[test]
        fn nothing_unsafe_is_left_and_escaping_is_idempotent(text in any::<String>(), most in 0_usize..64) {
            let shown = escape(&text).into_owned();
            prop_assert!(!shown.contains(is_unsafe));
            prop_assert_eq!(escape(&shown), shown.as_str());
            let cut = bounded(&text, most);
            prop_assert!(!cut.contains(is_unsafe) && cut.len() <= most);
            prop_assert_eq!(bounded(&cut, most), cut.as_str());
            prop_assert!(!escape_lines(&text).contains(|c| is_unsafe(c) && c != '\n' && c != '\t'));
        }
    }
}
