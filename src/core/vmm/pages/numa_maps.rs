//! Where pages are, as the kernel's file tells where its calls are forbidden.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Result};
use std::ops::Range;

/// Returns how many pages of 4 KiB lie on each node, of all mappings that a range has a part of: the kernel does not tell the
/// range's pages from others of a mapping.
///
/// Source: `/proc/self/numa_maps`.
///
/// # Errors
/// Those of reading the file.
pub(super) fn pages_by_node(range: &Range<u64>) -> Result<BTreeMap<i32, u64>> {
    let maps = BufReader::new(File::open("/proc/self/numa_maps")?);
    parse(maps.lines(), range)
}

fn parse(
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
    fn pages_are_counted_by_the_mappings_of_a_range() {
        let maps = "\
            100000 default file=/N9=9 mapped=1 N7=1 kernelpagesize_kB=4\n\
            200000 default anon=1024 dirty=1024 active=0 N0=512 N1=512 kernelpagesize_kB=4\n\
            600000 bind:1 file=/memfd:x\\040y\\040(deleted) dirty=512 N1=512 kernelpagesize_kB=4\n\
            800000 default anon=3 N12=3 kernelpagesize_kB=4\n";
        let found = |range| {
            let lines = maps.lines().map(|line| Ok(line.to_owned()));
            Vec::from_iter(parse(lines, &range).unwrap())
        };
        assert_eq!(found(0x40_0000..0x60_0000), [(0, 512), (1, 512)]);
        assert_eq!(found(0x60_0000..0x80_0000), [(1, 512)]);
        assert_eq!(found(0x40_0000..0x80_0000), [(0, 512), (1, 1024)]);
        assert_eq!(found(0x80_0000..0xa0_0000), [(12, 3)]);
        assert_eq!(found(0..0x10_0000), []);
    }
}
