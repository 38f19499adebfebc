//! Accepts connections from other processes of the machine.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::socket::{self, SocketFile};
use super::{Channel, Peers};
use crate::{Error, MemoryError, Result};

/// A Unix socket that other processes of this machine connect to.
///
/// Only this process's user can open its file, unless the policy admits others. It replaces a file that a
/// dead process has left. Dropping the listener removes the file.
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
    /// [`System`](MemoryError::System) that names the path, also if another process listens there.
    pub fn bind(path: impl AsRef<Path>, peers: Peers) -> Result<Self> {
        let (socket, file) = socket::listen(path.as_ref(), &peers)?;
        Ok(Self {
            socket: socket.into(),
            peers,
            timeout: None,
            _file: file,
        })
    }

    /// Sets how long [`accept`](Self::accept) waits; the default is forever. At most twice as long if it
    /// skips processes that have disconnected.
    ///
    /// # Errors
    /// [`InvalidArgument`](MemoryError::InvalidArgument) for a timeout of 0.
    pub fn set_timeout(&mut self, timeout: Duration) -> Result<()> {
        set_socket_timeout(&self.socket, Timeout::Recv, Some(timeout))
            .map_err(|error| MemoryError::invalid("timeout", error.to_string()))?;
        self.timeout = Some(timeout);
        Ok(())
    }

    /// Waits for the next process that connects. Skips one that has disconnected without sending anything.
    ///
    /// Any other process may disconnect at any time, so every operation on the channel can fail with
    /// [`Error::PeerLost`]: that ends this channel, not the accept loop.
    ///
    /// # Errors
    /// [`Error::NotTrusted`] for a process that the policy does not admit, which is disconnected;
    /// [`Error::TimedOut`]; the system's errors. The listener stays usable after each.
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

    /// Ends listening: calls of [`accept`](Self::accept) that wait return an error, as all later ones do. Processes that
    /// connect are refused.
    pub fn close(&self) {
        // It fails only for a socket that does not listen.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
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
            _ => MemoryError::system("accepting a connection", &error).into(),
        })?;
        Channel::new(stream, &self.peers)
    }
}

fn timed_out(after: Duration) -> Error {
    Error::timed_out("waiting for a connection", after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Unreachable;

    #[test]
    fn waits_are_ended_by_other_threads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path, Peers::same_user()).unwrap();
        let client = Channel::connect_within(&path, Peers::same_user(), Duration::from_secs(60));
        let _client = client.unwrap();
        let mut channel = listener.accept().unwrap();
        let closer = channel.closer().unwrap();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(move || channel.receive_text(1).unwrap_err());
            let accepting = scope.spawn(|| listener.accept().unwrap_err());
            closer.close();
            listener.close();
            let lost = receiving.join().unwrap();
            assert!(matches!(lost, Error::PeerLost { .. }), "{lost}");
            let ended = accepting.join().unwrap();
            assert!(ended.memory().is_some(), "{ended}");
        });
        let refused = Channel::connect(&path, Peers::same_user()).unwrap_err();
        let cause = Unreachable::NobodyListens;
        assert!(matches!(refused, Error::Unreachable { cause: found, .. } if found == cause));
    }
}
