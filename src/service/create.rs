//! Creates memory and publishes it under a name.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;

use super::free_chunks::HasBytes;
use super::named::Named;
use super::quota::{Charge, Over};
use super::reserve::{Chunk, Reserve};
use super::state::{NameState, No, ServiceState};
use super::teardown::{chunks_of, give_back};
use super::wanted::Wanted;
use crate::driver::{Access, NodeId};
use crate::exchange::protocol::{Create, check_name};
use crate::exchange::{Owner, PeerList, PeerName, Server};
use crate::per_driver::lock;
use crate::share::Shared;
use crate::{Error, MemoryError, Refusal, Result, ShareError};

/// The refusal of requests that come too late.
const ENDING: &str = "the service is ending";
/// How often a creation that waits for memory checks whether its client still waits.
const LOOK: Duration = Duration::from_millis(100);

/// The outcome of an attempt to create a name.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    Published,
    /// Another request of the same peer is creating the name: try again when [`ServiceState::made`] changes.
    BeingMade,
}

/// The outcome of an attempt to take a name.
enum Claim {
    /// The name is taken, and its owner, if a peer, charged.
    Taken(Option<Charge>),
    BeingMade,
}

impl ServiceState {
    /// Creates memory that a peer asks for and publishes it. Blocks.
    pub fn create(
        &self,
        peer: &PeerName,
        ask: &Create,
        abandoned: &AtomicBool,
    ) -> Result<Attempt, No> {
        let made = self.try_create(peer, ask, abandoned);
        let count = match &made {
            Ok(Attempt::BeingMade) => return made,
            Ok(Attempt::Published) => &self.asked.created,
            Err((reason, detail)) => {
                tracing::info!(%peer, name = ask.name, %reason, detail, "creation refused");
                &self.asked.refused
            }
        };
        count.fetch_add(1, Relaxed);
        made
    }

    fn try_create(
        &self,
        peer: &PeerName,
        ask: &Create,
        abandoned: &AtomicBool,
    ) -> Result<Attempt, No> {
        if self.draining.load(Relaxed) {
            return Err((Refusal::Closing, "the service is ending".into()));
        }
        let invalid = |error: Error| (Refusal::Invalid, error.to_string());
        // Checks the peer's rights first, then its request, its quota and last another peer's name: a refusal must
        // not reveal which names exist outside the peer's prefixes.
        let preferred = self.may_create(peer, &ask.name)?;
        check_name(&ask.name).map_err(invalid)?;
        let others = ask.peers.parse::<PeerList>().map_err(invalid)?;
        let node = ask.node.or(preferred).or_else(|| self.best_node());
        let reserve = node
            .and_then(|node| self.nodes.get(&node))
            .ok_or_else(|| (Refusal::Invalid, no_such_node(node, self.nodes.keys())))?;
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

    /// Checks that the peer may create memory and this name; returns the configuration's node for it.
    fn may_create(&self, peer: &PeerName, name: &str) -> Result<Option<NodeId>, No> {
        let create = lock(&self.create).clone();
        let Some(create) = create.filter(|create| create.who.admits(peer)) else {
            return Err((Refusal::Forbidden, format!("{peer} may not create memory")));
        };
        let namespaces = create
            .namespaces()
            .map_err(|error| (Refusal::Internal, error.to_string()))?;
        namespaces.check(peer, name)?;
        Ok(create.node)
    }

    /// Returns the node with most memory ready; the first if none has any.
    fn best_node(&self) -> Option<NodeId> {
        let ready = |reserve: &Reserve<PeerName>| reserve.levels().warm;
        let best = self
            .nodes
            .iter()
            .rev()
            .max_by_key(|(_, reserve)| ready(reserve));
        best.map(|(node, _)| *node)
    }

    /// Creates memory and publishes it. Blocks.
    ///
    /// # Errors
    /// [`Error::Refused`] for a name that is taken and beyond the owner's quota; those of creating and of
    /// publishing memory. After an error nothing is left.
    pub fn publish(&self, wanted: &Wanted<'_>, abandoned: &AtomicBool) -> Result<Attempt> {
        let reserve = self
            .nodes
            .get(&wanted.node)
            .ok_or_else(|| MemoryError::NoSuchNode {
                node: wanted.node,
                gpu: None,
                choices: self.nodes.keys().copied().collect(),
            })?;
        let padded = reserve.padded(wanted.bytes)?;
        // Probes need room behind the bytes. If there is no padding, a granule is added, unless the quota has
        // no room for it.
        let more = match wanted.probe && padded == wanted.bytes {
            true => reserve.granule(),
            false => 0,
        };
        let charge = match self.claim(wanted, padded, more)? {
            Claim::Taken(charge) => charge,
            Claim::BeingMade => return Ok(Attempt::BeingMade),
        };
        let extra = match &charge {
            Some(charge) => charge.bytes() > padded,
            None => more > 0,
        };
        let made = self.make(wanted, reserve, extra, charge, abandoned);
        let published = self.enter(wanted, made);
        self.made.send_replace(());
        published.map(|()| Attempt::Published)
    }

    /// Takes the name, and charges the owner for `bytes` and, if they fit its quota, `more`.
    fn claim(&self, wanted: &Wanted<'_>, bytes: u64, more: u64) -> Result<Claim> {
        let mut table = lock(&self.table);
        // Under the lock: either `vacate` sees this creation, or the service drains and it does not begin.
        if self.draining.load(Relaxed) {
            return Err(wanted.refused(Refusal::Closing, ENDING));
        }
        // The owner's own name before its quota, which has charged it already: a client that was restarted then
        // takes its memory instead of a refusal. Any other peer's name stays unknown to one over its quota.
        match table.own(wanted.name, wanted.owner) {
            Some(NameState::Making(_)) => return Ok(Claim::BeingMade),
            Some(NameState::There(named)) => {
                let detail = match named.ending.load(Relaxed) {
                    true => "it is being deleted; create it again when its holders have let go",
                    false => "",
                };
                return Err(wanted.refused(Refusal::Exists, detail));
            }
            None => {}
        }
        let charge = wanted
            .owner
            .map(|owner| self.ledger.charge(owner, bytes, more));
        let charge = charge
            .transpose()
            .map_err(|Over(why)| wanted.refused(Refusal::Quota, &why))?;
        if table.is_taken(wanted.name, wanted.owner) {
            return Err(wanted.refused(Refusal::Exists, ""));
        }
        let making = NameState::Making(wanted.owner.cloned());
        table.names.insert(wanted.name.to_owned(), making);
        Ok(Claim::Taken(charge))
    }

    /// Enters what was made under the claimed name; if that failed, the name is free again.
    fn enter(&self, wanted: &Wanted<'_>, made: Result<Named>) -> Result<()> {
        let mut table = lock(&self.table);
        let mut late = None;
        let entered = match made {
            Ok(named) if table.closed => {
                table.names.remove(wanted.name);
                late = Some(named);
                Err(wanted.refused(Refusal::Closing, ENDING))
            }
            Ok(named) => {
                let entry = NameState::There(Arc::new(named));
                table.names.insert(wanted.name.to_owned(), entry);
                match &*lock(&self.directory) {
                    Some(directory) => directory.add(wanted.name),
                    None => Ok(()),
                }
            }
            Err(error) => {
                table.names.remove(wanted.name);
                Err(error)
            }
        };
        drop(table);
        // Outside the lock: the driver may take seconds for many gigabytes.
        drop(late);
        entered
    }

    /// Returns memory for a charge: first memory kept for the owner, then memory that is ready or created now.
    fn chunks_for(
        &self,
        wanted: &Wanted<'_>,
        reserve: &Reserve<PeerName>,
        charge: Option<&Charge>,
        abandoned: &AtomicBool,
        chunks: &mut Vec<Chunk<PeerName>>,
    ) -> Result<()> {
        if let (Some(owner), Some(charge)) = (wanted.owner, charge) {
            *chunks = reserve.take_kept(owner, wanted.bytes)?;
            // The new charge counts it.
            chunks.iter_mut().for_each(|chunk| chunk.charge = None);
            self.reclaim(wanted, charge, abandoned)?;
        }
        let filled = reserve.fill_up(wanted.owner, wanted.bytes, chunks);
        chunks.iter_mut().for_each(|chunk| chunk.charge = None);
        filled
    }

    /// Gives memory that its owner has deleted back to the driver, until a new charge fits the quota. Nothing
    /// is pinned for the charge before.
    fn reclaim(&self, wanted: &Wanted<'_>, charge: &Charge, abandoned: &AtomicBool) -> Result<()> {
        loop {
            let (over, amounts) = self.ledger.over(charge);
            if over == 0 {
                return Ok(());
            }
            self.is_wanted(wanted, abandoned)?;
            if amounts.reclaimable() == 0 {
                return Err(wanted.refused(Refusal::Quota, "the quota was lowered"));
            }
            let freed = self
                .nodes
                .values()
                .fold(0, |freed, reserve| match over - freed {
                    0 => freed,
                    left => freed + reserve.evict_charged(charge, left).min(left),
                });
            if freed == 0 {
                // The memory is being zeroed, or on its way back to the driver.
                charge.changed_since(amounts, LOOK);
            }
        }
    }

    /// Checks that a client still waits for the memory.
    fn is_wanted(&self, wanted: &Wanted<'_>, abandoned: &AtomicBool) -> Result<()> {
        if self.draining.load(Relaxed) {
            return Err(wanted.refused(Refusal::Closing, ENDING));
        }
        match abandoned.load(Relaxed) {
            true => Err(Error::Share(ShareError::PeerLost {
                peer: "the client that asked for memory".into(),
                why: "gone before it was made".into(),
            })),
            false => Ok(()),
        }
    }

    fn make(
        &self,
        wanted: &Wanted<'_>,
        reserve: &Reserve<PeerName>,
        extra: bool,
        mut charge: Option<Charge>,
        abandoned: &AtomicBool,
    ) -> Result<Named> {
        let mut chunks = Vec::new();
        let taken = self.chunks_for(wanted, reserve, charge.as_ref(), abandoned, &mut chunks);
        if let Err(error) = taken {
            give_back(reserve, chunks, charge, false);
            return Err(error);
        }
        let extra = extra && chunks.len() < self.most_parts;
        let extra = extra.then(|| reserve.extra()).flatten();
        let has_extra = extra.is_some();
        chunks.extend(extra);
        let pinned = chunks.iter().map(HasBytes::bytes).sum();
        if let Some(charge) = &mut charge {
            // The granule for probes was not created.
            drop(charge.split(charge.bytes().saturating_sub(pinned)));
        }
        let server = match (self.is_wanted(wanted, abandoned), self.server()) {
            (Ok(()), Some(server)) => server,
            (wanted_still, _) => {
                give_back(reserve, chunks, charge, has_extra);
                wanted_still?;
                return Err(wanted.refused(Refusal::Closing, ENDING));
            }
        };
        Self::publish_chunks(&server, wanted, reserve, chunks, (has_extra, charge))
    }

    /// Publishes the chunks under the wanted name. If that fails, the reserve gets them back.
    fn publish_chunks(
        server: &Server,
        wanted: &Wanted<'_>,
        reserve: &Reserve<PeerName>,
        chunks: Vec<Chunk<PeerName>>,
        (extra, charge): (bool, Option<Charge>),
    ) -> Result<Named> {
        let pinned = chunks.iter().map(HasBytes::bytes).sum();
        let unseen: Vec<_> = chunks.iter().map(|chunk| chunk.past.clone()).collect();
        let memories = chunks.into_iter().map(|chunk| chunk.memory).collect();
        let shared = match Shared::from_physical(memories, wanted.bytes) {
            Ok(shared) => shared,
            Err(error) => {
                reserve.lost(pinned);
                return Err(error.into());
            }
        };
        let published = server
            .publish(wanted.name, shared.clone())
            .who(wanted.who.clone())
            .owner(wanted.owner.cloned().map_or(Owner::Server, Owner::Peer))
            .access(wanted.access)
            .probe(wanted.probe)
            .now();
        match published {
            Ok(published) => Ok(Named {
                name: wanted.name.to_owned(),
                owner: wanted.owner.cloned(),
                node: wanted.node,
                charge: Mutex::new(charge),
                pinned,
                extra,
                pasts: wanted.shown(unseen),
                published: Mutex::new(Some(Arc::new(published))),
                ending: AtomicBool::new(false),
                ended: watch::channel(false).0,
            }),
            Err(error) => {
                // No peer has seen it.
                match shared.into_physical() {
                    Ok(memories) => {
                        give_back(reserve, chunks_of(memories, unseen), charge, extra);
                    }
                    Err(shared) => {
                        drop(shared);
                        reserve.lost(pinned);
                    }
                }
                Err(error)
            }
        }
    }
}

/// Describes which node is missing and which exist, for a message.
fn no_such_node<'a>(node: Option<NodeId>, nodes: impl Iterator<Item = &'a NodeId>) -> String {
    let nodes: Vec<_> = nodes.map(NodeId::to_string).collect();
    let there = match &nodes[..] {
        [] => "on no node".to_owned(),
        [node] => format!("only on node {node}"),
        nodes => format!("on nodes {}", nodes.join(", ")),
    };
    match node {
        Some(node) => format!("this service has no node {node}, it makes memory {there}"),
        None => format!("this service makes memory {there}"),
    }
}

/// Converts a failed creation to a refusal for a peer.
fn refusal(error: Error) -> No {
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
