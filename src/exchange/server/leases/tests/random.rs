//! Random calls on the table and on plain lists.

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
        2 => (session.clone(), 1..9_u64).prop_map(|(s, t)| Step::Detach(s, t)),
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
        let mut table = table(4);
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
                    table.open(real[slot as usize], peer(who));
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
                    prop_assert_eq!(table.detach(s, until), ends);
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
                    let mut others: Vec<u64> = table.of_session(s, None).collect();
                    others.retain(|lease| !held.contains(lease));
                    let who = naive.sessions.iter().find(|e| e.0 == s).map_or(0, |e| e.1);
                    for &lease in &others {
                        prop_assert!(table.release(s, &peer(who), lease).is_some());
                    }
                    let before = naive.leases.len();
                    naive.leases.retain(|l| !Naive::is_live(l, s) || held.contains(&l.0));
                    prop_assert_eq!(before - naive.leases.len(), others.len());
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
