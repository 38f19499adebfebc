//! A lease, as its holder sees it.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::{oneshot, watch};

use super::session::Keep;
use crate::share::InstanceId;
use crate::{Error, Result};

/// How things stand with memory that an exporter lends.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum LeaseState {
    /// The exporter knows that this process holds the memory, and keeps it for it.
    Held,
    /// The exporter wants the memory back: unmap and release it.
    Withdrawing {
        /// When the exporter stops waiting.
        until: Instant,
    },
    /// The exporter is gone, or keeps the memory no longer for this process. This is final. The
    /// mapping can still be read and written, but what it holds is nobody's promise any more.
    Lost(Error),
}

impl LeaseState {
    /// Whether the lease is lost.
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

/// Names a lease through all sessions of a client, with one server or with its successors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct LeaseKey {
    /// Which of the client's sessions.
    pub(super) epoch: u64,
    /// The server's number.
    pub(super) lease: u64,
}

/// What the session knows of a lease.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) name: String,
    /// Who granted it: told of its end in a later session too, if it still lives.
    pub(super) instance: InstanceId,
    pub(super) state: watch::Sender<LeaseState>,
    /// Where a waiting `release` wants its answer.
    pub(super) done: Option<oneshot::Sender<Result<()>>>,
}

/// A lease of this client, released when dropped; keeps the connection open till then.
pub(super) struct Lease {
    pub(super) keep: Keep,
    pub(super) key: LeaseKey,
    /// Behind a lock, for the version that was last seen.
    state: Mutex<watch::Receiver<LeaseState>>,
    released: bool,
}

impl Lease {
    pub(super) fn new(keep: Keep, key: LeaseKey, state: watch::Receiver<LeaseState>) -> Self {
        Self {
            keep,
            key,
            state: Mutex::new(state),
            released: false,
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, watch::Receiver<LeaseState>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> LeaseState {
        self.seen().borrow_and_update().clone()
    }

    /// What becomes of it, beside what is seen here; its last word stays when it was released.
    pub(super) fn states(&self) -> watch::Receiver<LeaseState> {
        self.seen().clone()
    }

    /// Waits for a state that was not seen yet; a lost lease stays as it is.
    pub(super) async fn changed(&self) -> LeaseState {
        let mut state = self.seen().clone();
        if state.has_changed().is_ok_and(|changed| !changed) && !state.borrow().is_lost() {
            // An error means that the session has forgotten the lease, whose last word stands.
            let _ = state.changed().await;
        }
        self.state()
    }

    /// Ends the lease; the answer comes when the server has noted it.
    pub(super) fn release(mut self) -> Noted {
        self.released = true;
        let (done, answer) = oneshot::channel();
        self.keep.session().release(self.key, Some(done));
        Noted {
            // The connection lasts until the answer.
            keep: self.keep.clone(),
            answer,
        }
    }
}

/// The answer to a release, which is to come.
pub(super) struct Noted {
    keep: Keep,
    answer: oneshot::Receiver<Result<()>>,
}

impl Noted {
    /// Waits for it.
    pub(super) async fn wait(self, name: &str) -> Result<()> {
        let session = self.keep.session();
        let patience = session.patience();
        match tokio::time::timeout(patience, self.answer).await {
            Ok(Ok(released)) => released,
            Ok(Err(_)) => Err(session.down()),
            Err(_) => Err(Error::TimedOut {
                what: format!("the release of '{name}'"),
                after: patience,
            }),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.released {
            self.keep.session().release(self.key, None);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("lease", &self.key.lease)
            .finish_non_exhaustive()
    }
}
