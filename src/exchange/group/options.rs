//! A rank's contribution, and how long it waits.

use std::time::Duration;

use super::Admission;
use crate::driver::Access;
use crate::ledger::Site;
use crate::setters::setters;
use crate::share::{ImportOptions, Peers, Shared};
use crate::{Address, Limits, Security, Who};

/// When the other ranks' memory is mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Map {
    /// All of it before the join returns: a rank whose memory cannot be mapped fails the join.
    #[default]
    All,
    /// Each rank's memory at its first use.
    Lazy,
}

/// Where the group's server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// This rank starts it, at the group's address. It ends when that rank leaves. If the rank drops its
    /// group instead, the server [lingers](GroupOptions::linger) for the others.
    Rank(u32),
    /// It already runs at the group's address, in its own process.
    Elsewhere,
}

impl Default for Host {
    /// Returns rank 0.
    fn default() -> Self {
        Self::Rank(0)
    }
}

/// Options of a group, for one rank; [`join`](Self::join) joins it.
///
/// Name, size, address, admission and host are the same for all ranks.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `join`"]
pub struct GroupOptions {
    pub(super) name: String,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) address: Address,
    pub(super) host: Host,
    pub(super) security: Security,
    pub(super) peers: Peers,
    pub(super) admission: Admission,
    pub(super) who: Option<Who>,
    pub(super) limits: Limits,
    pub(super) deadline: Duration,
    pub(super) lease: Duration,
    pub(super) linger: Duration,
    pub(super) memory: Option<Shared>,
    pub(super) access: Access,
    pub(super) import: ImportOptions,
    pub(super) map: Map,
    /// The program's call, for the ledger.
    pub(super) site: Site,
}

impl GroupOptions {
    setters! {
        /// Sets the access that the other ranks are asked to respect in this rank's memory: by default read and
        /// write.
        access: Access;

        /// Sets the access to the other ranks' memory in this process: by default for the host and all GPUs.
        import: ImportOptions;

        /// Sets when the other ranks' memory is mapped: by default before the join returns.
        map: Map;

        /// Sets which rank starts the group's server, or that it is elsewhere: by default rank 0.
        host: Host;

        /// Sets how connections over TCP are protected: by default not at all, which is allowed only on loopback.
        security: Security;

        /// Sets which users' processes are accepted over Unix sockets: by default the same user's.
        peers: Peers;

        /// Sets the limits here and at the server that this rank starts.
        limits: Limits;

        /// Sets how long to wait for the other ranks: 1 minute by default. The shortest deadline of the ranks
        /// that have come applies to all of them. Once all have come, the exchange itself may take
        /// [`Limits::request`](Limits) longer.
        deadline: Duration;

        /// Sets after how long without a sign of life a rank counts as lost, if this rank starts the server: 10 s
        /// by default.
        lease: Duration;

        /// Sets how long this rank's server continues in the background for the other ranks when the
        /// [`Group`](super::Group) is dropped instead of [left](super::Group::leave). 1 minute by default, at most
        /// [`Limits::wait`](Limits). The server ends within seconds after the last rank has left or is lost.
        ///
        /// The rank's own memory is released at the drop. If the ranks share by fds, the server holds the fds of
        /// that memory for [`Limits::request`](Limits) plus a lease after the exchange, or until it ends. The
        /// group's address stays in use as long.
        linger: Duration;
    }

    /// Sets the memory that this rank shares. Without it, the rank only maps the others' memory.
    pub fn memory(mut self, memory: impl Into<Shared>) -> Self {
        self.memory = Some(memory.into());
        self
    }

    /// Sets which peers may ask to join if this rank starts the server, in addition to the user that runs it;
    /// others are refused at once.
    ///
    /// By default: only that user with [`Admission::SamePeer`], the listed peers with [`Admission::Peers`],
    /// and with [`Admission::Secret`] every peer that [`security`](Self::security) and [`peers`](Self::peers)
    /// accept. Ranks on the server's own machine connect over a Unix socket, as `uid:…`.
    pub fn who(mut self, who: Who) -> Self {
        self.who = Some(who);
        self
    }
}
