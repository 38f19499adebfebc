//! RMM's log: `Thread,Time,Action,Pointer,Size,Stream`, as its `logging_resource_adaptor` writes it.
//!
//! Real logs come with and without header, with several headers where they were put together, with CRLF,
//! with pointers with and without `0x` or as `(nil)`, with times as `13:25:01.123456`,
//! `13:25:01:123456` or seconds since 1970, and torn at the end.

use csv::{ByteRecord, ReaderBuilder, Terminator, Trim};

use super::{Bad, Reading, Why};
use crate::trace::{Builder, Line, Trace};

/// Where the columns are.
#[derive(Clone, Copy, Debug)]
struct Columns {
    thread: Option<usize>,
    time: Option<usize>,
    action: usize,
    pointer: usize,
    size: usize,
}

impl Columns {
    /// Without a header.
    const USUAL: Self = Self {
        thread: Some(0),
        time: Some(1),
        action: 2,
        pointer: 3,
        size: 4,
    };

    /// As a header names them, in any order and beside others.
    fn named(header: &ByteRecord) -> Result<Self, Why> {
        let find = |name: &str| {
            let mut names = header.iter().map(bare);
            names.position(|field| field.eq_ignore_ascii_case(name.as_bytes()))
        };
        let need = |name: &'static str| find(name).ok_or(Why::NoColumn(name));
        Ok(Self {
            thread: find("Thread"),
            time: find("Time"),
            action: need("Action")?,
            pointer: need("Pointer")?,
            size: need("Size")?,
        })
    }

    /// How many fields a line must have.
    fn least(&self) -> usize {
        let most = [self.action, self.pointer, self.size];
        most.into_iter().max().unwrap_or(0) + 1
    }
}

/// Reads a whole log.
pub fn read(bytes: &[u8], reading: Reading) -> Result<Trace, Bad> {
    // A line ends with \n, even inside quotes: a stray quote must not swallow the lines after it.
    let mut reader = ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .quoting(false)
        .terminator(Terminator::Any(b'\n'))
        .trim(Trim::All)
        .from_reader(bytes);
    let mut builder = Builder::default();
    let mut columns = Columns::USUAL;
    let mut record = ByteRecord::new();
    // The reader passes over empty lines without a word, so they are counted by its position.
    let mut place = Place {
        bytes,
        at: 0,
        ends: 0,
    };
    let mut before = 0;
    loop {
        let more = reader.read_byte_record(&mut record).map_err(|error| Bad {
            place: "line",
            number: before + 1,
            why: Why::Format(error.to_string()),
        })?;
        let after = place.advance(reader.position().byte());
        builder.notes().lines = after;
        if !more {
            builder.notes().blank += after - before;
            return Ok(builder.finish());
        }
        builder.notes().blank += (after - before).saturating_sub(1);
        before = after;
        if let Err(why) = take(&record, &mut columns, &mut builder) {
            if !reading.skip_bad {
                return Err(Bad {
                    place: "line",
                    number: after,
                    why,
                });
            }
            builder.notes().bad += 1;
        }
    }
}

/// Counts lines up to a position that goes on.
struct Place<'a> {
    bytes: &'a [u8],
    at: usize,
    ends: u64,
}

impl Place<'_> {
    /// The lines up to byte `to`; a last one need not end.
    fn advance(&mut self, to: u64) -> u64 {
        let to = (to as usize).clamp(self.at, self.bytes.len());
        let passed = &self.bytes[self.at..to];
        self.ends += passed.iter().filter(|&&byte| byte == b'\n').count() as u64;
        self.at = to;
        let torn = to == self.bytes.len() && self.bytes.last().is_some_and(|&byte| byte != b'\n');
        self.ends + u64::from(torn)
    }
}

/// One line.
fn take(record: &ByteRecord, columns: &mut Columns, builder: &mut Builder) -> Result<(), Why> {
    if record.iter().all(|field| field.is_empty()) && record.len() <= 1 {
        builder.notes().blank += 1;
        return Ok(());
    }
    if record
        .iter()
        .any(|field| bare(field).eq_ignore_ascii_case(b"action"))
    {
        *columns = Columns::named(record)?;
        builder.notes().headers += 1;
        return Ok(());
    }
    let field = |index: usize| record.get(index).map(bare);
    let least = columns.least();
    let needed = || Why::Columns {
        found: record.len(),
        want: least,
    };
    let thread = columns.thread.and_then(field).unwrap_or_default();
    let pointer = field(columns.pointer).ok_or_else(needed)?;
    let size = field(columns.size).ok_or_else(needed)?;
    let line = Line {
        thread: std::str::from_utf8(thread).map_err(|_| wrong("Thread", thread, "text"))?,
        time: columns.time.and_then(field).and_then(microseconds),
        pointer: hex(pointer).ok_or_else(|| wrong("Pointer", pointer, "hexadecimal address"))?,
        size: number(size).ok_or_else(|| wrong("Size", size, "number of bytes"))?,
    };
    let action = field(columns.action).ok_or_else(needed)?;
    match action {
        b"allocate" => builder.allocate(&line)?,
        // RMM writes free; its manual says deallocate.
        b"free" | b"deallocate" => builder.free(&line),
        b"allocate failure" => builder.notes().failures += 1,
        _ => return Err(Why::Action(String::from_utf8_lossy(action).into_owned())),
    }
    Ok(())
}

/// A field without the quotes that other tools put around it.
fn bare(field: &[u8]) -> &[u8] {
    match field {
        [b'"', inner @ .., b'"'] => inner,
        _ => field,
    }
}

fn wrong(column: &'static str, field: &[u8], kind: &'static str) -> Why {
    let mut text = String::from_utf8_lossy(field).into_owned();
    if text.chars().count() > 40 {
        text = text.chars().take(40).chain(['…']).collect();
    }
    Why::Field { column, text, kind }
}

fn number(field: &[u8]) -> Option<u64> {
    let digits = field.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(field)
        .ok()
        .filter(|_| digits)?
        .parse()
        .ok()
}

fn hex(field: &[u8]) -> Option<u64> {
    if field == b"(nil)" {
        return Some(0);
    }
    let digits = match field {
        [b'0', b'x' | b'X', digits @ ..] => digits,
        digits => digits,
    };
    // from_str_radix would take a sign as well.
    let sound = digits.iter().all(u8::is_ascii_hexdigit);
    let digits = std::str::from_utf8(digits).ok().filter(|_| sound)?;
    u64::from_str_radix(digits, 16).ok()
}

/// Microseconds from midnight or from 1970. A time that cannot be read is no reason to refuse a line.
fn microseconds(field: &[u8]) -> Option<u64> {
    let parts = field.split(|byte| matches!(byte, b':' | b'.')).map(number);
    let parts: Vec<u64> = parts.collect::<Option<_>>()?;
    let fraction = field.rsplit(|byte| matches!(byte, b':' | b'.')).next()?;
    let (seconds, fraction) = match parts[..] {
        [seconds] => (seconds, &b""[..]),
        [seconds, _] if field.contains(&b'.') => (seconds, fraction),
        [hours, minutes, seconds] => (clock(hours, minutes, seconds)?, &b""[..]),
        [hours, minutes, seconds, _] => (clock(hours, minutes, seconds)?, fraction),
        _ => return None,
    };
    let digits = fraction.iter().copied().chain(std::iter::repeat(b'0'));
    let fraction = digits
        .take(6)
        .fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'));
    seconds.checked_mul(1_000_000)?.checked_add(fraction)
}

fn clock(hours: u64, minutes: u64, seconds: u64) -> Option<u64> {
    // 60: a leap second.
    (hours < 24 && minutes < 60 && seconds <= 60).then_some((hours * 60 + minutes) * 60 + seconds)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn trace(text: &str) -> Trace {
        read(text.as_bytes(), Reading::default()).unwrap()
    }

    fn bad(text: &str) -> Bad {
        read(text.as_bytes(), Reading::default()).unwrap_err()
    }

    const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

    #[test]
    fn a_log_of_two_threads() {
        let trace = trace(&format!(
            "{HEADER}\
             2342727,15:47:02.841961,allocate,0x10012400000,1048576,0\n\
             2342728,15:47:02.841970,allocate,0x7f8a40000000,256,0x2\n\
             2342728,15:47:02.841977,free,0x10012400000,1048576,0\n\
             2342727,15:47:03,allocate failure,(nil),9999999999,0\n"
        ));
        let events: Vec<_> = trace
            .events
            .iter()
            .map(|event| (event.block, event.thread, event.frees, event.size))
            .collect();
        assert_eq!(
            events,
            [
                (0, 0, false, 1 << 20),
                (1, 1, false, 256),
                (0, 1, true, 1 << 20)
            ]
        );
        assert_eq!(trace.times, [0, 9, 16]);
        assert_eq!(trace.threads, ["2342727", "2342728"]);
        assert_eq!((trace.peak, trace.peak_event), ((1 << 20) + 256, 1));
        let notes = &trace.notes;
        assert_eq!((notes.lines, notes.headers, notes.failures), (5, 1, 1));
        assert_eq!(notes.never_freed, 1);
        assert_eq!(notes.accounted(), notes.lines);
    }

    #[test]
    fn quirks_of_real_logs() {
        // CRLF, no 0x, the older times, deallocate, a header again, empty lines, no last line end.
        let trace = trace(
            "1,13:25:01:123456,allocate,7f8a40000000,1024,0\r\n\r\n\
             Thread,Time,Action,Pointer,Size,Stream\r\n\n   \n\
             1,13:25:01:123460,deallocate,0x7f8a40000000,1024,0\r\n\
             1,13:25:01:123470,free,0x7f8a40000000,1024,0\r\n\
             1,13:25:01:123480,allocate,(nil),0,0",
        );
        let notes = trace.notes;
        assert_eq!((notes.allocations, notes.frees), (1, 1));
        assert_eq!((notes.unknown_frees, notes.empty), (1, 1));
        assert_eq!((notes.blank, notes.headers, notes.lines), (3, 1, 8));
        assert_eq!(notes.accounted(), 8);
        assert_eq!(trace.times, [0, 4]);
    }

    #[test]
    fn a_header_says_where_the_columns_are() {
        let trace = trace(
            "\u{feff}\"\",\"Size\",\"Pointer\",\"Action\"\n0,512,0x10,\"allocate\"\n1,512,0x10,free,x\n",
        );
        assert_eq!((trace.events.len(), trace.peak), (2, 512));
        assert!(trace.times.is_empty());
        let error = bad("Thread,Time,Action,Pointer,Stream\n");
        assert_eq!((error.number, error.why), (1, Why::NoColumn("Size")));
    }

    #[test]
    fn a_bad_line_is_told_with_its_number() {
        let good = "1,13:25:01.123456,allocate,0x100,1024,0x0\n";
        let field = |column, text: &str, kind| Why::Field {
            column,
            text: text.into(),
            kind,
        };
        for (line, why) in [
            ("1,2,allocate,0x200", Why::Columns { found: 4, want: 5 }),
            ("hello", Why::Columns { found: 1, want: 5 }),
            (
                "1,2,allocate,0xfoo,1,0",
                field("Pointer", "0xfoo", "hexadecimal address"),
            ),
            (
                "1,2,allocate,+1,1,0",
                field("Pointer", "+1", "hexadecimal address"),
            ),
            (
                "1,2,allocate,0x10000000000000000,1,0",
                field("Pointer", "0x10000000000000000", "hexadecimal address"),
            ),
            ("1,2,free,0x1,-5,0", field("Size", "-5", "number of bytes")),
            ("1,2,free,0x1,,0", field("Size", "", "number of bytes")),
            ("1,2,Allocate,0x1,5,0", Why::Action("Allocate".into())),
            ("1,2,allocate,0x0,5,0", Why::Null),
            (
                "1,2,allocate,0x1,9223372036854775807,0",
                Why::TooLarge(i64::MAX as u64),
            ),
            (
                "1,2,allocate,\"0x1,5,0",
                field("Pointer", "\"0x1", "hexadecimal address"),
            ),
        ] {
            let text = format!("{HEADER}{good}\n{line}\n{good}");
            let error = bad(&text);
            assert_eq!((error.number, &error.why), (4, &why), "{line}");
            assert!(error.to_string().starts_with("line 4: "), "{error}");
            let reading = Reading {
                skip_bad: true,
                ..Reading::default()
            };
            let trace = read(text.as_bytes(), reading).unwrap();
            assert_eq!((trace.notes.bad, trace.notes.allocations), (1, 2), "{line}");
            assert_eq!(trace.notes.accounted(), trace.notes.lines);
        }
    }

    #[test]
    fn times_in_all_their_forms() {
        for (text, want) in [
            ("00:00:01.5", Some(1_500_000)),
            ("23:59:59.999999", Some(86_399_999_999)),
            ("01:00:00:000001", Some(3_600_000_001)),
            ("01:00:00", Some(3_600_000_000)),
            ("1634567890.123456789", Some(1_634_567_890_123_456)),
            ("17", Some(17_000_000)),
            ("24:00:00.0", None),
            ("12:34", None),
            ("", None),
            ("1.5e9", None),
            ("18446744073709551615.0", None),
        ] {
            assert_eq!(microseconds(text.as_bytes()), want, "{text}");
        }
    }

    /// Lines like a log's, whole and broken.
    fn some_line() -> impl Strategy<Value = String> {
        prop_oneof![
            8 => ("[12]", "allocate|free|allocate failure", 0_u64..8, 0_u64..4).prop_map(
                |(thread, action, pointer, size)| format!("{thread},01:02:03.4,{action},{pointer:#x},{size},0x0")
            ),
            1 => Just(HEADER.trim_end().to_owned()),
            1 => "[ \r]{0,2}",
            2 => "[a-z0-9,:.\"\u{e9} ]{0,40}",
        ]
    }

    proptest! {
        /// Of any lines each is counted once, and the replayed events are consistent.
        #[test]
        fn no_line_is_lost(lines in proptest::collection::vec(some_line(), 0..60), ended in any::<bool>()) {
            let mut text = lines.join("\n");
            if ended {
                text.push('\n');
            }
            let reading = Reading { skip_bad: true, ..Reading::default() };
            let trace = read(text.as_bytes(), reading).unwrap();
            prop_assert_eq!(trace.notes.lines, text.lines().count() as u64);
            prop_assert_eq!(trace.notes.accounted(), trace.notes.lines);
            prop_assert_eq!(
                trace.events.len() as u64,
                trace.notes.allocations + trace.notes.frees + trace.notes.implied_frees
            );
            let mut slots = vec![None; trace.slots as usize];
            let (mut live, mut peak) = (0, 0);
            for event in &trace.events {
                let slot = &mut slots[event.slot as usize];
                if event.frees {
                    prop_assert_eq!(slot.take(), Some((event.block, event.size)));
                    live -= event.size;
                } else {
                    prop_assert_eq!(*slot, None);
                    *slot = Some((event.block, event.size));
                    live += event.size;
                }
                peak = peak.max(live);
            }
            prop_assert_eq!(peak, trace.peak);
            prop_assert_eq!(slots.iter().flatten().count() as u64, trace.notes.never_freed);
        }

        #[test]
        fn bytes_of_any_kind_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = super::super::read(&bytes, Reading::default());
            let reading = Reading { skip_bad: true, ..Reading::default() };
            if let Ok(trace) = read(&bytes, reading) {
                prop_assert_eq!(trace.notes.accounted(), trace.notes.lines);
            }
        }
    }
}
