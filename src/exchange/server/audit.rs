//! The audit log: an event of `tracing`, with the target `egmem::audit`, for each session, grant, refusal, release,
//! revocation, creation and deletion.
//!
//! docs/service.md has the fields. None of them is a handle, a session's token or a key. Token buckets
//! for each peer bound how many events are written: a hostile peer must not fill a disk, or hide the events of
//! other peers among its own.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tracing::Dispatch;

use crate::PeerName;
use crate::per_driver::lock;

/// How often counts of suppressed events are written.
const REPORT: Duration = Duration::from_secs(1);
/// Peers with buckets of their own; the others share those of [`OTHERS`].
const PEERS: usize = 1024;
/// No peer has this name.
const OTHERS: &str = "*";

/// Kinds of events with a bucket of their own for each peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Refusal,
    /// A session that begins, is resumed, or ends.
    Session,
    /// A lease or a name.
    Memory,
}

impl Kind {
    /// Returns how many events of one peer are written at once, and how many each second after that.
    const fn rate(self) -> (u32, u32) {
        match self {
            Self::Refusal => (32, 1),
            Self::Session => (256, 1),
            Self::Memory => (4096, 16),
        }
    }
}

/// Writes an audit event of a peer, unless the peer has too many.
macro_rules! audit {
    ($audit:expr, $kind:ident, $peer:expr, $event:expr $(, $($field:tt)*)?) => {
        $audit.report($crate::server::audit::Kind::$kind, $peer, |peer| {
            tracing::info!(target: "egmem::audit", event = $event, peer $(, $($field)*)?);
        })
    };
}
pub(super) use audit;

/// Bounds a server's events, and writes them.
#[derive(Debug, Default)]
pub(super) struct Audit {
    /// Replaces the program's subscriber.
    to: Option<Dispatch>,
    buckets: Mutex<Buckets>,
}

impl Audit {
    pub fn new(to: Option<Dispatch>) -> Self {
        let buckets = Mutex::default();
        Self { to, buckets }
    }

    /// Calls `write` with the peer's name, or counts the event as suppressed. Use [`audit!`].
    pub fn report(&self, kind: Kind, peer: Option<&PeerName>, write: impl FnOnce(&str)) {
        let peer = peer.map(PeerName::to_string).unwrap_or_default();
        let now = Instant::now();
        self.report_suppressed(now);
        if lock(&self.buckets).admit(kind, &peer, now) {
            self.write(|| write(&peer));
        }
    }

    /// Returns when [`report_suppressed`](Self::report_suppressed) is due, if there is something to report.
    pub fn deadline(&self) -> Option<Instant> {
        lock(&self.buckets).due
    }

    /// Writes how many events were suppressed, when that is due.
    pub fn report_suppressed(&self, now: Instant) {
        if self.deadline().is_some_and(|due| due <= now) {
            self.finish();
        }
    }

    /// Writes counts that were not written yet.
    pub fn finish(&self) {
        let all = lock(&self.buckets).take_suppressed();
        for (kind, peer, count) in all {
            let (event, kind) = ("suppressed", format!("{kind:?}").to_lowercase());
            self.write(|| tracing::info!(target: "egmem::audit", event, peer, kind, count));
        }
    }

    fn write(&self, event: impl FnOnce()) {
        match &self.to {
            Some(to) => tracing::dispatcher::with_default(to, event),
            None => event(),
        }
    }
}

#[derive(Debug)]
struct Bucket {
    /// When it is full again.
    full: Instant,
    suppressed: u64,
}

#[derive(Debug, Default)]
struct Buckets {
    of: HashMap<(Kind, String), Bucket>,
    /// When the suppressed events are reported next; `None` if there are none.
    due: Option<Instant>,
}

impl Buckets {
    /// Returns whether to write an event; otherwise counts it.
    fn admit(&mut self, kind: Kind, peer: &str, now: Instant) -> bool {
        let mut key = (kind, peer.to_owned());
        if !self.of.contains_key(&key) && self.of.len() >= 3 * PEERS {
            self.of
                .retain(|_, bucket| bucket.suppressed > 0 || bucket.full > now);
            if self.of.len() >= 3 * PEERS {
                key.1 = OTHERS.into();
            }
        }
        let bucket = self.of.entry(key).or_insert(Bucket {
            full: now,
            suppressed: 0,
        });
        let (burst, each_second) = kind.rate();
        let refill = Duration::from_secs(1) / each_second;
        let full = bucket.full.max(now) + refill;
        if full > now + refill * burst {
            bucket.suppressed += 1;
            self.due.get_or_insert(now + REPORT);
            return false;
        }
        bucket.full = full;
        true
    }

    /// Returns the counts of suppressed events, and sets them to zero.
    fn take_suppressed(&mut self) -> Vec<(Kind, String, u64)> {
        self.due = None;
        let left = self.of.iter_mut().filter(|(_, left)| left.suppressed > 0);
        let take = |(key, left): (&(Kind, String), &mut Bucket)| {
            (key.0, key.1.clone(), std::mem::take(&mut left.suppressed))
        };
        left.map(take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_written_then_some_each_second_and_the_rest_is_counted() {
        for kind in [Kind::Refusal, Kind::Session, Kind::Memory] {
            let mut buckets = Buckets::default();
            let now = Instant::now();
            let (burst, each_second) = kind.rate();
            let admitted = |buckets: &mut Buckets, now| {
                let tries = 0..10_000;
                tries.filter(|_| buckets.admit(kind, "a", now)).count() as u32
            };
            assert_eq!(admitted(&mut buckets, now), burst);
            assert_eq!(buckets.due, Some(now + REPORT));
            let left = u64::from(10_000 - burst);
            assert_eq!(buckets.take_suppressed(), [(kind, "a".to_owned(), left)]);
            assert_eq!((buckets.take_suppressed(), buckets.due), (vec![], None));
            assert_eq!(admitted(&mut buckets, now + REPORT), each_second);
            assert!(buckets.admit(kind, "b", now), "another peer is not held up");
        }
    }

    #[test]
    fn sessions_do_not_use_up_what_refusals_have() {
        let mut buckets = Buckets::default();
        let now = Instant::now();
        while buckets.admit(Kind::Session, "a", now) {}
        assert!(buckets.admit(Kind::Refusal, "a", now));
    }

    #[test]
    fn peers_without_number_share_a_bucket() {
        let (mut buckets, kind) = (Buckets::default(), Kind::Refusal);
        let now = Instant::now();
        for peer in 0..10 * PEERS {
            buckets.admit(kind, &peer.to_string(), now);
        }
        assert!(buckets.of.len() <= 3 * PEERS + 1);
        let suppressed = buckets.take_suppressed();
        assert!(suppressed.iter().any(|(_, peer, _)| peer == OTHERS));
        // Buckets that are full again make room.
        let later = now + Duration::from_secs(60);
        assert!(buckets.admit(kind, "late", later));
        assert!(buckets.of.len() <= 2);
    }
}
