//! State that a client's task and its users share: requests, leases, and the connection's state.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::{Instant, timeout_at};

use super::buffer::{ClientLease, HeldLease, LeaseState};
use super::connect::{Dial, Terms, is_final, refused};
use crate::limits::deadline;
use crate::per_driver::lock;
use crate::protocol::{Answer, Ask, Held, MAX_LISTED};
use crate::share::InstanceId;
use crate::{Driver, Error, Refusal, Result, ShareError};

/// An answer, with its fds and its lease.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(super) answer: Answer,
    pub(super) fds: Vec<OwnedFd>,
    /// The lease of a grant: released unless the receiver keeps it.
    pub(super) lease: Option<ClientLease>,
}

/// A request that waits for the connection or for its reply.
pub(super) struct Request {
    pub(super) ask: Ask,
    /// Where a user's reply goes; `None` for the session's own request.
    pub(super) user: Option<(oneshot::Sender<Result<Reply>>, OwnedSemaphorePermit)>,
}

impl Request {
    pub(super) const fn own(ask: Ask) -> Self {
        Self { ask, user: None }
    }

    pub(super) const fn release(lease: u64) -> Self {
        Self::own(Ask::Release { lease })
    }

    pub(super) const fn is_release(&self) -> bool {
        matches!(self.ask, Ask::Release { .. })
    }

    /// Ends the request. If its user no longer waits, the reply's lease and fds are dropped.
    pub(super) fn finish(self, result: Result<Reply>) {
        if let Some((reply, _)) = self.user {
            let _ = reply.send(result);
        }
    }
}

/// The state of the connection.
#[derive(Clone, Debug)]
pub(super) enum Link {
    Up,
    Down {
        why: Error,
        /// Whether the server counts as gone, or no longer lets this client in.
        away: bool,
    },
    Over(Error),
}

impl Link {
    /// Returns why the server counts as gone, no longer lets this client in, or is not asked any more.
    pub(super) const fn away(&self) -> Option<&Error> {
        match self {
            Self::Down { why, away: true } | Self::Over(why) => Some(why),
            _ => None,
        }
    }
}

pub(super) struct SessionState {
    pub(super) terms: Arc<Terms>,
    pub(super) next_id: u64,
    /// The session's own requests that were not written yet. They go before those of users.
    pub(super) internal: VecDeque<Request>,
    /// Users' requests that were not written yet.
    pub(super) queue: VecDeque<Request>,
    /// Requests that were written and are not answered yet.
    pub(super) pending: HashMap<u64, Request>,
    /// The leases of this instance of the server.
    pub(super) leases: HashMap<u64, HeldLease>,
    /// When the server was heard, or its silence was counted last.
    pub(super) heard: Instant,
    /// How long the server has been silent. Time in which this process did not run counts little, because then the
    /// server need not have been silent.
    pub(super) silence: Duration,
    /// Whether the last attempt to reconnect found that no process listens.
    pub(super) nobody: bool,
    /// What a server that is about to end says of all leases, also of those that it grants then.
    pub(super) recalled: Option<LeaseState>,
    pub(super) closing: Option<Instant>,
    /// Whether the program ends its use without waiting for the server.
    pub(super) departing: bool,
}

pub(crate) struct ClientSession {
    pub(super) dial: Dial,
    /// Where memory is imported; `None` for a client that looks at names alone.
    driver: Option<Driver>,
    permits: Arc<Semaphore>,
    /// Wakes the task when there is something to write or to end.
    pub(super) wake: Notify,
    /// Changed under the lock of `state`.
    pub(super) link: watch::Sender<Link>,
    users: AtomicUsize,
    state: Mutex<SessionState>,
}

impl ClientSession {
    /// Creates the session of a new connection.
    pub(super) fn new(dial: Dial, terms: &Terms, driver: Option<Driver>) -> Arc<Self> {
        let permits = dial.options.limits.requests_in_flight;
        Arc::new(Self {
            driver,
            // These bound the queue.
            permits: Arc::new(Semaphore::new(permits.clamp(1, Semaphore::MAX_PERMITS))),
            wake: Notify::new(),
            link: watch::Sender::new(Link::Up),
            users: AtomicUsize::new(0),
            state: Mutex::new(SessionState {
                terms: Arc::new(terms.clone()),
                next_id: 1,
                internal: VecDeque::new(),
                queue: VecDeque::new(),
                pending: HashMap::new(),
                leases: HashMap::new(),
                heard: Instant::now(),
                silence: Duration::ZERO,
                nobody: false,
                recalled: None,
                closing: None,
                departing: false,
            }),
            dial,
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, SessionState> {
        // No code that can panic runs under the lock while the state is half changed.
        lock(&self.state)
    }

    /// Returns the server, for messages.
    pub(super) fn peer(&self) -> String {
        self.lock().terms.peer.clone()
    }

    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a client without one.
    pub(super) fn driver(&self) -> Result<&Driver> {
        let why = "it was connected without a driver, so it imports no memory";
        let error = || Error::invalid("client", why);
        self.driver.as_ref().ok_or_else(error)
    }

    pub(super) fn terms(&self) -> Arc<Terms> {
        Arc::clone(&self.lock().terms)
    }

    /// Returns how long a request may take.
    pub(super) fn timeout(&self) -> Duration {
        self.dial.options.timeout
    }

    /// Sends a request and waits for the reply, at most for `timeout`; a refusal is an error.
    ///
    /// If dropped before the reply, nothing is left: a lease that is granted later is released.
    pub(super) async fn request(&self, ask: Ask, timeout: Duration) -> Result<Reply> {
        let what = describe(&ask);
        let work = async {
            let permit = Arc::clone(&self.permits).acquire_owned().await;
            let permit = permit.map_err(|_| self.down())?;
            let (reply, answer) = oneshot::channel();
            {
                let mut state = self.lock();
                if let Link::Over(why) = &*self.link.borrow() {
                    return Err(why.clone());
                }
                let user = Some((reply, permit));
                state.queue.push_back(Request { ask, user });
            }
            self.wake.notify_one();
            let reply = answer.await.unwrap_or_else(|_| Err(self.down()))?;
            match &reply.answer {
                Answer::Refused(why) => Err(refused(&self.peer(), &*what, why)),
                _ => Ok(reply),
            }
        };
        let replied = timeout_at(deadline(timeout), work).await;
        replied.unwrap_or_else(|_| match &*self.link.borrow() {
            Link::Up => {
                let what = format!("{what} ({})", self.dial.options.address);
                Err(Error::timed_out(what, timeout))
            }
            Link::Down { why, .. } | Link::Over(why) => Err(why.clone()),
        })
    }

    /// Returns why there is no connection.
    pub(super) fn down(&self) -> Error {
        let closing = self.lock().closing.is_some();
        match &*self.link.borrow() {
            Link::Over(why) => why.clone(),
            Link::Down { why, .. } if !closing => why.clone(),
            _ => {
                let address = self.dial.options.address.to_string();
                Error::peer_lost(address, "this client was closed")
            }
        }
    }

    /// Ends a lease, as soon as there is a connection: the release is not lost while the session lasts.
    pub(super) fn release(&self, instance: InstanceId, lease: u64) {
        let mut state = self.lock();
        // Otherwise the server that granted it is gone, and the lease with it.
        if instance == state.terms.welcome.instance && state.leases.contains_key(&lease) {
            // Also a lost lease, even of an earlier session: the server waits for the unmapping.
            state.internal.push_back(Request::release(lease));
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Admits no requests from now on; sends the pending releases, then ends the connection.
    pub(super) fn close(&self) {
        self.lock().closing.get_or_insert_with(Instant::now);
        self.permits.close();
        self.wake.notify_one();
    }

    /// Closes the connection for a program that ends its use, without waiting for the server: releases are sent if
    /// there is a connection, and their answers are not awaited.
    pub(crate) fn depart(&self) {
        self.lock().departing = true;
        self.close();
    }

    /// Returns whether there is a connection or may be one.
    pub(super) fn is_open(&self) -> bool {
        self.lock().closing.is_none() && !matches!(&*self.link.borrow(), Link::Over(_))
    }

    /// Waits until the state of the connection has what is looked for, which may be so already.
    pub(super) async fn link_is<T>(&self, found: impl Fn(&Link) -> Option<T>) -> T {
        let mut links = self.link.subscribe();
        loop {
            if let Some(found) = found(&links.borrow_and_update()) {
                return found;
            }
            // The sender is in this session.
            let _ = links.changed().await;
        }
    }

    /// Handles the end of the task: nothing is sent or received any more.
    pub(super) fn over(&self, why: &Error) {
        if matches!(&*self.link.borrow(), Link::Over(_)) {
            return;
        }
        self.broken(why);
        self.permits.close();
        let mut state = self.lock();
        state.lose_leases(why);
        state.leases.clear();
        state.internal.clear();
        self.link.send_replace(Link::Over(why.clone()));
        let queue = std::mem::take(&mut state.queue);
        drop(state);
        for request in queue {
            request.finish(Err(why.clone()));
        }
    }

    /// Handles a broken connection: requests that were written get no answer, and releases are written again.
    pub(super) fn broken(&self, why: &Error) {
        let mut state = self.lock();
        self.set_down(why.clone(), false);
        let pending = std::mem::take(&mut state.pending).into_values();
        let (releases, unanswered): (Vec<_>, Vec<_>) = pending.partition(Request::is_release);
        state.internal.retain(Request::is_release);
        state.internal.extend(releases);
        drop(state);
        for request in unanswered {
            request.finish(Err(why.clone()));
        }
    }

    /// Records that an attempt to reconnect has failed.
    ///
    /// If [nobody listens](Error::nobody_listens) after the time of a heartbeat, the next [`tick`](Self::tick) gives up the server, and
    /// its leases: there is no need to wait for their expiry.
    pub(super) fn still_down(&self, why: Error) {
        let mut state = self.lock();
        state.nobody = why.nobody_listens();
        let why = match why {
            Error::Share(ShareError::Unreachable { peer, why, .. }) => Error::peer_lost(peer, why),
            other => other,
        };
        let away = is_final(&why);
        self.set_down(why, away);
    }

    /// Records that a frame has arrived.
    pub(super) fn heard(&self) {
        self.lock().heard();
    }

    /// Records that at least a part of `tick` has passed; returns how long the server has been silent. After
    /// the time of a lease, the leases are lost, and without a connection the server counts as gone.
    pub(super) fn tick(&self, tick: Duration) -> Duration {
        let mut state = self.lock();
        let now = Instant::now();
        let gone = now.saturating_duration_since(state.heard);
        state.silence += gone.min(tick * 2);
        state.heard = now;
        let silent = state.silence;
        let why = if state.nobody && silent >= state.terms.heartbeat {
            "nobody listens at its address any more".into()
        } else if silent >= state.terms.lease {
            let last = match &*self.link.borrow() {
                Link::Down { why, .. } | Link::Over(why) => format!("; {why}"),
                Link::Up => String::new(),
            };
            format!("not a word for {silent:?}{last}")
        } else {
            return silent;
        };
        let lost = Error::peer_lost(state.terms.peer.clone(), why);
        state.lose_leases(&lost);
        // Once: the reason may name the one before.
        if matches!(&*self.link.borrow(), Link::Down { away: false, .. }) {
            self.set_down(lost, true);
        }
        silent
    }

    /// Notes that there is no connection. A server that is away stays so until there is one.
    pub(super) fn set_down(&self, why: Error, away: bool) {
        self.link.send_modify(|link| {
            let away = away || matches!(link, Link::Down { away: true, .. });
            *link = Link::Down { why, away };
        });
    }

    /// Handles a new connection.
    pub(super) fn resumed(&self, terms: &Terms) {
        let mut state = self.lock();
        if !terms.welcome.resumed {
            let why = if terms.welcome.instance == state.terms.welcome.instance {
                let why = "it heard nothing for too long";
                let what = "to go on with the session";
                Error::refused(terms.peer.clone(), what, Refusal::Expired, why)
            } else {
                Error::Stale {
                    what: format!("a lease from {}", terms.peer),
                    why: "the server has been restarted since".into(),
                }
            };
            state.lose_leases(&why);
            state.recalled = None;
            if terms.welcome.instance != state.terms.welcome.instance {
                state.leases.clear();
                state.internal.clear();
            }
        }
        state.terms = Arc::new(terms.clone());
        if terms.welcome.resumed {
            // Before all else: leases that this end does not have end then, because their grants never arrived.
            for held in state.held().into_iter().rev() {
                state.internal.push_front(Request::own(Ask::Held(held)));
            }
        }
        state.heard();
        self.link.send_replace(Link::Up);
    }
}

impl SessionState {
    fn heard(&mut self) {
        self.heard = Instant::now();
        self.silence = Duration::ZERO;
        self.nobody = false;
    }

    /// Marks all leases as lost.
    pub(super) fn lose_leases(&self, why: &Error) {
        for held in self.leases.values() {
            held.set_state(LeaseState::Lost(why.clone()));
        }
    }

    /// Returns the leases that this end has, in parts that the server reads.
    pub(super) fn held(&self) -> Vec<Held> {
        // Each number takes 9 bytes at most.
        let most = (self.terms.welcome.frame_bytes as usize).saturating_sub(64) / 9;
        let most = most.clamp(1, MAX_LISTED);
        let mut leases: Vec<u64> = self.leases.keys().copied().collect();
        leases.sort_unstable();
        let mut parts: Vec<Held> = Vec::new();
        for part in leases.chunks(most) {
            let after = parts
                .last()
                .and_then(|before| before.leases.last().copied());
            let leases = part.to_vec();
            let more = true;
            parts.push(Held {
                leases,
                after,
                more,
            });
        }
        match parts.last_mut() {
            Some(last) => last.more = false,
            None => parts.push(Held::default()),
        }
        parts
    }
}

opaque!(ClientSession);

/// Keeps a session open: it closes with the last of these.
#[derive(Debug)]
pub(super) struct SessionUser(pub(super) Arc<ClientSession>);

impl SessionUser {
    pub(super) fn new(session: &Arc<ClientSession>) -> Self {
        session.users.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(session))
    }
}

impl Clone for SessionUser {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for SessionUser {
    fn drop(&mut self) {
        if self.0.users.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.close();
        }
    }
}

/// Describes a request, for messages.
pub(super) fn describe(ask: &Ask) -> String {
    match ask {
        Ask::List(list) => format!("the list of names '{}…'", list.prefix),
        Ask::Wait { name, .. } => format!("waiting for '{name}'"),
        Ask::Fetch(fetch) => format!("'{}'", fetch.name),
        Ask::Release { lease } => format!("the release of lease {lease}"),
        Ask::Probe { lease } => format!("a probe of lease {lease}"),
        Ask::Create(create) => format!("the creation of '{}'", create.name),
        Ask::Delete { name, .. } => format!("the deletion of '{name}'"),
        Ask::Ping | Ask::Held(_) => "a heartbeat".into(),
    }
}

/// A value that a thread for blocking work drops: unmapping takes the driver's time, in which the connection's task would
/// not run.
pub(super) struct OffThread<T: Send + 'static>(pub(super) Option<T>);

impl<T: Send + 'static> Drop for OffThread<T> {
    fn drop(&mut self) {
        if let (Some(value), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn_blocking(move || drop(value));
        }
    }
}

/// Runs blocking work on a separate thread; a panic there is an error about `what`. If this is dropped, the work
/// continues, and its result is dropped on such a thread.
pub(super) async fn run_blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(move || OffThread(Some(work()))).await;
    let mut done = done.map_err(|error| Error::failed(what, error.to_string()))?;
    let result = done.0.take();
    result.ok_or_else(|| Error::failed(what, "it has no result"))
}
