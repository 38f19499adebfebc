//! A lease, as its holder sees it.

use std::fmt;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use tokio::sync::watch;
use tokio::time::timeout;

use super::session::SessionUser;
use crate::per_driver::lock;
use crate::share::InstanceId;
use crate::{Error, Result};

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

/// Identifies a lease in all sessions of a client: an instance of the server uses a number once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LeaseKey {
    pub(super) instance: InstanceId,
    pub(super) lease: u64,
}

/// The session's state of a lease.
pub(super) struct Held {
    pub(super) name: String,
    /// Dropped once the lease is released.
    pub(super) state: watch::Sender<LeaseState>,
}

impl Held {
    /// Sets the state, unless the lease is lost, which is final.
    pub(super) fn set_state(&self, to: LeaseState) {
        self.state.send_if_modified(|now| {
            let changes = !now.is_lost() && *now != to;
            if changes {
                *now = to;
            }
            changes
        });
    }
}

/// A lease of this client, released when dropped; it keeps the connection open until then.
#[derive(Debug)]
pub(super) struct ClientLease {
    pub(super) session: SessionUser,
    pub(super) key: LeaseKey,
    /// Under a lock, for the version that was last returned.
    state: Mutex<watch::Receiver<LeaseState>>,
}

impl ClientLease {
    pub(super) fn new(
        session: SessionUser,
        key: LeaseKey,
        state: watch::Receiver<LeaseState>,
    ) -> Self {
        Self {
            session,
            key,
            state: Mutex::new(state),
        }
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, watch::Receiver<LeaseState>> {
        lock(&self.state)
    }

    /// Returns a receiver of the lease's states of its own; the last state stays after the release.
    pub(super) fn states(&self) -> watch::Receiver<LeaseState> {
        self.seen().clone()
    }

    /// Ends the lease, and waits until the server has recorded it.
    ///
    /// # Errors
    /// Why the lease was lost, or its release refused; [`TimedOut`](crate::ShareError::TimedOut).
    pub(super) async fn release(self, name: &str) -> Result<()> {
        let mut states = self.states();
        // Keeps the connection until the answer.
        let user = self.session.clone();
        drop(self);
        let released = async { while states.changed().await.is_ok() {} };
        let within = user.0.timeout();
        if timeout(within, released).await.is_err() {
            return Err(Error::timed_out(format!("the release of '{name}'"), within));
        }
        match &*states.borrow() {
            LeaseState::Lost(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }
}

impl Drop for ClientLease {
    fn drop(&mut self) {
        self.session.0.release(self.key);
    }
}
