//! The handles of a memory's parts: here, or to be received while they are imported.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::fd;
use super::queue::BATCH;
use crate::driver::{HandleType, ShareableHandle};
use egmem_core::{Error, Result};

/// How long to wait for the next fds.
const PATIENCE: Duration = Duration::from_secs(30);

/// The handles of a memory's parts, in the order of the description. Of memory with many parts the fds are received a
/// few at a time, while [`ImportOptions::import_from`](super::ImportOptions::import_from) imports them. Dropping this
/// closes the handles.
#[derive(Debug)]
pub struct PartHandles(Way);

#[derive(Debug)]
enum Way {
    Here(Vec<ShareableHandle>),
    /// One end of a [`queue`].
    Queue(OwnedFd),
}

impl From<Vec<ShareableHandle>> for PartHandles {
    fn from(handles: Vec<ShareableHandle>) -> Self {
        Self(Way::Here(handles))
    }
}

impl PartHandles {
    /// Returns handles that are received from an exporter's [`queue`].
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
    /// [`Error::InvalidArgument`] for handles of another number or of several types; [`Error::System`] if the exporter
    /// has ended before it sent all, or this process may open no more fds.
    pub fn all(self, count: usize) -> Result<Vec<ShareableHandle>> {
        let mut coming = self.open(count)?;
        (0..count).map(|_| coming.next()).collect()
    }

    /// Begins to take the handles of `count` parts.
    pub(super) fn open(self, count: usize) -> Result<Coming> {
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
    pub(super) fn next(&mut self) -> Result<ShareableHandle> {
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
        let none = || Error::invalid("handles", "fewer than parts");
        self.here.pop_front().ok_or_else(none)
    }
}

fn failed(error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => Error::failed("receiving handles", "the exporter is silent"),
        _ => Error::system("receiving handles", error),
    }
}

/// Checks that there are `count` handles of one type.
fn one_type(handles: &[ShareableHandle], count: usize) -> Result<()> {
    let first = match handles {
        [first, ..] if handles.len() == count => first.handle_type(),
        _ => {
            let why = format!("{} for {count} parts", handles.len());
            return Err(Error::invalid("handles", why));
        }
    };
    match handles.iter().all(|handle| handle.handle_type() == first) {
        true => Ok(()),
        false => Err(Error::invalid("handles", "they are of different types")),
    }
}
