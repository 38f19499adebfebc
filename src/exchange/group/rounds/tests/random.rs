//! Random sequences: no split decision, and no state left over.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Join {
        session: u64,
        rank: u32,
        fabric: bool,
    },
    Offer {
        session: u64,
        right: bool,
    },
    Leave {
        session: u64,
    },
    Gone {
        session: u64,
    },
    Cancel {
        nth: usize,
    },
    Wait {
        seconds: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0..4_u64;
    prop_oneof![
        8 => (session.clone(), 0..3_u32, prop::bool::weighted(0.9))
            .prop_map(|(session, rank, fabric)| Step::Join { session, rank, fabric }),
        8 => (session.clone(), prop::bool::weighted(0.95))
            .prop_map(|(session, right)| Step::Offer { session, right }),
        2 => session.clone().prop_map(|session| Step::Leave { session }),
        1 => session.prop_map(|session| Step::Gone { session }),
        1 => (0..8_usize).prop_map(|nth| Step::Cancel { nth }),
        1 => (0..12_u64).prop_map(|seconds| Step::Wait { seconds }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Invariants: no waiter is answered twice, all ranks of a round get the same answer, no round is both
    /// complete and failed, every waiter is answered in time, and no state is left at the end.
    #[test]
    fn never_a_split_decision(steps in prop::collection::vec(step(), 1..80)) {
        let mut story = Story::new(Rules::default());
        let mut now = Duration::ZERO;
        // By round: the waiters of its joins and offers.
        let mut joined: HashMap<u64, Vec<Waiter>> = HashMap::new();
        let mut offered: HashMap<u64, Vec<Waiter>> = HashMap::new();
        let mut asked: BTreeMap<Waiter, Duration> = BTreeMap::new();
        let mut rounds_of: HashMap<u64, u64> = HashMap::new();
        let mut cancelled = BTreeSet::new();
        for step in steps {
            match step {
                Step::Join { session, rank, fabric } => {
                    let mut join = ask(rank, 3);
                    if !fabric {
                        join.can = Vec::new();
                    }
                    // Rounds are numbered so: the open one, or the one that begins now.
                    let waiter = story.join(now, session, join);
                    let round = match story.told.get(&waiter) {
                        Some(Told::Agreed(agreed)) => Some(agreed.round),
                        Some(Told::Incomplete(_)) => Some(story.rounds.keys.last_round()),
                        Some(_) => None,
                        None => story.rounds.waiters.places.get(&waiter).map(|(round, _)| *round),
                    };
                    if let Some(round) = round {
                        joined.entry(round).or_default().push(waiter);
                        rounds_of.insert(session, round);
                    }
                    asked.insert(waiter, now + at(10));
                }
                Step::Offer { session, right } => {
                    let round = rounds_of.get(&session).copied().unwrap_or(0);
                    let mut offer = handles(round);
                    if !right {
                        offer.fabric.clear();
                    }
                    let waiter = story.offer(now, session, offer);
                    offered.entry(round).or_default().push(waiter);
                    asked.insert(waiter, now + Rules::default().offer);
                }
                Step::Leave { session } => {
                    let round = rounds_of.get(&session).copied().unwrap_or(0);
                    let waiter = story.leave(now, session, round, 3000);
                    asked.insert(waiter, now + at(3));
                }
                Step::Gone { session } => story.gone(now, session),
                Step::Cancel { nth } => {
                    let mut waiting: Vec<_> = story.rounds.waiters.places.keys().copied().collect();
                    waiting.sort_unstable();
                    if let Some(&waiter) = waiting.get(nth) {
                        cancelled.insert(waiter);
                        story.rounds.cancel(now, waiter);
                        story.take();
                    }
                }
                Step::Wait { seconds } => {
                    now += at(seconds);
                    story.tick(now);
                }
            }
            for (waiter, until) in &asked {
                let waits = !story.told.contains_key(waiter) && !cancelled.contains(waiter);
                prop_assert!(!waits || *until > now, "waiter {} waits beyond its deadline", waiter);
            }
        }
        for (round, waiters) in joined {
            let told: Vec<_> = waiters.iter().filter_map(|waiter| story.told.get(waiter)).collect();
            let agreed = told.iter().filter(|told| matches!(told, Told::Agreed(_))).count();
            let failed: Vec<_> = told.iter().filter_map(|told| match told {
                Told::Incomplete(why) => Some(why),
                _ => None,
            }).collect();
            prop_assert!(agreed == 0 || agreed == 3, "round {}: {} agreed", round, agreed);
            prop_assert!(agreed == 0 || failed.is_empty(), "round {} is split", round);
            prop_assert!(failed.windows(2).all(|pair| pair[0] == pair[1]));
        }
        for (round, waiters) in offered {
            let told: Vec<_> = waiters.iter().filter_map(|waiter| story.told.get(waiter)).collect();
            let members = told.iter().filter(|told| matches!(told, Told::Members(..))).count();
            let failed: Vec<_> = told.iter().filter_map(|told| match told {
                Told::Incomplete(why) => Some(why),
                _ => None,
            }).collect();
            prop_assert!(members == 0 || failed.is_empty(), "round {} is split", round);
            prop_assert!(failed.windows(2).all(|pair| pair[0] == pair[1]));
        }
        for session in 0..4 {
            story.gone(now, session);
        }
        story.nothing_left();
    }
}
