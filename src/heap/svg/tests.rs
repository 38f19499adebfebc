//! The picture shows what the numbers say.

use super::super::occupancy::Chunk;
use super::*;
use crate::driver::NodeId;

fn chunk(range: Range<u64>, node: i32) -> Chunk {
    Chunk {
        range,
        node: NodeId(node),
    }
}

/// Returns the number after the first `before`.
fn number(text: &str, before: &str) -> u64 {
    let at = text.find(before).unwrap_or_else(|| panic!("no {before:?}")) + before.len();
    let digits: String = text[at..]
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().unwrap()
}

/// Returns the pixels under the path with `fill`, over all rows.
fn area(svg: &str, fill: &str) -> u64 {
    let mut pixels = 0;
    for path in svg
        .lines()
        .filter(|line| line.starts_with(&format!("<path {fill}")))
    {
        let d = path.split(" d=\"M").nth(1).unwrap();
        let bottom = number(d, " ");
        for step in d.split('V').skip(1).filter(|step| step.contains('h')) {
            let (top, run) = step.split_once('h').unwrap();
            pixels += (bottom - top.parse::<u64>().unwrap()) * run.parse::<u64>().unwrap();
        }
    }
    pixels
}

#[test]
fn the_numbers_in_it_are_the_totals() {
    let occupancy = Occupancy {
        limit: 1 << 30,
        chunks: vec![chunk(0..64 << 20, 0), chunk(128 << 20..192 << 20, 1)],
        used: vec![0..10 << 20, 130 << 20..131 << 20],
        deferred: vec![10 << 20..12 << 20],
        cached: vec![131 << 20..(131 << 20) + 4096],
    };
    let svg = occupancy.to_svg("heap");
    let totals = occupancy.totals();
    assert_eq!(totals.used, 11 << 20);
    let desc = svg.split("<desc").nth(1).unwrap();
    assert_eq!(number(desc, "at most "), 1 << 30);
    assert_eq!(number(desc, "bytes, "), totals.backed);
    assert_eq!(number(desc, "backed: "), totals.used);
    assert_eq!(number(desc, "span has "), totals.largest_free);
    for (name, bytes) in [
        ("used: ", totals.used),
        ("deferred: ", totals.deferred),
        ("cached: ", totals.cached),
        ("free: ", totals.free),
        ("not backed: ", (1 << 30) - totals.backed),
    ] {
        let line = svg
            .lines()
            .find(|line| line.contains(&format!(">{name}")))
            .unwrap();
        assert_eq!(number(line, " ("), bytes, "{line}");
    }
    // The rows' sums equal the legend.
    let rows = svg.lines().filter(|line| line.contains("<title>offsets "));
    let used: u64 = rows.map(|line| number(line, "used ")).sum();
    assert_eq!(used, totals.used);
    assert!(svg.contains("node 0"), "{svg}");
    assert!(svg.contains("node 1"), "{svg}");
}

#[test]
fn a_column_is_as_full_as_its_bytes() {
    // Cells of 4 KiB: columns of 16 pixels, so that a pixel is 256 bytes.
    let occupancy = Occupancy {
        limit: 64 << 20,
        chunks: vec![chunk(0..64 << 20, 0)],
        used: vec![0..8192, 16384..16384 + 1024],
        ..Occupancy::default()
    };
    let svg = occupancy.to_svg("heap");
    assert!(svg.contains("one column is 4 KiB"), "{svg}");
    assert_eq!(area(&svg, "class=\"u\""), 16 + 16 + 4);
    // The used bytes in front of the third column's free bytes count as well.
    assert_eq!(area(&svg, "class=\"f\""), (16384 - 2) * 16);
}

#[test]
fn the_smallest_block_is_seen() {
    let occupancy = Occupancy {
        limit: 1 << 40,
        chunks: vec![chunk(0..1 << 40, 0)],
        used: vec![1 << 39..(1 << 39) + 1],
        ..Occupancy::default()
    };
    assert_eq!(area(&occupancy.to_svg("heap"), "class=\"u\""), 1);
}

#[test]
#[cfg_attr(
    egmem_slow,
    ignore = "takes minutes where everything runs slowly, and has one thread"
)]
fn a_million_blocks_make_no_large_picture() {
    // Uneven sizes, so that columns differ and runs stay short.
    let mut used = Vec::new();
    let (mut deferred, mut cached) = (Vec::new(), Vec::new());
    let mut at = 0;
    for index in 0..1_000_000_u64 {
        let length = 256 * (1 + index * 7919 % 61);
        match index % 5 {
            0 => deferred.push(at..at + length / 2),
            1 => cached.push(at..at + length / 2),
            _ => used.push(at..at + length),
        }
        at += length + 256 * (index * 31 % 17);
    }
    let occupancy = Occupancy {
        limit: 1 << 40,
        chunks: vec![chunk(0..at, 0)],
        used,
        cached,
        deferred,
    };
    let svg = occupancy.to_svg("heap");
    assert!(svg.len() < 512 << 10, "{} bytes", svg.len());
    let used = 100.0 * area(&svg, "class=\"u\"") as f64;
    let share = used / (16.0 * (at / Scale::new(at).cell) as f64);
    let really = 100.0 * occupancy.totals().used as f64 / at as f64;
    assert!((share - really).abs() < 3.0, "{share} % drawn, {really} %");
}

#[test]
fn any_input_gives_a_picture() {
    for occupancy in [
        Occupancy::default(),
        Occupancy {
            limit: u64::MAX,
            chunks: vec![chunk(0..u64::MAX, -1), chunk(Range { start: 5, end: 3 }, 9)],
            used: vec![u64::MAX - 1..u64::MAX, 0..1],
            ..Occupancy::default()
        },
        // Used ranges without backing are shown, not hidden.
        Occupancy {
            used: vec![4096..8192],
            ..Occupancy::default()
        },
    ] {
        let svg = occupancy.to_svg("heap");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let drawn = area(&svg, "class=\"u\"") > 0;
        assert_eq!(drawn, !occupancy.used.is_empty(), "{svg}");
    }
}

#[test]
fn a_title_cannot_break_the_picture() {
    let svg = Occupancy::default().to_svg("<a> & \"b\"");
    assert!(svg.contains("&lt;a&gt; &amp; &quot;b&quot;"));
    assert!(!svg.contains("<a>"));
}
