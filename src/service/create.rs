//! Making memory and giving it a name.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

use super::ending::{chunks_of, give_back};
use super::hygiene::Past;
use super::named::Named;
use super::quota::Over;
use super::reserve::Reserve;
use super::state::{Entry, No, State, lock};
use super::stock::HasBytes;
use crate::driver::{Access, NodeId};
use crate::exchange::protocol::{Create, check_name};
use crate::exchange::{Owner, PeerName, Who};
use crate::share::Shared;
use crate::{Error, Refusal, Result};

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
        let invalid = |error: Error| (Refusal::Invalid, error.to_string());
        // The peer's rights come first, then its request, its quota and last the name: a peer must not
        // learn from a refusal which names exist outside its prefixes.
        let preferred = self.may_create(peer, &ask.name)?;
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
            // Under the lock: whoever drains sees all that is made from now on, or nothing more is.
            if self.draining.load(Relaxed) {
                return Err(no(Refusal::Closing, "the service is ending".into()));
            }
            if let Some(owner) = wanted.owner {
                let charged = table.ledger.charge(owner, padded);
                charged.map_err(|Over(why)| no(Refusal::Quota, why))?;
            }
            if table.is_taken(wanted.name, wanted.owner) {
                if let Some(owner) = wanted.owner {
                    table.ledger.refund(owner, padded);
                }
                return Err(no(Refusal::Exists, String::new()));
            }
            table.names.insert(wanted.name.to_owned(), Entry::Making);
        }
        let made = self.make(wanted, reserve, padded, abandoned);
        let mut table = lock(&self.table);
        let published = match made {
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
        };
        drop(table);
        self.made.send_replace(());
        published
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
        let draining = self.draining.load(Relaxed);
        let server = match self.server() {
            Some(server) if !draining && !abandoned.load(Relaxed) => server,
            _ => {
                give_back(reserve, chunks, has_extra);
                return Err(match draining {
                    true => Error::Refused {
                        peer: "the service".into(),
                        what: format!("to create {}", wanted.name),
                        reason: Refusal::Closing,
                        detail: "the service is ending".into(),
                    },
                    false => Error::PeerLost {
                        peer: "whoever asked for memory".into(),
                        why: "gone before it was made".into(),
                    },
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
            .owner(wanted.owner.cloned().map_or(Owner::Server, Owner::Peer))
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

/// A failed creation as it is told to a peer.
fn refusal(error: Error) -> No {
    match error {
        Error::Refused { reason, detail, .. } => (reason, detail),
        Error::OutOfMemory { .. } | Error::NodeTooFull { .. } => {
            (Refusal::NoMemory, error.to_string())
        }
        Error::LimitReached { .. } | Error::HeapFull { .. } => (Refusal::Limit, error.to_string()),
        Error::InvalidArgument { .. } => (Refusal::Invalid, error.to_string()),
        error => {
            tracing::warn!(%error, "creation failed");
            (Refusal::Internal, "see the service's log".into())
        }
    }
}
