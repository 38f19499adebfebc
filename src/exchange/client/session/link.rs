//! The connection's state: silence, breaks, and their effect on the leases.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{ClientSession, LeaseState, Link, Notified, PendingRequest, SessionState, change};
use crate::client::greet::{Established, Resume, is_final};
use crate::client::text;
use crate::protocol::Refused;
use crate::transport::Unconnected;
use crate::{Error, Refusal, ShareError};

impl ClientSession {
    /// Records that a frame has arrived.
    pub(in crate::client) fn heard(&self) {
        let mut state = self.lock();
        state.silence.last = Instant::now();
        state.silence.total = Duration::ZERO;
    }

    /// Records that at least a part of `tick` has passed; returns how long the server has been silent. After
    /// the time of a lease, the leases are lost.
    pub(in crate::client) fn tick(&self, tick: Duration) -> Duration {
        let mut state = self.lock();
        let now = Instant::now();
        let gone = now.saturating_duration_since(state.silence.last);
        state.silence.total += gone.min(tick * 2);
        state.silence.last = now;
        let silent = state.silence.total;
        if silent >= state.terms.lease {
            let last = match &state.link {
                Link::Down(Unconnected { error, .. }) | Link::Over(error) => format!("; {error}"),
                Link::Up => String::new(),
            };
            let why = format!("not a word for {silent:?}{last}");
            let why = Error::peer_lost(state.terms.peer.clone(), why);
            self.lose_all(&state, &why);
            if matches!(state.link, Link::Down(_)) {
                self.gone.send_replace(Some(why));
            }
        }
        // Also here, because connection attempts may be rare by then.
        self.lose_if_gone(&state);
        silent
    }

    /// Records that an attempt to reconnect has failed.
    ///
    /// If no process listens at the address for the time of a heartbeat, the server is gone, and its leases
    /// with it: there is no need to wait for their expiry.
    pub(in crate::client) fn still_down(&self, why: Unconnected) {
        let mut state = self.lock();
        let error = lost(why.error);
        if is_final(&error) {
            self.gone.send_replace(Some(error.clone()));
        }
        state.link = Link::Down(Unconnected { error, ..why });
        self.lose_if_gone(&state);
    }

    fn lose_if_gone(&self, state: &SessionState) {
        if let Link::Down(Unconnected { nobody: true, .. }) = &state.link
            && state.silence.total >= state.terms.heartbeat
        {
            let why = "nobody listens at its address any more";
            let why = Error::peer_lost(state.terms.peer.clone(), why);
            self.lose_all(state, &why);
            self.gone.send_replace(Some(why));
        }
    }

    /// Requests a ping, unless the last one is not answered yet.
    pub(in crate::client) fn ping(&self) {
        self.lock().ping_due = true;
        self.wake.notify_one();
    }

    /// Handles a broken connection: pending requests get no answer.
    pub(in crate::client) fn broken(&self, why: &Error) {
        let mut state = self.lock();
        state.link = Link::Down(why.clone().into());
        state.ping_sent = false;
        state.ping_due = false;
        state.releases_sent = 0;
        let waiting = std::mem::take(&mut state.waiting);
        let mut replies = Vec::new();
        for (_, waiting) in waiting {
            match waiting {
                PendingRequest::User { reply, .. } => replies.push(reply),
                PendingRequest::Release(key) => state.releases.push_front(key),
                PendingRequest::Ping | PendingRequest::Held => {}
            }
        }
        drop(state);
        for reply in replies {
            drop(reply.send(Err(why.clone())));
        }
    }

    /// Returns the request to resume the session.
    pub(in crate::client) fn resume(&self) -> Resume {
        let state = self.lock();
        Resume {
            session: state.terms.welcome.session.clone(),
            server: state.terms.server.clone(),
        }
    }

    /// Marks the session as lost, with all that depends on it.
    fn lose_all(&self, state: &SessionState, why: &Error) {
        for held in state.leases.values() {
            change(&held.state, &LeaseState::Lost(why.clone()));
        }
        self.tell(Notified::SessionLost(Arc::new(why.clone())));
    }

    /// Handles the server's end of the session, and of its leases. Returns the reason.
    pub(in crate::client) fn dismissed(&self, why: &Refused) -> Error {
        let state = self.lock();
        let why = text::dismissed(&state.terms.peer, why);
        self.lose_all(&state, &why);
        self.gone.send_replace(Some(why.clone()));
        why
    }

    /// Returns whether a user waits for an answer.
    pub(in crate::client) fn is_asking(&self) -> bool {
        let state = self.lock();
        let mut waiting = state.waiting.values();
        waiting.any(|waiting| matches!(waiting, PendingRequest::User { .. }))
    }

    /// Handles a new connection.
    pub(in crate::client) fn resumed(&self, established: &Established) {
        let terms = &established.terms;
        let mut state = self.lock();
        if !terms.welcome.resumed {
            let why = if terms.welcome.instance == state.terms.welcome.instance {
                Error::refused(
                    terms.peer.clone(),
                    "to go on with the session",
                    Refusal::Expired,
                    "it heard nothing for too long",
                )
            } else {
                Error::Stale {
                    what: format!("a lease from {}", terms.peer),
                    why: "the server has been restarted since".into(),
                }
            };
            self.lose_all(&state, &why);
            state.epoch += 1;
            // A server that still runs must learn of the unmapping; leases of another server are forgotten.
            for key in std::mem::take(&mut state.releases) {
                let held = state.leases.get(&key);
                match held.is_some_and(|held| held.instance == terms.welcome.instance) {
                    true => state.releases.push_back(key),
                    false => state.end(key, Err(why.clone())),
                }
            }
        }
        state.terms = Arc::new(terms.clone());
        state.held_due = terms.welcome.resumed;
        state.link = Link::Up;
        state.silence.last = Instant::now();
        state.silence.total = Duration::ZERO;
        self.gone.send_replace(None);
        drop(state);
        self.tell(Notified::Fresh);
    }

    /// Handles the end of the task.
    pub(in crate::client) fn over(&self, why: &Error) {
        self.broken(why);
        self.permits.close();
        let mut state = self.lock();
        self.lose_all(&state, why);
        state.link = Link::Over(why.clone());
        for key in std::mem::take(&mut state.releases) {
            state.end(key, Err(why.clone()));
        }
        drop(state);
        self.tell(Notified::Over);
        self.over.send_replace(true);
    }
}

/// Converts the error of an attempt to reconnect to an error of the connection before.
fn lost(error: Error) -> Error {
    match error {
        Error::Share(ShareError::Unreachable { peer, why, .. }) => Error::peer_lost(peer, why),
        other => other,
    }
}
