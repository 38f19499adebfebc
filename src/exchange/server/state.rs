//! A server's state, under one lock that is never held across a wait; what its tasks share besides; and statistics.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::audit::{Audit, audit};
use super::leases::{Deadlines, EndedSession, Followed, LeaseRecord, SessionRecord};
use super::newcomers::Newcomers;
use super::options::{Allocate, Allocator, ServerOptions};
use super::publication::{HolderProcess, HolderState, Registered, describe};
use super::quota::{Quota, Refused, What, shrink};
use super::session::ServerSession;
use crate::driver::Numbers;
use crate::limits::LONGEST;
use crate::per_driver::lock;
use crate::protocol::{Hello, MAX_REQUEST};
use crate::share::{BootId, InstanceId};
use crate::transport::SharedPeers;
use crate::{PeerList, PeerName, Refusal, Result, Security, Tls};

/// How often to look whether the processes of silent holders still run.
const POLL: Duration = Duration::from_millis(200);

/// The state that the tasks share.
pub(super) struct ServerCore {
    pub(super) instance: InstanceId,
    pub(super) boot: BootId,
    /// As they were set, with lower limits if the process may have too few fds, and the addresses with their ports.
    pub(super) options: ServerOptions,
    /// Counts what peers make it keep.
    pub(super) quota: Arc<Quota>,
    /// Each open connection has a clone.
    pub(super) open: Arc<()>,
    /// Connections that have not been greeted yet.
    pub(super) newcomers: Newcomers,
    /// The users that may connect to Unix sockets.
    pub(super) peers: SharedPeers,
    /// The Unix socket where sessions of clients on this machine move.
    pub(super) local: Option<String>,
    pub(super) allocator: Mutex<Option<Allocator>>,
    pub(super) state: Mutex<ServerState>,
    pub(super) audit: Arc<Audit>,
    counters: Mutex<ServerStats>,
    /// Running tasks and blocking calls. The server's end waits for the last one.
    pub(super) tasks: TaskTracker,
    /// Woken when the process of a silent holder is to be waited for.
    pub(super) followed: Notify,
    /// Woken when more peers may see a name: by the name's hash, so that few look in vain.
    changes: [Notify; 256],
    hasher: RandomState,
    /// Woken when there may be an earlier deadline than before.
    pub(super) janitor: Notify,
    /// Woken when a lease has ended.
    pub(super) released: Notify,
    /// Cancelled at the server's end.
    pub(super) ended: CancellationToken,
}

impl ServerCore {
    /// Returns the state of a server whose process may open so many fds.
    pub(super) fn new(
        mut options: ServerOptions,
        fds: usize,
        instance: InstanceId,
        peers: SharedPeers,
        local: Option<String>,
    ) -> Result<Self> {
        let audit = Arc::new(Audit::new(options.audit.take()));
        let quota = Quota::new(&options.limits, fds);
        Ok(Self {
            instance,
            boot: BootId::current()?,
            state: Mutex::new(ServerState {
                audit: Arc::clone(&audit),
                quota: Arc::clone(&quota),
                ..ServerState::default()
            }),
            quota,
            open: Arc::default(),
            newcomers: Newcomers::new(options.limits.handshakes),
            peers,
            local,
            allocator: Mutex::new(options.allocator.take()),
            options,
            audit,
            counters: Mutex::default(),
            tasks: TaskTracker::new(),
            followed: Notify::new(),
            changes: std::array::from_fn(|_| Notify::new()),
            hasher: RandomState::new(),
            janitor: Notify::new(),
            released: Notify::new(),
            ended: CancellationToken::new(),
        })
    }

    /// Waits until no lease is left, or until a time.
    pub(super) async fn wait_for_releases(&self, until: tokio::time::Instant) {
        loop {
            let released = self.released.notified();
            if self.quota.used(What::Lease) == 0
                || tokio::time::timeout_at(until, released).await.is_err()
            {
                return;
            }
        }
    }

    /// Returns after how much silence a connection is closed.
    pub(super) fn silence(&self) -> Duration {
        (self.options.lease).min(self.options.heartbeat.saturating_mul(3))
    }

    /// Returns the most bytes of a frame that it reads.
    pub(super) fn frame_bytes(&self) -> u32 {
        self.options.limits.frame_bytes.min(MAX_REQUEST)
    }

    /// Returns the certificates that verify peers over TLS.
    pub(super) fn tls(&self) -> Option<&Tls> {
        match &self.options.security {
            Security::Tls(tls) => Some(tls),
            Security::Plain | Security::PlainAnywhere => None,
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, ServerState> {
        lock(&self.state)
    }

    /// Returns what wakes requests that wait for a name when more peers may see it, and sometimes for nothing.
    pub(super) fn changes_of(&self, name: &str) -> &Notify {
        let hash = self.hasher.hash_one(name) as usize;
        &self.changes[hash % self.changes.len()]
    }

    /// Returns the allocator, or the refusal if there is none (any more).
    pub(super) fn allocator(&self) -> Result<Arc<dyn Allocate>, Refused> {
        let allocator = lock(&self.allocator).clone();
        allocator.map(|allocator| allocator.0).ok_or_else(|| {
            if self.state().closing {
                (Refusal::Closing, "the server is ending".into())
            } else {
                (Refusal::Unsupported, "there is no allocator".into())
            }
        })
    }

    /// Ends all tasks and removes all names; returns the remaining holders.
    pub(super) fn end(&self) -> Vec<String> {
        let mut held = Vec::new();
        {
            let mut state = self.state();
            state.closing = true;
            // Memory of an unconfirmed release has no name, but has holders.
            let mut ids: Vec<u64> = state.publications.keys().copied().collect();
            ids.sort_unstable();
            for id in ids {
                let (mut holders, more) = state.holders(id);
                if let Some(registered) = state.publications.get(&id)
                    && (!holders.is_empty() || more > 0)
                {
                    let all = describe(&holders, more);
                    // A withdrawal must not mistake a forgotten lease for a released one.
                    let _ = registered.publication.left_held.set(all);
                }
                holders.retain(|holder| holder.state != HolderState::Expired);
                held.extend(describe(&holders, 0));
                state.unpublish(id, "the exporter has ended");
            }
        }
        // The allocator may hold this server, which would then never end.
        let allocator = lock(&self.allocator).take();
        drop(allocator);
        self.ended.cancel();
        held
    }

    pub(super) fn stats(&self) -> ServerStats {
        let state = self.state();
        // Windows count only their own bytes: many may lie in the same memory.
        let padded = |one: &Registered| match &*one.description {
            memory if memory.is_window() => memory.len,
            memory => memory.padded(),
        };
        let counters = lock(&self.counters).clone();
        let named = state.names.values();
        let named = named.filter_map(|id| state.publications.get(id));
        ServerStats {
            sessions: state.sessions.len() as u64,
            leases: self.quota.used(What::Lease) as u64,
            names: state.names.len() as u64,
            bytes: named.map(padded).sum(),
            connections: (Arc::strong_count(&self.open) - 1) as u64,
            fds: self.quota.used(What::Fd) as u64,
            handshakes: self.newcomers.count() as u64,
            tasks: self.tasks.len() as u64,
            expired: state.expired,
            dropped_peers: counters.dropped_peers + state.dropped,
            ..counters
        }
    }

    /// Increments a counter.
    pub(super) fn count(&self, count: fn(&mut ServerStats) -> &mut u64) {
        *count(&mut lock(&self.counters)) += 1;
    }

    /// Counts a refusal.
    pub(super) fn count_refusal(&self, reason: &Refusal) {
        let refusals = &mut lock(&self.counters).refusals;
        // An allocator may have reasons of its own, but only so many are counted.
        let word = match reason.word() {
            word if refusals.contains_key(word) || refusals.len() < 64 => word,
            _ => "other",
        };
        *refusals.entry(word.to_owned()).or_default() += 1;
    }

    /// Ends sessions and leases at their deadlines, until the server ends.
    pub(super) async fn expire_on_time(self: Arc<Self>) {
        loop {
            let deadline = {
                let state = self.state();
                let ending = (!state.ending.is_empty()).then(Instant::now);
                let all = [ending, state.deadlines.first(), self.audit.deadline()];
                all.into_iter().flatten().min()
            };
            let sleep = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now).into());
            tokio::select! {
                () = self.ended.cancelled() => return,
                () = self.janitor.notified() => {}
                () = sleep, if deadline.is_some() => {
                    let now = Instant::now();
                    let ended = self.state().expire(now);
                    self.report_ended(ended);
                    self.audit.report_suppressed(now);
                }
            }
        }
    }

    /// Reports sessions that have ended, and wakes the tasks that look after leases: some may have ended.
    pub(super) fn report_ended(&self, sessions: impl IntoIterator<Item = EndedSession>) {
        for (session, peer) in sessions {
            tracing::info!(%peer, session, "session ended");
            audit!(self.audit, Session, Some(&peer), "session_ended", session);
        }
        self.released.notify_waiters();
        self.followed.notify_one();
        // It also reports suppressed events, even if their peer does not return.
        self.janitor.notify_one();
    }

    /// Ends the leases of silent holders soon after their processes, until the server ends.
    pub(super) async fn end_with_processes(self: Arc<Self>) {
        loop {
            let processes = self.state().followed.keys().cloned().collect::<Vec<_>>();
            if processes.is_empty() {
                tokio::select! {
                    () = self.ended.cancelled() => return,
                    () = self.followed.notified() => continue,
                }
            }
            let begun = Instant::now();
            let ended = move || -> Vec<HolderProcess> {
                let processes = processes.into_iter();
                processes.filter(HolderProcess::has_ended).collect()
            };
            let ended = tokio::task::spawn_blocking(ended).await;
            for process in ended.unwrap_or_default() {
                self.state().process_ended(&process);
                self.released.notify_waiters();
            }
            // However many there are, looking takes at most a tenth of a thread's time.
            let pause = POLL.max(begun.elapsed() * 10);
            let ended = tokio::time::timeout(pause, self.ended.cancelled());
            if ended.await.is_ok() {
                return;
            }
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct ServerState {
    /// Publications by name.
    pub names: BTreeMap<Arc<str>, u64>,
    /// Also those without a name, whose holders are still tracked.
    pub publications: HashMap<u64, Registered>,
    pub sessions: HashMap<u64, SessionRecord>,
    /// Live and expired ones. Boxed, so that the table has short entries: its capacity may be twice the number
    /// of leases, and three times that while it grows.
    pub leases: HashMap<u64, Box<LeaseRecord>>,
    pub followed: Followed,
    /// When sessions without a connection end, and leases that were recalled one by one.
    pub deadlines: Deadlines,
    /// Live leases of sessions that have ended.
    pub ending: Vec<BTreeSet<u64>>,
    /// How many leases have expired.
    pub expired: u64,
    /// How many connections have ended because their peers had no room for a notice.
    pub dropped: u64,
    /// The server is about to end: nothing new begins.
    pub closing: bool,
    pub audit: Arc<Audit>,
    pub quota: Arc<Quota>,
    /// The number of the last publication. Peers do not see it.
    pub last: u64,
    /// Those of new leases, and of sessions, which are part of their tokens.
    pub numbers: Numbers,
}

impl ServerState {
    /// Returns the session that a hello names, and whose token it has. Knowing its number, with which a token begins, does
    /// not reveal the token.
    pub fn session_of(&self, hello: &Hello) -> Option<&Arc<ServerSession>> {
        let token = hello.resume.as_ref()?;
        let number = token.expose().first_chunk()?;
        let found = &self.sessions.get(&u64::from_be_bytes(*number))?.session;
        (found.token == *token).then_some(found)
    }

    /// Returns all sessions for which this holds.
    pub fn sessions_if(&self, is_so: impl Fn(&ServerSession) -> bool) -> Vec<Arc<ServerSession>> {
        let sessions = self.sessions.values().map(|record| &record.session);
        sessions.filter(|session| is_so(session)).cloned().collect()
    }

    /// Returns the publication under a name, for a peer that may fetch it.
    pub fn find(&self, name: &str, peer: &PeerName) -> Option<&Registered> {
        let registered = self.publications.get(self.names.get(name)?)?;
        registered.peers.admits(peer).then_some(registered)
    }

    /// Returns the size in bytes of the memory under a name.
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        let found = self.publications.get(self.names.get(name)?)?;
        Some(found.description.len)
    }

    /// As [`find`](Self::find), unless it is being withdrawn.
    pub fn visible(&self, name: &str, peer: &PeerName) -> Option<&Registered> {
        self.find(name, peer).filter(|found| !found.closing)
    }

    /// Recalls a publication from its holders: no new ones are admitted.
    pub fn withdraw(&mut self, id: u64, within: Duration) {
        let within = within.min(LONGEST);
        if let Some(registered) = self.publications.get_mut(&id) {
            registered.closing = true;
            registered.until = Some(Instant::now() + within);
        }
        for lease in self.live(id) {
            self.recall(lease, within, None);
        }
    }

    /// Changes which peers may import a publication. Recalls the leases of peers that no longer may; they end
    /// after `within`, or at the time of an earlier recall.
    pub fn set_peers(&mut self, id: u64, peers: PeerList, within: Duration) {
        self.recall_others(id, &peers, within);
        if let Some(registered) = self.publications.get_mut(&id) {
            registered.peers = peers;
        }
    }

    /// Removes a publication and its name at once; its leases end.
    pub fn unpublish(&mut self, id: u64, detail: &str) {
        self.take_name(id);
        self.revoke(id, detail);
        if let Some(registered) = self.publications.remove(&id) {
            shrink(&mut self.publications);
            registered.publication.changed.notify_waiters();
        }
    }

    /// Removes a publication's name at once; its leases stay as they are. Returns whether it had its name.
    pub fn take_name(&mut self, id: u64) -> bool {
        let Some(registered) = self.publications.get_mut(&id) else {
            return false;
        };
        registered.counted = None;
        let name = &*registered.publication.name;
        let is_named = self.names.get(name) == Some(&id);
        if is_named {
            self.names.remove(name);
            registered.closing = true;
            // Nobody sees it again, and nothing counts it.
            registered.peers = PeerList::nobody();
        }
        is_named
    }

    /// Forgets the sessions when no connection is left, and returns them.
    pub fn clear(&mut self) -> impl Iterator<Item = Arc<ServerSession>> + use<> {
        self.deadlines = Deadlines::default();
        self.ending = Vec::new();
        self.leases = HashMap::new();
        self.followed = Followed::new();
        let sessions = std::mem::take(&mut self.sessions);
        sessions.into_values().map(|record| record.session)
    }

    /// Tells all peers that the server ends.
    pub fn notify_closing(&self, until: Instant) {
        for SessionRecord { session, .. } in self.sessions.values() {
            session.notify_closing(until);
        }
    }
}

/// A server's statistics: gauges, then counts since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerStats {
    /// Open connections, including those that have not said hello yet.
    pub connections: u64,
    /// Those of them that have not been greeted yet.
    pub handshakes: u64,
    /// Sessions, with and without a connection.
    pub sessions: u64,
    /// Live leases.
    pub leases: u64,
    /// Published names.
    pub names: u64,
    /// Published memory in bytes, including padding; for windows only their own bytes.
    pub bytes: u64,
    /// Open file descriptors that are being sent to peers.
    pub fds: u64,
    /// Running tasks and blocking calls of the server. 0 after [`close`](super::Server::close).
    pub tasks: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections that failed before their hello was answered by a welcome.
    pub failed_handshakes: u64,
    /// Those of them that gave way to newer ones.
    pub dropped_handshakes: u64,
    /// Connections ended because the peer violated the protocol.
    pub protocol_errors: u64,
    /// Connections ended because the peer was silent, did not read in time, or had no room for the notice of an ended lease.
    pub dropped_peers: u64,
    /// Sessions that were resumed after a broken connection.
    pub resumed: u64,
    /// Requests.
    pub requests: u64,
    /// Leases granted.
    pub fetches: u64,
    /// Leases released by their holders.
    pub released: u64,
    /// Leases that ended because their holder fell silent.
    pub expired: u64,
    /// Sessions that moved from TCP to a Unix socket.
    pub moved: u64,
    /// Refusals, by reason.
    pub refusals: BTreeMap<String, u64>,
}
