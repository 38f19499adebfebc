//! Ends sessions and leases whose peer is no longer trusted or admitted.

use std::sync::MutexGuard;
use std::time::Instant;

use super::ServerCore;
use super::audit::audit;
use super::link::Link;
use super::state::ServerState;
use crate::per_driver::lock;
use crate::protocol::Refused;
use crate::{PeerName, Refusal};

impl ServerCore {
    /// Ends sessions at once. Their connections send the reason and end; their leases expire, because the
    /// peers may still have the memory mapped.
    pub(super) fn dismiss(
        &self,
        mut state: MutexGuard<'_, ServerState>,
        sessions: &[u64],
        reason: Refusal,
        detail: &str,
    ) -> usize {
        let mut ended = Vec::new();
        for &id in sessions {
            let Some(session) = state.sessions.get(id).cloned() else {
                continue;
            };
            session.dismiss(Refused {
                reason: reason.word().into(),
                detail: detail.into(),
            });
            ended.extend(state.leases.end(id));
            let peer = session.peer.clone();
            tracing::warn!(%peer, session = id, %reason, detail, "session dismissed");
            let reason = reason.word();
            audit!(
                self.audit,
                Memory,
                Some(&peer),
                "session_dismissed",
                session = id,
                reason
            );
        }
        let count = ended.len();
        self.sessions_over(state, ended);
        count
    }

    /// Ends the session of a connection that has just begun or resumed it, if its user was taken off the list meanwhile.
    pub(super) fn check_user(&self, link: &Link) {
        if let Some(uid) = link.session.user()
            && !lock(&self.peers).admits_user(uid)
        {
            match link.session.peer {
                PeerName::User(_) => self.dismiss_link(link, Refusal::Forbidden, NO_USER),
                // It may go on over TCP.
                _ => link.session.cut(),
            }
        }
    }

    /// Ends the session of a connection, unless another connection has taken it over.
    pub(super) fn dismiss_link(&self, link: &Link, reason: Refusal, detail: &str) {
        let state = self.state();
        if link.session.is_of(link.id) {
            self.dismiss(state, &[link.session.id], reason, detail);
        }
    }

    /// Ends the leases that were recalled and not released in time.
    pub(super) fn end_recalled(&self, state: &mut ServerState, now: Instant) {
        while let Some(lease) = state.recalls.pop(now) {
            let Some(lapsed) = state.leases.end_lease(lease) else {
                continue;
            };
            let why = "this peer is no longer on the name's access list";
            state.tell_ended(&lapsed, Refusal::Forbidden, why);
            state.audit_lease("revoked", &lapsed);
            self.lapsed(state, &lapsed);
        }
        state.thin_out();
    }
}

/// Why a user's sessions end.
pub(super) const NO_USER: &str = "this user may no longer connect";
