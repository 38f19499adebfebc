//! The first phase of a round: ranks join until all have, then one handle type is chosen.

use std::collections::BTreeMap;
use std::time::Duration;

use super::agree::{Rank, agree, cut};
use super::collective::Collective;
use super::identity::Identity;
use super::round::{Asker, MAX_REASONS, Phase, Round, Seat, Stay};
use super::rounds::Rounds;
use super::told::{Told, Waiter, refused};
use crate::Refusal;
use crate::driver::HandleType;
use crate::protocol::{Agreed, Join, Refused, check_name};
use crate::share::Description;

impl Rounds {
    /// Adds a rank; the waiter gets [`Told::Agreed`] when all ranks have joined.
    pub fn join(&mut self, now: Duration, waiter: Waiter, asker: Asker, ask: Join) {
        self.tick(now);
        if let Err(no) = self.try_join(now, waiter, asker, ask) {
            self.waiters.answer(waiter, Told::Refused(no));
        }
    }

    fn try_join(
        &mut self,
        now: Duration,
        waiter: Waiter,
        asker: Asker,
        ask: Join,
    ) -> Result<(), Refused> {
        let identity = self.may_join(&asker.peer, &ask.group, &ask.admission)?;
        self.check(&asker, &ask)?;
        let id = match self.enter(identity, now, &asker, &ask)? {
            Some(id) => id,
            None => self.begin(identity, &asker, &ask),
        };
        let Some(round) = self.rounds.get_mut(&id) else {
            return Err(refused(Refusal::Internal, ""));
        };
        let mut seat = Seat {
            deadline: now.saturating_add(Duration::from_millis(ask.ms).min(self.rules.wait)),
            can: ask.can,
            cannot: ask.cannot.iter().map(|why| cut(why).to_owned()).collect(),
            memory: ask.memory,
            waiter: None,
            given: None,
            stay: Stay::Here,
            revoked: false,
            asker,
        };
        if !seat.asker.local && seat.can.contains(&HandleType::PosixFd) {
            seat.can.retain(|can| *can != HandleType::PosixFd);
            seat.cannot
                .push("it joined over TCP, which carries no fds".into());
        }
        self.present.enter(&seat.asker, id);
        self.waiters.wait(&mut seat.waiter, waiter, (id, ask.rank));
        round.seats.insert(ask.rank, Box::new(seat));
        if round.seats.len() == round.size as usize {
            self.decide(id, now);
        } else {
            self.schedule(id);
        }
        Ok(())
    }

    /// Checks the parts of the request that do not depend on the group's state.
    fn check(&self, asker: &Asker, ask: &Join) -> Result<(), Refused> {
        let invalid = |why: String| Err(refused(Refusal::Invalid, why));
        if let Err(error) = check_name(&ask.group) {
            return invalid(error.to_string());
        }
        if ask.size > self.rules.size {
            let why = format!("a group may have at most {} ranks", self.rules.size);
            return Err(refused(Refusal::Limit, why));
        }
        if ask.rank >= ask.size {
            return invalid(format!("rank {} of {}", ask.rank, ask.size));
        }
        if ask.can.len() > MAX_REASONS || ask.cannot.len() > MAX_REASONS {
            return invalid("too many handle types or reasons".into());
        }
        if let Some(Err(error)) = ask.memory.as_ref().map(Description::check) {
            return invalid(error.to_string());
        }
        let held = self.present.of_session(asker.session);
        if held >= self.rules.groups_per_session {
            let why = format!("{held} groups of one session");
            return Err(refused(Refusal::Limit, why));
        }
        Ok(())
    }

    /// Makes room for a rank in the group's open round. Returns `None` if there is none or it ended that round
    /// instead, so that the rank may begin one.
    fn enter(
        &mut self,
        identity: Identity,
        now: Duration,
        asker: &Asker,
        ask: &Join,
    ) -> Result<Option<u64>, Refused> {
        let open = self.open.get(&identity);
        let Some((id, round)) = open.and_then(|&id| Some((id, self.rounds.get(&id)?))) else {
            self.may_begin(identity, asker, ask, None)?;
            return Ok(None);
        };
        check_place(round, asker, ask)?;
        if let Phase::Offering { .. } = round.phase {
            // The rank's process was restarted: it no longer waits for the first answer.
            let detail = format!("rank {} was started again", ask.rank);
            let why = round.incomplete(Refusal::Closing, detail, vec![ask.rank]);
            // Checked first, so that a refused rank does not end the round; a round about to end does not
            // count.
            self.may_begin(identity, asker, ask, Some(id))?;
            self.fail(id, now, why);
            return Ok(None);
        }
        let own = ask.memory.as_ref().map_or(0, |memory| memory.parts.len());
        let others = round.seats.iter().filter(|(rank, _)| **rank != ask.rank);
        let parts = own + others.map(|(_, seat)| seat.parts()).sum::<usize>();
        if parts > self.rules.parts {
            return Err(self.too_many_parts());
        }
        self.check_peer(asker, Some(id))?;
        if let Some(round) = self.rounds.get_mut(&id)
            && let Some(seat) = round.seats.remove(&ask.rank)
        {
            self.present.remove(&seat, id);
            let why = format!("rank {} has joined again since", ask.rank);
            let no = refused(Refusal::Exists, why);
            self.waiters.answer(seat.waiter, Told::Refused(no));
        }
        Ok(Some(id))
    }

    /// Whether a peer may be in one more round, or in this one.
    fn check_peer(&self, asker: &Asker, round: Option<u64>) -> Result<(), Refused> {
        let others = self.present.of_peer(&asker.peer, round);
        if others >= self.rules.groups_per_peer {
            let why = format!("{others} groups of this peer");
            return Err(refused(Refusal::Limit, why));
        }
        Ok(())
    }

    fn too_many_parts(&self) -> Refused {
        let why = format!(
            "a group's memories may have at most {} parts",
            self.rules.parts
        );
        refused(Refusal::Limit, why)
    }

    /// Whether one more round is allowed, not counting one that is about to end.
    fn may_begin(
        &self,
        identity: Identity,
        asker: &Asker,
        ask: &Join,
        ending: Option<u64>,
    ) -> Result<(), Refused> {
        let memory = ask.memory.as_ref();
        if memory.is_some_and(|memory| memory.parts.len() > self.rules.parts) {
            return Err(self.too_many_parts());
        }
        // Checked before the limit for all peers, which reveals that others have groups.
        self.check_peer(asker, ending)?;
        let others = self.rounds.len() - usize::from(ending.is_some());
        if others >= self.rules.groups && self.own != Some(identity) {
            tracing::warn!(limit = self.rules.groups, "too many groups");
            return Err(refused(Refusal::Limit, "the server has too many groups"));
        }
        Ok(())
    }

    fn begin(&mut self, identity: Identity, asker: &Asker, ask: &Join) -> u64 {
        let mut id = self.keys.next_round();
        while self.rounds.contains_key(&id) {
            id = self.keys.next_round();
        }
        let (group, size, peer) = (&ask.group, ask.size, &asker.peer);
        tracing::debug!(group, round = id, size, %peer, "a group gathers");
        self.open.insert(identity, id);
        self.rounds.insert(
            id,
            Round {
                identity,
                group: ask.group.clone(),
                size: ask.size,
                seats: BTreeMap::new(),
                phase: Phase::Gathering,
                collective: Collective::default(),
                scheduled: None,
            },
        );
        id
    }

    /// Chooses the handle type after all ranks have joined.
    pub(super) fn decide(&mut self, id: u64, now: Duration) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        let ranks = round.seats.values().map(|seat| Rank {
            boot: seat.asker.boot,
            can: &seat.can,
            cannot: &seat.cannot,
        });
        match agree(&ranks.collect::<Vec<_>>()) {
            Ok(via) => {
                round.phase = Phase::Offering {
                    via,
                    until: now.saturating_add(self.rules.offer),
                };
                let sources = via == HandleType::PosixFd
                    && round.seats.values().all(|seat| seat.asker.queues);
                let handles = round.seats.values().map(|seat| seat.handles(sources));
                let handles = handles.sum::<usize>();
                let agreed = Agreed {
                    round: id,
                    via,
                    handles: u32::try_from(handles).unwrap_or(u32::MAX),
                    sources,
                };
                for seat in round.seats.values_mut() {
                    // Only needed for this answer.
                    seat.cannot = Vec::new();
                    self.waiters
                        .answer(seat.waiter.take(), Told::Agreed(agreed));
                }
                round.collective.via = Some(via);
                round.collective.sources = sources;
                self.schedule(id);
            }
            Err(reasons) => {
                let mut why = round.incomplete(Refusal::NoCommonHandle, "", Vec::new());
                why.reasons = reasons;
                self.fail(id, now, why);
            }
        }
    }
}

/// Checks, in any phase, whether a rank fits into its group's round. A refused rank changes nothing.
fn check_place(round: &Round, asker: &Asker, ask: &Join) -> Result<(), Refused> {
    if round.size != ask.size {
        let why = format!("size {}; the group has {} ranks", ask.size, round.size);
        return Err(refused(Refusal::Invalid, why));
    }
    let taken = round.seats.get(&ask.rank);
    if taken.is_some_and(|seat| seat.asker.peer != asker.peer) {
        let why = format!("rank {} has been taken by another peer", ask.rank);
        return Err(refused(Refusal::Exists, why));
    }
    let own = round.seat_of(asker.session);
    if let Some(other) = own.filter(|rank| *rank != ask.rank) {
        let why = format!("this session is rank {other} already");
        return Err(refused(Refusal::Exists, why));
    }
    Ok(())
}
