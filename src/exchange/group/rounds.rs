//! The rounds of groups, decided without clocks or sockets: the caller passes in the time and takes out the
//! answers.
//!
//! A round is one life of a group. It gathers until every rank has joined, decides one handle type, collects
//! every rank's handles, and is complete. A failure before that ends it for all its ranks with the same
//! answer, and the next rank that joins begins a new round. There is no state in which one rank of a round
//! gets its members and another gets a failure.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::identity::{Identity, Keys};
use super::outcomes::{Outcome, Outcomes};
use super::present::Present;
use super::rights::Rights;
use super::round::{Phase, Round, Rules, Stay, TICK};
use super::told::{Told, Waiter, Waiters, refused};
use crate::account::shrink;
use crate::protocol::{Admission, Incomplete, Lost, Refused};
use crate::{PeerName, Refusal};

/// All rounds of a server.
pub(super) struct Rounds {
    pub(super) rules: Rules,
    pub(super) rights: Rights,
    pub(super) keys: Keys,
    /// The group for which the server was started: other groups cannot take its place.
    pub(super) own: Option<Identity>,
    pub(super) rounds: HashMap<u64, Round>,
    /// The round of each group that can be joined.
    pub(super) open: HashMap<Identity, u64>,
    pub(super) present: Present,
    pub(super) waiters: Waiters,
    pub(super) deadlines: BTreeSet<(Duration, u64)>,
    pub(super) ended: Outcomes,
    pub(super) news: Vec<(u64, Lost)>,
}

impl Rounds {
    pub(super) fn new(rules: Rules, rights: Rights, keys: Keys) -> Self {
        Self {
            rules,
            rights,
            keys,
            own: None,
            rounds: HashMap::new(),
            open: HashMap::new(),
            present: Present::default(),
            waiters: Waiters::default(),
            deadlines: BTreeSet::new(),
            ended: Outcomes::default(),
            news: Vec::new(),
        }
    }

    /// Takes the answers to waiters and the notices to sessions that are due since the last call.
    #[allow(clippy::type_complexity, reason = "two lists, taken apart at once")]
    pub(super) fn take(&mut self) -> (Vec<(Waiter, Told)>, Vec<(u64, Lost)>) {
        shrink(&mut self.rounds);
        shrink(&mut self.open);
        (self.waiters.take_told(), std::mem::take(&mut self.news))
    }

    /// Ends a round that is not complete, with one answer for all its ranks.
    pub(super) fn fail(&mut self, id: u64, now: Duration, why: Incomplete) {
        let why = Arc::new(why);
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        tracing::debug!(
            group = round.group,
            round = id,
            reason = why.reason,
            ranks = ?why.ranks,
            "a group did not come together"
        );
        // Before the offering phase, all ranks wait for the answer.
        let offered = matches!(round.phase, Phase::Offering { .. });
        let mut sessions = Vec::new();
        for seat in round.seats.values_mut() {
            sessions.push(seat.asker.session);
            let told = Told::Incomplete(why.clone());
            self.waiters.answer(seat.waiter.take(), told);
        }
        if offered {
            self.remember(id, now, sessions, Told::Incomplete(why), true);
        }
        self.remove(id);
    }

    /// Keeps the outcome of an ended round for sessions that have not asked yet, or whose connection broke
    /// before they got it.
    pub(super) fn remember(
        &mut self,
        id: u64,
        now: Duration,
        sessions: Vec<u64>,
        told: Told,
        failed: bool,
    ) {
        let outcome = Outcome {
            round: id,
            told,
            failed,
            until: now.saturating_add(self.rules.keep),
        };
        for session in sessions {
            self.ended.keep(session, outcome.clone());
        }
    }

    /// Removes the seats of peers that have lost their right to the group.
    ///
    /// Ranks of a complete round stay its members until they leave, but they are sent no more handles and
    /// take no part in gathers, which fail for the others.
    pub(super) fn set_rights(&mut self, now: Duration, rights: Rights) {
        self.rights = rights;
        let mut lost = Vec::new();
        for (id, round) in &mut self.rounds {
            for (rank, seat) in &mut round.seats {
                if !self.rights.admits(&round.group, &seat.asker.peer) {
                    seat.revoked = true;
                    lost.push((*id, *rank));
                }
            }
        }
        for (id, rank) in lost {
            match self.rounds.get(&id).map(|round| &round.phase) {
                Some(Phase::Gathering) => self.vacate(id, rank, no_right()),
                Some(Phase::Offering { .. }) => {
                    self.abandon(id, rank, now, "lost the right to join");
                }
                Some(Phase::Complete) => self.decide_gather(id, now),
                None => {}
            }
        }
    }

    /// Returns the group that a joining peer asks for.
    ///
    /// # Errors
    ///
    /// A refusal that does not depend on whether the group exists.
    pub(super) fn may_join(
        &self,
        peer: &PeerName,
        group: &str,
        admission: &Admission,
    ) -> Result<Identity, Refused> {
        if !self.rights.admits(group, peer) {
            return Err(no_right());
        }
        self.keys.group(group, admission, peer)
    }

    /// Ends waits and rounds that have timed out by `now`.
    pub(super) fn tick(&mut self, now: Duration) {
        while let Some(&(at, id)) = self.deadlines.first()
            && at <= now
        {
            self.expire(id, now);
        }
        self.ended.expire(now);
    }

    /// Ends waits and rounds that have timed out, and returns the time until the next timeout of `waiter`, at most a
    /// second.
    pub(super) fn next_tick(&mut self, now: Duration, waiter: Waiter) -> Duration {
        self.tick(now);
        let place = self.waiters.places.get(&waiter);
        let next = place.and_then(|(id, _)| self.rounds.get(id)?.scheduled);
        next.map_or(TICK, |at| at.saturating_sub(now).min(TICK))
    }

    pub(super) fn expire(&mut self, id: u64, now: Duration) {
        let Some(round) = self.rounds.get_mut(&id) else {
            self.deadlines.retain(|(_, other)| *other != id);
            return;
        };
        match round.phase {
            Phase::Gathering => {
                let why = round.incomplete(Refusal::TimedOut, "", round.missing());
                self.fail(id, now, why);
            }
            Phase::Offering { .. } => {
                let late = round.ranks(|seat| seat.given.is_none());
                let why = round.incomplete(Refusal::TimedOut, "no handles from them", late);
                self.fail(id, now, why);
            }
            Phase::Complete => {
                let here = round.ranks(|seat| seat.stay == Stay::Here);
                let why = Arc::new(round.incomplete(Refusal::TimedOut, "they have not left", here));
                for seat in round.seats.values_mut() {
                    if seat.deadline <= now {
                        let told = Told::Incomplete(why.clone());
                        self.waiters.answer(seat.waiter.take(), told);
                    }
                }
                self.expire_gather(id, now);
                self.schedule(id);
            }
        }
    }

    /// Returns the next time at which something changes without a request.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    /// Returns the number of rounds.
    pub(super) fn len(&self) -> usize {
        self.rounds.len()
    }

    pub(super) fn unknown(&mut self, waiter: Waiter) {
        self.waiters.answer(waiter, Told::Refused(no_such_round()));
    }

    /// Removes a seat from a round, after answering its waiter.
    pub(super) fn vacate(&mut self, id: u64, rank: u32, why: Refused) {
        if let Some(round) = self.rounds.get_mut(&id)
            && let Some(seat) = round.seats.get_mut(&rank)
        {
            self.waiters.answer(seat.waiter.take(), Told::Refused(why));
        }
        self.remove_seat(id, rank);
    }

    /// Removes a seat, and the round if it was the last.
    pub(super) fn remove_seat(&mut self, id: u64, rank: u32) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        if let Some(seat) = round.seats.remove(&rank) {
            self.present.remove(&seat, id);
        }
        if round.seats.is_empty() {
            self.remove(id);
        } else {
            self.schedule(id);
        }
    }

    pub(super) fn remove(&mut self, id: u64) {
        let Some(round) = self.rounds.remove(&id) else {
            return;
        };
        for seat in round.seats.values() {
            self.present.remove(seat, id);
            self.waiters.forget(seat.waiter);
        }
        for entered in round.collective.entered.values() {
            self.waiters.forget(entered.waiter);
        }
        if self.open.get(&round.identity) == Some(&id) {
            self.open.remove(&round.identity);
        }
        if let Some(at) = round.scheduled {
            self.deadlines.remove(&(at, id));
        }
    }

    pub(super) fn schedule(&mut self, id: u64) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        let next = round.next();
        if round.scheduled != next {
            if let Some(at) = round.scheduled {
                self.deadlines.remove(&(at, id));
            }
            if let Some(at) = next {
                self.deadlines.insert((at, id));
            }
            round.scheduled = next;
        }
    }
}

/// Returns the round with this number in which a session has a seat, and its rank.
pub(super) fn find<'a>(
    rounds: &'a mut HashMap<u64, Round>,
    session: u64,
    group: &str,
    id: u64,
) -> Option<(&'a mut Round, u32)> {
    let round = rounds.get_mut(&id)?;
    let rank = round.seat_of(session)?;
    (round.group == group).then_some((round, rank))
}

/// Returns the answer to a peer without a right, whether the group exists or not.
pub(super) fn no_right() -> Refused {
    refused(Refusal::Forbidden, "no right to join groups of this name")
}

/// Why a session without a seat in a round is refused.
pub(crate) const NO_SUCH_ROUND: &str = "no such round of this session";

/// Returns the answer to a session without a seat in the round, whether the round exists or not.
pub(super) fn no_such_round() -> Refused {
    refused(Refusal::NotFound, NO_SUCH_ROUND)
}

#[cfg(test)]
mod tests;
