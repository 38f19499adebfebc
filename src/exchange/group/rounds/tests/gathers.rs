//! Barriers and gathers of complete rounds.

mod endings;

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
    let reply = decode::<(u64, Answer)>(&roster.reply(*page, 1)).unwrap();
    match reply.1 {
        Answer::Members(members) => members,
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
