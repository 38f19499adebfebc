//! Begins, resumes and detaches sessions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::audit::audit;
use super::link::Link;
use super::outcome::{No, Outcome};
use super::process::Known;
use super::session::ServerSession;
use super::state::{ServerState, millis};
use super::{ServerCore, token};
use crate::PeerName;
use crate::Refusal;
use crate::account::{self, Account};
use crate::per_driver::lock;
use crate::protocol::{Answer, Event, Hello, Leases, VERSION, Welcome, Withdrawing};
use crate::transport::Connection;

impl ServerCore {
    /// Gives a connection to which a session moves the name of that session's peer: it keeps its rights, and gains
    /// none of the user at the Unix socket.
    pub(super) fn move_to(
        &self,
        connection: &mut Connection,
        hello: &Hello,
        own: bool,
    ) -> Result<(), No> {
        if !hello.moves {
            let why = "sessions move to this socket, and none begins here";
            return match own {
                true => Err((Refusal::Unsupported, why.into())),
                false => Ok(()),
            };
        }
        let state = self.state();
        let session = state.session_of(hello);
        let session = session.filter(|session| can_move(&state, connection, session));
        // Only then: a refusal is put down to the peer that the connection has.
        connection.peer = session.ok_or_else(cannot_move)?.peer.clone();
        Ok(())
    }

    /// Returns a session for a connection: the one that the client names, if it belongs to that peer, or a
    /// new one.
    pub(super) fn begin(
        &self,
        connection: &mut Connection,
        hello: &Hello,
        account: &Arc<Account>,
    ) -> Result<(Link, Welcome), No> {
        let peer = &connection.peer.clone();
        let mut resumed = false;
        let mut state = self.state();
        let id = state.next_number();
        let named = state.session_of(hello).filter(|one| one.peer == *peer);
        let named = named.cloned();
        // Once more: it may have ended since.
        let moves = |session: &Arc<ServerSession>| can_move(&state, connection, session);
        if hello.moves && !named.as_ref().is_some_and(moves) {
            return Err(cannot_move());
        }
        let session = match named {
            Some(session) if state.leases.attach(session.id) => {
                session.take_over(id, connection.user);
                state.unwatch(session.id);
                self.repeat_withdrawals(&state, &session);
                resumed = true;
                session
            }
            _ => {
                let at = (id, connection.user);
                self.new_session(&mut state, at, peer, account)?
            }
        };
        drop(state);
        if let Some(credential) = connection.credential.take() {
            // It stays with a session that moves to the Unix socket.
            *lock(&session.credential) = Some(credential);
        }
        let number = session.id;
        let event = match (hello.moves, resumed) {
            (true, _) => "session_moved",
            (false, true) => "session_resumed",
            (false, false) => "session_begun",
        };
        if hello.moves {
            self.counters.count(|counters| &counters.moved);
            tracing::info!(%peer, session = number, "session moved to the Unix socket");
        } else if resumed {
            self.counters.count(|counters| &counters.resumed);
            tracing::info!(%peer, session = number, "session resumed");
        } else {
            tracing::info!(%peer, session = number, agent = ?hello.agent, "session begun");
        }
        let welcome = Welcome {
            version: hello.newest.min(VERSION),
            instance: self.instance,
            boot: self.boot,
            session: session.token.clone(),
            resumed,
            peer: peer.to_string(),
            heartbeat_ms: millis(self.heartbeat),
            lease_ms: millis(self.lease),
            frame_bytes: self.limits.frame_bytes,
            local: self.local.clone(),
        };
        let link = Link {
            id,
            session,
            local: connection.local,
            queues: hello.queues,
            fds: self.fds_of(&connection.peer),
            process: Known::of(connection),
            boot: hello.boot,
        };
        let pid = link.pid();
        audit!(
            self.audit,
            Session,
            Some(peer),
            event,
            session = number,
            pid
        );
        self.check_user(&link);
        Ok((link, welcome))
    }

    /// Creates a session of a peer, for the connection `id`, of a user if it is a Unix socket.
    fn new_session(
        &self,
        state: &mut ServerState,
        at: (u64, Option<u32>),
        peer: &PeerName,
        account: &Arc<Account>,
    ) -> Result<Arc<ServerSession>, No> {
        if state.closing {
            return Err((Refusal::Closing, "the server is ending".into()));
        }
        let counted = self.sessions.of(peer).charge(1)?;
        let number = state.next_session();
        let token = token::mint(number).map_err(|e| (Refusal::Internal, e.to_string()))?;
        // Every lease may be recalled, and then end.
        let leases = self.limits.leases_per_peer.saturating_mul(2);
        let notices = self.limits.queued_frames.saturating_add(leases);
        let charge = account.charge(account::SESSION)?;
        let account = (Arc::clone(account), charge);
        let session = ServerSession::new(number, peer.clone(), token, at, notices, account);
        let session = Arc::new(session);
        state.leases.open(number, peer.clone());
        state.sessions.insert(Arc::clone(&session), counted);
        Ok(session)
    }

    /// Ends the session's leases that the client does not have, and returns those of `held` that have ended.
    pub(super) fn held(&self, link: &Link, held: &[u64]) -> Outcome {
        let mut state = self.state();
        if !link.session.is_of(link.id) {
            return Err((Refusal::Expired, "the session is elsewhere".into()));
        }
        let (dropped, unknown) = state.leases.keep_only(link.session.id, held);
        for lease in &dropped {
            state.returned(lease);
            state.audit_lease("released", lease);
        }
        // After the answer: the client skips those before it.
        self.repeat_withdrawals(&state, &link.session);
        drop(state);
        self.released.notify_waiters();
        Ok(Answer::Expired(Leases { leases: unknown }).into())
    }

    /// Queues notices again that may have been lost with the connection before.
    fn repeat_withdrawals(&self, state: &ServerState, session: &ServerSession) {
        for lease in state.leases.of_session(session.id) {
            let publication = state.publications.get(&lease.publication);
            let closing = publication.filter(|registered| registered.closing);
            let lease = lease.holder.lease;
            let until = match (closing, state.recalls.get(lease)) {
                (Some(registered), _) => registered.until,
                (None, Some(until)) => Some(until),
                (None, None) => continue,
            };
            let left = |until: Instant| until.saturating_duration_since(Instant::now());
            let ms = millis(until.map_or(Duration::ZERO, left));
            session.tell(Event::Withdrawing(Withdrawing { lease, ms }));
        }
    }

    /// Handles the end of a connection: its session survives for the time of a lease, or ends.
    pub(super) fn detach(&self, link: &Link, last_word: Instant) {
        let session = &link.session;
        let mut state = self.state();
        if !session.is_of(link.id) {
            return;
        }
        state.unwatch(session.id);
        let until = last_word + self.lease;
        let ended = state.leases.detach(session.id, until);
        if ended {
            state.forget_session(session.id);
        } else {
            state.leases.follow(session.id);
        }
        drop(state);
        if ended {
            self.session_ended(session.id, &session.peer);
        } else {
            self.janitor.notify_one();
        }
    }
}

/// Returns whether a session may move to this connection. A thief of its token cannot move it while its peer is not connected, or is
/// connected over a Unix socket.
fn can_move(state: &ServerState, connection: &Connection, session: &ServerSession) -> bool {
    connection.user.is_some() && session.user().is_none() && state.leases.is_attached(session.id)
}

fn cannot_move() -> No {
    let why = "no session with this token has a connection over TCP now";
    (Refusal::Expired, why.into())
}
