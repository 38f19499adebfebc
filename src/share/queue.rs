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

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::{Shared, fd};
use crate::driver::{HandleType, ShareableHandle};
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
    let pair = UnixStream::pair();
    let (ours, theirs) = pair.map_err(|error| MemoryError::system("a queue of handles", &error))?;
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
        let fds = fd::all_posix(&batch)
            .map_err(|error| MemoryError::system("sending handles", &error))?;
        fd::send_within(queue.as_fd(), &[0], &fds, within).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => {
                Error::timed_out(format!("sending handles ({peer})"), within)
            }
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                Error::peer_lost(peer, "it has closed its end of the handles")
            }
            _ => MemoryError::system("sending handles", &error).into(),
        })?;
    }
    Ok(())
}

/// The handles of a memory's parts, in the order of the description. Of memory with many parts the fds are received a
/// few at a time, while [`ImportOptions::import_from`](super::ImportOptions::import_from) imports them. Dropping this
/// closes the handles.
#[derive(Debug)]
pub struct PartHandles(Way);

#[derive(Debug)]
enum Way {
    Here(Vec<ShareableHandle>),
    /// One end of a queue.
    Queue(OwnedFd),
}

impl From<Vec<ShareableHandle>> for PartHandles {
    fn from(handles: Vec<ShareableHandle>) -> Self {
        Self(Way::Here(handles))
    }
}

impl PartHandles {
    /// Returns handles that are received from an exporter's [queue](self).
    pub const fn from_queue(queue: OwnedFd) -> Self {
        Self(Way::Queue(queue))
    }

    /// Returns the handles if all are here already; none otherwise.
    pub fn here(&self) -> &[ShareableHandle] {
        match &self.0 {
            Way::Here(handles) => handles,
            Way::Queue(_) => &[],
        }
    }

    /// Returns the type of the handles. Those that are received are fds.
    pub fn handle_type(&self) -> Option<HandleType> {
        match &self.0 {
            Way::Here(handles) => handles.first().map(ShareableHandle::handle_type),
            Way::Queue(_) => Some(HandleType::PosixFd),
        }
    }

    /// Returns all handles, for `count` parts: as many fds are open then.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) for handles of another number or of several types; [`System`](MemoryError::System) if the exporter
    /// has ended before it sent all, or this process may open no more fds.
    pub fn all(self, count: usize) -> MemoryResult<Vec<ShareableHandle>> {
        let mut coming = self.open(count)?;
        (0..count).map(|_| coming.next()).collect()
    }

    /// Begins to take the handles of `count` parts.
    pub(super) fn open(self, count: usize) -> MemoryResult<Coming> {
        let (here, queue) = match self.0 {
            Way::Here(handles) => {
                one_type(&handles, count)?;
                (handles.into(), None)
            }
            Way::Queue(queue) => (VecDeque::new(), Some(queue.into())),
        };
        if let Some(queue) = &queue {
            set_socket_timeout(queue, Timeout::Recv, Some(PATIENCE))
                .map_err(|error| failed(&error.into()))?;
        }
        Ok(Coming {
            here,
            queue,
            left: count,
        })
    }
}

/// Handles that are taken one after the other.
pub(super) struct Coming {
    here: VecDeque<ShareableHandle>,
    queue: Option<UnixStream>,
    /// How many are not taken yet.
    left: usize,
}

impl Coming {
    /// Returns the next handle. At most [`BATCH`] fds are open and not returned yet.
    pub(super) fn next(&mut self) -> MemoryResult<ShareableHandle> {
        if self.here.is_empty()
            && let Some(queue) = &self.queue
        {
            let most = self.left.min(BATCH);
            let (bytes, fds) = fd::recv(queue.as_fd(), &mut [0], most).map_err(|e| failed(&e))?;
            if bytes == 0 || fds.is_empty() {
                let why = "the exporter has ended, or has sent too few";
                return Err(failed(&io::Error::new(io::ErrorKind::UnexpectedEof, why)));
            }
            self.here
                .extend(fds.into_iter().map(ShareableHandle::PosixFd));
        }
        self.left = self.left.saturating_sub(1);
        let none = || MemoryError::invalid("handles", "fewer than parts");
        self.here.pop_front().ok_or_else(none)
    }
}

fn failed(error: &io::Error) -> MemoryError {
    match error.kind() {
        io::ErrorKind::WouldBlock => {
            MemoryError::failed("receiving handles", "the exporter is silent")
        }
        _ => MemoryError::system("receiving handles", error),
    }
}

/// Checks that there are `count` handles of one type.
fn one_type(handles: &[ShareableHandle], count: usize) -> MemoryResult<()> {
    let first = match handles {
        [first, ..] if handles.len() == count => first.handle_type(),
        _ => {
            let why = format!("{} for {count} parts", handles.len());
            return Err(MemoryError::invalid("handles", why));
        }
    };
    match handles.iter().all(|handle| handle.handle_type() == first) {
        true => Ok(()),
        false => Err(MemoryError::invalid(
            "handles",
            "they are of different types",
        )),
    }
}
