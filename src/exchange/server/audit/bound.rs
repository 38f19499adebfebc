//! Bounds how many refusals and session events of one peer are written: a hostile peer must not fill a disk,
//! or push the events of other peers out of a queue.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::Event;

/// After a burst, one event is written per this time.
const REFILL: Duration = Duration::from_secs(1);
/// Peers with an account of their own; the others share one.
const PEERS: usize = 1024;
/// The account of peers beyond [`PEERS`]. No peer has this name.
const OTHERS: &str = "*";

/// Kinds of events with a bucket of their own for each peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BucketKind {
    Refusal,
    /// A session that begins, is resumed, or ends.
    Session,
}

impl BucketKind {
    /// Returns how many events of one peer are written at once.
    const fn burst(self) -> u32 {
        match self {
            Self::Refusal => 32,
            Self::Session => 256,
        }
    }
}

#[derive(Debug)]
struct Account {
    /// When it is full again.
    full: Instant,
    suppressed: u64,
}

/// Token buckets for each peer, and counts of suppressed events.
#[derive(Debug, Default)]
pub(super) struct Bounds {
    refusals: Accounts,
    sessions: Accounts,
    /// When the suppressed events are reported next; `None` if there are none.
    due: Option<Instant>,
}

impl Bounds {
    /// Returns whether to write an event of `peer`; otherwise counts it.
    pub fn admit(&mut self, kind: BucketKind, peer: &str, now: Instant) -> bool {
        let accounts = match kind {
            BucketKind::Refusal => &mut self.refusals,
            BucketKind::Session => &mut self.sessions,
        };
        let admitted = accounts.admit(peer, kind.burst(), now);
        if !admitted {
            self.due.get_or_insert(now + REFILL);
        }
        admitted
    }

    /// Returns when [`take_due`](Self::take_due) returns something next.
    pub fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Returns events with the counts that were not reported yet, at most once each [`REFILL`].
    pub fn take_due(&mut self, now: Instant) -> Vec<Event> {
        match self.due {
            Some(due) if due <= now => self.take_all(),
            _ => Vec::new(),
        }
    }

    /// Returns events with the counts that were not reported yet.
    pub fn take_all(&mut self) -> Vec<Event> {
        self.due = None;
        let mut all = self.refusals.take_all("refused");
        all.extend(self.sessions.take_all("ok"));
        all
    }
}

#[derive(Debug, Default)]
struct Accounts(HashMap<String, Account>);

impl Accounts {
    fn admit(&mut self, peer: &str, burst: u32, now: Instant) -> bool {
        if !self.0.contains_key(peer) && self.0.len() >= PEERS {
            self.0
                .retain(|_, account| account.suppressed > 0 || account.full > now);
        }
        let full = self.0.len() >= PEERS && !self.0.contains_key(peer);
        let key = if full { OTHERS } else { peer };
        let account = self.0.entry(key.to_owned()).or_insert(Account {
            full: now,
            suppressed: 0,
        });
        let next = account.full.max(now) + REFILL;
        if next > now + REFILL * burst {
            account.suppressed += 1;
            return false;
        }
        account.full = next;
        true
    }

    fn take_all(&mut self, outcome: &'static str) -> Vec<Event> {
        let left = self
            .0
            .iter_mut()
            .filter(|(_, account)| account.suppressed > 0);
        left.map(|(peer, account)| Event {
            event: "suppressed",
            outcome,
            peer: peer.clone(),
            count: Some(std::mem::take(&mut account.suppressed)),
            ..Event::default()
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suppressed(kind: BucketKind, peer: &str, count: u64) -> Event {
        Event {
            event: "suppressed",
            outcome: match kind {
                BucketKind::Refusal => "refused",
                BucketKind::Session => "ok",
            },
            peer: peer.to_owned(),
            count: Some(count),
            ..Event::default()
        }
    }

    #[test]
    fn a_burst_is_written_then_one_each_second_and_the_rest_is_counted() {
        for kind in [BucketKind::Refusal, BucketKind::Session] {
            let mut bounds = Bounds::default();
            let now = Instant::now();
            let written = (0..1000).filter(|_| bounds.admit(kind, "a", now)).count();
            assert_eq!(written, kind.burst() as usize);
            let left = 1000 - u64::from(kind.burst());
            assert_eq!(bounds.take_due(now), [], "not yet");
            assert_eq!(bounds.deadline(), Some(now + REFILL));
            let later = now + REFILL;
            assert_eq!(bounds.take_due(later), [suppressed(kind, "a", left)]);
            assert_eq!((bounds.take_all(), bounds.deadline()), (vec![], None));
            assert!(bounds.admit(kind, "a", later));
            assert!(!bounds.admit(kind, "a", later));
            assert!(bounds.admit(kind, "b", now), "another peer is not held up");
            assert_eq!(bounds.take_all(), [suppressed(kind, "a", 1)]);
        }
    }

    #[test]
    fn sessions_do_not_use_up_what_refusals_have() {
        let mut bounds = Bounds::default();
        let now = Instant::now();
        while bounds.admit(BucketKind::Session, "a", now) {}
        assert!(bounds.admit(BucketKind::Refusal, "a", now));
    }

    #[test]
    fn peers_without_number_share_an_account() {
        let (mut bounds, kind) = (Bounds::default(), BucketKind::Refusal);
        let now = Instant::now();
        for peer in 0..10 * PEERS {
            bounds.admit(kind, &peer.to_string(), now);
        }
        assert!(bounds.refusals.0.len() <= PEERS + 1);
        assert!(bounds.take_all().iter().any(|left| left.peer == OTHERS));
        // Buckets that are full again make room.
        assert!(bounds.admit(kind, "late", now + REFILL * kind.burst()));
        assert!(bounds.refusals.0.len() <= 2);
    }
}
