//! State that the server's tasks share, and statistics.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::allocate::{Allocate, Refused};
use super::audit::{Audit, audit};
use super::leases::EndedSession;
use super::newcomers::Newcomers;
use super::process::{HolderProcess, HolderState, describe};
use super::publication::Registered;
use super::quota::{Quota, What};
use super::registry::ServerState;
use crate::per_driver::lock;
use crate::share::{BootId, InstanceId};
use crate::transport::SharedPeers;
use crate::{Limits, PeerName, Refusal, Tls};

/// How often to look whether the processes of silent holders still run.
const POLL: Duration = Duration::from_millis(200);

/// The state that the tasks share.
pub(super) struct ServerCore {
    pub(super) instance: InstanceId,
    pub(super) boot: BootId,
    /// Lowered if the process may have too few fds.
    pub(super) limits: Limits,
    /// Counts what peers make it keep.
    pub(super) quota: Arc<Quota>,
    /// Each open connection has a clone.
    pub(super) open: Arc<()>,
    /// Connections that have not been greeted yet.
    pub(super) newcomers: Newcomers,
    /// The certificates that verify peers over TLS.
    pub(super) tls: Option<Tls>,
    /// The users that may connect to Unix sockets.
    pub(super) peers: SharedPeers,
    /// The clock for the validity of certificates.
    pub(super) wall_clock: fn() -> SystemTime,
    pub(super) heartbeat: Duration,
    pub(super) lease: Duration,
    /// The Unix socket where sessions of clients on this machine move.
    pub(super) local: Option<String>,
    pub(super) allocator: Mutex<Option<Arc<dyn Allocate>>>,
    pub(super) state: Mutex<ServerState>,
    pub(super) audit: Arc<Audit>,
    pub(super) counters: Counters,
    /// Running tasks and blocking calls. The server's end waits for the last one.
    pub(super) tasks: TaskTracker,
    /// Woken when the process of a silent holder is to be waited for.
    pub(super) followed: Notify,
    /// Woken when there may be an earlier deadline than before.
    pub(super) janitor: Notify,
    /// Woken when a lease has ended.
    pub(super) released: Notify,
    /// Cancelled at the server's end.
    pub(super) ended: CancellationToken,
}

impl ServerCore {
    /// Waits until no lease is left, or until a time.
    pub(super) async fn wait_for_releases(&self, until: tokio::time::Instant) {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            if self.state().leases.live() == 0
                || tokio::time::timeout_at(until, released).await.is_err()
            {
                return;
            }
        }
    }

    /// Returns after how much silence a connection is closed.
    pub(super) fn silence(&self) -> Duration {
        self.lease.min(self.heartbeat.saturating_mul(3))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, ServerState> {
        lock(&self.state)
    }

    /// Returns the allocator, or the refusal if there is none (any more).
    pub(super) fn allocator(&self) -> Result<Arc<dyn Allocate>, Refused> {
        let allocator = lock(&self.allocator).clone();
        allocator.ok_or_else(|| {
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
                let (mut holders, more) = state.leases.holders(id);
                if let Some(registered) = state.publications.get(&id)
                    && (!holders.is_empty() || more > 0)
                {
                    let all = describe(&holders, more);
                    // A withdrawal must not mistake a forgotten lease for a released one.
                    let _ = registered.publication.holders.left_held.set(all);
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
        let padded = |one: &Registered| match &one.publication.description {
            memory if memory.is_window() => memory.len,
            memory => memory.padded(),
        };
        let named = state.names.values();
        let named = named.filter_map(|id| state.publications.get(id));
        ServerStats {
            sessions: state.sessions.len() as u64,
            leases: state.leases.live() as u64,
            names: state.names.len() as u64,
            bytes: named.map(padded).sum(),
            connections: (Arc::strong_count(&self.open) - 1) as u64,
            fds: self.quota.used(What::Fd) as u64,
            handshakes: self.newcomers.count() as u64,
            tasks: self.tasks.len() as u64,
            ..self.counters.read()
        }
    }

    /// Ends sessions and leases at their deadlines, until the server ends.
    pub(super) async fn expire_on_time(self: Arc<Self>) {
        loop {
            let deadline = {
                let state = self.state();
                let recall = state.recalls.first();
                let audit = self.audit.deadline();
                let all = [state.leases.deadline(), recall, audit];
                all.into_iter().flatten().min()
            };
            let sleep = tokio::time::sleep_until(deadline.unwrap_or_else(Instant::now).into());
            tokio::select! {
                () = self.ended.cancelled() => return,
                () = self.janitor.notified() => {}
                () = sleep, if deadline.is_some() => {
                    self.expire(Instant::now());
                    self.audit.report_suppressed(Instant::now());
                }
            }
        }
    }

    /// Ends the leases that were recalled and not released in time, and the sessions that have expired.
    pub(super) fn expire(&self, now: Instant) {
        let mut state = self.state();
        while let Some(lease) = state.recalls.pop(now) {
            if !state.leases.end_lease(lease) {
                continue;
            }
            if let Some(record) = state.leases.find(lease) {
                let why = "this peer is no longer on the name's access list";
                state.notify_ended(record, Refusal::Forbidden, why);
                state.audit_lease("revoked", record);
            }
            self.lapsed(&mut state, lease);
        }
        let ended = state.leases.expire(now);
        self.sessions_over(state, ended);
    }

    /// Cleans up after sessions that have ended with unreleased leases.
    pub(super) fn sessions_over(
        &self,
        mut state: MutexGuard<'_, ServerState>,
        ended: Vec<EndedSession>,
    ) {
        for session in &ended {
            state.remove_session(session.session);
            for &lease in &session.leases {
                if let Some(record) = state.leases.find(lease) {
                    state.audit_lease("expired", record);
                }
                self.lapsed(&mut state, lease);
            }
        }
        drop(state);
        for session in ended {
            self.session_ended(session.session, &session.peer);
        }
        self.released.notify_waiters();
    }

    /// Cleans up after a lease that has expired, and reports it.
    pub(super) fn lapsed(&self, state: &mut ServerState, lease: u64) {
        state.recalls.remove(lease);
        state.leases.follow_lease(lease);
        self.followed.notify_one();
        self.counters.count(|stats| &mut stats.expired);
        let Some(record) = state.leases.find(lease) else {
            return;
        };
        let publication = record.publication;
        let name = state.name_of(publication);
        tracing::warn!(peer = %record.holder.peer, name, lease, "lease expired");
        let forgotten = state.leases.prune(publication);
        if let Some(registered) = state.publications.get_mut(&publication) {
            registered.publication.holders.changed.notify_waiters();
            // A late write there fails another probe at worst.
            if let Some(slot) = forgotten.and_then(|lease| lease.probe) {
                registered.probes.give_back(slot);
            }
        }
    }

    /// Ends the leases of silent holders soon after their processes, until the server ends.
    pub(super) async fn end_with_processes(self: Arc<Self>) {
        loop {
            let processes = self.state().leases.followed();
            let (is_idle, begun) = (processes.is_empty(), Instant::now());
            let ended = move || -> Vec<HolderProcess> {
                let processes = processes.into_iter();
                processes.filter(HolderProcess::has_ended).collect()
            };
            let ended = tokio::task::spawn_blocking(ended).await;
            for process in ended.unwrap_or_default() {
                self.process_ended(&process);
            }
            let again = async {
                if is_idle {
                    self.followed.notified().await;
                } else {
                    // However many there are, looking takes at most a tenth of a thread's time.
                    tokio::time::sleep(POLL.max(begun.elapsed() * 10)).await;
                }
            };
            tokio::select! {
                () = self.ended.cancelled() => return,
                () = again => {}
            }
        }
    }

    /// Handles the end of a process: its memory is no longer mapped.
    fn process_ended(&self, process: &HolderProcess) {
        let mut state = self.state();
        let leases = state.leases.ended(process);
        for lease in &leases {
            state.returned(lease);
            if let Some(registered) = state.publications.get(&lease.publication) {
                registered
                    .publication
                    .holders
                    .left_by_dead
                    .store(true, Relaxed);
            }
            let (holder, name) = (&lease.holder, state.name_of(lease.publication));
            tracing::info!(%holder, name, lease = holder.lease, "lease ended with its process");
            if holder.state != HolderState::Expired {
                state.audit_lease("expired", lease);
                self.counters.count(|stats| &mut stats.expired);
            }
        }
        drop(state);
        self.released.notify_waiters();
    }

    /// Cleans up after a session.
    pub(super) fn session_ended(&self, session: u64, peer: &PeerName) {
        tracing::info!(%peer, session, "session ended");
        audit!(self.audit, Session, Some(peer), "session_ended", session);
        if self.audit.deadline().is_some() {
            // The janitor reports suppressed events, even if the peer does not return.
            self.janitor.notify_one();
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

/// The counts.
#[derive(Debug, Default)]
pub(super) struct Counters(Mutex<ServerStats>);

/// A function that returns one of the counters.
pub(super) type Count = fn(&mut ServerStats) -> &mut u64;

impl Counters {
    /// Increments a counter.
    pub fn count(&self, count: Count) {
        *count(&mut lock(&self.0)) += 1;
    }

    /// Counts a refusal.
    pub fn refused(&self, reason: &Refusal) {
        let refusals = &mut lock(&self.0).refusals;
        // An allocator may have reasons of its own, but only so many are counted.
        let word = match reason.word() {
            word if refusals.contains_key(word) || refusals.len() < 64 => word,
            _ => "other",
        };
        *refusals.entry(word.to_owned()).or_default() += 1;
    }

    /// Returns them, with the gauges left at 0.
    pub fn read(&self) -> ServerStats {
        lock(&self.0).clone()
    }
}
