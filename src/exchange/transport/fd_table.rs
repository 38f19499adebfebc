//! File descriptors that a server has open for its peers, counted until they are closed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use super::FdBudget;
use crate::peer_counts::PeerCounts;
use crate::per_driver::lock;
use crate::{Limits, PeerName};

/// A server's fds for peers: those received from them, and those being sent to them.
#[derive(Debug)]
pub(crate) struct FdTable {
    per_connection: usize,
    per_peer: usize,
    counts: Mutex<PeerCounts>,
}

impl FdTable {
    pub fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self {
            per_connection: limits.fds_per_connection,
            per_peer: limits.fds_per_peer,
            counts: Mutex::default(),
        })
    }

    /// Returns the share of a new connection of a peer.
    pub fn share(self: &Arc<Self>, peer: &PeerName) -> Arc<FdShare> {
        Arc::new(FdShare {
            table: Arc::clone(self),
            peer: peer.clone(),
            own: AtomicUsize::new(0),
        })
    }

    /// Returns the number of fds.
    pub fn count(&self) -> usize {
        self.counts().all()
    }

    fn counts(&self) -> MutexGuard<'_, PeerCounts> {
        lock(&self.counts)
    }
}

/// The fds of a connection.
#[derive(Debug)]
pub(crate) struct FdShare {
    table: Arc<FdTable>,
    peer: PeerName,
    /// Changed under the table's lock.
    own: AtomicUsize,
}

impl FdShare {
    /// Reserves room for `count` more, or returns the limit that this would exceed.
    pub fn reserve(self: &Arc<Self>, count: usize) -> Result<Reserved, String> {
        let table = &self.table;
        let mut counts = table.counts();
        let own = self.own.load(Relaxed);
        let refused = |limit: usize, whose: &str| Err(format!("{limit} fds of {whose} at once"));
        if own.saturating_add(count) > table.per_connection {
            return refused(table.per_connection, "this connection");
        }
        if counts.of(&self.peer).saturating_add(count) > table.per_peer {
            return refused(table.per_peer, "this peer");
        }
        // Without fds for connections and files, a server can serve no peer.
        let most = FdBudget::of_process().held;
        if counts.all().saturating_add(count) > most {
            return refused(most, "all peers");
        }
        self.own.store(own + count, Relaxed);
        counts.add(&self.peer, count);
        let share = Arc::clone(self);
        Ok(Reserved { share, count })
    }
}

/// Room for fds, released when dropped.
#[derive(Debug)]
pub(crate) struct Reserved {
    share: Arc<FdShare>,
    count: usize,
}

impl Reserved {
    /// Holds the fds that it was reserved for: their room is released when the last of them is closed.
    pub fn hold(self, fds: Vec<OwnedFd>) -> Vec<HeldFd> {
        let held = Arc::new(self);
        let fds = fds.into_iter();
        fds.map(|fd| HeldFd {
            fd,
            _held: Some(Arc::clone(&held)),
        })
        .collect()
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let mut counts = self.share.table.counts();
        self.share.own.fetch_sub(self.count, Relaxed);
        counts.take(&self.share.peer, self.count);
    }
}

/// An fd that is counted until it is closed; a client's are not counted.
#[derive(Debug)]
pub(crate) struct HeldFd {
    fd: OwnedFd,
    _held: Option<Arc<Reserved>>,
}

impl HeldFd {
    /// Returns the fd without counting it further: for clients, which requested it.
    pub fn uncounted(self) -> OwnedFd {
        self.fd
    }
}

impl From<OwnedFd> for HeldFd {
    fn from(fd: OwnedFd) -> Self {
        Self { fd, _held: None }
    }
}

impl AsFd for HeldFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fds(count: usize) -> Vec<OwnedFd> {
        let null = || std::fs::File::open("/dev/null").unwrap().into();
        (0..count).map(|_| null()).collect()
    }

    #[test]
    fn a_connection_and_a_peer_have_so_many_until_they_are_closed() {
        let mut limits = Limits::default();
        (limits.fds_per_connection, limits.fds_per_peer) = (3, 5);
        let table = FdTable::new(&limits);
        let (peer, other) = (PeerName::User(1), PeerName::User(2));
        let (a, b) = (table.share(&peer), table.share(&peer));
        let held = a.reserve(2).unwrap().hold(fds(2));
        let why = a.reserve(2).unwrap_err();
        assert!(why.contains("3 fds of this connection"), "{why}");
        let reserved = b.reserve(3).unwrap();
        let why = a.reserve(1).unwrap_err();
        assert!(why.contains("5 fds of this peer"), "{why}");
        assert!(
            table.share(&other).reserve(3).is_ok(),
            "another has its own"
        );
        assert!(a.reserve(usize::MAX).is_err());
        assert_eq!(table.count(), 5);
        drop(reserved);
        // The connection may be gone: open fds still count.
        drop(a);
        let mut held = held.into_iter();
        drop(held.next());
        assert_eq!(table.count(), 2, "they came together");
        drop(held);
        assert_eq!(table.count(), 0);
        assert!(b.reserve(3).is_ok());
    }

    #[test]
    fn all_peers_together_have_their_share_of_the_process() {
        let mut limits = Limits::default();
        (limits.fds_per_connection, limits.fds_per_peer) = (usize::MAX, usize::MAX);
        let share = FdTable::new(&limits).share(&PeerName::User(1));
        let why = share.reserve(usize::MAX).unwrap_err();
        assert!(why.contains("of all peers"), "{why}");
    }
}
