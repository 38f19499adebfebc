//! Who has how much: names and bytes, charged before memory is made.

use std::collections::HashMap;
use std::hash::Hash;

use crate::size::Bytes;

/// What one peer may have at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    /// Bytes, padding counted.
    pub bytes: u64,
    /// Names.
    pub names: u64,
}

/// Why a charge is refused, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Over(pub String);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Charged {
    bytes: u64,
    names: u64,
    /// Of the bytes, those of names that are gone while somebody may still have them mapped.
    doubtful: u64,
}

impl Charged {
    /// What of it is in doubt, for people.
    fn doubt(&self) -> String {
        match self.doubtful {
            0 => String::new(),
            bytes => format!(
                "; {} of what counts was deleted, but a holder that fell silent may still have it mapped",
                Bytes(bytes)
            ),
        }
    }
}

/// Each peer's names and bytes. Peers that have none are not remembered, so the ledger is never
/// larger than what is charged.
#[derive(Debug)]
pub(crate) struct Ledger<P> {
    quota: Quota,
    peers: HashMap<P, Charged>,
}

impl<P: Clone + Eq + Hash> Ledger<P> {
    pub fn new(quota: Quota) -> Self {
        Self {
            quota,
            peers: HashMap::new(),
        }
    }

    /// Changes the quota. Who has more keeps it, and gets no more.
    pub fn set_quota(&mut self, quota: Quota) {
        self.quota = quota;
    }

    /// Charges `peer` with one name of `bytes`.
    pub fn charge(&mut self, peer: &P, bytes: u64) -> Result<(), Over> {
        let have = self.peers.get(peer).copied().unwrap_or_default();
        if have.names >= self.quota.names {
            return Err(Over(format!(
                "{} names, and no more are allowed{}",
                have.names,
                have.doubt()
            )));
        }
        match have.bytes.checked_add(bytes) {
            Some(sum) if sum <= self.quota.bytes => {
                let charged = Charged {
                    bytes: sum,
                    names: have.names + 1,
                    ..have
                };
                self.peers.insert(peer.clone(), charged);
                Ok(())
            }
            _ => Err(Over(format!(
                "{} of {} are taken, {} more were asked for{}",
                Bytes(have.bytes),
                Bytes(self.quota.bytes),
                Bytes(bytes),
                have.doubt()
            ))),
        }
    }

    /// Takes a charge back.
    pub fn refund(&mut self, peer: &P, bytes: u64) {
        if let Some(have) = self.peers.get_mut(peer) {
            have.bytes = have.bytes.saturating_sub(bytes);
            have.names = have.names.saturating_sub(1);
            if have.names == 0 {
                self.peers.remove(peer);
            }
        }
    }

    /// The name of a charge is gone, but its memory may still be mapped: it goes on counting, name
    /// and bytes, until [`settle`](Self::settle).
    pub fn doubt(&mut self, peer: &P, bytes: u64) {
        if let Some(have) = self.peers.get_mut(peer) {
            have.doubtful = have.doubtful.saturating_add(bytes);
        }
    }

    /// Takes back a charge that was doubtful.
    pub fn settle(&mut self, peer: &P, bytes: u64) {
        if let Some(have) = self.peers.get_mut(peer) {
            have.doubtful = have.doubtful.saturating_sub(bytes);
        }
        self.refund(peer, bytes);
    }

    /// All bytes in doubt.
    pub fn doubtful(&self) -> u64 {
        let all = self.peers.values();
        all.fold(0, |sum, have| sum.saturating_add(have.doubtful))
    }

    /// How many peers have something.
    pub fn peers(&self) -> usize {
        self.peers.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn nobody_ever_has_more_than_the_quota(
            ops in proptest::collection::vec((0_u8..3, 0_u64..60, 0_u8..4), 0..200),
        ) {
            let quota = Quota { bytes: 100, names: 4 };
            let mut ledger = Ledger::new(quota);
            let mut held: Vec<(u8, u64)> = Vec::new();
            let mut doubted: Vec<(u8, u64)> = Vec::new();
            let sum = |held: &[(u8, u64)], peer| {
                let own = held.iter().filter(|(who, _)| *who == peer);
                own.fold((0, 0), |(names, bytes), (_, more)| (names + 1, bytes + more))
            };
            for (peer, bytes, what) in ops {
                let own = |list: &[(u8, u64)]| list.iter().position(|(who, _)| *who == peer);
                if what == 0 {
                    let both = [&held[..], &doubted].concat();
                    let (names, sum) = sum(&both, peer);
                    let fits = names < quota.names && sum + bytes <= quota.bytes;
                    prop_assert_eq!(ledger.charge(&peer, bytes).is_ok(), fits);
                    if fits {
                        held.push((peer, bytes));
                    }
                } else if let (1, Some(at)) = (what, own(&held)) {
                    let (_, bytes) = held.remove(at);
                    ledger.refund(&peer, bytes);
                } else if let (2, Some(at)) = (what, own(&held)) {
                    let (_, bytes) = held.remove(at);
                    ledger.doubt(&peer, bytes);
                    doubted.push((peer, bytes));
                } else if let (3, Some(at)) = (what, own(&doubted)) {
                    let (_, bytes) = doubted.remove(at);
                    ledger.settle(&peer, bytes);
                }
                let both = [&held[..], &doubted].concat();
                let peers = (0..3).filter(|&peer| sum(&both, peer).0 > 0).count();
                prop_assert_eq!(ledger.peers(), peers);
                let bytes: u64 = doubted.iter().map(|(_, bytes)| bytes).sum();
                prop_assert_eq!(ledger.doubtful(), bytes);
            }
        }
    }

    #[test]
    fn a_refusal_says_what_is_in_doubt() {
        let mut ledger = Ledger::new(Quota {
            bytes: 4 << 20,
            names: 2,
        });
        ledger.charge(&"a", 3 << 20).unwrap();
        ledger.doubt(&"a", 3 << 20);
        let Over(why) = ledger.charge(&"a", 2 << 20).unwrap_err();
        assert!(why.contains("; 3 MiB of what counts"), "{why}");
        ledger.charge(&"b", 4 << 20).unwrap();
        ledger.charge(&"a", 1).unwrap();
        let Over(why) = ledger.charge(&"a", 1).unwrap_err();
        assert!(why.contains("2 names") && why.contains("3 MiB"), "{why}");
        ledger.settle(&"a", 3 << 20);
        ledger.charge(&"a", (4 << 20) - 1).unwrap();
    }

    #[test]
    fn a_sum_beyond_64_bits_is_refused() {
        let mut ledger = Ledger::new(Quota {
            bytes: u64::MAX,
            names: 9,
        });
        ledger.charge(&"a", u64::MAX).unwrap();
        let Over(why) = ledger.charge(&"a", 1).unwrap_err();
        assert!(why.contains("1 B more"), "{why}");
    }
}
