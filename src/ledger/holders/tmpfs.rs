//! Filesystems of shared memory.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::MemfdFlags;

use crate::procs::read;

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
mod tests {
    use super::*;

    #[test]
    fn each_tmpfs_counts_once() {
        let device = fs::metadata("/dev/shm").unwrap().dev();
        // Another filesystem is mounted over the last one.
        let text = "a /dev/shm tmpfs rw 0 0\nb /dev/shm tmpfs rw 0 0\nnone\nc /proc tmpfs rw 0 0\n";
        let found = Tmpfs::of_mounts(text);
        let only = &found.devices - &huge_page_devices();
        assert_eq!(only, HashSet::from([device]));
        let all = Tmpfs::of_this_process();
        assert!(all.devices.contains(&device) && all.bytes.is_some());
    }

    #[test]
    fn memfds_of_huge_pages_are_told_from_others() {
        let device = |flags| {
            let file = rustix::fs::memfd_create("test", flags).ok()?;
            Some(rustix::fs::fstat(file).unwrap().st_dev)
        };
        let counted = Tmpfs::of_this_process().devices;
        let plain = device(MemfdFlags::CLOEXEC).unwrap();
        assert!(!counted.contains(&plain));
        match device(MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) {
            Some(huge) => assert!(counted.contains(&huge)),
            None => println!("skipped: this kernel has no huge pages"),
        }
    }
}
