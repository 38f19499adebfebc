//! Memory that is no longer published, and that a peer may still have mapped.

use std::sync::Arc;

use tokio::sync::Notify;

use super::ServerCore;
use super::publish::Published;
use super::state::Unconfirmed;
use crate::PeerName;

/// Memory whose name is gone while holders are left. Dropping it stops the tracking of these holders.
///
/// It does not keep the memory itself.
pub struct UnconfirmedRelease {
    inner: Arc<ServerCore>,
    publication: u64,
    changed: Arc<Notify>,
}

impl Published {
    /// Removes the name at once, as dropping does, but keeps listening to the holders.
    pub fn leave(&self) -> UnconfirmedRelease {
        let (inner, publication) = self.parts();
        let changed = Arc::new(Notify::new());
        let mut state = inner.state();
        let unconfirmed = Unconfirmed {
            name: self.name().into(),
            changed: Arc::clone(&changed),
        };
        state.unconfirmed.insert(publication, unconfirmed);
        let published = state.take_away(publication);
        drop(state);
        if published.is_some() {
            self.left();
        }
        UnconfirmedRelease {
            inner: Arc::clone(inner),
            publication,
            changed,
        }
    }
}

impl UnconfirmedRelease {
    /// Waits until every holder has said that it released the memory, or its process on this machine has ended.
    /// Returns `false` if the server has ended before.
    ///
    /// # Cancel safety
    /// It may be dropped and called again.
    pub async fn resolved(&self) -> bool {
        while !self.is_resolved() {
            tokio::select! {
                biased;
                () = self.inner.ended.cancelled() => return false,
                () = self.changed.notified() => {}
            }
        }
        // A server that has ended knows of no holders.
        !self.inner.ended.is_cancelled()
    }

    /// Returns the peers of the holders that are remembered: live ones first, then in the order of their grants.
    pub fn peers(&self) -> Vec<PeerName> {
        let (holders, _) = self.inner.state().leases.holders(self.publication);
        holders.into_iter().map(|holder| holder.peer).collect()
    }

    fn is_resolved(&self) -> bool {
        !self.inner.state().leases.is_held(self.publication)
    }
}

impl Drop for UnconfirmedRelease {
    fn drop(&mut self) {
        let mut state = self.inner.state();
        state.end_leases(self.publication, "the exporter has withdrawn it");
        state.unconfirmed.remove(&self.publication);
    }
}
