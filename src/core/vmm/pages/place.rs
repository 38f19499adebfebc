//! Creates pages on a node, and checks where they are if a thread may not choose the node.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::calls::advise;
use super::sizes::pages_by_node;
use crate::driver::NodeId;
use crate::{Error, Result};

/// The bits of a mask of nodes: more nodes than any kernel supports.
const NODES: usize = 1024;
const BITS: usize = u64::BITS as usize;

/// The sizes of pages.
const SMALL: usize = 4096;
const HUGE: usize = 2 << 20;

/// Has the kernel make huge pages of small ones, at once and whatever its settings; from Linux 6.1 on.
const MADV_COLLAPSE: libc::c_int = 25;

/// Whether the pages that the calling thread creates are on the node of its choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Policy {
    Bound,
    /// The kernel, or a container's filter of system calls, does not let it choose.
    Forbidden,
}

impl Policy {
    /// Binds all pages that the calling thread creates from now on to a node.
    ///
    /// Source: `set_mempolicy(2)`. It takes no lock of the address space, as `mbind` does, for which other threads that
    /// create pages would wait.
    pub(super) fn of(node: NodeId) -> Self {
        let mask = mask(node);
        // SAFETY: the kernel reads the mask, which has one bit less than it is told, as it expects.
        let result = unsafe {
            libc::syscall(
                libc::SYS_set_mempolicy,
                libc::MPOL_BIND,
                mask.as_ptr(),
                NODES as u64 + 1,
            )
        };
        match result {
            0 => Self::Bound,
            _ => {
                let error = io::Error::last_os_error();
                tracing::debug!(%error, %node, "a thread cannot choose the node of pages");
                Self::Forbidden
            }
        }
    }
}

/// Returns the kernel's mask of one node.
fn mask(node: NodeId) -> [u64; NODES / BITS] {
    let mut mask = [0_u64; NODES / BITS];
    let id = usize::try_from(node.0).unwrap_or(NODES);
    if let Some(word) = mask.get_mut(id / BITS) {
        *word |= 1 << (id % BITS);
    }
    mask
}

/// Binds the file that is mapped at a range to a node, for as long as it exists: pages that are swapped in again come there, and
/// those of holes, whichever process touches them. Pages that exist stay where they are.
///
/// Source: `mbind(2)`. It takes the lock of the address space, so growth of memory that is pinned does without.
pub(super) fn bind_file(node: NodeId, range: &Range<u64>) {
    let mask = mask(node);
    // SAFETY: the range is a mapping of the caller's, and the kernel reads the mask, which has one bit less than it is told, as
    // it expects; no page moves.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            range.start,
            range.end - range.start,
            libc::MPOL_BIND,
            mask.as_ptr(),
            NODES as u64 + 1,
            0,
        )
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, %node, "pages that are swapped out may come back on another node");
    }
}

fn failed(node: NodeId, what: &str, error: &io::Error) -> Error {
    Error::system(format!("{what} NUMA node {node}"), error)
}

/// Creates the pages of a range, a whole number of huge pages, or keeps those that it has.
pub(super) fn populate(node: NodeId, range: &Range<u64>, shmem: bool) -> Result<()> {
    if shmem {
        // The kernel gives such pages huge ones by a setting that is off by default, but makes some of small ones.
        for page in range.clone().step_by(HUGE) {
            create(node, &(page..page + SMALL as u64))?;
        }
        advise(range, MADV_COLLAPSE)
            .unwrap_or_else(|error| tracing::debug!(%error, "no huge pages"));
    }
    create(node, range)
}

/// Creates the pages of a range, or keeps those that it has. A page that the kernel refuses is an error, and not the end of
/// the process, as a touch of it would be.
fn create(node: NodeId, range: &Range<u64>) -> Result<()> {
    loop {
        match advise(range, libc::MADV_POPULATE_WRITE) {
            Ok(()) => return Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => {}
                // Kernels before 5.14.
                Some(libc::EINVAL) => break,
                _ => return Err(failed(node, "creating pages on", &error)),
            },
        }
    }
    range.clone().step_by(SMALL).for_each(touch);
    Ok(())
}

/// Creates the page of an address in a mapping of the caller's that can be written.
fn touch(page: u64) {
    let byte = ptr::with_exposed_provenance::<AtomicU8>(page as usize);
    // SAFETY: the caller's promise; the byte lives during the call, and other processes may write it too, hence atomically.
    // A fresh byte is 0, and compilers leave out operations that can change no value, but not this one.
    let _ = unsafe { (*byte).compare_exchange(0, 0, Relaxed, Relaxed) };
}

/// Refuses pages that are on another node, or may be. Source: `move_pages(2)`, or a file where that is forbidden.
pub(super) fn expect_on(node: NodeId, range: &Range<u64>) -> Result<()> {
    let pages: Vec<u64> = range.clone().step_by(SMALL).collect();
    let mut nodes = vec![-1_i32; pages.len()];
    // SAFETY: without nodes to move to, the kernel only writes where each page is, into a list as long as that of pages.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0,
            pages.len(),
            pages.as_ptr(),
            ptr::null::<i32>(),
            nodes.as_mut_ptr(),
            0,
        )
    };
    if result != 0 {
        let error = io::Error::last_os_error();
        tracing::debug!(%error, "the kernel does not tell where pages are");
        return expect_by_mapping(node, range);
    }
    match nodes.iter().position(|&found| found != node.0) {
        None => Ok(()),
        Some(at) => {
            let why = format!(
                "byte {} is on node {}, and this process may not choose nodes (set_mempolicy)",
                at * SMALL,
                nodes[at]
            );
            Err(Error::failed(
                format!("placing pages on NUMA node {node}"),
                why,
            ))
        }
    }
}

/// As [`expect_on`], by the mappings that the range has a part of: one with pages on other nodes too is refused.
fn expect_by_mapping(node: NodeId, range: &Range<u64>) -> Result<()> {
    let found = pages_by_node(range);
    let found = found.map_err(|error| failed(node, "checking whether pages are on", &error))?;
    let here = found.get(&node.0).copied().unwrap_or(0);
    let wanted = (range.end - range.start) / SMALL as u64;
    let why = match found.iter().find(|&(&other, _)| other != node.0) {
        None if here >= wanted => return Ok(()),
        None => format!("{here} of {wanted} pages are"),
        Some((other, pages)) => format!(
            "{pages} pages are on node {other}, and this process may not choose nodes (set_mempolicy)"
        ),
    };
    Err(Error::failed(
        format!("placing pages on NUMA node {node}"),
        why,
    ))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::super::addresses::Addresses;
    use super::super::calls::{map, map_anonymous};
    use super::super::{Fork, file, huge_bytes};
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Maps a file, or pages without one, at addresses that live as long as the first value.
    fn mapped(bytes: u64, fork: Option<Fork>) -> (Addresses, Range<u64>) {
        let addresses = Addresses::reserve(bytes, 2 * MIB, 0).unwrap();
        let range = addresses.start()..addresses.start() + bytes;
        if let Some(fork) = fork {
            map_anonymous(&range, fork).unwrap();
        } else {
            let file = file::create(NodeId(0), bytes).unwrap();
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let fd = Some(File::as_raw_fd(&file));
            map(range.start, bytes, protection, flags | libc::MAP_FIXED, fd).unwrap();
        }
        (addresses, range)
    }

    #[test]
    fn all_pages_exist_and_are_on_the_node() {
        for fork in [Some(Fork::Zeros), Some(Fork::Shared), None] {
            let shmem = fork != Some(Fork::Zeros);
            let (_addresses, range) = mapped(16 * MIB, fork);
            populate(NodeId(0), &range, shmem).unwrap();
            let huge = huge_bytes(range.clone()).unwrap();
            println!("{fork:?}: {huge} of {} bytes are huge pages", 16 * MIB);
            // `move_pages` knows no page that does not exist.
            assert!(expect_on(NodeId(99), &range).is_err());
            assert!(expect_by_mapping(NodeId(99), &range).is_err());
            if Policy::of(NodeId(0)) == Policy::Bound {
                let (_addresses, range) = mapped(16 * MIB, fork);
                populate(NodeId(0), &range, shmem).unwrap();
                expect_on(NodeId(0), &range).unwrap();
                expect_by_mapping(NodeId(0), &range).unwrap();
            }
        }
    }
}
