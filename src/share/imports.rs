//! The imports of a process, so that the same memory is imported only once.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Identity;
use super::cache::Cache;
use super::imported::Mapped;
use crate::Driver;
use crate::driver::AccessDesc;
use crate::per_driver::PerDriver;
use crate::vmm::PhysicalMemory;

/// The authenticated sender of a description: the kernel or a certificate proves it.
///
/// Memory is recognised by the identity that its description claims, and any peer can claim any identity. If
/// the claim alone counted, a peer could present its own memory as another's, and this process would write
/// data for the other into it. So only descriptions of one origin share imports, and an origin can deceive
/// only itself. Use a name that the peer has proved, never one that it merely states.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// Processes of one user of this machine: [`Credentials::uid`](super::Credentials::uid). The system does
    /// not protect them against each other anyway.
    User(u32),
    /// A peer with a proved name: that of its certificate.
    Peer(String),
}

/// The scope of an identity's claims.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Origin(Origin),
    /// Not shared with any other import.
    Unshared(u64),
}

impl Source {
    pub(super) fn unshared() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::Unshared(NEXT.fetch_add(1, Relaxed))
    }
}

/// The key of imported physical memory. It includes the size, so that a wrong claim, which the driver refuses
/// to map, does not block a right one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PartKey {
    pub(super) source: Source,
    pub(super) identity: Identity,
    pub(super) bytes: u64,
}

/// The key of a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct MappedKey {
    pub(super) parts: Vec<PartKey>,
    /// The host first, then GPUs by their ordinals, each location once.
    pub(super) access: Vec<AccessDesc>,
    /// Whether the mapping may do without the host's access, although `access` lists it.
    pub(super) optional_host: bool,
}

/// The imports of one driver. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Imports {
    pub(super) parts: Cache<PartKey, PhysicalMemory>,
    pub(super) mapped: Cache<MappedKey, Mapped>,
}

impl Imports {
    /// Returns the imports of `driver`.
    pub(super) fn of(driver: &Driver) -> Self {
        static IMPORTS: PerDriver<Imports> = PerDriver::new();
        IMPORTS.of(driver)
    }
}
