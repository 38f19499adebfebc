//! A process's open files and mappings, and filesystems of shared memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{fs, io};

use egmem_core::host::status_field;
use rustix::fs::MemfdFlags;

use crate::driver::NodeId;
use crate::procs::read;

/// The most file descriptors that are looked at.
const MOST_FDS: usize = 16_384;

/// A file: the device's number and the file's.
pub(super) type Inode = (u64, u64);

/// The bytes of a file of shared memory. A measured size is less than an estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Size {
    /// Whether the bytes are those of addresses, since the kernel did not permit to ask for those that exist.
    pub is_estimate: bool,
    pub bytes: u64,
}

/// What a process has open.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Fds {
    /// How many were looked at.
    pub looked_at: u64,
    /// How many are `/dev/nvidia*`.
    pub devices: u64,
    /// How many wait in its Unix sockets.
    pub in_flight: u64,
    /// Shared memory, with the bytes that exist.
    pub shared: HashMap<Inode, u64>,
}

impl Fds {
    /// Looks at the open files in `process`, a folder of `/proc`.
    pub(super) fn of(process: &Path) -> io::Result<Self> {
        let mut found = Self::default();
        for fd in fs::read_dir(process.join("fd"))?.take(MOST_FDS).flatten() {
            found.looked_at += 1;
            // It may be closed by now.
            let Ok(link) = fs::read_link(fd.path()) else {
                continue;
            };
            match link.as_os_str().as_bytes() {
                link if link.starts_with(b"/dev/nvidia") => found.devices += 1,
                link if is_shared(link) => {
                    if let Ok(file) = fs::metadata(fd.path()) {
                        let bytes = file.blocks().saturating_mul(512);
                        found.shared.insert((file.dev(), file.ino()), bytes);
                    }
                }
                link if link.starts_with(b"socket:") => {
                    let info = process.join("fdinfo").join(fd.file_name());
                    found.in_flight += read(&info, 4096).map_or(0, |info| in_flight(&info));
                }
                _ => {}
            }
        }
        Ok(found)
    }
}

/// What the kernel calls huge pages without a file, shared or not.
pub(super) const HUGE: &[u8] = b"/anon_hugepage";

/// Returns whether a path in `/proc` is that of shared memory: a memfd, a file of `/dev/shm`, a System V segment, shared pages
/// without a file. [`HUGE`] pages are shared if the mapping is.
pub(super) fn is_shared(path: &[u8]) -> bool {
    let starts: [&[u8]; 5] = [
        b"/memfd:",
        b"/dev/shm/",
        b"/SYSV",
        b"/dev/zero (deleted)",
        HUGE,
    ];
    starts.iter().any(|start| path.starts_with(start))
}

/// Returns how many file descriptors wait in a Unix socket, from its `fdinfo`. Linux tells it since version 5.6.
fn in_flight(info: &[u8]) -> u64 {
    let info = String::from_utf8_lossy(info);
    let count = status_field(&info, "scm_fds").and_then(|value| value.parse().ok());
    count.unwrap_or(0)
}

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
    pub shared: HashMap<Inode, Shared>,
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

/// The most bytes of a list of mounts.
const MOUNTS: u64 = 16 << 20;

/// The type of a tmpfs. Source: statfs(2).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The tmpfs and the pools of huge pages, whose files are counted by filesystem, and not by process.
#[derive(Debug, Default)]
pub(super) struct Tmpfs {
    /// Their devices' numbers.
    pub devices: HashSet<u64>,
    /// The bytes of the files in tmpfs. `None`: unknown.
    pub bytes: Option<u64>,
}

impl Tmpfs {
    /// Returns all that this process sees, each once.
    pub(super) fn of_this_process() -> Self {
        match read(Path::new("/proc/self/mounts"), MOUNTS) {
            Ok(mounts) => Self::of_mounts(&String::from_utf8_lossy(&mounts)),
            Err(_) => Self::below(Path::new("/")),
        }
    }

    /// Returns the one at `dev/shm` below a folder, without its bytes.
    pub(super) fn below(root: &Path) -> Self {
        let found = fs::metadata(root.join("dev/shm")).ok();
        let mut devices = huge_page_devices();
        devices.extend(found.map(|found| found.dev()));
        Self {
            devices,
            bytes: None,
        }
    }

    fn of_mounts(mounts: &str) -> Self {
        let (mut devices, mut sum) = (huge_page_devices(), 0_u64);
        for line in mounts.lines() {
            let mut fields = line.split_ascii_whitespace().skip(1);
            let (Some(place), Some("tmpfs" | "devtmpfs")) = (fields.next(), fields.next()) else {
                continue;
            };
            let Ok(device) = fs::metadata(place).map(|found| found.dev()) else {
                continue;
            };
            // Another filesystem may be mounted over it.
            if let Ok(found) = rustix::fs::statfs(place)
                && found.f_type == TMPFS_MAGIC
                && devices.insert(device)
            {
                let blocks = found.f_blocks.saturating_sub(found.f_bfree);
                sum = sum.saturating_add(blocks.saturating_mul(found.f_frsize as u64));
            }
        }
        Self {
            devices,
            bytes: Some(sum),
        }
    }
}

/// Returns the devices of the kernel's own mounts for memfds and System V segments of huge pages, one for each size.
fn huge_page_devices() -> HashSet<u64> {
    let sizes = [
        MemfdFlags::HUGE_64KB,
        MemfdFlags::HUGE_2MB,
        MemfdFlags::HUGE_32MB,
        MemfdFlags::HUGE_512MB,
        MemfdFlags::HUGE_1GB,
        MemfdFlags::HUGE_16GB,
    ];
    let device = |size| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | size;
        // An empty file takes no page. A size that this machine lacks is refused.
        let file = rustix::fs::memfd_create("egmem", flags).ok()?;
        Some(rustix::fs::fstat(file).ok()?.st_dev)
    };
    sizes.into_iter().filter_map(device).collect()
}

#[cfg(test)]
mod tests;
