//! Random calls on the state and on plain lists.

use proptest::prelude::*;

use super::*;

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
    Detach(u64, u64),
    Grant(u64, u64),
    /// The lease was granted this many grants after the first.
    Release(u64, usize),
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
        2 => (session.clone(), 1..9_u64).prop_map(|(s, t)| Step::Detach(s, t)),
        5 => (session.clone(), 0..3_u64).prop_map(|(s, p)| Step::Grant(s, p)),
        3 => (session.clone(), 0..30_usize).prop_map(|(s, l)| Step::Release(s, l)),
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

/// Takes the notices of all sessions; returns each session that is told of a lease.
fn notices(sessions: &[Arc<ServerSession>]) -> Vec<(u64, u64)> {
    let mut told = Vec::new();
    for session in sessions {
        while let Some(notice) = session.notice() {
            told.push(match notice {
                Event::Withdrawing { lease, .. } => (session.id, lease),
                Event::Ended { lease, .. } => (session.id, lease),
                other => panic!("{other:?}"),
            });
        }
    }
    told.sort_unstable();
    told
}

proptest! {
    #[test]
    fn it_agrees_with_lists(steps in steps()) {
        let second = Duration::from_secs(1);
        let mut now = Instant::now();
        let mut state = state(4);
        let mut sessions: Vec<Arc<ServerSession>> = Vec::new();
        let mut naive = Naive::default();
        let mut granted_ever = Vec::new();
        // Sessions' numbers are never reused: each opening is a new one. The first five were never opened.
        let mut real: [u64; 5] = [0, 1, 2, 3, 4];
        for slot in real {
            sessions.push(session(&state, slot, peer(9)));
        }
        for step in steps {
            match step {
                Step::Open(slot, who) => {
                    // The slot's previous session survives without a connection.
                    real[slot as usize] = sessions.len() as u64;
                    sessions.push(open(&mut state, real[slot as usize], peer(who)));
                    naive.sessions.push((real[slot as usize], who, None));
                }
                Step::Attach(slot) => {
                    let s = real[slot as usize];
                    let entry = naive.sessions.iter_mut().find(|e| e.0 == s);
                    prop_assert_eq!(state.attach(s), entry.is_some());
                    if let Some(entry) = entry {
                        entry.2 = None;
                    }
                }
                Step::Detach(slot, after) => {
                    let s = real[slot as usize];
                    let until = now + after as u32 * second;
                    let holds = naive.leases.iter().any(|l| Naive::is_live(l, s));
                    let there = naive.sessions.iter_mut().find(|e| e.0 == s);
                    let ends = there.is_some() && !holds;
                    if let Some(entry) = there {
                        entry.2 = Some(until);
                    }
                    if ends {
                        naive.expire(s);
                    }
                    prop_assert_eq!(state.detach(s, until).is_some(), ends);
                }
                Step::Grant(slot, publication) => {
                    let s = real[slot as usize];
                    let granted = grant(&mut state, &sessions[s as usize], publication, now);
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
                Step::Release(slot, nth) => {
                    let s = real[slot as usize];
                    let session = &sessions[s as usize];
                    let lease = granted_ever.get(nth).copied().unwrap_or(u64::MAX);
                    let found = naive.leases.iter().position(|l| {
                        l.0 == lease && if l.4 == HolderState::Expired { peer(l.3) == session.peer } else { l.1 == s }
                    });
                    prop_assert_eq!(state.release(session, lease), found.is_some());
                    if let Some(at) = found {
                        naive.leases.remove(at);
                    }
                }
                Step::KeepOnly(slot, held) => {
                    let held = held.iter().filter_map(|&nth| granted_ever.get(nth).copied());
                    let held: Vec<u64> = held.collect::<BTreeSet<_>>().into_iter().collect();
                    let s = real[slot as usize];
                    let mut others: Vec<u64> = state.of_session(s, None).collect();
                    others.retain(|lease| !held.contains(lease));
                    for &lease in &others {
                        prop_assert!(state.release(&sessions[s as usize], lease));
                    }
                    let before = naive.leases.len();
                    naive.leases.retain(|l| !Naive::is_live(l, s) || held.contains(&l.0));
                    prop_assert_eq!(before - naive.leases.len(), others.len());
                }
                Step::Withdraw(publication) => {
                    let live = naive.leases.iter_mut().filter(|l| l.2 == publication && l.4 != HolderState::Expired);
                    let mut expected: Vec<_> = live.map(|l| { l.4 = HolderState::Withdrawing; (l.1, l.0) }).collect();
                    state.withdraw(publication, LIFE);
                    state.publications.get_mut(&publication).unwrap().closing = false;
                    expected.sort_unstable();
                    prop_assert_eq!(notices(&sessions), expected);
                }
                Step::Forget(publication) => {
                    let live = naive.leases.iter().filter(|l| l.2 == publication && l.4 != HolderState::Expired);
                    let mut expected: Vec<_> = live.map(|l| (l.1, l.0)).collect();
                    state.unpublish(publication, "");
                    publish(&mut state, publication);
                    expected.sort_unstable();
                    prop_assert_eq!(notices(&sessions), expected);
                    naive.leases.retain(|l| l.2 != publication);
                }
                Step::Pass(seconds) => {
                    now += seconds as u32 * second;
                    let over = |e: &&(u64, u32, Option<Instant>)| e.2.is_some_and(|until| until <= now);
                    let over: Vec<u64> = naive.sessions.iter().filter(over).map(|e| e.0).collect();
                    let mut ended: Vec<u64> = state.expire(now).iter().map(|ended| ended.0).collect();
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
                let found = state.holders(publication).0;
                let found: Vec<_> = found.into_iter().map(|h| (h.lease, h.peer, h.state)).collect();
                prop_assert_eq!(found, expected);
            }
            let until = naive.sessions.iter().filter_map(|e| e.2).min();
            prop_assert_eq!(state.deadlines.first(), until);
            prop_assert_eq!(state.sessions.len(), naive.sessions.len());
        }
    }
}
