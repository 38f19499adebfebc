//! Ends sessions and leases whose peer is no longer trusted or admitted.

use std::sync::{Arc, MutexGuard};
use std::time::{Instant, SystemTime};

use super::ServerCore;
use super::audit::audit;
use super::link::Link;
use super::state::ServerState;
use crate::PeerName;
use crate::Refusal;
use crate::per_driver::lock;
use crate::protocol::Refused;
use crate::tls::Credential;

impl ServerCore {
    /// Verifies the sessions with an expired certificate.
    pub(super) async fn verify_expired(&self) {
        let now = (self.wall_clock)();
        let due = self.state().credentials.take_due(now);
        self.verify(due, now).await;
    }

    /// Verifies all sessions with the certificates that are loaded now.
    pub(super) async fn verify_all(&self) {
        let all = self.state().credentials.all();
        self.verify(all, (self.wall_clock)()).await;
    }

    /// Ends those of the sessions whose certificates are no longer valid.
    async fn verify(&self, sessions: Vec<(u64, Arc<Credential>)>, now: SystemTime) {
        let Some(tls) = self.tls.clone().filter(|_| !sessions.is_empty()) else {
            return;
        };
        // About 0.1 ms of arithmetic for each.
        let work = move || {
            let failed = sessions.into_iter().filter_map(|(session, credential)| {
                let why = tls.verify(&credential, now).err()?;
                Some((session, credential, why))
            });
            failed.collect::<Vec<_>>()
        };
        for (session, credential, why) in self.tasks.spawn_blocking(work).await.unwrap_or_default()
        {
            let state = self.state();
            // A connection with another certificate may have resumed it meanwhile.
            if state.credentials.is(session, &credential) {
                self.dismiss(state, &[session], Refusal::NotTrusted, &why);
            }
        }
    }

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

    /// Ends a session that has just begun or resumed, if its peer was verified with certificates that have been
    /// replaced meanwhile.
    pub(super) fn verify_begun(&self, link: &Link, credential: Option<&Arc<Credential>>) {
        let dismiss = |reason, detail: &str| {
            let state = self.state();
            if link.session.is_of(link.id) {
                self.dismiss(state, &[link.session.id], reason, detail);
            }
        };
        if let (Some(tls), Some(credential)) = (&self.tls, credential)
            && tls.has_reloaded(credential)
            && let Err(why) = tls.verify(credential, (self.wall_clock)())
        {
            dismiss(Refusal::NotTrusted, &why);
        }
        if let Some(uid) = link.session.user()
            && !lock(&self.peers).admits_user(uid)
        {
            match link.session.peer {
                PeerName::User(_) => dismiss(Refusal::Forbidden, NO_USER),
                // It may go on over TCP.
                _ => link.session.cut(),
            }
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
    }
}

/// Why a user's sessions end.
pub(super) const NO_USER: &str = "this user may no longer connect";
