//! Leased memory, before and after its import.

use std::sync::Arc;

use super::lease::Grant;
use super::session::ClientSession;
use super::{LeaseState, Proof, open};
use crate::accessors::cpu_accessors;
use crate::driver::{Access, DevicePtr, HandleType, Location, ShareableHandle};
use crate::ledger::{Party, Site};
use crate::memory::{CpuView, impl_cpu_memory, memory_through};
use crate::share::{Description, ImportOptions, ImportedBuffer, Origin, PartHandles};
use crate::{End, Error, MemoryResult, Owner, PeerName, Result};

/// Memory that is leased and not imported yet; dropping it releases the lease.
#[derive(Debug)]
pub struct Leased {
    // In this order: the handles are closed before the lease is released.
    pub(super) handles: PartHandles,
    pub(super) grant: Grant,
    pub(super) description: Description,
    pub(super) via: HandleType,
    /// The program's call, for the ledger.
    pub(super) site: Site,
}

impl Leased {
    /// Returns the name's owner, as the server reports it.
    pub const fn owner(&self) -> &Owner {
        &self.grant.owner
    }

    /// Returns the exporter's description of the memory.
    pub const fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the handles, one for each part: secrets. Code that imports them without
    /// [`import`](Self::import) unmaps the memory before this is dropped.
    pub fn handles(&self) -> &[ShareableHandle] {
        self.handles.here()
    }

    /// Returns the type of the handles.
    pub const fn via(&self) -> HandleType {
        self.via
    }

    /// Receives the fds that come through a queue, so that all are here.
    pub(super) async fn receive(mut self) -> Result<Self> {
        let handles = std::mem::replace(&mut self.handles, Vec::new().into());
        let count = self.description.parts.len();
        let handles = open::attempt("receiving handles", move || handles.all(count)).await?;
        self.handles = handles?.into();
        Ok(self)
    }

    /// Ends the lease, and waits until the exporter has recorded it. Code that imported the handles has
    /// unmapped the memory before.
    ///
    /// # Errors
    /// Those of [`RemoteBuffer::release`].
    ///
    /// # Cancel safety
    /// If dropped before completion, the lease ends anyway.
    pub async fn release(self) -> Result<()> {
        drop(self.handles);
        self.grant.lease.release(self.grant.name).await
    }

    /// Imports the memory, maps and grants it.
    ///
    /// # Errors
    /// [`Error::Import`], which says at which end to look. The lease is released then.
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing stays leased or mapped.
    pub async fn import(self, options: ImportOptions) -> Result<RemoteBuffer> {
        let session = self.grant.lease.keep.session().clone();
        let driver = session.driver()?.clone();
        let terms = session.terms();
        let options = match origin(&terms.server) {
            Some(origin) => options.origin(origin),
            None => options,
        };
        let work = move || {
            let Self {
                handles,
                grant,
                description,
                via,
                site,
            } = self;
            let server = Party {
                pid: terms.pid,
                name: terms.peer.clone(),
            };
            let options = options.sender(server).or_label(grant.name.as_str());
            let options = options.or_called_at(site);
            // On every path the lease is dropped after the import.
            let imported = options.import_from(&driver, &description, handles);
            let memory = imported.map_err(|error| Error::Import {
                what: format!("'{}'", grant.name),
                peer: terms.peer.clone(),
                end: End::of(&error, via, terms.welcome.boot == session.dial.boot),
                source: Box::new(error),
            })?;
            let proof = Proof::none(match via {
                HandleType::PosixFd => "a POSIX fd names memory of this machine",
                HandleType::Fabric => "no probe was asked for",
            });
            Ok(RemoteBuffer {
                memory,
                grant,
                proof,
            })
        };
        // The driver takes up to seconds for many gigabytes.
        open::elsewhere(work).await?
    }
}

/// Returns the origin under which imports of this server's memory are shared: only an authenticated one.
fn origin(server: &PeerName) -> Option<Origin> {
    match server {
        PeerName::Certificate(name) | PeerName::Spiffe(name) => {
            Some(Origin::Peer(name.to_string()))
        }
        PeerName::User(uid) => Some(Origin::User(*uid)),
        _ => None,
    }
}

/// Another process's memory, mapped here, with a lease on it: the exporter knows that this process holds it.
///
/// Dropping it unmaps the memory and then releases the lease, in the background. GPU work that uses the
/// memory must have finished before. Unmapping takes the driver's time, about 15 ms for a gigabyte, which
/// [`release`](Self::release) spends on another thread.
#[derive(Debug)]
pub struct RemoteBuffer {
    // In this order: unmapped first, then released.
    pub(super) memory: ImportedBuffer,
    pub(super) grant: Grant,
    pub(super) proof: Proof,
}

impl RemoteBuffer {
    /// Returns the name that it was fetched by.
    pub fn name(&self) -> &str {
        &self.grant.name
    }

    /// Returns the name's owner, as the server reports it. See
    /// [`FetchOptions::expect_owner`](super::FetchOptions::expect_owner).
    pub const fn owner(&self) -> &Owner {
        &self.grant.owner
    }

    /// Returns the exporter's description of it.
    pub fn description(&self) -> &Description {
        self.memory.description()
    }

    /// Returns the type of handle that it was imported through.
    pub fn via(&self) -> HandleType {
        self.memory.via()
    }

    /// Returns why it was not imported by fabric handle, if this machine, the exporter's or the fabric does
    /// not support that. `None` if it was, or if a POSIX fd was simply shorter.
    pub fn no_fabric(&self) -> Option<&str> {
        self.grant.no_fabric.as_deref()
    }

    /// Returns the result of the probe at the fetch, or [why nothing was proved](Proof::why_not).
    pub const fn proved(&self) -> &Proof {
        &self.proof
    }

    /// Returns the state of the lease.
    pub fn state(&self) -> LeaseState {
        self.grant.lease.state()
    }

    /// Waits for a state that neither this nor [`state`](Self::state) has returned yet; once the lease is
    /// [`Lost`](LeaseState::Lost), it returns at once.
    ///
    /// # Cancel safety
    /// No state is missed.
    pub async fn changed(&self) -> LeaseState {
        self.grant.lease.changed().await
    }

    /// Unmaps the memory, ends the lease, and waits until the exporter has recorded it. GPU work that uses
    /// the memory must have finished.
    ///
    /// # Errors
    /// Why the lease was [`Lost`](LeaseState::Lost) before, or the connection while waiting;
    /// [`TimedOut`](crate::ShareError::TimedOut). The memory is unmapped anyway.
    ///
    /// # Cancel safety
    /// If dropped before completion, unmapping and releasing continue in the background.
    pub async fn release(self) -> Result<()> {
        let Self { memory, grant, .. } = self;
        let noted = open::elsewhere(move || {
            drop(memory);
            grant.lease.release(grant.name)
        });
        noted.await?.await
    }

    pub(super) fn session(&self) -> &Arc<ClientSession> {
        self.grant.lease.keep.session()
    }

    /// Returns the access of `location`, as the driver reports it.
    ///
    /// # Errors
    /// As [`ImportedBuffer::access`].
    pub fn access(&self, location: impl Into<Location>) -> MemoryResult<Access> {
        self.memory.access(location)
    }

    /// Returns the CPU's view of the memory.
    ///
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible) unless the host may at least read.
    pub fn cpu(&self) -> MemoryResult<CpuView<'_>> {
        self.memory.cpu()
    }

    cpu_accessors!();

    /// Returns the address, the same for every GPU and, on a host node, for the CPU. It is valid in this
    /// process: another process has other addresses for the same memory.
    pub fn device_ptr(&self) -> DevicePtr {
        self.memory.device_ptr()
    }

    /// Returns the number of usable bytes.
    pub fn len(&self) -> u64 {
        self.memory.len()
    }

    /// Returns `false`: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl_cpu_memory!(RemoteBuffer);

// The import that it owns lives as long.
memory_through!(unsafe impl for RemoteBuffer, |this| this.memory);
