//! Refusals, and the peers that get them.

use super::*;

#[test]
fn a_rank_twice_while_gathering() {
    let mut story = Story::new(Rules::default());
    let first = story.join(at(0), 1, ask(0, 2));
    let second = story.join(at(0), 2, ask(0, 2));
    assert_eq!(story.reason(first).0, "exists");
    let stranger = Asker {
        peer: PeerName::certificate("other").unwrap(),
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
            peer: PeerName::certificate(peer).unwrap(),
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
    // Nor may it join another peer's group, which continues unharmed.
    assert_eq!(join(&mut story, 3, "b", "i", 0), None);
    assert!(limit(join(&mut story, 4, "a", "i", 1)));
    // It may still join its own groups, and join them again.
    assert_eq!(join(&mut story, 5, "a", "h", 0), None);
    assert!(join(&mut story, 6, "a", "g", 1).unwrap().contains("Agreed"));
    // A rank that has left does not count, even while others stay.
    let round = story.round_of("g");
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
        queues: false,
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
fn who_begins_anew_is_not_refused_for_the_round_that_ends_with_it() {
    let mut story = Story::new(Rules {
        groups: 1,
        groups_per_peer: 1,
        parts: 4,
        ..Rules::default()
    });
    let joins = [0, 1].map(|rank| story.join(at(0), rank.into(), ask(rank, 2)));
    let first = story.agreed(joins[0]);
    // No rank has offered, so no rank learns of the failed round before it asks.
    let again = story.join(at(1), 10, ask(0, 2));
    assert!(!story.told.contains_key(&again), "it gathers");
    let other = story.join(at(1), 11, ask(1, 2));
    let second = story.agreed(other);
    assert_eq!(story.agreed(again), second);
    let late = story.offer(at(1), 1, handles(first));
    assert_eq!(story.reason(late), ("closing".into(), vec![0]));
    // A refused rank ends no round.
    let mut wrong = ask(0, 2);
    let parts = (0..5).map(|allocation| {
        let mut part = memory().parts.remove(0);
        part.identity.allocation = allocation;
        part
    });
    wrong.memory = Some(Description {
        len: 9 << 20,
        parts: parts.collect(),
        ..memory()
    });
    let third = story.join(at(2), 20, wrong);
    assert_eq!(story.reason(third).0, "limit");
    for session in [10, 11] {
        let waiter = story.offer(at(2), session, handles(second));
        if session == 11 {
            assert!(matches!(story.told[&waiter], Told::Members(..)));
        }
    }
}

#[test]
fn why_a_round_failed_is_told_once_more() {
    let mut story = Story::new(Rules::default());
    let joins = [0, 1, 2].map(|rank| story.join(at(0), rank.into(), ask(rank, 3)));
    let round = story.agreed(joins[0]);
    let early = story.offer(at(1), 0, handles(round));
    story.gone(at(2), 1);
    let late = story.offer(at(3), 2, handles(round));
    story.nothing_left();
    // Their connections broke before they got it, whether it was sent at once or on request.
    let again = [0, 2].map(|session| story.offer(at(4), session, handles(round)));
    let left = story.leave(at(4), 0, round, 0);
    for waiter in [early, late, again[0], again[1], left] {
        assert_eq!(story.reason(waiter), ("closing".into(), vec![1]));
    }
    let stranger = story.offer(at(4), 7, handles(round));
    assert_eq!(story.reason(stranger).0, "not_found");
    let late = story.offer(at(2) + Rules::default().keep, 0, handles(round));
    assert_eq!(story.reason(late).0, "not_found");
    assert_eq!(story.rounds.ended.len(), 0);
}
