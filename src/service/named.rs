//! A published name: its holders, and how it ends.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

use super::quota::Charge;
use super::reuse_policy::Past;
use crate::driver::NodeId;
use crate::exchange::PeerName;
use crate::exchange::server::{Holder, HolderState, Published};
use crate::per_driver::lock;
use crate::share::Shared;
use crate::vmm::PhysicalMemory;
use crate::{Error, MemoryError, ShareError};

/// How often to ask the holders of an ending name again.
const ASK_AGAIN: Duration = Duration::from_secs(30);
/// How long the exchange may keep memory that no peer holds.
const LET_GO: Duration = Duration::from_secs(5);

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
    /// Whether its last chunk was added for probes.
    pub extra: bool,
    pub pasts: Vec<Past<PeerName>>,
    /// Taken out when the name ends.
    pub published: Mutex<Option<Arc<Published>>>,
    /// Whether it is ending.
    pub ending: AtomicBool,
    pub ended: watch::Sender<bool>,
}

impl Named {
    /// Returns whether this peer may see the name.
    pub fn is_shown_to(&self, peer: &PeerName) -> bool {
        let published = lock(&self.published).clone();
        published.is_some_and(|published| published.is_shown_to(peer))
    }

    /// Waits until no peer holds it. Returns `false` if a silent holder may still have it mapped.
    pub async fn withdraw(&self, mut wait: Duration) -> bool {
        let Some(published) = lock(&self.published).clone() else {
            return false;
        };
        loop {
            match published.vacate(wait).await {
                // Memory of a process that died is not reused.
                Ok(()) => return !published.left_by_dead(),
                Err(Error::Share(ShareError::Memory(MemoryError::StillHeld { .. }))) => {
                    let silent = |state| state == HolderState::Expired;
                    if published
                        .importers()
                        .iter()
                        .all(|holder| silent(holder.state))
                    {
                        tracing::warn!(
                            name = self.name,
                            "a silent holder may still have it mapped"
                        );
                        return false;
                    }
                    wait = ASK_AGAIN;
                }
                Err(error) => {
                    tracing::warn!(name = self.name, %error, "cannot withdraw");
                    return false;
                }
            }
        }
    }

    /// Asks the holders to release the name in time; describes those that did not. Does not wait for holders
    /// that had fallen silent before, but logs them.
    pub async fn vacate(&self, within: Duration) -> Vec<String> {
        let Some(published) = lock(&self.published).clone() else {
            return Vec::new();
        };
        let silent = |holder: &Holder| holder.state == HolderState::Expired;
        let importers = published.importers();
        let before: Vec<_> = importers
            .iter()
            .filter(|h| silent(h))
            .map(|h| h.lease)
            .collect();
        if published.vacate(within).await.is_ok() {
            return Vec::new();
        }
        let mut still = Vec::new();
        for holder in published.importers() {
            let name = &self.name;
            if before.contains(&holder.lease) {
                tracing::warn!(name, %holder, "a holder that fell silent may still have it mapped");
                continue;
            }
            let how = match silent(&holder) {
                true => ": silent, it may still have it mapped",
                false => "",
            };
            still.push(format!("{holder} ('{name}'{how})"));
        }
        still
    }

    /// Describes the holders.
    pub fn holders(&self) -> Vec<String> {
        let published = lock(&self.published).clone();
        let importers = published.map(|published| published.importers());
        let mut holders: Vec<_> = importers
            .unwrap_or_default()
            .iter()
            .map(Holder::to_string)
            .collect();
        holders.dedup();
        holders.truncate(16);
        holders
    }
}

/// Returns the memory once the exchange has dropped it; gives up after a while.
///
/// # Errors
/// `shared`, if other code still uses it.
pub(super) async fn let_go(mut shared: Shared) -> Result<Vec<PhysicalMemory>, Shared> {
    let until = tokio::time::Instant::now() + LET_GO;
    loop {
        match shared.into_physical() {
            Ok(memories) => return Ok(memories),
            Err(still) if tokio::time::Instant::now() >= until => return Err(still),
            Err(still) => shared = still,
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
