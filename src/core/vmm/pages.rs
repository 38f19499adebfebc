//! Memory of this process behind physical memory: its pages exist from the mapping on, and the driver pins them when a GPU
//! is granted access.
//!
//! ```text
//! Pages ── map: mmap, touched by threads ──▶ PagesMapping ── grant: cuMemHostRegister ──▶ CPU and every GPU
//! ```
//!
//! Behind pages that processes share is a file: a memfd that nobody can shorten. A process that has it can punch holes, in which
//! the CPU sees zeros, and GPUs that have registered the pages the old bytes. Its name tells an importer that the fd is such
//! memory, and the node that the pages were bound to.

mod addresses;
mod mapped;
mod place;
mod pool;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::AcqRel, Ordering::Release};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstatfs, memfd_create};

pub use addresses::Addresses;
pub use mapped::PagesMapping;
pub use place::huge_bytes;

use crate::driver::{Driver, NodeId};
use crate::size::Granularity;
use crate::{Error, Result};

/// The unit of sizes: a huge page.
pub const GRANULARITY: Granularity = Granularity::TWO_MIB;

/// What a forked child has of pages without a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fork {
    /// The same pages, as of the driver's memory.
    #[default]
    Shared,
    /// Zeros of its own. Such pages are created faster.
    Zeros,
}

/// Maps pages without a file, which are huge ones if the kernel has them, at addresses of the caller's.
pub(super) fn map_anonymous(range: &Range<u64>, fork: Fork) -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let sharing = match fork {
        Fork::Zeros => libc::MAP_PRIVATE,
        Fork::Shared => libc::MAP_SHARED,
    };
    let flags = sharing | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let size = range.end - range.start;
    map(range.start, size, protection, flags, None)?;
    advise(range, libc::MADV_HUGEPAGE)
        .unwrap_or_else(|error| tracing::debug!(%error, "no huge pages"));
    match fork {
        // The pages of a child would be copies, whose originals the GPU goes on writing. Its addresses stay taken: safe code
        // of the child may look there.
        Fork::Zeros => advise(range, libc::MADV_WIPEONFORK),
        Fork::Shared => Ok(()),
    }
}

/// Advises the kernel about a mapping of the caller's.
pub(crate) fn advise(range: &Range<u64>, advice: libc::c_int) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(range.start as usize);
    // SAFETY: the range is a mapping of the caller's; the kinds of advice here change no byte of it.
    match unsafe { libc::madvise(start, (range.end - range.start) as usize, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Maps memory: anonymous, or a file from an offset on. With MAP_FIXED the caller owns the addresses.
pub(crate) fn map(
    at: u64,
    size: u64,
    protection: libc::c_int,
    flags: libc::c_int,
    file: Option<(BorrowedFd<'_>, i64)>,
) -> io::Result<u64> {
    let at = ptr::with_exposed_provenance_mut(at as usize);
    let (fd, offset) = file.map_or((-1, 0), |(fd, offset)| (fd.as_raw_fd(), offset));
    // SAFETY: without MAP_FIXED nothing is replaced; with it, the caller owns the addresses, which no reference points to.
    let base = unsafe { libc::mmap(at, size as usize, protection, flags, fd, offset) };
    match base {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        base => Ok(base.expose_provenance() as u64),
    }
}

/// Ends a mapping of the caller's, which nothing uses any more.
pub(crate) fn unmap(start: u64, size: u64) {
    let at = ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: the range is the caller's own, and no reference points to it.
    if size != 0 && unsafe { libc::munmap(at, size as usize) } != 0 {
        let error = io::Error::last_os_error();
        tracing::error!(%error, size, "cannot unmap memory: its addresses stay taken until the process ends");
    }
}

/// Returns the size of a file's huge pages, if it is in hugetlbfs. Only there is the file system's block a page: the
/// block of a network file system may be larger than the pages that the kernel maps.
pub(crate) fn huge_page_of(file: &File) -> Result<Option<u64>> {
    let answer = fstatfs(file)
        .map_err(|error| Error::system("asking for a file's file system", &error.into()))?;
    let block = answer.f_bsize as u64;
    Ok((answer.f_type == libc::HUGETLBFS_MAGIC && block > 0).then_some(block))
}

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
    node: NodeId,
    /// A sealed memfd; `None`: anonymous pages, which exist while they are mapped.
    file: Option<File>,
    fork: Fork,
    /// Whether anonymous pages are mapped now. A second mapping would have pages of its own.
    mapped: AtomicBool,
    /// Whether the file's pages exist on the node. They outlive their mappings.
    placed: AtomicBool,
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
            file: Some(create_file(node, bytes)?),
            ..Self::private(node, Fork::Shared)
        })
    }

    /// Returns the pages behind an fd that [`export`](Self::export) made in any process; `None` for any other fd.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they are not `bytes` bytes, if some do not exist, or if another process could take
    /// them away.
    pub fn import(driver: &Driver, fd: BorrowedFd<'_>, bytes: u64) -> Result<Option<Self>> {
        let Some((file, node)) = open_file(fd, bytes)? else {
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
    fn claim(&self) -> Result<()> {
        if self.file.is_none() && self.mapped.swap(true, AcqRel) {
            let why = "it is mapped already, and private registered memory has one mapping: make it shareable";
            return Err(Error::invalid("memory", why));
        }
        Ok(())
    }

    fn release(&self) {
        self.mapped.store(false, Release);
    }
}

/// Creates a sealed file of `bytes`.
fn create_file(node: NodeId, bytes: u64) -> Result<File> {
    let failed = |error: io::Error| {
        let what = format!("creating a memfd of {bytes} bytes");
        if error.raw_os_error() != Some(libc::EMFILE) {
            return Error::system(what, &error);
        }
        let why = "each chunk of registered memory that can be shared is a file that stays open: raise RLIMIT_NOFILE \
                   (ulimit -n), or set larger chunks";
        Error::failed(what, format!("{error}: {why}"))
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create(format!("{NAME}{node}"), flags);
    let file = File::from(fd.map_err(|error| failed(error.into()))?);
    file.set_len(bytes).map_err(failed)?;
    fcntl_add_seals(&file, SEALS).map_err(|error| failed(error.into()))?;
    Ok(file)
}

/// Opens a file of [`create_file`], from any process; `None` for any other fd.
fn open_file(fd: BorrowedFd<'_>, bytes: u64) -> Result<Option<(File, NodeId)>> {
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
fn expect_whole(file: &File) -> Result<()> {
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
        let file = create_file(NodeId(3), 4 * MIB).unwrap();
        assert!(file.set_len(0).is_err() && file.set_len(8 * MIB).is_err());
        let (opened, node) = open_file(file.as_fd(), 4 * MIB).unwrap().unwrap();
        assert_eq!(
            (opened.metadata().unwrap().len(), node),
            (4 * MIB, NodeId(3))
        );
        for bytes in [0, 2 * MIB, 6 * MIB] {
            let error = open_file(file.as_fd(), bytes).unwrap_err();
            assert!(
                matches!(error, Error::InvalidArgument { what: "size", .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_without_all_of_its_pages_is_refused() {
        let file = create_file(NodeId(0), 4 * MIB).unwrap();
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
        assert!(open_file(other.as_fd(), 0).unwrap().is_none());
        let named = |name: &str| File::from(memfd_create(name, MemfdFlags::ALLOW_SEALING).unwrap());
        for name in [
            "egmem-sim-1",
            "egmem-pages node -1",
            "egmem-pages node x",
            "egmem-pages",
        ] {
            assert!(
                open_file(named(name).as_fd(), 0).unwrap().is_none(),
                "{name:?}"
            );
        }
        let unsealed = named("egmem-pages node 0");
        unsealed.set_len(2 * MIB).unwrap();
        let error = open_file(unsealed.as_fd(), 2 * MIB).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "fd", .. }),
            "{error}"
        );
    }
}
