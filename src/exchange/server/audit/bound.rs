//! How many refusals of one peer are written: a hostile peer must not fill a disk by being refused.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Refusals of one peer that are written at once.
pub(super) const BURST: u32 = 32;
/// After the burst, one is written each time this is over.
const REFILL: Duration = Duration::from_secs(1);
/// Peers that are counted one by one; the others share one account.
const PEERS: usize = 1024;
/// The account of peers beyond [`PEERS`]. No peer has this name.
pub(super) const OTHERS: &str = "*";

#[derive(Debug)]
struct Account {
    /// When it would be full again.
    full: Instant,
    suppressed: u64,
}

/// A token bucket for each peer, and what did not fit.
#[derive(Debug, Default)]
pub(super) struct Bound {
    accounts: HashMap<String, Account>,
}

impl Bound {
    /// Whether a refusal of `peer` is written; if not, it is counted.
    pub fn admit(&mut self, peer: &str, now: Instant) -> bool {
        if !self.accounts.contains_key(peer) && self.accounts.len() >= PEERS {
            self.accounts
                .retain(|_, account| account.suppressed > 0 || account.full > now);
        }
        let full = self.accounts.len() >= PEERS && !self.accounts.contains_key(peer);
        let key = if full { OTHERS } else { peer };
        let account = self.accounts.entry(key.to_owned()).or_insert(Account {
            full: now,
            suppressed: 0,
        });
        let next = account.full.max(now) + REFILL;
        if next > now + REFILL * BURST {
            account.suppressed += 1;
            return false;
        }
        account.full = next;
        true
    }

    /// How many of the peer's refusals were not written, and have not been told.
    pub fn take(&mut self, peer: &str) -> u64 {
        let account = self.accounts.get_mut(peer);
        account.map_or(0, |account| std::mem::take(&mut account.suppressed))
    }

    /// The same of all peers.
    pub fn take_all(&mut self) -> Vec<(String, u64)> {
        let all = self.accounts.iter_mut();
        all.map(|(peer, account)| (peer.clone(), std::mem::take(&mut account.suppressed)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_written_then_one_each_second_and_the_rest_is_counted() {
        let mut bound = Bound::default();
        let now = Instant::now();
        let written = (0..1000).filter(|_| bound.admit("a", now)).count();
        assert_eq!(written, BURST as usize);
        assert_eq!(bound.take("a"), 1000 - u64::from(BURST));
        assert_eq!(bound.take("a"), 0);
        assert!(bound.admit("a", now + REFILL));
        assert!(!bound.admit("a", now + REFILL));
        assert!(bound.admit("b", now), "another peer is not held up");
        assert_eq!(bound.take_all(), [("a".to_owned(), 1)]);
    }

    #[test]
    fn peers_without_number_share_an_account() {
        let mut bound = Bound::default();
        let now = Instant::now();
        for peer in 0..10 * PEERS {
            bound.admit(&peer.to_string(), now);
        }
        assert!(bound.accounts.len() <= PEERS + 1);
        assert!(bound.take(OTHERS) > 0);
        // Those that are full again make room.
        assert!(bound.admit("late", now + REFILL * BURST));
        assert!(bound.accounts.len() <= 2);
    }
}
