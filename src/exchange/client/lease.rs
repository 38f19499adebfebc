//! A lease, as its holder sees it.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::{oneshot, watch};

use super::session::ClientSession;
use crate::per_driver::lock;
use crate::share::InstanceId;
use crate::{Error, Owner, Result};

/// The state of a lease.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum LeaseState {
    /// The exporter knows that this process holds the memory, and keeps it.
    Held,
    /// The exporter recalls the memory: unmap and release it.
    Withdrawing {
        /// When the exporter stops waiting.
        until: Instant,
    },
    /// The exporter is gone, or no longer keeps the memory for this process. This is final. The mapping can
    /// still be read and written, but nothing guarantees its contents.
    Lost(Error),
}

impl LeaseState {
    /// Returns whether the lease is lost.
    pub const fn is_lost(&self) -> bool {
        matches!(self, Self::Lost(_))
    }
}

impl fmt::Display for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held => f.write_str("held"),
            Self::Withdrawing { .. } => f.write_str("being withdrawn"),
            Self::Lost(error) => write!(f, "lost: {error}"),
        }
    }
}

/// Identifies a lease in all sessions of a client, with one server or with its successors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct LeaseKey {
    /// The client's session.
    pub(super) epoch: u64,
    /// The server's number.
    pub(super) lease: u64,
}

/// The session's state of a lease.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) name: String,
    /// The server that granted it: it hears of its end in a later session too, if it still runs.
    pub(super) instance: InstanceId,
    pub(super) state: watch::Sender<LeaseState>,
    /// Where a waiting `release` gets its answer.
    pub(super) done: Option<oneshot::Sender<Result<()>>>,
}

/// A lease of this client, released when dropped; it keeps the connection open until then.
pub(super) struct ClientLease {
    pub(super) keep: Keep,
    pub(super) key: LeaseKey,
    /// Under a lock, for the version that was last returned.
    state: Mutex<watch::Receiver<LeaseState>>,
    released: bool,
}

impl fmt::Debug for ClientLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientLease")
            .field("lease", &self.key.lease)
            .finish_non_exhaustive()
    }
}

impl ClientLease {
    pub(super) fn new(keep: Keep, key: LeaseKey, state: watch::Receiver<LeaseState>) -> Self {
        Self {
            keep,
            key,
            state: Mutex::new(state),
            released: false,
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, watch::Receiver<LeaseState>> {
        lock(&self.state)
    }

    pub(super) fn state(&self) -> LeaseState {
        self.seen().borrow_and_update().clone()
    }

    /// Returns a receiver of the lease's states of its own; the last state stays after the release.
    pub(super) fn states(&self) -> watch::Receiver<LeaseState> {
        self.seen().clone()
    }

    /// Waits for a state that was not returned yet; a lost lease stays lost.
    pub(super) async fn changed(&self) -> LeaseState {
        let mut state = self.seen().clone();
        if state.has_changed().is_ok_and(|changed| !changed) && !state.borrow().is_lost() {
            // An error means that the session has forgotten the lease; the last state stands.
            let _ = state.changed().await;
        }
        self.state()
    }

    /// Ends the lease. The future waits until the server has recorded it.
    pub(super) fn release(mut self, name: String) -> impl Future<Output = Result<()>> + use<> {
        self.released = true;
        let (done, answer) = oneshot::channel();
        self.keep.session().release(self.key, Some(done));
        // Keeps the connection until the answer.
        let keep = self.keep.clone();
        async move {
            let session = keep.session();
            let patience = session.patience();
            match tokio::time::timeout(patience, answer).await {
                Ok(Ok(released)) => released,
                Ok(Err(_)) => Err(session.down()),
                Err(_) => Err(Error::timed_out(
                    format!("the release of '{name}'"),
                    patience,
                )),
            }
        }
    }
}

/// A lease, and the server's details about its memory.
#[derive(Debug)]
pub(super) struct Grant {
    pub(super) lease: ClientLease,
    pub(super) name: String,
    /// The place of the word for probes.
    pub(super) probe: Option<u64>,
    pub(super) no_fabric: Option<String>,
    pub(super) owner: Owner,
}

impl Drop for ClientLease {
    fn drop(&mut self) {
        if !self.released {
            self.keep.session().release(self.key, None);
        }
    }
}

/// Keeps a session alive: it closes with the last of these.
#[derive(Debug)]
pub(super) struct Keep(Arc<ClientSession>);

impl Keep {
    pub(super) fn new(session: &Arc<ClientSession>) -> Self {
        session.users.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(session))
    }

    pub(super) fn session(&self) -> &Arc<ClientSession> {
        &self.0
    }
}

impl Clone for Keep {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.close();
        }
    }
}
