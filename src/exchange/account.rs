//! Accounts for the bytes that a server keeps for its peers, for each peer and in all. Connections, sessions,
//! fds and leases are counted by further [`Accounts`].
//!
//! Everything that a peer can make a server keep carries a [`Charge`], which returns its bytes when it is
//! dropped. Beyond a limit no charge is made: the request is refused with `limit`, or the connection ends.
//! Sizes are those of the decoded form, rounded up.
//!
//! Beside the fixed sizes here and one answer for each connection, a server keeps at most eight bytes for
//! each byte that it received. Decoded lists are therefore not much longer than their frames,
//! table entries that a request leaves are short, and names of peers are
//! shared. `tests/memory` measures it.
//!
//! | kept for a peer | until | other bound | charged |
//! |---|---|---|---|
//! | a connection: its task, TLS's buffers, the beginning of a frame | its end | `handshakes`, `connections`, `connections_per_peer` | [`CONNECTION`] |
//! | `hello` | the welcome is built | 4 KiB, `handshakes` | nothing |
//! | a frame that is being read or decoded | it is decoded | `frame_bytes` | its buffer |
//! | a frame that is being written, of any answer or event | it is written, or `write` is over | one for each connection | its buffers |
//! | a session | its end | `sessions`, `sessions_per_peer` | [`SESSION`] |
//! | queued events: `withdrawing`, `ended`, `closing`, `dismissed` | they are sent | twice `leases_per_peer` and `queued_frames` | their bytes beyond [`PREPAID`] |
//! | events of watched names: `published`, `gone` | they are sent, or the connection ends | the number of names | the same |
//! | `ping`, `list`, `held`, `release` | answered at once | | nothing |
//! | `watch`: a prefix | the connection's end | 64 prefixes of 255 bytes | [`ENTRY`] and the prefix |
//! | `wait`, `probe`, `delete` | answered | `requests_in_flight` | [`REQUEST`] |
//! | `fetch` | answered | the same | the same; its answer is built when it is written |
//! | a driver call that outlives its request | it returns | | [`REQUEST`] |
//! | a lease and its record after expiry | it is released, or its name is gone | `leases_per_peer` | [`LEASE`] |
//! | `create`: the request, `peers` | answered | 1024 peers | [`REQUEST`] and its bytes |
//! | a name that a peer owns: its entry, `peers` and parts, from its publication on | it is deleted | `names`, quotas | [`REQUEST`], `peers` and its parts |
//! | a queue of fds, and the task that fills it | all were sent, or the client has closed its end, or `write` is over for a batch | fds: 18 for a queue | [`REQUEST`] |
//! | fds | they are closed | `fds_per_connection`, `fds_per_peer` | counted separately |

mod sizes;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};

use super::{Error, Limits, PeerName, Refusal};
use crate::per_driver::lock;
pub(crate) use sizes::*;

/// A connection, while its frames are short.
pub(crate) const CONNECTION: usize = 32 << 10;
/// A session with [`PREPAID`] bytes of events.
pub(crate) const SESSION: usize = 4 << 10;
/// Events of a session that need no further charge.
pub(crate) const PREPAID: usize = 2 << 10;
/// A request that is being answered, without its texts and lists.
pub(crate) const REQUEST: usize = 2 << 10;
/// A lease.
pub(crate) const LEASE: usize = 768;
/// An element of a list, a map or a queue, without its bytes.
pub(crate) const ENTRY: usize = 64;

/// A limit on all peers together, and one on each peer.
#[derive(Debug)]
pub(crate) struct Accounts {
    all: Arc<Account>,
    /// The limit on each peer, and its text.
    each: (usize, &'static str),
    peers: Mutex<HashMap<PeerName, Weak<Account>>>,
}

/// A sum with a limit. It is part of the sum of the account above it.
#[derive(Debug)]
pub(crate) struct Account {
    limit: usize,
    what: &'static str,
    used: AtomicUsize,
    above: Option<Arc<Account>>,
    /// The list that has this peer's account.
    listed: Option<(Arc<Accounts>, PeerName)>,
}

/// Bytes, or other things, that are kept for a peer until this is dropped.
#[derive(Debug)]
#[must_use = "dropping it returns the amount"]
pub(crate) struct Charge {
    account: Arc<Account>,
    amount: usize,
}

/// A limit that would be exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Over {
    /// The limited resource.
    pub what: &'static str,
    pub limit: usize,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.limit, self.what)
    }
}

impl From<Over> for Error {
    fn from(Over { what, limit }: Over) -> Self {
        let limit = limit as u64;
        Self::LimitReached { what, limit }
    }
}

/// For an answer to a peer.
impl From<Over> for (Refusal, String) {
    fn from(over: Over) -> Self {
        (Refusal::Limit, over.to_string())
    }
}

impl Accounts {
    /// Returns accounts for the bytes kept for peers.
    pub fn new(limits: &Limits) -> Arc<Self> {
        let each = (limits.bytes_per_peer, "bytes kept for this peer");
        Self::with((limits.bytes, "bytes kept for all peers"), each)
    }

    /// Returns accounts with a limit for all peers and one for each, each with a text for errors.
    pub fn with(all: (usize, &'static str), each: (usize, &'static str)) -> Arc<Self> {
        Arc::new(Self {
            all: Account::open(all, None, None),
            each,
            peers: Mutex::default(),
        })
    }

    /// Returns accounts with a limit for each peer.
    pub fn per_peer(limit: usize, what: &'static str) -> Arc<Self> {
        Self::with((usize::MAX, ""), (limit, what))
    }

    /// Returns the account of a peer, the same for all of its connections.
    pub fn of(self: &Arc<Self>, peer: &PeerName) -> Arc<Account> {
        let mut peers = lock(&self.peers);
        if let Some(account) = peers.get(peer).and_then(Weak::upgrade) {
            return account;
        }
        let listed = Some((Arc::clone(self), peer.clone()));
        let account = Account::open(self.each, Some(&self.all), listed);
        peers.insert(peer.clone(), Arc::downgrade(&account));
        account
    }

    /// Returns the sum of all peers.
    pub fn used(&self) -> usize {
        self.all.used.load(Relaxed)
    }
}

impl Account {
    fn open(
        (limit, what): (usize, &'static str),
        above: Option<&Arc<Self>>,
        listed: Option<(Arc<Accounts>, PeerName)>,
    ) -> Arc<Self> {
        Arc::new(Self {
            limit,
            what,
            used: AtomicUsize::new(0),
            above: above.cloned(),
            listed,
        })
    }

    /// Returns a new account below this one.
    pub fn below(self: &Arc<Self>, limit: usize, what: &'static str) -> Arc<Self> {
        Self::open((limit, what), Some(self), None)
    }

    /// Charges `bytes` more.
    ///
    /// # Errors
    /// The limit that would be exceeded; nothing is charged then.
    pub fn charge(self: &Arc<Self>, amount: usize) -> Result<Charge, Over> {
        self.add(amount)?;
        Ok(Charge {
            account: Arc::clone(self),
            amount,
        })
    }

    /// Raises this sum, then those above it. Where both are at their limits the error names this one: a peer can reduce
    /// its own sum, and with only the limit of all it would retry in vain. An amount that exceeds a limit above has raised the sums below it
    /// for a moment: another charge may fail meanwhile.
    fn add(&self, amount: usize) -> Result<(), Over> {
        let (what, limit) = (self.what, self.limit);
        let sum = |now: usize| now.checked_add(amount).filter(|sum| *sum <= limit);
        let added = self.used.fetch_update(Relaxed, Relaxed, sum);
        added.map_err(|_| Over { what, limit })?;
        let above = self
            .above
            .as_ref()
            .map_or(Ok(()), |above| above.add(amount));
        above.inspect_err(|_| {
            self.used.fetch_sub(amount, Relaxed);
        })
    }

    fn take(&self, amount: usize) {
        self.used.fetch_sub(amount, Relaxed);
        if let Some(above) = &self.above {
            above.take(amount);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if let Some((accounts, peer)) = &self.listed {
            let mut peers = lock(&accounts.peers);
            // Another account may have been opened meanwhile.
            if peers.get(peer).is_some_and(|open| open.strong_count() == 0) {
                peers.remove(peer);
                shrink(&mut peers);
            }
        }
    }
}

impl Charge {
    /// Changes the charge to `amount`.
    ///
    /// # Errors
    /// As [`Account::charge`]; the charge is unchanged then. Shrinking never fails.
    pub fn resize(&mut self, amount: usize) -> Result<(), Over> {
        match amount.checked_sub(self.amount) {
            Some(more) => self.account.add(more)?,
            None => self.account.take(self.amount - amount),
        }
        self.amount = amount;
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.take(self.amount);
    }
}

/// Releases most of the capacity of a map that has become much smaller.
pub(crate) fn shrink<K: Eq + std::hash::Hash, V>(map: &mut HashMap<K, V>) {
    if map.capacity() > 64 && map.len() < map.capacity() / 8 {
        map.shrink_to(map.len() * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts(bytes: usize, bytes_per_peer: usize) -> Arc<Accounts> {
        Accounts::new(&Limits {
            bytes,
            bytes_per_peer,
            ..Limits::default()
        })
    }

    #[test]
    fn a_peer_and_all_peers_have_so_many_bytes() {
        let accounts = accounts(12, 8);
        let [one, other] = [1, 2].map(|user| accounts.of(&PeerName::User(user)));
        let mut charge = one.charge(5).unwrap();
        let again = accounts.of(&PeerName::User(1));
        let over = again.charge(4).unwrap_err();
        assert_eq!((over.limit, over.what), (8, "bytes kept for this peer"));
        let over = other.charge(8).unwrap_err();
        assert_eq!((over.limit, over.what), (12, "bytes kept for all peers"));
        let rest = other.charge(7).unwrap();
        assert_eq!(accounts.used(), 12);
        assert!(charge.resize(6).is_err() && charge.resize(usize::MAX).is_err());
        charge.resize(1).unwrap();
        assert_eq!(accounts.used(), 8);
        charge.resize(5).unwrap();
        drop(rest);
        charge.resize(8).unwrap();
        assert_eq!(accounts.used(), 8);
        drop((one, again));
        assert!(
            accounts.of(&PeerName::User(1)).charge(1).is_err(),
            "the same account"
        );
        drop((charge, other));
        assert_eq!(accounts.used(), 0);
        assert!(lock(&accounts.peers).is_empty());
    }

    #[test]
    fn where_both_limits_are_reached_the_peers_own_is_named() {
        let accounts = Accounts::with((3, "of all peers"), (2, "of this peer"));
        let [one, other] = [1, 2].map(|user| accounts.of(&PeerName::User(user)));
        let held = [one.charge(2).unwrap(), other.charge(1).unwrap()];
        assert_eq!(one.charge(1).unwrap_err().to_string(), "2 of this peer");
        assert_eq!(other.charge(1).unwrap_err().to_string(), "3 of all peers");
        drop(held);
    }

    #[test]
    fn a_connection_has_a_part_of_its_peers() {
        let accounts = Accounts::with((usize::MAX, "of all peers"), (5, "of this peer"));
        let open = |user| accounts.of(&PeerName::User(user)).below(3, "of this one");
        let (a, b) = (open(1), open(1));
        let held = a.charge(2).unwrap();
        assert_eq!(a.charge(2).unwrap_err().to_string(), "3 of this one");
        let reserved = b.charge(3).unwrap();
        assert_eq!(a.charge(1).unwrap_err().to_string(), "5 of this peer");
        assert!(open(2).charge(3).is_ok(), "another has its own");
        assert!(a.charge(usize::MAX).is_err());
        assert_eq!(accounts.used(), 5);
        drop(reserved);
        // The connection may be gone: its charge still counts.
        drop(a);
        assert_eq!(accounts.used(), 2);
        drop(held);
        assert_eq!(accounts.used(), 0);
        assert!(b.charge(3).is_ok());
    }

    #[test]
    fn charges_of_many_threads_add_up() {
        let accounts = accounts(usize::MAX, 64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for bytes in 0..200 {
                        let account = accounts.of(&PeerName::Local);
                        let mut charge = account.charge(bytes % 16).unwrap();
                        charge.resize(bytes % 7).unwrap();
                    }
                });
            }
        });
        assert_eq!((accounts.used(), lock(&accounts.peers).len()), (0, 0));
    }
}
