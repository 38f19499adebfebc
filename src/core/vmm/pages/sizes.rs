//! Which pages a range has, as the kernel reports it.

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
    parse(smaps.lines(), range)
}

fn parse(lines: impl Iterator<Item = Result<String>>, range: Range<u64>) -> Result<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_of_the_mappings_in_a_range_are_summed() {
        let smaps = "\
            200000-600000 rw-p 00000000 00:00 0 \nRss:   4096 kB\nAnonHugePages:      2048 kB\n\
            ShmemPmdMapped:        0 kB\nVmFlags: rd wr\n\
            600000-a00000 rw-s 00000000 00:01 7 /memfd:x y (deleted)\nAnonHugePages: 0 kB\nShmemPmdMapped: 4096 kB\n";
        let sum = |range| parse(smaps.lines().map(|line| Ok(line.to_owned())), range).unwrap();
        assert_eq!(sum(0x20_0000..0xa0_0000), 6 << 20);
        assert_eq!(sum(0x20_0000..0x60_0000), 2 << 20);
        assert_eq!(sum(0x60_0000..0x80_0000), 2 << 20);
        assert_eq!(sum(0xa0_0000..0xc0_0000), 0);
        assert!(huge_bytes(0..1 << 47).is_ok());
    }
}
