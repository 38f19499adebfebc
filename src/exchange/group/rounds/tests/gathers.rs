//! Barriers and gathers of complete rounds.

use super::*;
use crate::protocol::{Brought, Gather, MAX_GATHER, Operation, Payload};

pub(super) fn bytes(byte: u8, len: usize) -> Operation {
    Operation::Bytes(Payload::new(&vec![byte; len]).unwrap())
}

pub(super) fn brought() -> Operation {
    Operation::Memory(Brought {
        memory: Some(memory()),
        fabric: vec![Secret::new(&[7; 64]).unwrap()],
    })
}

pub(super) fn number(round: u64, number: u64, operation: Operation) -> Gather {
    Gather {
        group: "g".into(),
        round,
        number,
        operation,
        first: None,
        ms: 5000,
    }
}

pub(super) fn barrier(round: u64, of: u64) -> Gather {
    number(round, of, Operation::Barrier)
}

impl Story {
    pub(super) fn gather(&mut self, now: Duration, session: u64, ask: Gather) -> Waiter {
        self.waiters += 1;
        let waiter = self.waiters;
        (self.rounds).gather(now, waiter, session, ask, Vec::new(), None);
        self.take();
        waiter
    }

    /// Whether a rank is still waiting.
    pub(super) fn waits(&self, waiter: Waiter) -> bool {
        !self.told.contains_key(&waiter)
    }

    #[track_caller]
    pub(super) fn passed(&self, waiters: &[Waiter]) {
        for waiter in waiters {
            let told = self.told.get(waiter);
            assert!(matches!(told, Some(Told::Done)), "{}", shown(told));
        }
    }
}

/// Returns a page's members, decoded as a client does.
pub(super) fn members(told: Option<&Told>) -> Members {
    let Some(Told::Members(roster, page)) = told else {
        panic!("{}", shown(told));
    };
    let reply = decode::<Reply>(&roster.reply(*page, 1)).unwrap();
    match reply.answer {
        Some(Answer::Members(members)) => members,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_barrier_opens_when_the_last_rank_enters() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    for of in 1..4 {
        let first = story.gather(at(of), 0, barrier(round, of));
        let second = story.gather(at(of), 2, barrier(round, of));
        assert!(story.waits(first) && story.waits(second));
        let last = story.gather(at(of), 1, barrier(round, of));
        story.passed(&[first, second, last]);
    }
    assert!(story.rounds.waiters.places.is_empty());
}

#[test]
fn a_rank_that_enters_twice_does_not_pass_early() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    let first = story.gather(at(1), 0, barrier(round, 1));
    let again = story.gather(at(1), 0, barrier(round, 1));
    let third = story.gather(at(1), 0, barrier(round, 1));
    assert_eq!(story.reason(first).0, "stale");
    assert_eq!(story.reason(again).0, "stale");
    assert!(story.waits(third));
    let second = story.gather(at(1), 1, barrier(round, 1));
    assert!(story.waits(third) && story.waits(second));
    let last = story.gather(at(1), 2, barrier(round, 1));
    story.passed(&[second, third, last]);
}

#[test]
fn a_rank_that_goes_on_fails_what_the_others_wait_for() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    let given_up = story.gather(at(1), 0, barrier(round, 1));
    story.rounds.cancel(at(1), given_up);
    let waits = story.gather(at(1), 1, barrier(round, 1));
    let next = story.gather(at(2), 0, barrier(round, 3));
    assert_eq!(story.reason(waits), ("timed_out".into(), vec![0]));
    // A rank that comes later gets the same answer for each number.
    for (session, of) in [(1, 2), (2, 1), (2, 2)] {
        let late = story.gather(at(3), session, barrier(round, of));
        assert_eq!(story.reason(late), ("timed_out".into(), vec![0]));
    }
    let others = [1, 2].map(|session| story.gather(at(3), session, barrier(round, 3)));
    story.passed(&[next, others[0], others[1]]);
}

#[test]
fn missing_ranks_are_named_to_all_and_later_calls_succeed() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    let patient = story.gather(
        at(1),
        0,
        Gather {
            ms: 60_000,
            ..barrier(round, 1)
        },
    );
    let hasty = story.gather(at(2), 1, barrier(round, 1));
    assert_eq!(story.rounds.deadline(), Some(at(7)), "the shortest decides");
    story.tick(at(7));
    let late = story.gather(at(8), 2, barrier(round, 1));
    for waiter in [patient, hasty, late] {
        assert_eq!(story.reason(waiter), ("timed_out".into(), vec![2]));
    }
    let again = [0, 1, 2].map(|session| story.gather(at(9), session, barrier(round, 2)));
    story.passed(&again);
}

#[test]
fn a_gather_returns_what_every_rank_gave() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    for (of, len) in [(1, 16), (2, 0), (3, MAX_GATHER)] {
        let all = [2, 0, 1].map(|session| {
            let operation = bytes(session as u8, len);
            story.gather(at(1), session, number(round, of, operation))
        });
        for waiter in all {
            let members = members(story.told.get(&waiter));
            assert!(!members.more);
            for (rank, member) in members.members.iter().enumerate() {
                let bytes = member.bytes.as_ref().unwrap();
                assert_eq!(bytes.expose(), vec![rank as u8; len]);
            }
        }
    }
}

#[test]
fn gathered_memory_is_announced_and_then_asked_for() {
    let mut story = Story::new(Rules {
        page_bytes: 1,
        ..Rules::default()
    });
    let round = story.complete(2);
    let none = Operation::Memory(Brought::default());
    let first = story.gather(at(1), 0, number(round, 1, brought()));
    let early = Gather {
        first: Some(0),
        ..number(round, 1, Operation::Barrier)
    };
    let early = story.gather(at(1), 0, early);
    assert_eq!(story.reason(early).0, "invalid");
    assert!(story.waits(first), "to ask for members is not to enter");
    let second = story.gather(at(1), 1, number(round, 1, none));
    for waiter in [first, second] {
        let Some(Told::Agreed(agreed)) = story.told.get(&waiter) else {
            panic!("{}", shown(story.told.get(&waiter)));
        };
        assert_eq!((agreed.handles, agreed.via), (1, HandleType::Fabric));
    }
    for (first, brings) in [(0, true), (1, false), (0, true)] {
        let ask = Gather {
            first: Some(first),
            ..number(round, 1, Operation::Barrier)
        };
        let page = story.gather(at(2), 1, ask);
        let page = members(story.told.get(&page));
        assert_eq!(page.members.len(), 1);
        assert_eq!(page.members[0].memory.is_some(), brings);
        assert_eq!(page.members[0].handles.is_some(), brings);
    }
}

#[test]
fn ranks_that_disagree_all_hear_about_what() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    for (of, one, other, says) in [
        (
            1,
            Operation::Barrier,
            bytes(1, 16),
            ["a barrier", "a gather of 16 bytes"],
        ),
        (
            2,
            bytes(1, 8),
            bytes(1, 9),
            ["a gather of 8 bytes", "a gather of 9 bytes"],
        ),
        (
            3,
            brought(),
            bytes(1, 0),
            ["a gather of memory", "a gather of 0 bytes"],
        ),
    ] {
        let first = story.gather(at(1), 1, number(round, of, one.clone()));
        let second = story.gather(at(1), 2, number(round, of, other));
        let late = story.gather(at(2), 0, number(round, of, one));
        for waiter in [first, second, late] {
            let Some(Told::Incomplete(why)) = story.told.get(&waiter) else {
                panic!("{}", shown(story.told.get(&waiter)));
            };
            assert_eq!(why.reason, "ranks_disagree");
            let [one, other] = says;
            assert_eq!(
                why.reasons,
                [format!("rank 1: {one}"), format!("rank 2: {other}")]
            );
        }
    }
}

#[test]
fn handles_that_cannot_be_right_fail_the_gather_for_all() {
    let mut story = Story::new(Rules {
        parts: 2,
        ..Rules::default()
    });
    let round = story.complete(2);
    let without = Operation::Memory(Brought {
        memory: Some(memory()),
        fabric: Vec::new(),
    });
    let first = story.gather(at(1), 0, number(round, 1, brought()));
    let wrong = story.gather(at(1), 1, number(round, 1, without));
    for waiter in [first, wrong] {
        assert_eq!(story.reason(waiter), ("invalid".into(), vec![1]));
    }
    let mut large = memory();
    large.parts = vec![large.parts[0]; 2];
    large.parts[1].identity.allocation = 2;
    large.len = 3 << 20;
    let fabric = vec![Secret::new(&[7; 64]).unwrap(); 2];
    let large = Operation::Memory(Brought {
        memory: Some(large),
        fabric,
    });
    let first = story.gather(at(1), 0, number(round, 2, brought()));
    let large = story.gather(at(1), 1, number(round, 2, large));
    for waiter in [first, large] {
        assert_eq!(story.reason(waiter), ("limit".into(), vec![1]));
    }
}

#[test]
fn a_rank_that_leaves_or_is_lost_ends_every_gather() {
    for how in ["left", "lost", "lost its right"] {
        let mut story = Story::new(Rules::default());
        let round = story.complete(3);
        let waits = story.gather(at(1), 0, barrier(round, 1));
        let own = story.gather(at(1), 2, barrier(round, 1));
        match how {
            "left" => {
                story.leave(at(2), 2, round, 0);
            }
            "lost" => story.gone(at(2), 2),
            _ => {
                let only = rights([("*", Who::only(PeerName::certificate("node").unwrap()))]);
                story
                    .rounds
                    .rounds
                    .get_mut(&round)
                    .unwrap()
                    .seats
                    .get_mut(&2)
                    .unwrap()
                    .asker
                    .peer = PeerName::certificate("other").unwrap();
                story.rounds.present = Present::default();
                story.rounds.set_rights(at(2), only);
                story.take();
            }
        }
        let late = story.gather(at(2), 1, barrier(round, 1));
        let next = story.gather(at(3), 0, barrier(round, 2));
        for waiter in [waits, own, late, next] {
            assert_eq!(story.reason(waiter), ("closing".into(), vec![2]), "{how}");
        }
        let gone = story.gather(at(4), 2, barrier(round, 2));
        assert_eq!(story.reason(gone).0, "not_found", "{how}");
        assert!(story.rounds.waiters.places.is_empty());
    }
}

#[test]
fn a_rank_whose_connection_broke_is_told_what_came_of_it() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    let unheard = story.gather(at(1), 1, number(round, 1, bytes(1, 4)));
    story.rounds.cancel(at(1), unheard);
    // A new contribution is ignored, both before the others enter and after.
    for other in [bytes(9, 4), Operation::Barrier] {
        let again = story.gather(at(1), 1, number(round, 1, other));
        assert!(story.waits(again));
        story.rounds.cancel(at(1), again);
    }
    for session in [0, 2] {
        story.gather(at(2), session, number(round, 1, bytes(session as u8, 4)));
    }
    // Meanwhile one rank gives up the next gather, and another is lost.
    story.gather(at(2), 0, barrier(round, 2));
    story.gone(at(2), 2);
    let again = story.gather(at(3), 1, number(round, 1, bytes(9, 4)));
    let members = members(story.told.get(&again));
    assert_eq!(members.members[1].bytes.as_ref().unwrap().expose(), [1; 4]);
    let failed = story.gather(at(3), 1, barrier(round, 2));
    assert_eq!(story.reason(failed), ("closing".into(), vec![2]));
}

#[test]
fn a_result_is_forgotten_in_time_and_with_the_next() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(2);
    story.rounds.tick(Rules::default().keep);
    let kept = at(100) + Rules::default().keep;
    for session in [0, 1] {
        story.gather(at(100), session, number(round, 1, bytes(0, 4)));
    }
    let again = story.gather(kept - SECOND, 0, number(round, 1, bytes(0, 4)));
    members(story.told.get(&again));
    assert_eq!(story.rounds.deadline(), Some(kept), "nobody has to ask");
    story.tick(kept);
    assert_eq!(story.rounds.deadline(), None);
    let late = story.gather(kept, 0, number(round, 1, bytes(0, 4)));
    assert_eq!(story.reason(late).0, "stale");
    for of in [2, 3] {
        for session in [0, 1] {
            story.gather(kept, session, number(round, of, bytes(0, 4)));
        }
    }
    let late = story.gather(kept, 0, number(round, 2, bytes(0, 4)));
    assert_eq!(story.reason(late).0, "stale");
}

#[test]
fn only_members_of_a_complete_round_gather() {
    let mut story = Story::new(Rules::default());
    let joins = [0, 1].map(|rank| story.join(at(0), rank.into(), ask(rank, 2)));
    let round = story.agreed(joins[0]);
    let early = story.gather(at(0), 0, barrier(round, 1));
    assert_eq!(story.reason(early).0, "invalid");
    let offers = [0, 1].map(|session| story.offer(at(0), session, handles(round)));
    for waiter in offers {
        assert!(matches!(story.told[&waiter], Told::Members(..)));
    }
    let mut other = barrier(round, 1);
    other.group = "h".into();
    for (session, ask) in [
        (7, barrier(round, 1)),
        (0, barrier(round ^ 1, 1)),
        (0, other),
    ] {
        let waiter = story.gather(at(0), session, ask);
        assert_eq!(story.reason(waiter).0, "not_found");
    }
    for of in [0, u64::MAX] {
        let waiter = story.gather(at(0), 0, barrier(round, of));
        assert_eq!(story.reason(waiter).0, "invalid");
    }
    let all = [0, 1].map(|session| story.gather(at(0), session, barrier(round, 1)));
    story.passed(&all);
}

#[test]
fn the_end_of_a_round_leaves_nothing_of_its_gathers() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(2);
    for session in [0, 1] {
        story.gather(at(1), session, number(round, 1, brought()));
    }
    let waits = story.gather(at(1), 0, barrier(round, 2));
    for session in [0, 1] {
        story.leave(at(2), session, round, 1000);
    }
    assert_eq!(story.reason(waits), ("closing".into(), vec![0]));
    story.nothing_left();
}

#[test]
fn a_number_far_ahead_is_refused_and_the_others_go_on() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(3);
    let first = story.gather(at(1), 0, barrier(round, 1));
    for ahead in [u64::MAX - 1, (1 << 32) + 1] {
        let far = story.gather(at(1), 2, barrier(round, ahead));
        assert_eq!(story.reason(far).0, "invalid");
    }
    assert!(story.waits(first));
    let others = [1, 2].map(|session| story.gather(at(1), session, barrier(round, 1)));
    story.passed(&[first, others[0], others[1]]);
    let near = story.gather(at(2), 2, barrier(round, (1 << 32) + 1));
    assert!(story.waits(near));
}

#[test]
fn each_of_the_last_failures_keeps_its_reason() {
    let mut story = Story::new(Rules::default());
    let round = story.complete(2);
    let all = [0, 1].map(|session| story.gather(at(1), session, barrier(round, 1)));
    story.passed(&all);
    // Gathers 2 and 3 fail by disagreement, 4 and 5 because a rank continues, the others by timeout.
    for of in [2, 3] {
        story.gather(at(1), 0, barrier(round, of));
        story.gather(at(1), 1, number(round, of, bytes(0, 1)));
    }
    story.gather(at(1), 0, barrier(round, 6));
    story.tick(at(100));
    let most = crate::group::collective::FAILURES as u64;
    let reasons = |story: &mut Story| -> Vec<String> {
        let asked = (2..=6).map(|of| story.gather(at(101), 1, barrier(round, of)));
        let asked: Vec<_> = asked.collect();
        asked.iter().map(|waiter| story.reason(*waiter).0).collect()
    };
    let expected = [
        "ranks_disagree",
        "ranks_disagree",
        "timed_out",
        "timed_out",
        "timed_out",
    ];
    assert_eq!(reasons(&mut story), expected);
    let passed_over = story.gather(at(101), 1, barrier(round, 5));
    assert_eq!(story.reason(passed_over).1, [0]);
    let in_time = story.gather(at(101), 1, barrier(round, 6));
    assert_eq!(story.reason(in_time).1, [1]);
    // Only the last are kept; earlier ones have the reason of the oldest of them.
    for of in 7..7 + most - 2 {
        story.gather(at(102), 0, barrier(round, of));
        story.gather(at(102), 1, number(round, of, bytes(0, 1)));
    }
    let expected = [
        "timed_out",
        "timed_out",
        "timed_out",
        "timed_out",
        "timed_out",
    ];
    assert_eq!(reasons(&mut story), expected);
    // A success forgets them.
    let next = 7 + most - 2;
    let all = [0, 1].map(|session| story.gather(at(103), session, barrier(round, next)));
    story.passed(&all);
    let late = story.gather(at(103), 1, barrier(round, 6));
    assert_eq!(story.reason(late).0, "stale");
}
