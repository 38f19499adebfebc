//! The two halves of a stream, over any transport.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::time::sleep;

use crate::share::fd;

pub(super) enum Reading {
    /// Over TCP or TLS.
    Bytes(Box<dyn AsyncRead + Send + Sync + Unpin>),
    Unix(Arc<UnixStream>),
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
            Self::Unix(stream) => {
                let socket = stream.as_fd();
                let receive = || fd::recv(socket, bytes, max_fds);
                stream.async_io(Interest::READABLE, receive).await
            }
        }
    }
}

/// How long to wait for other processes of this user to receive fds, of which the kernel has too many in flight.
const PAUSE: Duration = Duration::from_millis(5);

/// Sends the beginning of `bytes` with all of `fds`, as [`fd::send`] does; waits until their receivers have taken some if
/// too many fds of this user are in flight. The caller has a time limit.
pub(crate) async fn send_fds(
    stream: &UnixStream,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    loop {
        let send = || fd::try_send(stream.as_fd(), bytes, fds);
        match stream.async_io(Interest::WRITABLE, send).await {
            Err(error) if fd::is_too_many_in_flight(&error) => sleep(PAUSE).await,
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
    Unix(Arc<UnixStream>),
}

impl Writing {
    /// Writes all bytes; over a Unix socket the fds are sent with the first ones, as many in each message as
    /// it can carry.
    pub(super) async fn write(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self {
            Self::Bytes(stream) => {
                stream.write_all(bytes).await?;
                stream.flush().await
            }
            Self::Unix(stream) => {
                let mut rest = bytes;
                let mut chunks = fds.chunks(fd::MAX_FDS).peekable();
                while !rest.is_empty() {
                    let chunk = chunks.next().unwrap_or_default();
                    // A further message's fds need a byte of their own.
                    let part = if chunks.peek().is_some() {
                        &rest[..1]
                    } else {
                        rest
                    };
                    let sent = send_fds(stream, part, chunk).await?;
                    rest = &rest[sent..];
                }
                match chunks.next() {
                    None => Ok(()),
                    Some(_) => Err(io::ErrorKind::InvalidInput.into()),
                }
            }
        }
    }

    /// Ends the stream.
    pub(super) async fn finish(&mut self) -> io::Result<()> {
        match self {
            Self::Bytes(stream) => stream.shutdown().await,
            Self::Unix(stream) => Ok(rustix::net::shutdown(
                &**stream,
                rustix::net::Shutdown::Write,
            )?),
        }
    }
}

impl Drop for Writing {
    /// The reader may live on: without this the peer would not learn that the stream has ended.
    fn drop(&mut self) {
        if let Self::Unix(stream) = self {
            // An error means that the peer has closed already.
            let _ = rustix::net::shutdown(&**stream, rustix::net::Shutdown::Write);
        }
    }
}
