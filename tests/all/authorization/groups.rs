//! Groups of others: a peer neither joins them, nor gets their handles, nor ends them.

use egmem::driver::HandleType;
use egmem::exchange::protocol::{
    Admission, Agreed, Answer, Ask, Brought, Gather, Join, Leave, Offer, Operation, Payload, Secret,
};

use crate::authorization::raw::{Raw, answer};
use crate::authorization::stage::{OTHER, OWNER, STRANGER, Stage, USER};

/// The owner's group.
const GROUP: &str = "job/hidden";
/// A name of the same length without a group.
const NO_GROUP: &str = "job/absent";

fn join(group: &str, rank: u32, size: u32, secret: u8, ms: u64) -> Ask {
    Ask::Join(Join {
        group: group.into(),
        rank,
        size,
        admission: Admission::Secret(Secret::new(&[secret; 32]).unwrap()),
        can: vec![HandleType::Fabric],
        cannot: Vec::new(),
        memory: None,
        ms,
    })
}

fn offer(group: &str, round: u64) -> Ask {
    Ask::Offer(Offer {
        group: group.into(),
        round,
        fabric: Vec::new(),
        first: 0,
    })
}

fn leave(group: &str, round: u64) -> Ask {
    Ask::Leave(Leave {
        group: group.into(),
        round,
        ms: 0,
    })
}

/// The owner waits as rank 0 of two.
fn waiting(stage: &Stage) -> Raw {
    let mut owner = stage.peer(OWNER);
    owner.send(join(GROUP, 0, 2, 1, 300_000));
    stage.until_groups(1);
    owner
}

/// The group still comes together.
#[track_caller]
fn completes(stage: &Stage, mut owner: Raw) {
    let mut second = stage.peer(OTHER);
    let joined = second.ask(join(GROUP, 1, 2, 1, 300_000));
    let Answer::Agreed(Agreed { round, .. }) = joined else {
        panic!("{joined:?}");
    };
    owner.answer_bytes();
    owner.send(offer(GROUP, round));
    for members in [
        second.ask(offer(GROUP, round)),
        answer(&owner.answer_bytes()),
    ] {
        assert!(matches!(members, Answer::Members(_)), "{members:?}");
    }
    second.ask(leave(GROUP, round));
    owner.ask(leave(GROUP, round));
    stage.until_groups(0);
}

#[test]
fn join_without_the_right() {
    let stage = Stage::new();
    let raw = &mut stage.peer(STRANGER);
    let before = raw.ask_bytes(join(GROUP, 1, 2, 1, 100));
    let owner = waiting(&stage);
    for (rank, size, secret) in [(1, 2, 1), (0, 2, 1), (1, 2, 2), (1, 3, 1), (7, 3, 1)] {
        let of = |group| join(group, rank, size, secret, 100);
        stage.nothing_comes_of(raw, of(GROUP), of(NO_GROUP), "forbidden");
        assert_eq!(raw.ask_bytes(of(GROUP)), before, "as before the group");
    }
    completes(&stage, owner);
    stage.end();
}

#[test]
fn join_with_another_secret() {
    let stage = Stage::new();
    let raw = &mut stage.peer(OTHER);
    let owner = waiting(&stage);
    let before = stage.snapshot();
    for rank in [0, 1] {
        let joined = raw.ask_bytes(join(GROUP, rank, 2, 2, 200));
        let Answer::Incomplete(why) = answer(&joined) else {
            panic!("{:?}", answer(&joined));
        };
        assert_eq!(
            (why.reason.as_str(), why.ranks),
            ("timed_out", vec![1 - rank])
        );
        assert_eq!(joined, raw.ask_bytes(join(NO_GROUP, rank, 2, 2, 200)));
        // Of another size, too.
        let joined = raw.ask_bytes(join(GROUP, rank, 3, 2, 200));
        assert_eq!(joined, raw.ask_bytes(join(NO_GROUP, rank, 3, 2, 200)));
    }
    assert_eq!(stage.snapshot(), before);
    assert!(raw.events.is_empty(), "{:?}", raw.events);
    completes(&stage, owner);
    stage.end();
}

/// The owner's group of one rank, agreed.
fn agreed(stage: &Stage) -> (Raw, u64) {
    agreed_in(stage, GROUP)
}

/// A group of the owner with one rank, agreed.
fn agreed_in(stage: &Stage, group: &str) -> (Raw, u64) {
    let mut owner = stage.peer(OWNER);
    let joined = owner.ask(join(group, 0, 1, 1, 300_000));
    let Answer::Agreed(Agreed { round, .. }) = joined else {
        panic!("{joined:?}");
    };
    (owner, round)
}

#[test]
fn offer_to_a_round_of_others() {
    let stage = Stage::new();
    let (mut owner, round) = agreed(&stage);
    // Before the members are known and after, when an answer could contain handles.
    for _ in 0..2 {
        for peer in [OTHER, STRANGER, OWNER] {
            let raw = &mut stage.peer(peer);
            let (it, none) = (offer(GROUP, round), offer(NO_GROUP, round ^ 1));
            stage.nothing_comes_of(raw, it, none, "not_found");
        }
        let members = owner.ask(offer(GROUP, round));
        assert!(matches!(members, Answer::Members(_)), "{members:?}");
    }
    owner.ask(leave(GROUP, round));
    drop(owner);
    stage.end();
}

fn gather(group: &str, round: u64, number: u64, operation: &Operation) -> Ask {
    Ask::Gather(Gather {
        group: group.into(),
        round,
        number,
        operation: operation.clone(),
        first: None,
        ms: 300_000,
    })
}

/// A round of two ranks, of the owner and another peer, that have their members.
fn complete(stage: &Stage) -> (Raw, Raw, u64) {
    let mut owner = waiting(stage);
    let mut second = stage.peer(OTHER);
    let joined = second.ask(join(GROUP, 1, 2, 1, 300_000));
    let Answer::Agreed(Agreed { round, .. }) = joined else {
        panic!("{joined:?}");
    };
    owner.answer_bytes();
    owner.send(offer(GROUP, round));
    second.ask(offer(GROUP, round));
    owner.answer_bytes();
    (owner, second, round)
}

/// Returns one gather of each kind, and a request for the members of one.
fn gathers(group: &str, round: u64, number: u64) -> Vec<Ask> {
    let payload = Payload::new(&[5; 64]).unwrap();
    let operations = [
        Operation::Barrier,
        Operation::Bytes(payload),
        Operation::Memory(Brought::default()),
    ];
    let asks = operations
        .iter()
        .map(|operation| gather(group, round, number, operation));
    let members = Ask::Gather(Gather {
        group: group.into(),
        round,
        number,
        operation: Operation::Barrier,
        first: Some(0),
        ms: 0,
    });
    asks.chain([members]).collect()
}

#[test]
fn gather_of_a_round_of_others() {
    let stage = Stage::new();
    let (mut owner, mut second, round) = complete(&stage);
    let secret = Operation::Bytes(Payload::new(&[5; 64]).unwrap());
    // While a rank waits in the first, and when an answer could contain its result.
    owner.send(gather(GROUP, round, 1, &secret));
    for told in [false, true] {
        for peer in [OTHER, STRANGER, OWNER] {
            let raw = &mut stage.peer(peer);
            let hidden = gathers(GROUP, round, 1);
            for (it, none) in hidden.into_iter().zip(gathers(NO_GROUP, round ^ 1, 1)) {
                stage.nothing_comes_of(raw, it, none, "not_found");
            }
        }
        // A member of another group, by its own group's name and with that of the round.
        let (mut other, own) = agreed_in(&stage, "job/other");
        for group in [GROUP, "job/other"] {
            let hidden = gathers(group, round, 1);
            for (it, none) in hidden.into_iter().zip(gathers(group, round ^ 1, 1)) {
                stage.nothing_comes_of(&mut other, it, none, "not_found");
            }
        }
        other.ask(leave("job/other", own));
        if !told {
            let members = second.ask(gather(GROUP, round, 1, &secret));
            assert!(matches!(members, Answer::Members(_)), "{members:?}");
            assert_eq!(answer(&owner.answer_bytes()), members);
        }
    }
    owner.send(gather(GROUP, round, 2, &Operation::Barrier));
    let passed = second.ask(gather(GROUP, round, 2, &Operation::Barrier));
    assert_eq!(passed, Answer::Done);
    assert_eq!(answer(&owner.answer_bytes()), passed);
    second.ask(leave(GROUP, round));
    owner.ask(leave(GROUP, round));
    drop((owner, second));
    stage.end();
}

#[test]
fn gather_after_the_rank_has_left() {
    let stage = Stage::new();
    let (mut owner, mut second, round) = complete(&stage);
    owner.send(gather(GROUP, round, 1, &Operation::Barrier));
    second.ask(leave(GROUP, round));
    let Answer::Incomplete(why) = answer(&owner.answer_bytes()) else {
        panic!("another answer");
    };
    assert_eq!((why.reason.as_str(), why.ranks), ("closing", vec![1]));
    for (it, none) in gathers(GROUP, round, 1)
        .into_iter()
        .zip(gathers(NO_GROUP, round ^ 1, 1))
    {
        stage.nothing_comes_of(&mut second, it, none, "not_found");
    }
    owner.ask(leave(GROUP, round));
    drop((owner, second));
    stage.end();
}

#[test]
fn gather_after_the_peer_was_removed() {
    let stage = Stage::new();
    let (mut owner, second, round) = complete(&stage);
    owner.send(gather(GROUP, round, 1, &Operation::Barrier));
    // The other peer is on no list any more: its session ends, and its rank is lost.
    stage.reload(&[OWNER], &[USER]);
    for number in [1, 2] {
        let Answer::Incomplete(why) = answer(&owner.answer_bytes()) else {
            panic!("another answer");
        };
        assert_eq!((why.reason.as_str(), why.ranks), ("closing", vec![1]));
        owner.send(gather(GROUP, round, number + 1, &Operation::Barrier));
    }
    owner.answer_bytes();
    drop(second);
    let raw = &mut stage.peer(OTHER);
    for (it, none) in gathers(GROUP, round, 3)
        .into_iter()
        .zip(gathers(NO_GROUP, round ^ 1, 3))
    {
        stage.nothing_comes_of(raw, it, none, "not_found");
    }
    owner.ask(leave(GROUP, round));
    drop(owner);
    stage.end();
}

#[test]
fn leave_of_a_round_of_others() {
    let stage = Stage::new();
    let (mut owner, round) = agreed(&stage);
    for _ in 0..2 {
        for peer in [OTHER, STRANGER, OWNER] {
            let raw = &mut stage.peer(peer);
            let (it, none) = (leave(GROUP, round), leave(NO_GROUP, round ^ 1));
            stage.nothing_comes_of(raw, it, none, "not_found");
        }
        let members = owner.ask(offer(GROUP, round));
        assert!(matches!(members, Answer::Members(_)), "{members:?}");
    }
    assert!(matches!(owner.ask(leave(GROUP, round)), Answer::Done));
    drop(owner);
    stage.end();
}
