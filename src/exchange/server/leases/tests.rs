mod random;

use std::time::Duration;

use super::*;

const LIFE: Duration = Duration::from_secs(30);

fn peer(n: u32) -> PeerName {
    PeerName::User(n)
}

/// A table for so many leases of each peer.
fn table(leases_per_peer: usize) -> Leases {
    let limits = crate::Limits {
        leases_per_peer,
        ..crate::Limits::default()
    };
    Leases::new(&Quota::new(&limits, 1 << 20))
}

#[test]
fn a_lease_lives_while_its_session_does() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    leases.open(1, peer(1));
    let lease = leases.grant(1, 7, Some(64), now).unwrap();
    assert_eq!(leases.get(1, lease).unwrap().probe, Some(64));
    assert!(leases.get(2, lease).is_none());
    assert!(!leases.detach(1, now + LIFE));
    assert!(leases.expire(now + LIFE / 2).is_empty());
    assert!(leases.attach(1));
    assert!(leases.expire(now + 2 * LIFE).is_empty(), "it is connected");
    assert_eq!(leases.count(7), 1);
}

#[test]
fn a_silent_holders_release_is_unconfirmed_until_it_speaks() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    leases.open(1, peer(1));
    let lease = leases.grant(1, 7, None, now).unwrap();
    leases.detach(1, now + LIFE);
    assert_eq!(leases.deadline(), Some(now + LIFE));
    let ended = leases.expire(now + LIFE);
    assert_eq!((ended.len(), ended[0].leases.len()), (1, 1));
    assert_eq!((leases.count(7), leases.deadline()), (0, None));
    assert_eq!(leases.holders(7).0[0].state, HolderState::Expired);
    assert!(!leases.attach(1), "the session is no more");
    assert!(leases.get(1, lease).is_none());
    // Another peer cannot release it; the first can, from a new session.
    leases.open(2, peer(1));
    assert!(leases.release(3, &peer(2), lease).is_none());
    assert!(leases.release(2, &peer(1), lease).is_some());
    assert!(leases.holders(7).0.is_empty());
}

#[test]
fn an_expired_lease_is_forgotten_with_its_process_and_a_live_one_is_not() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    let process = HolderProcess::of(std::process::id()).unwrap();
    leases.open(1, peer(1));
    let [known, unknown] = [(); 2].map(|()| leases.grant(1, 7, None, now).unwrap());
    leases.set_process(known, process.clone());
    assert!(leases.ended(&process).is_empty(), "it is not followed");
    assert_eq!(leases.count(7), 2);
    leases.end(1);
    leases.follow_lease(known);
    assert_eq!(leases.ended(&process).len(), 1);
    assert!(leases.is_held(7));
    assert!(leases.release(2, &peer(1), unknown).is_some());
    assert!(!leases.is_held(7));
}

#[test]
fn nobody_knows_whether_a_later_local_session_is_the_silent_holder() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    leases.open(1, PeerName::Local);
    let lease = leases.grant(1, 7, None, now).unwrap();
    leases.detach(1, now);
    leases.expire(now);
    leases.open(2, PeerName::Local);
    assert!(leases.release(2, &PeerName::Local, lease).is_none());
    assert_eq!(leases.holders(7).0[0].state, HolderState::Expired);
    // A live lease is released by its own session.
    let lease = leases.grant(2, 8, None, now).unwrap();
    assert!(leases.release(2, &PeerName::Local, lease).is_some());
}

#[test]
fn only_its_session_releases_a_live_lease() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    leases.open(1, peer(1));
    leases.open(2, peer(1));
    let lease = leases.grant(1, 7, None, now).unwrap();
    assert!(leases.release(2, &peer(1), lease).is_none());
    assert!(leases.release(1, &peer(1), lease).is_some());
    assert!(leases.release(1, &peer(1), lease).is_none());
}

#[test]
fn a_session_that_holds_nothing_ends_with_its_connection() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    leases.open(1, peer(1));
    assert!(leases.detach(1, now + LIFE));
    assert_eq!(leases.sessions(), 0);
}

#[test]
fn limits_are_each_peers_own() {
    let now = Instant::now();
    let mut leases = table(2);
    leases.open(1, peer(1));
    leases.open(2, peer(1));
    leases.open(3, peer(2));
    let first = leases.grant(1, 7, None, now).unwrap();
    leases.grant(2, 7, None, now).unwrap();
    assert_eq!(leases.grant(1, 7, None, now).unwrap_err().0, Refusal::Limit);
    leases.grant(3, 7, None, now).unwrap();
    leases.release(1, &peer(1), first).unwrap();
    leases.grant(1, 7, None, now).unwrap();
    leases.clear();
    leases.open(1, peer(1));
    assert_eq!(leases.live(), 0);
    for limited in [false, false, true] {
        assert_eq!(leases.grant(1, 7, None, now).is_err(), limited);
    }
    assert_eq!(
        leases.grant(9, 7, None, now).unwrap_err().0,
        Refusal::Expired
    );
}

#[test]
fn the_leases_of_a_session_are_returned_in_parts() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    leases.open(1, peer(1));
    let mut granted: Vec<u64> = (0..5)
        .map(|_| leases.grant(1, 7, None, now).unwrap())
        .collect();
    granted.sort_unstable();
    let after = |last| leases.of_session(1, last).collect::<Vec<_>>();
    assert_eq!(after(None), granted);
    // Also if that one is gone.
    assert_eq!(after(Some(granted[1] + 1)), granted[2..]);
    assert!(after(Some(granted[4])).is_empty());
    assert_eq!(leases.of_session(2, None).count(), 0);
}

#[test]
fn a_publication_ends_with_all_its_leases() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    for session in 1..=3 {
        leases.open(session, peer(session as u32));
        leases.grant(session, 7, None, now).unwrap();
    }
    leases.detach(3, now);
    leases.expire(now);
    assert_eq!(leases.withdraw(7).len(), 2);
    let states: Vec<_> = leases.holders(7).0.iter().map(|h| h.state).collect();
    use HolderState::*;
    assert_eq!(states, [Withdrawing, Withdrawing, Expired]);
    assert_eq!(leases.forget(7).len(), 2);
    assert_eq!((leases.live(), leases.holders(7).0.len()), (0, 0));
}

#[test]
fn not_every_expired_holder_is_remembered_but_all_are_counted() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    let since = |session| now + Duration::from_secs(session);
    let mut forgotten = Vec::new();
    for session in 0..MAX_EXPIRED as u64 + 5 {
        leases.open(session, peer(1));
        let now = since(session);
        leases.grant(session, 7, None, now).unwrap();
        leases.detach(session, now);
        leases.expire(now);
        forgotten.extend(leases.prune(7));
    }
    assert_eq!(forgotten.len(), 5);
    let (list, more) = leases.holders(7);
    assert_eq!((list.len(), more), (MAX_EXPIRED, 5));
    assert_eq!(list[0].since, since(5), "the oldest are forgotten");
    assert_eq!(leases.leases.len(), MAX_EXPIRED);
    for lease in list {
        leases.release(u64::MAX, &peer(1), lease.lease).unwrap();
    }
    assert!(leases.is_held(7), "five may have it mapped");
}

#[test]
fn a_process_is_waited_for_only_while_a_lease_of_it_is_followed() {
    let now = Instant::now();
    let mut leases = table(usize::MAX);
    let process = HolderProcess::without(1);
    leases.open(1, peer(1));
    let [one, two] = [(); 2].map(|()| {
        let lease = leases.grant(1, 7, None, now).unwrap();
        leases.set_process(lease, process.clone());
        lease
    });
    assert!(leases.followed().is_empty(), "it has a connection");
    leases.detach(1, now + LIFE);
    leases.follow(1);
    assert_eq!(leases.followed(), std::slice::from_ref(&process));
    leases.release(1, &peer(1), one).unwrap();
    assert_eq!(leases.followed(), std::slice::from_ref(&process));
    leases.release(1, &peer(1), two).unwrap();
    assert!(leases.followed().is_empty());

    let lease = leases.grant(1, 7, None, now).unwrap();
    leases.set_process(lease, process.clone());
    leases.follow(1);
    assert_eq!(leases.followed(), std::slice::from_ref(&process));
    // Its connection reports its state again, and a process that has ended had passed it on.
    assert!(leases.attach(1));
    assert!(leases.followed().is_empty() && leases.ended(&process).is_empty());
    leases.detach(1, now + LIFE);
    leases.follow(1);
    assert_eq!(leases.ended(&process).len(), 1);
    assert!(leases.followed().is_empty() && !leases.is_held(7));
}

#[test]
fn numbers_come_in_the_order_of_their_times() {
    let now = Instant::now();
    let at = |second| now + Duration::from_secs(second);
    let mut deadlines = Deadlines::default();
    for (number, time) in [(1, 30), (2, 10), (3, 20), (4, 20), (2, 25)] {
        deadlines.set(number, at(time));
    }
    assert!(deadlines.remove(4));
    assert_eq!((deadlines.get(2), deadlines.get(4)), (Some(at(25)), None));
    assert_eq!(
        (deadlines.first(), deadlines.pop(at(19))),
        (Some(at(20)), None)
    );
    assert_eq!(
        [deadlines.pop(at(25)), deadlines.pop(at(25))],
        [Some(3), Some(2)]
    );
    assert_eq!(deadlines.pop(at(25)), None);
    assert!(deadlines.remove(1) && !deadlines.remove(1));
    assert!(deadlines.times.is_empty() && deadlines.order.is_empty());
}
