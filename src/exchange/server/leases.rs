//! Sessions and leases in the server's state: which peers hold which memory, and when that ends. The caller passes the
//! time of grants and ends, and how long a recall leaves; this module does no I/O but events of `tracing`.
//!
//! A session without a connection ends at a given time, and its leases with it. Such a holder may still have
//! the memory mapped (a stopped process cannot unmap), so it stays on the list of holders as
//! [`HolderState::Expired`] until it says that it has released it, or the publication is forgotten.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::audit::audit;
use super::publication::{Holder, HolderProcess, HolderState, Holders, Registered};
use super::quota::{Counted, Refused, What, shrink};
use super::session::ServerSession;
use super::state::ServerState;
use crate::limits::{LONGEST, millis};
use crate::protocol::{self, Event};
use crate::{PeerList, PeerName, Refusal};

/// Reported when a connection ends whose peer has no room for another notice.
const TOO_MANY_ENDED: &str = "connection dropped: the limit of live and expired leases leaves no room for the notice of an ended one";

/// How many leases of a session are handled under one lock of the state.
pub(super) const AT_ONCE: usize = 256;

/// The most expired holders of a publication that are remembered individually.
pub(super) const MAX_EXPIRED: usize = 1024;

/// A session, and its live leases.
#[derive(Debug)]
pub(super) struct SessionRecord {
    pub session: Arc<ServerSession>,
    leases: BTreeSet<u64>,
    /// When it ends, while it has no connection.
    ends: Option<Instant>,
}

/// The number and the peer of a session that has ended. It takes its notices with it.
pub(super) type EndedSession = (u64, PeerName);

/// A lease.
#[derive(Debug)]
pub(super) struct LeaseRecord {
    /// For an expired lease, the session that has ended.
    pub session: u64,
    pub publication: u64,
    pub holder: Holder,
    /// The offset of its probe word, in bytes from the memory's start.
    pub probe: Option<u64>,
    /// When it ends, if it was recalled alone.
    ends: Option<Instant>,
    /// Counts it while it is live.
    live: Option<Counted>,
    _counted: Counted,
}

impl LeaseRecord {
    const fn is_live(&self) -> bool {
        self.live.is_some()
    }
}

/// Leases of silent holders, until their processes have ended.
pub(super) type Followed = HashMap<HolderProcess, BTreeSet<u64>>;

/// Follows a lease with a silent holder, if its process is known: after the end of a process, its memory is no longer
/// mapped.
fn follow(followed: &mut Followed, lease: &LeaseRecord) {
    if let Some(process) = lease.holder.process.clone() {
        let leases = followed.entry(process).or_default();
        leases.insert(lease.holder.lease);
    }
}

fn unfollow(followed: &mut Followed, lease: &LeaseRecord) {
    if let Some(process) = &lease.holder.process
        && let Some(leases) = followed.get_mut(process)
    {
        leases.remove(&lease.holder.lease);
        if leases.is_empty() {
            followed.remove(process);
            shrink(followed);
        }
    }
}

/// Something that ends at a time, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Session(u64),
    Lease(u64),
}

/// What ends when. Each record has its own time too.
#[derive(Debug, Default)]
pub(super) struct Deadlines(BTreeSet<(Instant, Due)>);

impl Deadlines {
    /// Changes a record's time; returns the one before.
    fn set(&mut self, due: Due, of: &mut Option<Instant>, to: Option<Instant>) -> Option<Instant> {
        let before = std::mem::replace(of, to);
        if let Some(before) = before {
            self.0.remove(&(before, due));
        }
        self.0.extend(to.map(|to| (to, due)));
        before
    }

    /// Returns the first time.
    pub fn first(&self) -> Option<Instant> {
        self.0.first().map(|&(time, _)| time)
    }
}

/// Sessions.
impl ServerState {
    /// Adds a session that has a connection.
    pub fn open(&mut self, session: Arc<ServerSession>) {
        let record = SessionRecord {
            leases: BTreeSet::new(),
            ends: None,
            session,
        };
        self.sessions.insert(record.session.id, record);
    }

    /// Returns whether the session has a connection.
    pub fn is_attached(&self, session: u64) -> bool {
        let record = self.sessions.get(&session);
        record.is_some_and(|record| record.ends.is_none())
    }

    /// Attaches a connection to the session; returns whether the session still exists.
    pub fn attach(&mut self, session: u64) -> bool {
        let Some(record) = self.sessions.get_mut(&session) else {
            return false;
        };
        let due = Due::Session(session);
        if self.deadlines.set(due, &mut record.ends, None).is_some() {
            // Another process may have its socket, and the memory.
            for lease in record.leases.iter().filter_map(|id| self.leases.get(id)) {
                unfollow(&mut self.followed, lease);
            }
        }
        true
    }

    /// Detaches the session's connection: the session ends at `until`, or at once if it holds nothing. Returns it if it has
    /// ended.
    pub fn detach(&mut self, session: u64, until: Instant) -> Option<EndedSession> {
        let record = self.sessions.get_mut(&session)?;
        if record.leases.is_empty() {
            return self.end_session(session);
        }
        self.deadlines
            .set(Due::Session(session), &mut record.ends, Some(until));
        for lease in record.leases.iter().filter_map(|id| self.leases.get(id)) {
            follow(&mut self.followed, lease);
        }
        None
    }

    /// Ends a session: its leases [expire](Self::expire). Returns it if it was there.
    pub fn end_session(&mut self, session: u64) -> Option<EndedSession> {
        let mut record = self.sessions.remove(&session)?;
        shrink(&mut self.sessions);
        self.deadlines
            .set(Due::Session(session), &mut record.ends, None);
        let (peer, leases) = (record.session.peer.clone(), record.leases.len());
        if leases > 0 {
            tracing::warn!(%peer, session, leases, "leases expire with their session");
            self.ending.push(record.leases);
        }
        Some((session, peer))
    }

    /// Returns the live leases of the session that come after one of them, in ascending order.
    pub fn of_session(&self, session: u64, after: Option<u64>) -> impl Iterator<Item = u64> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let leases = self.sessions.get(&session).map(|record| &record.leases);
        let leases = leases.map(|leases| leases.range((from, Bound::Unbounded)));
        leases.into_iter().flatten().copied()
    }

    /// Ends the leases of sessions that have ended, those that were recalled and not released in time, and the sessions that
    /// have expired: [`AT_ONCE`] of all these at most. Returns the sessions.
    pub fn expire(&mut self, now: Instant) -> Vec<EndedSession> {
        let mut ended = Vec::new();
        for _ in 0..AT_ONCE {
            if let Some(leases) = self.ending.last_mut() {
                match leases.pop_first() {
                    Some(lease) => self.lapse(lease, "expired"),
                    None => drop(self.ending.pop()),
                }
                continue;
            }
            match self.deadlines.0.first() {
                Some(&(time, Due::Session(session))) if time <= now => {
                    ended.extend(self.end_session(session));
                }
                Some(&(time, Due::Lease(lease))) if time <= now => {
                    let why = "this peer is no longer on the name's access list";
                    if let Some(record) = self.leases.get(&lease) {
                        self.notify_ended(record.session, lease, Refusal::Forbidden, why);
                    }
                    self.lapse(lease, "revoked");
                }
                _ => break,
            }
        }
        ended
    }
}

/// Leases.
impl ServerState {
    /// Grants a lease of a publication, with a slot for a probe if one is wanted and there is room, to the process, if that
    /// is known.
    pub fn grant(
        &mut self,
        session: &ServerSession,
        publication: u64,
        probe: bool,
        process: Option<HolderProcess>,
        now: Instant,
    ) -> Result<(u64, Option<u64>), Refused> {
        let gone = || (Refusal::NotFound, "it has just been withdrawn".to_owned());
        let registered = self.publications.get_mut(&publication).ok_or_else(gone)?;
        if registered.closing || self.closing {
            return Err((Refusal::Closing, String::new()));
        }
        if !registered.peers.admits(&session.peer) {
            return Err(gone());
        }
        let no_session = || (Refusal::Expired, "the session has ended".into());
        let record = self.sessions.get_mut(&session.id).ok_or_else(no_session)?;
        let counted = self.quota.count(&session.peer, What::Record, 1)?;
        let live = self.quota.count(&session.peer, What::Lease, 1)?;
        let slot = probe.then(|| registered.probes.take()).flatten();
        let lease = self.numbers.next();
        record.leases.insert(lease);
        registered.holders.live.insert(lease);
        let new = LeaseRecord {
            session: session.id,
            publication,
            holder: Holder {
                peer: session.peer.clone(),
                lease,
                since: now,
                state: HolderState::Held,
                process,
            },
            probe: slot,
            ends: None,
            live: Some(live),
            _counted: counted,
        };
        self.leases.insert(lease, Box::new(new));
        Ok((lease, slot))
    }

    /// Sets the process that has the granted memory.
    #[cfg(test)]
    pub fn set_process(&mut self, lease: u64, process: HolderProcess) {
        self.leases.get_mut(&lease).unwrap().holder.process = Some(process);
    }

    /// Returns a live lease of the session.
    pub fn lease(&self, session: u64, lease: u64) -> Option<&LeaseRecord> {
        let record = self.leases.get(&lease)?;
        (record.session == session && record.is_live()).then_some(record)
    }

    /// Ends a lease whose holder has unmapped the memory. The peer of an expired lease may say so from a
    /// later session, unless any local process could be that peer. Returns whether it has ended.
    pub fn release(&mut self, session: &ServerSession, lease: u64) -> bool {
        let peer = &session.peer;
        let may = |record: &LeaseRecord| {
            // The leases of a session that has ended expire in a moment.
            if record.holder.state == HolderState::Expired
                || !self.sessions.contains_key(&record.session)
            {
                record.holder.peer == *peer && *peer != PeerName::Local
            } else {
                record.session == session.id
            }
        };
        if !self.leases.get(&lease).is_some_and(|record| may(record)) {
            return false;
        }
        self.audit_lease("released", lease);
        self.take_back(lease);
        true
    }

    /// Handles the end of a process: its memory is no longer mapped. Leases of a session with a connection are not followed:
    /// another process has its socket, and may have the memory.
    pub fn process_ended(&mut self, process: &HolderProcess) {
        for lease in self.followed.remove(process).unwrap_or_default() {
            let Some(record) = self.leases.get(&lease) else {
                continue;
            };
            if let Some(Registered { publication, .. }) = self.publications.get(&record.publication)
            {
                publication.left_by_dead.store(true, Relaxed);
                let (holder, name) = (&record.holder, &*publication.name);
                tracing::info!(%holder, name, lease, "lease ended with its process");
            }
            if record.is_live() {
                self.audit_lease("expired", lease);
                self.expired += 1;
            }
            self.take_back(lease);
        }
    }

    /// Recalls a live lease: its holder is asked to release it within this time. With `ends` it expires then.
    pub fn recall(&mut self, lease: u64, within: Duration, ends: Option<Instant>) {
        let Some(record) = self.leases.get_mut(&lease).filter(|lease| lease.is_live()) else {
            return;
        };
        record.holder.state = HolderState::Withdrawing;
        if ends.is_some() {
            let due = Due::Lease(lease);
            self.deadlines.set(due, &mut record.ends, ends);
        }
        let record = &*record;
        if let Some(SessionRecord { session, .. }) = self.sessions.get(&record.session) {
            let ms = millis(within);
            session.notify(lease, Event::Withdrawing { lease, ms }, None);
        }
        self.audit_lease("withdrawing", lease);
    }

    /// Recalls the live leases of peers that are not on a publication's new list. They end after `within`, or at the time
    /// of an earlier recall; that of a peer on the list is cancelled.
    pub fn recall_others(&mut self, publication: u64, peers: &PeerList, within: Duration) {
        let now = Instant::now();
        let until = now + within.min(LONGEST);
        let closing = (self.publications.get(&publication)).is_some_and(|found| found.closing);
        for lease in self.live(publication) {
            let Some(record) = self.leases.get_mut(&lease) else {
                continue;
            };
            if peers.admits(&record.holder.peer) {
                let due = Due::Lease(lease);
                let recalled = self.deadlines.set(due, &mut record.ends, None).is_some();
                if recalled && !closing {
                    record.holder.state = HolderState::Held;
                    if let Some(SessionRecord { session, .. }) = self.sessions.get(&record.session)
                    {
                        session.forget(lease);
                    }
                }
            } else {
                let until = record.ends.map_or(until, |earlier| earlier.min(until));
                self.recall(lease, until.saturating_duration_since(now), Some(until));
            }
        }
    }

    /// Returns how long the holder of a lease has left to release it, if it is recalled.
    pub fn recalled(&self, lease: u64) -> Option<Duration> {
        let record = self.leases.get(&lease)?;
        let until = match self.publications.get(&record.publication) {
            Some(registered) if registered.closing => registered.until,
            _ => Some(record.ends?),
        };
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        Some(until.map_or(Duration::ZERO, left))
    }

    /// Ends a live lease whose holder may still have the memory mapped: it expires.
    pub fn lapse(&mut self, lease: u64, event: &'static str) {
        let Some(record) = self.leases.get_mut(&lease).filter(|lease| lease.is_live()) else {
            return;
        };
        record.holder.state = HolderState::Expired;
        record.live = None;
        self.deadlines
            .set(Due::Lease(lease), &mut record.ends, None);
        follow(&mut self.followed, record);
        if let Some(session) = self.sessions.get_mut(&record.session) {
            session.leases.remove(&lease);
        }
        self.expired += 1;
        let (publication, peer) = (record.publication, record.holder.peer.clone());
        self.audit_lease(event, lease);
        let Some(registered) = self.publications.get_mut(&publication) else {
            return;
        };
        let name = &*registered.publication.name;
        tracing::debug!(%peer, name, lease, "lease expired");
        registered.publication.changed.notify_waiters();
        let holders = &mut registered.holders;
        holders.live.remove(&lease);
        holders.expired.push_back(lease);
        if holders.expired.len() > MAX_EXPIRED {
            // A late write at its probe's place fails another probe at worst.
            holders.more += 1;
            let oldest = holders.expired.pop_front();
            oldest.map(|oldest| self.remove(oldest));
        }
    }

    /// Ends all leases of a publication, including expired ones; tells those that have live ones.
    pub fn revoke(&mut self, publication: u64, detail: &str) {
        let Some(registered) = self.publications.get_mut(&publication) else {
            return;
        };
        let Holders { live, expired, .. } = std::mem::take(&mut registered.holders);
        // First: the notices of the others may need their room.
        for lease in expired {
            self.remove(lease);
        }
        for lease in live {
            self.audit_lease("revoked", lease);
            if let Some(record) = self.remove(lease) {
                self.notify_ended(record.session, lease, Refusal::Closing, detail);
            }
        }
    }

    /// Returns the holders of a publication: live ones in the order of grants, then expired ones; and how
    /// many further expired ones there are.
    pub fn holders(&self, publication: u64) -> (Vec<Holder>, usize) {
        let Some(Registered { holders, .. }) = self.publications.get(&publication) else {
            return (Vec::new(), 0);
        };
        let leases = holders.live.iter().chain(&holders.expired);
        let found = leases.filter_map(|lease| Some(self.leases.get(lease)?.holder.clone()));
        let mut list: Vec<Holder> = found.collect();
        list.sort_by_key(|holder| {
            let is_expired = holder.state == HolderState::Expired;
            (is_expired, holder.since, holder.lease)
        });
        (list, holders.more)
    }

    /// Returns whether a publication has holders, or may have them.
    pub fn is_held(&self, publication: u64) -> bool {
        let registered = self.publications.get(&publication);
        registered.is_some_and(|Registered { holders, .. }| {
            !holders.live.is_empty() || !holders.expired.is_empty() || holders.more > 0
        })
    }

    /// Returns the live leases of a publication.
    pub fn live(&self, publication: u64) -> BTreeSet<u64> {
        let registered = self.publications.get(&publication);
        registered.map_or_else(BTreeSet::new, |found| found.holders.live.clone())
    }

    /// Returns the number of live leases of a publication.
    pub fn count(&self, publication: u64) -> usize {
        let registered = self.publications.get(&publication);
        registered.map_or(0, |found| found.holders.live.len())
    }

    /// Tells the holder of a lease that the lease has ended.
    fn notify_ended(&mut self, session: u64, lease: u64, reason: Refusal, detail: &str) {
        let Some(SessionRecord { session, .. }) = self.sessions.get(&session) else {
            return;
        };
        let why = protocol::Refused::new(&reason, detail);
        match self.quota.count(&session.peer, What::Record, 1) {
            Ok(counted) => session.notify(lease, Event::Ended { lease, why }, Some(counted)),
            // The client asks which of its leases have ended when it connects again.
            Err(_) if session.cut() => {
                tracing::warn!(peer = %session.peer, session = session.id, "{TOO_MANY_ENDED}");
                self.dropped += 1;
            }
            Err(_) => {}
        }
    }

    /// Removes a lease whose memory its holder no longer has.
    fn take_back(&mut self, lease: u64) -> Option<LeaseRecord> {
        let record = self.remove(lease)?;
        // A notice about a live lease is counted with it.
        if let Some(SessionRecord { session, .. }) = self.sessions.get(&record.session) {
            session.forget(lease);
        }
        Some(record)
    }

    fn remove(&mut self, lease: u64) -> Option<LeaseRecord> {
        let mut record = *self.leases.remove(&lease)?;
        shrink(&mut self.leases);
        unfollow(&mut self.followed, &record);
        self.deadlines
            .set(Due::Lease(lease), &mut record.ends, None);
        // An expired lease belongs to no session.
        if let Some(session) = self.sessions.get_mut(&record.session) {
            session.leases.remove(&lease);
        }
        if let Some(registered) = self.publications.get_mut(&record.publication) {
            let holders = &mut registered.holders;
            holders.live.remove(&lease);
            holders.expired.retain(|expired| *expired != lease);
            if holders.expired.is_empty() {
                holders.expired = VecDeque::new();
            }
            if let Some(slot) = record.probe {
                registered.probes.give_back(slot);
            }
            registered.publication.changed.notify_waiters();
        }
        Some(record)
    }

    /// Writes an audit event of a lease: `released`, `expired`, `revoked`, or `withdrawing` if its holder is asked to
    /// release it.
    fn audit_lease(&self, event: &'static str, lease: u64) {
        let Some(record) = self.leases.get(&lease) else {
            return;
        };
        let published = self.publications.get(&record.publication);
        let name = published.map(|found| &*found.publication.name);
        let bytes = published.map(|found| found.description.len);
        let (session, peer) = (record.session, &record.holder.peer);
        audit! { self.audit, Memory, Some(peer), event, session, lease, name, bytes }
    }
}

#[cfg(test)]
mod tests;
