//! The phases of a round after the agreement: ranks offer handles, receive members, and leave or are lost.

use std::sync::Arc;
use std::time::Duration;

use super::collective::{Given, Outcome};
use super::roster::Roster;
use super::round::{Phase, Stay};
use super::rounds::{Rounds, find};
use super::told::{Told, Waiter, refused};
use crate::Refusal;
use crate::driver::HandleType;
use crate::protocol::{Leave, Lost, Member, Offer, Secret};
use crate::share::queue;
use crate::transport::HeldFd;

impl Rounds {
    /// Takes a rank's handles, or its request for another page of members.
    pub fn offer(
        &mut self,
        now: Duration,
        waiter: Waiter,
        session: u64,
        ask: Offer,
        fds: Vec<HeldFd>,
    ) {
        self.tick(now);
        let first = ask.first;
        if let Some(ended) = self.ended.of(session, ask.round)
            && ended.failed
        {
            let told = ended.told.clone();
            // The round has failed meanwhile, or the connection broke before the rank got the answer.
            return self.waiters.answer(waiter, told);
        }
        let Some((round, rank)) = find(&mut self.rounds, session, &ask.group, ask.round) else {
            return self.unknown(waiter);
        };
        let Some(seat) = round.seats.get_mut(&rank).filter(|seat| !seat.revoked) else {
            return self.unknown(waiter);
        };
        match &round.phase {
            Phase::Gathering => {
                let no = refused(Refusal::Invalid, "the group is still gathering");
                self.waiters.answer(waiter, Told::Refused(no));
            }
            Phase::Complete => self.serve(ask.round, waiter, first),
            Phase::Offering { via, .. } => {
                let place = (ask.round, rank);
                self.waiters.wait(&mut seat.waiter, waiter, place);
                if seat.given.is_none() {
                    let way = (*via, round.collective.sources);
                    match given(way, seat.parts(), ask.fabric, fds) {
                        Ok(given) => seat.given = Some(given),
                        Err(wrong) => {
                            let detail = format!("rank {rank} offers {wrong}");
                            let why = round.incomplete(Refusal::Invalid, detail, vec![rank]);
                            return self.fail(ask.round, now, why);
                        }
                    }
                }
                self.complete(ask.round, now);
            }
        }
    }

    /// Completes the round if all ranks have offered.
    fn complete(&mut self, id: u64, now: Duration) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        if round.seats.values().any(|seat| seat.given.is_none()) {
            return;
        }
        let mut fds = Vec::new();
        let members = round
            .seats
            .values_mut()
            .map(|seat| {
                let given = seat.given.take();
                let handles = given.map(|given| given.into_message(&mut fds));
                let memory = seat.memory.take();
                Member {
                    peer: seat.asker.peer.to_string(),
                    handles: handles.filter(|_| memory.is_some()),
                    memory,
                    bytes: None,
                }
            })
            .collect();
        let roster = Arc::new(Roster::new(members, fds, self.rules.pages()));
        let until = now.saturating_add(self.rules.keep);
        round.collective.joined = Outcome::Members(roster, None, until);
        round.phase = Phase::Complete;
        if self.open.get(&round.identity) == Some(&id) {
            self.open.remove(&round.identity);
        }
        let seats = round.seats.values_mut();
        for waiter in seats
            .filter_map(|seat| seat.waiter.take())
            .collect::<Vec<_>>()
        {
            self.serve(id, waiter, 0);
        }
        self.schedule(id);
    }

    /// Sends a page to a rank of a complete round.
    ///
    /// The server does not know whether the rank reads it: if the connection breaks first, the rank asks
    /// again.
    fn serve(&mut self, id: u64, waiter: Waiter, first: u32) {
        if let Some(round) = self.rounds.get(&id) {
            let told = round.collective.joined.told(Some(first));
            self.waiters.answer(waiter, told);
        }
    }

    /// Records that a rank is done; the waiter gets [`Told::Done`] when all ranks are.
    pub fn leave(&mut self, now: Duration, waiter: Waiter, session: u64, ask: Leave) {
        self.tick(now);
        let wait = Duration::from_millis(ask.ms).min(self.rules.wait);
        if let Some(ended) = self.ended.of(session, ask.round) {
            let told = ended.told.clone();
            // The rank has left before, and its connection broke before it got the answer; or the round
            // failed.
            return self.waiters.answer(waiter, told);
        }
        let Some((round, rank)) = find(&mut self.rounds, session, &ask.group, ask.round) else {
            return self.unknown(waiter);
        };
        match (&round.phase, round.seats.get_mut(&rank)) {
            (Phase::Complete, Some(seat)) => {
                let leaves = (seat.stay == Stay::Here).then(|| seat.asker.clone());
                seat.stay = Stay::Left;
                seat.deadline = now.saturating_add(wait);
                let place = (ask.round, rank);
                self.waiters.wait(&mut seat.waiter, waiter, place);
                if let Some(asker) = leaves {
                    self.present.leave(&asker, ask.round);
                }
                self.decide_gather(ask.round, now);
                self.end(ask.round, now);
                self.schedule(ask.round);
                self.tick(now);
            }
            (Phase::Gathering | Phase::Offering { .. }, _) => {
                self.waiters.answer(waiter, Told::Done);
                self.abandon(ask.round, rank, now, "left");
            }
            (Phase::Complete, None) => self.unknown(waiter),
        }
    }

    /// Ends a complete round in which no rank is left.
    fn end(&mut self, id: u64, now: Duration) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        if round.seats.values().any(|seat| seat.stay == Stay::Here) {
            return;
        }
        let lost = round.ranks(|seat| seat.stay == Stay::Lost);
        let detail = "ranks were lost before they left";
        let told = match lost.is_empty() {
            true => Told::Done,
            false => Told::Incomplete(Arc::new(round.incomplete(Refusal::Closing, detail, lost))),
        };
        let mut sessions = Vec::new();
        for seat in round.seats.values_mut() {
            self.waiters.answer(seat.waiter.take(), told.clone());
            if seat.stay == Stay::Left {
                sessions.push(seat.asker.session);
            }
        }
        self.remove(id);
        self.remember(id, now, sessions, told, false);
    }

    /// Records that a session has ended: its process may be dead.
    pub fn gone(&mut self, now: Duration, session: u64) {
        self.tick(now);
        for id in self.present.gone(session) {
            let round = self.rounds.get(&id);
            if let Some(rank) = round.and_then(|round| round.seat_of(session)) {
                self.abandon(id, rank, now, "is lost");
            }
        }
        self.ended.forget(session);
    }

    /// Records that a waiter no longer waits, because its connection is broken.
    pub fn cancel(&mut self, now: Duration, waiter: Waiter) {
        if let Some((id, rank)) = self.waiters.forget(waiter)
            && let Some(round) = self.rounds.get_mut(&id)
        {
            if let Some(seat) = round.seats.get_mut(&rank) {
                seat.waiter.take_if(|own| *own == waiter);
            }
            if let Some(entered) = round.collective.entered.get_mut(&rank) {
                entered.waiter.take_if(|own| *own == waiter);
            }
            // In other phases the session may resume and ask once more.
            if matches!(round.phase, Phase::Gathering) {
                self.remove_seat(id, rank);
            } else {
                self.schedule(id);
            }
        }
        self.tick(now);
    }

    /// Ends a rank's part in a round, in any phase.
    pub(super) fn abandon(&mut self, id: u64, rank: u32, now: Duration, how: &str) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        match round.phase {
            Phase::Gathering => {
                self.vacate(id, rank, refused(Refusal::Closing, "the session ended"))
            }
            Phase::Offering { .. } => {
                let detail = format!("rank {rank} {how} before it offered its memory to all");
                let why = round.incomplete(Refusal::Closing, detail, vec![rank]);
                self.fail(id, now, why);
            }
            Phase::Complete => {
                let news = Lost {
                    group: round.group.clone(),
                    round: id,
                    ranks: vec![rank],
                };
                if let Some(seat) = round.seats.get_mut(&rank) {
                    let no = refused(Refusal::Closing, "the session ended");
                    self.waiters.answer(seat.waiter.take(), Told::Refused(no));
                    if seat.stay == Stay::Here {
                        seat.stay = Stay::Lost;
                        self.present.leave(&seat.asker, id);
                        let here = round.seats.values().filter(|seat| seat.stay == Stay::Here);
                        self.news
                            .extend(here.map(|seat| (seat.asker.session, news.clone())));
                    }
                }
                self.decide_gather(id, now);
                self.end(id, now);
                self.schedule(id);
            }
        }
    }
}

/// Checks a rank's handles: of the agreed type, and one for each part, or a source of many fds.
pub(super) fn given(
    (via, sources): (HandleType, bool),
    parts: usize,
    fabric: Vec<Secret>,
    fds: Vec<HeldFd>,
) -> Result<Given, String> {
    let (right, given) = match via {
        HandleType::Fabric => (
            fds.is_empty()
                && fabric.len() == parts
                && fabric.iter().all(|handle| handle.expose().len() == 64),
            Given::Fabric(fabric),
        ),
        HandleType::PosixFd if sources && queue::is_needed(parts) => {
            (fabric.is_empty() && fds.len() == 1, Given::Source(fds))
        }
        HandleType::PosixFd => (fabric.is_empty() && fds.len() == parts, Given::Fds(fds)),
    };
    match right {
        true => Ok(given),
        false => Err(format!("other than {parts} {via} handles")),
    }
}
