//! State that a client's task and its users share: requests, leases, and the connection's state.

mod link;
mod task;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};

use super::greet::{Dial, Established, Terms, is_final};
use super::lease::{ClientLease, Held, LeaseKey, LeaseState};
use super::text;
use crate::per_driver::lock;
use crate::protocol::{Answer, Ask, Entry, Request};
use crate::transport::Unconnected;
use crate::{Driver, Error, Result};

/// How many notices a slow watcher may be behind. The first watcher creates the ring, which has all of its
/// slots from the start.
const NOTICES: usize = 1024;
/// The most releases in flight at a time.
const RELEASES: usize = 8;

/// An answer, with its fds and its lease.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) answer: Answer,
    pub(crate) fds: Vec<OwnedFd>,
    /// The lease of a grant: released unless the receiver keeps it.
    pub(super) lease: Option<ClientLease>,
}

/// A request on its way to the client's task.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) ask: Ask,
    pub(super) fds: Vec<OwnedFd>,
    pub(super) reply: oneshot::Sender<Result<Answered>>,
    pub(super) permit: OwnedSemaphorePermit,
}

/// The requests of a session's users.
pub(super) type Commands = mpsc::UnboundedReceiver<Command>;

/// A user that waits for an answer.
enum PendingRequest {
    User {
        what: String,
        /// The name, for a fetch.
        fetch: Option<String>,
        reply: oneshot::Sender<Result<Answered>>,
        _permit: OwnedSemaphorePermit,
    },
    Ping,
    Release(LeaseKey),
    /// Which leases this end has.
    Held,
}

/// The state of the connection.
enum Link {
    Up,
    Down(Unconnected),
    Over(Error),
}

/// A notice for watchers.
#[derive(Clone, Debug)]
pub(crate) enum Notified {
    Published(Arc<Entry>),
    Gone(Arc<str>),
    /// The session is lost: the server is gone, or has given this client up. May be repeated.
    SessionLost(Arc<Error>),
    /// There is a new connection, on which no name is watched yet.
    Fresh,
    Over,
}

/// How long the server has been silent. Time in which this process did not run counts little, because then
/// the server need not have been silent.
struct Silence {
    last: Instant,
    total: Duration,
}

struct SessionState {
    link: Link,
    terms: Arc<Terms>,
    epoch: u64,
    next_id: u64,
    waiting: HashMap<u64, PendingRequest>,
    leases: HashMap<LeaseKey, Held>,
    /// Leases to release, in this order; each at most once.
    releases: VecDeque<LeaseKey>,
    releases_sent: usize,
    ping_due: bool,
    ping_sent: bool,
    /// Whether the server is to be asked which leases have ended: before all else on a resumed connection.
    held_due: bool,
    silence: Silence,
    closing: Option<Instant>,
    /// Whether the program ends its use without waiting for the server.
    departing: bool,
}

pub(crate) struct ClientSession {
    pub(super) dial: Dial,
    /// Where memory is imported; `None` for a client that looks at names alone.
    driver: Option<Driver>,
    queue: mpsc::UnboundedSender<Command>,
    permits: Arc<Semaphore>,
    /// Wakes the task when there is something to write or to end.
    pub(super) wake: Notify,
    notices: OnceLock<broadcast::Sender<Notified>>,
    over: watch::Sender<bool>,
    /// Why the server counts as gone, or no longer lets this client in, until it does again.
    pub(super) gone: watch::Sender<Option<Error>>,
    pub(super) users: AtomicUsize,
    state: Mutex<SessionState>,
}

impl ClientSession {
    /// Creates the session of a new connection on the current runtime. Its task takes the commands.
    pub(super) fn new(
        dial: Dial,
        established: &Established,
        driver: Option<Driver>,
    ) -> (Arc<Self>, Commands) {
        let (queue, commands) = mpsc::unbounded_channel();
        let permits = dial
            .options
            .limits
            .requests_in_flight
            .saturating_sub(RELEASES + 1)
            .max(1);
        let session = Arc::new(Self {
            driver,
            queue,
            // These permits bound the queue.
            permits: Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS))),
            wake: Notify::new(),
            notices: OnceLock::new(),
            over: watch::channel(false).0,
            gone: watch::channel(None).0,
            users: AtomicUsize::new(0),
            state: Mutex::new(SessionState {
                link: Link::Up,
                terms: Arc::new(established.terms.clone()),
                epoch: 0,
                next_id: 0,
                waiting: HashMap::new(),
                leases: HashMap::new(),
                releases: VecDeque::new(),
                releases_sent: 0,
                ping_due: false,
                ping_sent: false,
                held_due: false,
                silence: Silence {
                    last: Instant::now(),
                    total: Duration::ZERO,
                },
                closing: None,
                departing: false,
            }),
            dial,
        });
        (session, commands)
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
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
    pub(super) fn patience(&self) -> Duration {
        self.dial.options.timeout
    }

    pub(crate) fn notices(&self) -> broadcast::Receiver<Notified> {
        let ring = || broadcast::channel(NOTICES).0;
        self.notices.get_or_init(ring).subscribe()
    }

    /// Notifies the watchers, if there are any.
    pub(super) fn tell(&self, notified: Notified) {
        if let Some(notices) = self.notices.get() {
            // All of them may be gone.
            let _ = notices.send(notified);
        }
    }

    /// Sends a request and waits for the answer, at most `patience`; a refusal is an error.
    ///
    /// If dropped before the answer, nothing is left: a lease that is granted later is released.
    pub(super) async fn call(
        &self,
        ask: Ask,
        fds: Vec<OwnedFd>,
        patience: Duration,
    ) -> Result<Answered> {
        let what = text::asked(&ask);
        // Bounds both, so that years do not overflow.
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
            Link::Up => Error::timed_out(format!("{what} ({})", self.dial.options.address), after),
            Link::Down(Unconnected { error, .. }) | Link::Over(error) => error.clone(),
        }
    }

    /// Returns why there is no connection.
    pub(super) fn down(&self) -> Error {
        let state = self.lock();
        let why = match &state.link {
            Link::Over(error) => return error.clone(),
            _ if state.closing.is_some() => "this client was closed",
            Link::Down(Unconnected { error, .. }) => return error.clone(),
            Link::Up => "the client's runtime has ended",
        };
        Error::peer_lost(self.dial.options.address.to_string(), why)
    }

    /// Ends a lease, as soon as there is a connection: the release is not lost while the session lasts.
    pub(super) fn release(&self, key: LeaseKey, done: Option<oneshot::Sender<Result<()>>>) {
        let mut state = self.lock();
        let over = matches!(state.link, Link::Over(_));
        let instance = state.terms.welcome.instance;
        let Some(held) = state.leases.get_mut(&key) else {
            return;
        };
        held.done = done;
        if over || held.instance != instance {
            // The server that granted it is gone, and the lease with it.
            return state.end(key, Ok(()));
        }
        // Also for a lost lease, even of an earlier session: the server waits for the unmapping.
        state.releases.push_back(key);
        drop(state);
        self.wake.notify_one();
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
        let state = self.lock();
        state.closing.is_none() && !matches!(state.link, Link::Over(_))
    }

    /// Returns whether there is no connection now, but may be one.
    pub(super) fn is_down(&self) -> bool {
        let state = self.lock();
        state.closing.is_none() && matches!(state.link, Link::Down(_))
    }

    /// Waits until this client has ended, or the server no longer lets it in.
    pub(super) async fn until_end(&self) -> Error {
        let mut gone = self.gone.subscribe();
        let barred = async {
            let why = gone
                .wait_for(|why| why.as_ref().is_some_and(is_final))
                .await;
            why.ok().and_then(|why| why.clone())
        };
        tokio::select! {
            () = self.queue.closed() => self.down(),
            Some(why) = barred => why,
        }
    }

    /// Waits until the server is gone, silent for longer than a lease, or no longer lets this client in, which may be
    /// so already.
    pub(super) fn gone(&self) -> impl Future<Output = Error> + use<> {
        let mut gone = self.gone.subscribe();
        async move {
            let why = gone.wait_for(Option::is_some).await;
            let why = why.ok().and_then(|why| why.clone());
            match why {
                Some(why) => why,
                None => std::future::pending().await,
            }
        }
    }

    /// Waits until the task has ended.
    pub(super) async fn closed(&self) {
        let mut over = self.over.subscribe();
        // An error would mean that `self` is gone.
        let _ = over.wait_for(|&over| over).await;
    }
}

impl SessionState {
    /// Numbers a request, and waits for its answer.
    fn request(&mut self, waiting: PendingRequest, ask: Ask) -> Request {
        self.next_id += 1;
        let id = self.next_id;
        self.waiting.insert(id, waiting);
        (id, ask)
    }

    /// Returns the key of a lease of this session.
    const fn key(&self, lease: u64) -> LeaseKey {
        let epoch = self.epoch;
        LeaseKey { epoch, lease }
    }

    /// Forgets a lease. A release that waits gets the reason why the lease was lost, or else the result.
    fn end(&mut self, key: LeaseKey, result: Result<()>) {
        let held = self.leases.remove(&key);
        if let Some(Held {
            state,
            done: Some(done),
            ..
        }) = held
        {
            let _ = done.send(match &*state.borrow() {
                LeaseState::Lost(error) => Err(error.clone()),
                _ => result,
            });
        }
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
    // A day at most: no holder waits longer, and clocks do not overflow.
    let ms = Duration::from_millis(ms.min(86_400_000));
    LeaseState::Withdrawing {
        until: std::time::Instant::now() + ms,
    }
}

impl fmt::Debug for ClientSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientSession")
            .field("address", &self.dial.options.address)
            .finish_non_exhaustive()
    }
}
