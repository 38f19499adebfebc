//! A process's file descriptors.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::procs::read;

/// The most file descriptors that are looked at.
const MOST: usize = 16_384;

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
    pub shared: BTreeMap<Inode, u64>,
}

impl Fds {
    /// Looks at the open files in `process`, a folder of `/proc`.
    pub(super) fn of(process: &Path) -> io::Result<Self> {
        let mut found = Self::default();
        for fd in fs::read_dir(process.join("fd"))?.take(MOST).flatten() {
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
    let value = info.lines().find_map(|line| line.strip_prefix("scm_fds:"));
    value
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(0)
}
