//! The fds of memory with many parts, through a socket of their own: no process has many of them open.
//!
//! ```text
//! exporter   export 16 fds ─▶ send ─▶ close     again, for the next 16
//!                              │ the queue: a Unix socket, a byte (0) with each 16 fds
//! importer                 receive 16 ─▶ import and close each     again
//! ```
//!
//! The importer gets the queue's other end as one fd, in place of the memory's. Fds in the queue belong to no process:
//! the kernel closes them once the importer closes its end or dies.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;
use std::vec;

use rustix::net::sockopt::Timeout;

use super::{Shared, fd};
use crate::driver::{HandleType, ShareableHandle, refuse};
use crate::error::failed;
use crate::{Error, MemoryError, MemoryResult, Result};

/// The most fds of one message.
pub const BATCH: usize = 16;

/// The most parts whose fds come with a message that names the memory; those of more parts come through a queue.
pub const MAX_WITH_MESSAGE: usize = 32;

/// How long an importer waits for the next fds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns whether the fds of so many parts come through a queue.
pub const fn is_needed(parts: usize) -> bool {
    parts > MAX_WITH_MESSAGE
}

/// Creates a queue: this process's end, and the importer's.
///
/// # Errors
/// The system's.
pub fn pair() -> MemoryResult<(UnixStream, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair().map_err(failed("a queue of handles"))?;
    Ok((ours, theirs.into()))
}

/// Iterates over the batches of so many parts.
pub fn batches(parts: usize) -> impl Iterator<Item = Range<usize>> {
    (0..parts)
        .step_by(BATCH)
        .map(move |first| first..parts.min(first + BATCH))
}

/// Sends the fds of `shared`, one batch after the other, and waits up to `within` for room for each.
///
/// # Errors
/// [`Error::PeerLost`] with `peer` if the importer has closed its end; [`Error::TimedOut`]; those of exporting; the
/// system's.
pub fn fill(queue: &UnixStream, shared: &Shared, peer: &str, within: Duration) -> Result<()> {
    for parts in batches(shared.part_count()) {
        let batch = shared.export_parts(parts, HandleType::PosixFd)?;
        let (what, fds) = ("sending handles", fd::all_posix(&batch));
        let fds = fds.map_err(failed(what))?;
        fd::send_within(queue.as_fd(), &[0], &fds, within)
            .map_err(|error| Error::of_message(&error, what, peer, within))?;
    }
    Ok(())
}

/// The handles of a memory's parts, in the order of the description. Of memory with many parts the fds are received a
/// few at a time, while [`ImportOptions::import_from`](super::ImportOptions::import_from) imports them. Dropping this
/// closes the handles.
#[derive(Debug)]
pub struct PartHandles {
    here: vec::IntoIter<ShareableHandle>,
    /// One end of a queue, from which the others come.
    queue: Option<UnixStream>,
}

impl From<Vec<ShareableHandle>> for PartHandles {
    fn from(handles: Vec<ShareableHandle>) -> Self {
        let (here, queue) = (handles.into_iter(), None);
        Self { here, queue }
    }
}

impl PartHandles {
    /// Returns handles that are received from an exporter's [queue](self).
    pub fn from_queue(queue: OwnedFd) -> Self {
        let (here, queue) = (Vec::new().into_iter(), Some(queue.into()));
        Self { here, queue }
    }

    /// Returns the handles if all are here already; none otherwise.
    pub fn here(&self) -> &[ShareableHandle] {
        self.here.as_slice()
    }

    /// Returns the type of the handles. Those that are received are fds.
    pub fn handle_type(&self) -> Option<HandleType> {
        if self.queue.is_some() {
            return Some(HandleType::PosixFd);
        }
        self.here().first().map(ShareableHandle::handle_type)
    }

    /// Returns all handles, for `count` parts: as many fds are open then.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) for handles of another number or of several types; [`System`](MemoryError::System) if the exporter
    /// has ended before it sent all, or this process may open no more fds.
    pub fn all(mut self, count: usize) -> MemoryResult<Vec<ShareableHandle>> {
        self.begin(count)?;
        (0..count).map(|index| self.next(count - index)).collect()
    }

    /// Checks the handles of `count` parts, before the first is taken.
    pub(super) fn begin(&self, count: usize) -> MemoryResult<()> {
        if self.queue.is_some() {
            return Ok(());
        }
        let here = self.here();
        let first = here.first().map(ShareableHandle::handle_type);
        refuse! { |why| MemoryError::invalid("handles", why);
            here.len() != count || here.is_empty() => "{} for {count} parts", here.len();
            here.iter().any(|handle| Some(handle.handle_type()) != first) => "they are of different types";
        }
        Ok(())
    }

    /// Returns the next handle, of `left` that are not taken yet. At most [`BATCH`] fds are open and not returned.
    pub(super) fn next(&mut self, left: usize) -> MemoryResult<ShareableHandle> {
        if self.here().is_empty()
            && let Some(queue) = &self.queue
        {
            let most = left.min(BATCH);
            let received = fd::limited((queue.as_fd(), Timeout::Recv), PATIENCE, || {
                fd::recv(queue.as_fd(), &mut [0], most)
            });
            let (bytes, fds) = received.map_err(|error| not_received(&error))?;
            if bytes == 0 || fds.is_empty() {
                let why = "the exporter has ended, or has sent too few";
                return Err(not_received(&io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    why,
                )));
            }
            let handles: Vec<_> = fds.into_iter().map(ShareableHandle::PosixFd).collect();
            self.here = handles.into_iter();
        }
        let none = || MemoryError::invalid("handles", "fewer than parts");
        self.here.next().ok_or_else(none)
    }
}

fn not_received(error: &io::Error) -> MemoryError {
    let what = "receiving handles";
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            MemoryError::failed(what, "timed out waiting for the exporter's handles")
        }
        _ => MemoryError::system(what, error),
    }
}
