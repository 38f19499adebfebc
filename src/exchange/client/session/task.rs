//! What the client's task does with a session.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::time::Instant;

use super::{
    Answered, EARLY, Keep, Link, Notified, Own, RELEASES, Session, State, Waiting, change,
    withdrawing,
};
use crate::exchange::client::greet::{self, Established, Resume};
use crate::exchange::client::lease::{Held, Lease, LeaseKey, LeaseState};
use crate::exchange::client::text;
use crate::exchange::protocol::{Answer, Ask, Ended, Event, Refused, Release, Withdrawing};
use crate::{Error, Refusal, Result};

impl Session {
    /// How long it has been closing.
    pub(in crate::exchange::client) fn closing(&self) -> Option<Duration> {
        self.lock().closing.map(|since| since.elapsed())
    }

    /// Whether no release is outstanding.
    pub(in crate::exchange::client) fn quiet(&self) -> bool {
        let state = self.lock();
        state.releases.is_empty() && state.releases_sent == 0
    }

    /// What to write next without being asked.
    pub(in crate::exchange::client) fn own(&self) -> Option<Own> {
        let mut state = self.lock();
        if std::mem::take(&mut state.ping_due) && !state.ping_sent {
            state.ping_sent = true;
            let id = state.id();
            state.waiting.insert(id, Waiting::Ping);
            return Some(Own::Ping(id));
        }
        if state.releases_sent >= RELEASES {
            return None;
        }
        let key = state.releases.pop_front()?;
        state.releases_sent += 1;
        let id = state.id();
        state.waiting.insert(id, Waiting::Release(key));
        Some(Own::Release(id, Release { lease: key.lease }))
    }

    /// Takes a user's request for writing; `None` if the user waits no more.
    pub(in crate::exchange::client) fn admit(
        &self,
        ask: Ask,
        reply: oneshot::Sender<Result<Answered>>,
        permit: OwnedSemaphorePermit,
    ) -> Option<(u64, Ask)> {
        if reply.is_closed() {
            return None;
        }
        let mut state = self.lock();
        let id = state.id();
        let fetch = match &ask {
            Ask::Fetch(fetch) => Some(fetch.name.clone()),
            _ => None,
        };
        state.waiting.insert(
            id,
            Waiting::User {
                what: text::asked(&ask),
                fetch,
                reply,
                _permit: permit,
            },
        );
        Some((id, ask))
    }

    /// A request that could not be written.
    pub(in crate::exchange::client) fn unwritten(&self, id: u64, error: Error) {
        if let Some(Waiting::User { reply, .. }) = self.remove(id) {
            let _ = reply.send(Err(error));
        }
    }

    fn remove(&self, id: u64) -> Option<Waiting> {
        self.lock().waiting.remove(&id)
    }

    /// An answer has come.
    pub(in crate::exchange::client) fn answered(
        self: &Arc<Self>,
        id: u64,
        answer: Option<Answer>,
        fds: Vec<OwnedFd>,
    ) -> Result<()> {
        let broken = |detail: &str| Error::Protocol {
            peer: self.peer(),
            detail: detail.into(),
        };
        let waiting = self
            .remove(id)
            .ok_or_else(|| broken("an answer to what was not asked"))?;
        match waiting {
            Waiting::Ping => {
                self.lock().ping_sent = false;
                Ok(())
            }
            Waiting::Release(key) => {
                self.released(key, answer.as_ref());
                Ok(())
            }
            Waiting::User {
                what, fetch, reply, ..
            } => {
                let lease = match &answer {
                    Some(Answer::Granted(granted)) => {
                        let name = fetch.ok_or_else(|| broken("a grant to what was no fetch"))?;
                        Some(self.hold(granted.lease, name)?)
                    }
                    _ => None,
                };
                let result = match answer {
                    Some(Answer::Refused(why)) => Err(text::refused(&self.peer(), what, &why)),
                    Some(answer) => Ok(Answered { answer, fds, lease }),
                    None => Err(broken("an answer that this version does not know")),
                };
                // Where nobody waits any more, the lease and the fds go with what comes back.
                drop(reply.send(result));
                Ok(())
            }
        }
    }

    /// Takes note of a lease.
    fn hold(self: &Arc<Self>, lease: u64, name: String) -> Result<Lease> {
        let mut state = self.lock();
        let instance = state.terms.instance;
        let key = LeaseKey {
            epoch: state.epoch,
            lease,
        };
        if state.leases.contains_key(&key) {
            let peer = state.terms.peer.clone();
            return Err(Error::Protocol {
                peer,
                detail: "the same lease granted twice".into(),
            });
        }
        let mut now = LeaseState::Held;
        state.early.retain(|(early, word)| {
            let same = *early == lease;
            if same {
                now = word.clone();
            }
            !same
        });
        let (sender, receiver) = watch::channel(now);
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
        Ok(Lease::new(Keep::new(self), key, receiver))
    }

    fn released(&self, key: LeaseKey, answer: Option<&Answer>) {
        let mut state = self.lock();
        state.releases_sent = state.releases_sent.saturating_sub(1);
        let result = match answer {
            Some(Answer::Refused(why)) => match Refusal::from_word(&why.reason) {
                Refusal::Limit => {
                    // The server is busy: with the next heartbeat again.
                    state.releases.push_back(key);
                    return;
                }
                // It had ended already.
                Refusal::NotFound | Refusal::Expired | Refusal::Stale => Ok(()),
                _ => Err(text::refused(&state.terms.peer, "a release", why)),
            },
            _ => Ok(()),
        };
        let held = state.leases.remove(&key);
        drop(state);
        if let Some(held) = held {
            let lost = match &*held.state.borrow() {
                LeaseState::Lost(error) => Err(error.clone()),
                _ => result,
            };
            if let Some(done) = held.done {
                let _ = done.send(lost);
            }
        }
        // There may be more to release, or nothing any more that keeps the connection open.
        self.wake.notify_one();
    }

    /// The server says something unasked.
    pub(in crate::exchange::client) fn notice(&self, event: Option<Event>) {
        match event {
            Some(Event::Withdrawing(Withdrawing { lease, ms })) => {
                self.word(lease, &withdrawing(ms));
            }
            Some(Event::Ended(Ended { lease, why })) => self.ended(lease, &why),
            Some(Event::Closing(closing)) => {
                let state = self.lock();
                for held in state.leases.values() {
                    change(&held.state, &withdrawing(closing.ms));
                }
            }
            Some(Event::Published(entry)) => {
                let _ = self.notices.send(Notified::Published(Arc::new(entry)));
            }
            Some(Event::Gone(gone)) => {
                let _ = self.notices.send(Notified::Gone(gone.name.into()));
            }
            Some(Event::Lost(lost)) => {
                let _ = self.notices.send(Notified::Lost(Arc::new(lost)));
            }
            // Of a later version.
            None => {}
        }
    }

    fn ended(&self, lease: u64, why: &Refused) {
        let (peer, what) = {
            let state = self.lock();
            let key = LeaseKey {
                epoch: state.epoch,
                lease,
            };
            let what = state.leases.get(&key).map_or_else(
                || "the lease".to_owned(),
                |held| format!("the lease on '{}'", held.name),
            );
            (state.terms.peer.clone(), what)
        };
        self.word(lease, &LeaseState::Lost(text::refused(&peer, what, why)));
    }

    fn word(&self, lease: u64, word: &LeaseState) {
        let mut state = self.lock();
        let key = LeaseKey {
            epoch: state.epoch,
            lease,
        };
        if let Some(held) = state.leases.get(&key) {
            change(&held.state, word);
        } else {
            if state.early.len() >= EARLY {
                state.early.pop_front();
            }
            state.early.push_back((lease, word.clone()));
        }
    }

    /// A frame has come.
    pub(in crate::exchange::client) fn heard(&self) {
        let mut state = self.lock();
        state.silence.last = Instant::now();
        state.silence.total = Duration::ZERO;
    }

    /// Time goes by, a part of `tick` at least: how long the server has been silent. After the time
    /// of a lease, the leases are lost.
    pub(in crate::exchange::client) fn tick(&self, tick: Duration) -> Duration {
        let mut state = self.lock();
        let now = Instant::now();
        let gone = now.saturating_duration_since(state.silence.last);
        state.silence.total += gone.min(tick * 2);
        state.silence.last = now;
        let silent = state.silence.total;
        if silent >= state.terms.lease {
            let last = match &state.link {
                Link::Down(error) | Link::Over(error) => format!("; {error}"),
                Link::Up => String::new(),
            };
            let why = Error::PeerLost {
                peer: state.terms.peer.clone(),
                why: format!("not a word for {silent:?}{last}"),
            };
            self.lose_all(&state, &why);
        }
        // Not only when it is dialled: by then that may be rare.
        self.lose_if_gone(&state);
        silent
    }

    /// An attempt to dial again has failed.
    ///
    /// Where nobody listens at the address for the time of a heartbeat, the server is gone, and its
    /// leases with it: there is no need to wait for their end.
    pub(in crate::exchange::client) fn still_down(&self, error: Error) {
        let mut state = self.lock();
        state.link = Link::Down(error);
        self.lose_if_gone(&state);
    }

    fn lose_if_gone(&self, state: &State) {
        if let Link::Down(error) = &state.link
            && greet::nobody_listens(error)
            && state.silence.total >= state.terms.heartbeat
        {
            let why = Error::PeerLost {
                peer: state.terms.peer.clone(),
                why: "nobody listens at its address any more".into(),
            };
            self.lose_all(state, &why);
        }
    }

    /// A ping is due, unless the last one is not answered yet.
    pub(in crate::exchange::client) fn ping(&self) {
        self.lock().ping_due = true;
        self.wake.notify_one();
    }

    /// The connection is broken: what was asked is not answered any more.
    pub(in crate::exchange::client) fn broken(&self, why: &Error) {
        let mut state = self.lock();
        state.link = Link::Down(why.clone());
        state.ping_sent = false;
        state.ping_due = false;
        state.releases_sent = 0;
        let waiting = std::mem::take(&mut state.waiting);
        let mut replies = Vec::new();
        for (_, waiting) in waiting {
            match waiting {
                Waiting::User { reply, .. } => replies.push(reply),
                Waiting::Release(key) => state.releases.push_front(key),
                Waiting::Ping => {}
            }
        }
        drop(state);
        for reply in replies {
            drop(reply.send(Err(why.clone())));
        }
    }

    /// What resumes the session, and the leases that this end knows of.
    pub(in crate::exchange::client) fn resume(&self) -> Resume {
        let state = self.lock();
        let own = |key: &&LeaseKey| key.epoch == state.epoch;
        Resume {
            session: state.terms.session.clone(),
            server: state.terms.server.clone(),
            held: state
                .leases
                .keys()
                .filter(own)
                .map(|key| key.lease)
                .collect(),
        }
    }

    /// The session is lost, with all that depends on it.
    fn lose_all(&self, state: &State, why: &Error) {
        for held in state.leases.values() {
            change(&held.state, &LeaseState::Lost(why.clone()));
        }
        let _ = self.notices.send(Notified::SessionLost(why.clone()));
    }

    /// There is a connection again.
    pub(in crate::exchange::client) fn resumed(&self, established: &Established) {
        let mut state = self.lock();
        if !established.resumed {
            let why = if established.terms.instance == state.terms.instance {
                Error::Refused {
                    peer: established.terms.peer.clone(),
                    what: "to go on with the session".into(),
                    reason: Refusal::Expired,
                    detail: "it had no sign of life for too long".into(),
                }
            } else {
                Error::Stale {
                    what: format!("a lease from {}", established.terms.peer),
                    why: "the server has been restarted since".into(),
                }
            };
            self.lose_all(&state, &why);
            state.epoch += 1;
            state.early.clear();
            // A server that lives on wants to know what is unmapped; of another's leases nobody
            // knows any more.
            for key in std::mem::take(&mut state.releases) {
                match state.leases.get(&key) {
                    Some(held) if held.instance == established.terms.instance => {
                        state.releases.push_back(key);
                    }
                    Some(_) => {
                        if let Some(done) = state.leases.remove(&key).and_then(|held| held.done) {
                            let _ = done.send(Err(why.clone()));
                        }
                    }
                    None => {}
                }
            }
        }
        state.terms = Arc::new(established.terms.clone());
        state.link = Link::Up;
        state.silence.last = Instant::now();
        state.silence.total = Duration::ZERO;
        drop(state);
        let _ = self.notices.send(Notified::Fresh);
    }

    /// The task ends.
    pub(in crate::exchange::client) fn over(&self, why: &Error) {
        self.broken(why);
        self.permits.close();
        let mut state = self.lock();
        self.lose_all(&state, why);
        state.link = Link::Over(why.clone());
        for key in std::mem::take(&mut state.releases) {
            if let Some(Held {
                done: Some(done), ..
            }) = state.leases.remove(&key)
            {
                let _ = done.send(Err(why.clone()));
            }
        }
        drop(state);
        let _ = self.notices.send(Notified::Over);
        self.over.send_replace(true);
    }
}
