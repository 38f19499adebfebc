use std::time::Duration;

use proptest::prelude::*;

use super::*;

const LIFE: Duration = Duration::from_secs(30);

fn peer(n: u32) -> PeerName {
    PeerName::User(n)
}

#[test]
fn a_lease_lives_while_its_session_does() {
    let now = Instant::now();
    let mut leases = Leases::default();
    leases.open(1, peer(1), None);
    let lease = leases.grant(1, 7, Some(64), now).unwrap();
    assert_eq!(leases.get(1, lease).unwrap().probe, Some(64));
    assert!(leases.get(2, lease).is_none());
    assert!(!leases.detach(1, now + LIFE, false));
    assert!(leases.expire(now + LIFE / 2).is_empty());
    assert!(leases.attach(1));
    assert!(leases.expire(now + 2 * LIFE).is_empty(), "it is connected");
    assert_eq!(leases.count(7), 1);
}

#[test]
fn a_silent_holders_release_is_unconfirmed_until_it_speaks() {
    let now = Instant::now();
    let mut leases = Leases::default();
    leases.open(1, peer(1), None);
    let lease = leases.grant(1, 7, None, now).unwrap();
    leases.detach(1, now + LIFE, false);
    assert_eq!(leases.deadline(), Some(now + LIFE));
    let ended = leases.expire(now + LIFE);
    assert_eq!((ended.len(), ended[0].leases.len()), (1, 1));
    assert_eq!((leases.count(7), leases.deadline()), (0, None));
    assert_eq!(leases.holders(7).0[0].state, HolderState::Expired);
    assert!(!leases.attach(1), "the session is no more");
    assert!(leases.get(1, lease).is_none());
    // Another peer cannot release it; the first can, from a new session.
    leases.open(2, peer(1), None);
    assert!(leases.release(3, &peer(2), lease).is_none());
    assert!(leases.release(2, &peer(1), lease).is_some());
    assert!(leases.holders(7).0.is_empty());
}

#[test]
fn an_expired_lease_is_forgotten_with_its_process_and_a_live_one_is_not() {
    let now = Instant::now();
    let mut leases = Leases::default();
    let process = Process::of(std::process::id()).unwrap();
    leases.open(1, peer(1), None);
    let [known, unknown] = [(); 2].map(|()| leases.grant(1, 7, None, now).unwrap());
    leases.set_process(known, process);
    assert!(leases.ended(process).is_empty(), "it is not followed");
    assert_eq!(leases.count(7), 2);
    leases.end(1);
    leases.follow_lease(known);
    assert_eq!(leases.ended(process).len(), 1);
    assert!(leases.is_held(7));
    assert!(leases.release(2, &peer(1), unknown).is_some());
    assert!(!leases.is_held(7));
}

#[test]
fn no_release_is_unconfirmed_if_the_ticket_was_never_redeemed() {
    let now = Instant::now();
    let mut leases = Leases::default();
    leases.open(1, peer(1), None);
    let [redeemed, unused] = [7, 8].map(|memory| {
        let lease = leases.grant(1, memory, None, now).unwrap();
        leases.change(lease, |lease| lease.handed = false);
        lease
    });
    leases.change(redeemed, |lease| lease.handed = true);
    assert!(leases.is_held(7) && leases.is_held(8), "it may come yet");
    let ended = leases.end(1).unwrap();
    let told: BTreeSet<_> = ended.leases.iter().map(|l| l.holder.lease).collect();
    assert_eq!(told, BTreeSet::from([redeemed, unused]));
    assert!(leases.is_held(7) && !leases.is_held(8));
    assert_eq!(leases.live(), 0);
    assert!(leases.release(2, &peer(1), unused).is_none());
    assert!(leases.release(2, &peer(1), redeemed).is_some());
}

#[test]
fn nobody_knows_whether_a_later_local_session_is_the_silent_holder() {
    let now = Instant::now();
    let mut leases = Leases::default();
    leases.open(1, PeerName::Local, None);
    let lease = leases.grant(1, 7, None, now).unwrap();
    leases.detach(1, now, false);
    leases.expire(now);
    leases.open(2, PeerName::Local, None);
    assert!(leases.release(2, &PeerName::Local, lease).is_none());
    assert_eq!(leases.holders(7).0[0].state, HolderState::Expired);
    // A live lease is released by its own session.
    let lease = leases.grant(2, 8, None, now).unwrap();
    assert!(leases.release(2, &PeerName::Local, lease).is_some());
}

#[test]
fn only_its_session_releases_a_live_lease() {
    let now = Instant::now();
    let mut leases = Leases::default();
    leases.open(1, peer(1), None);
    leases.open(2, peer(1), None);
    let lease = leases.grant(1, 7, None, now).unwrap();
    assert!(leases.release(2, &peer(1), lease).is_none());
    assert!(leases.release(1, &peer(1), lease).is_some());
    assert!(leases.release(1, &peer(1), lease).is_none());
}

#[test]
fn a_session_that_holds_nothing_ends_with_its_connection() {
    let now = Instant::now();
    let mut leases = Leases::default();
    leases.open(1, peer(1), None);
    assert!(leases.detach(1, now + LIFE, false));
    assert_eq!(leases.sessions(), 0);
    leases.open(2, peer(1), None);
    assert!(!leases.detach(2, now + LIFE, true), "it is kept");
    assert_eq!(leases.expire(now + LIFE).len(), 1);
}

#[test]
fn limits_are_each_peers_own() {
    let now = Instant::now();
    let mut leases = Leases::new(2);
    leases.open(1, peer(1), None);
    leases.open(2, peer(1), None);
    leases.open(3, peer(2), None);
    let first = leases.grant(1, 7, None, now).unwrap();
    leases.grant(2, 7, None, now).unwrap();
    assert_eq!(leases.grant(1, 7, None, now).unwrap_err().0, Refusal::Limit);
    leases.grant(3, 7, None, now).unwrap();
    leases.release(1, &peer(1), first).unwrap();
    leases.grant(1, 7, None, now).unwrap();
    leases.clear();
    leases.open(1, peer(1), None);
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
fn a_grant_that_never_arrived_ends_when_the_session_resumes() {
    let now = Instant::now();
    let mut leases = Leases::default();
    leases.open(1, peer(1), None);
    let had = leases.grant(1, 7, None, now).unwrap();
    let lost = leases.grant(1, 7, None, now).unwrap();
    let (dropped, unknown) = leases.keep_only(1, &[had, u64::MAX]);
    assert_eq!(dropped.len(), 1);
    assert_eq!((dropped[0].holder.lease, unknown), (lost, vec![u64::MAX]));
    assert_eq!(leases.of_session(1).count(), 1);
}

#[test]
fn a_publication_ends_with_all_its_leases() {
    let now = Instant::now();
    let mut leases = Leases::default();
    for session in 1..=3 {
        leases.open(session, peer(session as u32), None);
        leases.grant(session, 7, None, now).unwrap();
    }
    leases.detach(3, now, false);
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
    let mut leases = Leases::default();
    let since = |session| now + Duration::from_secs(session);
    for session in 0..MAX_EXPIRED as u64 + 5 {
        leases.open(session, peer(1), None);
        let now = since(session);
        leases.grant(session, 7, None, now).unwrap();
        leases.detach(session, now, false);
        leases.expire(now);
        leases.thin_out(&leases.crowd());
    }
    let (list, more) = leases.holders(7);
    assert_eq!((list.len(), more), (MAX_EXPIRED, 5));
    assert_eq!(list[0].since, since(5), "the oldest are forgotten");
    assert_eq!(leases.leases.len(), MAX_EXPIRED);
}

#[test]
fn of_too_many_expired_holders_those_go_first_whose_processes_have_ended() {
    let now = Instant::now();
    let mut leases = Leases::default();
    let all: Vec<_> = (0..=MAX_EXPIRED as u32).map(Process::without).collect();
    for (session, process) in all.iter().enumerate() {
        let session = session as u64;
        leases.open(session, peer(1), None);
        let lease = leases.grant(session, 7, None, now).unwrap();
        leases.set_process(lease, *process);
        assert!(!leases.is_crowded());
        leases.end(session);
    }
    assert!(leases.is_crowded());
    let mut crowd = leases.crowd();
    assert_eq!(crowd.len(), all.len());
    // One of them runs.
    crowd.remove(&all[9]);
    leases.thin_out(&crowd);
    assert!(!leases.is_crowded());
    let (list, more) = leases.holders(7);
    assert_eq!((list.len(), more), (1, MAX_EXPIRED), "they did not say it");
    assert_eq!(leases.silent(7), [(list[0].lease, all[9])]);
    assert!(leases.is_held(7));
    leases.release(9, &peer(1), list[0].lease).unwrap();
    assert!(!leases.is_held(7), "nobody has it mapped");
    leases.forget(7);
    assert!(leases.publications.is_empty() && leases.leases.is_empty());
}

/// A lease, its session, its publication, its peer, its state, and when it was granted.
type NaiveLease = (u64, u64, u64, u32, HolderState, Instant);

/// The same by brute force: a list of sessions and a list of leases.
#[derive(Default)]
struct Naive {
    sessions: Vec<(u64, u32, Option<Instant>)>,
    leases: Vec<NaiveLease>,
}

#[derive(Clone, Debug)]
enum Step {
    Open(u64, u32),
    Attach(u64),
    Detach(u64, u64, bool),
    Grant(u64, u64),
    /// The lease was granted this many grants after the first.
    Release(u64, u32, usize),
    KeepOnly(u64, Vec<usize>),
    Withdraw(u64),
    Forget(u64),
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let session = 0..5_u64;
    let step = prop_oneof![
        2 => (session.clone(), 0..3_u32).prop_map(|(s, p)| Step::Open(s, p)),
        1 => session.clone().prop_map(Step::Attach),
        2 => (session.clone(), 1..9_u64, any::<bool>()).prop_map(|(s, t, k)| Step::Detach(s, t, k)),
        5 => (session.clone(), 0..3_u64).prop_map(|(s, p)| Step::Grant(s, p)),
        3 => (session.clone(), 0..3_u32, 0..30_usize).prop_map(|(s, p, l)| Step::Release(s, p, l)),
        1 => (session, proptest::collection::vec(0..30_usize, 0..5))
            .prop_map(|(s, l)| Step::KeepOnly(s, l)),
        1 => (0..3_u64).prop_map(Step::Withdraw),
        1 => (0..3_u64).prop_map(Step::Forget),
        2 => (0..6_u64).prop_map(Step::Pass),
    ];
    proptest::collection::vec(step, 0..60)
}

impl Naive {
    fn expire(&mut self, session: u64) {
        self.sessions.retain(|s| s.0 != session);
        for lease in self.leases.iter_mut().filter(|l| l.1 == session) {
            lease.4 = HolderState::Expired;
        }
    }

    fn is_live(lease: &NaiveLease, session: u64) -> bool {
        lease.1 == session && lease.4 != HolderState::Expired
    }
}

proptest! {
    #[test]
    fn it_agrees_with_lists(steps in steps()) {
        let second = Duration::from_secs(1);
        let mut now = Instant::now();
        let mut table = Leases::new(4);
        let mut naive = Naive::default();
        let mut granted_ever = Vec::new();
        // Sessions' numbers are never reused: each opening is a new one.
        let mut real: [u64; 5] = [u64::MAX; 5];
        let mut next_session = 0;
        for step in steps {
            match step {
                Step::Open(slot, who) => {
                    // The slot's previous session survives without a connection.
                    real[slot as usize] = next_session;
                    next_session += 1;
                    table.open(real[slot as usize], peer(who), None);
                    naive.sessions.push((real[slot as usize], who, None));
                }
                Step::Attach(slot) => {
                    let s = real[slot as usize];
                    let entry = naive.sessions.iter_mut().find(|e| e.0 == s);
                    prop_assert_eq!(table.attach(s), entry.is_some());
                    if let Some(entry) = entry {
                        entry.2 = None;
                    }
                }
                Step::Detach(slot, after, keep) => {
                    let s = real[slot as usize];
                    let until = now + after as u32 * second;
                    let holds = naive.leases.iter().any(|l| Naive::is_live(l, s));
                    let there = naive.sessions.iter_mut().find(|e| e.0 == s);
                    let ends = there.is_some() && !holds && !keep;
                    if let Some(entry) = there {
                        entry.2 = Some(until);
                    }
                    if ends {
                        naive.expire(s);
                    }
                    prop_assert_eq!(table.detach(s, until, keep), ends);
                }
                Step::Grant(slot, publication) => {
                    let s = real[slot as usize];
                    let granted = table.grant(s, publication, None, now);
                    let Some(&(_, who, _)) = naive.sessions.iter().find(|e| e.0 == s) else {
                        prop_assert_eq!(granted.unwrap_err().0, Refusal::Expired);
                        continue;
                    };
                    let of_peer = |l: &&NaiveLease| l.3 == who && l.4 != HolderState::Expired;
                    if naive.leases.iter().filter(of_peer).count() >= 4 {
                        prop_assert_eq!(granted.unwrap_err().0, Refusal::Limit);
                    } else {
                        let lease = granted.unwrap();
                        prop_assert!(!granted_ever.contains(&lease));
                        granted_ever.push(lease);
                        naive.leases.push((lease, s, publication, who, HolderState::Held, now));
                    }
                }
                Step::Release(slot, who, nth) => {
                    let s = real[slot as usize];
                    let lease = granted_ever.get(nth).copied().unwrap_or(u64::MAX);
                    let found = naive.leases.iter().position(|l| {
                        l.0 == lease && if l.4 == HolderState::Expired { l.3 == who } else { l.1 == s }
                    });
                    let released = table.release(s, &peer(who), lease);
                    prop_assert_eq!(released.is_some(), found.is_some());
                    if let Some(at) = found {
                        naive.leases.remove(at);
                    }
                }
                Step::KeepOnly(slot, held) => {
                    let held = held.iter().filter_map(|&nth| granted_ever.get(nth).copied());
                    let held: Vec<u64> = held.collect::<BTreeSet<_>>().into_iter().collect();
                    let s = real[slot as usize];
                    let (dropped, unknown) = table.keep_only(s, &held);
                    for lease in held.iter().filter(|l| !unknown.contains(l)) {
                        prop_assert!(naive.leases.iter().any(|l| l.0 == *lease && Naive::is_live(l, s)));
                    }
                    let before = naive.leases.len();
                    naive.leases.retain(|l| !Naive::is_live(l, s) || held.contains(&l.0));
                    prop_assert_eq!(before - naive.leases.len(), dropped.len());
                }
                Step::Withdraw(publication) => {
                    let mut told = table.withdraw(publication);
                    let live = naive.leases.iter_mut().filter(|l| l.2 == publication && l.4 != HolderState::Expired);
                    let mut expected: Vec<_> = live.map(|l| { l.4 = HolderState::Withdrawing; (l.1, l.0) }).collect();
                    told.sort_unstable();
                    expected.sort_unstable();
                    prop_assert_eq!(told, expected);
                }
                Step::Forget(publication) => {
                    let live = naive.leases.iter().filter(|l| l.2 == publication && l.4 != HolderState::Expired);
                    prop_assert_eq!(table.forget(publication).len(), live.count());
                    naive.leases.retain(|l| l.2 != publication);
                }
                Step::Pass(seconds) => {
                    now += seconds as u32 * second;
                    let over = |e: &&(u64, u32, Option<Instant>)| e.2.is_some_and(|until| until <= now);
                    let over: Vec<u64> = naive.sessions.iter().filter(over).map(|e| e.0).collect();
                    let mut ended: Vec<u64> = table.expire(now).iter().map(|e| e.session).collect();
                    ended.sort_unstable();
                    prop_assert_eq!(&ended, &over);
                    over.into_iter().for_each(|s| naive.expire(s));
                }
            }
            // After every step both agree on the visible state.
            for publication in 0..3 {
                let order = |state| usize::from(state == HolderState::Expired);
                let mut expected: Vec<_> = naive.leases.iter().filter(|l| l.2 == publication).collect();
                expected.sort_by_key(|l| (order(l.4), l.5, l.0));
                let expected: Vec<_> = expected.iter().map(|l| (l.0, peer(l.3), l.4)).collect();
                let found = table.holders(publication).0;
                let found: Vec<_> = found.into_iter().map(|h| (h.lease, h.peer, h.state)).collect();
                prop_assert_eq!(found, expected);
            }
            let until = naive.sessions.iter().filter_map(|e| e.2).min();
            prop_assert_eq!(table.deadline(), until);
            prop_assert_eq!(table.sessions(), naive.sessions.len());
        }
    }
}

#[test]
fn a_process_is_waited_for_only_while_a_lease_of_it_is_followed() {
    use tokio::sync::oneshot::error::TryRecvError;

    let now = Instant::now();
    let mut leases = Leases::default();
    let process = Process::without(1);
    leases.open(1, peer(1), None);
    let [one, two] = [(); 2].map(|()| {
        let lease = leases.grant(1, 7, None, now).unwrap();
        leases.set_process(lease, process);
        lease
    });
    leases.detach(1, now + LIFE, false);
    leases.follow(1);
    let (watched, mut end) = leases.take_unwatched().pop().unwrap();
    assert_eq!(watched, process);
    assert!(leases.take_unwatched().is_empty(), "it is waited for once");
    leases.release(1, &peer(1), one).unwrap();
    assert_eq!(end.try_recv(), Err(TryRecvError::Empty));
    leases.release(1, &peer(1), two).unwrap();
    assert_eq!(end.try_recv(), Err(TryRecvError::Closed));

    let lease = leases.grant(1, 7, None, now).unwrap();
    leases.set_process(lease, process);
    leases.follow(1);
    let (_, mut end) = leases.take_unwatched().pop().unwrap();
    // Its connection reports its state again.
    assert!(leases.attach(1));
    assert_eq!(end.try_recv(), Err(TryRecvError::Closed));
    leases.detach(1, now + LIFE, false);
    leases.follow(1);
    assert!(leases.attach(1));
    assert!(leases.take_unwatched().is_empty());
    assert!(leases.followed.is_empty() && leases.unwatched.is_empty());
}
