//! The entries of the table.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::holder::Holder;
use crate::PeerName;
use crate::account::Charge;
use crate::server::process::Process;

/// A lease.
#[derive(Clone, Debug)]
pub(in crate::server) struct LeaseRecord {
    /// For an expired lease, the session that has ended.
    pub session: u64,
    pub publication: u64,
    pub holder: Holder,
    /// The offset of its probe word, in bytes from the memory's start.
    pub probe: Option<u64>,
    /// The process that got the fds, if the kernel reports it.
    pub process: Option<Process>,
    /// The charge against the limit on the peer's leases, while it is live.
    pub counted: Option<Arc<Charge>>,
    /// The charge for its bytes, until the lease is forgotten.
    pub charge: Option<Arc<Charge>>,
}

/// A session that has ended, and the leases that ended with it.
#[derive(Debug)]
pub(in crate::server) struct EndedSession {
    pub session: u64,
    pub peer: PeerName,
    pub leases: Vec<LeaseRecord>,
}

#[derive(Debug)]
pub(super) struct SessionRecord {
    pub(super) peer: PeerName,
    pub(super) leases: BTreeSet<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Holders {
    pub(super) live: BTreeSet<u64>,
    pub(super) expired: BTreeSet<u64>,
    /// Expired leases that are only counted.
    pub(super) more: usize,
}

impl Holders {
    pub(super) fn is_empty(&self) -> bool {
        self.live.is_empty() && self.expired.is_empty() && self.more == 0
    }
}
