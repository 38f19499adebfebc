//! What a client's task and its users share: requests, leases, and how things stand.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};

use super::greet::{Dial, Established, Resume, Terms};
use super::lease::{Held, Lease, LeaseKey, LeaseState};
use super::{Client, actor, greet, text};
use crate::exchange::protocol::{
    Answer, Ask, Ended, Entry, Event, Lost, Refused, Release, Withdrawing,
};
use crate::{Driver, Error, Refusal, Result};

/// The most words about leases that are kept for leases not heard of yet.
const EARLY: usize = 64;
/// How many notices a slow watcher may be behind.
const NOTICES: usize = 1024;
/// The most releases that are on their way at a time.
const RELEASES: usize = 8;

/// An answer, and what came with it.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) answer: Answer,
    pub(crate) fds: Vec<OwnedFd>,
    /// Of a grant: released unless it is kept.
    pub(super) lease: Option<Lease>,
}

/// A request on its way to the client's task.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) ask: Ask,
    pub(super) fds: Vec<OwnedFd>,
    pub(super) reply: oneshot::Sender<Result<Answered>>,
    permit: OwnedSemaphorePermit,
}

/// Who waits for an answer.
enum Waiting {
    User {
        what: String,
        /// The name, of a fetch.
        fetch: Option<String>,
        reply: oneshot::Sender<Result<Answered>>,
        _permit: OwnedSemaphorePermit,
    },
    Ping,
    Release(LeaseKey),
}

/// What the task writes next of its own accord.
pub(super) enum Own {
    Ping(u64),
    Release(u64, Release),
}

/// How things stand with the connection.
enum Link {
    Up,
    Down(Error),
    Over(Error),
}

/// What watchers are told.
#[derive(Clone, Debug)]
pub(crate) enum Notified {
    Published(Arc<Entry>),
    Gone(Arc<str>),
    /// Ranks of a group.
    Lost(Arc<Lost>),
    /// The session is lost: the server is, or it has given this client up. Perhaps said often.
    SessionLost(Error),
    /// There is a new connection, which nobody watches on yet.
    Fresh,
    Over,
}

/// How long the server has been silent. Time in which this process did not run counts little: then
/// it is not the server that was silent.
struct Silence {
    last: Instant,
    total: Duration,
}

struct State {
    link: Link,
    terms: Terms,
    epoch: u64,
    next_id: u64,
    waiting: HashMap<u64, Waiting>,
    leases: HashMap<LeaseKey, Held>,
    /// To be released, in this order; each lease at most once.
    releases: VecDeque<LeaseKey>,
    releases_sent: usize,
    ping_due: bool,
    ping_sent: bool,
    /// Words about leases whose grant has not been read yet.
    early: VecDeque<(u64, LeaseState)>,
    silence: Silence,
    closing: Option<Instant>,
}

pub(crate) struct Session {
    pub(super) dial: Dial,
    pub(super) driver: Driver,
    queue: mpsc::UnboundedSender<Command>,
    permits: Arc<Semaphore>,
    /// For the task, when there is something to write or to end.
    pub(super) wake: Notify,
    notices: broadcast::Sender<Notified>,
    over: watch::Sender<bool>,
    users: AtomicUsize,
    state: Mutex<State>,
}

/// Begins a session's task.
pub(super) fn start(dial: Dial, established: Established, driver: &Driver) -> Client {
    let (queue, commands) = mpsc::unbounded_channel();
    let permits = dial
        .options
        .limits
        .requests_in_flight
        .saturating_sub(RELEASES + 1)
        .max(1);
    let session = Arc::new(Session {
        driver: driver.clone(),
        queue,
        // The queue is bounded by these.
        permits: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))),
        wake: Notify::new(),
        notices: broadcast::channel(NOTICES).0,
        over: watch::channel(false).0,
        users: AtomicUsize::new(0),
        state: Mutex::new(State {
            link: Link::Up,
            terms: established.terms.clone(),
            epoch: 0,
            next_id: 0,
            waiting: HashMap::new(),
            leases: HashMap::new(),
            releases: VecDeque::new(),
            releases_sent: 0,
            ping_due: false,
            ping_sent: false,
            early: VecDeque::new(),
            silence: Silence {
                last: Instant::now(),
                total: Duration::ZERO,
            },
            closing: None,
        }),
        dial,
    });
    let client = Client::new(Keep::new(&session));
    tokio::spawn(actor::run(session, commands, established));
    client
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock with the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server, for people.
    pub(super) fn peer(&self) -> String {
        self.lock().terms.peer.clone()
    }

    pub(super) fn terms(&self) -> Terms {
        self.lock().terms.clone()
    }

    /// How long a request may take.
    pub(super) fn patience(&self) -> Duration {
        self.dial.options.limits.request
    }

    pub(crate) fn notices(&self) -> broadcast::Receiver<Notified> {
        self.notices.subscribe()
    }

    /// Asks the server and waits for the answer, at most `patience`; a refusal is an error.
    ///
    /// Dropped before the answer, nothing is left: a lease that is granted later is released.
    pub(super) async fn call(
        &self,
        ask: Ask,
        fds: Vec<OwnedFd>,
        patience: Duration,
    ) -> Result<Answered> {
        let what = text::asked(&ask);
        // Of both, so that years do not overflow.
        let patience = patience.min(Duration::from_secs(365 * 86_400));
        let deadline = Instant::now() + patience;
        let late = || self.late(&what, patience);
        let permit = match timeout_at(deadline, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(Ok(permit)) => permit,
            Ok(Err(_)) => return Err(self.down()),
            Err(_) => return Err(late()),
        };
        let (reply, answer) = oneshot::channel();
        let command = Command {
            ask,
            fds,
            reply,
            permit,
        };
        if self.queue.send(command).is_err() {
            return Err(self.down());
        }
        match timeout_at(deadline, answer).await {
            Ok(Ok(answered)) => answered,
            Ok(Err(_)) => Err(self.down()),
            Err(_) => Err(late()),
        }
    }

    fn late(&self, what: &str, after: Duration) -> Error {
        match &self.lock().link {
            Link::Up => Error::TimedOut {
                what: format!("{what} ({})", self.dial.options.address),
                after,
            },
            Link::Down(error) | Link::Over(error) => error.clone(),
        }
    }

    /// Why there is no connection.
    pub(super) fn down(&self) -> Error {
        match &self.lock().link {
            Link::Up => Error::PeerLost {
                peer: self.dial.options.address.to_string(),
                why: "the client's runtime has ended".into(),
            },
            Link::Down(error) | Link::Over(error) => error.clone(),
        }
    }

    /// Ends a lease, as soon as there is a connection: it cannot be lost while the session lasts.
    pub(super) fn release(&self, key: LeaseKey, done: Option<oneshot::Sender<Result<()>>>) {
        let mut state = self.lock();
        let over = matches!(state.link, Link::Over(_));
        let instance = state.terms.instance;
        let Some(held) = state.leases.get_mut(&key) else {
            return;
        };
        let lost = match &*held.state.borrow() {
            LeaseState::Lost(error) => Some(error.clone()),
            _ => None,
        };
        held.done = done;
        if over || held.instance != instance {
            // Who granted it is gone, and the lease with it.
            let held = state.leases.remove(&key);
            if let Some(done) = held.and_then(|held| held.done) {
                let _ = done.send(lost.map_or(Ok(()), Err));
            }
            return;
        }
        // A lost lease too, of an earlier session too: the server wants to know that the memory is
        // unmapped.
        state.releases.push_back(key);
        drop(state);
        self.wake.notify_one();
    }

    /// No requests from now on; leases that are to be released are, then the connection ends.
    pub(super) fn close(&self) {
        self.lock().closing.get_or_insert_with(Instant::now);
        self.permits.close();
        self.wake.notify_one();
    }

    /// Whether a connection is there or may come.
    pub(super) fn is_open(&self) -> bool {
        let state = self.lock();
        state.closing.is_none() && !matches!(state.link, Link::Over(_))
    }

    /// Waits until the task has ended.
    pub(super) async fn closed(&self) {
        let mut over = self.over.subscribe();
        // An error would mean that `self` is gone.
        let _ = over.wait_for(|&over| over).await;
    }
}

/// What the session's task does.
impl Session {
    /// How long it has been closing.
    pub(super) fn closing(&self) -> Option<Duration> {
        self.lock().closing.map(|since| since.elapsed())
    }

    /// Whether no release is outstanding.
    pub(super) fn quiet(&self) -> bool {
        let state = self.lock();
        state.releases.is_empty() && state.releases_sent == 0
    }

    /// What to write next without being asked.
    pub(super) fn own(&self) -> Option<Own> {
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
    pub(super) fn admit(
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
    pub(super) fn unwritten(&self, id: u64, error: Error) {
        if let Some(Waiting::User { reply, .. }) = self.remove(id) {
            let _ = reply.send(Err(error));
        }
    }

    fn remove(&self, id: u64) -> Option<Waiting> {
        self.lock().waiting.remove(&id)
    }

    /// An answer has come.
    pub(super) fn answered(
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
    pub(super) fn notice(&self, event: Option<Event>) {
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
    pub(super) fn heard(&self) {
        let mut state = self.lock();
        state.silence.last = Instant::now();
        state.silence.total = Duration::ZERO;
    }

    /// Time goes by, a part of `tick` at least: how long the server has been silent. After the time
    /// of a lease, the leases are lost.
    pub(super) fn tick(&self, tick: Duration) -> Duration {
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
        silent
    }

    /// An attempt to dial again has failed.
    ///
    /// Where nobody listens at the address for the time of a heartbeat, the server is gone, and its
    /// leases with it: there is no need to wait for their end.
    pub(super) fn still_down(&self, error: Error) {
        let mut state = self.lock();
        if greet::nobody_listens(&error) && state.silence.total >= state.terms.heartbeat {
            let why = Error::PeerLost {
                peer: state.terms.peer.clone(),
                why: "nobody listens at its address any more".into(),
            };
            self.lose_all(&state, &why);
        }
        state.link = Link::Down(error);
    }

    /// A ping is due, unless the last one is not answered yet.
    pub(super) fn ping(&self) {
        self.lock().ping_due = true;
        self.wake.notify_one();
    }

    /// The connection is broken: what was asked is not answered any more.
    pub(super) fn broken(&self, why: &Error) {
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
    pub(super) fn resume(&self) -> Resume {
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
    pub(super) fn resumed(&self, established: &Established) {
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
        state.terms = established.terms.clone();
        state.link = Link::Up;
        state.silence.last = Instant::now();
        state.silence.total = Duration::ZERO;
        drop(state);
        let _ = self.notices.send(Notified::Fresh);
    }

    /// The task ends.
    pub(super) fn over(&self, why: &Error) {
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

impl State {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

/// Sets a lease's state, unless it is lost, which is final.
fn change(state: &watch::Sender<LeaseState>, to: &LeaseState) {
    state.send_if_modified(|now| {
        let changes = !now.is_lost() && now != to;
        if changes {
            *now = to.clone();
        }
        changes
    });
}

fn withdrawing(ms: u64) -> LeaseState {
    // A day at most: nobody waits longer, and clocks do not overflow.
    let ms = Duration::from_millis(ms.min(86_400_000));
    LeaseState::Withdrawing {
        until: std::time::Instant::now() + ms,
    }
}

impl Command {
    pub(super) fn into_parts(
        self,
    ) -> (
        Ask,
        Vec<OwnedFd>,
        oneshot::Sender<Result<Answered>>,
        OwnedSemaphorePermit,
    ) {
        (self.ask, self.fds, self.reply, self.permit)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("address", &self.dial.options.address)
            .finish_non_exhaustive()
    }
}

/// Keeps a session going: it closes with the last of these.
pub(crate) struct Keep(Arc<Session>);

impl Keep {
    fn new(session: &Arc<Session>) -> Self {
        session.users.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(session))
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.0
    }
}

impl Clone for Keep {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for Keep {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.close();
        }
    }
}

impl fmt::Debug for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
