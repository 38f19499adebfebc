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
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Shared, fd};
use crate::driver::{HandleType, ShareableHandle};
use crate::{Error, MemoryError, MemoryResult, Result};

/// The most fds of one message.
pub const BATCH: usize = 16;

/// The most parts whose fds come with a message that names the memory; those of more parts come through a queue.
pub const MAX_WITH_MESSAGE: usize = 32;

/// How long to wait for other processes of the same user to receive fds, of which the kernel has too many in flight.
pub(super) const IN_FLIGHT_PAUSE: Duration = Duration::from_millis(1);

/// Returns whether the fds of so many parts come through a queue.
pub const fn is_needed(parts: usize) -> bool {
    parts > MAX_WITH_MESSAGE
}

/// Returns whether a send failed because too many fds of this user are in flight: it succeeds once their receivers have
/// taken some.
pub fn is_too_many_in_flight(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ETOOMANYREFS)
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

/// Sends a batch, and never waits: `WouldBlock` if the queue is full; the kernel's `ETOOMANYREFS` if too many fds of
/// this user are in flight.
///
/// # Errors
/// The system's; `InvalidInput` for handles other than fds.
pub fn try_send(queue: BorrowedFd<'_>, batch: &[ShareableHandle]) -> io::Result<()> {
    let fds: Option<Vec<_>> = batch.iter().map(fd::posix).collect();
    let fds = fds.ok_or(io::ErrorKind::InvalidInput)?;
    fd::try_send(queue, &[0], &fds).map(drop)
}

/// Sends the fds of `shared`, one batch after the other, and waits up to `within` for room for each.
///
/// # Errors
/// [`Error::PeerLost`] with `peer` if the importer has closed its end; [`Error::TimedOut`]; those of exporting; the
/// system's.
pub fn fill(queue: &UnixStream, shared: &Shared, peer: &str, within: Duration) -> Result<()> {
    for parts in batches(shared.part_count()) {
        let batch = shared.export_parts(parts, HandleType::PosixFd)?;
        let until = Instant::now() + within.min(Duration::from_secs(86_400));
        while let Err(error) = try_send(queue.as_fd(), &batch) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::timed_out(
                    format!("sending handles ({peer})"),
                    within,
                ));
            }
            match error.raw_os_error() {
                _ if is_too_many_in_flight(&error) => thread::sleep(IN_FLIGHT_PAUSE),
                Some(libc::EAGAIN) => wait_for_room(queue, left)?,
                Some(libc::EPIPE | libc::ECONNRESET) => {
                    return Err(Error::peer_lost(
                        peer,
                        "it has closed its end of the handles",
                    ));
                }
                _ => return Err(MemoryError::system("sending handles", &error).into()),
            }
        }
    }
    Ok(())
}

fn wait_for_room(queue: &UnixStream, left: Duration) -> Result<()> {
    let left = Timespec::try_from(left).ok();
    match poll(&mut [PollFd::new(queue, PollFlags::OUT)], left.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(MemoryError::system("sending handles", &error.into()).into()),
    }
}
