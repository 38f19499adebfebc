//! Publishes memory under a name, and withdraws it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::publication::{Holder, Holders, ProbeSlots, Publication, Registered, describe};
use super::quota::What;
use super::state::ServerState;
use super::{Server, ServerCore};
use crate::driver::Access;
use crate::limits::deadline;
use crate::protocol::check_name;
use crate::share::Shared;
use crate::{Error, MemoryError, Owner, PeerList, PeerName, Refusal, Result};

/// Options for publishing memory; [`now`](Self::now) does it.
#[derive(Debug)]
#[must_use = "options do nothing until `now`"]
pub struct PublishOptions<'a> {
    server: &'a Server,
    name: String,
    shared: Shared,
    access: Access,
    who: PeerList,
    owner: Owner,
    probe: bool,
}

impl PublishOptions<'_> {
    setters! {
        /// Sets what importers may do: by default read and write. The server refuses requests for more, but a
        /// handle itself allows everything: give read access only to peers that respect it.
        access: Access;
        /// Sets which peers may import it: by default every peer that the server admits. For others the name does
        /// not exist.
        who: PeerList;
        /// Sets whether words in the padding, beyond the usable bytes, may be written to prove that both ends
        /// reach the same memory: by default yes. A window has no padding and is not probed.
        probe: bool;
    }

    /// Sets the peer that the name is published for, if an [allocator](super::Allocate) created the memory at
    /// its request. Importers see it; it grants nothing. By default the server itself is the owner.
    pub fn owner(mut self, owner: impl Into<Owner>) -> Self {
        self.owner = owner.into();
        self
    }

    /// Publishes the memory.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an invalid name, no access, or memory that
    /// cannot be exported at all; [`Error::Refused`] with [`Refusal::Exists`] for a name that is taken, and
    /// with [`Refusal::Closing`] if the server is ending; [`Error::LimitReached`] for names, of all or of the
    /// [owner](Self::owner), if that is a peer.
    pub fn now(self) -> Result<Published> {
        check_name(&self.name)?;
        let description = self.shared.describe(self.access)?;
        let handle_types = self.shared.handle_types();
        if handle_types.bits() == 0 {
            let why = "it was made without handle types, and cannot be shared";
            return Err(Error::invalid("memory", why));
        }
        let inner = Arc::clone(&self.server.handle.inner);
        // The bytes around a window belong to other memory.
        let probes = if self.probe && !self.shared.is_window() {
            ProbeSlots::between(self.shared.len(), self.shared.padded())
        } else {
            ProbeSlots::default()
        };
        let counted = match &self.owner {
            Owner::Peer(peer) => Some(inner.quota.count(peer, What::Name, 1)?),
            Owner::Server => None,
        };
        let mut state = inner.state();
        self.check_place(&inner, &state)?;
        state.last += 1;
        let id = state.last;
        let publication = Arc::new(Publication {
            id,
            name: self.name.into(),
            memory: Mutex::new(Some(self.shared.into())),
            owner: self.owner,
            parts: description.parts.len(),
            handle_types,
            exports: TaskTracker::new(),
            changed: Notify::new(),
            left_by_dead: AtomicBool::default(),
            left_held: OnceLock::new(),
        });
        state.names.insert(Arc::clone(&publication.name), id);
        let registered = Registered {
            publication: Arc::clone(&publication),
            description: Arc::new(description),
            peers: self.who,
            closing: false,
            until: None,
            probes,
            holders: Holders::default(),
            counted,
        };
        state.publications.insert(id, registered);
        drop(state);
        inner.changes_of(&publication.name).notify_waiters();
        tracing::info!(name = &*publication.name, "published");
        Ok(Published { inner, publication })
    }

    /// Checks that the server takes the name.
    fn check_place(&self, inner: &ServerCore, state: &ServerState) -> Result<()> {
        let refused = |reason| {
            let what = format!("to publish {}", self.name);
            Err(Error::refused("the server", what, reason, String::new()))
        };
        if state.closing {
            return refused(Refusal::Closing);
        }
        if state.names.contains_key(&*self.name) {
            return refused(Refusal::Exists);
        }
        if state.names.len() >= inner.options.limits.names {
            return Err(Error::LimitReached {
                what: "names",
                limit: inner.options.limits.names as u64,
            });
        }
        Ok(())
    }
}

impl Server {
    /// Returns options to publish memory under a name.
    pub fn publish(
        &self,
        name: impl Into<String>,
        memory: impl Into<Shared>,
    ) -> PublishOptions<'_> {
        PublishOptions {
            server: self,
            name: name.into(),
            shared: memory.into(),
            access: Access::ReadWrite,
            who: PeerList::anyone(),
            owner: Owner::Server,
            probe: true,
        }
    }
}

/// Published memory. Dropping it removes the name and ends its leases at once, though holders may still have
/// it mapped; [`withdraw`](Self::withdraw) asks them first.
pub struct Published {
    pub(super) inner: Arc<ServerCore>,
    pub(super) publication: Arc<Publication>,
}

impl fmt::Debug for Published {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Published")
            .field("name", &self.publication.name)
            .finish_non_exhaustive()
    }
}

impl Published {
    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.publication.name
    }

    /// Returns the memory.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) once it was [withdrawn](Self::withdraw): the
    /// publication then holds none of it.
    pub fn shared(&self) -> Result<Shared> {
        self.publication.shared()
    }

    /// Returns its holders: live ones in the order of their grants, then silent ones that may still have it
    /// mapped.
    pub fn importers(&self) -> Vec<Holder> {
        self.inner.state().holders(self.publication.id).0
    }

    /// Returns whether a holder's process ended without a release. The kernel has then unmapped the memory,
    /// unless the process had passed it on.
    pub fn left_by_dead(&self) -> bool {
        self.publication.left_by_dead.load(Relaxed)
    }

    /// Returns whether this peer may see the name.
    pub fn is_shown_to(&self, peer: &PeerName) -> bool {
        self.inner.state().find(self.name(), peer).is_some()
    }

    /// Changes which peers may import it. Holders that may no longer import it are asked to release it,
    /// within the time of a lease: see [`set_who_within`](Self::set_who_within).
    pub fn set_who(&self, who: PeerList) {
        self.set_who_within(who, self.inner.options.lease);
    }

    /// Changes which peers may import it. Holders that may no longer import it are asked to release it. After
    /// `within` their leases end as [`HolderState::Expired`](super::HolderState::Expired), because they may still have the memory mapped;
    /// the holders learn that they are no longer on the list. A holder that may import it again before that
    /// keeps its lease; if it was asked already, it is not told.
    pub fn set_who_within(&self, who: PeerList, within: Duration) {
        (self.inner.state()).set_peers(self.publication.id, who, within);
        self.inner.changes_of(self.name()).notify_waiters();
        self.inner.janitor.notify_one();
    }

    /// Finishes the removal of its name.
    fn left(&self) {
        // Closing the server waits for the last lease.
        self.inner.released.notify_waiters();
        tracing::info!(name = self.name(), "unpublished");
    }

    /// Removes the name at once, as dropping does, asks the holders to release the memory, if that was not done before, and keeps
    /// listening to them.
    pub fn leave(&self) -> UnconfirmedRelease {
        let id = self.publication.id;
        let mut state = self.inner.state();
        if (state.publications.get(&id)).is_some_and(|registered| !registered.closing) {
            state.withdraw(id, Duration::ZERO);
        }
        let is_named = state.take_name(id);
        if let Some(registered) = state.publications.get_mut(&id) {
            let memory = Arc::make_mut(&mut registered.description);
            memory.parts = Vec::new();
        }
        drop(state);
        if is_named {
            self.left();
        }
        UnconfirmedRelease {
            inner: Arc::clone(&self.inner),
            publication: Arc::clone(&self.publication),
        }
    }

    /// Removes the name for new importers, asks the holders to release the memory, and returns it when all
    /// have. From then on the publication holds none of it: dropping the result too frees a heap's block.
    ///
    /// A holder on this machine also counts as gone when the process that fetched the memory has ended. A
    /// forked child of it, or a process that it passed the fd to, may still have the memory mapped. Do not
    /// reuse the memory for other data if your importers fork or pass fds on. The allocator service discards
    /// such memory.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if it was withdrawn before.
    /// [`StillHeld`](crate::MemoryError::StillHeld) with the holders, at the deadline or when only silent
    /// holders are left that may still have it mapped. The name stays closed then: withdraw again, or drop the
    /// publication. Fetches that are not decided yet, and handles that the server still has open, are waited for up to
    /// [`Limits::write`](crate::Limits::write) longer. If the server has ended while there were holders, these are the holders of that moment: the
    /// server no longer hears of them.
    ///
    /// # Cancel safety
    /// If dropped before completion, the name stays closed and the recall stands.
    pub async fn withdraw(&self, within: Duration) -> Result<Shared> {
        self.vacate(within).await?;
        self.publication.take()
    }

    /// As [`withdraw`](Self::withdraw), but the publication keeps the memory.
    pub async fn vacate(&self, within: Duration) -> Result<()> {
        let publication = &self.publication;
        let until = deadline(within);
        let late = deadline(within.saturating_add(self.inner.options.limits.write));
        let still_held = |holders| {
            let name = self.name().into();
            Error::from(MemoryError::StillHeld { name, holders })
        };
        self.inner.state().withdraw(publication.id, within);
        tracing::info!(name = self.name(), "withdrawing");
        loop {
            let changed = publication.changed.notified();
            {
                let state = self.inner.state();
                if let Some(holders) = publication.left_held.get() {
                    return Err(still_held(holders.clone()));
                }
                if !state.is_held(publication.id) {
                    break;
                }
                let only_silent = state.count(publication.id) == 0;
                // Listed at the end alone: each release wakes this, and there may be many holders.
                if only_silent || Instant::now() >= until {
                    let (holders, more) = state.holders(publication.id);
                    return Err(still_held(describe(&holders, more)));
                }
            }
            let _ = tokio::time::timeout_at(until, changed).await;
        }
        // Nothing is granted any more, and most handles are just being closed.
        let closed = publication.exports_end();
        if tokio::time::timeout_at(late, closed).await.is_err() {
            return Err(still_held(vec![UNDECIDED.into()]));
        }
        self.inner.state().unpublish(publication.id, "");
        Ok(())
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        let id = self.publication.id;
        let mut state = self.inner.state();
        if state.take_name(id) {
            state.unpublish(id, WITHDRAWN);
            drop(state);
            self.left();
        } else {
            drop(state);
            // An `UnconfirmedRelease` does not keep the memory.
            let _ = self.publication.take();
        }
    }
}

/// What keeps memory without holders.
const UNDECIDED: &str = "a fetch that is not decided yet, or handles that are being sent";

/// Why leases end at once.
const WITHDRAWN: &str = "the exporter has withdrawn it";

/// Memory whose name is gone while holders are left. Dropping it stops the tracking of these holders.
///
/// It does not keep the memory itself.
pub struct UnconfirmedRelease {
    inner: Arc<ServerCore>,
    publication: Arc<Publication>,
}

impl UnconfirmedRelease {
    /// Waits until every holder has said that it released the memory, or its process on this machine has ended.
    /// Returns `false` if the server has ended before.
    ///
    /// # Cancel safety
    /// It may be dropped and called again.
    pub async fn resolved(&self) -> bool {
        let publication = &self.publication;
        let resolved = async {
            loop {
                let changed = publication.changed.notified();
                if !self.inner.state().is_held(publication.id) {
                    break;
                }
                changed.await;
            }
            publication.exports_end().await;
        };
        // A server that has ended knows of no holders.
        tokio::select! {
            biased;
            () = self.inner.ended.cancelled() => false,
            () = resolved => true,
        }
    }

    /// Returns the peers of the holders that are remembered: live ones first, then in the order of their grants.
    pub fn peers(&self) -> Vec<PeerName> {
        let (holders, _) = self.inner.state().holders(self.publication.id);
        holders.into_iter().map(|holder| holder.peer).collect()
    }
}

impl Drop for UnconfirmedRelease {
    fn drop(&mut self) {
        (self.inner.state()).unpublish(self.publication.id, WITHDRAWN);
        // Closing the server waits for the last lease.
        self.inner.released.notify_waiters();
    }
}
