//! Tests of the rounds, with hand-written and random sequences.

mod gather_limits;
mod gathers;
mod random;
mod random_gathers;
mod refusals;
mod sources;
mod strangers;

use super::*;
use crate::Who;
use crate::driver::HandleType;
use crate::driver::{Access, Location};
use crate::group::collective::Outcome;
use crate::group::round::Asker;
use crate::protocol::{Agreed, Answer, Join, Leave, Members, Offer, Secret, Texts, decode};
use crate::share::{BootId, Description};
use crate::share::{Identity, InstanceId, Part};

const SECOND: Duration = Duration::from_secs(1);
const BOTH: &[HandleType] = &[HandleType::PosixFd, HandleType::Fabric];

fn at(seconds: u64) -> Duration {
    SECOND * u32::try_from(seconds).unwrap()
}

fn memory() -> Description {
    Description {
        len: 1,
        offset: None,
        access: Access::ReadWrite,
        parts: vec![Part {
            identity: Identity {
                boot: BootId::from_bytes([1; 16]),
                instance: InstanceId::from_bytes([2; 16]),
                allocation: 1,
                generation: 0,
            },
            bytes: 2 << 20,
            location: Location::HostNuma(0),
        }],
    }
}

fn asker(session: u64) -> Asker {
    Asker {
        session,
        peer: PeerName::certificate("node").unwrap(),
        boot: BootId::from_bytes([1; 16]),
        local: true,
        queues: false,
        charge: None,
    }
}

fn ask(rank: u32, size: u32) -> Join {
    Join {
        group: "g".into(),
        rank,
        size,
        admission: secret(9),
        can: BOTH.to_vec(),
        cannot: Vec::new(),
        memory: Some(memory()),
        ms: 10_000,
    }
}

fn secret(byte: u8) -> Admission {
    Admission::Secret(Secret::new(&[byte; 32]).unwrap())
}

fn handles(round: u64) -> Offer {
    Offer {
        group: "g".into(),
        round,
        fabric: vec![Secret::new(&[7; 64]).unwrap()],
        first: 0,
    }
}

fn rights<const N: usize>(entries: [(&str, Who); N]) -> Rights {
    Rights::new(entries.map(|(pattern, who)| (pattern.to_owned(), who))).unwrap()
}

/// Rounds, with all answers sent so far.
struct Story {
    rounds: Rounds,
    told: HashMap<Waiter, Told>,
    news: Vec<(u64, Lost)>,
    waiters: u64,
}

impl Story {
    fn new(rules: Rules) -> Self {
        Self {
            rounds: Rounds::new(rules, rights([("*", Who::anyone())]), Keys::new().unwrap()),
            told: HashMap::new(),
            news: Vec::new(),
            waiters: 0,
        }
    }

    fn take(&mut self) {
        let (told, news) = self.rounds.take();
        for (waiter, told) in told {
            if let Told::Refused(no) = &told {
                assert_ne!(no.reason, "internal");
            }
            assert!(self.told.insert(waiter, told).is_none(), "told twice");
        }
        self.news.extend(news);
    }

    fn join(&mut self, now: Duration, session: u64, ask: Join) -> Waiter {
        self.join_as(now, asker(session), ask)
    }

    fn join_as(&mut self, now: Duration, asker: Asker, ask: Join) -> Waiter {
        self.waiters += 1;
        self.rounds.join(now, self.waiters, asker, ask);
        self.take();
        self.waiters
    }

    fn offer(&mut self, now: Duration, session: u64, offer: Offer) -> Waiter {
        self.waiters += 1;
        self.rounds
            .offer(now, self.waiters, session, offer, Vec::new());
        self.take();
        self.waiters
    }

    fn leave(&mut self, now: Duration, session: u64, round: u64, ms: u64) -> Waiter {
        self.waiters += 1;
        let group = "g".into();
        self.rounds
            .leave(now, self.waiters, session, Leave { group, round, ms });
        self.take();
        self.waiters
    }

    fn gone(&mut self, now: Duration, session: u64) {
        self.rounds.gone(now, session);
        self.take();
    }

    fn tick(&mut self, now: Duration) {
        self.rounds.tick(now);
        self.take();
    }

    fn agreed(&self, waiter: Waiter) -> u64 {
        match self.told.get(&waiter) {
            Some(Told::Agreed(agreed)) => agreed.round,
            other => panic!("{}", shown(other)),
        }
    }

    fn reason(&self, waiter: Waiter) -> (String, Vec<u32>) {
        match self.told.get(&waiter) {
            Some(Told::Refused(no)) => (no.reason.clone(), Vec::new()),
            Some(Told::Incomplete(why)) => (why.reason.clone(), why.ranks.clone()),
            other => panic!("{}", shown(other)),
        }
    }

    /// Makes sessions 0 to `size - 1` ranks of a complete round.
    fn complete(&mut self, size: u32) -> u64 {
        let joins: Vec<_> = (0..size)
            .map(|rank| self.join(at(0), rank.into(), ask(rank, size)))
            .collect();
        let round = self.agreed(joins[0]);
        for rank in 0..size {
            self.offer(at(0), rank.into(), handles(round));
        }
        round
    }

    /// Returns the round of a group that can be joined.
    fn round_of(&self, group: &str) -> u64 {
        let open = self.rounds.open.values();
        let mut open = open.filter(|id| self.rounds.rounds[id].group == group);
        *open.next().unwrap()
    }

    fn nothing_left(&self) {
        assert_eq!(self.rounds.len(), 0);
        assert!(self.rounds.open.is_empty());
        assert!(self.rounds.present.is_empty());
        assert!(self.rounds.waiters.places.is_empty());
        assert!(self.rounds.deadlines.is_empty());
    }
}

fn shown(told: Option<&Told>) -> String {
    match told {
        None => "nothing told".into(),
        Some(Told::Agreed(agreed)) => format!("{agreed:?}"),
        Some(Told::Members(_, page)) => format!("members, page {page}"),
        Some(Told::Done) => "done".into(),
        Some(Told::Incomplete(why)) => format!("{why:?}"),
        Some(Told::Refused(no)) => format!("{no:?}"),
    }
}

#[test]
fn ranks_agree_exchange_and_leave() {
    let mut story = Story::new(Rules::default());
    let first = story.join(at(0), 1, ask(1, 2));
    assert!(story.told.is_empty());
    let second = story.join(at(5), 0, ask(0, 2));
    let round = story.agreed(first);
    assert_eq!(story.agreed(second), round);
    let first = story.offer(at(5), 1, handles(round));
    assert!(!story.told.contains_key(&first));
    let second = story.offer(at(6), 0, handles(round));
    for waiter in [first, second] {
        assert!(matches!(story.told[&waiter], Told::Members(..)));
    }
    let first = story.leave(at(100), 0, round, 1000);
    assert!(!story.told.contains_key(&first));
    let second = story.leave(at(100), 1, round, 1000);
    for waiter in [first, second] {
        assert!(matches!(story.told[&waiter], Told::Done));
    }
    story.nothing_left();
}

#[test]
fn missing_ranks_are_named_to_all_alike() {
    let mut story = Story::new(Rules::default());
    let early = story.join(at(0), 0, ask(0, 4));
    let late = story.join(at(9), 2, ask(2, 4));
    story.tick(at(10));
    for waiter in [early, late] {
        assert_eq!(story.reason(waiter), ("timed_out".into(), vec![1, 3]));
    }
    story.nothing_left();
    // A late rank begins a new round.
    let late = story.join(at(11), 3, ask(3, 4));
    assert!(!story.told.contains_key(&late));
}

#[test]
fn a_rank_lost_between_fails_all_alike() {
    let mut story = Story::new(Rules::default());
    let joins: Vec<_> = (0..3)
        .map(|rank| story.join(at(0), rank.into(), ask(rank, 3)))
        .collect();
    let round = story.agreed(joins[0]);
    let before = story.offer(at(1), 0, handles(round));
    story.gone(at(1), 1);
    let after = story.offer(at(2), 2, handles(round));
    for waiter in [before, after] {
        assert_eq!(story.reason(waiter), ("closing".into(), vec![1]));
    }
    story.nothing_left();
}

#[test]
fn a_silent_rank_fails_all_alike() {
    let mut story = Story::new(Rules::default());
    let joins: Vec<_> = (0..3)
        .map(|rank| story.join(at(0), rank.into(), ask(rank, 3)))
        .collect();
    let round = story.agreed(joins[0]);
    let waiters = [0, 2].map(|session| story.offer(at(1), session, handles(round)));
    story.tick(at(10));
    for waiter in waiters {
        assert_eq!(story.reason(waiter), ("timed_out".into(), vec![1]));
    }
    let late = story.offer(at(11), 1, handles(round));
    assert_eq!(story.reason(late), ("timed_out".into(), vec![1]));
    story.nothing_left();
}

#[test]
fn a_rank_that_joins_again_begins_a_new_round() {
    let mut story = Story::new(Rules::default());
    let joins: Vec<_> = (0..2)
        .map(|rank| story.join(at(0), rank.into(), ask(rank, 2)))
        .collect();
    let round = story.agreed(joins[0]);
    let offered = story.offer(at(1), 0, handles(round));
    // Rank 1 crashed after it joined, and is back before its old session ends.
    let again = story.join(at(2), 11, ask(1, 2));
    assert_eq!(story.reason(offered), ("closing".into(), vec![1]));
    let other = story.join(at(3), 0, ask(0, 2));
    let next = story.agreed(again);
    assert!(next != round && story.agreed(other) == next);
    // The next round does not disturb a complete one.
    for session in [0, 11] {
        story.offer(at(3), session, handles(next));
    }
    let third = story.join(at(4), 11, ask(1, 2));
    assert!(!story.told.contains_key(&third));
    assert!(story.news.is_empty());
}

#[test]
fn a_rank_whose_connection_broke_is_told_again() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    // All ranks got their answer, read or not; one has left meanwhile.
    story.leave(at(1), 2, round, 60_000);
    let keep = Rules::default().keep;
    for session in [0, 1, 1] {
        let again = story.offer(keep - SECOND, session, handles(round));
        assert!(matches!(story.told[&again], Told::Members(_, 0)));
    }
    // Without a request, the time passes: only the handles are dropped.
    assert_eq!(story.rounds.deadline(), Some(keep));
    story.tick(keep);
    assert!(matches!(
        story.rounds.rounds[&round].collective.joined,
        Outcome::Forgotten
    ));
    let late = story.offer(keep, 1, handles(round));
    assert_eq!(story.reason(late).0, "stale");
    assert_eq!(story.rounds.deadline(), Some(at(61)), "the leaving rank's");
    for session in [0, 1] {
        story.leave(at(30), session, round, 0);
    }
    story.nothing_left();
}

#[test]
fn members_come_in_pages() {
    let rules = Rules {
        page_bytes: 1,
        ..Rules::default()
    };
    let mut story = Story::new(rules);
    let round = story.complete(2);
    for session in 0..2 {
        for (first, page) in [(1, 1), (0, 0), (1, 1)] {
            let mut offer = handles(round);
            offer.first = first;
            let waiter = story.offer(at(0), session, offer);
            assert!(matches!(story.told[&waiter], Told::Members(_, told) if told == page));
        }
    }
    let mut offer = handles(round);
    offer.first = 2;
    let waiter = story.offer(at(0), 0, offer);
    assert_eq!(story.reason(waiter).0, "invalid");
}

#[test]
fn the_loss_of_a_member_is_news_to_the_others() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    story.leave(at(1), 2, round, 60_000);
    story.gone(at(1), 1);
    let expected = Lost {
        group: "g".into(),
        round,
        ranks: vec![1],
    };
    assert_eq!(story.news, [(0, expected)], "not to the one that left");
    let last = story.leave(at(2), 0, round, 0);
    assert_eq!(story.reason(last), ("closing".into(), vec![1]));
    story.nothing_left();
}

#[test]
fn what_came_of_a_round_is_told_once_more() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    let unheard = story.leave(at(1), 1, round, 60_000);
    story.rounds.cancel(at(2), unheard);
    story.gone(at(3), 2);
    let last = story.leave(at(3), 0, round, 60_000);
    let again = story.leave(at(4), 1, round, 60_000);
    for waiter in [last, again] {
        assert_eq!(story.reason(waiter), ("closing".into(), vec![2]));
    }
    // Only ranks that have left get it, and only for a while.
    for (now, session) in [(at(5), 2), (at(5), 7), (at(3) + Rules::default().keep, 1)] {
        let waiter = story.leave(now, session, round, 0);
        assert_eq!(story.reason(waiter).0, "not_found");
    }
    assert_eq!(story.rounds.ended.len(), 0);
    story.nothing_left();
}

#[test]
fn who_does_not_leave_is_named() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    let waiter = story.leave(at(1), 0, round, 2000);
    let at_once = story.leave(at(1), 1, round, 0);
    assert_eq!(story.reason(at_once), ("timed_out".into(), vec![2]));
    story.tick(at(3));
    assert_eq!(story.reason(waiter), ("timed_out".into(), vec![2]));
    story.gone(at(4), 2);
    story.nothing_left();
}
