//! Other processes: with which of a machine to share, and whether one still has its end of something shared.

use std::fmt;
use std::os::fd::OwnedFd;

use rustix::net::{Shutdown, shutdown};

use super::fd;
use crate::fork::Generation;
use crate::ledger::Party;
use crate::{Distrust, Error, Result};

/// The credentials of the process that made the other end of a Unix socket's connection. Source: unix(7),
/// `SO_PEERCRED`.
///
/// Fixed when the connection was made: they name the process that connected or listened, even if another
/// process has the socket now. User and group are in terms of this process's user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Credentials {
    /// The process id; `None` in a PID namespace that this process cannot see. For display only: the process
    /// may end at any time, and its id be reused.
    pub pid: Option<u32>,
    /// The effective user.
    pub uid: u32,
    /// The effective group.
    pub gid: u32,
}

impl fmt::Display for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "process {pid} of user {}", self.uid),
            None => write!(f, "a process of user {}", self.uid),
        }
    }
}

impl From<Credentials> for Party {
    fn from(peer: Credentials) -> Self {
        Self {
            pid: peer.pid,
            name: peer.to_string(),
        }
    }
}

/// The users whose processes may connect over Unix sockets: by default only this process's user.
///
/// ```
/// use egmem::share::Peers;
///
/// let peers = Peers::same_user().and_user(1000);
/// # let _ = peers;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers {
    /// `None`: any user.
    users: Option<Vec<u32>>,
}

impl Default for Peers {
    fn default() -> Self {
        Self::same_user()
    }
}

impl Peers {
    /// Admits processes of this process's effective user. That includes root only if this process runs as
    /// root.
    pub fn same_user() -> Self {
        Self::user(rustix::process::geteuid().as_raw())
    }

    /// Admits processes of one user only.
    pub fn user(uid: u32) -> Self {
        Self {
            users: Some(vec![uid]),
        }
    }

    /// Also admits processes of `uid`.
    pub fn and_user(mut self, uid: u32) -> Self {
        if let Some(users) = &mut self.users {
            users.push(uid);
        }
        self
    }

    /// Admits processes of any user.
    pub fn any_user(mut self) -> Self {
        self.users = None;
        self
    }

    /// Checks a peer.
    ///
    /// # Errors
    /// [`Error::NotTrusted`] with the peer's user.
    pub fn admit(&self, peer: &Credentials) -> Result<()> {
        if self.admits_user(peer.uid) {
            return Ok(());
        }
        Err(Error::NotTrusted {
            peer: peer.to_string(),
            cause: Distrust::User,
            why: format!("user {} is not on the list", peer.uid),
        })
    }

    /// Returns whether processes of this user are admitted.
    pub fn admits_user(&self, uid: u32) -> bool {
        let users = self.users.as_ref();
        users.is_none_or(|users| users.contains(&uid))
    }

    /// Returns whether processes of users other than this process's are admitted.
    pub fn reach_beyond_own_user(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        let users = self.users.as_ref();
        users.is_none_or(|users| users.iter().any(|&uid| uid != own))
    }
}

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
    pub(super) fn new(socket: OwnedFd) -> Self {
        let process = Generation::current();
        Self { socket, process }
    }

    /// Returns whether the other end was dropped, or its process has ended. It never changes back. What that process wrote to
    /// shared memory by its CPU is seen then.
    pub fn is_cut(&self) -> bool {
        // Bytes that were sent to this end change nothing: nobody reads them.
        fd::has_hung_up(&self.socket)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn of(uid: u32) -> Credentials {
        Credentials {
            pid: Some(1),
            uid,
            gid: 0,
        }
    }

    #[test]
    fn only_listed_peers_are_admitted() {
        let own = rustix::process::geteuid().as_raw();
        let peers = Peers::default();
        peers.admit(&of(own)).unwrap();
        let error = peers.admit(&of(own + 1)).unwrap_err();
        assert!(matches!(error, Error::NotTrusted { .. }), "{error}");
        assert!(!peers.reach_beyond_own_user());
        let more = peers.clone().and_user(own + 1);
        more.admit(&of(own + 1)).unwrap();
        assert!(more.admit(&of(own + 2)).is_err());
        assert!(more.reach_beyond_own_user());
        peers.any_user().admit(&of(own + 2)).unwrap();
        assert!(Peers::user(own + 1).admit(&of(own)).is_err());
    }
}
