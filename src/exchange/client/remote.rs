//! Imported memory and the lease on it.

use std::sync::Arc;

use super::lease::Grant;
use super::session::ClientSession;
use super::{LeaseState, Proof, open};
use crate::accessors::cpu_accessors;
use crate::driver::{Access, DevicePtr, HandleType, Location};
use crate::memory::{CpuView, impl_cpu_memory, memory_through};
use crate::share::{Description, ImportedBuffer};
use crate::{MemoryResult, Owner, Result};

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
