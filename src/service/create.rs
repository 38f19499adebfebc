//! Creates memory and publishes it under a name.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::quota::Charge;
use super::reserve::{Chunk, Reserve, total};
use super::reuse_policy::Past;
use super::state::{Held, Named, Phase, Refused, ServiceState, Wanted, blocking};
use crate::driver::{Access, NodeId};
use crate::exchange::protocol::{Create, check_name};
use crate::exchange::server::{Allocate, Allocation};
use crate::exchange::{Owner, PeerList, PeerName, Server};
use crate::guard::is_shortage;
use crate::per_driver::lock;
use crate::share::Shared;
use crate::size::Bytes;
use crate::{ENDING, Error, MemoryError, Refusal, Result, refused};

/// How often a creation looks at the charges of its peer while memory that counts is zeroed or released.
const LOOK: Duration = Duration::from_millis(5);

impl Wanted {
    /// Returns the refusal of the request.
    fn refused(&self, reason: Refusal, detail: &str) -> Error {
        refused(format!("to create {}", self.name), reason, detail)
    }

    /// Updates the history of memory that is published now.
    fn note_peers(&self, past: &mut Past) {
        // Others count, whether they fetch it or not. Any process on the machine is `local`.
        let is_only = |owner: &&PeerName| !self.open && **owner != PeerName::Local;
        past.shown(self.owner.as_ref().filter(is_only));
    }
}

/// What is reserved for a name that is to be created.
pub(super) struct Claim {
    /// The charge of its owner, if that is a peer.
    charge: Option<Charge>,
    /// Bytes of the memory, padding and room for probes included.
    bytes: u64,
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
            let Err((reason, detail)) = &made else {
                self.0.created.fetch_add(1, Relaxed);
                return made;
            };
            tracing::info!(%peer, name = ask.name, %reason, detail, "creation refused");
            self.0.refused.fetch_add(1, Relaxed);
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
        // Dropped with this future.
        let client = Arc::new(());
        loop {
            let turn = self.creations.turn(peer).await;
            let claimed = self.claim(self.wanted(peer, ask)?);
            let (named, claim) = claimed.map_err(refusal)?;
            let Some(claim) = claim else {
                drop(turn);
                named.reach(Phase::There).await;
                continue;
            };
            let (state, client) = (Arc::clone(self), Arc::downgrade(&client));
            let publish = move || {
                let _turn = turn;
                state.publish(&named, claim, &client)
            };
            return blocking("making memory", publish).await.map_err(refusal);
        }
    }

    /// Checks a peer's rights and its request.
    fn wanted(&self, peer: &PeerName, ask: &Create) -> Result<Wanted, Refused> {
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
        Ok(Wanted {
            name: ask.name.clone(),
            bytes: ask.bytes,
            node: node.unwrap_or_else(|| self.best_node()),
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
        let (gpu, choices) = (None, self.nodes.keys().copied().collect());
        let missing = MemoryError::NoSuchNode { node, gpu, choices };
        Ok(self.nodes.get(&node).ok_or(missing)?)
    }

    /// Takes the name and charges its owner. There is no claim while another request of the owner is creating the name,
    /// which is returned then: try again once it is no longer [`Making`](Phase::Making).
    ///
    /// # Errors
    /// [`Error::Refused`] for a name that is taken and beyond the owner's quota.
    pub fn claim(&self, wanted: Wanted) -> Result<(Arc<Named>, Option<Claim>)> {
        let reserve = self.reserve(wanted.node)?;
        let padded = reserve.padded(wanted.bytes)?;
        // Probes need room behind the bytes. If there is no padding, a granule is added, unless the quota or the node
        // has no room for it.
        let is_whole = wanted.probe && padded == wanted.bytes;
        let room = if is_whole { reserve.granule() } else { 0 };
        let owner = wanted.owner.as_ref();
        let mut names = lock(&self.names);
        // Under the lock: either the drain sees this creation, or the service drains and it does not begin.
        if self.draining.load(Relaxed) {
            return Err(wanted.refused(Refusal::Closing, ENDING));
        }
        let there = names.get(&wanted.name);
        // The owner's own name before its quota, which has charged it already: a client that was restarted then
        // takes its memory instead of a refusal. Any other peer's name stays unknown to one over its quota.
        let own = there.filter(|there| owner.is_some() && there.wanted.owner == wanted.owner);
        if let Some(own) = own {
            let detail = match own.phase() {
                Phase::Making => return Ok((Arc::clone(own), None)),
                Phase::There => "",
                _ => "it is being deleted; create it again when its holders have let go",
            };
            return Err(wanted.refused(Refusal::Exists, detail));
        }
        let charge = owner.map(|owner| self.ledger.charge(owner, padded, room));
        let charge = charge.transpose();
        let charge = charge.map_err(|why| wanted.refused(Refusal::Quota, &why))?;
        let is_configured = owner.is_some() && self.configured.contains(&wanted.name);
        if is_configured || there.is_some() {
            return Err(wanted.refused(Refusal::Exists, ""));
        }
        let bytes = charge.as_ref().map_or(padded + room, Charge::bytes);
        let named = Arc::new(Named::new(wanted));
        names.insert(named.wanted.name.clone(), Arc::clone(&named));
        Ok((named, Some(Claim { charge, bytes })))
    }

    /// Creates memory for a claimed name and publishes it, if `client` still waits for it by then. Blocks.
    ///
    /// # Errors
    /// Those of creating and of publishing memory. After an error nothing is left, and the name is free again.
    pub fn publish(&self, named: &Arc<Named>, claim: Claim, client: &Weak<()>) -> Result<()> {
        let wanted = &named.wanted;
        let made = self.make(wanted, claim, client);
        let held = made.inspect_err(|_| self.free_name(named))?;
        let names = lock(&self.names);
        if names.contains_key(&wanted.name) {
            *lock(&named.held) = Some(held);
            named.phase.send_replace(Phase::There);
            let directory = lock(&self.directory);
            let added = directory.as_ref().map(|it| it.add(&wanted.name));
            return added.unwrap_or(Ok(()));
        }
        // The service has ended meanwhile. Released outside the lock: the driver may take seconds for many gigabytes.
        drop(names);
        drop(held);
        named.phase.send_replace(Phase::Ended);
        Err(wanted.refused(Refusal::Closing, ENDING))
    }

    /// Gives memory that its owner has deleted back to the driver, until a new charge fits the quota. Nothing
    /// is pinned for the charge before.
    fn reclaim(&self, wanted: &Wanted, charge: &Charge, client: &Weak<()>) -> Result<()> {
        loop {
            let (over, amounts) = self.ledger.over(charge);
            if over == 0 {
                return Ok(());
            }
            self.check_wanted(wanted, client)?;
            if amounts.reclaimable() == 0 {
                // The quota was lowered, or the peer was charged for memory that it is silent about.
                let (taken, all) = (amounts.bytes(), amounts.bytes() - over);
                let why = format!("{} of {} are taken with these", Bytes(taken), Bytes(all));
                return Err(wanted.refused(Refusal::Quota, &why));
            }
            let mut freed = 0;
            for reserve in self.nodes.values() {
                freed += reserve.evict_charged(charge, over.saturating_sub(freed));
            }
            if freed == 0 {
                // The memory is being zeroed, or on its way back to the driver.
                std::thread::sleep(LOOK);
            }
        }
    }

    /// Checks that a client still waits for the memory.
    fn check_wanted(&self, wanted: &Wanted, client: &Weak<()>) -> Result<()> {
        let why = if self.draining.load(Relaxed) {
            ENDING
        } else if client.strong_count() == 0 {
            "the client that asked for it has gone"
        } else {
            return Ok(());
        };
        Err(wanted.refused(Refusal::Closing, why))
    }

    /// Takes memory for a claim: first what is kept for the owner, then what is ready or created now.
    fn make(&self, wanted: &Wanted, claim: Claim, client: &Weak<()>) -> Result<Held> {
        let reserve = self.reserve(wanted.node)?;
        let owner = wanted.owner.as_ref();
        let mut taken = Taken {
            reserve,
            chunks: Vec::new(),
            charge: claim.charge,
        };
        if let (Some(owner), Some(charge)) = (owner, &taken.charge) {
            taken.chunks = reserve.take_kept(owner, claim.bytes);
            self.reclaim(wanted, charge, client)?;
        }
        let is_wanted = || self.check_wanted(wanted, client);
        reserve.fill_up(owner, wanted.bytes, &mut taken.chunks, &is_wanted)?;
        if total(&taken.chunks) < claim.bytes {
            taken.chunks.extend(reserve.add_granule(taken.chunks.len()));
        }
        if let Some(charge) = &mut taken.charge {
            let pinned = total(&taken.chunks);
            drop(charge.split(charge.bytes().saturating_sub(pinned)));
        }
        is_wanted()?;
        let ending = || wanted.refused(Refusal::Closing, ENDING);
        let server = self.server().ok_or_else(ending)?;
        taken.publish(&server, wanted)
    }
}

/// Chunks that no name has. Dropping this gives them back with their charge.
struct Taken<'a> {
    reserve: &'a Reserve,
    chunks: Vec<Chunk>,
    charge: Option<Charge>,
}

impl Taken<'_> {
    fn publish(mut self, server: &Server, wanted: &Wanted) -> Result<Held> {
        let pinned = total(&self.chunks);
        let chunks = std::mem::take(&mut self.chunks).into_iter();
        let parts = chunks.map(|chunk| (chunk.memory, chunk.past));
        let (memories, mut pasts): (_, Vec<_>) = parts.unzip();
        let lost = || self.reserve.lost(pinned);
        let shared = Shared::from_physical(memories, wanted.bytes).inspect_err(|_| lost())?;
        let published = server
            .publish(&wanted.name, shared.clone())
            .who(wanted.peers.clone())
            .owner(wanted.owner.clone().map_or(Owner::Server, Owner::Peer))
            .access(wanted.access)
            .probe(wanted.probe)
            .now();
        match published {
            Ok(published) => {
                pasts.iter_mut().for_each(|past| wanted.note_peers(past));
                Ok(Held {
                    published: Arc::new(published),
                    pinned,
                    pasts,
                    charge: self.charge.take(),
                })
            }
            Err(error) => {
                // No peer has seen it.
                match shared.into_physical() {
                    Ok(memories) => self.chunks = Chunk::all(memories, pasts),
                    Err(_) => lost(),
                }
                Err(error)
            }
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let chunks = std::mem::take(&mut self.chunks);
        self.reserve.give_back(chunks, self.charge.take());
    }
}

/// Converts a failed creation to a refusal for a peer.
fn refusal(error: Error) -> Refused {
    use MemoryError::{InvalidArgument, NoSuchNode};
    let reason = match (&error, error.memory()) {
        (Error::Refused { reason, detail, .. }, _) => return (reason.clone(), detail.clone()),
        (Error::LimitReached { .. }, _) => Refusal::Limit,
        (_, Some(memory)) if is_shortage(memory) => Refusal::NoMemory,
        (_, Some(InvalidArgument { .. } | NoSuchNode { .. })) => Refusal::Invalid,
        _ => {
            tracing::warn!(%error, "creation failed");
            return (Refusal::Internal, "see the service's log".into());
        }
    };
    (reason, error.to_string())
}

#[cfg(test)]
mod tests;
