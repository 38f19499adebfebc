//! The rules for reusing memory, without any memory.
//!
//! A process that was given a handle and still has the memory mapped sees later writes to it, and no
//! other process can revoke that mapping. So memory goes to another peer only if every earlier holder has
//! confirmed that it unmapped it. By default not even then: it goes only to a peer that was the only one ever
//! to have it.

use serde::{Deserialize, Serialize};

use crate::exchange::PeerName;

/// Which peers may get memory that was in use, after it was released cleanly and zeroed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reuse {
    /// The peer that had it, if no other peer ever did.
    #[default]
    SamePeer,
    /// Any peer: holders are trusted to have unmapped memory that they released.
    Anyone,
    /// None: all of it goes back to the driver.
    Never,
}

/// The processor that zeroes memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scrubber {
    /// The CPU, in several threads.
    #[default]
    Cpu,
    /// The first GPU, which then has a context of this process: some hundreds of MiB of its memory.
    Gpu,
}

/// Which peers have had handles of a memory since the driver created it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Past {
    /// None.
    Fresh,
    /// One peer with a name of its own, and no other.
    Only(PeerName),
    /// Several peers, or one without a name of its own.
    Many,
    /// A peer that may still have it mapped: it died, fell silent, or refused to release it.
    Tainted,
}

/// Why memory goes back to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Discard {
    /// A holder may still have it mapped.
    Tainted,
    /// The policy is [`Reuse::Never`], or several peers have seen it.
    Policy,
}

impl Past {
    /// Notes which peer gets handles. `None`: several peers do or may, or one whose name is not its own, but one that any
    /// process on the machine has.
    pub fn shown(&mut self, only: Option<&PeerName>) {
        *self = match (std::mem::replace(self, Self::Tainted), only) {
            (Self::Tainted, _) => Self::Tainted,
            (Self::Fresh, Some(peer)) => Self::Only(peer.clone()),
            (Self::Only(before), Some(peer)) if before == *peer => Self::Only(before),
            _ => Self::Many,
        };
    }

    /// Returns the only peer that may have the memory again once no peer holds a lease; `None` for any peer. Unless it is
    /// [`Fresh`](Self::Fresh), it must be zeroed first.
    ///
    /// # Errors
    /// Why it goes back to the driver.
    pub fn next_owner(&self, reuse: Reuse) -> Result<Option<PeerName>, Discard> {
        match (self, reuse) {
            (Self::Fresh, _) => Ok(None),
            (Self::Tainted, _) => Err(Discard::Tainted),
            (Self::Only(peer), Reuse::SamePeer) => Ok(Some(peer.clone())),
            (Self::Only(_) | Self::Many, Reuse::Anyone) => Ok(None),
            (Self::Many, Reuse::SamePeer) | (_, Reuse::Never) => Err(Discard::Policy),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Show { peer: PeerName, named: bool },
        Taint,
        Back,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0_u32..3, prop::bool::weighted(0.9)).prop_map(|(uid, named)| Step::Show { peer: PeerName::User(uid), named }),
            1 => Just(Step::Taint),
            3 => Just(Step::Back),
        ];
        proptest::collection::vec(step, 0..40)
    }

    proptest! {
        /// Compares one memory's many uses with everything that ever happened to it.
        #[test]
        fn memory_is_never_given_to_a_peer_that_an_earlier_holder_could_watch(
            steps in steps(),
            reuse in prop_oneof![Just(Reuse::SamePeer), Just(Reuse::Anyone), Just(Reuse::Never)],
        ) {
            let mut past = Past::Fresh;
            let mut seen: Vec<(PeerName, bool)> = Vec::new();
            let mut tainted = false;
            for step in steps {
                match step {
                    Step::Show { peer, named } => {
                        // The reserve gives memory with a past only to that peer.
                        if let (Past::Only(owner), Reuse::SamePeer) = (&past, reuse) {
                            prop_assert!(seen.iter().all(|(peer, named)| peer == owner && *named));
                        }
                        past.shown(named.then_some(&peer));
                        seen.push((peer, named));
                    }
                    Step::Taint => {
                        past = Past::Tainted;
                        tainted = true;
                    }
                    Step::Back => match past.next_owner(reuse) {
                        Ok(None) if past == Past::Fresh => prop_assert!(seen.is_empty() && !tainted),
                        Ok(Some(peer)) => {
                            prop_assert!(!tainted && reuse == Reuse::SamePeer);
                            prop_assert!(seen.iter().all(|(who, named)| *who == peer && *named));
                        }
                        Ok(None) => {
                            prop_assert!(!tainted && reuse == Reuse::Anyone);
                        }
                        Err(why) => {
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
        let [a, b] = [1, 2].map(PeerName::User);
        past.shown(Some(&a));
        assert_eq!(past.next_owner(Reuse::SamePeer), Ok(Some(a)));
        past.shown(Some(&b));
        assert_eq!(past.next_owner(Reuse::SamePeer), Err(Discard::Policy));
        assert_eq!(past.next_owner(Reuse::Anyone), Ok(None));
        past = Past::Tainted;
        for reuse in [Reuse::SamePeer, Reuse::Anyone, Reuse::Never] {
            assert_eq!(past.next_owner(reuse), Err(Discard::Tainted));
        }
    }
}
