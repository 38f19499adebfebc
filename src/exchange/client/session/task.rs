//! The client task's part of a session.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::{
    Answered, ClientSession, Command, Link, Notified, PendingRequest, RELEASES, SessionState,
    change, withdrawing,
};
use crate::client::lease::{ClientLease, Held, Keep, LeaseKey, LeaseState};
use crate::client::text;
use crate::protocol::{
    Answer, Ask, Ended, Event, Leases, MAX_LISTED, Refused, Release, Request, Withdrawing,
};
use crate::{Error, Refusal, Result};

impl ClientSession {
    /// Returns whether the connection may end: it is closing, and no release is outstanding or `patience` is over. A
    /// program that departs waits for no answer, and for no new connection.
    pub(in crate::client) fn may_end(&self, patience: Duration) -> bool {
        let state = self.lock();
        let Some(since) = state.closing else {
            return false;
        };
        let sent =
            state.releases.is_empty() || (state.departing && !matches!(state.link, Link::Up));
        let answered = state.releases_sent == 0 || state.departing;
        (sent && answered) || since.elapsed() >= patience
    }

    /// Returns the next request of the session itself to write.
    pub(in crate::client) fn own(&self) -> Option<Request> {
        let mut state = self.lock();
        let held = std::mem::take(&mut state.held_due).then(|| state.held());
        let (waiting, ask) = if let Some(held) = held.flatten() {
            (PendingRequest::Held, Ask::Held(held))
        } else if std::mem::take(&mut state.ping_due) && !state.ping_sent {
            state.ping_sent = true;
            (PendingRequest::Ping, Ask::Ping)
        } else if state.releases_sent < RELEASES || state.departing {
            let key = state.releases.pop_front()?;
            state.releases_sent += 1;
            let lease = key.lease;
            (
                PendingRequest::Release(key),
                Ask::Release(Release { lease }),
            )
        } else {
            return None;
        };
        Some(state.request(waiting, ask))
    }

    /// Takes a user's request for writing, with its fds; `None` if the user no longer waits.
    pub(in crate::client) fn admit(&self, command: Command) -> Option<(Request, Vec<OwnedFd>)> {
        let Command {
            ask,
            fds,
            reply,
            permit,
        } = command;
        if reply.is_closed() {
            return None;
        }
        let fetch = match &ask {
            Ask::Fetch(fetch) => Some(fetch.name.clone()),
            _ => None,
        };
        let waiting = PendingRequest::User {
            what: text::asked(&ask),
            fetch,
            reply,
            _permit: permit,
        };
        Some((self.lock().request(waiting, ask), fds))
    }

    /// Handles a request that could not be written.
    pub(in crate::client) fn unwritten(&self, id: u64, error: Error) {
        if let Some(PendingRequest::User { reply, .. }) = self.remove(id) {
            let _ = reply.send(Err(error));
        }
    }

    fn remove(&self, id: u64) -> Option<PendingRequest> {
        self.lock().waiting.remove(&id)
    }

    /// Handles an answer.
    pub(in crate::client) fn answered(
        self: &Arc<Self>,
        id: u64,
        answer: Answer,
        fds: Vec<OwnedFd>,
    ) -> Result<()> {
        let broken = |detail: &str| Error::protocol(self.peer(), detail);
        let waiting = self
            .remove(id)
            .ok_or_else(|| broken("an answer to what was not asked"))?;
        match waiting {
            PendingRequest::Ping => {
                self.lock().ping_sent = false;
                Ok(())
            }
            PendingRequest::Release(key) => {
                self.released(key, &answer);
                Ok(())
            }
            PendingRequest::Held => match answer {
                Answer::Expired(expired) => {
                    self.expired(&expired);
                    Ok(())
                }
                _ => Err(broken("unexpected answer about the leases of a session")),
            },
            PendingRequest::User {
                what, fetch, reply, ..
            } => {
                let lease = match &answer {
                    Answer::Granted(granted) => {
                        let name = fetch.ok_or_else(|| broken("a grant to what was no fetch"))?;
                        Some(self.hold(granted.lease, name)?)
                    }
                    _ => None,
                };
                let result = match answer {
                    Answer::Refused(why) => Err(text::refused(&self.peer(), what, &why)),
                    answer => Ok(Answered { answer, fds, lease }),
                };
                // If the user no longer waits, the lease and the fds are dropped with the returned value.
                drop(reply.send(result));
                Ok(())
            }
        }
    }

    /// Records a lease.
    fn hold(self: &Arc<Self>, lease: u64, name: String) -> Result<ClientLease> {
        let mut state = self.lock();
        let instance = state.terms.welcome.instance;
        let key = state.key(lease);
        if state.leases.contains_key(&key) {
            let peer = state.terms.peer.clone();
            return Err(Error::protocol(peer, "the same lease granted twice"));
        }
        let (sender, receiver) = watch::channel(LeaseState::Held);
        state.leases.insert(
            key,
            Held {
                name,
                instance,
                state: sender,
                done: None,
            },
        );
        drop(state);
        Ok(ClientLease::new(Keep::new(self), key, receiver))
    }

    fn released(&self, key: LeaseKey, answer: &Answer) {
        let mut state = self.lock();
        state.releases_sent = state.releases_sent.saturating_sub(1);
        let result = match answer {
            Answer::Refused(why) => match Refusal::from_word(&why.reason) {
                Refusal::Limit => {
                    // The server is busy: retried with the next heartbeat.
                    state.releases.push_back(key);
                    return;
                }
                // It had ended already.
                Refusal::NotFound | Refusal::Expired | Refusal::Stale => Ok(()),
                _ => Err(text::refused(&state.terms.peer, "a release", why)),
            },
            _ => Ok(()),
        };
        state.end(key, result);
        drop(state);
        // There may be more to release, or nothing left that keeps the connection open.
        self.wake.notify_one();
    }

    /// Handles a notice of the server.
    ///
    /// # Errors
    /// The reason why the server has ended the session.
    pub(in crate::client) fn notice(&self, event: Event) -> Result<()> {
        match event {
            Event::Withdrawing(Withdrawing { lease, ms }) => {
                self.set_state(lease, &withdrawing(ms));
            }
            Event::Ended(Ended { lease, why }) => self.ended(lease, &why),
            Event::Closing(closing) => {
                let state = self.lock();
                for held in state.leases.values() {
                    change(&held.state, &withdrawing(closing.ms));
                }
            }
            Event::Published(entry) => self.tell(Notified::Published(Arc::new(entry))),
            Event::Gone(gone) => self.tell(Notified::Gone(gone.name.into())),
            Event::Dismissed(why) => return Err(self.dismissed(&why)),
        }
        Ok(())
    }

    fn ended(&self, lease: u64, why: &Refused) {
        let (peer, what) = {
            let state = self.lock();
            let what = state.leases.get(&state.key(lease)).map_or_else(
                || "the lease".to_owned(),
                |held| format!("the lease on '{}'", held.name),
            );
            (state.terms.peer.clone(), what)
        };
        self.set_state(lease, &LeaseState::Lost(text::refused(&peer, what, why)));
    }

    /// Handles the leases that ended while there was no connection.
    fn expired(&self, expired: &Leases) {
        let state = self.lock();
        for &lease in &expired.leases {
            if let Some(held) = state.leases.get(&state.key(lease)) {
                let why = Error::refused(
                    state.terms.peer.clone(),
                    format!("the lease on '{}'", held.name),
                    Refusal::Expired,
                    "it ended while the connection was broken",
                );
                change(&held.state, &LeaseState::Lost(why));
            }
        }
    }

    /// Sets a lease's state. A notice about a lease never overtakes its grant.
    fn set_state(&self, lease: u64, to: &LeaseState) {
        let state = self.lock();
        if let Some(held) = state.leases.get(&state.key(lease)) {
            change(&held.state, to);
        }
    }
}

impl SessionState {
    /// Returns the leases of this session, unless they are too long for a frame of the server.
    fn held(&self) -> Option<Leases> {
        let own = |key: &&LeaseKey| key.epoch == self.epoch;
        let mut leases: Vec<_> = self
            .leases
            .keys()
            .filter(own)
            .map(|key| key.lease)
            .collect();
        leases.sort_unstable();
        // Each takes 9 bytes at most.
        let most = (self.terms.welcome.frame_bytes as usize).saturating_sub(64) / 9;
        (leases.len() <= most.min(MAX_LISTED)).then_some(Leases { leases })
    }
}
