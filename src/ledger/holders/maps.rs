//! Parsers of a process's mappings, without I/O.

use std::collections::BTreeMap;

use super::fds::{HUGE, Inode, is_shared};
use crate::driver::NodeId;

const DRIVER: &[u8] = b"/dev/nvidiactl";
const MANAGED: &[u8] = b"/dev/nvidia-uvm";

/// What the kernel adds to the path of a file that has been removed.
const DELETED: &[u8] = b" (deleted)";

/// What a process maps.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Maps {
    /// How many mappings were looked at.
    pub looked_at: u64,
    /// The bytes of the driver's host memory.
    pub driver: u64,
    /// The bytes of managed memory.
    pub managed: u64,
    /// Whether other parts of `/dev/nvidia*` are mapped, such as a GPU's registers.
    pub has_device: bool,
    /// Shared memory.
    pub shared: BTreeMap<Inode, Shared>,
    pub has_torch: bool,
    pub has_cupy: bool,
}

/// A file of shared memory that a process maps.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Shared {
    /// The bytes of addresses.
    pub addresses: u64,
    /// The end of the last part of the file that is mapped.
    pub end: u64,
    /// One range, as `/proc/PID/map_files` names it.
    pub range: String,
    /// Whether it has no name: shared pages without a file, which `cuMemHostAlloc` pins too.
    pub is_unnamed: bool,
}

impl Maps {
    /// Parses `/proc/PID/maps`. Source: proc_pid_maps(5).
    pub(super) fn parse(text: &[u8]) -> Self {
        let mut maps = Self::default();
        for line in text.split(|&byte| byte == b'\n') {
            maps.looked_at += 1;
            // Most have no path, or that of a library.
            if let Some(at) = line.iter().position(|&byte| byte == b'/') {
                let (head, path) = line.split_at(at);
                maps.add(&String::from_utf8_lossy(head), path);
            }
        }
        maps
    }

    fn add(&mut self, head: &str, path: &[u8]) {
        let mut fields = head.split_ascii_whitespace();
        let (Some(range), Some(access)) = (fields.next(), fields.next()) else {
            return;
        };
        let bytes = match length(range) {
            // Reserved addresses have no memory.
            Some(bytes) if !access.starts_with("---") => bytes,
            _ => 0,
        };
        if path.starts_with(b"/dev/nvidia") {
            self.has_device = true;
            // As in a container whose /dev was mounted anew.
            match path.strip_suffix(DELETED).unwrap_or(path) {
                DRIVER => self.driver = self.driver.saturating_add(bytes),
                MANAGED => self.managed = self.managed.saturating_add(bytes),
                _ => {}
            }
        } else if is_shared(path) && (access.ends_with('s') || !path.starts_with(HUGE)) {
            let offset = fields.next().map(|offset| u64::from_str_radix(offset, 16));
            if let Some(inode) = inode(fields.next(), fields.next()) {
                let shared = self.shared.entry(inode).or_insert_with(|| Shared {
                    range: range.to_owned(),
                    is_unnamed: path.starts_with(b"/dev/zero"),
                    ..Shared::default()
                });
                shared.addresses = shared.addresses.saturating_add(bytes);
                let offset = offset.and_then(Result::ok).unwrap_or(0);
                shared.end = shared.end.max(offset.saturating_add(bytes));
            }
        } else {
            let has = |word: &[u8]| path.windows(word.len()).any(|part| part == word);
            self.has_torch |= has(b"/libtorch_cuda") || has(b"/libc10_cuda");
            self.has_cupy |= has(b"/cupy/") || has(b"/cupy_backends/");
        }
    }
}

/// Returns the length of a range `start-end` in hexadecimal digits.
fn length(range: &str) -> Option<u64> {
    let (start, end) = range.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    number(end)?.checked_sub(number(start)?)
}

/// Returns the file of `major:minor`, in hexadecimal digits, and a number.
fn inode(device: Option<&str>, number: Option<&str>) -> Option<Inode> {
    let (major, minor) = device?.split_once(':')?;
    let part = |text| u32::from_str_radix(text, 16).ok();
    let device = rustix::fs::makedev(part(major)?, part(minor)?);
    Some((device, number?.parse().ok()?))
}

/// Parses `/proc/PID/numa_maps`: the bytes of the driver's memory and of managed memory on each node. Source: numa(7).
pub(super) fn by_node(text: &[u8]) -> BTreeMap<NodeId, u64> {
    let mut nodes = BTreeMap::new();
    for line in String::from_utf8_lossy(text).lines() {
        let words = || line.split_ascii_whitespace();
        let is_gpu = |word: &str| {
            // The kernel escapes the space of " (deleted)" here.
            let path = word.trim_end_matches("\\040(deleted)");
            matches!(path, "file=/dev/nvidiactl" | "file=/dev/nvidia-uvm")
        };
        if !words().any(is_gpu) {
            continue;
        }
        let kib = words().find_map(|word| word.strip_prefix("kernelpagesize_kB="));
        let kib = kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(4);
        let on_node = |word: &str| {
            let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
            let bytes = pages.parse::<u64>().ok()?.saturating_mul(kib << 10);
            Some((NodeId(node.parse().ok()?), bytes))
        };
        for (node, bytes) in words().filter_map(on_node) {
            let sum: &mut u64 = nodes.entry(node).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_told_apart() {
        let text = "\
            200000000-200200000 rw-s 00000000 00:06 506                        /dev/nvidiactl\n\
            200200000-200400000 ---s 00000000 00:06 506                        /dev/nvidiactl\n\
            200600000-200800000 rw-s 00000000 00:06 506                        /dev/nvidiactl (deleted)\n\
            200400000-200401000 rw-s 00000000 00:06 512                        /dev/nvidia0\n\
            7f0000000000-7f0000800000 rw-s 00000000 00:06 520                  /dev/nvidia-uvm\n\
            7f0001000000-7f0001100000 rw-s 00000000 00:01 9                    /memfd:a b (deleted)\n\
            7f0002000000-7f0002100000 r--s 00100000 00:01 9                    /memfd:a b (deleted)\n\
            7f0003000000-7f0003001000 rw-s 00000000 00:1b 10                   /dev/shm/torch_1\n\
            7f0003200000-7f0003600000 rw-s 00000000 00:11 12                   /anon_hugepage (deleted)\n\
            7f0003600000-7f0003800000 rw-p 00000000 00:11 13                   /anon_hugepage (deleted)\n\
            7f0004000000-7f0004001000 r-xp 00000000 08:01 11                   /opt/lib/libtorch_cuda.so\n\
            7f0005000000-7f0005001000 rw-p 00000000 00:00 0 \n\
            7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0                    [stack]\n\
            nonsense /dev/nvidiactl\n";
        let maps = Maps::parse(text.as_bytes());
        assert_eq!((maps.driver, maps.managed), (4 << 20, 8 << 20));
        assert!(maps.has_device && maps.has_torch && !maps.has_cupy);
        let shared: Vec<_> = maps
            .shared
            .values()
            .map(|shared| shared.addresses)
            .collect();
        assert_eq!(shared, [2 << 20, 4 << 20, 4096]);
        let memfd = &maps.shared[&(1, 9)];
        assert_eq!(memfd.range, "7f0001000000-7f0001100000");
        assert!(!memfd.is_unnamed);
    }

    #[test]
    fn pages_are_counted_by_node() {
        let text = "\
            7f00 default file=/dev/nvidiactl mapped=512 N0=500 N2=12 kernelpagesize_kB=64\n\
            7f01 bind:1 file=/dev/nvidia-uvm\\040(deleted) mapped=1 N1=1 kernelpagesize_kB=4\n\
            7f02 default file=/dev/nvidia0\n7f03 default heap anon=3 N0=3 kernelpagesize_kB=4\n";
        let expected = [
            (NodeId(0), 500 << 16),
            (NodeId(1), 4096),
            (NodeId(2), 12 << 16),
        ];
        assert_eq!(by_node(text.as_bytes()), BTreeMap::from(expected));
    }

    proptest::proptest! {
        #[test]
        fn damaged_texts_never_panic(text in "[0-9a-f-]{0,40} ?[rw-]{0,4} ?[0-9:=N ]{0,40}(/dev/nvidiactl|/memfd:x|file=/dev/nvidiactl N1=9)?") {
            let _ = (Maps::parse(text.as_bytes()), by_node(text.as_bytes()));
        }
    }
}
