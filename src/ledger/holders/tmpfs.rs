//! Filesystems of shared memory.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::procs::read;

/// The most bytes of a list of mounts.
const MOUNTS: u64 = 16 << 20;

/// The type of a tmpfs. Source: statfs(2).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The tmpfs whose files are counted by filesystem, and not by process.
#[derive(Debug, Default)]
pub(super) struct Tmpfs {
    /// Their devices' numbers.
    pub devices: HashSet<u64>,
    /// The bytes of their files. `None`: unknown.
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
        Self {
            devices: found.map(|found| found.dev()).into_iter().collect(),
            bytes: None,
        }
    }

    fn of_mounts(mounts: &str) -> Self {
        let (mut devices, mut sum) = (HashSet::new(), 0_u64);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tmpfs_counts_once() {
        let device = fs::metadata("/dev/shm").unwrap().dev();
        // Another filesystem is mounted over the last one.
        let text = "a /dev/shm tmpfs rw 0 0\nb /dev/shm tmpfs rw 0 0\nnone\nc /proc tmpfs rw 0 0\n";
        let found = Tmpfs::of_mounts(text);
        assert_eq!(found.devices, HashSet::from([device]));
        let all = Tmpfs::of_this_process();
        assert!(all.devices.contains(&device) && all.bytes.is_some());
    }
}
