//! Tests of the coordinator: waiting ranks, with a clock set by the test.

use super::*;
use crate::Who;
use crate::driver::HandleType;
use crate::protocol::{Agreed, Incomplete, Operation};
use std::sync::mpsc;

fn join(rank: u32, size: u32) -> Join {
    Join {
        group: "g".into(),
        rank,
        size,
        admission: Admission::SamePeer,
        can: vec![HandleType::PosixFd],
        cannot: Vec::new(),
        memory: None,
        ms: 1000,
    }
}

fn offer(round: u64) -> Offer {
    Offer {
        group: "g".into(),
        round,
        fabric: Vec::new(),
        first: 0,
    }
}

fn groups() -> (Groups, mpsc::Receiver<(u64, Event)>) {
    let (sender, news) = mpsc::channel();
    let rights = Rights::new([("*".into(), Who::only(PEER))]).unwrap();
    let keys = Keys::new().unwrap();
    let groups = Groups::new(Rules::default(), rights, keys, move |session, event| {
        sender.send((session, event)).unwrap();
    });
    (groups, news)
}

const PEER: PeerName = PeerName::User(7);

fn boot() -> BootId {
    BootId::from_bytes([1; 16])
}

async fn both(groups: &Groups) -> u64 {
    let (a, b) = tokio::join!(
        groups.join(0, &PEER, boot(), (true, true), join(0, 2), None),
        groups.join(1, &PEER, boot(), (true, true), join(1, 2), None),
    );
    assert_eq!(a, b);
    let Answer::Agreed(Agreed { round, via, .. }) = a else {
        panic!("{a:?}");
    };
    assert_eq!(via, HandleType::PosixFd);
    round
}

#[tokio::test(start_paused = true)]
async fn ranks_come_together_and_part() {
    let (groups, news) = groups();
    let round = both(&groups).await;
    let (a, b) = tokio::join!(
        groups.offer(0, offer(round), Vec::new()),
        groups.offer(1, offer(round), Vec::new()),
    );
    assert_eq!(&a.unwrap().reply(1)[..], &b.unwrap().reply(1)[..]);
    let leave = || Leave {
        group: "g".into(),
        round,
        ms: 1000,
    };
    let (a, b) = tokio::join!(groups.leave(0, leave()), groups.leave(1, leave()));
    assert_eq!((a, b), (Answer::Done, Answer::Done));
    assert_eq!(groups.len(), 0);
    assert!(news.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn who_is_missing_is_said_at_the_deadline() {
    let (groups, _news) = groups();
    let before = Instant::now();
    let Answer::Incomplete(Incomplete { reason, ranks, .. }) = groups
        .join(0, &PEER, boot(), (true, true), join(0, 3), None)
        .await
    else {
        panic!("not incomplete");
    };
    assert_eq!((reason.as_str(), ranks), ("timed_out", vec![1, 2]));
    assert!(before.elapsed() < Duration::from_secs(2));
    assert_eq!(groups.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_does_not_offer_fails_the_others_in_time() {
    let (groups, _news) = groups();
    let round = both(&groups).await;
    let Err(Answer::Incomplete(why)) = groups.offer(0, offer(round), Vec::new()).await else {
        panic!("not incomplete");
    };
    assert_eq!((why.reason.as_str(), why.ranks), ("timed_out", vec![1]));
    groups.gone(1);
    assert_eq!(groups.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn who_hangs_up_while_gathering_has_not_joined() {
    let (groups, _news) = groups();
    let hasty = groups.join(0, &PEER, boot(), (true, true), join(0, 2), None);
    assert!(
        tokio::time::timeout(Duration::from_millis(10), hasty)
            .await
            .is_err()
    );
    assert_eq!(groups.len(), 0);
}

#[tokio::test]
async fn others_are_refused() {
    let (groups, _news) = groups();
    let answer = groups
        .join(0, &PeerName::Local, boot(), (true, true), join(0, 1), None)
        .await;
    let Answer::Refused(no) = answer else {
        panic!("{answer:?}");
    };
    assert_eq!(no.reason, "forbidden");
}

#[tokio::test(start_paused = true)]
async fn a_lost_member_is_news() {
    let (groups, news) = groups();
    let round = both(&groups).await;
    let (a, b) = tokio::join!(
        groups.offer(0, offer(round), Vec::new()),
        groups.offer(1, offer(round), Vec::new()),
    );
    drop((a, b));
    groups.gone(1);
    let (session, Event::Lost(lost)) = news.try_recv().unwrap() else {
        panic!("other news");
    };
    assert_eq!((session, lost.ranks), (0, vec![1]));
}

fn barrier(round: u64, number: u64) -> Gather {
    Gather {
        group: "g".into(),
        round,
        number,
        operation: Operation::Barrier,
        first: None,
        ms: 1000,
    }
}

#[tokio::test(start_paused = true)]
async fn ranks_meet_at_barriers_in_time_or_hear_which_are_missing() {
    let (groups, _news) = groups();
    let round = both(&groups).await;
    let (a, b) = tokio::join!(
        groups.offer(0, offer(round), Vec::new()),
        groups.offer(1, offer(round), Vec::new()),
    );
    drop((a, b));
    let enter = |session, number| groups.gather(session, barrier(round, number), Vec::new(), None);
    let (a, b) = tokio::join!(enter(0, 1), enter(1, 1));
    for answer in [a, b] {
        assert_eq!(answer.unwrap_err(), Answer::Done);
    }
    let before = Instant::now();
    let Answer::Incomplete(why) = enter(0, 2).await.unwrap_err() else {
        panic!("not incomplete");
    };
    assert_eq!((why.reason.as_str(), why.ranks), ("timed_out", vec![1]));
    assert!(before.elapsed() < Duration::from_secs(2));
    // A rank whose connection breaks has entered.
    let hasty = tokio::time::timeout(Duration::from_millis(10), enter(0, 3)).await;
    assert!(hasty.is_err());
    assert_eq!(enter(1, 3).await.unwrap_err(), Answer::Done);
    assert_eq!(enter(0, 3).await.unwrap_err(), Answer::Done);
    assert!(groups.lock().waiters.is_empty());
}

#[tokio::test(start_paused = true)]
async fn many_ranks_that_are_gone_leave_no_room_behind() {
    let (groups, _news) = groups();
    let mut ranks = tokio::task::JoinSet::new();
    for rank in 0..1000_u32 {
        let groups = groups.clone();
        ranks.spawn(async move {
            let ask = join(rank, 1024);
            groups
                .join(rank.into(), &PEER, boot(), (true, true), ask, None)
                .await
        });
    }
    let room = || {
        let state = groups.lock();
        let waiters = state.waiters.capacity();
        waiters.max(state.rounds.waiters.places.capacity())
    };
    while groups.lock().waiters.len() < 1000 {
        tokio::task::yield_now().await;
    }
    assert!(room() >= 1000);
    ranks.shutdown().await;
    assert!(room() <= 128, "{}", room());
}
