//! The state of a round.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::collective::{Collective, Given};
use super::identity::Identity;
use super::roster::PageLimits;
use super::told::Waiter;
use crate::account::Charge;
use crate::driver::HandleType;
use crate::protocol::{Incomplete, MAX_GATHER_TOTAL};
use crate::share::queue;
use crate::share::{BootId, Description};
use crate::{Limits, PeerName, Refusal};

/// The longest time between two checks of the clock while a rank waits.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// The most reasons that a rank gives for unsupported handle types.
pub(super) const MAX_REASONS: usize = 8;

/// The limits that a server sets its groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Rounds at once, including those whose ranks have not left yet.
    pub groups: usize,
    /// Rounds at once in which one peer has ranks that have not left.
    pub groups_per_peer: usize,
    /// Rounds at once of one session.
    pub groups_per_session: usize,
    /// Ranks of a group.
    pub size: u32,
    /// Parts of all ranks' memories together.
    pub parts: usize,
    /// Bytes of all ranks together in one gather.
    pub gather_bytes: usize,
    /// The longest time that a rank may wait for the others.
    pub wait: Duration,
    /// The longest time between the agreement and the last rank's handles.
    pub offer: Duration,
    /// How long after the last rank's handles the members are kept for a rank whose connection broke: longer
    /// than a session survives without a connection.
    pub keep: Duration,
    /// Bytes of members in a frame.
    pub page_bytes: usize,
    /// Fds with a frame: at most 253 (`SCM_MAX_FD`).
    pub page_fds: usize,
}

/// The most bytes of a gather's pages that are written to all ranks at the same time. With their copies that
/// is 100 MiB, which `bytes_per_peer` has room for by default, beside everything else that is kept for 1024
/// ranks of one peer. Three members of 16 KiB fit into each page of so many ranks.
const PAGES: usize = 50 << 20;

/// The most fds that the kernel passes with one message: `SCM_MAX_FD`.
const MAX_FDS: u32 = 253;

impl Rules {
    /// Returns the rules for a server's limits. `lease` is the time that it gives a session to resume.
    pub fn new(limits: &Limits, lease: Duration) -> Self {
        Self {
            groups: limits.groups,
            groups_per_peer: limits.groups_per_peer,
            groups_per_session: 64,
            size: limits.group_size,
            // 128 ranks with the most chunks of one buffer: 151 MB for descriptions and handles, also charged to the peers.
            parts: 1 << 18,
            gather_bytes: MAX_GATHER_TOTAL,
            wait: limits.wait,
            offer: limits.request,
            keep: limits.request.saturating_add(lease),
            // The rest of the frame is for the fields around the members.
            page_bytes: limits.frame_bytes as usize / 2,
            page_fds: limits.frame_fds.min(MAX_FDS) as usize,
        }
    }

    /// Returns the limits of a page of members.
    pub(super) const fn pages(&self) -> PageLimits {
        PageLimits {
            bytes: self.page_bytes,
            fds: self.page_fds,
        }
    }

    /// Returns the limits of a gather's pages in a group of `size` ranks.
    pub(super) fn gather_pages(&self, size: u32) -> PageLimits {
        let mut limits = self.pages();
        limits.bytes = limits.bytes.min(PAGES / size.max(1) as usize);
        limits
    }
}

#[cfg(test)]
impl Default for Rules {
    fn default() -> Self {
        Self {
            offer: Duration::from_secs(10),
            keep: Duration::from_secs(20),
            ..Self::new(&Limits::default(), Duration::from_secs(10))
        }
    }
}

/// The peer and session behind a request.
#[derive(Clone, Debug)]
pub(super) struct Asker {
    pub session: u64,
    pub peer: PeerName,
    pub boot: BootId,
    /// Whether fds can be passed on its connection.
    pub local: bool,
    /// Whether the rank takes fds from queues.
    pub queues: bool,
    /// Covers the memory kept for the rank.
    #[expect(dead_code, reason = "it is there to be dropped")]
    pub charge: Option<Arc<Charge>>,
}

/// The state of a rank in a complete round.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Stay {
    Here,
    Left,
    Lost,
}

pub(super) struct Seat {
    pub(super) asker: Asker,
    pub(super) can: Vec<HandleType>,
    pub(super) cannot: Vec<String>,
    pub(super) memory: Option<Description>,
    /// The end of the waiter's wait: for the others to join, or for them to leave.
    pub(super) deadline: Duration,
    pub(super) waiter: Option<Waiter>,
    pub(super) given: Option<Given>,
    pub(super) stay: Stay,
    /// Its peer has lost the right since: it is sent no members.
    pub(super) revoked: bool,
}

impl Seat {
    pub(super) fn parts(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.parts.len())
    }

    /// Returns how many handles the rank offers.
    pub(super) fn handles(&self, sources: bool) -> usize {
        match sources && queue::is_needed(self.parts()) {
            true => 1,
            false => self.parts(),
        }
    }
}

pub(super) enum Phase {
    Gathering,
    Offering {
        via: HandleType,
        until: Duration,
    },
    /// The members are in the round's [`Collective`].
    Complete,
}

pub(super) struct Round {
    pub(super) identity: Identity,
    /// The group's name.
    pub(super) group: String,
    pub(super) size: u32,
    /// Boxed one by one: a map node has room for at least eleven, and most of a peer's groups may have one.
    pub(super) seats: BTreeMap<u32, Box<Seat>>,
    pub(super) phase: Phase,
    /// The gathers of its ranks once it is complete.
    pub(super) collective: Collective,
    /// The time under which it is listed in the deadlines.
    pub(super) scheduled: Option<Duration>,
}

impl Round {
    pub(super) fn seat_of(&self, session: u64) -> Option<u32> {
        let mut seats = self.seats.iter();
        let (rank, _) = seats.find(|(_, seat)| seat.asker.session == session)?;
        Some(*rank)
    }

    pub(super) fn missing(&self) -> Vec<u32> {
        (0..self.size)
            .filter(|rank| !self.seats.contains_key(rank))
            .collect()
    }

    pub(super) fn ranks(&self, of: impl Fn(&Seat) -> bool) -> Vec<u32> {
        let seats = self.seats.iter().filter(|(_, seat)| of(seat));
        seats.map(|(rank, _)| *rank).collect()
    }

    pub(super) fn incomplete(
        &self,
        reason: Refusal,
        detail: impl Into<String>,
        ranks: Vec<u32>,
    ) -> Incomplete {
        Incomplete {
            reason: reason.word().into(),
            detail: detail.into(),
            ranks,
            size: self.size,
            reasons: Vec::new(),
        }
    }

    /// Returns the next time at which something changes without a request.
    pub(super) fn next(&self) -> Option<Duration> {
        let waiting = self.seats.values().filter(|seat| seat.waiter.is_some());
        let waits = waiting.map(|seat| seat.deadline).min();
        match &self.phase {
            Phase::Gathering => waits,
            Phase::Complete => waits.into_iter().chain(self.collective.next()).min(),
            Phase::Offering { until, .. } => Some(*until),
        }
    }
}
