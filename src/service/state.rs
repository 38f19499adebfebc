//! What the service has: names, who owns them, and where their memory comes from and goes to.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::config::CreateConfig;
use super::hygiene::Past;
use super::named::{Named, let_go};
use super::quota::{Ledger, Over, Quota};
use super::reserve::{Chunk, Reserve};
use super::stock::HasBytes;
use crate::driver::{Access, NodeId};
use crate::exchange::directory::{Registration, RegistrationState};
use crate::exchange::protocol::{Create, check_name};
use crate::exchange::{PeerName, Server, Who};
use crate::share::{MAX_PARTS, Shared};
use crate::vmm::PhysicalMemory;
use crate::{Error, Refusal, Result};

/// A refusal, for programs and for people.
pub(super) type No = (Refusal, String);

#[derive(Debug)]
enum Entry {
    /// Its memory is being made.
    Making,
    There(Arc<Named>),
}

#[derive(Debug)]
struct Table {
    names: HashMap<String, Entry>,
    ledger: Ledger<PeerName>,
}

/// Counts of what was asked of the allocator.
#[derive(Debug, Default)]
pub(super) struct Asked {
    pub created: AtomicU64,
    pub deleted: AtomicU64,
    pub refused: AtomicU64,
}

#[derive(Debug)]
pub(super) struct State {
    pub nodes: BTreeMap<NodeId, Reserve<PeerName>>,
    /// Who may create what; changed by reloading.
    create: Mutex<Option<CreateConfig>>,
    table: Mutex<Table>,
    server: Mutex<Option<Server>>,
    /// Where names are made known.
    directory: Mutex<Option<Registration>>,
    pub asked: Asked,
    pub draining: AtomicBool,
    /// Reserves whose first filling has not ended, and one more until the names are published.
    pub unready: watch::Receiver<usize>,
    /// The most parts that one answer carries the handles of.
    most_parts: usize,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells a half-made creation that nobody waits for it any more.
#[derive(Debug, Default)]
pub(super) struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Memory to be published under a name.
pub(super) struct Wanted<'a> {
    pub name: &'a str,
    pub bytes: u64,
    pub node: NodeId,
    pub owner: Option<&'a PeerName>,
    pub who: Who,
    /// Whether peers other than the owner may fetch it.
    pub open: bool,
    pub access: Access,
    pub probe: bool,
}

impl State {
    pub fn new(
        nodes: BTreeMap<NodeId, Reserve<PeerName>>,
        create: Option<CreateConfig>,
        unready: watch::Receiver<usize>,
        most_parts: usize,
    ) -> Self {
        Self {
            nodes,
            table: Mutex::new(Table {
                names: HashMap::new(),
                ledger: Ledger::new(quota_of(create.as_ref())),
            }),
            create: Mutex::new(create),
            server: Mutex::default(),
            directory: Mutex::default(),
            asked: Asked::default(),
            draining: AtomicBool::new(false),
            unready,
            most_parts: most_parts.min(MAX_PARTS),
        }
    }

    pub fn set_server(&self, server: Server) {
        *lock(&self.server) = Some(server);
    }

    pub fn server(&self) -> Option<Server> {
        lock(&self.server).clone()
    }

    /// The server ends when whoever else has a handle of it drops that too.
    pub fn drop_server(&self) {
        let server = lock(&self.server).take();
        drop(server);
    }

    pub fn set_directory(&self, registration: Registration) {
        *lock(&self.directory) = Some(registration);
    }

    /// The registration, to end it.
    pub fn take_directory(&self) -> Option<Registration> {
        lock(&self.directory).take()
    }

    /// Whether the directory knows this service; `None` without a directory.
    pub fn is_registered(&self) -> Option<bool> {
        let directory = lock(&self.directory);
        let state = directory.as_ref().map(Registration::state);
        state.map(|state| matches!(state, RegistrationState::Registered))
    }

    /// Changes who may create what. What is there stays.
    pub fn set_create(&self, create: Option<CreateConfig>) {
        lock(&self.table)
            .ledger
            .set_quota(quota_of(create.as_ref()));
        *lock(&self.create) = create;
    }

    /// Changes who may fetch a name of the configuration.
    pub fn set_who(&self, name: &str, who: Who) {
        let named = match lock(&self.table).names.get(name) {
            Some(Entry::There(named)) if named.owner.is_none() => Arc::clone(named),
            _ => return,
        };
        let published = lock(&named.published).clone();
        if let Some(published) = published {
            published.set_who(who);
        }
    }

    /// Names, and the peers that created some.
    pub fn counts(&self) -> (usize, usize) {
        let table = lock(&self.table);
        (table.names.len(), table.ledger.peers())
    }

    /// All names that are there.
    pub fn all(&self) -> Vec<Arc<Named>> {
        let table = lock(&self.table);
        let there = table.names.values().filter_map(|entry| match entry {
            Entry::There(named) => Some(Arc::clone(named)),
            Entry::Making => None,
        });
        there.collect()
    }

    /// Makes memory that a peer asks for and publishes it. Blocks.
    pub fn create(&self, peer: &PeerName, ask: &Create, abandoned: &AtomicBool) -> Result<(), No> {
        let made = self.try_create(peer, ask, abandoned);
        let count = match &made {
            Ok(()) => &self.asked.created,
            Err((reason, detail)) => {
                tracing::info!(%peer, name = ask.name, %reason, detail, "creation refused");
                &self.asked.refused
            }
        };
        count.fetch_add(1, Relaxed);
        made
    }

    fn try_create(&self, peer: &PeerName, ask: &Create, abandoned: &AtomicBool) -> Result<(), No> {
        if self.draining.load(Relaxed) {
            return Err((Refusal::Closing, "the service is ending".into()));
        }
        let preferred = match &*lock(&self.create) {
            Some(create) if create.who.admits(peer) => create.node,
            _ => return Err((Refusal::Forbidden, "it may not create memory".into())),
        };
        let invalid = |error: Error| (Refusal::Invalid, error.to_string());
        check_name(&ask.name).map_err(invalid)?;
        let others = Who::list(&ask.peers).map_err(invalid)?;
        let node = ask.node.or(preferred).or_else(|| self.best_node());
        let reserve = node.and_then(|node| self.nodes.get(&node)).ok_or_else(|| {
            let nodes: Vec<_> = self.nodes.keys().map(NodeId::to_string).collect();
            let why = format!("there is no such node; there are {}", nodes.join(", "));
            (Refusal::Invalid, why)
        })?;
        let wanted = Wanted {
            name: &ask.name,
            bytes: ask.bytes,
            node: reserve.node(),
            owner: Some(peer),
            open: !ask.peers.is_empty(),
            who: others.and(peer.clone()),
            access: Access::ReadWrite,
            probe: true,
        };
        self.publish(&wanted, abandoned).map_err(refusal)
    }

    /// Where most is ready; with nothing ready, the first.
    fn best_node(&self) -> Option<NodeId> {
        let ready = |reserve: &Reserve<PeerName>| reserve.levels().warm;
        let best = self
            .nodes
            .iter()
            .rev()
            .max_by_key(|(_, reserve)| ready(reserve));
        best.map(|(node, _)| *node)
    }

    /// Makes memory and publishes it. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`] for a name that is taken and beyond the owner's quota; those of making
    /// memory and of publishing it. Nothing is left then.
    pub fn publish(&self, wanted: &Wanted<'_>, abandoned: &AtomicBool) -> Result<()> {
        let reserve = self
            .nodes
            .get(&wanted.node)
            .ok_or_else(|| Error::NoSuchNode {
                node: wanted.node,
                choices: self.nodes.keys().copied().collect(),
            })?;
        let padded = reserve.padded(wanted.bytes)?;
        let no = |reason, detail| Error::Refused {
            peer: "the service".into(),
            what: format!("to create {}", wanted.name),
            reason,
            detail,
        };
        {
            let mut table = lock(&self.table);
            if table.names.contains_key(wanted.name) {
                return Err(no(Refusal::Exists, String::new()));
            }
            if let Some(owner) = wanted.owner {
                let charged = table.ledger.charge(owner, padded);
                charged.map_err(|Over(why)| no(Refusal::Quota, why))?;
            }
            table.names.insert(wanted.name.to_owned(), Entry::Making);
        }
        let made = self.make(wanted, reserve, padded, abandoned);
        let mut table = lock(&self.table);
        match made {
            Ok(named) => {
                let entry = Entry::There(Arc::new(named));
                table.names.insert(wanted.name.to_owned(), entry);
                match &*lock(&self.directory) {
                    Some(directory) => directory.add(wanted.name),
                    None => Ok(()),
                }
            }
            Err(error) => {
                table.names.remove(wanted.name);
                if let Some(owner) = wanted.owner {
                    table.ledger.refund(owner, padded);
                }
                Err(error)
            }
        }
    }

    fn make(
        &self,
        wanted: &Wanted<'_>,
        reserve: &Reserve<PeerName>,
        padded: u64,
        abandoned: &AtomicBool,
    ) -> Result<Named> {
        let mut chunks = reserve.take(wanted.owner, wanted.bytes)?;
        // Probes need room behind the bytes, and where these fill all, there is none.
        let full = padded == wanted.bytes && chunks.len() < self.most_parts;
        let extra = (wanted.probe && full).then(|| reserve.extra()).flatten();
        let has_extra = extra.is_some();
        chunks.extend(extra);
        let pinned = chunks.iter().map(HasBytes::bytes).sum();
        let server = match (self.server(), abandoned.load(Relaxed)) {
            (Some(server), false) => server,
            _ => {
                give_back(reserve, chunks, has_extra);
                return Err(Error::PeerLost {
                    peer: "whoever asked for memory".into(),
                    why: "gone before it was made".into(),
                });
            }
        };
        let unseen: Vec<_> = chunks.iter().map(|chunk| chunk.past.clone()).collect();
        let memories = chunks.into_iter().map(|chunk| chunk.memory).collect();
        let shared = match Shared::from_physical(memories, wanted.bytes) {
            Ok(shared) => shared,
            Err(error) => {
                reserve.lost(pinned);
                return Err(error);
            }
        };
        let published = server
            .publish(wanted.name, shared.clone())
            .who(wanted.who.clone())
            .access(wanted.access)
            .probe(wanted.probe)
            .now();
        match published {
            Ok(published) => Ok(Named {
                name: wanted.name.to_owned(),
                owner: wanted.owner.cloned(),
                node: wanted.node,
                charged: padded,
                pinned,
                extra: has_extra,
                pasts: seen(unseen, wanted),
                published: Mutex::new(Some(Arc::new(published))),
                ending: AtomicBool::new(false),
                ended: watch::channel(false).0,
            }),
            Err(error) => {
                // Nobody has seen it.
                match shared.into_physical() {
                    Ok(memories) => give_back(reserve, chunks_of(memories, unseen), has_extra),
                    Err(shared) => {
                        drop(shared);
                        reserve.lost(pinned);
                    }
                }
                Err(error)
            }
        }
    }

    /// Ends a name of `peer`'s. When the time is over the name stays closed, and it goes on ending.
    pub async fn delete(
        self: &Arc<Self>,
        peer: &PeerName,
        name: &str,
        wait: Duration,
    ) -> Result<(), No> {
        let named = {
            let table = lock(&self.table);
            match table.names.get(name) {
                Some(Entry::There(named)) if named.owner.as_ref() == Some(peer) => {
                    Arc::clone(named)
                }
                // To whom a name is not shown it does not exist; whose it is not, is not told.
                _ => {
                    return Err((
                        Refusal::NotFound,
                        "this peer has created no such name".into(),
                    ));
                }
            }
        };
        if let Some(directory) = &*lock(&self.directory) {
            directory.remove(name);
        }
        self.end(&named, wait);
        let mut ended = named.ended.subscribe();
        let done = ended.wait_for(|ended| *ended);
        match tokio::time::timeout(wait.max(Duration::from_millis(100)), done).await {
            Ok(_) => {
                self.asked.deleted.fetch_add(1, Relaxed);
                Ok(())
            }
            Err(_) => Err((
                Refusal::TimedOut,
                format!("held by {}", named.holders().join(", ")),
            )),
        }
    }

    /// Begins to end a name, if that has not begun.
    fn end(self: &Arc<Self>, named: &Arc<Named>, wait: Duration) {
        if named.ending.swap(true, Relaxed) {
            return;
        }
        let (state, named) = (Arc::clone(self), Arc::clone(named));
        tokio::spawn(async move {
            let clean = named.withdraw(wait).await;
            state.take_back(&named, clean).await;
            named.ended.send_replace(true);
        });
    }

    /// What becomes of the memory of a name that has ended.
    async fn take_back(&self, named: &Arc<Named>, clean: bool) {
        let shared = lock(&named.published)
            .take()
            .map(|published| published.shared().clone());
        let mut pasts = named.pasts.clone();
        if !clean {
            pasts.iter_mut().for_each(Past::taint);
        }
        let memories = match shared {
            Some(shared) => let_go(shared).await,
            None => None,
        };
        if let Some(reserve) = self.nodes.get(&named.node) {
            match memories {
                Some(memories) => give_back(reserve, chunks_of(memories, pasts), named.extra),
                None => reserve.lost(named.pinned),
            }
        }
        let mut table = lock(&self.table);
        table.names.remove(&named.name);
        if let Some(owner) = &named.owner {
            table.ledger.refund(owner, named.charged);
        }
    }
}

/// Gives chunks back, of which the last was perhaps added for probes.
fn give_back(reserve: &Reserve<PeerName>, mut chunks: Vec<Chunk<PeerName>>, extra: bool) {
    if let Some(chunk) = chunks.pop_if(|_| extra) {
        reserve.discard_extra(chunk);
    }
    reserve.give_back(chunks);
}

/// The pasts of memory that is published now.
fn seen(mut pasts: Vec<Past<PeerName>>, wanted: &Wanted<'_>) -> Vec<Past<PeerName>> {
    for past in &mut pasts {
        match wanted.owner {
            // Anybody on the machine is `local`.
            Some(owner) => past.shown(owner, *owner != PeerName::Local),
            None => past.open_to_others(),
        }
        if wanted.open {
            past.open_to_others();
        }
    }
    pasts
}

fn chunks_of(memories: Vec<PhysicalMemory>, pasts: Vec<Past<PeerName>>) -> Vec<Chunk<PeerName>> {
    let pairs = memories.into_iter().zip(pasts);
    pairs.map(|(memory, past)| Chunk { memory, past }).collect()
}

fn quota_of(create: Option<&CreateConfig>) -> Quota {
    Quota {
        bytes: create.map_or(0, |create| create.peer_bytes),
        names: create.map_or(0, |create| create.peer_names),
    }
}

/// A failed creation as it is told to a peer.
fn refusal(error: Error) -> No {
    match error {
        Error::Refused { reason, detail, .. } => (reason, detail),
        Error::OutOfMemory { .. } | Error::NodeTooFull { .. } => {
            (Refusal::NoMemory, error.to_string())
        }
        Error::LimitReached { .. } => (Refusal::Limit, error.to_string()),
        Error::InvalidArgument { .. } => (Refusal::Invalid, error.to_string()),
        error => {
            tracing::warn!(%error, "creation failed");
            (Refusal::Internal, "see the service's log".into())
        }
    }
}
