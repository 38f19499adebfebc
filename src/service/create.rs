//! Creates memory and publishes it under a name.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

use super::quota::Charge;
use super::reserve::{Reserve, total};
use super::state::{NameState, Named, Refused, ServiceState};
use super::teardown::{Taken, chunks_of};
use crate::driver::{Access, NodeId};
use crate::exchange::protocol::{Create, check_name};
use crate::exchange::server::{Allocate, Allocation};
use crate::exchange::{Owner, PeerList, PeerName, Server};
use crate::per_driver::lock;
use crate::reuse_policy::{Discard, Past};
use crate::share::Shared;
use crate::size::Bytes;
use crate::{Error, MemoryError, Refusal, Result, ShareError};

/// The refusal of requests that come too late.
const ENDING: &str = "the service is ending";
/// How often a creation that waits for memory checks whether its client still waits.
const LOOK: Duration = Duration::from_millis(100);

/// Memory to be published under a name.
pub(super) struct Wanted {
    pub name: String,
    pub bytes: u64,
    pub node: NodeId,
    pub owner: Option<PeerName>,
    pub peers: PeerList,
    /// Whether peers other than the owner may fetch it.
    pub open: bool,
    pub access: Access,
    pub probe: bool,
}

impl Wanted {
    /// Returns the refusal of the request.
    fn refused(&self, reason: Refusal, detail: &str) -> Error {
        Error::Refused {
            peer: "the service".into(),
            what: format!("to create {}", self.name),
            reason,
            detail: detail.into(),
        }
    }

    /// Updates the history of memory that is published now.
    fn note_peers(&self, past: &mut Past) {
        match &self.owner {
            // Any process on the machine is `local`.
            Some(owner) => past.shown(owner, *owner != PeerName::Local),
            None => past.open_to_others(),
        }
        if self.open {
            past.open_to_others();
        }
    }
}

/// A name that is taken for memory that does not exist yet.
pub(super) struct Claim {
    /// The charge of its owner, if that is a peer.
    charge: Option<Charge>,
    /// Bytes of the memory, padding and room for probes included.
    bytes: u64,
}

/// Tells a creation in progress that its client no longer waits for it.
#[derive(Default)]
struct Abandoned(Arc<AtomicBool>);

impl Drop for Abandoned {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// The service as the exchange's server sees it.
pub(super) struct Allocator(pub Arc<ServiceState>);

impl Allocate for Allocator {
    /// [`create`](Self::create) checks this, and counts and logs its refusals.
    fn may_create(&self, _: &PeerName, _: &str) -> Result<(), Refused> {
        Ok(())
    }

    fn may_fetch(&self, peer: &PeerName) -> Result<(), Refused> {
        if !self.0.ledger.is_silent_beyond(peer) {
            return Ok(());
        }
        let why = "deleted memory that silent processes of this peer may still have mapped uses up its quota";
        Err((Refusal::Quota, why.into()))
    }

    fn create<'a>(&'a self, peer: &'a PeerName, ask: &'a Create) -> Allocation<'a> {
        Box::pin(async move {
            let made = self.0.create(peer, ask).await;
            match &made {
                Ok(()) => self.0.asked.created.fetch_add(1, Relaxed),
                Err((reason, detail)) => {
                    tracing::info!(%peer, name = ask.name, %reason, detail, "creation refused");
                    self.0.asked.refused.fetch_add(1, Relaxed)
                }
            };
            made
        })
    }

    fn delete<'a>(&'a self, peer: &'a PeerName, name: &'a str, wait: Duration) -> Allocation<'a> {
        Box::pin(self.0.delete(peer, name, wait))
    }
}

impl ServiceState {
    /// Creates memory that a peer asks for and publishes it. If dropped before completion, the memory is released.
    async fn create(self: &Arc<Self>, peer: &PeerName, ask: &Create) -> Result<(), Refused> {
        let abandoned = Abandoned::default();
        loop {
            // Before the attempt, so that no change after it is missed.
            let mut made = self.made.subscribe();
            let turn = self.creations.turn(peer).await;
            let wanted = self.wanted(peer, ask)?;
            let claim = self.claim(&wanted).map_err(refusal)?;
            let Some(claim) = claim else {
                drop(turn);
                // This future holds the state, and so the sender: the wait cannot fail.
                let _ = made.changed().await;
                continue;
            };
            let (state, abandoned) = (Arc::clone(self), Arc::clone(&abandoned.0));
            let published = tokio::task::spawn_blocking(move || {
                let published = state.publish(&wanted, claim, &abandoned);
                drop(turn);
                published
            });
            return match published.await {
                Ok(published) => published.map_err(refusal),
                Err(_) => Err((Refusal::Internal, "it has failed".into())),
            };
        }
    }

    /// Checks a peer's rights and its request.
    fn wanted(&self, peer: &PeerName, ask: &Create) -> Result<Wanted, Refused> {
        if self.draining.load(Relaxed) {
            return Err((Refusal::Closing, ENDING.into()));
        }
        let invalid = |error: Error| (Refusal::Invalid, error.to_string());
        // Checks the peer's rights first, then its request, its quota and last another peer's name: a refusal must
        // not reveal which names exist outside the peer's prefixes.
        let create = lock(&self.create).clone();
        let Some(create) = create.filter(|create| create.who.admits(peer)) else {
            return Err((Refusal::Forbidden, format!("{peer} may not create memory")));
        };
        let namespaces = create.namespaces();
        namespaces
            .map_err(|error| (Refusal::Internal, error.to_string()))?
            .check(peer, &ask.name)?;
        check_name(&ask.name).map_err(invalid)?;
        let others = ask.peers.parse::<PeerList>().map_err(invalid)?;
        let node = ask.node.or(create.node);
        let node = node.unwrap_or_else(|| self.best_node());
        self.reserve(node).map_err(invalid)?;
        Ok(Wanted {
            name: ask.name.clone(),
            bytes: ask.bytes,
            node,
            owner: Some(peer.clone()),
            open: !ask.peers.is_empty(),
            peers: others.and(peer.clone()),
            access: Access::ReadWrite,
            probe: true,
        })
    }

    /// Returns the node with most memory ready; the first if none has any.
    fn best_node(&self) -> NodeId {
        let nodes = self.nodes.iter().rev();
        let best = nodes.max_by_key(|(_, reserve)| reserve.levels().warm);
        best.map_or(NodeId(0), |(node, _)| *node)
    }

    fn reserve(&self, node: NodeId) -> Result<&Reserve> {
        self.nodes.get(&node).ok_or_else(|| {
            let choices = self.nodes.keys().copied().collect();
            let gpu = None;
            MemoryError::NoSuchNode { node, gpu, choices }.into()
        })
    }

    /// Takes the name and charges its owner. Returns `None` while another request of the owner is creating the
    /// name: try again when [`made`](Self::made) changes.
    ///
    /// # Errors
    /// [`Error::Refused`] for a name that is taken and beyond the owner's quota.
    pub fn claim(&self, wanted: &Wanted) -> Result<Option<Claim>> {
        let reserve = self.reserve(wanted.node)?;
        let padded = reserve.padded(wanted.bytes)?;
        // Probes need room behind the bytes. If there is no padding, a granule is added, unless the quota or the node
        // has no room for it.
        let is_whole = wanted.probe && padded == wanted.bytes;
        let room = if is_whole { reserve.granule() } else { 0 };
        let owner = wanted.owner.as_ref();
        let mut table = lock(&self.table);
        // Under the lock: either the drain sees this creation, or the service drains and it does not begin.
        if self.draining.load(Relaxed) {
            return Err(wanted.refused(Refusal::Closing, ENDING));
        }
        // The owner's own name before its quota, which has charged it already: a client that was restarted then
        // takes its memory instead of a refusal. Any other peer's name stays unknown to one over its quota.
        match table.names.get(&wanted.name) {
            Some(NameState::Making(own)) if owner.is_some() && own.as_ref() == owner => {
                return Ok(None);
            }
            Some(NameState::There(named)) if owner.is_some() && named.owner.as_ref() == owner => {
                let is_ending = named.ending.load(Relaxed);
                let detail = "it is being deleted; create it again when its holders have let go";
                let detail = if is_ending { detail } else { "" };
                return Err(wanted.refused(Refusal::Exists, detail));
            }
            _ => {}
        }
        let charge = owner.map(|owner| self.ledger.charge(owner, padded, room));
        let charge = charge
            .transpose()
            .map_err(|why| wanted.refused(Refusal::Quota, &why))?;
        let is_configured = owner.is_some() && table.configured.contains(&wanted.name);
        if is_configured || table.names.contains_key(&wanted.name) {
            return Err(wanted.refused(Refusal::Exists, ""));
        }
        let making = NameState::Making(wanted.owner.clone());
        table.names.insert(wanted.name.clone(), making);
        let bytes = charge.as_ref().map_or(padded + room, Charge::bytes);
        Ok(Some(Claim { charge, bytes }))
    }

    /// Creates memory for a claimed name and publishes it. Blocks.
    ///
    /// # Errors
    /// Those of creating and of publishing memory. After an error nothing is left, and the name is free again.
    pub fn publish(&self, wanted: &Wanted, claim: Claim, abandoned: &AtomicBool) -> Result<()> {
        let named = self.make(wanted, claim, abandoned);
        let mut table = lock(&self.table);
        table.names.remove(&wanted.name);
        let mut late = None;
        let published = match named {
            Ok(named) if table.closed => {
                late = Some(named);
                Err(wanted.refused(Refusal::Closing, ENDING))
            }
            Ok(named) => {
                let entry = NameState::There(Arc::new(named));
                table.names.insert(wanted.name.clone(), entry);
                let directory = lock(&self.directory);
                let added = directory.as_ref().map(|it| it.add(&wanted.name));
                added.unwrap_or(Ok(()))
            }
            Err(error) => Err(error),
        };
        drop(table);
        // Outside the lock: the driver may take seconds for many gigabytes.
        drop(late);
        self.made.send_replace(());
        published
    }

    /// Gives memory that its owner has deleted back to the driver, until a new charge fits the quota. Nothing
    /// is pinned for the charge before.
    fn reclaim(&self, wanted: &Wanted, charge: &Charge, abandoned: &AtomicBool) -> Result<()> {
        loop {
            let (over, amounts) = self.ledger.over(charge);
            if over == 0 {
                return Ok(());
            }
            self.check_wanted(wanted, abandoned)?;
            if amounts.reclaimable() == 0 {
                // The quota was lowered, or the peer was charged for memory that it is silent about.
                let (taken, all) = (amounts.bytes(), amounts.bytes() - over);
                let why = format!("{} of {} are taken with these", Bytes(taken), Bytes(all));
                return Err(wanted.refused(Refusal::Quota, &why));
            }
            let mut freed = 0;
            for reserve in self.nodes.values() {
                if freed < over {
                    freed += reserve.evict_charged(charge, over - freed);
                }
            }
            if freed == 0 {
                // The memory is being zeroed, or on its way back to the driver.
                charge.changed_since(amounts, LOOK);
            }
        }
    }

    /// Checks that a client still waits for the memory.
    fn check_wanted(&self, wanted: &Wanted, abandoned: &AtomicBool) -> Result<()> {
        if self.draining.load(Relaxed) {
            return Err(wanted.refused(Refusal::Closing, ENDING));
        }
        if abandoned.load(Relaxed) {
            return Err(Error::Share(ShareError::PeerLost {
                peer: "the client that asked for memory".into(),
                why: "gone before it was made".into(),
            }));
        }
        Ok(())
    }

    /// Takes memory for a claim: first what is kept for the owner, then what is ready or created now.
    fn make(&self, wanted: &Wanted, claim: Claim, abandoned: &AtomicBool) -> Result<Named> {
        let reserve = self.reserve(wanted.node)?;
        let owner = wanted.owner.as_ref();
        let mut taken = Taken {
            reserve,
            chunks: Vec::new(),
            charge: claim.charge,
        };
        if let (Some(owner), Some(charge)) = (owner, &taken.charge) {
            taken.chunks = reserve.take_kept(owner, claim.bytes)?;
            // The new charge counts it.
            taken.chunks.iter_mut().for_each(|it| it.charge = None);
            self.reclaim(wanted, charge, abandoned)?;
        }
        reserve.fill_up(owner, wanted.bytes, &mut taken.chunks)?;
        if total(&taken.chunks) < claim.bytes {
            taken.chunks.extend(reserve.add_granule(taken.chunks.len()));
        }
        taken.chunks.iter_mut().for_each(|it| it.charge = None);
        if let Some(charge) = &mut taken.charge {
            let pinned = total(&taken.chunks);
            drop(charge.split(charge.bytes().saturating_sub(pinned)));
        }
        self.check_wanted(wanted, abandoned)?;
        let ending = || wanted.refused(Refusal::Closing, ENDING);
        let server = self.server().ok_or_else(ending)?;
        Self::publish_taken(&server, wanted, taken)
    }

    fn publish_taken(server: &Server, wanted: &Wanted, mut taken: Taken<'_>) -> Result<Named> {
        let pinned = total(&taken.chunks);
        let chunks = std::mem::take(&mut taken.chunks).into_iter();
        let parts = chunks.map(|chunk| (chunk.memory, chunk.past));
        let (memories, mut pasts): (_, Vec<_>) = parts.unzip();
        let lost = || taken.reserve.lost(pinned, Discard::Tainted);
        let shared = Shared::from_physical(memories, wanted.bytes).inspect_err(|_| lost())?;
        let published = server
            .publish(&wanted.name, shared.clone())
            .who(wanted.peers.clone())
            .owner(wanted.owner.clone().map_or(Owner::Server, Owner::Peer))
            .access(wanted.access)
            .probe(wanted.probe)
            .now();
        let published = match published {
            Ok(published) => published,
            Err(error) => {
                // No peer has seen it.
                match shared.into_physical() {
                    Ok(memories) => taken.chunks = chunks_of(memories, pasts),
                    Err(_) => lost(),
                }
                return Err(error);
            }
        };
        pasts.iter_mut().for_each(|past| wanted.note_peers(past));
        Ok(Named {
            name: wanted.name.clone(),
            owner: wanted.owner.clone(),
            node: wanted.node,
            charge: Mutex::new(taken.charge.take()),
            pinned,
            pasts,
            published: Mutex::new(Some(Arc::new(published))),
            ending: AtomicBool::new(false),
            ended: watch::channel(false).0,
        })
    }
}

/// Converts a failed creation to a refusal for a peer.
fn refusal(error: Error) -> Refused {
    match error {
        Error::Refused { reason, detail, .. } => (reason, detail),
        Error::Share(ShareError::Memory(
            MemoryError::OutOfMemory { .. } | MemoryError::NodeTooFull { .. },
        )) => (Refusal::NoMemory, error.to_string()),
        Error::LimitReached { .. }
        | Error::Share(ShareError::Memory(MemoryError::HeapFull { .. })) => {
            (Refusal::Limit, error.to_string())
        }
        Error::Share(ShareError::Memory(MemoryError::InvalidArgument { .. })) => {
            (Refusal::Invalid, error.to_string())
        }
        error => {
            tracing::warn!(%error, "creation failed");
            (Refusal::Internal, "see the service's log".into())
        }
    }
}

#[cfg(test)]
mod tests;
