//! The entries of the table.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};

use super::holder::Holder;
use crate::PeerName;
use crate::account::Charge;
use crate::server::machines::Machine;
use crate::server::process::Process;

/// A lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::server) struct LeaseRecord {
    /// For an expired lease, the session that has ended.
    pub session: u64,
    pub publication: u64,
    pub holder: Holder,
    /// The offset of its probe word, in bytes from the memory's start.
    pub probe: Option<u64>,
    /// The process that got the fds, if the kernel reports it.
    pub process: Option<Process>,
    /// The machine that the session began on.
    pub machine: Option<Machine>,
    /// Whether handles have been sent to it, or may be in flight: without them nothing is mapped.
    pub handed: bool,
}

/// A lease, and the charge for it.
#[derive(Debug)]
pub(in crate::server) struct Record {
    /// Boxed, so that the table has short entries: its capacity may be twice the number of leases, and three
    /// times that while it grows.
    pub(super) lease: Box<LeaseRecord>,
    /// Returned when the lease is forgotten.
    pub charge: Option<Charge>,
}

impl Deref for Record {
    type Target = LeaseRecord;

    fn deref(&self) -> &LeaseRecord {
        &self.lease
    }
}

impl DerefMut for Record {
    fn deref_mut(&mut self) -> &mut LeaseRecord {
        &mut self.lease
    }
}

/// A session that has ended, and the leases that ended with it.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::server) struct EndedSession {
    pub session: u64,
    pub peer: PeerName,
    pub leases: Vec<LeaseRecord>,
}

/// Why a lease was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) enum NoLease {
    /// The session has ended.
    NoSession,
    /// The peer has reached its limit.
    Full,
}

#[derive(Debug)]
pub(super) struct SessionRecord {
    pub(super) peer: PeerName,
    pub(super) machine: Option<Machine>,
    pub(super) leases: BTreeSet<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Holders {
    pub(super) live: BTreeSet<u64>,
    pub(super) expired: BTreeSet<u64>,
    /// Expired leases that are only counted.
    pub(super) more: usize,
    /// Expired leases that are only counted, and whose processes have ended.
    pub(super) ended: usize,
}

impl Holders {
    pub(super) fn is_empty(&self) -> bool {
        self.live.is_empty() && self.expired.is_empty() && self.more + self.ended == 0
    }
}
