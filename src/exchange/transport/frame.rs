//! Frames: a length of four bytes, big-endian, and that many bytes of CBOR.

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};
use zeroize::Zeroizing;

use super::HeldFd;
use super::assembly::{Assembly, FIRST, HEADER, NoFrame};
use super::stream::{Reading, Writing};
use crate::account::{Account, Charge};
use crate::limits::deadline;
use crate::{Error, Result};
use crate::{Limits, tls};

/// A message, and the fds that arrived with it.
pub(crate) struct Frame {
    /// Wiped when dropped.
    pub bytes: Zeroizing<Vec<u8>>,
    pub fds: Vec<HeldFd>,
    /// The charge for its bytes, if they are charged.
    pub charge: Option<Charge>,
}

impl Frame {
    /// Returns the fds, for a client, which requested them.
    pub fn uncounted_fds(&mut self) -> Vec<OwnedFd> {
        let fds = std::mem::take(&mut self.fds);
        fds.into_iter().map(HeldFd::uncounted).collect()
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, fds, .. } = self;
        write!(f, "Frame({} bytes, {} fds)", bytes.len(), fds.len())
    }
}

/// Reads frames.
pub(crate) struct FrameReader {
    stream: Reading,
    peer: Arc<str>,
    assembly: Assembly,
    fds: Vec<HeldFd>,
    /// How many fds may arrive with a frame.
    max_fds: usize,
    /// The longest time for a frame, and the present frame's deadline.
    within: Duration,
    until: Option<Instant>,
    broken: bool,
    /// The account that long frames are charged to, and the charge of the present one.
    account: Option<Arc<Account>>,
    charge: Option<Charge>,
}

impl FrameReader {
    pub(super) fn new(stream: Reading, peer: Arc<str>, limits: &Limits) -> Self {
        Self {
            stream,
            peer,
            assembly: Assembly::default(),
            fds: Vec::new(),
            max_fds: limits.frame_fds as usize,
            within: limits.frame,
            until: None,
            broken: false,
            account: None,
            charge: None,
        }
    }

    /// Charges long frames to the account from now on.
    pub(crate) fn charge_to(&mut self, account: &Arc<Account>) {
        self.account = Some(Arc::clone(account));
    }

    /// Charges for the body that is about to grow, and for its copy in the decoder.
    fn charge(&mut self, limit: u32) -> Result<()> {
        let size = self.assembly.growth().unwrap_or(0);
        let Some(account) = self.account.as_ref().filter(|_| size > FIRST) else {
            return Ok(());
        };
        let size = 2 * size.min(limit as usize);
        match &mut self.charge {
            Some(charge) => charge.resize(size)?,
            None => self.charge = Some(account.charge(size)?),
        }
        Ok(())
    }

    /// Sets the most fds that may arrive with a frame from now on.
    #[cfg(test)]
    pub(super) fn max_fds(&mut self, max: usize) {
        self.max_fds = max;
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
    /// its first byte on; [`Error::LimitReached`] for one whose charge exceeds a limit;
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
            self.charge = None;
        }
        result
    }

    async fn read_on(&mut self, limit: u32) -> Result<Option<Frame>> {
        loop {
            self.charge(limit)?;
            let room = self.assembly.room(limit);
            let room = room.map_err(|why| match why {
                NoFrame::Tls => Error::TlsAtOneEnd {
                    peer: self.peer.to_string(),
                    here: false,
                },
                NoFrame::Length(detail) => Error::protocol(self.peer.to_string(), detail),
            })?;
            let reading = self.stream.read(room, self.max_fds - self.fds.len());
            let result = match self.until {
                None => reading.await,
                Some(until) => timeout_at(until, reading).await.map_err(|_| {
                    Error::timed_out(format!("a frame from {}", self.peer), self.within)
                })?,
            };
            let (count, fds) = result.map_err(|error| match error.kind() {
                std::io::ErrorKind::InvalidData if matches!(self.stream, Reading::Unix(_)) => {
                    Error::protocol(self.peer.to_string(), error.to_string())
                }
                _ => tls::explain(&self.peer, "reading", &error),
            })?;
            self.fds.extend(fds.into_iter().map(HeldFd::from));
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
                    charge: self.charge.take(),
                }));
            }
        }
    }

    fn lost(&self, why: &str) -> Error {
        Error::peer_lost(self.peer.to_string(), why)
    }
}

impl fmt::Debug for FrameReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrameReader({})", self.peer)
    }
}

/// Writes frames.
pub(crate) struct FrameWriter {
    stream: Writing,
    peer: Arc<str>,
    within: Duration,
    /// A frame was begun and not finished.
    broken: bool,
    /// The account that long frames are charged to.
    account: Option<Arc<Account>>,
}

impl FrameWriter {
    pub(super) fn new(stream: Writing, peer: Arc<str>, limits: &Limits) -> Self {
        Self {
            stream,
            peer,
            within: limits.write,
            broken: false,
            account: None,
        }
    }

    /// Charges long frames to the account from now on.
    pub(crate) fn charge_to(&mut self, account: &Arc<Account>) {
        self.account = Some(Arc::clone(account));
    }

    /// Writes a frame, with fds if the connection is local.
    ///
    /// # Errors
    /// [`TimedOut`](crate::ShareError::TimedOut) after `limits.write`,
    /// [`PeerLost`](crate::ShareError::PeerLost), [`InvalidArgument`](crate::MemoryError::InvalidArgument) for
    /// no bytes, more than 4 GiB, or fds that cannot be sent; [`Error::LimitReached`] for a frame whose charge
    /// exceeds a limit. After errors other than the last two, the connection is unusable.
    ///
    /// # Cancel safety
    /// Not cancel safe: after a partial write every later one fails.
    pub(crate) async fn write(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let mut whole = Zeroizing::new(Vec::with_capacity(HEADER + bytes.len()));
        append(&mut whole, bytes)?;
        if !fds.is_empty() && !matches!(self.stream, Writing::Unix(_)) {
            return Err(Error::invalid(
                "frame",
                "fds can be sent only over Unix sockets",
            ));
        }
        // The bytes and their copy.
        let account = self.account.as_ref().filter(|_| bytes.len() > FIRST);
        let charge = account.map(|account| account.charge(2 * bytes.len()));
        let _charge = charge.transpose()?;
        self.send(&whole, fds).await
    }

    /// Writes short frames in one piece: a peer gets all of them even if this end closes right afterwards. Errors and
    /// cancel safety are those of [`write`](Self::write).
    pub(crate) async fn write_together(&mut self, frames: &[Zeroizing<Vec<u8>>]) -> Result<()> {
        let mut whole = Zeroizing::new(Vec::new());
        for frame in frames {
            append(&mut whole, frame)?;
        }
        self.send(&whole, &[]).await
    }

    /// Writes whole frames, in one write: one segment, one TLS record, one wakeup at the other end.
    async fn send(&mut self, whole: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        if std::mem::replace(&mut self.broken, true) {
            return Err(Error::peer_lost(
                self.peer.to_string(),
                "its connection was given up",
            ));
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

/// Appends a frame: its length and its bytes.
fn append(whole: &mut Vec<u8>, bytes: &[u8]) -> Result<()> {
    let length = u32::try_from(bytes.len())
        .ok()
        .filter(|&length| length > 0)
        .ok_or_else(|| Error::invalid("frame", "it is empty or has more than 4 GiB"))?;
    whole.extend_from_slice(&length.to_be_bytes());
    whole.extend_from_slice(bytes);
    Ok(())
}

impl fmt::Debug for FrameWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrameWriter({})", self.peer)
    }
}
