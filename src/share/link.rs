//! Whether another process still has its end of something that both share.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_domain;
use rustix::net::{AddressFamily, Shutdown, shutdown};

use super::frame::Body;
use super::{Channel, queue};
use crate::Result;
use crate::fork::Generation;

/// One of two ends, of which another process has the other: it tells whether that one was dropped, or its process has
/// ended. The kernel closes the ends of a process that dies, so no time has to pass, and a process that is stopped or slow
/// still has its end. It takes one fd in each process.
///
/// A forked child has a copy of its parent's end. A drop in the parent is seen at once, but of a parent that dies, the end counts
/// as there until the child has ended too, or runs another program. A drop in the child does nothing.
///
/// ```
/// use egmem::share::{Channel, Peers};
/// # let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
/// # let mut channel = Channel::new(one, &Peers::same_user())?;
/// # let mut others_channel = Channel::new(other, &Peers::same_user())?;
/// // One process, with a channel to another:
/// let link = channel.send_link()?;
/// // The other process:
/// let others_link = others_channel.receive_link()?;
///
/// assert!(!link.is_cut() && !others_link.is_cut());
/// drop(others_link);
/// assert!(link.is_cut());
/// # Ok::<(), egmem::share::Error>(())
/// ```
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
    /// The process that has this end.
    process: Generation,
}

impl Link {
    fn new(socket: OwnedFd) -> Self {
        Self {
            socket,
            process: Generation::current(),
        }
    }

    /// Returns whether the other end was dropped, or its process has ended. It never changes back. What that process wrote to
    /// shared memory by its CPU is seen then.
    pub fn is_cut(&self) -> bool {
        let mut poll_fd = [PollFd::new(&self.socket, PollFlags::empty())];
        // Bytes that were sent to this end change nothing: nobody reads them.
        poll(&mut poll_fd, Some(&Timespec::default())).is_ok()
            && poll_fd[0].revents().contains(PollFlags::HUP)
    }
}

impl Drop for Link {
    /// Cuts the link also where a child that another thread is about to start has a copy of this end for a moment.
    fn drop(&mut self) {
        if self.process.is_current() {
            // The other end may be closed already.
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }
}

impl Channel {
    /// Sends one end of a new link to the other process, and returns this process's. It counts as there until that process
    /// has received and dropped it, or the channel has ended before.
    ///
    /// # Errors
    /// As [`send`](Self::send). A process with an older version of this library gets a protocol error.
    pub fn send_link(&mut self) -> Result<Link> {
        let (ours, theirs) = queue::pair()?;
        self.send_body(&Body::Link {}, &[theirs.as_fd()])?;
        Ok(Link::new(ours.into()))
    }

    /// Waits for an end of a link from the other process.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_link(&mut self) -> Result<Link> {
        let (body, mut fds) = self.receive_body()?;
        match (body, fds.pop()) {
            // Another kind of file might keep a poll waiting.
            (Body::Link {}, Some(fd)) if socket_domain(&fd) == Ok(AddressFamily::UNIX) => {
                Ok(Link::new(fd))
            }
            (Body::Link {}, _) => Err(self.refuse("a link that is no Unix socket")),
            (other, _) => Err(self.unexpected(&other)),
        }
    }
}
