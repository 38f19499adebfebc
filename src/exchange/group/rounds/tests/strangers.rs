//! Peers without a right, and peers that are not admitted, cannot affect a group.

use super::*;

fn peer(name: &str) -> PeerName {
    PeerName::certificate(name).unwrap()
}

fn of(name: &str, session: u64) -> Asker {
    Asker {
        peer: peer(name),
        ..asker(session)
    }
}

fn named(group: &str, ask: Join) -> Join {
    let group = group.into();
    Join { group, ..ask }
}

/// Joins two ranks that agree: sessions 0 and 1 of "node" and "other".
fn agreed(story: &mut Story) -> u64 {
    let first = story.join(at(0), 0, ask(0, 2));
    story.join_as(at(0), of("other", 1), ask(1, 2));
    story.agreed(first)
}

fn completes(story: &mut Story, round: u64) {
    let waiters = [0, 1].map(|session| story.offer(at(1), session, handles(round)));
    for waiter in waiters {
        let told = story.told.get(&waiter);
        assert!(matches!(told, Some(Told::Members(..))), "{}", shown(told));
    }
}

#[test]
fn a_join_that_does_not_fit_ends_no_round() {
    let mut story = Story::new(Rules::default());
    let round = agreed(&mut story);
    for (reason, asker, ask) in [
        ("invalid", of("third", 9), ask(0, 3)),
        ("invalid", of("third", 9), ask(2, 3)),
        ("invalid", of("node", 9), ask(0, 1)),
        ("exists", of("third", 9), ask(0, 2)),
        ("exists", of("third", 9), ask(1, 2)),
        ("exists", of("node", 9), ask(1, 2)),
        ("exists", of("node", 0), ask(1, 2)),
    ] {
        let waiter = story.join_as(at(1), asker, ask);
        assert_eq!(story.reason(waiter).0, reason);
    }
    completes(&mut story, round);
}

#[test]
fn a_rank_with_another_admission_is_in_another_group() {
    let mut story = Story::new(Rules::default());
    let round = agreed(&mut story);
    let list = Texts::from_iter(["node", "other", "third"]);
    for (session, admission) in [
        (10, secret(8)),
        (11, Admission::SamePeer),
        (12, Admission::Peers(list)),
    ] {
        let join = Join {
            admission,
            ..ask(1, 2)
        };
        let waiter = story.join_as(at(0), of("third", session), join);
        assert!(!story.told.contains_key(&waiter), "it waits");
        // Knowing a group's round does not give access to it.
        let offered = story.offer(at(1), session, handles(round));
        let left = story.leave(at(1), session, round, 0);
        for waiter in [offered, left] {
            assert_eq!(story.reason(waiter).0, "not_found");
        }
        story.tick(at(10));
        assert_eq!(story.reason(waiter), ("timed_out".into(), vec![0]));
    }
}

#[test]
fn ranks_of_one_list_come_together_in_whatever_order_they_write_it() {
    let mut story = Story::new(Rules::default());
    let join = |rank, list: [&str; 2]| Join {
        admission: Admission::Peers(Texts::from_iter(list)),
        ..ask(rank, 2)
    };
    let first = story.join(at(0), 0, join(0, ["node", "other"]));
    let second = story.join_as(at(0), of("other", 1), join(1, ["other", "NODE"]));
    assert_eq!(story.agreed(first), story.agreed(second));
    let third = story.join_as(at(0), of("third", 2), join(1, ["other", "node"]));
    assert_eq!(story.reason(third).0, "forbidden");
}

#[test]
fn without_a_right_the_answer_is_the_same_whether_the_group_exists() {
    let mut story = Story::new(Rules {
        groups: 1,
        ..Rules::default()
    });
    story.rounds.rights = rights([("g*", Who::only(peer("node")))]);
    let answers = |story: &mut Story| {
        let asks = [
            ask(0, 2),
            ask(1, 2),
            ask(0, 3),
            ask(5, 2),
            named("h", ask(0, 2)),
        ];
        asks.map(|ask| {
            let waiter = story.join_as(at(0), of("other", 9), ask);
            shown(story.told.get(&waiter))
        })
    };
    let before = answers(&mut story);
    assert!(before.iter().all(|answer| answer.contains("forbidden")));
    assert!(
        before.windows(2).all(|pair| pair[0] == pair[1]),
        "{before:?}"
    );
    story.nothing_left();
    let waiting = story.join(at(0), 0, ask(0, 2));
    assert_eq!(
        answers(&mut story),
        before,
        "with a group, and no room for another"
    );
    assert!(!story.told.contains_key(&waiting));
    assert_eq!(story.rounds.len(), 1);
}

#[test]
fn a_peer_that_has_lost_its_right_is_out_of_groups_that_are_not_complete() {
    let mut story = Story::new(Rules::default());
    let complete = agreed(&mut story);
    completes(&mut story, complete);
    let agreed = agreed(&mut story);
    let gathers = story.join_as(at(0), of("other", 1), named("h", ask(0, 2)));
    let only = rights([("*", Who::only(peer("node")))]);
    story.rounds.set_rights(at(1), only);
    story.take();
    assert_eq!(story.reason(gathers).0, "forbidden");
    let waiter = story.offer(at(1), 0, handles(agreed));
    assert_eq!(story.reason(waiter), ("closing".into(), vec![1]));
    // The members were sent before, and are not sent again.
    let waiter = story.offer(at(1), 1, handles(complete));
    assert_eq!(story.reason(waiter).0, "not_found");
    let waiter = story.offer(at(1), 0, handles(complete));
    assert!(matches!(story.told[&waiter], Told::Members(..)));
    for session in [0, 1] {
        story.leave(at(2), session, complete, 1000);
    }
    story.nothing_left();
}

#[test]
fn a_peers_own_limit_is_told_before_that_of_all() {
    let mut story = Story::new(Rules {
        groups: 2,
        groups_per_peer: 1,
        ..Rules::default()
    });
    story.join(at(0), 0, ask(0, 2));
    let join = |group| named(group, ask(0, 2));
    let alone = story.join(at(0), 1, join("h"));
    story.join_as(at(0), of("other", 2), join("i"));
    let crowded = story.join(at(0), 3, join("h"));
    assert_eq!(
        shown(story.told.get(&alone)),
        shown(story.told.get(&crowded))
    );
}

#[test]
fn strangers_do_not_take_the_place_of_the_servers_own_group() {
    let mut story = Story::new(Rules {
        groups: 2,
        ..Rules::default()
    });
    let own = story.rounds.may_join(&peer("node"), "g", &secret(9));
    story.rounds.own = own.ok();
    for (session, byte) in [(10, 1), (11, 2)] {
        let admission = secret(byte);
        let join = Join {
            admission,
            ..ask(0, 2)
        };
        story.join_as(at(0), of("third", session), join);
    }
    let full = story.join_as(at(0), of("third", 12), named("h", ask(0, 2)));
    assert_eq!(story.reason(full).0, "limit");
    let round = agreed(&mut story);
    completes(&mut story, round);
}
