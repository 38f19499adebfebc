//! Gathers that fail, and what is left of those that are over.

use super::*;

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
