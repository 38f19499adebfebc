//! What may become of memory that was in use: the rules, without any memory.
//!
//! Whoever was given a handle of a memory and still has it mapped sees what is written there later,
//! and nobody can take that mapping away. So memory is given to somebody else only where every
//! earlier holder has said that it unmapped it, and by default not even then: only to a peer that
//! was the only one ever to see it.

use serde::{Deserialize, Serialize};

/// Who may get memory that was in use, after it was released cleanly and zeroed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reuse {
    /// The peer that had it, if no other peer ever did.
    #[default]
    SamePeer,
    /// Anybody: holders are trusted to have unmapped what they released.
    Anyone,
    /// Nobody: all of it goes back to the driver.
    Never,
}

/// Who has been given handles of a memory since the driver made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Past<P> {
    /// Nobody.
    Fresh,
    /// One peer, known by name, and nobody else.
    Only(P),
    /// Several peers, or one that has no name of its own.
    Many,
    /// Somebody who may still have it mapped: who died, fell silent, or would not let go.
    Tainted,
}

/// What is to become of memory that came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict<P> {
    /// Nobody has seen it: it can be given to anybody as it is.
    AsItIs,
    /// Zeroed, then for this peer alone.
    ScrubFor(P),
    /// Zeroed, then for anybody.
    ScrubForAnyone,
    /// Back to the driver.
    Discard(Discard),
}

/// Why memory goes back to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Discard {
    /// A holder may still have it mapped.
    Tainted,
    /// The policy is [`Reuse::Never`], or several peers have seen it.
    Policy,
}

impl<P: Clone + Eq> Past<P> {
    /// `peer` gets a handle. `named`: whether the peer's name is its own, not one that anybody on
    /// the machine has.
    pub fn shown(&mut self, peer: &P, named: bool) {
        *self = match std::mem::replace(self, Self::Tainted) {
            Self::Tainted => Self::Tainted,
            Self::Fresh if named => Self::Only(peer.clone()),
            Self::Only(before) if named && before == *peer => Self::Only(before),
            Self::Fresh | Self::Only(_) | Self::Many => Self::Many,
        };
    }

    /// Peers other than its owner may fetch it: it counts as seen by them, whether they did or not.
    pub fn open_to_others(&mut self) {
        if *self != Self::Tainted {
            *self = Self::Many;
        }
    }

    /// A holder went without saying that it unmapped the memory.
    pub fn taint(&mut self) {
        *self = Self::Tainted;
    }

    /// What is to become of it, now that nobody holds a lease.
    pub fn verdict(&self, reuse: Reuse) -> Verdict<P> {
        match (self, reuse) {
            (Self::Fresh, _) => Verdict::AsItIs,
            (Self::Tainted, _) => Verdict::Discard(Discard::Tainted),
            (Self::Only(peer), Reuse::SamePeer) => Verdict::ScrubFor(peer.clone()),
            (Self::Only(_) | Self::Many, Reuse::Anyone) => Verdict::ScrubForAnyone,
            (Self::Many, Reuse::SamePeer) | (_, Reuse::Never) => Verdict::Discard(Discard::Policy),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Show { peer: u8, named: bool },
        Taint,
        Back,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0_u8..3, prop::bool::weighted(0.9)).prop_map(|(peer, named)| Step::Show { peer, named }),
            1 => Just(Step::Taint),
            3 => Just(Step::Back),
        ];
        proptest::collection::vec(step, 0..40)
    }

    proptest! {
        /// One memory through many lives, against all that ever happened to it.
        #[test]
        fn memory_is_never_given_to_whom_an_earlier_holder_could_watch(
            steps in steps(),
            reuse in prop_oneof![Just(Reuse::SamePeer), Just(Reuse::Anyone), Just(Reuse::Never)],
        ) {
            let mut past = Past::Fresh;
            let mut seen: Vec<(u8, bool)> = Vec::new();
            let mut tainted = false;
            for step in steps {
                match step {
                    Step::Show { peer, named } => {
                        // The reserve gives memory with a past to that peer alone.
                        if let (Past::Only(owner), Reuse::SamePeer) = (&past, reuse) {
                            prop_assert!(seen.iter().all(|(peer, named)| peer == owner && *named));
                        }
                        past.shown(&peer, named);
                        seen.push((peer, named));
                    }
                    Step::Taint => {
                        past.taint();
                        tainted = true;
                    }
                    Step::Back => match past.verdict(reuse) {
                        Verdict::AsItIs => prop_assert!(seen.is_empty() && !tainted),
                        Verdict::ScrubFor(peer) => {
                            prop_assert!(!tainted && reuse == Reuse::SamePeer);
                            prop_assert!(seen.iter().all(|&(who, named)| who == peer && named));
                        }
                        Verdict::ScrubForAnyone => {
                            prop_assert!(!tainted && reuse == Reuse::Anyone);
                        }
                        Verdict::Discard(why) => {
                            prop_assert!(!seen.is_empty() || tainted);
                            prop_assert_eq!(why == Discard::Tainted, tainted);
                            break;
                        }
                    },
                }
            }
        }
    }

    #[test]
    fn a_second_peer_ends_reuse_by_the_first() {
        let mut past = Past::Fresh;
        past.shown(&"a", true);
        assert_eq!(past.verdict(Reuse::SamePeer), Verdict::ScrubFor("a"));
        past.shown(&"b", true);
        assert_eq!(
            past.verdict(Reuse::SamePeer),
            Verdict::Discard(Discard::Policy)
        );
        assert_eq!(past.verdict(Reuse::Anyone), Verdict::ScrubForAnyone);
        past.taint();
        for reuse in [Reuse::SamePeer, Reuse::Anyone, Reuse::Never] {
            assert_eq!(past.verdict(reuse), Verdict::Discard(Discard::Tainted));
        }
    }
}
