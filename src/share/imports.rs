//! What a process has imported, so that the same memory is imported once.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Identity;
use super::cache::Cache;
use super::imported::Mapped;
use crate::Driver;
use crate::driver::AccessDesc;
use crate::per_driver::PerDriver;
use crate::vmm::PhysicalMemory;

/// Who sent a description, as far as that is proved: by the kernel, or by a certificate.
///
/// Memory is recognised by the identity that its description claims, and anybody can claim
/// anything. If a claim alone counted, a peer could name another's memory as its own, and what this
/// process then writes to the one it would write to the other. So imports are shared only between
/// descriptions of one origin, which at worst deceives itself. Take a name that the peer has proved
/// to have, never one that it only says.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// Processes of one user of this machine: [`Credentials::uid`](super::Credentials::uid). They
    /// are not protected against each other, as they are not elsewhere in the system.
    User(u32),
    /// A peer with a proved name: that of its certificate.
    Peer(String),
}

/// Whose claims an identity is among.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Origin(Origin),
    /// Nobody else's.
    Unshared(u64),
}

impl Source {
    pub(super) fn unshared() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::Unshared(NEXT.fetch_add(1, Relaxed))
    }
}

/// Names imported physical memory. The size belongs to it, so that one wrong claim, which the driver
/// refuses to map, does not stand in the way of a right one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PartKey {
    pub(super) source: Source,
    pub(super) identity: Identity,
    pub(super) bytes: u64,
}

/// Names a mapping of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct MappedKey {
    pub(super) parts: Vec<PartKey>,
    /// The host first, then GPUs by their ordinals, nobody twice.
    pub(super) access: Vec<AccessDesc>,
    /// Whether it may be without the host, though that is in `access`.
    pub(super) optional_host: bool,
}

/// The imports of one driver. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Imports {
    pub(super) parts: Cache<PartKey, PhysicalMemory>,
    pub(super) mapped: Cache<MappedKey, Mapped>,
}

impl Imports {
    /// Those of `driver`.
    pub(super) fn of(driver: &Driver) -> Self {
        static IMPORTS: PerDriver<Imports> = PerDriver::new();
        IMPORTS.of(driver)
    }
}
