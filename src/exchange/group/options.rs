//! What a rank brings, and how long it waits.

use std::time::Duration;

use super::{Admission, Group, join};
use crate::Result;
use crate::driver::{Access, Driver};
use crate::exchange::{Address, Limits, Security, Who};
use crate::share::{ImportOptions, Peers, Shared};

/// When the other ranks' memory is mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Map {
    /// All of it before the group is joined: a rank whose memory cannot be mapped fails the join.
    #[default]
    All,
    /// Each rank's when it is first asked for.
    Lazy,
}

/// Where the group's server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// This rank starts it, at the group's address. It ends when that rank leaves; where its group
    /// is dropped instead, it [lingers](GroupOptions::linger) for the others.
    Rank(u32),
    /// It runs at the group's address already, in a process of its own.
    Elsewhere,
}

impl Default for Host {
    /// Rank 0.
    fn default() -> Self {
        Self::Rank(0)
    }
}

/// What a group is to be, from one rank's view; [`join`](Self::join) joins it.
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
}

impl GroupOptions {
    pub(super) fn new(
        name: String,
        rank: u32,
        size: u32,
        address: Address,
        admission: Admission,
    ) -> Self {
        Self {
            name,
            rank,
            size,
            address,
            host: Host::default(),
            security: Security::Plain,
            peers: Peers::same_user(),
            admission,
            who: None,
            limits: Limits::default(),
            deadline: Duration::from_secs(60),
            lease: Duration::from_secs(10),
            linger: Duration::from_secs(60),
            memory: None,
            access: Access::ReadWrite,
            import: ImportOptions::new(),
            map: Map::default(),
        }
    }

    /// The memory that this rank brings; without it, it only maps the others'.
    pub fn memory(mut self, memory: impl Into<Shared>) -> Self {
        self.memory = Some(memory.into());
        self
    }

    /// What the other ranks are asked to keep to with this rank's memory: reading and writing
    /// without this.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Who may use the other ranks' memory in this process: the host and all GPUs without this.
    pub fn import(mut self, import: ImportOptions) -> Self {
        self.import = import;
        self
    }

    /// When the other ranks' memory is mapped: at once without this.
    pub fn map(mut self, map: Map) -> Self {
        self.map = map;
        self
    }

    /// Which rank starts the group's server, or that it is elsewhere; rank 0 without this.
    pub fn host(mut self, host: Host) -> Self {
        self.host = host;
        self
    }

    /// How connections over TCP are protected: plainly without this, which goes on loopback alone.
    pub fn security(mut self, security: Security) -> Self {
        self.security = security;
        self
    }

    /// Whose processes are talked to over Unix sockets: those of the same user without this.
    pub fn peers(mut self, peers: Peers) -> Self {
        self.peers = peers;
        self
    }

    /// Which peers may ask to join, where this rank starts the server, in addition to the user that
    /// runs it; others are refused at once.
    ///
    /// Without this: with [`Admission::SamePeer`] only that user, with [`Admission::Peers`] those
    /// peers, with [`Admission::Secret`] every peer that [`security`](Self::security) and
    /// [`peers`](Self::peers) let in. Ranks on the server's own machine come over a Unix socket, as
    /// `uid:…`.
    pub fn who(mut self, who: Who) -> Self {
        self.who = Some(who);
        self
    }

    /// How much is allowed, here and at the server that this rank starts.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// How long to wait for the other ranks: a minute without this. The shortest deadline of the
    /// ranks that have come decides for all of them. Once all have come, the exchange itself may
    /// take [`Limits::request`](Limits) longer.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// After how long without a sign of life a rank counts as lost, where this rank starts the
    /// server: 10 s without this.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long the server that this rank starts goes on in the background when its [`Group`] is
    /// dropped instead of [left](Group::leave), for the ranks that stay: a minute without this, at
    /// most [`Limits::wait`](Limits). It ends within seconds of the last rank that leaves or is lost.
    ///
    /// The rank's own memory is let go at the drop; only the fds of it that the server passes on,
    /// where the ranks share by those, are held for [`Limits::request`](Limits) and a lease from
    /// the exchange on, or until the server ends. The group's address is in use as long.
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// Joins the group: returns when all ranks have come and exchanged their handles. All ranks get
    /// the same decision.
    ///
    /// All of it goes through the group's server: two requests of each rank. Answers to the second
    /// hold all members, so that bytes, and they alone, grow with the square of the size, as in
    /// every all-gather: some 250 bytes a member.
    ///
    /// # Errors
    /// To all ranks that have come alike: [`Error::RanksMissing`](crate::Error::RanksMissing) with
    /// those that have not come in time or were lost meanwhile,
    /// [`Error::NoCommonHandle`](crate::Error::NoCommonHandle) with what stands in the way.
    ///
    /// To this one: [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a rank that there
    /// is not; [`Error::Refused`](crate::Error::Refused) with `forbidden` where the server gives this
    /// peer no right to groups of this name, or the admission does not admit this rank itself, and
    /// where the rank is taken, the size is not the others', or a limit is reached; [`Error::LimitReached`](crate::Error::LimitReached) where this
    /// process may not have as many file descriptors as all ranks' memory has parts
    /// (`RLIMIT_NOFILE`); those of connecting and, with [`Map::All`], of importing.
    ///
    /// # Cancel safety
    /// Dropped before it is done, this rank leaves: the others' join fails, unless they have all
    /// that they need already.
    pub async fn join(self, driver: &Driver) -> Result<Group> {
        join::join(self, driver).await
    }
}
