//! Where other processes of the machine connect.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::socket::{self, SocketFile};
use super::{Channel, Peers};
use crate::{Error, Result};

/// A Unix socket at which other processes of this machine connect.
///
/// Its file is for this process's user alone, unless the policy admits others; a file that a dead
/// process has left is replaced. It is removed when the listener is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    peers: Peers,
    timeout: Option<Duration>,
    _file: SocketFile,
}

impl Listener {
    /// Listens at `path`.
    ///
    /// # Errors
    /// [`Error::System`] that names the path, also where somebody listens there already.
    pub fn bind(path: impl AsRef<Path>, peers: Peers) -> Result<Self> {
        let (socket, file) = socket::listen(path.as_ref(), &peers)?;
        Ok(Self {
            socket: socket.into(),
            peers,
            timeout: None,
            _file: file,
        })
    }

    /// How long [`accept`](Self::accept) waits; without this, for ever. Twice as long at most, where it passes
    /// over processes that have gone again.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no time at all.
    pub fn set_timeout(&mut self, timeout: Duration) -> Result<()> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(timeout))
            .map_err(|error| Error::invalid("timeout", error.to_string()))?;
        self.timeout = Some(timeout);
        Ok(())
    }

    /// Waits for the next process that connects. One that has gone again without a word is passed over.
    ///
    /// Any other may go at any time, so what is done with the channel can fail at any time, with
    /// [`Error::PeerLost`]: that ends this channel and need not end whoever accepts.
    ///
    /// # Errors
    /// [`Error::NotTrusted`] for one that the policy does not admit, which is disconnected;
    /// [`Error::TimedOut`]; the system's. The listener goes on after each.
    pub fn accept(&self) -> Result<Channel> {
        let until = self
            .timeout
            .and_then(|after| Instant::now().checked_add(after));
        loop {
            let channel = self.accept_any()?;
            if !channel.is_gone() {
                return Ok(channel);
            }
            if let (Some(until), Some(after)) = (until, self.timeout)
                && Instant::now() >= until
            {
                return Err(timed_out(after));
            }
        }
    }

    fn accept_any(&self) -> Result<Channel> {
        let accepted = loop {
            match self.socket.accept() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        let (stream, _) = accepted.map_err(|error| match (error.kind(), self.timeout) {
            (io::ErrorKind::WouldBlock, Some(after)) => timed_out(after),
            _ => Error::system("accepting a connection", &error),
        })?;
        Channel::new(stream, &self.peers)
    }
}

fn timed_out(after: Duration) -> Error {
    Error::TimedOut {
        what: "waiting for a connection".into(),
        after,
    }
}
