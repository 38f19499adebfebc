//! Tracks which peers hold which memory: sessions, their leases, and when they end. The caller passes the
//! time; this module does no I/O.
//!
//! A session without a connection ends at a given time, and its leases with it. Such a holder may still have
//! the memory mapped (a stopped process cannot unmap), so it stays on the list of holders as
//! [`HolderState::Expired`] until it says that it has released it, or the publication is forgotten.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;

use super::allocate::Refused;
use super::process::{Holder, HolderProcess, HolderState};
use super::quota::{Counted, Quota, What, shrink};
use crate::driver::Numbers;
use crate::{PeerName, Refusal};

/// The most expired holders of a publication that are remembered individually.
pub(super) const MAX_EXPIRED: usize = 1024;

/// A lease.
#[derive(Debug)]
pub(super) struct LeaseRecord {
    /// For an expired lease, the session that has ended.
    pub session: u64,
    pub publication: u64,
    pub holder: Holder,
    /// The offset of its probe word, in bytes from the memory's start.
    pub probe: Option<u64>,
    _counted: Counted,
}

/// A session that has ended, and the leases that expired with it.
#[derive(Debug)]
pub(super) struct EndedSession {
    pub session: u64,
    pub peer: PeerName,
    pub leases: Vec<u64>,
}

#[derive(Debug)]
struct SessionRecord {
    peer: PeerName,
    leases: BTreeSet<u64>,
    /// Counts the leases.
    counted: Counted,
}

impl SessionRecord {
    fn remove(&mut self, lease: u64) {
        self.leases.remove(&lease);
        // Shrinking never fails.
        let _ = self.counted.resize(self.leases.len());
    }
}

#[derive(Debug, Default)]
struct Holders {
    live: BTreeSet<u64>,
    /// In the order in which they expired.
    expired: VecDeque<u64>,
    /// Expired leases that are only counted.
    more: usize,
}

/// The table of leases.
#[derive(Debug)]
pub(super) struct Leases {
    sessions: HashMap<u64, SessionRecord>,
    /// Live and expired ones. Boxed, so that the table has short entries: its capacity may be twice the number
    /// of leases, and three times that while it grows.
    leases: HashMap<u64, Box<LeaseRecord>>,
    publications: HashMap<u64, Holders>,
    pub quota: Arc<Quota>,
    /// Leases of silent holders, until their processes have ended.
    followed: HashMap<HolderProcess, BTreeSet<u64>>,
    /// When sessions without a connection end.
    deadlines: Deadlines,
    numbers: Numbers,
}

impl Leases {
    /// Creates an empty table.
    pub fn new(quota: &Arc<Quota>) -> Self {
        Self {
            sessions: HashMap::new(),
            leases: HashMap::new(),
            publications: HashMap::new(),
            quota: Arc::clone(quota),
            followed: HashMap::new(),
            deadlines: Deadlines::default(),
            numbers: Numbers::default(),
        }
    }

    /// Forgets all sessions and leases.
    pub fn clear(&mut self) {
        *self = Self::new(&Arc::clone(&self.quota));
    }

    /// Adds a session that has a connection.
    pub fn open(&mut self, session: u64, peer: PeerName) {
        let new = SessionRecord {
            leases: BTreeSet::new(),
            counted: self.quota.none(&peer, What::Lease),
            peer,
        };
        self.sessions.insert(session, new);
    }

    /// Returns whether the session has a connection.
    pub fn is_attached(&self, session: u64) -> bool {
        self.sessions.contains_key(&session) && self.deadlines.get(session).is_none()
    }

    /// Attaches a connection to the session; returns whether the session still exists.
    pub fn attach(&mut self, session: u64) -> bool {
        if self.deadlines.remove(session) {
            self.unfollow_session(session);
        }
        self.sessions.contains_key(&session)
    }

    /// Detaches the session's connection: it ends at `until`, or at once if it holds nothing. Returns
    /// whether it has ended.
    pub fn detach(&mut self, session: u64, until: Instant) -> bool {
        let Some(entry) = self.sessions.get(&session) else {
            return false;
        };
        if entry.leases.is_empty() {
            self.end(session);
            return true;
        }
        self.deadlines.set(session, until);
        false
    }

    /// Grants a lease.
    pub fn grant(
        &mut self,
        session: u64,
        publication: u64,
        probe: Option<u64>,
        now: Instant,
    ) -> Result<u64, Refused> {
        let no_session = || (Refusal::Expired, "the session has ended".into());
        let entry = self.sessions.get_mut(&session).ok_or_else(no_session)?;
        let counted = self.quota.count(&entry.peer, What::Record, 1)?;
        entry.counted.resize(entry.leases.len() + 1)?;
        let lease = self.numbers.next();
        entry.leases.insert(lease);
        let holders = self.publications.entry(publication).or_default();
        holders.live.insert(lease);
        let holder = Holder {
            peer: entry.peer.clone(),
            lease,
            since: now,
            state: HolderState::Held,
            process: None,
        };
        let new = LeaseRecord {
            session,
            publication,
            holder,
            probe,
            _counted: counted,
        };
        self.leases.insert(lease, Box::new(new));
        Ok(lease)
    }

    /// Sets the process that has the granted memory.
    pub fn set_process(&mut self, lease: u64, process: HolderProcess) {
        if let Some(entry) = self.leases.get_mut(&lease) {
            entry.holder.process = Some(process);
        }
    }

    /// Returns a lease, live or expired.
    pub fn find(&self, lease: u64) -> Option<&LeaseRecord> {
        self.leases.get(&lease).map(|record| &**record)
    }

    /// Returns a live lease of the session.
    pub fn get(&self, session: u64, lease: u64) -> Option<&LeaseRecord> {
        let entry = self.find(lease)?;
        let lives = entry.session == session && entry.holder.state != HolderState::Expired;
        lives.then_some(entry)
    }

    /// Returns the live leases of the session that come after one of them, in ascending order.
    pub fn of_session(&self, session: u64, after: Option<u64>) -> impl Iterator<Item = u64> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let leases = self.sessions.get(&session).map(|entry| &entry.leases);
        let leases = leases.map(|leases| leases.range((from, Bound::Unbounded)));
        leases.into_iter().flatten().copied()
    }

    /// Ends a lease whose holder has unmapped the memory. The peer of an expired lease may say so from a
    /// later session, unless any local process could be that peer.
    pub fn release(&mut self, session: u64, peer: &PeerName, lease: u64) -> Option<LeaseRecord> {
        let entry = self.leases.get(&lease)?;
        let may = match entry.holder.state {
            HolderState::Expired => entry.holder.peer == *peer && *peer != PeerName::Local,
            _ => entry.session == session,
        };
        if may { self.remove(lease) } else { None }
    }

    /// Marks the live leases of a publication as recalled; returns them with their sessions.
    pub fn withdraw(&mut self, publication: u64) -> Vec<(u64, u64)> {
        let live = self.publications.get(&publication).map(|h| h.live.clone());
        let recall = |lease| Some((self.recall(lease)?, lease));
        live.into_iter().flatten().filter_map(recall).collect()
    }

    /// Marks a live lease as recalled; returns its session.
    pub fn recall(&mut self, lease: u64) -> Option<u64> {
        let entry = self.leases.get_mut(&lease)?;
        if entry.holder.state == HolderState::Expired {
            return None;
        }
        entry.holder.state = HolderState::Withdrawing;
        Some(entry.session)
    }

    /// Ends all leases of a publication, including expired ones; returns those that were live.
    pub fn forget(&mut self, publication: u64) -> Vec<LeaseRecord> {
        let Some(holders) = self.publications.remove(&publication) else {
            return Vec::new();
        };
        shrink(&mut self.publications);
        let live = holders.live.into_iter();
        let live = live.filter_map(|l| self.remove(l)).collect();
        for lease in holders.expired {
            self.remove(lease);
        }
        live
    }

    /// Ends the sessions that have expired. Call [`prune`](Self::prune) for each of their leases.
    pub fn expire(&mut self, now: Instant) -> Vec<EndedSession> {
        let mut ended = Vec::new();
        while let Some(session) = self.deadlines.pop(now) {
            ended.extend(self.end(session));
        }
        ended
    }

    /// Ends a session with a silent holder: its leases expire. Call [`prune`](Self::prune) for each.
    pub fn end(&mut self, session: u64) -> Option<EndedSession> {
        let entry = self.sessions.remove(&session)?;
        shrink(&mut self.sessions);
        self.deadlines.remove(session);
        let leases = entry.leases.into_iter();
        Some(EndedSession {
            session,
            peer: entry.peer,
            leases: leases.filter(|lease| self.lapse(*lease)).collect(),
        })
    }

    /// Ends a live lease whose holder may still have the memory mapped: it expires. Returns whether it was live.
    pub fn end_lease(&mut self, lease: u64) -> bool {
        let session = self.leases.get(&lease).map(|entry| entry.session);
        if let Some(entry) = session.and_then(|session| self.sessions.get_mut(&session)) {
            entry.remove(lease);
        }
        self.lapse(lease)
    }

    fn lapse(&mut self, lease: u64) -> bool {
        let Some(record) = self.leases.get_mut(&lease) else {
            return false;
        };
        if record.holder.state == HolderState::Expired {
            return false;
        }
        record.holder.state = HolderState::Expired;
        let holders = self.publications.entry(record.publication).or_default();
        holders.live.remove(&lease);
        holders.expired.push_back(lease);
        true
    }

    /// Returns when the next session ends.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadlines.first()
    }

    /// Returns the holders of a publication: live ones in the order of grants, then expired ones; and how
    /// many further expired ones there are.
    pub fn holders(&self, publication: u64) -> (Vec<Holder>, usize) {
        let Some(holders) = self.publications.get(&publication) else {
            return (Vec::new(), 0);
        };
        let found = |lease: &u64| Some(self.leases.get(lease)?.holder.clone());
        let in_order = |mut list: Vec<Holder>| {
            list.sort_by_key(|holder| (holder.since, holder.lease));
            list
        };
        let mut list = in_order(holders.live.iter().filter_map(found).collect());
        list.extend(in_order(holders.expired.iter().filter_map(found).collect()));
        (list, holders.more)
    }

    /// Returns whether a publication has holders, or may have them.
    pub fn is_held(&self, publication: u64) -> bool {
        self.publications.contains_key(&publication)
    }

    /// Forgets the oldest of too many expired leases of a publication, which is then only counted. Returns it.
    pub fn prune(&mut self, publication: u64) -> Option<LeaseRecord> {
        let holders = self.publications.get_mut(&publication)?;
        if holders.expired.len() <= MAX_EXPIRED {
            return None;
        }
        holders.more += 1;
        let oldest = holders.expired.pop_front()?;
        self.remove(oldest)
    }

    /// Returns the number of live leases of a publication.
    pub fn count(&self, publication: u64) -> usize {
        self.publications
            .get(&publication)
            .map_or(0, |holders| holders.live.len())
    }

    /// Returns the number of live leases.
    pub fn live(&self) -> usize {
        self.quota.used(What::Lease)
    }

    /// Returns the number of sessions.
    #[cfg(test)]
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    fn remove(&mut self, lease: u64) -> Option<LeaseRecord> {
        let record = *self.leases.remove(&lease)?;
        shrink(&mut self.leases);
        self.unfollow(record.holder.process.as_ref(), lease);
        if let Some(holders) = self.publications.get_mut(&record.publication) {
            holders.live.remove(&lease);
            holders.expired.retain(|expired| *expired != lease);
            if holders.expired.is_empty() {
                holders.expired = VecDeque::new();
            }
            if holders.live.is_empty() && holders.expired.is_empty() && holders.more == 0 {
                self.publications.remove(&record.publication);
                shrink(&mut self.publications);
            }
        }
        // An expired lease belongs to no session.
        if let Some(entry) = self.sessions.get_mut(&record.session) {
            entry.remove(lease);
        }
        Some(record)
    }
}

/// Leases of silent holders. The server follows their processes: after the end of a process, its memory is
/// no longer mapped.
impl Leases {
    /// Follows the leases of a session whose connection has ended.
    pub fn follow(&mut self, session: u64) {
        let leases: Vec<u64> = self.of_session(session, None).collect();
        leases.into_iter().for_each(|l| self.follow_lease(l));
    }

    /// Follows a lease with a silent holder, if its process is known.
    pub fn follow_lease(&mut self, lease: u64) {
        let process = self.find(lease).and_then(|l| l.holder.process.clone());
        let Some(process) = process else { return };
        self.followed.entry(process).or_default().insert(lease);
    }

    /// Stops following the leases of a session: it has a connection again.
    fn unfollow_session(&mut self, session: u64) {
        let leases: Vec<u64> = self.of_session(session, None).collect();
        for lease in leases {
            let process = self.find(lease).and_then(|l| l.holder.process.clone());
            self.unfollow(process.as_ref(), lease);
        }
    }

    /// Stops following a lease of this process.
    fn unfollow(&mut self, process: Option<&HolderProcess>, lease: u64) {
        let Some(process) = process else { return };
        if let Some(followed) = self.followed.get_mut(process) {
            followed.remove(&lease);
            if followed.is_empty() {
                self.followed.remove(process);
                shrink(&mut self.followed);
            }
        }
    }

    /// Returns the processes of followed leases: call [`ended`](Self::ended) for each that has ended.
    pub fn followed(&self) -> Vec<HolderProcess> {
        self.followed.keys().cloned().collect()
    }

    /// Ends the followed leases of a process that has ended; returns them. Leases of a session with a connection are not
    /// followed: another process has its socket, and may have the memory.
    pub fn ended(&mut self, process: &HolderProcess) -> Vec<LeaseRecord> {
        let leases = self.followed.remove(process).unwrap_or_default();
        leases.into_iter().filter_map(|l| self.remove(l)).collect()
    }
}

/// Times by number, in their order.
#[derive(Debug, Default)]
pub(super) struct Deadlines {
    times: HashMap<u64, Instant>,
    order: BTreeSet<(Instant, u64)>,
}

impl Deadlines {
    /// Sets the time of a number.
    pub fn set(&mut self, number: u64, time: Instant) {
        self.remove(number);
        self.times.insert(number, time);
        self.order.insert((time, number));
    }

    /// Removes the time of a number; returns whether it had one.
    pub fn remove(&mut self, number: u64) -> bool {
        let Some(time) = self.times.remove(&number) else {
            return false;
        };
        shrink(&mut self.times);
        self.order.remove(&(time, number))
    }

    pub fn get(&self, number: u64) -> Option<Instant> {
        self.times.get(&number).copied()
    }

    /// Returns the first time.
    pub fn first(&self) -> Option<Instant> {
        self.order.first().map(|&(time, _)| time)
    }

    /// Takes a number whose time has come.
    pub fn pop(&mut self, now: Instant) -> Option<u64> {
        let &(time, number) = self.order.first()?;
        (time <= now && self.remove(number)).then_some(number)
    }
}

#[cfg(test)]
mod tests;
