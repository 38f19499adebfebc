//! A server's state, under one lock that is never held across a wait.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::allocate::Refused;
use super::audit::{Audit, audit};
use super::leases::{Deadlines, LeaseRecord, Leases};
use super::publication::{Publication, Registered};
use super::quota::{Quota, What, shrink};
use super::session::{ServerSession, Sessions, with_token};
use crate::driver::Numbers;
pub(super) use crate::limits::millis;
use crate::protocol::{self, Closing, Ended, Event, Hello, Withdrawing};
use crate::{PeerList, PeerName, Refusal};

/// Why a connection ends whose peer has no room for another notice.
const TOO_MANY_ENDED: &str =
    "the limit of live and expired leases leaves no room for the notice of an ended one";

#[derive(Debug)]
pub(super) struct ServerState {
    /// Publications by name.
    pub names: BTreeMap<Arc<str>, u64>,
    /// Also those without a name, whose holders are still tracked.
    pub publications: HashMap<u64, Registered>,
    pub leases: Leases,
    pub sessions: Sessions,
    /// Leases that were recalled one by one, and when each ends.
    pub recalls: Deadlines,
    /// Requests that wait for a name to exist.
    waiters: HashMap<String, (Arc<Notify>, usize)>,
    /// The server is about to end: nothing new begins.
    pub closing: bool,
    pub audit: Arc<Audit>,
    last: u64,
    session_numbers: Numbers,
}

impl ServerState {
    /// Creates an empty state.
    pub fn new(audit: Arc<Audit>, quota: &Arc<Quota>) -> Self {
        Self {
            names: BTreeMap::new(),
            publications: HashMap::new(),
            leases: Leases::new(quota),
            sessions: Sessions::default(),
            recalls: Deadlines::default(),
            waiters: HashMap::new(),
            closing: false,
            audit,
            last: 0,
            session_numbers: Numbers::default(),
        }
    }

    /// Returns a number that was never used before, for a connection or a publication. Peers do not see it.
    pub fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Returns the number of a new session, which is part of its token.
    pub fn next_session(&self) -> u64 {
        self.session_numbers.next()
    }

    /// Returns the session that a hello names, and whose token it has.
    pub fn session_of(&self, hello: &Hello) -> Option<&Arc<ServerSession>> {
        with_token(&self.sessions, hello.resume.as_ref()?)
    }

    pub fn remove_session(&mut self, id: u64) {
        self.sessions.remove(&id);
        shrink(&mut self.sessions);
    }

    /// Returns the publication under a name, for a peer that may fetch it.
    pub fn find(&self, name: &str, peer: &PeerName) -> Option<&Registered> {
        let registered = self.publications.get(self.names.get(name)?)?;
        registered.peers.admits(peer).then_some(registered)
    }

    /// Returns the size in bytes of the memory under a name.
    pub fn bytes_of(&self, name: &str) -> Option<u64> {
        let found = self.publications.get(self.names.get(name)?)?;
        Some(found.publication.description.len)
    }

    /// As [`find`](Self::find), unless it is being withdrawn.
    pub fn visible(&self, name: &str, peer: &PeerName) -> Option<&Registered> {
        self.find(name, peer).filter(|found| !found.closing)
    }

    /// Returns the entry for a publication.
    pub fn entry(&self, publication: &Publication) -> protocol::Entry {
        protocol::Entry {
            name: publication.name.to_string(),
            memory: publication.description.clone(),
            leases: u32::try_from(self.leases.count(publication.id)).unwrap_or(u32::MAX),
            owner: publication.owner.clone(),
        }
    }

    /// Changes a publication's visibility, and wakes requests that wait for its name.
    pub fn change(&mut self, id: u64, change: impl FnOnce(&mut Registered)) {
        let Some(registered) = self.publications.get_mut(&id) else {
            return;
        };
        change(registered);
        if let Some((waiters, _)) = self.waiters.get(&*registered.publication.name) {
            waiters.notify_waiters();
        }
    }

    /// Tells the holder of a lease that the lease has ended.
    pub fn notify_ended(&self, lease: &LeaseRecord, reason: Refusal, detail: &str) {
        let Some(session) = self.sessions.get(&lease.session) else {
            return;
        };
        let lease = lease.holder.lease;
        let why = protocol::Refused {
            reason: reason.word().into(),
            detail: detail.into(),
        };
        match self.leases.quota.count(&session.peer, What::Record, 1) {
            Ok(counted) => session.notify(lease, Event::Ended(Ended { lease, why }), Some(counted)),
            // The client asks which of its leases have ended when it connects again.
            Err(_) => session.drop_connection(TOO_MANY_ENDED),
        }
    }

    /// Asks the holder of a lease to release it within this time.
    fn ask_back(&self, session: u64, lease: u64, within: Duration) {
        if let Some(record) = self.leases.get(session, lease) {
            self.audit_lease("withdrawing", record);
        }
        if let Some(session) = self.sessions.get(&session) {
            let ms = millis(within);
            session.notify(lease, Event::Withdrawing(Withdrawing { lease, ms }), None);
        }
    }

    /// Returns how long the holder of a lease has left to release it, if it is recalled.
    pub fn recalled(&self, lease: u64) -> Option<Duration> {
        let publication = self.leases.find(lease)?.publication;
        let until = match self.publications.get(&publication) {
            Some(registered) if registered.closing => registered.until,
            _ => Some(self.recalls.get(lease)?),
        };
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        Some(until.map_or(Duration::ZERO, left))
    }

    /// Recalls a publication from its holders: no new ones are admitted.
    pub fn withdraw(&mut self, id: u64, within: Duration) {
        let until = Instant::now().checked_add(within);
        self.change(id, |registered| {
            registered.closing = true;
            registered.until = until;
        });
        for (session, lease) in self.leases.withdraw(id) {
            self.ask_back(session, lease, within);
        }
    }

    /// Changes which peers may import a publication. Recalls the leases of peers that no longer may; they end
    /// after `within`, or at the time of an earlier recall.
    pub fn set_peers(&mut self, id: u64, peers: PeerList, within: Duration) {
        let now = Instant::now();
        if let Some(until) = now.checked_add(within) {
            for holder in self.leases.holders(id).0 {
                let lease = holder.lease;
                if peers.admits(&holder.peer) {
                    self.recalls.remove(lease);
                } else if let Some(session) = self.leases.recall(lease) {
                    let earlier = self.recalls.get(lease);
                    let until = earlier.map_or(until, |earlier| earlier.min(until));
                    self.recalls.set(lease, until);
                    self.ask_back(session, lease, until.saturating_duration_since(now));
                }
            }
        }
        self.change(id, |registered| registered.peers = peers);
    }

    /// Removes a publication and its name at once; its leases end.
    pub fn unpublish(&mut self, id: u64, detail: &str) {
        self.take_name(id);
        for lease in self.leases.forget(id) {
            self.recalls.remove(lease.holder.lease);
            self.audit_lease("revoked", &lease);
            self.notify_ended(&lease, Refusal::Closing, detail);
        }
        if let Some(registered) = self.publications.remove(&id) {
            shrink(&mut self.publications);
            registered.publication.holders.changed.notify_waiters();
        }
    }

    /// Removes a publication's name at once; its leases stay as they are. Returns whether it had its name.
    pub fn take_name(&mut self, id: u64) -> bool {
        let Some(registered) = self.publications.get_mut(&id) else {
            return false;
        };
        registered.counted = None;
        let name = Arc::clone(&registered.publication.name);
        let is_named = self.names.get(&name) == Some(&id);
        if is_named {
            self.change(id, |registered| {
                registered.closing = true;
                // Nobody sees it again, and nothing counts it.
                registered.peers = PeerList::nobody();
            });
            self.names.remove(&name);
        }
        is_named
    }

    /// Returns the name of a publication, also while only its holders are tracked.
    pub fn name_of(&self, id: u64) -> Option<&str> {
        let found = self.publications.get(&id)?;
        Some(&found.publication.name)
    }

    /// Writes an audit event of a lease: `released`, `expired`, `revoked`, or `withdrawing` if its holder is asked to
    /// release it.
    pub fn audit_lease(&self, event: &'static str, lease: &LeaseRecord) {
        let published = self.publications.get(&lease.publication);
        let published = published.map(|found| &found.publication);
        let name = published.map(|published| &*published.name);
        let bytes = published.map(|published| published.description.len);
        let (session, lease, peer) = (lease.session, lease.holder.lease, &lease.holder.peer);
        audit! { self.audit, Memory, Some(peer), event, session, lease, name, bytes }
    }

    /// Grants a lease of a publication, with a slot for a probe if one is wanted and there is room.
    pub fn grant(
        &mut self,
        session: &ServerSession,
        publication: &Publication,
        probe: bool,
        now: Instant,
    ) -> Result<(u64, Option<u64>), Refused> {
        let gone = || (Refusal::NotFound, "it has just been withdrawn".to_owned());
        let registered = self.publications.get_mut(&publication.id);
        let registered = registered.ok_or_else(gone)?;
        if registered.closing || self.closing {
            return Err((Refusal::Closing, String::new()));
        }
        if !registered.peers.admits(&session.peer) {
            return Err(gone());
        }
        let slot = if probe && publication.probe {
            registered.probes.take()
        } else {
            None
        };
        let granted = (self.leases).grant(session.id, publication.id, slot, now);
        if let (Err(_), Some(slot)) = (&granted, slot) {
            registered.probes.give_back(slot);
        }
        let lease = granted?;
        // Before a recall can be queued, which takes this lock.
        session.grants(lease);
        Ok((lease, slot))
    }

    /// Cleans up after leases that their holders have released.
    pub fn returned(&mut self, lease: &LeaseRecord) {
        self.recalls.remove(lease.holder.lease);
        // A notice about a live lease is counted with it.
        if let Some(session) = self.sessions.get(&lease.session) {
            session.forget(lease.holder.lease);
        }
        if let Some(registered) = self.publications.get_mut(&lease.publication) {
            if let Some(slot) = lease.probe {
                registered.probes.give_back(slot);
            }
            registered.publication.holders.changed.notify_waiters();
        }
    }

    /// Returns a [`Notify`] that a change of the name wakes; [`leave`](Self::leave) returns it.
    pub fn await_name(&mut self, name: &str) -> Arc<Notify> {
        let (notify, count) = self.waiters.entry(name.to_owned()).or_default();
        *count += 1;
        Arc::clone(notify)
    }

    /// Removes one waiter for a name.
    pub fn leave(&mut self, name: &str) {
        if let Some((_, count)) = self.waiters.get_mut(name) {
            *count -= 1;
            if *count == 0 {
                self.waiters.remove(name);
                shrink(&mut self.waiters);
            }
        }
    }

    /// Forgets sessions and leases when no connection is left; returns the sessions.
    pub fn clear(&mut self) -> Vec<Arc<ServerSession>> {
        let sessions = std::mem::take(&mut self.sessions);
        self.leases.clear();
        self.recalls = Deadlines::default();
        sessions.into_values().collect()
    }

    /// Tells all peers that the server ends.
    pub fn notify_closing(&self, closing: Closing) {
        for session in self.sessions.values() {
            session.notify_closing(closing);
        }
    }
}
