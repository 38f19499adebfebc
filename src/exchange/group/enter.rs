//! The gathers of a complete round: ranks enter, and all get the same result.

use std::sync::Arc;
use std::time::Duration;

use super::collective::{Contribution, Entered, Outcome, Shape};
use super::phase::given;
use super::roster::{PageLimits, Roster};
use super::round::{Phase, Round, Rules, Stay};
use super::rounds::{Rounds, find, no_such_round};
use super::told::{Told, Waiter, refused};
use crate::Refusal;
use crate::account::Charge;
use crate::driver::HandleType;
use crate::protocol::{Agreed, Brought, Gather, Incomplete, Member, Operation};
use crate::share::Description;
use crate::transport::HeldFd;

/// How far a gather's number may be beyond the last gather that is over. A rank that enters a number ends all
/// gathers before it, so a number close to the maximum would end all gathers of the round.
const AHEAD: u64 = 1 << 32;

impl Rounds {
    /// Lets a rank enter a gather, or ask for members of a completed one. The waiter gets its answer when all
    /// ranks have entered, or when the gather has failed.
    pub fn gather(
        &mut self,
        now: Duration,
        waiter: Waiter,
        session: u64,
        ask: Gather,
        fds: Vec<HeldFd>,
        charge: Option<Charge>,
    ) {
        self.tick(now);
        match self.may_enter(session, &ask) {
            Ok(rank) => self.enter_gather(now, waiter, (ask.round, rank), ask, fds, charge),
            Err(told) => self.waiters.answer(waiter, told),
        }
    }

    /// Fails the gather that a rank asks to enter, because the server has reached a limit. Otherwise the other
    /// ranks would wait until their deadline. Returns the rank's answer.
    pub fn refuse_gather(
        &mut self,
        now: Duration,
        session: u64,
        ask: &Gather,
        limit: String,
    ) -> Told {
        self.tick(now);
        let rank = match self.may_enter(session, ask) {
            Ok(rank) => rank,
            Err(told) => return told,
        };
        let Some(round) = self.rounds.get_mut(&ask.round) else {
            return Told::Refused(no_such_round());
        };
        let detail = format!("rank {rank}: {limit}");
        let why = round.incomplete(Refusal::Limit, detail, vec![rank]);
        self.fail_gather(ask.round, why.clone(), ask.number);
        Told::Incomplete(Arc::new(why))
    }

    /// Returns the session's rank if it may enter the gather. Earlier gathers fail for all ranks, because this rank
    /// no longer waits for them.
    ///
    /// # Errors
    /// The rank's answer otherwise.
    fn may_enter(&mut self, session: u64, ask: &Gather) -> Result<u32, Told> {
        let no = |reason, detail: &str| Err(Told::Refused(refused(reason, detail)));
        let found = find(&mut self.rounds, session, &ask.group, ask.round);
        let is_member =
            |round: &Round, rank: &u32| round.seats.get(rank).is_some_and(|seat| seat.is_member());
        let Some((round, rank)) = found.filter(|(round, rank)| is_member(round, rank)) else {
            return Err(Told::Refused(no_such_round()));
        };
        if !matches!(round.phase, Phase::Complete) {
            return no(Refusal::Invalid, "not all ranks have offered their memory");
        }
        if ask.number == 0 || ask.number == u64::MAX {
            return no(Refusal::Invalid, "no gather has that number");
        }
        let over = round.collective.over;
        if ask.number <= over {
            return Err(round.collective.ended(ask.number, ask.first));
        }
        if ask.number - over > AHEAD {
            let detail = format!("gather {}, but the ranks have made {over}", ask.number);
            return no(Refusal::Invalid, &detail);
        }
        if ask.first.is_some() {
            return no(Refusal::Invalid, "the gather is not complete");
        }
        let before = ask.number - 1;
        if over < before {
            let detail = format!("rank {rank} has gone on to gather {}", ask.number);
            let why = round.incomplete(Refusal::TimedOut, detail, vec![rank]);
            self.fail_gather(ask.round, why, before);
        }
        Ok(rank)
    }

    fn enter_gather(
        &mut self,
        now: Duration,
        waiter: Waiter,
        (id, rank): (u64, u32),
        ask: Gather,
        fds: Vec<HeldFd>,
        charge: Option<Charge>,
    ) {
        let wait = Duration::from_millis(ask.ms).min(self.rules.wait);
        let Some(round) = self.rounds.get_mut(&id) else {
            return self.unknown(waiter);
        };
        let collective = &mut round.collective;
        let number = collective.number();
        if let Some(entered) = collective.entered.get_mut(&rank) {
            // Its connection broke before it got the answer; its contribution is already here.
            return self.waiters.wait(&mut entered.waiter, waiter, (id, rank));
        }
        let (contribution, wrong) =
            match contribution((collective.via, collective.sources), ask.operation, fds) {
                Ok(contribution) => (contribution, None),
                Err(wrong) => (Contribution::Nothing, Some(wrong)),
            };
        let shape = contribution.shape();
        let other = collective.other_shape(shape);
        let mut entered = Entered {
            contribution,
            waiter: None,
            deadline: now.saturating_add(wait),
            charge,
        };
        self.waiters.wait(&mut entered.waiter, waiter, (id, rank));
        collective.entered.insert(rank, Box::new(entered));
        let disagree = other.map(|other| [other, (rank, shape)]);
        let why = objection(round, rank, &self.rules, wrong, disagree);
        match why {
            Some(why) => self.fail_gather(id, why, number),
            None => self.decide_gather(id, now),
        }
        self.tick(now);
    }

    /// Decides the current gather if possible: it fails if a rank has left or is lost, and completes when all
    /// have entered.
    pub(super) fn decide_gather(&mut self, id: u64, now: Duration) {
        let Some(round) = self.rounds.get(&id) else {
            return;
        };
        if round.collective.entered.is_empty() {
            return;
        }
        let gone = round.ranks(|seat| !seat.is_member());
        if !gone.is_empty() {
            let why = round.incomplete(Refusal::Closing, "ranks have left or were lost", gone);
            let number = round.collective.number();
            return self.fail_gather(id, why, number);
        }
        if round.collective.entered.len() == round.seats.len() {
            self.complete_gather(id, now);
        }
        self.schedule(id);
    }

    /// Fails all open gathers up to `last`, with the same answer for all ranks.
    fn fail_gather(&mut self, id: u64, why: Incomplete, last: u64) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        let why = Arc::new(why);
        tracing::debug!(
            group = round.group,
            round = id,
            gather = last,
            reason = why.reason,
            ranks = ?why.ranks,
            "a gather has failed"
        );
        let collective = &mut round.collective;
        collective.fail(last, Arc::clone(&why));
        for entered in std::mem::take(&mut collective.entered).into_values() {
            let told = Told::Incomplete(Arc::clone(&why));
            self.waiters.answer(entered.waiter, told);
        }
        self.schedule(id);
    }

    fn complete_gather(&mut self, id: u64, now: Duration) {
        let until = now.saturating_add(self.rules.keep);
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        let limits = self.rules.gather_pages(round.size);
        let number = round.collective.number();
        // Before the next result is made: only one of the two is kept.
        round.collective.completed = None;
        let entered = std::mem::take(&mut round.collective.entered);
        let waiters: Vec<_> = entered.values().filter_map(|one| one.waiter).collect();
        let result = result(round, id, entered.into_values(), limits, until);
        let collective = &mut round.collective;
        collective.complete(result);
        for waiter in waiters {
            self.waiters.answer(waiter, collective.ended(number, None));
        }
    }

    /// Ends a round's gather that has timed out.
    pub(super) fn expire_gather(&mut self, id: u64, now: Duration) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        round.collective.forget(now);
        if round.collective.deadline().is_none_or(|at| at > now) {
            return;
        }
        let entered = &round.collective.entered;
        let late = round
            .seats
            .keys()
            .filter(|rank| !entered.contains_key(rank));
        let late = late.copied().collect();
        let number = round.collective.number();
        let why = round.incomplete(Refusal::TimedOut, format!("gather {number}"), late);
        self.fail_gather(id, why, number);
    }
}

/// Returns why the gather that `rank` has just entered fails: its contribution is `wrong`, two ranks disagree
/// about the shape, or all ranks together give more than the rules allow.
fn objection(
    round: &Round,
    rank: u32,
    rules: &Rules,
    wrong: Option<String>,
    disagree: Option<[(u32, Shape); 2]>,
) -> Option<Incomplete> {
    if let Some(wrong) = wrong {
        let detail = format!("rank {rank} gives {wrong}");
        return Some(round.incomplete(Refusal::Invalid, detail, vec![rank]));
    }
    if let Some(mut both) = disagree {
        both.sort_unstable_by_key(|(rank, _)| *rank);
        let detail = format!("gather {}", round.collective.number());
        let mut why = round.incomplete(Refusal::RanksDisagree, detail, vec![rank]);
        let says = |(rank, shape)| format!("rank {rank}: {shape}");
        why.reasons = both.map(says).to_vec();
        return Some(why);
    }
    let (parts, bytes) = (rules.parts, rules.gather_bytes);
    // All ranks send the same number of bytes: the first rank that enters decides it.
    let given = round.collective.bytes().saturating_mul(round.size as usize);
    let detail = if given > bytes {
        format!(
            "the bytes of all ranks are {given}; a gather may have at most {bytes} (MAX_GATHER_TOTAL)"
        )
    } else if round.collective.parts() > parts {
        format!("a gather's memories may have at most {parts} parts")
    } else {
        return None;
    };
    Some(round.incomplete(Refusal::Limit, detail, vec![rank]))
}

/// Returns a rank's contribution, or its fault.
fn contribution(
    (via, sources): (Option<HandleType>, bool),
    operation: Operation,
    fds: Vec<HeldFd>,
) -> Result<Contribution, String> {
    match operation {
        Operation::Memory(Brought { memory, fabric }) => {
            if let Some(Err(error)) = memory.as_ref().map(Description::check) {
                return Err(error.to_string());
            }
            let parts = memory.as_ref().map_or(0, |memory| memory.parts.len());
            let via = via.unwrap_or(HandleType::Fabric);
            let given = given((via, sources), parts, fabric, fds)?;
            Ok(Contribution::Memory(memory, given))
        }
        _ if !fds.is_empty() => Err("fds without memory".into()),
        Operation::Barrier => Ok(Contribution::Nothing),
        Operation::Bytes(bytes) => Ok(Contribution::Bytes(bytes)),
    }
}

/// Returns the result for ranks that have all entered.
fn result(
    round: &Round,
    id: u64,
    all: impl Iterator<Item = Box<Entered>>,
    limits: PageLimits,
    until: Duration,
) -> Outcome {
    let (mut members, mut fds, mut charges) = (Vec::new(), Vec::new(), Vec::new());
    let (mut shape, mut count) = (Shape::Barrier, 0);
    for entered in all {
        shape = entered.contribution.shape();
        count += entered.contribution.handles();
        let mut member = Member::default();
        match entered.contribution {
            Contribution::Nothing => {}
            Contribution::Bytes(bytes) => member.bytes = Some(bytes),
            Contribution::Memory(memory, given) => {
                let handles = given.into_message(&mut fds);
                member.handles = memory.is_some().then_some(handles);
                member.memory = memory;
            }
        }
        charges.extend(entered.charge);
        members.push(member);
    }
    if shape == Shape::Barrier {
        return Outcome::Nothing;
    }
    let agreed = Agreed {
        round: id,
        via: round.collective.via.unwrap_or(HandleType::Fabric),
        handles: u32::try_from(count).unwrap_or(u32::MAX),
        sources: round.collective.sources,
    };
    let roster = Arc::new(Roster::new(members, fds, limits).charged(charges));
    Outcome::Members(roster, (shape == Shape::Memory).then_some(agreed), until)
}

impl super::round::Seat {
    /// Whether the rank takes part in gathers: it has not left, is not lost, and still has its right.
    pub(super) fn is_member(&self) -> bool {
        self.stay == Stay::Here && !self.revoked
    }
}
