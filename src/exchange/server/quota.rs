//! Counts of what peers make a server keep, for each peer and in all, and its process's file descriptors.
//!
//! Memory is bounded by these counts and the largest size of each item. `tests/memory` measures it: beside a fixed amount
//! for each connection, request and name, a server keeps at most eight bytes for each byte that it received. Decoded lists
//! are therefore not much longer than their frames, table entries that a request leaves
//! are short, and names of peers are shared.
//!
//! | kept for a peer | until | count | largest size |
//! |---|---|---|---|
//! | a connection that has not been greeted | it is greeted, or closed | `handshakes` | TLS's buffers and a hello of 4 KiB |
//! | a connection, and a frame that is read | its end | [`What::Connection`] | 32 KiB, and [`MAX_REQUEST`](crate::protocol::MAX_REQUEST) bytes of a frame |
//! | an answer or event, built and written | it is written, or `write` is over | one for each connection; larger ones: permits, [`LARGE`] | 64 KiB; larger ones 4096 parts |
//! | a session | its end | [`What::Session`] | 4 KiB |
//! | a notice about a live lease | it is sent, or the lease is released; the newest of each | [`What::Lease`] | 128 bytes |
//! | a notice about an ended lease | it is sent | [`What::Record`] | 768 bytes |
//! | a request that waits, and a driver call that outlives it | answered, or the call returns | [`What::Request`], `requests_in_flight` | 2 KiB; one with a longer list of peers, 64 KiB at most, counts as several |
//! | a lease, live or expired | it is released, or its name is gone | [`What::Lease`], [`What::Record`] | 768 bytes |
//! | a name that a peer owns | it is deleted | [`What::Name`] | 64 KiB of peers, and a description |
//! | memory whose name is gone, without its description | its holders are gone | [`What::Record`] of one of them at least | 768 bytes |
//! | in the ledger, that a part was sent to a process | the memory is gone | the last 16 processes of each part | 320 bytes |
//! | fds that are sent | they are closed | [`What::Fd`] | |

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use crate::per_driver::lock;
use crate::{Error, Limits, MemoryError, PeerName, Refusal, Result, ShareError};
use rustix::process::{Resource, getrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::task_tracker::TaskTrackerToken;

/// The most bytes of an answer that needs no permit.
pub(super) const SMALL: usize = 64 << 10;
/// Permits for larger answers: of all peers, and of each. A connection has one.
const LARGE: (usize, usize) = (64, 4);
/// Live and expired leases: the least limits of all peers, and of each, which is four times `leases_per_peer`.
const RECORDS: (usize, usize) = (1 << 20, 1 << 18);

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Greeted connections.
    Connection,
    Session,
    /// Names that a peer owns.
    Name,
    /// Live leases.
    Lease,
    /// Live and expired leases.
    Record,
    /// Requests that wait for something.
    Request,
    /// Fds that are being sent.
    Fd,
}

/// Of each [`What`]: the texts of the limits on all peers, and on each.
const TEXTS: [(&str, &str); 7] = [
    ("connections", "connections of this peer"),
    ("sessions", "sessions of this peer"),
    ("names", "names of this peer"),
    ("leases", "leases of this peer"),
    (
        "live and expired leases",
        "live and expired leases of this peer",
    ),
    ("requests at once", "requests of this peer at once"),
    ("fds at once", "fds of this peer at once"),
];

/// A number for each [`What`].
type Counts = [usize; TEXTS.len()];

/// The counts of all peers.
#[derive(Debug, Default)]
pub(super) struct Quota {
    /// For each [`What`]: the limit on all peers together, and on each.
    limits: [(usize, usize); TEXTS.len()],
    used: Mutex<Used>,
    large: LargeAnswers,
}

#[derive(Debug, Default)]
struct Used {
    all: Counts,
    peers: HashMap<PeerName, OfPeer>,
}

#[derive(Debug)]
struct OfPeer {
    used: Counts,
    large: LargeAnswers,
}

/// So many are counted until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it ends the count"]
pub(super) struct Counted {
    quota: Arc<Quota>,
    peer: PeerName,
    what: What,
    amount: usize,
}

/// A refusal: the reason for programs, and for people.
pub(super) type Refused = (Refusal, String);

/// For an answer to a peer.
impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        let reason = match &error {
            Error::LimitReached { what, limit } => {
                return (Refusal::Limit, format!("{limit} {what}"));
            }
            Error::Share(ShareError::Memory(MemoryError::InvalidArgument { .. })) => {
                Refusal::Invalid
            }
            _ => Refusal::Internal,
        };
        (reason, error.to_string())
    }
}

impl Quota {
    /// Returns the counts of a server whose process may open so many fds.
    pub fn new(limits: &Limits, fds: usize) -> Arc<Self> {
        let records = limits.leases_per_peer.saturating_mul(4);
        let limits = [
            (limits.connections, limits.connections_per_peer),
            (limits.sessions, limits.sessions_per_peer),
            (usize::MAX, limits.names_per_peer),
            (usize::MAX, limits.leases_per_peer),
            (records.max(RECORDS.0), records.max(RECORDS.1)),
            (limits.requests, limits.requests_per_peer),
            // Without fds for connections and files, a server could serve no peer.
            (fds / 2, limits.fds_per_peer),
        ];
        Arc::new(Self {
            limits,
            used: Mutex::default(),
            large: LargeAnswers::new(LARGE.0),
        })
    }

    /// Counts `amount` more for the peer.
    ///
    /// # Errors
    /// [`Error::LimitReached`]. Where both limits are, it is the peer's own: a peer can reduce its own sum, and with only the
    /// limit of all it would retry in vain.
    pub fn count(self: &Arc<Self>, peer: &PeerName, what: What, amount: usize) -> Result<Counted> {
        let kind = what as usize;
        let mut used = lock(&self.used);
        let Used { all, peers } = &mut *used;
        let (most, most_of_peer) = self.limits[kind];
        let its = peers.get(peer).map_or(0, |of_peer| of_peer.used[kind]);
        let (text, text_of_peer) = TEXTS[kind];
        for (used, limit, what) in [(its, most_of_peer, text_of_peer), (all[kind], most, text)] {
            if amount > limit.saturating_sub(used) {
                let limit = limit as u64;
                return Err(Error::LimitReached { what, limit });
            }
        }
        let of_peer = peers.entry(peer.clone()).or_insert_with(|| OfPeer {
            used: Counts::default(),
            large: self.large.part(LARGE.1),
        });
        of_peer.used[kind] += amount;
        all[kind] += amount;
        Ok(Counted {
            quota: Arc::clone(self),
            peer: peer.clone(),
            what,
            amount,
        })
    }

    /// Returns the sum of all peers.
    pub fn used(&self, what: What) -> usize {
        lock(&self.used).all[what as usize]
    }

    /// Returns the permit for large answers of a new connection of a peer, which is counted already.
    pub fn large(&self, peer: &PeerName) -> LargeAnswers {
        let used = lock(&self.used);
        let of_peer = used.peers.get(peer).map(|of_peer| &of_peer.large);
        of_peer.unwrap_or(&self.large).part(1)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let kind = self.what as usize;
        let mut used = lock(&self.quota.used);
        let Used { all, peers } = &mut *used;
        all[kind] -= self.amount;
        if let Some(of_peer) = peers.get_mut(&self.peer) {
            of_peer.used[kind] -= self.amount;
            if of_peer.used == Counts::default() {
                peers.remove(&self.peer);
                shrink(peers);
            }
        }
    }
}

/// Permits for large answers, narrow limits first: a connection has few, each peer more, and all together a number.
#[derive(Clone, Debug, Default)]
pub(super) struct LargeAnswers(Vec<Arc<Semaphore>>);

/// A permit for a large answer, of each limit.
pub(super) type Permit = Vec<OwnedSemaphorePermit>;

impl LargeAnswers {
    /// Returns so many permits.
    pub fn new(count: usize) -> Self {
        Self(vec![Arc::new(Semaphore::new(count))])
    }

    /// Returns a part of these permits: at most `count` at once.
    fn part(&self, count: usize) -> Self {
        let mut limits = Self::new(count);
        limits.0.extend(self.0.iter().cloned());
        limits
    }

    /// Waits for a permit.
    ///
    /// # Cancel safety
    /// If dropped before completion, the place in the queue is lost.
    pub async fn permit(self) -> Permit {
        let mut permit = Vec::with_capacity(self.0.len());
        for limit in self.0 {
            // It is never closed.
            permit.extend(limit.acquire_owned().await);
        }
        permit
    }
}

/// Fds for a peer, counted for it until they are closed.
#[derive(Debug, Default)]
pub(super) struct CountedFds {
    // Dropped first.
    pub fds: Vec<OwnedFd>,
    pub _count: Option<Counted>,
    /// A withdrawal of the memory waits for this.
    pub _exported: Option<TaskTrackerToken>,
}

impl CountedFds {
    pub fn borrowed(&self) -> Vec<BorrowedFd<'_>> {
        self.fds.iter().map(AsFd::as_fd).collect()
    }
}

/// Returns how many fds this process may open (`RLIMIT_NOFILE`).
pub(super) fn fds_of_process() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| limit.try_into().unwrap_or(usize::MAX))
}

/// Lowers the limits on connections to their shares of a process's fds, so that no use takes another's: half is for peers'
/// fds, a quarter for greeted connections, an eighth for those that are not. The last eighth is for
/// everything else: sockets, files, memory, the directory, and the rest of the program.
pub(super) fn lower_for_fds(limits: &mut Limits, fds: usize) {
    for (name, limit, share) in [
        ("handshakes", &mut limits.handshakes, fds / 8),
        ("connections", &mut limits.connections, fds / 4),
        (
            "connections_per_peer",
            &mut limits.connections_per_peer,
            fds / 8,
        ),
    ] {
        let lowered = share.max(1);
        if *limit > lowered {
            let configured = *limit;
            tracing::info!(
                target: "egmem_exchange",
                limit = name, configured, lowered, "lowered for RLIMIT_NOFILE"
            );
            *limit = lowered;
        }
    }
}

/// Releases most of the capacity of a map that has become much smaller.
pub(super) fn shrink<K: Eq + std::hash::Hash, V>(map: &mut HashMap<K, V>) {
    if map.capacity() > 64 && map.len() < map.capacity() / 8 {
        map.shrink_to(map.len() * 2);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;

    use super::*;

    const PEERS: [PeerName; 2] = [PeerName::User(1), PeerName::Local];

    fn quota(connections: usize, connections_per_peer: usize) -> Arc<Quota> {
        let limits = Limits {
            connections,
            connections_per_peer,
            ..Limits::default()
        };
        Quota::new(&limits, 1 << 20)
    }

    fn why(over: Result<Counted>) -> String {
        Refused::from(over.unwrap_err()).1
    }

    #[test]
    fn a_peer_and_all_peers_have_so_many() {
        let quota = quota(12, 8);
        let count = |peer: usize, amount| quota.count(&PEERS[peer], What::Connection, amount);
        let held = count(0, 5).unwrap();
        assert_eq!(why(count(0, 4)), "8 connections of this peer");
        assert_eq!(why(count(1, 8)), "12 connections");
        let rest = count(1, 7).unwrap();
        assert_eq!(quota.used(What::Connection), 12);
        assert!(count(0, 1).is_err() && count(0, usize::MAX).is_err());
        drop(held);
        let held = count(0, 1).unwrap();
        assert_eq!(quota.used(What::Connection), 8);
        // Another kind has its own.
        drop(quota.count(&PEERS[0], What::Session, 9).unwrap());
        drop(rest);
        drop([held, count(0, 7).unwrap()]);
        assert_eq!(quota.used(What::Connection), 0);
        assert!(lock(&quota.used).peers.is_empty());
    }

    #[test]
    fn where_both_limits_are_reached_the_peers_own_is_named() {
        let quota = quota(3, 2);
        let count = |peer: usize, amount| quota.count(&PEERS[peer], What::Connection, amount);
        let held = [count(0, 2).unwrap(), count(1, 1).unwrap()];
        assert_eq!(why(count(0, 1)), "2 connections of this peer");
        assert_eq!(why(count(1, 1)), "3 connections");
        drop(held);
    }

    /// Returns a permit if there is one now.
    fn permit(of: &LargeAnswers) -> Option<Permit> {
        let waiting = pin!(of.clone().permit());
        match waiting.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(permit) => Some(permit),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_peer_has_few_permits_for_large_answers_and_leaves_some_to_others() {
        let quota = quota(99, 99);
        let mut held = Vec::new();
        for user in 0..2 {
            let peer = PeerName::User(user);
            let _counted = quota.count(&peer, What::Connection, 1).unwrap();
            // A connection has one, and all connections of a peer have a few.
            for _ in 0..LARGE.1 {
                let large = quota.large(&peer);
                held.push(permit(&large).unwrap());
                assert!(permit(&large).is_none());
            }
            assert!(permit(&quota.large(&peer)).is_none());
        }
        while let Some(permit) = permit(&quota.large) {
            held.push(permit);
        }
        assert_eq!(held.len(), LARGE.0);
        let other = quota.large(&PEERS[1]);
        assert!(permit(&other).is_none());
        held.clear();
        assert!(permit(&other).is_some());
    }

    #[test]
    fn limits_are_lowered_and_never_raised() {
        let mut limits = Limits::default();
        lower_for_fds(&mut limits, usize::MAX);
        assert_eq!(limits, Limits::default());
        limits.connections = 7;
        lower_for_fds(&mut limits, 1024);
        let lowered = Limits {
            handshakes: 128,
            connections: 7,
            connections_per_peer: 128,
            ..Limits::default()
        };
        assert_eq!(limits, lowered);
    }

    proptest! {
        #[test]
        fn an_eighth_is_left_and_everyone_has_some(fds in 8..=usize::MAX) {
            let mut limits = Limits {
                handshakes: usize::MAX,
                connections: usize::MAX,
                ..Limits::default()
            };
            lower_for_fds(&mut limits, fds);
            let held = Quota::new(&limits, fds).limits[What::Fd as usize].0;
            prop_assert!(fds - held - limits.connections - limits.handshakes >= fds / 8);
            prop_assert!(limits.handshakes > 0);
        }
    }

    #[test]
    fn counts_of_many_threads_add_up() {
        let quota = quota(usize::MAX, 64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for amount in 0..200 {
                        let counted = quota.count(&PEERS[1], What::Connection, amount % 16);
                        drop(counted.unwrap());
                    }
                });
            }
        });
        let used = lock(&quota.used);
        assert_eq!((used.all[0], used.peers.len()), (0, 0));
    }
}
