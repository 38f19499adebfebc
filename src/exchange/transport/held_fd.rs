//! File descriptors that a server has open for its peers, counted until they are closed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::FdBudget;
use crate::Limits;
use crate::account::{Accounts, Charge};

/// Returns accounts for a server's fds that are being sent to peers. Without fds
/// for connections and files, a server could serve no peer.
pub(crate) fn fd_accounts(limits: &Limits) -> Arc<Accounts> {
    let all = (FdBudget::of_process().held, "fds of all peers at once");
    Accounts::with(all, (limits.fds_per_peer, "fds of this peer at once"))
}

/// An fd that is counted until it is closed; a client's are not counted.
#[derive(Debug)]
pub(crate) struct HeldFd {
    fd: OwnedFd,
    _held: Option<Arc<Charge>>,
}

impl HeldFd {
    /// Returns fds that came together, counted until the last of them is closed.
    pub fn counted(fds: Vec<OwnedFd>, charge: Charge) -> Vec<Self> {
        let held = Some(Arc::new(charge));
        let one = |fd| Self {
            fd,
            _held: held.clone(),
        };
        fds.into_iter().map(one).collect()
    }

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
    use crate::PeerName;

    #[test]
    fn fds_that_came_together_count_until_the_last_is_closed() {
        let accounts = fd_accounts(&Limits::default());
        let null = || std::fs::File::open("/dev/null").unwrap().into();
        let charge = accounts.of(&PeerName::User(1)).charge(2).unwrap();
        let mut held = HeldFd::counted(vec![null(), null()], charge).into_iter();
        drop(held.next());
        assert_eq!(accounts.used(), 2);
        drop(held);
        assert_eq!(accounts.used(), 0);
    }

    #[test]
    fn all_peers_together_have_their_share_of_the_process() {
        let limits = Limits {
            fds_per_peer: usize::MAX,
            ..Limits::default()
        };
        let account = fd_accounts(&limits).of(&PeerName::User(1));
        let why = account.charge(usize::MAX).unwrap_err().to_string();
        assert!(why.contains("of all peers"), "{why}");
    }
}
