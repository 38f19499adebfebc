//! Which pages a range has, and on which nodes, as the kernel reports it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Result};
use std::ops::Range;

/// Returns how many bytes of a range of addresses are mapped in huge pages.
///
/// The kernel counts by mapping: huge pages of a mapping that begins before the range, or ends behind it, count too, up to
/// the bytes of the range.
///
/// Source: `/proc/self/smaps`.
///
/// # Errors
/// Those of reading the file.
pub fn huge_bytes(range: Range<u64>) -> Result<u64> {
    let smaps = BufReader::new(File::open("/proc/self/smaps")?);
    huge_bytes_of(smaps.lines(), range)
}

fn huge_bytes_of(lines: impl Iterator<Item = Result<String>>, range: Range<u64>) -> Result<u64> {
    let mut inside = 0;
    let mut sum = 0;
    for line in lines {
        let line = line?;
        if let Some(mapping) = addresses(&line) {
            let common = mapping.start.max(range.start)..mapping.end.min(range.end);
            inside = common.end.saturating_sub(common.start);
        } else if inside > 0
            && let Some((name, kib)) = line.split_once(':')
            && matches!(
                name,
                "AnonHugePages"
                    | "ShmemPmdMapped"
                    | "FilePmdMapped"
                    | "Private_Hugetlb"
                    | "Shared_Hugetlb"
            )
        {
            let kib: u64 = kib.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            sum += (kib << 10).min(inside);
        }
    }
    Ok(sum.min(range.end - range.start))
}

/// Returns the addresses in the first line of a mapping.
fn addresses(line: &str) -> Option<Range<u64>> {
    let (range, _) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    Some(number(start)?..number(end)?)
}

/// Returns how many pages of 4 KiB lie on each node, of all mappings that a range has a part of: the kernel does not tell the
/// range's pages from others of a mapping.
///
/// Source: `/proc/self/numa_maps`.
///
/// # Errors
/// Those of reading the file.
pub(super) fn pages_by_node(range: &Range<u64>) -> Result<BTreeMap<i32, u64>> {
    let maps = BufReader::new(File::open("/proc/self/numa_maps")?);
    pages_of(maps.lines(), range)
}

fn pages_of(
    lines: impl Iterator<Item = Result<String>>,
    range: &Range<u64>,
) -> Result<BTreeMap<i32, u64>> {
    let mut pages = BTreeMap::new();
    for line in lines {
        let line = line?;
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        let Ok(start) = u64::from_str_radix(first, 16) else {
            continue;
        };
        if start >= range.end {
            break;
        }
        if start <= range.start {
            // A mapping before this one ends before the range.
            pages.clear();
        }
        let counts = words.filter_map(|word| word.strip_prefix('N')?.split_once('='));
        for (node, count) in counts {
            if let (Ok(node), Ok(count)) = (node.parse(), count.parse::<u64>()) {
                *pages.entry(node).or_default() += count;
            }
        }
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_of_the_mappings_in_a_range_are_summed() {
        let smaps = "\
            200000-600000 rw-p 00000000 00:00 0 \nRss:   4096 kB\nAnonHugePages:      2048 kB\n\
            ShmemPmdMapped:        0 kB\nVmFlags: rd wr\n\
            600000-a00000 rw-s 00000000 00:01 7 /memfd:x y (deleted)\nAnonHugePages: 0 kB\nShmemPmdMapped: 4096 kB\n";
        let sum =
            |range| huge_bytes_of(smaps.lines().map(|line| Ok(line.to_owned())), range).unwrap();
        assert_eq!(sum(0x20_0000..0xa0_0000), 6 << 20);
        assert_eq!(sum(0x20_0000..0x60_0000), 2 << 20);
        assert_eq!(sum(0x60_0000..0x80_0000), 2 << 20);
        assert_eq!(sum(0xa0_0000..0xc0_0000), 0);
        assert!(huge_bytes(0..1 << 47).is_ok());
    }

    #[test]
    fn pages_are_counted_by_the_mappings_of_a_range() {
        let maps = "\
            100000 default file=/N9=9 mapped=1 N7=1 kernelpagesize_kB=4\n\
            200000 default anon=1024 dirty=1024 active=0 N0=512 N1=512 kernelpagesize_kB=4\n\
            600000 bind:1 file=/memfd:x\\040y\\040(deleted) dirty=512 N1=512 kernelpagesize_kB=4\n\
            800000 default anon=3 N12=3 kernelpagesize_kB=4\n";
        let found = |range| {
            let lines = maps.lines().map(|line| Ok(line.to_owned()));
            Vec::from_iter(pages_of(lines, &range).unwrap())
        };
        assert_eq!(found(0x40_0000..0x60_0000), [(0, 512), (1, 512)]);
        assert_eq!(found(0x60_0000..0x80_0000), [(1, 512)]);
        assert_eq!(found(0x40_0000..0x80_0000), [(0, 512), (1, 1024)]);
        assert_eq!(found(0x80_0000..0xa0_0000), [(12, 3)]);
        assert_eq!(found(0..0x10_0000), []);
    }
}
