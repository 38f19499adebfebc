//! Rounds of groups, decided without clocks or sockets: time comes in, what to tell goes out.
//!
//! A round is one life of a group. It gathers until every rank has joined, decides one handle type,
//! collects every rank's handles, and is complete. Whatever goes wrong before ends it for all its
//! ranks alike, and whoever joins then begins a new one. There is no state in which one rank of a
//! round is told its members and another that it failed.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::present::Present;
use super::round::{Ended, Phase, Round, Rules, Stay, TICK, Told, Waiter, refused};
use crate::Refusal;
use crate::exchange::protocol::{Incomplete, Lost, Refused};

/// All rounds of a server.
pub(super) struct Rounds {
    pub(super) rules: Rules,
    pub(super) last: u64,
    pub(super) rounds: HashMap<u64, Round>,
    /// The round of a group that can be joined.
    pub(super) open: HashMap<String, u64>,
    pub(super) present: Present,
    pub(super) waiting: HashMap<Waiter, (u64, u32)>,
    pub(super) deadlines: BTreeSet<(Duration, u64)>,
    /// The last rounds that ended, oldest first.
    pub(super) ended: VecDeque<Ended>,
    pub(super) told: Vec<(Waiter, Told)>,
    pub(super) news: Vec<(u64, Lost)>,
}

impl Rounds {
    pub(super) fn new(rules: Rules) -> Self {
        Self {
            rules,
            last: 0,
            rounds: HashMap::new(),
            open: HashMap::new(),
            present: Present::default(),
            waiting: HashMap::new(),
            deadlines: BTreeSet::new(),
            ended: VecDeque::new(),
            told: Vec::new(),
            news: Vec::new(),
        }
    }

    /// What is to be told, to waiters and to sessions, since this was last asked.
    #[allow(clippy::type_complexity, reason = "two lists, taken apart at once")]
    pub(super) fn take(&mut self) -> (Vec<(Waiter, Told)>, Vec<(u64, Lost)>) {
        (
            std::mem::take(&mut self.told),
            std::mem::take(&mut self.news),
        )
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
        // Before that its ranks all wait for the answer.
        let offered = matches!(round.phase, Phase::Offering { .. });
        let mut sessions = Vec::new();
        for seat in round.seats.values_mut() {
            sessions.push(seat.asker.session);
            if let Some(waiter) = seat.waiter.take() {
                self.waiting.remove(&waiter);
                self.told.push((waiter, Told::Incomplete(why.clone())));
            }
        }
        if offered {
            self.remember(id, now, sessions, Told::Incomplete(why), true);
        }
        self.remove(id);
    }

    /// Keeps what there is to tell of a round that has ended, for sessions that have not asked yet or
    /// whose connection broke before they heard it.
    pub(super) fn remember(
        &mut self,
        id: u64,
        now: Duration,
        sessions: Vec<u64>,
        told: Told,
        failed: bool,
    ) {
        if self.ended.len() >= self.rules.groups {
            self.ended.pop_front();
        }
        self.ended.push_back(Ended {
            round: id,
            sessions,
            told,
            failed,
            until: now.saturating_add(self.rules.keep),
        });
    }

    /// What there is to tell a session of a round that has ended.
    pub(super) fn came_of(&self, id: u64, session: u64) -> Option<&Ended> {
        self.ended.iter().find(|ended| ended.is(id, session))
    }

    /// Lets time pass.
    pub(super) fn tick(&mut self, now: Duration) {
        while let Some(&(at, id)) = self.deadlines.first()
            && at <= now
        {
            self.expire(id, now);
        }
        while self.ended.front().is_some_and(|ended| ended.until <= now) {
            self.ended.pop_front();
        }
    }

    /// Lets time pass; how long until it alone changes something for `waiter`, at most a second.
    pub(super) fn next_tick(&mut self, now: Duration, waiter: Waiter) -> Duration {
        self.tick(now);
        let round = self.waiting.get(&waiter).map(|(id, _)| id);
        let next = round.and_then(|id| self.rounds.get(id)?.scheduled);
        next.map_or(TICK, |at| at.saturating_sub(now).min(TICK))
    }

    pub(super) fn expire(&mut self, id: u64, now: Duration) {
        let Some(round) = self.rounds.get_mut(&id) else {
            self.deadlines.retain(|(_, other)| *other != id);
            return;
        };
        match &mut round.phase {
            Phase::Gathering => {
                let why = round.incomplete(Refusal::TimedOut, "", round.missing());
                self.fail(id, now, why);
            }
            Phase::Offering { .. } => {
                let late = round.ranks(|seat| seat.given.is_none());
                let why = round.incomplete(Refusal::TimedOut, "no handles from them", late);
                self.fail(id, now, why);
            }
            Phase::Complete(kept) => {
                kept.take_if(|kept| kept.until <= now);
                let here = round.ranks(|seat| seat.stay == Stay::Here);
                let why = Arc::new(round.incomplete(Refusal::TimedOut, "they have not left", here));
                for seat in round.seats.values_mut() {
                    if seat.deadline <= now
                        && let Some(waiter) = seat.waiter.take()
                    {
                        self.waiting.remove(&waiter);
                        self.told.push((waiter, Told::Incomplete(why.clone())));
                    }
                }
                self.schedule(id);
            }
        }
    }

    /// When time alone changes something next.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    /// How many rounds there are.
    pub(super) fn len(&self) -> usize {
        self.rounds.len()
    }

    pub(super) fn unknown(&mut self, waiter: Waiter) {
        let no = refused(Refusal::NotFound, "no such round of this session's");
        self.told.push((waiter, Told::Refused(no)));
    }

    pub(super) fn find(&mut self, session: u64, group: &str, id: u64) -> Option<(&mut Round, u32)> {
        let round = self.rounds.get_mut(&id)?;
        let rank = round.seat_of(session)?;
        (round.group == group).then_some((round, rank))
    }

    /// Removes a seat from a round, after telling its waiter why.
    pub(super) fn vacate(&mut self, id: u64, rank: u32, why: Refused) {
        if let Some(round) = self.rounds.get_mut(&id)
            && let Some(seat) = round.seats.get_mut(&rank)
            && let Some(waiter) = seat.waiter.take()
        {
            self.waiting.remove(&waiter);
            self.told.push((waiter, Told::Refused(why)));
        }
        self.remove_seat(id, rank);
    }

    /// Removes a seat, and a round with none.
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
            if let Some(waiter) = seat.waiter {
                self.waiting.remove(&waiter);
            }
        }
        if self.open.get(&round.group) == Some(&id) {
            self.open.remove(&round.group);
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

#[cfg(test)]
#[path = "rounds_tests/mod.rs"]
mod tests;
