//! Memory of many parts, which ranks pass as one fd each if all can take fds from queues.

use std::os::fd::OwnedFd;

use super::*;
use crate::protocol::{Fds, Handles};
use crate::transport::HeldFd;

/// A join of a rank with so many parts, which can pass fds alone.
fn with_parts(rank: u32, parts: u64) -> Join {
    let mut memory = memory();
    let first = memory.parts[0];
    memory.parts = (0..parts)
        .map(|allocation| {
            let mut part = first;
            part.identity.allocation = allocation;
            part
        })
        .collect();
    memory.len = memory.padded();
    Join {
        can: vec![HandleType::PosixFd],
        memory: Some(memory),
        ..ask(rank, 2)
    }
}

fn fds(count: usize) -> Vec<HeldFd> {
    let fd = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    (0..count).map(|_| HeldFd::from(fd())).collect()
}

/// Joins two ranks of few and many parts, which offer so many fds. Returns the agreement and the last answer.
fn story(queues: [bool; 2], offered: [usize; 2]) -> (Agreed, Story, Waiter) {
    let mut story = Story::new(Rules::default());
    let mut last = 0;
    for (rank, parts) in [(0, 32), (1, 33)] {
        let session = rank.into();
        let queues = queues[rank as usize];
        let asker = Asker {
            queues,
            ..asker(session)
        };
        last = story.join_as(at(0), asker, with_parts(rank, parts));
    }
    let Some(Told::Agreed(agreed)) = story.told.get(&last).cloned() else {
        panic!("{}", shown(story.told.get(&last)));
    };
    for (session, count) in [(0, offered[0]), (1, offered[1])] {
        story.waiters += 1;
        last = story.waiters;
        let offer = Offer {
            fabric: Vec::new(),
            ..handles(agreed.round)
        };
        story.rounds.offer(at(0), last, session, offer, fds(count));
        story.take();
    }
    (agreed, story, last)
}

#[test]
fn many_fds_are_one_source_if_every_rank_takes_queues() {
    let (agreed, story, last) = story([true, true], [32, 1]);
    assert_eq!((agreed.sources, agreed.handles), (true, 33));
    let Some(Told::Members(roster, 0)) = story.told.get(&last) else {
        panic!("{}", shown(story.told.get(&last)));
    };
    assert_eq!(roster.fds(0).len(), 33);
    let reply: (u64, Answer) = decode(&roster.reply(0, 1)).unwrap();
    let Answer::Members(Members { members, .. }) = reply.1 else {
        panic!("no members");
    };
    assert_eq!(members[0].handles, Some(Handles::Fds(Fds::of(32))));
    assert_eq!(members[1].handles, Some(Handles::Fds(Fds::from_source())));
}

#[test]
fn one_rank_that_takes_no_queue_means_all_fds_for_all() {
    for queues in [[true, false], [false, true], [false, false]] {
        let (agreed, story, last) = story(queues, [32, 33]);
        assert_eq!((agreed.sources, agreed.handles), (false, 65));
        assert!(matches!(story.told.get(&last), Some(Told::Members(..))));
    }
}

#[test]
fn another_number_of_fds_fails_the_round() {
    for (queues, offered) in [
        ([true, true], [32, 33]),
        ([true, true], [32, 2]),
        ([true, true], [32, 0]),
        ([true, true], [1, 1]),
        ([true, false], [32, 1]),
    ] {
        let (_, story, last) = story(queues, offered);
        assert_eq!(story.reason(last).0, "invalid", "{queues:?} {offered:?}");
    }
}
