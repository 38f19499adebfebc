//! Creates pages on a node, and checks where they are if a thread may not choose the node.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::advise;
use crate::driver::NodeId;
use crate::{Error, Result};

/// The bits of a mask of nodes: more nodes than any kernel supports.
const NODES: usize = 1024;
const BITS: usize = u64::BITS as usize;

/// The sizes of pages.
const SMALL: usize = 4096;
const HUGE: usize = 2 << 20;

/// Has the kernel make huge pages of small ones, at once and whatever its settings; from Linux 6.1 on.
const MADV_COLLAPSE: libc::c_int = 25;

/// Why pages were created by a thread that is not bound to their node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unbound {
    /// No thread could be started, so the caller created them, whose own policy stays.
    NoThread,
    /// The kernel, or a container's filter of system calls, refused.
    NotPermitted,
}

impl Unbound {
    const fn words(self) -> &'static str {
        match self {
            Self::NoThread => {
                "no thread could be started to create them there (raise RLIMIT_NPROC or pids.max)"
            }
            Self::NotPermitted => "this process may not choose nodes (set_mempolicy)",
        }
    }
}

/// Binds all pages that the calling thread creates from now on to a node.
///
/// Source: `set_mempolicy(2)`. It takes no lock of the address space, as `mbind` does, for which other threads that
/// create pages would wait.
///
/// # Errors
/// [`Unbound::NotPermitted`].
pub(super) fn bind_thread(node: NodeId) -> Result<(), Unbound> {
    let (mask, bits) = (mask(node), NODES as u64 + 1);
    // SAFETY: the kernel reads the mask, which has one bit less than it is told, as it expects.
    let result = unsafe {
        libc::syscall(
            libc::SYS_set_mempolicy,
            libc::MPOL_BIND,
            mask.as_ptr(),
            bits,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    tracing::debug!(%error, %node, "a thread cannot choose the node of pages");
    Err(Unbound::NotPermitted)
}

/// Returns the kernel's mask of one node.
fn mask(node: NodeId) -> [u64; NODES / BITS] {
    let mut mask = [0_u64; NODES / BITS];
    let id = usize::try_from(node.0).unwrap_or(NODES);
    if let Some(word) = mask.get_mut(id / BITS) {
        *word |= 1 << (id % BITS);
    }
    mask
}

/// Binds the file that is mapped at a range to a node, for as long as it exists: pages that are swapped in again come there, and
/// those of holes, whichever process touches them. Pages that exist stay where they are.
///
/// Source: `mbind(2)`. It takes the lock of the address space, so growth of memory that is pinned does without.
pub(super) fn bind_file(node: NodeId, range: &Range<u64>) {
    let mask = mask(node);
    // SAFETY: the range is a mapping of the caller's, and the kernel reads the mask, which has one bit less than it is told, as
    // it expects; no page moves.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            range.start,
            range.end - range.start,
            libc::MPOL_BIND,
            mask.as_ptr(),
            NODES as u64 + 1,
            0,
        )
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, %node, "pages that are swapped out may come back on another node");
    }
}

fn failed(node: NodeId, what: &str, error: &io::Error) -> Error {
    Error::system(format!("{what} NUMA node {node}"), error)
}

/// Creates the pages of a range, a whole number of huge pages, or keeps those that it has.
pub(super) fn populate(node: NodeId, range: &Range<u64>, shmem: bool) -> Result<()> {
    if shmem {
        // The kernel gives such pages huge ones by a setting that is off by default, but makes some of small ones.
        for page in range.clone().step_by(HUGE) {
            create(node, &(page..page + SMALL as u64))?;
        }
        advise(range, MADV_COLLAPSE)
            .unwrap_or_else(|error| tracing::debug!(%error, "no huge pages"));
    }
    create(node, range)
}

/// Creates the pages of a range, or keeps those that it has. A page that the kernel refuses is an error, and not the end of
/// the process, as a touch of it would be.
fn create(node: NodeId, range: &Range<u64>) -> Result<()> {
    loop {
        match advise(range, libc::MADV_POPULATE_WRITE) {
            Ok(()) => return Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                // Kernels before 5.14.
                Some(libc::EINVAL) => break,
                _ => return Err(failed(node, "creating pages on", &error)),
            },
        }
    }
    range.clone().step_by(SMALL).for_each(touch);
    Ok(())
}

/// Creates the page of an address in a mapping of the caller's that can be written.
fn touch(page: u64) {
    let byte = ptr::with_exposed_provenance::<AtomicU8>(page as usize);
    // SAFETY: the caller's promise; the byte lives during the call, and other processes may write it too, hence atomically.
    // A fresh byte is 0, and compilers leave out operations that can change no value, but not this one.
    let _ = unsafe { (*byte).compare_exchange(0, 0, Relaxed, Relaxed) };
}

/// Refuses pages that are on another node, or may be, because of `why`. The kernel tells it of whole mappings: of one with a part
/// in the range, no page may be on another node.
pub(super) fn expect_on(node: NodeId, range: &Range<u64>, why: Unbound) -> Result<()> {
    let found = bytes_by_node(range);
    let found = found.map_err(|error| failed(node, "checking whether pages are on", &error))?;
    let here = found.iter().find(|(at, _)| *at == node.0);
    let here = here.map_or(0, |(_, bytes)| *bytes);
    let wanted = range.end - range.start;
    let detail = match found.iter().find(|(other, _)| *other != node.0) {
        None if here >= wanted => return Ok(()),
        None => format!("{here} of {wanted} bytes are there, and {}", why.words()),
        Some((other, bytes)) => {
            format!("{bytes} bytes are on node {other}, and {}", why.words())
        }
    };
    Err(Error::System {
        what: format!("placing pages on NUMA node {node}"),
        // It does not pass.
        kind: io::ErrorKind::Unsupported,
        detail,
    })
}

/// Returns how many bytes of a range of addresses are mapped in huge pages.
///
/// The kernel counts by mapping: huge pages of a mapping that begins before the range, or ends behind it, count too, up to
/// the bytes of the range.
///
/// Source: `/proc/self/smaps`.
///
/// # Errors
/// Those of reading the file.
pub fn huge_bytes(range: Range<u64>) -> io::Result<u64> {
    let smaps = BufReader::new(File::open("/proc/self/smaps")?);
    huge_bytes_of(smaps.lines(), range)
}

fn huge_bytes_of(
    lines: impl Iterator<Item = io::Result<String>>,
    range: Range<u64>,
) -> io::Result<u64> {
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

/// Returns how many bytes of pages lie on each node, of all mappings that a range has a part of: the kernel does not tell the
/// range's pages from others of a mapping. It counts pages of its own size, 64 KiB on many Grace machines.
///
/// Source: `/proc/self/numa_maps`.
///
/// # Errors
/// Those of reading the file.
fn bytes_by_node(range: &Range<u64>) -> io::Result<Vec<(i32, u64)>> {
    let maps = BufReader::new(File::open("/proc/self/numa_maps")?);
    bytes_of(maps.lines(), range)
}

fn bytes_of(
    lines: impl Iterator<Item = io::Result<String>>,
    range: &Range<u64>,
) -> io::Result<Vec<(i32, u64)>> {
    let mut bytes: Vec<(i32, u64)> = Vec::new();
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
            bytes.clear();
        }
        let (counts, sizes) = (words.clone(), words);
        let mut sizes = sizes.filter_map(|word| word.strip_prefix("kernelpagesize_kB="));
        let kib = sizes.next().and_then(|kib| kib.parse().ok()).unwrap_or(4);
        let counts = counts.filter_map(|word| word.strip_prefix('N')?.split_once('='));
        for (node, count) in counts {
            if let (Ok(node), Ok(count)) = (node.parse(), count.parse::<u64>()) {
                let size = count.saturating_mul(kib << 10);
                match bytes.iter_mut().find(|(known, _)| *known == node) {
                    Some((_, sum)) => *sum += size,
                    None => bytes.push((node, size)),
                }
            }
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::super::addresses::Addresses;
    use super::super::{Fork, create_file, map, map_anonymous};
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Maps a file, or pages without one, at addresses that live as long as the first value.
    fn mapped(bytes: u64, fork: Option<Fork>) -> (Addresses, Range<u64>) {
        let addresses = Addresses::reserve(bytes, 2 * MIB, 0).unwrap();
        let range = addresses.start()..addresses.start() + bytes;
        if let Some(fork) = fork {
            map_anonymous(&range, fork).unwrap();
        } else {
            let file = create_file(NodeId(0), bytes).unwrap();
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let file = Some((file.as_fd(), 0));
            map(
                range.start,
                bytes,
                protection,
                flags | libc::MAP_FIXED,
                file,
            )
            .unwrap();
        }
        (addresses, range)
    }

    #[test]
    fn all_pages_exist_and_are_on_the_node() {
        for fork in [Some(Fork::Zeros), Some(Fork::Shared), None] {
            let shmem = fork != Some(Fork::Zeros);
            let (_addresses, range) = mapped(16 * MIB, fork);
            populate(NodeId(0), &range, shmem).unwrap();
            let huge = huge_bytes(range.clone()).unwrap();
            println!("{fork:?}: {huge} of {} bytes are huge pages", 16 * MIB);
            assert!(expect_on(NodeId(99), &range, Unbound::NotPermitted).is_err());
            if bind_thread(NodeId(0)).is_ok() {
                let (_addresses, range) = mapped(16 * MIB, fork);
                populate(NodeId(0), &range, shmem).unwrap();
                expect_on(NodeId(0), &range, Unbound::NotPermitted).unwrap();
            }
        }
    }

    #[test]
    fn pages_that_do_not_exist_are_refused_and_not_said_to_be_on_a_node() {
        let (_addresses, range) = mapped(4 * MIB, None);
        populate(NodeId(0), &(range.start..range.start + 2 * MIB), false).unwrap();
        let error = expect_on(NodeId(0), &range, Unbound::NotPermitted).unwrap_err();
        assert!(!error.to_string().contains("node -"), "{error}");
    }

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
            800000 default anon=3 N12=3 kernelpagesize_kB=64\n";
        let found = |range| {
            let lines = maps.lines().map(|line| Ok(line.to_owned()));
            bytes_of(lines, &range).unwrap()
        };
        assert_eq!(found(0x40_0000..0x60_0000), [(0, 2 * MIB), (1, 2 * MIB)]);
        assert_eq!(found(0x60_0000..0x80_0000), [(1, 2 * MIB)]);
        assert_eq!(found(0x40_0000..0x80_0000), [(0, 2 * MIB), (1, 4 * MIB)]);
        assert_eq!(found(0x80_0000..0xa0_0000), [(12, 3 << 16)]);
        assert_eq!(found(0..0x10_0000), []);
    }
}
