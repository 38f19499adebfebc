//! Memory of this process behind physical memory: its pages exist from the mapping on, and the driver pins them when a GPU
//! is granted access.
//!
//! ```text
//! Pages ── map: mmap, touched by threads ──▶ PagesMapping ── grant: cuMemHostRegister ──▶ CPU and every GPU
//! ```

mod addresses;
mod file;
mod mapped;
mod place;
mod pool;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use rustix::fs::fstatfs;

pub use addresses::Addresses;
pub use file::Pages;
pub use mapped::PagesMapping;
pub use place::huge_bytes;

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
