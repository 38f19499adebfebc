//! Puts pages on a node: binds them, creates all of them, and checks where they are if the kernel did not bind them.

use std::io;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::driver::{Driver, NodeId};
use crate::memory::ParallelCopy;
use crate::topology::Topology;
use crate::{Error, Result};

/// The bits of a mask of nodes: more nodes than any kernel supports.
const NODES: usize = 1024;
const BITS: usize = u64::BITS as usize;

/// Bytes that a thread touches at a time.
const PIECE: u64 = 4 << 20;

/// The sizes of pages.
const SMALL: usize = 4096;
const HUGE: usize = 2 << 20;

/// Has the kernel make huge pages of small ones, at once and whatever its settings; from Linux 6.1 on.
const MADV_COLLAPSE: libc::c_int = 25;

/// Creates the pages of a range on `node`, by as many threads as the node has CPUs that this process may use.
///
/// The nodes of a simulated machine are none of this machine's: its pages are created where and when they are touched.
///
/// # Errors
/// [`Error::System`] if the kernel refuses to bind or to create them, or if they are elsewhere.
pub(super) fn place(
    driver: &Driver,
    node: NodeId,
    range: &Range<u64>,
    of_file: bool,
) -> Result<()> {
    if driver.is_simulated() {
        return Ok(());
    }
    let topology = Topology::of(driver)?;
    let bound = bind(node, range);
    let threads = ParallelCopy::on(&topology, node)?;
    threads.on_pieces(range.clone(), PIECE, |piece| {
        populate(node, &piece, of_file)
    })?;
    match bound {
        Ok(()) => Ok(()),
        // The only node has all pages.
        Err(_) if topology.nodes().len() == 1 => Ok(()),
        // In containers the call may be forbidden: the threads' CPUs decided then.
        Err(error) if is_forbidden(&error) => expect_on(node, range),
        Err(error) => Err(failed(node, "binding pages to", &error)),
    }
}

fn failed(node: NodeId, what: &str, error: &io::Error) -> Error {
    Error::system(format!("{what} NUMA node {node}"), error)
}

fn is_forbidden(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS)
    )
}

/// Binds the pages that a range will have to a node. Source: `mbind(2)`.
fn bind(node: NodeId, range: &Range<u64>) -> io::Result<()> {
    let mut mask = [0_u64; NODES / BITS];
    let id = usize::try_from(node.0).ok().filter(|&id| id < NODES);
    let Some(id) = id else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    mask[id / BITS] |= 1 << (id % BITS);
    // SAFETY: the kernel reads the mask, which has one bit less than it is told, as it expects; the policy of a mapping
    // changes no contents.
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
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Creates the pages of a range, a whole number of huge pages, or keeps those that it has.
fn populate(node: NodeId, range: &Range<u64>, of_file: bool) -> Result<()> {
    if of_file {
        // The kernel gives the pages of a file huge ones by a setting that is off by default, but makes some of small ones.
        range.clone().step_by(HUGE).for_each(touch);
        advise(range, MADV_COLLAPSE)
            .unwrap_or_else(|error| tracing::trace!(%error, "no huge pages"));
    }
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
    unsafe { (*byte).fetch_or(0, Relaxed) };
}

/// Advises the kernel about a mapping of the caller's.
fn advise(range: &Range<u64>, advice: libc::c_int) -> io::Result<()> {
    let start = ptr::with_exposed_provenance_mut(range.start as usize);
    // SAFETY: the range is a mapping of the caller's; the kinds of advice here change no byte of it.
    match unsafe { libc::madvise(start, (range.end - range.start) as usize, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Refuses pages that are on another node. Source: `move_pages(2)`.
fn expect_on(node: NodeId, range: &Range<u64>) -> Result<()> {
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
        return Err(failed(node, "checking whether pages are on", &error));
    }
    match nodes.iter().position(|&found| found != node.0) {
        None => Ok(()),
        Some(at) => {
            let why = format!(
                "byte {} is on node {}, and mbind is forbidden",
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
