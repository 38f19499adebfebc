//! Counts a connection against the limits, from its first byte on.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::ServerCore;
use super::handshakes::Handshake;
use super::outcome::{No, over};
use super::stats::count;
use crate::PeerName;
use crate::account::{Account, CONNECTION, Charge};
use crate::transport::{Connection, Incoming};
use crate::{Error, Refusal, Result};

/// A connection that has not been greeted yet.
pub(super) struct Newcomer {
    pub incoming: Incoming,
    pub open: Open,
    pub shaking: Shaking,
}

/// Counts as an open connection until dropped.
pub(super) struct Open(Arc<ServerCore>);

impl Open {
    pub fn enter(inner: &Arc<ServerCore>) -> Self {
        count(&inner.counters.connections);
        Self(Arc::clone(inner))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.counters.connections.fetch_sub(1, Relaxed);
    }
}

/// Counts as a connection that has not been greeted yet until dropped.
pub(super) struct Shaking(Arc<ServerCore>, Option<Handshake>);

impl Shaking {
    pub fn enter(inner: &Arc<ServerCore>, handshake: Handshake) -> Self {
        count(&inner.counters.handshakes);
        Self(Arc::clone(inner), Some(handshake))
    }

    /// Ends the wait for the greeting; fails if the connection has had to give way.
    pub fn finish(mut self) -> Result<()> {
        match self.1.take().is_some_and(Handshake::finish) {
            true => Ok(()),
            false => Err(gave_way(&self.0)),
        }
    }
}

impl Drop for Shaking {
    fn drop(&mut self) {
        self.0.counters.handshakes.fetch_sub(1, Relaxed);
    }
}

/// Returns the error of a connection that had to give way.
pub(super) fn gave_way(inner: &ServerCore) -> Error {
    count(&inner.counters.dropped_handshakes);
    let limit = inner.limits.handshakes;
    Error::peer_lost(
        "a connection without a hello",
        format!(
            "it gave way to newer ones: {limit} go at once (`handshakes`), fewer where file \
             descriptors run out"
        ),
    )
}

/// Counts as a greeted connection, and as one of its peer, until dropped.
pub(super) struct OfPeer(
    Arc<ServerCore>,
    PeerName,
    Arc<Account>,
    #[expect(dead_code, reason = "dropped")] Charge,
);

impl OfPeer {
    pub fn enter(inner: &Arc<ServerCore>, peer: &PeerName) -> Result<Self, No> {
        let mut state = inner.state();
        let (all, each) = (inner.limits.connections, inner.limits.connections_per_peer);
        if state.connections.of(peer) >= each {
            return Err((Refusal::Limit, format!("{each} connections of this peer")));
        }
        if state.connections.all() >= all {
            tracing::warn!(limit = all, "too many connections");
            return Err((Refusal::Limit, format!("{all} connections")));
        }
        let account = inner.accounts.of(peer);
        let charge = account.charge(CONNECTION).map_err(over)?;
        state.connections.add(peer, 1);
        Ok(Self(Arc::clone(inner), peer.clone(), account, charge))
    }

    /// Returns the account of its peer.
    pub fn account(&self) -> &Arc<Account> {
        &self.2
    }

    /// Charges the connection's frames to its peer.
    pub fn charge_frames(&self, connection: &mut Connection) {
        connection.reader.charge_to(&self.2);
        connection.writer.charge_to(&self.2);
    }
}

impl Drop for OfPeer {
    fn drop(&mut self) {
        self.0.state().connections.take(&self.1, 1);
    }
}
