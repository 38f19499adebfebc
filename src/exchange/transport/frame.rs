//! Frames: a length of four bytes, big-endian, and that many bytes of CBOR.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use zeroize::Zeroizing;

use super::stream::{Reading, Writing};
use crate::limits::deadline;
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
                std::io::ErrorKind::InvalidData if matches!(self.stream, Reading::Unix(_)) => {
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

#[cfg(fuzzing)]
#[path = "tests/fuzzing.rs"]
pub(super) mod fuzzing;
