//! A server's state, under one lock that is never held across a wait.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::audit::Audit;
use super::leases::{Deadlines, Followed, LeaseRecord, SessionRecord};
use super::publication::Registered;
use super::quota::{Quota, shrink};
use super::session::ServerSession;
use crate::driver::Numbers;
use crate::limits::LONGEST;
use crate::protocol::Hello;
use crate::{PeerList, PeerName};

#[derive(Debug)]
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
    /// How many leases have expired.
    pub expired: u64,
    /// How many connections have ended because their peers had no room for a notice.
    pub dropped: u64,
    /// Woken when more peers may see a name: by the name's hash, so that few look in vain.
    changes: [Arc<Notify>; 256],
    hasher: RandomState,
    /// The server is about to end: nothing new begins.
    pub closing: bool,
    pub audit: Arc<Audit>,
    pub quota: Arc<Quota>,
    last: u64,
    /// Those of new leases, and of sessions, which are part of their tokens.
    pub numbers: Numbers,
}

impl ServerState {
    /// Creates an empty state.
    pub fn new(audit: Arc<Audit>, quota: Arc<Quota>) -> Self {
        Self {
            names: BTreeMap::new(),
            publications: HashMap::new(),
            sessions: HashMap::new(),
            leases: HashMap::new(),
            followed: Followed::new(),
            deadlines: Deadlines::default(),
            expired: 0,
            dropped: 0,
            changes: std::array::from_fn(|_| Arc::default()),
            hasher: RandomState::new(),
            closing: false,
            audit,
            quota,
            last: 0,
            numbers: Numbers::default(),
        }
    }

    /// Returns a number that was never used before, for a publication. Peers do not see it.
    pub fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

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

    /// Returns what wakes requests that wait for a name when more peers may see it, and sometimes for nothing.
    pub fn changes_of(&self, name: &str) -> &Arc<Notify> {
        let hash = self.hasher.hash_one(name) as usize;
        &self.changes[hash % self.changes.len()]
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
            let name = Arc::clone(&registered.publication.name);
            self.changes_of(&name).notify_waiters();
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
