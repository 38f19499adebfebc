//! What a round is made of.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::collective::Collective;
use super::identity::Identity;
use super::roster::Roster;
use crate::Refusal;
use crate::driver::HandleType;
use crate::exchange::account::Charge;
use crate::exchange::protocol::{Agreed, Incomplete, Refused, Secret};
use crate::exchange::transport::HeldFd;
use crate::exchange::{Limits, PeerName};
use crate::share::{BootId, Description};

/// A request that waits for its answer.
pub(super) type Waiter = u64;

/// The longest between two looks at the clock while somebody waits.
pub(super) const TICK: Duration = Duration::from_secs(1);

/// The most reasons that a rank gives for what it cannot do.
pub(super) const MAX_REASONS: usize = 8;

/// What a server allows its groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Rounds at once, those included whose ranks have not left yet.
    pub groups: usize,
    /// Rounds at once in which one peer has ranks that have not left.
    pub groups_per_peer: usize,
    /// Rounds at once of one session.
    pub groups_per_session: usize,
    /// Ranks of a group.
    pub size: u32,
    /// Parts of all ranks' memories together.
    pub parts: usize,
    /// The longest that a rank may wait for the others.
    pub wait: Duration,
    /// The longest between the agreement and the last rank's handles.
    pub offer: Duration,
    /// How long after the last rank's handles the members are told once more to a rank whose
    /// connection broke: longer than a session lives without one.
    pub keep: Duration,
    /// Bytes of members in a frame.
    pub page_bytes: usize,
    /// Fds with a frame: at most 253 (`SCM_MAX_FD`).
    pub page_fds: usize,
}

/// The most fds that the kernel passes with one message: `SCM_MAX_FD`.
const MAX_FDS: u32 = 253;

impl Rules {
    /// The rules that fit a server's limits, and the time that it gives a session to come back.
    pub fn new(limits: &Limits, lease: Duration) -> Self {
        Self {
            groups: limits.groups,
            groups_per_peer: limits.groups_per_peer,
            groups_per_session: 64,
            size: limits.group_size,
            parts: 1 << 16,
            wait: limits.wait,
            offer: limits.request,
            keep: limits.request.saturating_add(lease),
            // The rest of the frame is for what goes around it.
            page_bytes: limits.frame_bytes as usize / 2,
            page_fds: limits.frame_fds.min(MAX_FDS) as usize,
        }
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

/// Who asks.
#[derive(Clone, Debug)]
pub(super) struct Asker {
    pub session: u64,
    pub peer: PeerName,
    pub boot: BootId,
    /// Whether fds can be passed on its connection.
    pub local: bool,
    /// For what is kept of the rank.
    #[expect(dead_code, reason = "it is there to be dropped")]
    pub charge: Option<Arc<Charge>>,
}

/// What to tell a waiter.
#[derive(Clone)]
pub(super) enum Told {
    Agreed(Agreed),
    Members(Arc<Roster>, usize),
    Done,
    Incomplete(Arc<Incomplete>),
    Refused(Refused),
}

pub(super) fn refused(reason: Refusal, detail: impl Into<String>) -> Refused {
    Refused {
        reason: reason.word().into(),
        detail: detail.into(),
    }
}

pub(super) enum Given {
    Fabric(Vec<Secret>),
    /// Counted as their peer's as long as the round keeps them.
    Fds(Vec<HeldFd>),
}

/// Where a rank of a complete round is.
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
    /// Until when the waiter waits: for the others to join, or for them to leave.
    pub(super) deadline: Duration,
    pub(super) waiter: Option<Waiter>,
    pub(super) given: Option<Given>,
    pub(super) stay: Stay,
    /// Its peer has lost the right since: it is told no members.
    pub(super) revoked: bool,
}

impl Seat {
    pub(super) fn parts(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.parts.len())
    }
}

/// Members that can still be asked for.
pub(super) struct Kept {
    pub(super) roster: Arc<Roster>,
    pub(super) until: Duration,
}

pub(super) enum Phase {
    Gathering,
    Offering {
        via: HandleType,
        until: Duration,
    },
    /// The roster is there as long as a rank may have to be told it once more.
    Complete(Option<Kept>),
}

pub(super) struct Round {
    pub(super) identity: Identity,
    /// The group's name.
    pub(super) group: String,
    pub(super) size: u32,
    /// Each by itself: the map has room for eleven at least, and most of a peer's groups may have one.
    pub(super) seats: BTreeMap<u32, Box<Seat>>,
    pub(super) phase: Phase,
    /// What its ranks gather once it is complete.
    pub(super) collective: Collective,
    /// Under what time it is among the deadlines.
    pub(super) scheduled: Option<Duration>,
}

impl Round {
    pub(super) fn seat_of(&self, session: u64) -> Option<u32> {
        let mut seats = self.seats.iter();
        seats
            .find(|(_, seat)| seat.asker.session == session)
            .map(|(rank, _)| *rank)
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

    /// When time alone changes something.
    pub(super) fn next(&self) -> Option<Duration> {
        let waiting = self.seats.values().filter(|seat| seat.waiter.is_some());
        let waits = waiting.map(|seat| seat.deadline).min();
        match &self.phase {
            Phase::Gathering => waits,
            Phase::Complete(kept) => {
                let kept = kept.as_ref().map(|kept| kept.until);
                [waits, kept, self.collective.next()]
                    .into_iter()
                    .flatten()
                    .min()
            }
            Phase::Offering { until, .. } => Some(*until),
        }
    }
}
