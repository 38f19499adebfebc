//! The service's state: names, their owners, and the reserves behind their memory.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::sync::watch;

use super::config::{CreateConfig, FORGIVE_AFTER};
use super::lines::{AuditFile, LineWriter};
use super::quota::{Charge, Ledger, Quota, Turns};
use super::reserve::Reserve;
use super::reuse_policy::Past;
use crate::driver::{Access, NodeId};
use crate::exchange::directory::Registration;
use crate::exchange::server::Published;
use crate::exchange::{PeerList, PeerName, Server};
use crate::per_driver::lock;
use crate::{Error, Refusal, Result};

/// A refusal, as a code and as a message.
pub(super) type Refused = (Refusal, String);

/// Memory to be published under a name.
#[derive(Debug)]
pub(super) struct Wanted {
    pub name: String,
    pub bytes: u64,
    pub node: NodeId,
    /// The peer that asks for it; `None` for the configuration's own.
    pub owner: Option<PeerName>,
    pub peers: PeerList,
    /// Whether peers other than the owner may fetch it. Always, without an owner.
    pub open: bool,
    pub access: Access,
    pub probe: bool,
}

/// A name, from the claim to it until it has ended.
#[derive(Debug)]
pub(super) struct Named {
    pub wanted: Wanted,
    pub phase: watch::Sender<Phase>,
    /// Filled when it is published, and taken out when it ends.
    pub held: Mutex<Option<Held>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Its memory is being created.
    Making,
    There,
    Ending,
    Ended,
}

/// The memory of a published name.
#[derive(Debug)]
pub(super) struct Held {
    pub published: Arc<Published>,
    /// All its memory.
    pub pinned: u64,
    pub pasts: Vec<Past>,
    /// The charge of its owner, if that is a peer.
    pub charge: Option<Charge>,
}

impl Named {
    pub fn new(wanted: Wanted) -> Self {
        Self {
            wanted,
            phase: watch::Sender::new(Phase::Making),
            held: Mutex::default(),
        }
    }

    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Waits until it is in this phase or a later one.
    pub async fn reach(&self, phase: Phase) {
        let mut phases = self.phase.subscribe();
        // `self` has the sender: the wait cannot fail.
        let _ = phases.wait_for(|now| *now >= phase).await;
    }

    pub fn published(&self) -> Option<Arc<Published>> {
        let held = lock(&self.held);
        held.as_ref().map(|held| Arc::clone(&held.published))
    }
}

#[derive(Debug, Default)]
pub(super) struct ServiceState {
    pub nodes: BTreeMap<NodeId, Reserve>,
    /// The rights of peers to create memory; changed by a reload.
    pub create: Mutex<Option<CreateConfig>>,
    /// The names that exist or are being created.
    pub names: Mutex<HashMap<String, Arc<Named>>>,
    /// The configuration's names, which no peer can create, even before the service has published them.
    pub configured: HashSet<String>,
    /// Each peer's charges.
    pub ledger: Ledger,
    /// Which creations run.
    pub creations: Turns,
    pub server: Mutex<Option<Server>>,
    /// The registration of its names in the directory.
    pub directory: Mutex<Option<Registration>>,
    /// Counts of requests for memory.
    pub created: AtomicU64,
    pub deleted: AtomicU64,
    pub refused: AtomicU64,
    /// Bytes of unconfirmed releases that no longer count after too long a silence.
    pub forgiven_bytes: AtomicU64,
    /// Where audit events go; without it, to the log.
    pub audit: Option<AuditFile>,
    /// The process's log, whose lost lines are counted.
    pub log: OnceLock<LineWriter>,
    pub draining: AtomicBool,
    /// Reserves whose first filling has not ended, plus one until the names are published.
    pub unready: Arc<watch::Sender<usize>>,
}

impl ServiceState {
    pub fn server(&self) -> Option<Server> {
        lock(&self.server).clone()
    }

    /// Changes the rights of peers to create memory. Existing names stay.
    pub fn set_create(&self, create: Option<CreateConfig>) {
        let quota = create.as_ref().map(|create| Quota {
            bytes: create.peer_bytes,
            names: create.peer_names,
        });
        self.ledger.set_quota(quota.unwrap_or_default());
        *lock(&self.create) = create;
    }

    /// Returns how long the memory of an unconfirmed release counts.
    pub fn forgive_after(&self) -> Duration {
        let create = lock(&self.create);
        let set = create.as_ref().map(|create| create.forgive_after);
        set.unwrap_or(Duration::from_secs(FORGIVE_AFTER))
    }

    /// Frees a name that has ended, or could not be created: another peer may create it from then on.
    pub fn free_name(&self, named: &Arc<Named>) {
        let mut names = lock(&self.names);
        let name = &named.wanted.name;
        if names.get(name).is_some_and(|now| Arc::ptr_eq(now, named)) {
            names.remove(name);
        }
        drop(names);
        named.phase.send_replace(Phase::Ended);
    }

    /// Forgets all names and gives their memory back, once the server has closed. Tasks that still end names hold them, so
    /// that memory would otherwise live as long as the last of them. A creation that is still in progress fails.
    ///
    /// Returns the names of which a task is giving the memory back.
    pub fn forget_names(&self) -> Vec<Arc<Named>> {
        let forgotten = std::mem::take(&mut *lock(&self.names));
        let is_being_given_back = |named: &Arc<Named>| {
            let held = lock(&named.held).take();
            // Outside the locks: the driver may take seconds for many gigabytes.
            held.is_none() && named.phase() == Phase::Ending
        };
        forgotten
            .into_values()
            .filter(is_being_given_back)
            .collect()
    }
}

/// Runs blocking code outside the runtime.
pub(super) async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(Error::failed(what, error.to_string())))
}
