//! The two halves of a stream, over any transport, and frames on them: a length of four bytes, big-endian, and that many bytes of
//! CBOR.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use zeroize::{Zeroize, Zeroizing};

use crate::limits::deadline;
use crate::share::fd;
use crate::share::queue::MAX_WITH_MESSAGE;
use crate::{Error, Limits, Result, tls};

/// Bytes of a frame's length.
const HEADER: usize = 4;
/// How many bytes are allocated for a frame before any of it has arrived.
const FIRST: usize = 4 << 10;
/// Assembles frames from pieces of any size.
#[derive(Default)]
struct Assembly {
    header: [u8; HEADER],
    body: Zeroizing<Vec<u8>>,
    /// Bytes received of header and body.
    have: usize,
}

impl Assembly {
    /// Returns where the next bytes belong. Never beyond the present frame, and a body's room grows only as
    /// it arrives: a header that announces many bytes gets few at first.
    ///
    /// # Errors
    /// [`Protocol`](crate::ShareError::Protocol) of `peer` for a length that is not allowed, [`Error::TlsAtOneEnd`] for a
    /// TLS record.
    fn room(&mut self, peer: &str, limit: u32) -> Result<&mut [u8]> {
        if self.have < HEADER {
            return Ok(&mut self.header[self.have..]);
        }
        let want = self.want();
        if want == 0 {
            return Err(Error::protocol(peer, "an empty frame"));
        }
        if want > limit as usize {
            // A TLS record begins with its type, here an alert or a handshake, and version 3.x.
            if let [0x15 | 0x16, 3, _, _] = self.header {
                let peer = peer.into();
                return Err(Error::TlsAtOneEnd { peer, here: false });
            }
            let why = format!("frame of {want} bytes exceeds the limit of {limit}");
            return Err(Error::protocol(peer, why));
        }
        let have = self.have - HEADER;
        if have == self.body.len() {
            // Copied by hand: a vector that grows leaves its bytes behind.
            let mut more = Zeroizing::new(vec![0; want.min(FIRST.max(have.saturating_mul(2)))]);
            more[..have].copy_from_slice(&self.body);
            self.body = more;
        }
        Ok(&mut self.body[have..])
    }

    fn want(&self) -> usize {
        u32::from_be_bytes(self.header) as usize
    }

    /// Records `count` bytes received in [`room`](Self::room); returns whether the frame is complete.
    fn came(&mut self, count: usize) -> bool {
        self.have += count;
        self.have >= HEADER && self.want() > 0 && self.have - HEADER == self.want()
    }

    fn take(&mut self) -> Zeroizing<Vec<u8>> {
        self.have = 0;
        std::mem::take(&mut self.body)
    }
}

/// A message, and the fds that arrived with it.
pub(crate) struct Frame {
    /// Wiped when dropped.
    pub bytes: Zeroizing<Vec<u8>>,
    pub fds: Vec<OwnedFd>,
}

/// Reads frames.
pub(crate) struct FrameReader {
    stream: Reading,
    peer: Arc<str>,
    assembly: Assembly,
    fds: Vec<OwnedFd>,
    /// How many fds may arrive with a frame: the most that one message of an exporter carries.
    max_fds: usize,
    /// The longest time for a frame, and the present frame's deadline.
    within: Duration,
    until: Option<Instant>,
    broken: bool,
}

impl FrameReader {
    pub(super) fn new(stream: Reading, peer: Arc<str>, limits: &Limits) -> Self {
        Self {
            stream,
            peer,
            assembly: Assembly::default(),
            fds: Vec::new(),
            max_fds: MAX_WITH_MESSAGE,
            within: limits.frame,
            until: None,
            broken: false,
        }
    }

    /// Forbids fds from now on.
    pub(crate) fn forbid_fds(&mut self) {
        self.max_fds = 0;
    }

    /// Returns the next frame, of at most `limit` bytes, however long it takes to begin; `None` at the end of
    /// the stream.
    ///
    /// # Errors
    /// [`Protocol`](crate::ShareError::Protocol) for a frame that is empty or too big, or too many fds (all are
    /// closed); [`Error::TlsAtOneEnd`] for a TLS record; [`TimedOut`](crate::ShareError::TimedOut) for one that takes longer than `limits.frame` from
    /// its first byte on;
    /// [`PeerLost`](crate::ShareError::PeerLost); [`NotTrusted`](crate::ShareError::NotTrusted) if a TLS server
    /// refuses this client's certificate. After an error the stream is unusable.
    ///
    /// # Cancel safety
    /// Cancel safe: received bytes of a frame are kept.
    pub(crate) async fn read(&mut self, limit: u32) -> Result<Option<Frame>> {
        if self.broken {
            return Err(self.lost("its connection was given up"));
        }
        let result = self.read_on(limit).await;
        if !matches!(result, Ok(Some(_))) {
            self.broken = result.is_err();
            self.fds.clear();
        }
        result
    }

    async fn read_on(&mut self, limit: u32) -> Result<Option<Frame>> {
        loop {
            let room = self.assembly.room(&self.peer, limit)?;
            let reading = self.stream.read(room, self.max_fds);
            let result = match self.until {
                None => reading.await,
                Some(until) => timeout_at(until, reading).await.map_err(|_| {
                    Error::timed_out(format!("a frame from {}", self.peer), self.within)
                })?,
            };
            let (count, fds) = result.map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData if matches!(self.stream, Reading::Unix(_)) => {
                    Error::protocol(&*self.peer, error.to_string())
                }
                _ => tls::explain(&self.peer, "reading", &error),
            })?;
            self.fds.extend(fds);
            if self.fds.len() > self.max_fds {
                let why = "more file descriptors than expected";
                return Err(Error::protocol(&*self.peer, why));
            }
            if count == 0 {
                return match self.assembly.have {
                    0 => Ok(None),
                    _ => Err(self.lost("its connection ended within a frame")),
                };
            }
            if self.until.is_none() {
                self.until = Some(deadline(self.within));
            }
            if self.assembly.came(count) {
                self.until = None;
                return Ok(Some(Frame {
                    bytes: self.assembly.take(),
                    fds: std::mem::take(&mut self.fds),
                }));
            }
        }
    }

    /// Returns the length of the present frame, or of the last one that was too long.
    pub(crate) fn announced(&self) -> u32 {
        u32::from_be_bytes(self.assembly.header)
    }

    /// Reads at most so many bytes more and throws them away, until the end of the stream.
    pub(crate) async fn discard(&mut self, mut most: usize) {
        self.broken = true;
        let mut sink = [0; FIRST];
        while let Ok((count @ 1.., _)) = self.stream.read(&mut sink, 0).await
            && count < most
        {
            most -= count;
        }
    }

    pub(crate) fn lost(&self, why: &str) -> Error {
        Error::peer_lost(&*self.peer, why)
    }
}

/// Writes frames.
pub(crate) struct FrameWriter {
    stream: Writing,
    peer: Arc<str>,
    within: Duration,
    /// A frame was begun and not finished.
    broken: bool,
}

impl FrameWriter {
    pub(super) fn new(stream: Writing, peer: Arc<str>, limits: &Limits) -> Self {
        Self {
            stream,
            peer,
            within: limits.write,
            broken: false,
        }
    }

    /// Writes a frame, with fds if the connection is local.
    ///
    /// # Errors
    /// [`TimedOut`](crate::ShareError::TimedOut) after `limits.write`,
    /// [`PeerLost`](crate::ShareError::PeerLost), [`InvalidArgument`](crate::MemoryError::InvalidArgument) for
    /// no bytes, more than 4 GiB, or fds that cannot be sent. After errors other than the last, the connection is unusable.
    ///
    /// # Cancel safety
    /// Not cancel safe: after a partial write every later one fails.
    pub(crate) async fn write(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if !fds.is_empty() && !matches!(self.stream, Writing::Unix(_)) {
            let why = "fds can be sent only over Unix sockets";
            return Err(Error::invalid("frame", why));
        }
        self.send(&together(&[bytes])?, fds).await
    }

    /// Writes whole frames, of [`together`], in one write: one segment, one TLS record, one wakeup at the other end, and a peer
    /// gets all of them even if this end closes right afterwards. Errors and cancel safety are those of [`write`](Self::write).
    pub(crate) async fn send(&mut self, whole: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if std::mem::replace(&mut self.broken, true) {
            return Err(Error::peer_lost(&*self.peer, "its connection was given up"));
        }
        let written = timeout(self.within, self.stream.write(whole, fds)).await;
        written
            .map_err(|_| Error::timed_out(format!("writing to {}", self.peer), self.within))?
            .map_err(|error| tls::explain(&self.peer, "writing", &error))?;
        self.broken = false;
        Ok(())
    }

    /// Ends the stream, so that the peer's reader ends; the connection's own reader continues. Ignores
    /// errors, which no longer matter.
    pub(crate) async fn finish(&mut self) {
        self.broken = true;
        let _ = timeout(self.within, self.stream.finish()).await;
    }
}

/// Returns frames, each with its length before its bytes.
pub(crate) fn together(frames: &[impl AsRef<[u8]>]) -> Result<Zeroizing<Vec<u8>>> {
    let frames = frames.iter().map(AsRef::as_ref);
    // A vector that grows leaves its bytes behind.
    let size = frames.clone().map(|bytes| HEADER + bytes.len()).sum();
    let mut whole = Zeroizing::new(Vec::with_capacity(size));
    for bytes in frames {
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length > 0);
        let wrong = || Error::invalid("frame", "it is empty or has more than 4 GiB");
        whole.extend_from_slice(&length.ok_or_else(wrong)?.to_be_bytes());
        whole.extend_from_slice(bytes);
    }
    Ok(whole)
}

opaque!(Frame FrameReader FrameWriter);

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
    ahead: Zeroizing<Vec<u8>>,
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
            ahead: Zeroizing::new(vec![0; AHEAD]),
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

#[cfg(fuzzing)]
#[path = "tests/fuzzing.rs"]
pub(super) mod fuzzing;

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
