//! The service's state: names, their owners, and the reserves behind their memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::sync::watch;

use super::config::{CreateConfig, defaults};
use super::lines::{AuditFile, LineWriter};
use super::quota::{Charge, Ledger, Quota, Turns};
use super::reserve::Reserve;
use super::reuse_policy::Past;
use crate::Refusal;
use crate::driver::NodeId;
use crate::exchange::directory::Registration;
use crate::exchange::server::Published;
use crate::exchange::{PeerList, PeerName, Server};
use crate::per_driver::lock;

/// A refusal, as a code and as a message.
pub(super) type Refused = (Refusal, String);

/// A published name.
#[derive(Debug)]
pub(super) struct Named {
    pub name: String,
    /// The peer that created it; `None` for the configuration's own.
    pub owner: Option<PeerName>,
    pub node: NodeId,
    /// The charge of its owner. Taken out when the name ends.
    pub charge: Mutex<Option<Charge>>,
    /// All its memory.
    pub pinned: u64,
    pub pasts: Vec<Past>,
    /// Taken out when the name ends.
    pub published: Mutex<Option<Arc<Published>>>,
    /// Whether it is ending.
    pub ending: AtomicBool,
    pub ended: watch::Sender<bool>,
}

#[derive(Debug)]
pub(super) enum NameState {
    /// Its memory is being created, for this owner.
    Making(Option<PeerName>),
    There(Arc<Named>),
}

#[derive(Debug)]
pub(super) struct Table {
    pub names: HashMap<String, NameState>,
    /// The configuration's names, which no peer can create, even before the service has published them.
    pub configured: HashSet<String>,
    /// Set once the published names are forgotten: no name is inserted afterwards.
    pub closed: bool,
}

/// Counts of requests to the allocator.
#[derive(Debug, Default)]
pub(super) struct Asked {
    pub created: AtomicU64,
    pub deleted: AtomicU64,
    pub refused: AtomicU64,
    /// Bytes of unconfirmed releases that no longer count after too long a silence.
    pub forgiven_bytes: AtomicU64,
}

#[derive(Debug)]
pub(super) struct ServiceState {
    pub nodes: BTreeMap<NodeId, Reserve>,
    /// The rights of peers to create memory; changed by a reload.
    pub create: Mutex<Option<CreateConfig>>,
    pub table: Mutex<Table>,
    /// Each peer's charges.
    pub ledger: Ledger,
    /// Which creations run.
    pub creations: Turns,
    /// Changes when a creation has succeeded or failed.
    pub made: watch::Sender<()>,
    pub server: Mutex<Option<Server>>,
    /// The registration of its names in the directory.
    pub directory: Mutex<Option<Registration>>,
    pub asked: Asked,
    /// Where audit events go; without it, to the log.
    pub audit: Option<AuditFile>,
    /// The process's log, whose lost lines are counted.
    pub log: OnceLock<LineWriter>,
    pub draining: AtomicBool,
    /// Reserves whose first filling has not ended, plus one until the names are published.
    pub unready: watch::Receiver<usize>,
}

impl ServiceState {
    pub fn new(
        nodes: BTreeMap<NodeId, Reserve>,
        create: Option<CreateConfig>,
        configured: HashSet<String>,
        unready: watch::Receiver<usize>,
        audit: Option<AuditFile>,
    ) -> Self {
        Self {
            nodes,
            table: Mutex::new(Table {
                names: HashMap::new(),
                configured,
                closed: false,
            }),
            ledger: Ledger::new(quota_of(create.as_ref())),
            create: Mutex::new(create),
            creations: Turns::default(),
            made: watch::channel(()).0,
            server: Mutex::default(),
            directory: Mutex::default(),
            asked: Asked::default(),
            audit,
            log: OnceLock::new(),
            draining: AtomicBool::new(false),
            unready,
        }
    }

    pub fn server(&self) -> Option<Server> {
        lock(&self.server).clone()
    }

    /// Returns whether the directory has this service; `None` without a directory.
    pub fn is_registered(&self) -> Option<bool> {
        lock(&self.directory)
            .as_ref()
            .map(Registration::is_registered)
    }

    /// Changes the rights of peers to create memory. Existing names stay.
    pub fn set_create(&self, create: Option<CreateConfig>) {
        self.ledger.set_quota(quota_of(create.as_ref()));
        *lock(&self.create) = create;
    }

    /// Returns how long the memory of an unconfirmed release counts.
    pub fn forgive_after(&self) -> Duration {
        let create = lock(&self.create);
        let set = create.as_ref().map(|create| create.forgive_after);
        set.unwrap_or_else(defaults::forgive_after)
    }

    /// Changes which peers may fetch a name of the configuration.
    pub fn set_who(&self, name: &str, who: PeerList) {
        let named = match lock(&self.table).names.get(name) {
            Some(NameState::There(named)) if named.owner.is_none() => Arc::clone(named),
            _ => return,
        };
        let published = lock(&named.published).clone();
        if let Some(published) = published {
            published.set_who(who);
        }
    }

    /// Returns all published names, and how many are still being created.
    pub fn all(&self) -> (Vec<Arc<Named>>, usize) {
        let table = lock(&self.table);
        let there = table.names.values().filter_map(|entry| match entry {
            NameState::There(named) => Some(Arc::clone(named)),
            NameState::Making(_) => None,
        });
        let there: Vec<_> = there.collect();
        let making = table.names.len() - there.len();
        (there, making)
    }

    /// Forgets all published names and gives their memory back, once the server has closed. Tasks that still end
    /// names hold this state, so that memory would otherwise live as long as the last of them. A creation that
    /// is still in progress fails.
    pub fn forget_published(&self) {
        let there = |_: &String, entry: &mut NameState| matches!(entry, NameState::There(_));
        let mut table = lock(&self.table);
        table.closed = true;
        let forgotten: Vec<_> = table.names.extract_if(there).collect();
        drop(table);
        // Outside the lock: the driver may take seconds for many gigabytes.
        drop(forgotten);
    }
}

fn quota_of(create: Option<&CreateConfig>) -> Quota {
    Quota {
        bytes: create.map_or(0, |create| create.peer_bytes),
        names: create.map_or(0, |create| create.peer_names),
    }
}
