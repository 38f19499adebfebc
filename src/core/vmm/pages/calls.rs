//! The kernel's calls that map pages.

use std::io;
use std::ops::Range;
use std::ptr;

use super::Fork;

/// Maps pages without a file, which are huge ones if the kernel has them, at addresses of the caller's.
pub(super) fn map_anonymous(range: &Range<u64>, fork: Fork) -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let sharing = match fork {
        Fork::Zeros => libc::MAP_PRIVATE,
        Fork::Shared => libc::MAP_SHARED,
    };
    let flags = sharing | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    map(
        range.start,
        range.end - range.start,
        protection,
        flags,
        None,
    )?;
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
pub(super) fn advise(range: &Range<u64>, advice: libc::c_int) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(range.start as usize);
    // SAFETY: the range is a mapping of the caller's; the kinds of advice here change no byte of it.
    match unsafe { libc::madvise(start, (range.end - range.start) as usize, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Maps memory: anonymous, or a file from its start on. With MAP_FIXED the caller owns the addresses.
pub(super) fn map(
    at: u64,
    size: u64,
    protection: libc::c_int,
    flags: libc::c_int,
    file: Option<libc::c_int>,
) -> io::Result<u64> {
    let (at, size, fd) = (
        ptr::with_exposed_provenance_mut(at as usize),
        size as usize,
        file.unwrap_or(-1),
    );
    // SAFETY: without MAP_FIXED nothing is replaced; with it, the caller owns the addresses, which no reference points to.
    let base = unsafe { libc::mmap(at, size, protection, flags, fd, 0) };
    match base {
        libc::MAP_FAILED => Err(io::Error::last_os_error()),
        base => Ok(base.expose_provenance() as u64),
    }
}
