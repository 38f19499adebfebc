//! The outcomes of ended rounds, for ranks that have not received them yet.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use super::told::Told;

/// The most outcomes kept for one session: a session only displaces its own.
const PER_SESSION: usize = 16;

/// The outcome of a round.
#[derive(Clone)]
pub(super) struct Outcome {
    pub round: u64,
    pub told: Told,
    /// Whether the round ended before it was complete.
    pub failed: bool,
    /// When the outcome is dropped.
    pub until: Duration,
}

/// The outcomes that sessions may still ask for.
#[derive(Default)]
pub(super) struct Outcomes {
    sessions: HashMap<u64, VecDeque<Outcome>>,
    /// When each outcome is dropped, with its session and round.
    deadlines: BTreeSet<(Duration, u64, u64)>,
}

impl Outcomes {
    /// Keeps an outcome for a session.
    pub fn keep(&mut self, session: u64, outcome: Outcome) {
        let of = self.sessions.entry(session).or_default();
        if of.len() == PER_SESSION
            && let Some(oldest) = of.pop_front()
        {
            self.deadlines
                .remove(&(oldest.until, session, oldest.round));
        }
        self.deadlines
            .insert((outcome.until, session, outcome.round));
        of.push_back(outcome);
    }

    /// Returns the outcome of a round that the session was in.
    pub fn of(&self, session: u64, round: u64) -> Option<&Outcome> {
        let mut outcomes = self.sessions.get(&session)?.iter();
        outcomes.find(|outcome| outcome.round == round)
    }

    /// Drops the outcomes whose time is over.
    pub fn expire(&mut self, now: Duration) {
        while let Some(&(until, session, round)) = self.deadlines.first()
            && until <= now
        {
            self.deadlines.pop_first();
            if let Some(of) = self.sessions.get_mut(&session) {
                of.retain(|outcome| outcome.round != round);
                if of.is_empty() {
                    self.sessions.remove(&session);
                }
            }
        }
    }

    /// Drops the outcomes of a session that has ended.
    pub fn forget(&mut self, session: u64) {
        for outcome in self.sessions.remove(&session).unwrap_or_default() {
            self.deadlines
                .remove(&(outcome.until, session, outcome.round));
        }
    }

    /// Returns the number of outcomes.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        assert_eq!(
            self.deadlines.len(),
            self.sessions.values().map(VecDeque::len).sum::<usize>()
        );
        self.deadlines.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(round: u64, seconds: u64) -> Outcome {
        Outcome {
            round,
            told: Told::Done,
            failed: false,
            until: Duration::from_secs(seconds),
        }
    }

    #[test]
    fn a_session_displaces_only_its_own_outcomes() {
        let mut outcomes = Outcomes::default();
        outcomes.keep(1, outcome(1, 9));
        for round in 10..100 {
            outcomes.keep(2, outcome(round, 9));
        }
        assert_eq!(outcomes.len(), 1 + PER_SESSION);
        assert!(outcomes.of(1, 1).is_some());
        assert!(outcomes.of(2, 10).is_none() && outcomes.of(2, 99).is_some());
        assert!(outcomes.of(1, 99).is_none());
        outcomes.forget(2);
        assert_eq!(outcomes.len(), 1);
        outcomes.expire(Duration::from_secs(9));
        assert_eq!(outcomes.len(), 0);
    }
}
