//! The file behind pages that processes share: a memfd that nobody can shorten. A process that has it can punch holes, in
//! which the CPU sees zeros, and GPUs that have registered the pages the old bytes.
//!
//! Its name tells an importer that the fd is such memory, and the node that the pages were bound to.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::fs::MetadataExt;

use super::GRANULARITY;
use crate::driver::NodeId;
use crate::pinned::huge_page_of;
use crate::{Error, Result};

const NAME: &str = "egmem-pages node ";

/// The unit in which the kernel counts a file's pages, swapped out or not.
const BLOCK: u64 = 512;

/// A file with these keeps its size for ever.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Creates a sealed file of `bytes`.
pub(super) fn create(node: NodeId, bytes: u64) -> Result<File> {
    let failed =
        |error: io::Error| Error::system(format!("creating a memfd of {bytes} bytes"), &error);
    let name = CString::new(format!("{NAME}{node}")).map_err(|error| failed(error.into()))?;
    // SAFETY: the name ends with 0.
    let fd =
        unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    // SAFETY: the fd is new, and nothing else owns it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes).map_err(failed)?;
    // SAFETY: the fd is open, and the argument is a number.
    if unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, SEALS) } != 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    Ok(file)
}

/// Opens a file of [`create`], from any process; `None` for any other fd.
pub(super) fn open(fd: BorrowedFd<'_>, bytes: u64) -> Result<Option<(File, NodeId)>> {
    let Some(node) = node_in_name(fd) else {
        return Ok(None);
    };
    let failed = |error: io::Error| Error::system("looking at the fd of memory", &error);
    let file = File::from(fd.try_clone_to_owned().map_err(failed)?);
    // SAFETY: the fd is open; the command has no argument.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    // In huge pages of the administrator's supply another process can make holes that nothing can fill.
    if seals < 0 || seals & SEALS != SEALS || huge_page_of(&file)?.is_some() {
        let why = "it is a file whose pages another process can take away";
        return Err(Error::invalid_of(
            "fd",
            why,
            "a sealed memfd, as an export is",
        ));
    }
    let len = file.metadata().map_err(failed)?.len();
    if len != bytes || !GRANULARITY.divides(len) {
        let why = format!("the memory has {len} bytes, not {bytes}");
        return Err(Error::invalid("size", why));
    }
    Ok(Some((file, node)))
}

/// Refuses a file of which pages are missing: whoever touches them first would create them, on any node.
///
/// # Errors
/// [`Error::InvalidArgument`]; [`Error::System`].
pub(super) fn expect_whole(file: &File) -> Result<()> {
    let metadata = file.metadata();
    let metadata =
        metadata.map_err(|error| Error::system("looking at the fd of memory", &error))?;
    let (len, there) = (metadata.len(), metadata.blocks().saturating_mul(BLOCK));
    if there >= len {
        return Ok(());
    }
    let why = format!("of its {len} bytes {there} have pages");
    let valid = "memory whose pages its exporter has created, as an export does";
    Err(Error::invalid_of("fd", why, valid))
}

fn node_in_name(fd: BorrowedFd<'_>) -> Option<NodeId> {
    let name = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    let node = name.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
    let node = node
        .strip_suffix(" (deleted)")
        .unwrap_or(node)
        .parse()
        .ok()?;
    (node >= 0).then_some(NodeId(node))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_file_is_known_by_its_name_and_keeps_its_size() {
        let file = create(NodeId(3), 4 * MIB).unwrap();
        assert!(file.set_len(0).is_err() && file.set_len(8 * MIB).is_err());
        let (opened, node) = open(file.as_fd(), 4 * MIB).unwrap().unwrap();
        assert_eq!(
            (opened.metadata().unwrap().len(), node),
            (4 * MIB, NodeId(3))
        );
        for bytes in [0, 2 * MIB, 6 * MIB] {
            let error = open(file.as_fd(), bytes).unwrap_err();
            assert!(
                matches!(error, Error::InvalidArgument { what: "size", .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_without_all_of_its_pages_is_refused() {
        let file = create(NodeId(0), 4 * MIB).unwrap();
        let allocate = |mode, at: u64| {
            // SAFETY: the fd is open; the other arguments are numbers.
            let result =
                unsafe { libc::fallocate(file.as_raw_fd(), mode, at as i64, 2 * MIB as i64) };
            assert_eq!(result, 0, "{}", io::Error::last_os_error());
        };
        let refused = || {
            let error = expect_whole(&file).unwrap_err();
            assert!(
                matches!(error, Error::InvalidArgument { what: "fd", .. }),
                "{error}"
            );
        };
        refused();
        allocate(0, 0);
        refused();
        allocate(0, 2 * MIB);
        expect_whole(&file).unwrap();
        allocate(
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            2 * MIB,
        );
        refused();
    }

    #[test]
    fn other_files_are_not_memory_and_unsealed_ones_are_refused() {
        let other = tempfile::tempfile().unwrap();
        assert!(open(other.as_fd(), 0).unwrap().is_none());
        let named = |name: &std::ffi::CStr| {
            // SAFETY: the name ends with 0, and nothing else owns the new fd.
            unsafe { File::from_raw_fd(libc::memfd_create(name.as_ptr(), libc::MFD_ALLOW_SEALING)) }
        };
        for name in [
            c"egmem-sim-1",
            c"egmem-pages node -1",
            c"egmem-pages node x",
            c"egmem-pages",
        ] {
            assert!(open(named(name).as_fd(), 0).unwrap().is_none(), "{name:?}");
        }
        let unsealed = named(c"egmem-pages node 0");
        unsealed.set_len(2 * MIB).unwrap();
        let error = open(unsealed.as_fd(), 2 * MIB).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "fd", .. }),
            "{error}"
        );
    }
}
