//! Tracks which peers hold which memory: sessions, their leases, and when they end. The caller passes the
//! time; this module does no I/O.
//!
//! A session without a connection ends at a given time, and its leases with it. Such a holder may still have
//! the memory mapped (a stopped process cannot unmap), so it stays on the list of holders as
//! [`HolderState::Expired`] until it says that it has released it, or the publication is forgotten.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use super::deadlines::Deadlines;
use super::outcome::No;
use super::process::{Known, Process};
use crate::account::{Accounts, shrink};
use crate::numbers::Numbers;
use crate::{PeerName, Refusal};

/// The most expired holders of a publication that are remembered individually.
pub(super) const MAX_EXPIRED: usize = 1024;

/// The table of leases.
#[derive(Debug)]
pub(super) struct Leases {
    sessions: HashMap<u64, SessionRecord>,
    /// Live and expired ones. Boxed, so that the table has short entries: its capacity may be twice the number
    /// of leases, and three times that while it grows.
    leases: HashMap<u64, Box<LeaseRecord>>,
    publications: HashMap<u64, Holders>,
    /// Live leases of each peer.
    counts: Arc<Accounts>,
    /// Leases of silent holders, until their processes have ended.
    followed: HashMap<Process, Followed>,
    /// Followed processes that no task waits for yet.
    unwatched: HashSet<Process>,
    /// Publications with more expired leases than are to be remembered.
    crowded: BTreeSet<u64>,
    /// When sessions without a connection end.
    deadlines: Deadlines<Instant>,
    numbers: Numbers,
}

impl Leases {
    /// Creates an empty table for at most `limit` live leases of each peer.
    pub fn new(limit: usize) -> Self {
        Self::counted_by(Accounts::per_peer(limit, "leases of this peer"))
    }

    fn counted_by(counts: Arc<Accounts>) -> Self {
        Self {
            sessions: HashMap::new(),
            leases: HashMap::new(),
            publications: HashMap::new(),
            counts,
            followed: HashMap::new(),
            unwatched: HashSet::new(),
            crowded: BTreeSet::new(),
            deadlines: Deadlines::default(),
            numbers: Numbers::default(),
        }
    }

    /// Forgets all sessions and leases. The limits remain.
    pub fn clear(&mut self) {
        *self = Self::counted_by(Arc::clone(&self.counts));
    }

    /// Adds a session that has a connection.
    pub fn open(&mut self, session: u64, peer: PeerName) {
        let leases = BTreeSet::new();
        let new = SessionRecord { peer, leases };
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
    ) -> Result<u64, No> {
        let no_session = || (Refusal::Expired, "the session has ended".into());
        let entry = self.sessions.get_mut(&session).ok_or_else(no_session)?;
        let counted = self.counts.of(&entry.peer).charge(1)?;
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
            process: None,
            counted: Some(Arc::new(counted)),
            charge: None,
        };
        self.leases.insert(lease, Box::new(new));
        Ok(lease)
    }

    /// Changes a lease.
    pub fn change(&mut self, lease: u64, change: impl FnOnce(&mut LeaseRecord)) {
        if let Some(entry) = self.leases.get_mut(&lease) {
            change(entry);
        }
    }

    /// Sets the process that has the granted memory, as the kernel and the process itself name it.
    pub fn set_known(&mut self, lease: u64, known: &Known) {
        self.set_process(lease, known.process);
        self.change(lease, |lease| {
            lease.holder.process = Some(known.shown.clone());
        });
    }

    /// Sets the process that has the granted memory.
    pub fn set_process(&mut self, lease: u64, process: Process) {
        let Some(entry) = self.leases.get_mut(&lease) else {
            return;
        };
        let before = entry.process.replace(process);
        if before != Some(process) {
            self.unfollow(before, lease);
        }
    }

    /// Returns a live lease of the session.
    pub fn get(&self, session: u64, lease: u64) -> Option<&LeaseRecord> {
        let entry = self.leases.get(&lease)?;
        let lives = entry.session == session && entry.holder.state != HolderState::Expired;
        lives.then_some(&**entry)
    }

    /// Returns the live leases of the session.
    pub fn of_session(&self, session: u64) -> impl Iterator<Item = &LeaseRecord> {
        let leases = self.sessions.get(&session).map(|entry| &entry.leases);
        leases
            .into_iter()
            .flatten()
            .filter_map(|lease| self.leases.get(lease).map(|record| &**record))
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

    /// Ends the leases of the session that are not in `held`, which is sorted. Returns them, and those of
    /// `held` that are not its live leases.
    pub fn keep_only(&mut self, session: u64, held: &[u64]) -> (Vec<LeaseRecord>, Vec<u64>) {
        let none = BTreeSet::new();
        let entry = self.sessions.get(&session);
        let have = entry.map_or(&none, |entry| &entry.leases);
        let others = have.iter().filter(|l| held.binary_search(l).is_err());
        let others: Vec<u64> = others.copied().collect();
        let unknown = held.iter().filter(|l| !have.contains(l)).copied().collect();
        let dropped = others.into_iter().filter_map(|l| self.remove(l));
        (dropped.collect(), unknown)
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
        self.crowded.remove(&publication);
        let live = holders.live.into_iter();
        let live = live.filter_map(|l| self.remove(l)).collect();
        for lease in holders.expired {
            self.remove(lease);
        }
        live
    }

    /// Ends the sessions that have expired.
    pub fn expire(&mut self, now: Instant) -> Vec<EndedSession> {
        let mut ended = Vec::new();
        while let Some(session) = self.deadlines.pop(now) {
            ended.extend(self.end(session));
        }
        ended
    }

    /// Ends a session with a silent holder: its leases expire. Call [`thin_out`](Self::thin_out) afterwards.
    pub fn end(&mut self, session: u64) -> Option<EndedSession> {
        let entry = self.sessions.remove(&session)?;
        shrink(&mut self.sessions);
        self.deadlines.remove(session);
        let leases = entry.leases.into_iter();
        Some(EndedSession {
            session,
            peer: entry.peer,
            leases: leases.filter_map(|lease| self.lapse(lease)).collect(),
        })
    }

    /// Ends a live lease whose holder may still have the memory mapped: it expires.
    pub fn end_lease(&mut self, lease: u64) -> Option<LeaseRecord> {
        let session = self.leases.get(&lease)?.session;
        if let Some(entry) = self.sessions.get_mut(&session) {
            entry.leases.remove(&lease);
        }
        self.lapse(lease)
    }

    fn lapse(&mut self, lease: u64) -> Option<LeaseRecord> {
        let record = self.leases.get_mut(&lease)?;
        if record.holder.state == HolderState::Expired {
            return None;
        }
        record.holder.state = HolderState::Expired;
        record.counted = None;
        let record = LeaseRecord::clone(record);
        let publication = record.publication;
        let holders = self.publications.entry(publication).or_default();
        holders.live.remove(&lease);
        holders.expired.insert(lease);
        if holders.expired.len() > MAX_EXPIRED {
            self.crowded.insert(publication);
        }
        Some(record)
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
        let in_order = |leases: &BTreeSet<u64>| {
            let mut list: Vec<Holder> = leases.iter().filter_map(found).collect();
            list.sort_by_key(|holder| holder.since);
            list
        };
        let mut list = in_order(&holders.live);
        list.extend(in_order(&holders.expired));
        (list, holders.more)
    }

    /// Returns whether a publication has holders, or may have them.
    pub fn is_held(&self, publication: u64) -> bool {
        self.publications.contains_key(&publication)
    }

    /// Forgets the oldest of too many expired leases, which are then only counted. Returns them.
    pub fn thin_out(&mut self) -> Vec<LeaseRecord> {
        let mut forgotten = Vec::new();
        for publication in std::mem::take(&mut self.crowded) {
            let Some(holders) = self.publications.get_mut(&publication) else {
                continue;
            };
            let mut oldest: Vec<u64> = holders.expired.iter().copied().collect();
            oldest.sort_by_cached_key(|lease| self.leases.get(lease).map(|l| l.holder.since));
            oldest.truncate(oldest.len().saturating_sub(MAX_EXPIRED));
            holders.more += oldest.len();
            forgotten.extend(oldest.into_iter().filter_map(|lease| self.remove(lease)));
        }
        forgotten
    }

    /// Returns the number of live leases of a publication.
    pub fn count(&self, publication: u64) -> usize {
        self.publications
            .get(&publication)
            .map_or(0, |holders| holders.live.len())
    }

    /// Returns the number of live leases.
    pub fn live(&self) -> usize {
        self.counts.used()
    }

    /// Returns the number of sessions.
    #[cfg(test)]
    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    fn remove(&mut self, lease: u64) -> Option<LeaseRecord> {
        let mut record = *self.leases.remove(&lease)?;
        record.counted = None;
        shrink(&mut self.leases);
        self.unfollow(record.process, lease);
        if let Some(holders) = self.publications.get_mut(&record.publication) {
            holders.live.remove(&lease);
            holders.expired.remove(&lease);
            if holders.is_empty() {
                self.publications.remove(&record.publication);
                shrink(&mut self.publications);
            }
        }
        // An expired lease belongs to no session.
        if let Some(entry) = self.sessions.get_mut(&record.session) {
            entry.leases.remove(&lease);
        }
        Some(record)
    }
}

mod followed;
mod holder;
mod record;

use followed::Followed;
pub(super) use holder::describe;
pub use holder::{Holder, HolderState};
pub(super) use record::{EndedSession, LeaseRecord};
use record::{Holders, SessionRecord};

#[cfg(test)]
mod tests;
