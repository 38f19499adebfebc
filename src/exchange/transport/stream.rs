//! The two halves of a stream, over any transport.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::task::coop::consume_budget;
use tokio::time::sleep;
use zeroize::Zeroize;

use crate::share::fd;

pub(super) enum Reading {
    /// Over TCP or TLS.
    Bytes(Box<dyn AsyncRead + Send + Sync + Unpin>),
    Unix(UnixReading),
}

impl Reading {
    /// Reads some bytes, and the fds that arrived with them (`InvalidData` for more than `max_fds`). Cancel
    /// safe: bytes that were read are returned.
    pub(super) async fn read(
        &mut self,
        bytes: &mut [u8],
        max_fds: usize,
    ) -> io::Result<(usize, Vec<OwnedFd>)> {
        match self {
            Self::Bytes(stream) => Ok((stream.read(bytes).await?, Vec::new())),
            Self::Unix(stream) => stream.read(bytes, max_fds).await,
        }
    }
}

/// Registers an fd with the runtime.
///
/// # Errors
/// The system's.
#[allow(
    deprecated,
    reason = "sound for an `OwnedFd`; `register_with_interest` is missing in older versions of tokio"
)]
fn register<F: AsRawFd + AsFd>(fd: F, interest: Interest) -> io::Result<AsyncFd<F>> {
    AsyncFd::with_interest(fd, interest)
}

/// The most bytes that are read ahead: several requests, or a grant of few parts.
const AHEAD: usize = 1 << 10;

/// The reading half of a Unix socket.
///
/// It is registered for input alone. A socket that is registered for output too, as tokio's are, wakes its task whenever
/// the other end has read something.
pub(super) struct UnixReading {
    socket: AsyncFd<Arc<OwnedFd>>,
    /// Bytes that were read ahead are those from `taken` to `have`.
    ahead: Box<[u8; AHEAD]>,
    taken: usize,
    have: usize,
    /// The fds that arrived with the bytes ahead.
    fds: Vec<OwnedFd>,
}

impl UnixReading {
    /// # Errors
    /// The system's.
    pub(super) fn new(socket: Arc<OwnedFd>) -> io::Result<Self> {
        Ok(Self {
            socket: register(socket, Interest::READABLE)?,
            ahead: Box::new([0; AHEAD]),
            taken: 0,
            have: 0,
            fds: Vec::new(),
        })
    }

    async fn read(
        &mut self,
        bytes: &mut [u8],
        max_fds: usize,
    ) -> io::Result<(usize, Vec<OwnedFd>)> {
        // Neither bytes ahead nor a socket that is always readable makes a task wait: other tasks of its thread would not run.
        consume_budget().await;
        if self.taken == self.have {
            if bytes.len() >= AHEAD {
                return receive(&self.socket, bytes, max_fds).await;
            }
            (self.have, self.fds) = receive(&self.socket, &mut self.ahead[..], max_fds).await?;
            self.taken = 0;
        }
        let ahead = &mut self.ahead[self.taken..self.have];
        let count = ahead.len().min(bytes.len());
        bytes[..count].copy_from_slice(&ahead[..count]);
        // They may be a handle.
        ahead[..count].zeroize();
        self.taken += count;
        // The kernel returns no bytes behind those of the message that the fds were sent with, so that the last byte
        // belongs to its frame.
        let fds = if self.taken == self.have {
            std::mem::take(&mut self.fds)
        } else {
            Vec::new()
        };
        Ok((count, fds))
    }
}

impl Drop for UnixReading {
    fn drop(&mut self) {
        self.ahead.zeroize();
    }
}

/// Receives some bytes and fds as soon as there are some.
async fn receive(
    socket: &AsyncFd<Arc<OwnedFd>>,
    bytes: &mut [u8],
    max_fds: usize,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    loop {
        let mut ready = socket.readable().await?;
        match fd::recv(socket.as_fd(), bytes, max_fds) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
            received => {
                // Fewer bytes than there was room for, without fds, are all that there were: the next read waits at once.
                if let Ok((count, fds)) = &received
                    && (1..bytes.len()).contains(count)
                    && fds.is_empty()
                {
                    ready.clear_ready();
                }
                return received;
            }
        }
    }
}

/// How long to wait for other processes of this user to receive fds, of which the kernel has too many in flight.
const PAUSE: Duration = Duration::from_millis(5);

/// Sends the beginning of `bytes` with all of `fds`, as [`fd::try_send`] does; waits until their receivers have taken some if
/// too many fds of this user are in flight. The caller has a time limit.
pub(crate) async fn send_fds(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    consume_budget().await;
    loop {
        match fd::try_send(socket, bytes, fds) {
            Err(error) if fd::is_too_many_in_flight(&error) => sleep(PAUSE).await,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // Registered for output as long as it waits, by an fd of its own: see `UnixReading`.
                let socket = register(socket.try_clone_to_owned()?, Interest::WRITABLE)?;
                let _ready = socket.writable().await?;
            }
            sent => return sent,
        }
    }
}

/// Returns the halves of a stream over TCP or TLS.
pub(super) fn halves(
    reading: impl AsyncRead + Send + Sync + Unpin + 'static,
    writing: impl AsyncWrite + Send + Sync + Unpin + 'static,
) -> (Reading, Writing) {
    (
        Reading::Bytes(Box::new(reading)),
        Writing::Bytes(Box::new(writing)),
    )
}

pub(super) enum Writing {
    /// Over TCP or TLS.
    Bytes(Box<dyn AsyncWrite + Send + Sync + Unpin>),
    Unix(Arc<OwnedFd>),
}

impl Writing {
    /// Writes all bytes; over a Unix socket the fds are sent with the first ones.
    pub(super) async fn write(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self {
            Self::Bytes(stream) => {
                stream.write_all(bytes).await?;
                stream.flush().await
            }
            Self::Unix(stream) => {
                let mut sent = send_fds(stream.as_fd(), bytes, fds).await?;
                while sent < bytes.len() {
                    sent += send_fds(stream.as_fd(), &bytes[sent..], &[]).await?;
                }
                Ok(())
            }
        }
    }

    /// Ends the stream.
    pub(super) async fn finish(&mut self) -> io::Result<()> {
        match self {
            Self::Bytes(stream) => stream.shutdown().await,
            Self::Unix(stream) => Ok(rustix::net::shutdown(stream, rustix::net::Shutdown::Write)?),
        }
    }
}

impl Drop for Writing {
    /// The reader may live on: without this the peer would not learn that the stream has ended.
    fn drop(&mut self) {
        if let Self::Unix(stream) = self {
            // An error means that the peer has closed already.
            let _ = rustix::net::shutdown(stream, rustix::net::Shutdown::Write);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Returns the events that an epoll of this process waits for at a file, as proc(5) has them.
    fn registered(file: &impl AsRawFd) -> Option<u32> {
        let fds = std::fs::read_dir("/proc/self/fdinfo").ok()?;
        let infos = fds.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
        let number = file.as_raw_fd().to_string();
        let events = |info: String| {
            let mut lines = info.lines().map(|line| line.split_whitespace());
            lines.find_map(|mut words| {
                let is_it = words.next() == Some("tfd:") && words.next() == Some(&number);
                let events = words.nth(1).filter(|_| is_it)?;
                u32::from_str_radix(events, 16).ok()
            })
        };
        infos.filter_map(events).next()
    }

    #[tokio::test]
    async fn a_peer_that_reads_wakes_nobody() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let ours: Arc<OwnedFd> = Arc::new(ours.into());
        let reading = UnixReading::new(Arc::clone(&ours)).unwrap();
        let events = registered(&ours).expect("it is registered") as i32;
        assert_eq!(events & (libc::EPOLLIN | libc::EPOLLOUT), libc::EPOLLIN);
        // A write that has to wait is not registered any more afterwards.
        while fd::try_send(ours.as_fd(), &[0; 1 << 16], &[]).is_ok() {}
        let writing = tokio::spawn(async move {
            let sent = send_fds(ours.as_fd(), &[7], &[]).await;
            (sent, registered(&ours))
        });
        tokio::task::yield_now().await;
        theirs.set_nonblocking(true).unwrap();
        while fd::recv(theirs.as_fd(), &mut [0; 1 << 16], 0).is_ok() {}
        let (sent, events) = writing.await.unwrap();
        assert_eq!(
            (
                sent.unwrap(),
                events.map(|events| events as i32 & libc::EPOLLOUT)
            ),
            (1, Some(0))
        );
        drop(reading);
    }

    #[tokio::test]
    async fn a_peer_that_sends_without_end_leaves_other_tasks_their_turn() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut reading = UnixReading::new(Arc::new(ours.into())).unwrap();
        assert_eq!(fd::try_send(theirs.as_fd(), &[7; 5000], &[]).unwrap(), 5000);
        // The first one waits for the runtime's driver.
        assert_eq!(reading.read(&mut [0], 0).await.unwrap().0, 1);
        let other = tokio::spawn(async {});
        for _ in 1..5000 {
            assert_eq!(reading.read(&mut [0], 0).await.unwrap().0, 1);
        }
        assert!(other.is_finished());
    }
}
