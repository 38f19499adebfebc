//! Puts pages on a node: binds them, creates all of them, and checks where they are if the kernel did not bind them.

use std::io;
use std::ops::Range;
use std::ptr;

use crate::driver::{Driver, NodeId};
use crate::memory::ParallelCopy;
use crate::topology::Topology;
use crate::{Error, Result};

/// The bits of a mask of nodes: more nodes than any kernel supports.
const NODES: usize = 1024;
const BITS: usize = u64::BITS as usize;

/// Bytes that a thread touches at a time.
const PIECE: u64 = 4 << 20;

/// Creates the pages of a range on `node`, by as many threads as the node has CPUs that this process may use.
///
/// The nodes of a simulated machine are none of this machine's: its pages are created where and when they are touched.
///
/// # Errors
/// [`Error::System`] if the kernel refuses to bind or to create them, or if they are elsewhere.
pub(super) fn place(driver: &Driver, node: NodeId, range: &Range<u64>) -> Result<()> {
    if driver.is_simulated() {
        return Ok(());
    }
    let topology = Topology::of(driver)?;
    let bound = bind(node, range);
    let threads = ParallelCopy::on(&topology, node)?;
    threads.on_pieces(range.clone(), PIECE, |piece| populate(node, &piece))?;
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

/// Creates the pages of a range that has none yet, or keeps those that it has.
fn populate(node: NodeId, range: &Range<u64>) -> Result<()> {
    let (start, len) = (
        ptr::with_exposed_provenance_mut(range.start as usize),
        (range.end - range.start) as usize,
    );
    loop {
        // SAFETY: the range is a mapping of the caller's; the call writes nothing that can be read.
        if unsafe { libc::madvise(start, len, libc::MADV_POPULATE_WRITE) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            // Kernels before 5.14.
            Some(libc::EINVAL) => break,
            _ => return Err(failed(node, "creating pages on", &error)),
        }
    }
    for page in range.clone().step_by(4096) {
        let byte = ptr::with_exposed_provenance::<std::sync::atomic::AtomicU8>(page as usize);
        // SAFETY: the byte is in a mapping of the caller's that can be written, and lives during the call; other threads
        // and processes may write it too, hence atomically.
        unsafe { (*byte).fetch_or(0, std::sync::atomic::Ordering::Relaxed) };
    }
    Ok(())
}

/// Refuses pages that are on another node. Source: `move_pages(2)`.
fn expect_on(node: NodeId, range: &Range<u64>) -> Result<()> {
    const STEP: u64 = 4096;
    let pages: Vec<u64> = range.clone().step_by(STEP as usize).collect();
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
                at as u64 * STEP,
                nodes[at]
            );
            Err(Error::failed(
                format!("placing pages on NUMA node {node}"),
                why,
            ))
        }
    }
}
