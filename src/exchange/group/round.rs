//! Rounds of groups, decided without clocks or sockets: time comes in, what to tell goes out.
//!
//! A round is one life of a group. It gathers until every rank has joined, decides one handle type,
//! collects every rank's handles, and is complete. Whatever goes wrong before ends it for all its
//! ranks alike, and whoever joins then begins a new one. There is no state in which one rank of a
//! round is told its members and another that it failed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::agree::{Rank, agree, cut};
use super::roster::{PageLimits, Roster};
use crate::Refusal;
use crate::driver::HandleType;
use crate::exchange::Limits;
use crate::exchange::protocol::{
    Agreed, Fds, Handles, Incomplete, Join, Leave, Lost, Member, Offer, Refused, Secret, check_name,
};
use crate::share::{BootId, Description};

/// A request that waits for its answer.
pub(super) type Waiter = u64;

/// The longest between two looks at the clock while somebody waits.
const TICK: Duration = Duration::from_secs(1);

/// The most reasons that a rank gives for what it cannot do.
const MAX_REASONS: usize = 8;

/// What a server allows its groups.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// Rounds at once, those included whose ranks have not left yet.
    pub groups: usize,
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
    /// Bytes of members in a frame.
    pub page_bytes: usize,
    /// Fds with a frame: at most 253 (`SCM_MAX_FD`).
    pub page_fds: usize,
}

/// The most fds that the kernel passes with one message: `SCM_MAX_FD`.
const MAX_FDS: u32 = 253;

impl Rules {
    /// The rules that fit a server's limits.
    pub fn from_limits(limits: &Limits) -> Self {
        Self {
            groups: limits.groups,
            groups_per_session: 64,
            size: limits.group_size,
            parts: 1 << 16,
            wait: limits.wait,
            offer: limits.request,
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
            ..Self::from_limits(&Limits::default())
        }
    }
}

/// Who asks.
#[derive(Clone, Debug)]
pub(super) struct Asker {
    pub session: u64,
    pub peer: String,
    pub boot: BootId,
    /// Whether fds can be passed on its connection.
    pub local: bool,
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

enum Given {
    Fabric(Vec<Secret>),
    Fds(Vec<OwnedFd>),
}

/// Where a rank of a complete round is.
#[derive(Clone, Copy, PartialEq)]
enum Stay {
    Here,
    Left,
    Lost,
}

struct Seat {
    asker: Asker,
    can: Vec<HandleType>,
    cannot: Vec<String>,
    memory: Option<Description>,
    /// Until when the waiter waits: for the others to join, or for them to leave.
    deadline: Duration,
    waiter: Option<Waiter>,
    given: Option<Given>,
    /// Whether it has been told the last page.
    served: bool,
    stay: Stay,
}

impl Seat {
    fn parts(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.parts.len())
    }
}

enum Phase {
    Gathering,
    Offering {
        via: HandleType,
        until: Duration,
    },
    /// The roster is there until all have been told it.
    Complete(Option<Arc<Roster>>),
    /// Kept for the ranks that have not asked since.
    Failed {
        why: Arc<Incomplete>,
        until: Duration,
    },
}

struct Round {
    group: String,
    size: u32,
    seats: BTreeMap<u32, Seat>,
    phase: Phase,
    /// Under what time it is among the deadlines.
    scheduled: Option<Duration>,
}

impl Round {
    fn seat_of(&self, session: u64) -> Option<u32> {
        let mut seats = self.seats.iter();
        seats
            .find(|(_, seat)| seat.asker.session == session)
            .map(|(rank, _)| *rank)
    }

    fn missing(&self) -> Vec<u32> {
        (0..self.size)
            .filter(|rank| !self.seats.contains_key(rank))
            .collect()
    }

    fn ranks(&self, of: impl Fn(&Seat) -> bool) -> Vec<u32> {
        let seats = self.seats.iter().filter(|(_, seat)| of(seat));
        seats.map(|(rank, _)| *rank).collect()
    }

    fn incomplete(
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
    fn next(&self) -> Option<Duration> {
        let waiting = self.seats.values().filter(|seat| seat.waiter.is_some());
        match self.phase {
            Phase::Gathering | Phase::Complete(_) => waiting.map(|seat| seat.deadline).min(),
            Phase::Offering { until, .. } | Phase::Failed { until, .. } => Some(until),
        }
    }
}

/// All rounds of a server.
pub(super) struct Rounds {
    rules: Rules,
    last: u64,
    rounds: HashMap<u64, Round>,
    /// The round of a group that can be joined.
    open: HashMap<String, u64>,
    sessions: HashMap<u64, BTreeSet<u64>>,
    waiting: HashMap<Waiter, (u64, u32)>,
    deadlines: BTreeSet<(Duration, u64)>,
    told: Vec<(Waiter, Told)>,
    news: Vec<(u64, Lost)>,
}

impl Rounds {
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            last: 0,
            rounds: HashMap::new(),
            open: HashMap::new(),
            sessions: HashMap::new(),
            waiting: HashMap::new(),
            deadlines: BTreeSet::new(),
            told: Vec::new(),
            news: Vec::new(),
        }
    }

    /// What is to be told, to waiters and to sessions, since this was last asked.
    #[allow(clippy::type_complexity, reason = "two lists, taken apart at once")]
    pub fn take(&mut self) -> (Vec<(Waiter, Told)>, Vec<(u64, Lost)>) {
        (
            std::mem::take(&mut self.told),
            std::mem::take(&mut self.news),
        )
    }

    /// A rank joins; the waiter is told [`Told::Agreed`] when all have.
    pub fn join(&mut self, now: Duration, waiter: Waiter, asker: Asker, ask: Join) {
        self.tick(now);
        if let Err(no) = self.try_join(now, waiter, asker, ask) {
            self.told.push((waiter, Told::Refused(no)));
        }
    }

    fn try_join(
        &mut self,
        now: Duration,
        waiter: Waiter,
        asker: Asker,
        ask: Join,
    ) -> Result<(), Refused> {
        self.check(&asker, &ask)?;
        let id = match self.open.get(&ask.group) {
            Some(&id) => self.enter(id, now, &asker, &ask)?,
            None => None,
        };
        let id = match id {
            Some(id) => id,
            None => self.begin(&asker, &ask)?,
        };
        let Some(round) = self.rounds.get_mut(&id) else {
            return Err(refused(Refusal::Internal, ""));
        };
        let mut seat = Seat {
            deadline: now.saturating_add(Duration::from_millis(ask.ms).min(self.rules.wait)),
            can: ask.can,
            cannot: ask.cannot.iter().map(|why| cut(why).to_owned()).collect(),
            memory: ask.memory,
            waiter: Some(waiter),
            given: None,
            served: false,
            stay: Stay::Here,
            asker,
        };
        if !seat.asker.local && seat.can.contains(&HandleType::PosixFd) {
            seat.can.retain(|can| *can != HandleType::PosixFd);
            seat.cannot
                .push("it joined over TCP, which carries no fds".into());
        }
        self.sessions
            .entry(seat.asker.session)
            .or_default()
            .insert(id);
        self.waiting.insert(waiter, (id, ask.rank));
        round.seats.insert(ask.rank, seat);
        if round.seats.len() == round.size as usize {
            self.decide(id, now);
        } else {
            self.schedule(id);
        }
        Ok(())
    }

    /// What can be checked without knowing the group's state.
    fn check(&self, asker: &Asker, ask: &Join) -> Result<(), Refused> {
        let invalid = |why: String| Err(refused(Refusal::Invalid, why));
        if let Err(error) = check_name(&ask.group) {
            return invalid(error.to_string());
        }
        if ask.size > self.rules.size {
            return Err(refused(
                Refusal::Limit,
                format!("a group may have {} ranks", self.rules.size),
            ));
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
        let held = self.sessions.get(&asker.session).map_or(0, BTreeSet::len);
        if held >= self.rules.groups_per_session {
            return Err(refused(
                Refusal::Limit,
                format!("{held} groups of one session"),
            ));
        }
        Ok(())
    }

    /// Makes room for a rank in the open round, or ends that round; `None` for the latter.
    fn enter(
        &mut self,
        id: u64,
        now: Duration,
        asker: &Asker,
        ask: &Join,
    ) -> Result<Option<u64>, Refused> {
        let Some(round) = self.rounds.get_mut(&id) else {
            return Ok(None);
        };
        if let Some(seat) = round.seats.get(&ask.rank)
            && seat.asker.peer != asker.peer
        {
            return Err(refused(
                Refusal::Exists,
                format!("rank {} has been taken by another peer", ask.rank),
            ));
        }
        if let Phase::Offering { .. } = round.phase {
            // Whoever joins again does not wait for the first answer any more.
            let why = round.incomplete(
                Refusal::Closing,
                format!("rank {} began anew", ask.rank),
                vec![ask.rank],
            );
            self.fail(id, now, why);
            return Ok(None);
        }
        if round.size != ask.size {
            return Err(refused(
                Refusal::Invalid,
                format!(
                    "size {}; the group is gathering with {}",
                    ask.size, round.size
                ),
            ));
        }
        if let Some(other) = round
            .seat_of(asker.session)
            .filter(|rank| *rank != ask.rank)
        {
            return Err(refused(
                Refusal::Exists,
                format!("this session is rank {other} already"),
            ));
        }
        let own = ask.memory.as_ref().map_or(0, |memory| memory.parts.len());
        let others = round.seats.iter().filter(|(rank, _)| **rank != ask.rank);
        let parts = own + others.map(|(_, seat)| seat.parts()).sum::<usize>();
        if parts > self.rules.parts {
            return Err(self.too_many_parts());
        }
        if let Some(seat) = round.seats.remove(&ask.rank) {
            unlist(&mut self.sessions, seat.asker.session, id);
            if let Some(waiter) = seat.waiter {
                self.waiting.remove(&waiter);
                let why = format!("rank {} has joined once more since", ask.rank);
                let no = refused(Refusal::Exists, why);
                self.told.push((waiter, Told::Refused(no)));
            }
        }
        Ok(Some(id))
    }

    fn too_many_parts(&self) -> Refused {
        refused(
            Refusal::Limit,
            format!("a group's memories may have {} parts", self.rules.parts),
        )
    }

    fn begin(&mut self, asker: &Asker, ask: &Join) -> Result<u64, Refused> {
        if self.rounds.len() >= self.rules.groups {
            return Err(refused(
                Refusal::Limit,
                format!("{} groups", self.rules.groups),
            ));
        }
        if ask
            .memory
            .as_ref()
            .is_some_and(|memory| memory.parts.len() > self.rules.parts)
        {
            return Err(self.too_many_parts());
        }
        self.last += 1;
        let id = self.last;
        tracing::debug!(
            group = ask.group,
            round = id,
            size = ask.size,
            peer = asker.peer,
            "a group gathers"
        );
        self.open.insert(ask.group.clone(), id);
        self.rounds.insert(
            id,
            Round {
                group: ask.group.clone(),
                size: ask.size,
                seats: BTreeMap::new(),
                phase: Phase::Gathering,
                scheduled: None,
            },
        );
        Ok(id)
    }

    /// All have joined.
    fn decide(&mut self, id: u64, now: Duration) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        let ranks: Vec<_> = round
            .seats
            .values()
            .map(|seat| Rank {
                boot: seat.asker.boot,
                can: &seat.can,
                cannot: &seat.cannot,
            })
            .collect();
        match agree(&ranks) {
            Ok(via) => {
                round.phase = Phase::Offering {
                    via,
                    until: now.saturating_add(self.rules.offer),
                };
                let handles = round.seats.values().map(Seat::parts).sum::<usize>();
                let agreed = Agreed {
                    round: id,
                    via,
                    handles: u32::try_from(handles).unwrap_or(u32::MAX),
                };
                for seat in round.seats.values_mut() {
                    // Said once, it is not needed any more.
                    seat.cannot = Vec::new();
                    if let Some(waiter) = seat.waiter.take() {
                        self.waiting.remove(&waiter);
                        self.told.push((waiter, Told::Agreed(agreed)));
                    }
                }
                self.schedule(id);
            }
            Err(reasons) => {
                let mut why = round.incomplete(Refusal::NoCommonHandle, "", Vec::new());
                why.reasons = reasons;
                self.fail(id, now, why);
            }
        }
    }

    /// A rank's handles, or its wish for another page of members.
    pub fn offer(
        &mut self,
        now: Duration,
        waiter: Waiter,
        session: u64,
        ask: Offer,
        fds: Vec<OwnedFd>,
    ) {
        self.tick(now);
        let first = ask.first;
        let Some((round, rank)) = self.find(session, &ask.group, ask.round) else {
            return self.unknown(waiter);
        };
        let Some(seat) = round.seats.get_mut(&rank) else {
            return self.unknown(waiter);
        };
        match &round.phase {
            Phase::Gathering => {
                let no = refused(Refusal::Invalid, "the group is still gathering");
                self.told.push((waiter, Told::Refused(no)));
            }
            Phase::Failed { why, .. } => {
                let why = why.clone();
                self.told.push((waiter, Told::Incomplete(why)));
                self.remove_seat(ask.round, rank);
            }
            Phase::Complete(_) => self.serve(ask.round, rank, waiter, first),
            Phase::Offering { via, .. } => {
                if seat.given.is_none() {
                    match given(*via, seat.parts(), ask.fabric, fds) {
                        Ok(given) => seat.given = Some(given),
                        Err(wrong) => {
                            let why = round.incomplete(
                                Refusal::Invalid,
                                format!("rank {rank} offers {wrong}"),
                                vec![rank],
                            );
                            seat_waits(round, rank, waiter);
                            self.waiting.insert(waiter, (ask.round, rank));
                            return self.fail(ask.round, now, why);
                        }
                    }
                }
                let before = seat_waits(round, rank, waiter);
                self.waiting.insert(waiter, (ask.round, rank));
                if let Some(before) = before {
                    self.waiting.remove(&before);
                    let no = refused(Refusal::Stale, "the rank has asked again since");
                    self.told.push((before, Told::Refused(no)));
                }
                self.complete(ask.round);
            }
        }
    }

    /// All have offered, or not yet.
    fn complete(&mut self, id: u64) {
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
                let handles = match seat.given.take() {
                    Some(Given::Fds(own)) => {
                        let count = u32::try_from(own.len()).unwrap_or(u32::MAX);
                        fds.extend(own);
                        Handles::Fds(Fds { count })
                    }
                    Some(Given::Fabric(own)) => Handles::Fabric(own),
                    None => Handles::Fabric(Vec::new()),
                };
                let memory = seat.memory.take();
                Member {
                    peer: seat.asker.peer.clone(),
                    handles: memory.is_some().then_some(handles),
                    memory,
                }
            })
            .collect();
        let limits = PageLimits {
            bytes: self.rules.page_bytes,
            fds: self.rules.page_fds,
        };
        round.phase = Phase::Complete(Some(Arc::new(Roster::new(members, fds, limits))));
        if self.open.get(&round.group) == Some(&id) {
            self.open.remove(&round.group);
        }
        let waiters: Vec<_> = round
            .seats
            .iter_mut()
            .filter_map(|(rank, seat)| Some((*rank, seat.waiter.take()?)))
            .collect();
        for (rank, waiter) in waiters {
            self.waiting.remove(&waiter);
            self.serve(id, rank, waiter, 0);
        }
        self.schedule(id);
    }

    /// Tells a rank of a complete round a page.
    fn serve(&mut self, id: u64, rank: u32, waiter: Waiter, first: u32) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        let Phase::Complete(kept) = &mut round.phase else {
            return;
        };
        let (Some(roster), Some(seat)) = (kept.clone(), round.seats.get_mut(&rank)) else {
            let no = refused(Refusal::Stale, "the members have been told");
            return self.told.push((waiter, Told::Refused(no)));
        };
        let Some(page) = roster.page(first) else {
            let no = refused(Refusal::Invalid, "no page begins with that rank");
            return self.told.push((waiter, Told::Refused(no)));
        };
        seat.served |= roster.is_last(page);
        self.told.push((waiter, Told::Members(roster, page)));
        self.forget_handles(id);
    }

    /// Handles are kept no longer than somebody needs them: fds pin memory.
    fn forget_handles(&mut self, id: u64) {
        if let Some(round) = self.rounds.get_mut(&id)
            && let Phase::Complete(roster) = &mut round.phase
            && round
                .seats
                .values()
                .all(|seat| seat.served || seat.stay != Stay::Here)
        {
            *roster = None;
        }
    }

    /// A rank is done; the waiter is told [`Told::Done`] when all are.
    pub fn leave(&mut self, now: Duration, waiter: Waiter, session: u64, ask: Leave) {
        self.tick(now);
        let wait = Duration::from_millis(ask.ms).min(self.rules.wait);
        let Some((round, rank)) = self.find(session, &ask.group, ask.round) else {
            return self.unknown(waiter);
        };
        match (&round.phase, round.seats.get_mut(&rank)) {
            (Phase::Complete(_), Some(seat)) => {
                seat.stay = Stay::Left;
                seat.deadline = now.saturating_add(wait);
                let before = seat.waiter.replace(waiter);
                self.waiting.insert(waiter, (ask.round, rank));
                if let Some(before) = before {
                    self.waiting.remove(&before);
                    let no = refused(Refusal::Stale, "the rank has asked again since");
                    self.told.push((before, Told::Refused(no)));
                }
                self.forget_handles(ask.round);
                self.end(ask.round);
                self.schedule(ask.round);
                self.tick(now);
            }
            (Phase::Failed { why, .. }, _) => {
                let why = why.clone();
                self.told.push((waiter, Told::Incomplete(why)));
                self.remove_seat(ask.round, rank);
            }
            (Phase::Gathering | Phase::Offering { .. }, _) => {
                self.told.push((waiter, Told::Done));
                self.abandon(ask.round, rank, now, "left");
            }
            (Phase::Complete(_), None) => self.unknown(waiter),
        }
    }

    /// Ends a complete round that nobody is in any more.
    fn end(&mut self, id: u64) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        if round.seats.values().any(|seat| seat.stay == Stay::Here) {
            return;
        }
        let lost = round.ranks(|seat| seat.stay == Stay::Lost);
        let told = if lost.is_empty() {
            Told::Done
        } else {
            Told::Incomplete(Arc::new(round.incomplete(
                Refusal::Closing,
                "ranks were lost before they left",
                lost,
            )))
        };
        for seat in round.seats.values_mut() {
            if let Some(waiter) = seat.waiter.take() {
                self.waiting.remove(&waiter);
                self.told.push((waiter, told.clone()));
            }
        }
        self.remove(id);
    }

    /// A session is over: its process may be dead.
    pub fn gone(&mut self, now: Duration, session: u64) {
        self.tick(now);
        for id in self.sessions.get(&session).cloned().unwrap_or_default() {
            let Some(rank) = self
                .rounds
                .get(&id)
                .and_then(|round| round.seat_of(session))
            else {
                continue;
            };
            self.abandon(id, rank, now, "is lost");
        }
        self.sessions.remove(&session);
    }

    /// A waiter does not wait any more: its connection is broken.
    pub fn cancel(&mut self, now: Duration, waiter: Waiter) {
        if let Some((id, rank)) = self.waiting.remove(&waiter)
            && let Some(round) = self.rounds.get_mut(&id)
        {
            if let Some(seat) = round.seats.get_mut(&rank) {
                seat.waiter = None;
            }
            // Elsewhere the session may come back and ask once more.
            if matches!(round.phase, Phase::Gathering) {
                self.remove_seat(id, rank);
            } else {
                self.schedule(id);
            }
        }
        self.tick(now);
    }

    /// A rank gives up, in whatever phase.
    fn abandon(&mut self, id: u64, rank: u32, now: Duration, how: &str) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        match round.phase {
            Phase::Gathering => {
                self.vacate(id, rank, refused(Refusal::Closing, "the session ended"))
            }
            Phase::Failed { .. } => self.remove_seat(id, rank),
            Phase::Offering { .. } => {
                let why = round.incomplete(
                    Refusal::Closing,
                    format!("rank {rank} {how} before it offered its memory to all"),
                    vec![rank],
                );
                self.fail(id, now, why);
                self.remove_seat(id, rank);
            }
            Phase::Complete(_) => {
                let news = Lost {
                    group: round.group.clone(),
                    round: id,
                    ranks: vec![rank],
                };
                if let Some(seat) = round.seats.get_mut(&rank) {
                    if let Some(waiter) = seat.waiter.take() {
                        self.waiting.remove(&waiter);
                        let no = refused(Refusal::Closing, "the session ended");
                        self.told.push((waiter, Told::Refused(no)));
                    }
                    if seat.stay == Stay::Here {
                        seat.stay = Stay::Lost;
                        let here = round.seats.values().filter(|seat| seat.stay == Stay::Here);
                        self.news
                            .extend(here.map(|seat| (seat.asker.session, news.clone())));
                    }
                }
                self.forget_handles(id);
                self.end(id);
                self.schedule(id);
            }
        }
    }

    /// Ends a round that is not complete, with one answer for all its ranks.
    fn fail(&mut self, id: u64, now: Duration, why: Incomplete) {
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
        if self.open.get(&round.group) == Some(&id) {
            self.open.remove(&round.group);
        }
        round.phase = Phase::Failed {
            why: why.clone(),
            until: now.saturating_add(self.rules.offer),
        };
        let mut done = Vec::new();
        for (rank, seat) in &mut round.seats {
            seat.given = None;
            if let Some(waiter) = seat.waiter.take() {
                self.waiting.remove(&waiter);
                self.told.push((waiter, Told::Incomplete(why.clone())));
                done.push(*rank);
            }
        }
        self.schedule(id);
        for rank in done {
            self.remove_seat(id, rank);
        }
    }

    /// Lets time pass.
    pub fn tick(&mut self, now: Duration) {
        while let Some(&(at, id)) = self.deadlines.first()
            && at <= now
        {
            self.expire(id, now);
        }
    }

    /// Lets time pass; how long until it alone changes something for `waiter`, at most a second.
    pub fn next_tick(&mut self, now: Duration, waiter: Waiter) -> Duration {
        self.tick(now);
        let round = self.waiting.get(&waiter).map(|(id, _)| id);
        let next = round.and_then(|id| self.rounds.get(id)?.scheduled);
        next.map_or(TICK, |at| at.saturating_sub(now).min(TICK))
    }

    fn expire(&mut self, id: u64, now: Duration) {
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
            Phase::Failed { .. } => self.remove(id),
            Phase::Complete(_) => {
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

    /// How many rounds there are.
    pub fn len(&self) -> usize {
        self.rounds.len()
    }

    fn unknown(&mut self, waiter: Waiter) {
        let no = refused(Refusal::NotFound, "no such round of this session's");
        self.told.push((waiter, Told::Refused(no)));
    }

    fn find(&mut self, session: u64, group: &str, id: u64) -> Option<(&mut Round, u32)> {
        let round = self.rounds.get_mut(&id)?;
        let rank = round.seat_of(session)?;
        (round.group == group).then_some((round, rank))
    }

    /// Removes a seat from a round, after telling its waiter why.
    fn vacate(&mut self, id: u64, rank: u32, why: Refused) {
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
    fn remove_seat(&mut self, id: u64, rank: u32) {
        let Some(round) = self.rounds.get_mut(&id) else {
            return;
        };
        if let Some(seat) = round.seats.remove(&rank) {
            unlist(&mut self.sessions, seat.asker.session, id);
        }
        if round.seats.is_empty() {
            self.remove(id);
        } else {
            self.schedule(id);
        }
    }

    fn remove(&mut self, id: u64) {
        let Some(round) = self.rounds.remove(&id) else {
            return;
        };
        for seat in round.seats.values() {
            unlist(&mut self.sessions, seat.asker.session, id);
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

    fn schedule(&mut self, id: u64) {
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

fn seat_waits(round: &mut Round, rank: u32, waiter: Waiter) -> Option<Waiter> {
    round.seats.get_mut(&rank)?.waiter.replace(waiter)
}

fn unlist(sessions: &mut HashMap<u64, BTreeSet<u64>>, session: u64, id: u64) {
    if let Some(rounds) = sessions.get_mut(&session) {
        rounds.remove(&id);
        if rounds.is_empty() {
            sessions.remove(&session);
        }
    }
}

/// A rank's handles, if they are of the agreed type and one for each part.
fn given(
    via: HandleType,
    parts: usize,
    fabric: Vec<Secret>,
    fds: Vec<OwnedFd>,
) -> Result<Given, String> {
    let (right, given) = match via {
        HandleType::Fabric => (
            fds.is_empty()
                && fabric.len() == parts
                && fabric.iter().all(|handle| handle.expose().len() == 64),
            Given::Fabric(fabric),
        ),
        HandleType::PosixFd => (fabric.is_empty() && fds.len() == parts, Given::Fds(fds)),
    };
    if right {
        Ok(given)
    } else {
        Err(format!("other than {parts} {via} handles"))
    }
}

#[cfg(test)]
#[path = "round_tests.rs"]
mod tests;
