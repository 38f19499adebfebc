//! What a server knows, under one lock that is never held while anything is waited for.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::audit::{Audit, LeaseOf};
use super::credentials::Credentials;
use super::leases::{Lease, Leases, NoLease};
use super::names::Names;
use super::publication::{Publication, Registered};
use super::recalls::Recalls;
use super::session::{Session, Sessions};
use super::tickets::Tickets;
use crate::Refusal;
use crate::exchange::PeerName;
use crate::exchange::account::{Charge, ENTRY, LEASE, Over, shrink};
use crate::exchange::protocol::{self, Ended, Event, Refused, Withdrawing};
use crate::exchange::tally::Tally;
use crate::numbers::Numbers;

/// A refusal: why, for programs and for people.
pub(super) type No = (Refusal, String);

/// The most prefixes that a session may watch.
const MAX_PREFIXES: usize = 64;

/// Who watches which prefixes.
#[derive(Debug)]
struct Watcher {
    session: Arc<Session>,
    prefixes: Vec<String>,
    charge: Charge,
}

/// A publication that is no more, of which it is asked who still has it mapped.
#[derive(Debug)]
pub(super) struct Doubted {
    /// The name that it had.
    pub name: Arc<str>,
    /// Woken when a holder has come off.
    pub changed: Arc<Notify>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Publications by name.
    pub names: Names<u64>,
    pub publications: HashMap<u64, Registered>,
    pub leases: Leases,
    pub sessions: Sessions,
    pub credentials: Credentials,
    pub recalls: Recalls,
    /// By lease.
    pub tickets: Tickets<Arc<Publication>>,
    /// Connections that have been greeted.
    pub connections: Tally,
    watchers: HashMap<u64, Watcher>,
    /// Who waits for a name to come.
    waiters: HashMap<String, (Arc<Notify>, usize)>,
    pub doubts: HashMap<u64, Doubted>,
    /// The server is about to end: nothing new begins.
    pub closing: bool,
    pub audit: Arc<Audit>,
    last: u64,
    session_numbers: Numbers,
}

impl State {
    /// Nothing yet.
    pub fn new(audit: Arc<Audit>) -> Self {
        Self {
            audit,
            ..Self::default()
        }
    }

    /// A number that was never used before, for a connection or a publication. Peers are not told it.
    pub fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The number of a new session, which is part of its token.
    pub fn next_session(&self) -> u64 {
        self.session_numbers.next()
    }

    /// What is under a name, for a peer that may fetch it.
    pub fn find(&self, name: &str, peer: &PeerName) -> Option<&Registered> {
        let registered = self.publications.get(self.names.get(name)?)?;
        registered.who.admits(peer).then_some(registered)
    }

    /// The same, unless it is being withdrawn.
    pub fn visible(&self, name: &str, peer: &PeerName) -> Option<&Registered> {
        self.find(name, peer).filter(|found| !found.closing)
    }

    /// The entry for a publication.
    pub fn entry(&self, publication: &Publication) -> protocol::Entry {
        protocol::Entry {
            name: publication.name.to_string(),
            memory: publication.description.clone(),
            leases: u32::try_from(self.leases.count(publication.id)).unwrap_or(u32::MAX),
            owner: publication.owner.clone(),
        }
    }

    /// Changes something about a publication's visibility, and tells watchers and waiters of it.
    pub fn change(&mut self, id: u64, change: impl FnOnce(&mut Registered)) {
        let limit = self.news_limit();
        let Some(registered) = self.publications.get_mut(&id) else {
            return;
        };
        let seen = |registered: &Registered, peer: &PeerName| {
            !registered.closing && registered.who.admits(peer)
        };
        let name = Arc::clone(&registered.publication.name);
        let watchers = self.watchers.values().filter(|watcher| {
            let mut prefixes = watcher.prefixes.iter();
            prefixes.any(|prefix| name.starts_with(prefix.as_str()))
        });
        let before: Vec<_> = watchers
            .map(|watcher| {
                let session = &watcher.session;
                (session, seen(registered, &session.peer))
            })
            .collect();
        change(registered);
        for (session, before) in before {
            if before || seen(registered, &session.peer) {
                session.news_of(&name, before, limit);
            }
        }
        if let Some((waiters, _)) = self.waiters.get(&*name) {
            waiters.notify_waiters();
        }
    }

    /// How many names may wait to be told to a watcher: all there are, and as many that are gone.
    fn news_limit(&self) -> usize {
        2 * self.names.len() + 1024
    }

    /// Asks a publication's holders for it: none may come any more.
    pub fn withdraw(&mut self, id: u64, within: Duration) {
        let until = Instant::now().checked_add(within);
        self.change(id, |registered| {
            registered.closing = true;
            registered.until = until;
        });
        let ms = millis(within);
        for (session, lease) in self.leases.withdraw(id) {
            if let Some(session) = self.sessions.get(session) {
                let found = self.publications.get(&id).map(|found| &found.publication);
                let of = LeaseOf::new(lease, found.map(|found| &**found));
                self.audit
                    .lease("withdrawing", session.id, &session.peer, of);
                session.tell(Event::Withdrawing(Withdrawing { lease, ms }));
            }
        }
    }

    /// Takes a name away at once; its leases end.
    pub fn unpublish(&mut self, id: u64, detail: &str) -> Option<Arc<Publication>> {
        let publication = self.take_away(id)?;
        let bytes = Some(publication.description.len);
        self.end_leases(id, &publication.name, bytes, detail);
        publication.changed.notify_waiters();
        Some(publication)
    }

    /// The same, but its leases stay as they are.
    pub fn take_away(&mut self, id: u64) -> Option<Arc<Publication>> {
        self.change(id, |registered| registered.closing = true);
        let publication = self.publications.remove(&id)?.publication;
        shrink(&mut self.publications);
        self.names.remove(&publication.name, |&held| held == id);
        Some(publication)
    }

    /// The name that a publication had, while it is asked about.
    pub fn doubted_name(&self, id: u64) -> String {
        let doubted = self.doubts.get(&id);
        doubted
            .map(|doubted| doubted.name.to_string())
            .unwrap_or_default()
    }

    /// Ends the leases of a publication that is no more, and tells their holders.
    pub fn end_leases(&mut self, id: u64, name: &str, bytes: Option<u64>, detail: &str) {
        for lease in self.leases.forget(id) {
            self.tickets.forget(lease.holder.lease);
            self.recalls.remove(lease.holder.lease);
            let of = LeaseOf {
                lease: lease.holder.lease,
                name: Some(name),
                bytes,
            };
            self.audit
                .lease("revoked", lease.session, &lease.holder.peer, of);
            if let Some(session) = self.sessions.get(lease.session) {
                let why = Refused {
                    reason: Refusal::Closing.word().into(),
                    detail: detail.into(),
                };
                let lease = lease.holder.lease;
                session.tell(Event::Ended(Ended { lease, why }));
            }
        }
    }

    /// A lease of a publication, with a place for a probe where one is wanted and there is room.
    pub fn grant(
        &mut self,
        session: &Session,
        publication: &Publication,
        probe: bool,
        now: Instant,
        limit: usize,
    ) -> Result<(u64, Option<u64>), No> {
        let gone = || (Refusal::NotFound, "it has just been withdrawn".to_owned());
        let registered = self.publications.get_mut(&publication.id);
        let registered = registered.ok_or_else(gone)?;
        if registered.closing || self.closing {
            return Err((Refusal::Closing, String::new()));
        }
        if !registered.who.admits(&session.peer) {
            return Err(gone());
        }
        let charge = session.account().charge(LEASE).map_err(over)?;
        let place = match probe && publication.probe {
            true => registered.places.take(),
            false => None,
        };
        match (self.leases).grant(session.id, publication.id, place, now, limit) {
            Ok(lease) => {
                self.leases.set_charge(lease, charge);
                Ok((lease, place))
            }
            Err(why) => {
                if let Some(place) = place {
                    registered.places.give_back(place);
                }
                Err(match why {
                    NoLease::NoSession => (Refusal::Expired, "the session has ended".into()),
                    NoLease::Full => (Refusal::Limit, format!("{limit} leases of this peer")),
                })
            }
        }
    }

    /// Cleans up after leases that their holders have given back.
    pub fn returned(&mut self, lease: &Lease) {
        self.tickets.forget(lease.holder.lease);
        self.recalls.remove(lease.holder.lease);
        if let Some(doubted) = self.doubts.get(&lease.publication) {
            doubted.changed.notify_one();
        }
        if let Some(registered) = self.publications.get_mut(&lease.publication) {
            if let Some(place) = lease.probe {
                registered.places.give_back(place);
            }
            registered.publication.changed.notify_waiters();
        }
    }

    /// The session wants to hear of names with this prefix, on its connection of now.
    pub fn watch(&mut self, session: &Arc<Session>, prefix: &str) -> Result<(), No> {
        let watcher = match self.watchers.entry(session.id) {
            Entry::Occupied(watcher) => watcher.into_mut(),
            Entry::Vacant(none) => none.insert(Watcher {
                session: Arc::clone(session),
                prefixes: Vec::new(),
                charge: session.account().charge(ENTRY).map_err(over)?,
            }),
        };
        if watcher
            .prefixes
            .iter()
            .any(|p| prefix.starts_with(p.as_str()))
        {
            return Ok(());
        }
        watcher.prefixes.retain(|p| !p.starts_with(prefix));
        if watcher.prefixes.len() >= MAX_PREFIXES {
            return Err((Refusal::Limit, format!("{MAX_PREFIXES} watched prefixes")));
        }
        let prefixes = watcher.prefixes.iter().map(String::len);
        let bytes: usize = prefixes.map(|len| ENTRY + len).sum();
        let bytes = bytes + 2 * ENTRY + prefix.len();
        watcher.charge.resize(bytes).map_err(over)?;
        watcher.prefixes.push(prefix.to_owned());
        Ok(())
    }

    /// The session does not watch any more.
    pub fn unwatch(&mut self, session: u64) {
        self.watchers.remove(&session);
        shrink(&mut self.watchers);
    }

    /// A session is no more.
    pub fn forget_session(&mut self, session: u64) {
        self.sessions.remove(session);
        self.credentials.remove(session);
        self.unwatch(session);
    }

    /// What is woken when something changes about a name; [`leave`](Self::leave) gives it back.
    pub fn await_name(&mut self, name: &str) -> Arc<Notify> {
        let (notify, count) = self.waiters.entry(name.to_owned()).or_default();
        *count += 1;
        Arc::clone(notify)
    }

    /// One who waits for a name less.
    pub fn leave(&mut self, name: &str) {
        if let Some((_, count)) = self.waiters.get_mut(name) {
            *count -= 1;
            if *count == 0 {
                self.waiters.remove(name);
                shrink(&mut self.waiters);
            }
        }
    }

    /// Forgets sessions, leases and tickets: no connection is left. Tells which sessions there were.
    pub fn clear(&mut self) -> Vec<Arc<Session>> {
        let sessions = std::mem::take(&mut self.sessions);
        self.watchers.clear();
        self.leases = Leases::default();
        self.credentials = Credentials::default();
        self.recalls = Recalls::default();
        self.tickets = Tickets::default();
        sessions.iter().cloned().collect()
    }

    /// Tells all sessions.
    pub fn tell_all(&self, notice: &Event) {
        for session in self.sessions.iter() {
            session.tell(notice.clone());
        }
    }
}

/// The refusal of what would be kept beyond a limit.
pub(super) fn over(over: Over) -> No {
    (Refusal::Limit, over.to_string())
}

/// Whole milliseconds, at most what fits.
pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
