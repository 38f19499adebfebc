//! Counts a connection against the limits, from its first byte on.

use std::sync::Arc;

use super::ServerCore;
use super::newcomers::Newcomer;
use super::outcome::No;
use super::stats::Gauge;
use crate::PeerName;
use crate::account::{Account, CONNECTION, Charge};
use crate::transport::Connection;
use crate::{Error, Result};

/// The text of the limit on all connections.
pub(super) const CONNECTIONS: &str = "connections";

/// Raises a gauge of the server until dropped.
pub(super) struct Raised(Arc<ServerCore>, Gauge);

impl Raised {
    pub fn new(inner: &Arc<ServerCore>, gauge: Gauge) -> Self {
        inner.counters.count(gauge);
        Self(Arc::clone(inner), gauge)
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        self.0.counters.lower(self.1);
    }
}

/// Counts as a connection that has not been greeted yet until dropped.
pub(super) struct Shaking {
    // Dropped first: no more are counted than have a place.
    pub raised: Raised,
    pub newcomer: Newcomer,
}

impl Shaking {
    /// Ends the wait for the greeting; fails if the connection was to be closed.
    pub fn finish(self) -> Result<()> {
        let inner = Arc::clone(&self.raised.0);
        drop(self.raised);
        if self.newcomer.greeted() {
            Ok(())
        } else {
            Err(made_room(&inner))
        }
    }
}

/// Returns the error of a connection that was closed for a newer one.
pub(super) fn made_room(inner: &ServerCore) -> Error {
    inner
        .counters
        .count(|counters| &counters.dropped_handshakes);
    let limit = inner.limits.handshakes;
    Error::peer_lost(
        "a connection without a hello",
        format!(
            "closed to make room for newer connections (limit `handshakes` {limit}, fewer where file descriptors \
             run out)"
        ),
    )
}

/// Counts as a greeted connection, and as one of its peer, until dropped.
pub(super) struct OfPeer {
    pub account: Arc<Account>,
    _charges: [Charge; 2],
}

impl OfPeer {
    pub fn enter(inner: &ServerCore, peer: &PeerName) -> Result<Self, No> {
        let counted = inner.connections.of(peer).charge(1).inspect_err(|over| {
            if over.what == CONNECTIONS {
                tracing::warn!(limit = over.limit, "too many connections");
            }
        })?;
        let account = inner.accounts.of(peer);
        let charge = account.charge(CONNECTION)?;
        Ok(Self {
            account,
            _charges: [counted, charge],
        })
    }

    /// Charges the connection's frames to its peer.
    pub fn charge_frames(&self, connection: &mut Connection) {
        connection.reader.charge_to(&self.account);
        connection.writer.charge_to(&self.account);
    }
}
