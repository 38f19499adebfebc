//! Random sequences of gathers: all ranks get the same result of each, and no state is left over.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::gathers::{brought, bytes, number};
use super::*;
use crate::protocol::{Gather, Operation};

const RANKS: u64 = 3;

#[derive(Clone, Debug)]
enum Step {
    /// The rank's next call, unless one of its calls waits.
    Call {
        session: u64,
        kind: u8,
        ms: u64,
    },
    /// The rank repeats the call before, as after a broken connection.
    Again {
        session: u64,
    },
    /// The rank gives up its call.
    GiveUp {
        session: u64,
    },
    Leave {
        session: u64,
    },
    Gone {
        session: u64,
    },
    Wait {
        seconds: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0..RANKS;
    let kind = prop_oneof![12 => Just(0_u8), 4 => Just(1), 1 => Just(2), 1 => Just(3)];
    prop_oneof![
        24 => (session.clone(), kind, 1000..20_000_u64)
            .prop_map(|(session, kind, ms)| Step::Call { session, kind, ms }),
        4 => session.clone().prop_map(|session| Step::Again { session }),
        2 => session.clone().prop_map(|session| Step::GiveUp { session }),
        1 => session.clone().prop_map(|session| Step::Leave { session }),
        1 => session.prop_map(|session| Step::Gone { session }),
        4 => (0..6_u64).prop_map(|seconds| Step::Wait { seconds }),
    ]
}

fn operation(kind: u8) -> Operation {
    match kind {
        0 => Operation::Barrier,
        1 => bytes(1, 8),
        2 => bytes(1, 9),
        _ => brought(),
    }
}

/// The calls and answers of a rank.
#[derive(Default)]
struct Rank {
    calls: u64,
    kinds: Vec<u8>,
    waiter: Option<(u64, Waiter, Duration)>,
    out: bool,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Invariants: no number succeeds for one rank and fails for another, it succeeds only if all ranks
    /// entered it with the same operation, no rank waits beyond its deadline, and no state is left at the
    /// end.
    #[test]
    fn all_ranks_hear_the_same_of_each_gather(steps in prop::collection::vec(step(), 1..120)) {
        let mut story = Story::new(Rules::default());
        let round = story.complete(RANKS as u32);
        let mut now = Duration::ZERO;
        let mut ranks: BTreeMap<u64, Rank> = (0..RANKS).map(|rank| (rank, Rank::default())).collect();
        // By number: the result for each rank that got one.
        let mut heard: BTreeMap<u64, Vec<bool>> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Call { session, kind, ms } => {
                    let rank = ranks.get_mut(&session).unwrap();
                    if rank.out || rank.waiter.is_some() {
                        continue;
                    }
                    rank.calls += 1;
                    rank.kinds.push(kind);
                    let ask = Gather { ms, ..number(round, rank.calls, operation(kind)) };
                    let waiter = story.gather(now, session, ask);
                    rank.waiter = Some((rank.calls, waiter, now + Duration::from_millis(ms)));
                }
                Step::Again { session } => {
                    let rank = ranks.get_mut(&session).unwrap();
                    let Some((of, waiter, until)) = rank.waiter else { continue };
                    if !rank.out {
                        story.rounds.cancel(now, waiter);
                        let kind = rank.kinds[of as usize - 1];
                        let ask = Gather { ms: 1_000_000, ..number(round, of, operation(kind)) };
                        rank.waiter = Some((of, story.gather(now, session, ask), until));
                    }
                }
                Step::GiveUp { session } => {
                    let rank = ranks.get_mut(&session).unwrap();
                    if let Some((_, waiter, _)) = rank.waiter.take() {
                        story.rounds.cancel(now, waiter);
                        story.take();
                    }
                }
                Step::Leave { session } => {
                    let rank = ranks.get_mut(&session).unwrap();
                    if !std::mem::replace(&mut rank.out, true) {
                        story.leave(now, session, round, 1000);
                    }
                }
                Step::Gone { session } => {
                    ranks.get_mut(&session).unwrap().out = true;
                    story.gone(now, session);
                }
                Step::Wait { seconds } => {
                    now += at(seconds);
                    story.tick(now);
                }
            }
            for rank in ranks.values_mut() {
                let Some((of, waiter, until)) = rank.waiter else { continue };
                let passed = match story.told.get(&waiter) {
                    None => {
                        prop_assert!(until > now, "waiter {} waits beyond its deadline", waiter);
                        continue;
                    }
                    Some(Told::Done | Told::Members(..) | Told::Agreed(_)) => true,
                    Some(Told::Incomplete(_)) => false,
                    Some(other) => {
                        prop_assert!(rank.out, "{}", shown(Some(other)));
                        false
                    }
                };
                heard.entry(of).or_default().push(passed);
                rank.waiter = None;
            }
        }
        for (of, passed) in heard {
            prop_assert!(passed.windows(2).all(|pair| pair[0] == pair[1]), "gather {} is split", of);
            if passed[0] {
                let kinds: Vec<_> = ranks.values().map(|rank| rank.kinds.get(of as usize - 1)).collect();
                prop_assert!(kinds[0].is_some() && kinds.windows(2).all(|pair| pair[0] == pair[1]));
            }
        }
        for session in 0..RANKS {
            story.gone(now, session);
        }
        story.nothing_left();
    }
}
