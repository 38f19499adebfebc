//! Pages of this process on a host node, and the file behind pages that processes share: a memfd that nobody can shorten. A
//! process that has it can punch holes, in which the CPU sees zeros, and GPUs that have registered the pages the old bytes.
//!
//! Its name tells an importer that the fd is such memory, and the node that the pages were bound to.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

use super::{Fork, GRANULARITY, huge_page_of};
use crate::driver::{Driver, NodeId};
use crate::{Error, Result};

const NAME: &str = "egmem-pages node ";

/// The unit in which the kernel counts a file's pages, swapped out or not.
const BLOCK: u64 = 512;

/// A file with these keeps its size for ever.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Pages on a host node.
#[derive(Debug)]
pub struct Pages {
    pub(super) node: NodeId,
    /// A sealed memfd; `None`: anonymous pages, which exist while they are mapped.
    pub(super) file: Option<File>,
    pub(super) fork: Fork,
    /// Whether anonymous pages are mapped now. A second mapping would have pages of its own.
    mapped: AtomicBool,
    /// Whether the file's pages exist on the node. They outlive their mappings.
    pub(super) placed: AtomicBool,
}

impl Pages {
    /// Returns pages without a file, which no other process can map.
    pub const fn private(node: NodeId, fork: Fork) -> Self {
        Self {
            node,
            file: None,
            fork,
            mapped: AtomicBool::new(false),
            placed: AtomicBool::new(false),
        }
    }

    /// Creates a file of `bytes`, whose pages another process can map. They exist once they are mapped and touched.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn shareable(node: NodeId, bytes: u64) -> Result<Self> {
        Ok(Self {
            file: Some(create(node, bytes)?),
            ..Self::private(node, Fork::Shared)
        })
    }

    /// Returns the pages behind an fd that [`export`](Self::export) made in any process; `None` for any other fd.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they are not `bytes` bytes, if some do not exist, or if another process could take
    /// them away.
    pub fn import(driver: &Driver, fd: BorrowedFd<'_>, bytes: u64) -> Result<Option<Self>> {
        let Some((file, node)) = open(fd, bytes)? else {
            return Ok(None);
        };
        // Those of a simulated machine come when they are touched.
        if !driver.is_simulated() {
            expect_whole(&file)?;
        }
        Ok(Some(Self {
            file: Some(file),
            placed: AtomicBool::new(true),
            ..Self::private(node, Fork::Shared)
        }))
    }

    /// Returns the node that the pages are bound to.
    pub const fn node(&self) -> NodeId {
        self.node
    }

    /// Claims private pages for a mapping, which releases them.
    pub(super) fn claim(&self) -> Result<()> {
        if self.file.is_none() && self.mapped.swap(true, AcqRel) {
            let why = "it is mapped already, and private registered memory has one mapping: make it shareable";
            return Err(Error::invalid("memory", why));
        }
        Ok(())
    }

    pub(super) fn release(&self) {
        self.mapped.store(false, Release);
    }
}

/// Creates a sealed file of `bytes`.
pub(super) fn create(node: NodeId, bytes: u64) -> Result<File> {
    let failed =
        |error: io::Error| Error::system(format!("creating a memfd of {bytes} bytes"), &error);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create(format!("{NAME}{node}"), flags);
    let file = File::from(fd.map_err(|error| failed(error.into()))?);
    file.set_len(bytes).map_err(failed)?;
    fcntl_add_seals(&file, SEALS).map_err(|error| failed(error.into()))?;
    Ok(file)
}

/// Opens a file of [`create`], from any process; `None` for any other fd.
fn open(fd: BorrowedFd<'_>, bytes: u64) -> Result<Option<(File, NodeId)>> {
    let Some(node) = node_in_name(fd) else {
        return Ok(None);
    };
    let failed = |error: io::Error| Error::system("looking at the fd of memory", &error);
    let file = File::from(fd.try_clone_to_owned().map_err(failed)?);
    let is_sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
    // In huge pages of the administrator's supply another process can make holes that nothing can fill.
    if !is_sealed || huge_page_of(&file)?.is_some() {
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

/// Refuses a file of which pages are missing: the first process that touches them would create them, on any node.
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

    use rustix::fs::{FallocateFlags, fallocate};

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
            fallocate(&file, mode, at, 2 * MIB).unwrap();
        };
        let refused = || {
            let error = expect_whole(&file).unwrap_err();
            assert!(
                matches!(error, Error::InvalidArgument { what: "fd", .. }),
                "{error}"
            );
        };
        refused();
        allocate(FallocateFlags::empty(), 0);
        refused();
        allocate(FallocateFlags::empty(), 2 * MIB);
        expect_whole(&file).unwrap();
        allocate(
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            2 * MIB,
        );
        refused();
    }

    #[test]
    fn other_files_are_not_memory_and_unsealed_ones_are_refused() {
        let other = tempfile::tempfile().unwrap();
        assert!(open(other.as_fd(), 0).unwrap().is_none());
        let named = |name: &str| File::from(memfd_create(name, MemfdFlags::ALLOW_SEALING).unwrap());
        for name in [
            "egmem-sim-1",
            "egmem-pages node -1",
            "egmem-pages node x",
            "egmem-pages",
        ] {
            assert!(open(named(name).as_fd(), 0).unwrap().is_none(), "{name:?}");
        }
        let unsealed = named("egmem-pages node 0");
        unsealed.set_len(2 * MIB).unwrap();
        let error = open(unsealed.as_fd(), 2 * MIB).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "fd", .. }),
            "{error}"
        );
    }
}
