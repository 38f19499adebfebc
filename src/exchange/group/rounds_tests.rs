//! Tests of the rounds, by single stories and by random ones.

use proptest::prelude::*;

use super::*;
use crate::driver::HandleType;
use crate::driver::{Access, Location};
use crate::exchange::group::round::Asker;
use crate::exchange::protocol::{Join, Leave, Offer, Secret};
use crate::share::{BootId, Description};
use crate::share::{Identity, InstanceId, Part};
use std::collections::BTreeMap;

const SECOND: Duration = Duration::from_secs(1);
const BOTH: &[HandleType] = &[HandleType::PosixFd, HandleType::Fabric];

fn at(seconds: u64) -> Duration {
    SECOND * u32::try_from(seconds).unwrap()
}

fn memory() -> Description {
    Description {
        len: 1,
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
        peer: "node".into(),
        boot: BootId::from_bytes([1; 16]),
        local: true,
    }
}

fn ask(rank: u32, size: u32) -> Join {
    Join {
        group: "g".into(),
        rank,
        size,
        can: BOTH.to_vec(),
        cannot: Vec::new(),
        memory: Some(memory()),
        ms: 10_000,
    }
}

fn handles(round: u64) -> Offer {
    Offer {
        group: "g".into(),
        round,
        fabric: vec![Secret::new(&[7; 64]).unwrap()],
        first: 0,
    }
}

/// Rounds, with what was told to whom.
struct Story {
    rounds: Rounds,
    told: HashMap<Waiter, Told>,
    news: Vec<(u64, Lost)>,
    waiters: u64,
}

impl Story {
    fn new(rules: Rules) -> Self {
        Self {
            rounds: Rounds::new(rules),
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

    /// Sessions 0 to `size - 1` as complete ranks.
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

    fn nothing_left(&self) {
        assert_eq!(self.rounds.len(), 0);
        assert!(self.rounds.open.is_empty());
        assert!(self.rounds.present.is_empty());
        assert!(self.rounds.waiting.is_empty());
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
    assert!(next > round && story.agreed(other) == next);
    // A complete round is not disturbed by the next.
    for session in [0, 11] {
        story.offer(at(3), session, handles(next));
    }
    let third = story.join(at(4), 11, ask(1, 2));
    assert!(!story.told.contains_key(&third));
    assert!(story.news.is_empty());
}

#[test]
fn a_rank_twice_while_gathering() {
    let mut story = Story::new(Rules::default());
    let first = story.join(at(0), 1, ask(0, 2));
    let second = story.join(at(0), 2, ask(0, 2));
    assert_eq!(story.reason(first).0, "exists");
    let stranger = Asker {
        peer: "other".into(),
        ..asker(3)
    };
    let third = story.join_as(at(0), stranger, ask(0, 2));
    assert_eq!(story.reason(third).0, "exists");
    let both = story.join(at(0), 2, ask(1, 2));
    assert_eq!(story.reason(both).0, "exists");
    assert!(!story.told.contains_key(&second));
}

#[test]
fn what_cannot_be_is_refused() {
    let rules = Rules {
        groups: 1,
        size: 8,
        parts: 2,
        ..Rules::default()
    };
    let mut story = Story::new(rules);
    let first = story.join(at(0), 0, ask(0, 4));
    let join = |change: fn(&mut Join)| {
        let mut join = ask(1, 4);
        change(&mut join);
        join
    };
    for (reason, wrong) in [
        ("invalid", join(|join| join.size = 5)),
        ("invalid", join(|join| join.rank = 4)),
        ("invalid", join(|join| join.size = 0)),
        ("limit", join(|join| join.size = 9)),
        ("invalid", join(|join| join.group = String::new())),
        ("invalid", join(|join| join.group = "a b".into())),
        ("limit", join(|join| join.group = "another".into())),
        (
            "invalid",
            join(|join| join.memory.as_mut().unwrap().len = 0),
        ),
        ("invalid", join(|join| join.cannot = vec![String::new(); 9])),
    ] {
        let waiter = story.join(at(0), 1, wrong);
        assert_eq!(story.reason(waiter).0, reason);
    }
    story.join(at(0), 1, ask(1, 4));
    let third = story.join(at(0), 2, ask(2, 4));
    assert_eq!(story.reason(third).0, "limit", "three parts");
    assert!(!story.told.contains_key(&first));
}

#[test]
fn one_peer_with_many_sessions_does_not_hold_all_groups() {
    let rules = Rules {
        groups: 9,
        groups_per_peer: 2,
        ..Rules::default()
    };
    let mut story = Story::new(rules);
    let join = |story: &mut Story, session, peer: &str, group: &str, rank| {
        let asker = Asker {
            peer: peer.into(),
            ..asker(session)
        };
        let group = group.into();
        let waiter = story.join_as(
            at(0),
            asker,
            Join {
                group,
                ..ask(rank, 2)
            },
        );
        story
            .told
            .contains_key(&waiter)
            .then(|| shown(story.told.get(&waiter)))
    };
    assert_eq!(join(&mut story, 0, "a", "g", 0), None);
    assert_eq!(join(&mut story, 1, "a", "h", 0), None);
    let limit =
        |told: Option<String>| told.is_some_and(|told| told.contains("2 groups of this peer"));
    assert!(limit(join(&mut story, 2, "a", "i", 0)));
    // Neither in a group that another has begun, which is not harmed.
    assert_eq!(join(&mut story, 3, "b", "i", 0), None);
    assert!(limit(join(&mut story, 4, "a", "i", 1)));
    // Its own it may join, and join again.
    assert_eq!(join(&mut story, 5, "a", "h", 0), None);
    assert!(join(&mut story, 6, "a", "g", 1).unwrap().contains("Agreed"));
    // Who has left is not held to be there, whoever stays.
    let round = story.rounds.open["g"];
    for session in [0, 6] {
        story.offer(at(0), session, handles(round));
    }
    story.leave(at(0), 0, round, 60_000);
    story.leave(at(0), 0, round, 60_000);
    assert!(limit(join(&mut story, 7, "a", "j", 0)));
    story.gone(at(0), 6);
    assert_eq!(join(&mut story, 7, "a", "j", 0), None);
    assert!(limit(join(&mut story, 8, "a", "k", 0)));
    for session in [1, 3, 5, 7] {
        story.gone(at(0), session);
    }
    story.nothing_left();
}

#[test]
fn wrong_handles_fail_all_alike() {
    for wrong in [Vec::new(), vec![Secret::new(&[7; 63]).unwrap()]] {
        let mut story = Story::new(Rules::default());
        let joins: Vec<_> = (0..2)
            .map(|rank| story.join(at(0), rank.into(), ask(rank, 2)))
            .collect();
        let round = story.agreed(joins[0]);
        let good = story.offer(at(0), 0, handles(round));
        let mut offer = handles(round);
        offer.fabric = wrong;
        let bad = story.offer(at(0), 1, offer);
        for waiter in [good, bad] {
            assert_eq!(story.reason(waiter), ("invalid".into(), vec![1]));
        }
        story.nothing_left();
    }
}

#[test]
fn over_tcp_there_are_no_fds() {
    let mut story = Story::new(Rules::default());
    let far = Asker {
        local: false,
        ..asker(1)
    };
    let mut fd = ask(1, 2);
    fd.can = vec![HandleType::PosixFd];
    story.join(at(0), 0, ask(0, 2));
    let waiter = story.join_as(at(0), far, fd);
    let Some(Told::Incomplete(why)) = story.told.get(&waiter) else {
        panic!("{}", shown(story.told.get(&waiter)));
    };
    assert_eq!(why.reason, "no_common_handle");
    assert!(why.reasons[0].contains("over TCP"), "{:?}", why.reasons);
}

#[test]
fn members_are_for_their_ranks_alone() {
    let mut story = Story::new(Rules::default());
    let joins: Vec<_> = (0..2)
        .map(|rank| story.join(at(0), rank.into(), ask(rank, 2)))
        .collect();
    let round = story.agreed(joins[0]);
    let stranger = story.offer(at(0), 9, handles(round));
    assert_eq!(story.reason(stranger).0, "not_found");
    story.offer(at(0), 0, handles(round));
    story.offer(at(0), 1, handles(round));
    let stranger = story.offer(at(0), 9, handles(round));
    assert_eq!(story.reason(stranger).0, "not_found");
}

#[test]
fn a_rank_whose_connection_broke_is_told_again() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    // All have been told, whether they have read it or not; one has left meanwhile.
    story.leave(at(1), 2, round, 60_000);
    let keep = Rules::default().keep;
    for session in [0, 1, 1] {
        let again = story.offer(keep - SECOND, session, handles(round));
        assert!(matches!(story.told[&again], Told::Members(_, 0)));
    }
    // Nobody asks, but the time is over: the handles are forgotten, and nothing else.
    assert_eq!(story.rounds.deadline(), Some(keep));
    story.tick(keep);
    assert!(matches!(
        story.rounds.rounds[&round].phase,
        Phase::Complete(None)
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
    let mut story = Story::new(Rules {
        groups: 2,
        ..Rules::default()
    });
    let round = story.complete(3);
    let unheard = story.leave(at(1), 1, round, 60_000);
    story.rounds.cancel(at(2), unheard);
    story.gone(at(3), 2);
    let last = story.leave(at(3), 0, round, 60_000);
    let again = story.leave(at(4), 1, round, 60_000);
    for waiter in [last, again] {
        assert_eq!(story.reason(waiter), ("closing".into(), vec![2]));
    }
    // Only to ranks that have left, only for a while, and only of the last rounds.
    for (now, session) in [(at(5), 2), (at(5), 7), (at(3) + Rules::default().keep, 1)] {
        let waiter = story.leave(now, session, round, 0);
        assert_eq!(story.reason(waiter).0, "not_found");
    }
    assert!(story.rounds.ended.is_empty());
    for _ in 0..3 {
        let round = story.complete(1);
        story.leave(at(1), 0, round, 0);
    }
    assert_eq!(story.rounds.ended.len(), 2);
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

#[derive(Clone, Debug)]
enum Step {
    Join {
        session: u64,
        rank: u32,
        fabric: bool,
    },
    Offer {
        session: u64,
        right: bool,
    },
    Leave {
        session: u64,
    },
    Gone {
        session: u64,
    },
    Cancel {
        nth: usize,
    },
    Wait {
        seconds: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0..4_u64;
    prop_oneof![
        8 => (session.clone(), 0..3_u32, prop::bool::weighted(0.9))
            .prop_map(|(session, rank, fabric)| Step::Join { session, rank, fabric }),
        8 => (session.clone(), prop::bool::weighted(0.95))
            .prop_map(|(session, right)| Step::Offer { session, right }),
        2 => session.clone().prop_map(|session| Step::Leave { session }),
        1 => session.prop_map(|session| Step::Gone { session }),
        1 => (0..8_usize).prop_map(|nth| Step::Cancel { nth }),
        1 => (0..12_u64).prop_map(|seconds| Step::Wait { seconds }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever happens: nobody is told twice, all ranks of a round are told the same, no round is
    /// both complete and failed, everybody is told in time, and nothing is left behind.
    #[test]
    fn never_a_split_decision(steps in prop::collection::vec(step(), 1..80)) {
        let mut story = Story::new(Rules::default());
        let mut now = Duration::ZERO;
        // By round: what its ranks were told on joining and on offering.
        let mut joined: HashMap<u64, Vec<Waiter>> = HashMap::new();
        let mut offered: HashMap<u64, Vec<Waiter>> = HashMap::new();
        let mut asked: BTreeMap<Waiter, Duration> = BTreeMap::new();
        let mut rounds_of: HashMap<u64, u64> = HashMap::new();
        let mut cancelled = BTreeSet::new();
        for step in steps {
            match step {
                Step::Join { session, rank, fabric } => {
                    let mut join = ask(rank, 3);
                    if !fabric {
                        join.can = Vec::new();
                    }
                    // As rounds are numbered: the open one, or the one that begins now.
                    let waiter = story.join(now, session, join);
                    let round = match story.told.get(&waiter) {
                        Some(Told::Agreed(agreed)) => Some(agreed.round),
                        Some(Told::Incomplete(_)) => Some(story.rounds.last),
                        Some(_) => None,
                        None => story.rounds.waiting.get(&waiter).map(|(round, _)| *round),
                    };
                    if let Some(round) = round {
                        joined.entry(round).or_default().push(waiter);
                        rounds_of.insert(session, round);
                    }
                    asked.insert(waiter, now + at(10));
                }
                Step::Offer { session, right } => {
                    let round = rounds_of.get(&session).copied().unwrap_or(0);
                    let mut offer = handles(round);
                    if !right {
                        offer.fabric.clear();
                    }
                    let waiter = story.offer(now, session, offer);
                    offered.entry(round).or_default().push(waiter);
                    asked.insert(waiter, now + Rules::default().offer);
                }
                Step::Leave { session } => {
                    let round = rounds_of.get(&session).copied().unwrap_or(0);
                    let waiter = story.leave(now, session, round, 3000);
                    asked.insert(waiter, now + at(3));
                }
                Step::Gone { session } => story.gone(now, session),
                Step::Cancel { nth } => {
                    let mut waiting: Vec<_> = story.rounds.waiting.keys().copied().collect();
                    waiting.sort_unstable();
                    if let Some(&waiter) = waiting.get(nth) {
                        cancelled.insert(waiter);
                        story.rounds.cancel(now, waiter);
                        story.take();
                    }
                }
                Step::Wait { seconds } => {
                    now += at(seconds);
                    story.tick(now);
                }
            }
            for (waiter, until) in &asked {
                let waits = !story.told.contains_key(waiter) && !cancelled.contains(waiter);
                prop_assert!(!waits || *until > now, "waiter {} waits beyond its deadline", waiter);
            }
        }
        for (round, waiters) in joined {
            let told: Vec<_> = waiters.iter().filter_map(|waiter| story.told.get(waiter)).collect();
            let agreed = told.iter().filter(|told| matches!(told, Told::Agreed(_))).count();
            let failed: Vec<_> = told.iter().filter_map(|told| match told {
                Told::Incomplete(why) => Some(why),
                _ => None,
            }).collect();
            prop_assert!(agreed == 0 || agreed == 3, "round {}: {} agreed", round, agreed);
            prop_assert!(agreed == 0 || failed.is_empty(), "round {} is split", round);
            prop_assert!(failed.windows(2).all(|pair| pair[0] == pair[1]));
        }
        for (round, waiters) in offered {
            let told: Vec<_> = waiters.iter().filter_map(|waiter| story.told.get(waiter)).collect();
            let members = told.iter().filter(|told| matches!(told, Told::Members(..))).count();
            let failed: Vec<_> = told.iter().filter_map(|told| match told {
                Told::Incomplete(why) => Some(why),
                _ => None,
            }).collect();
            prop_assert!(members == 0 || failed.is_empty(), "round {} is split", round);
            prop_assert!(failed.windows(2).all(|pair| pair[0] == pair[1]));
        }
        for session in 0..4 {
            story.gone(now, session);
        }
        story.nothing_left();
    }
}
