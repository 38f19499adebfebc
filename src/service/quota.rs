//! Charges each peer for the memory that is pinned for it: from before the memory is created until it is free
//! for any peer again.
//!
//! A [`Charge`] follows its memory: to a name, to a chunk that waits to be zeroed or is kept for the peer, to
//! a release that a silent holder has not confirmed, which is charged to that holder. The memory is released before its charge is dropped, so
//! a peer never has more pinned than it is charged with.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::exchange::PeerName;
use crate::per_driver::lock;
use crate::size::Bytes;

/// The limits of one peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quota {
    /// Bytes, including padding.
    pub bytes: u64,
    /// Names.
    pub names: u64,
}

/// The use of charged memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// A name: published, being created, or being withdrawn.
    Named,
    /// A deleted name that a silent holder may still have mapped.
    Unconfirmed,
    /// Waiting to be zeroed.
    Dirty,
    /// Zeroed, and kept for the peer that had it.
    Kept,
}

/// The name of each [`Use`], in order.
const USES: [&str; 4] = ["named", "unconfirmed", "dirty", "kept"];

/// The charges of one peer, or of all peers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amounts {
    /// Names, including deleted ones whose release is unconfirmed.
    pub names: u64,
    /// The bytes of each [`Use`].
    bytes: [u64; USES.len()],
}

impl Amounts {
    /// Returns the bytes of one use.
    pub const fn of(&self, what: Use) -> u64 {
        self.bytes[what as usize]
    }

    /// Returns the bytes of each use, with its name.
    pub fn by_use(&self) -> impl Iterator<Item = (&'static str, u64)> {
        USES.into_iter().zip(self.bytes)
    }

    /// Returns the bytes that only the peer or time can free.
    const fn committed(&self) -> u64 {
        self.of(Use::Named)
            .saturating_add(self.of(Use::Unconfirmed))
    }

    /// Returns the bytes that the service frees as soon as the peer needs other memory.
    pub const fn reclaimable(&self) -> u64 {
        self.of(Use::Dirty).saturating_add(self.of(Use::Kept))
    }

    /// Returns all bytes.
    pub const fn bytes(&self) -> u64 {
        self.committed().saturating_add(self.reclaimable())
    }

    /// Describes the bytes of unconfirmed releases, for a message.
    fn unconfirmed_note(&self) -> String {
        match self.of(Use::Unconfirmed) {
            0 => String::new(),
            bytes => format!(
                "; {} of what counts was deleted, but a holder that fell silent may still have it mapped",
                Bytes(bytes)
            ),
        }
    }
}

#[derive(Debug, Default)]
struct Accounts {
    quota: Quota,
    /// Of peers that are charged with anything.
    peers: HashMap<PeerName, Amounts>,
}

impl Accounts {
    /// Adds a charge, or subtracts it.
    fn apply(&mut self, charge: &Charge, to: fn(u64, u64) -> u64) {
        let amounts = self.peers.entry(charge.peer.clone()).or_default();
        amounts.names = to(amounts.names, charge.names);
        let bytes = &mut amounts.bytes[charge.what as usize];
        *bytes = to(*bytes, charge.bytes);
        if *amounts == Amounts::default() {
            self.peers.remove(&charge.peer);
        }
    }

    fn of(&self, peer: &PeerName) -> Amounts {
        self.peers.get(peer).copied().unwrap_or_default()
    }
}

/// Each peer's names and bytes.
///
/// Its lock comes last in the lock order, and no other lock is taken under it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger(Arc<Mutex<Accounts>>);

impl Ledger {
    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        lock(&self.0)
    }

    /// Changes the quota. A peer that is over it keeps its memory, and gets no more.
    pub fn set_quota(&self, quota: Quota) {
        self.accounts().quota = quota;
    }

    /// Charges `peer` with one name of `bytes`, of which `optional` are left out if they do not fit.
    ///
    /// [Reclaimable](Amounts::reclaimable) bytes do not count against the quota here. Before any memory is
    /// pinned under the charge, the caller must reclaim until the charge is no longer [over](Self::over) the
    /// quota.
    ///
    /// # Errors
    /// The reason, as a message, if names or bytes do not fit beside those that only the peer or time can free.
    pub fn charge(&self, peer: &PeerName, bytes: u64, optional: u64) -> Result<Charge, String> {
        let mut accounts = self.accounts();
        let quota = accounts.quota;
        let have = accounts.of(peer);
        let note = have.unconfirmed_note();
        if have.names >= quota.names {
            let names = have.names;
            return Err(format!("{names} names, and no more are allowed{note}"));
        }
        let fits = |bytes: u64| {
            let sum = have.committed().checked_add(bytes);
            sum.is_some_and(|sum| sum <= quota.bytes)
        };
        if !fits(bytes) {
            let [taken, all, more] = [have.committed(), quota.bytes, bytes].map(Bytes);
            return Err(format!(
                "{taken} of {all} are taken, {more} more were asked for{note}"
            ));
        }
        let with_optional = bytes.checked_add(optional).filter(|all| fits(*all));
        let charge = Charge {
            ledger: self.clone(),
            peer: peer.clone(),
            what: Use::Named,
            bytes: with_optional.unwrap_or(bytes),
            names: 1,
        };
        accounts.apply(&charge, u64::saturating_add);
        Ok(charge)
    }

    /// Returns whether the unconfirmed releases of a peer use up its quota.
    pub fn is_silent_beyond(&self, peer: &PeerName) -> bool {
        let accounts = self.accounts();
        accounts.of(peer).of(Use::Unconfirmed) > accounts.quota.bytes
    }

    /// Returns by how many bytes the charged peer is over its quota, and its charges.
    pub fn over(&self, charge: &Charge) -> (u64, Amounts) {
        let accounts = self.accounts();
        let amounts = accounts.of(&charge.peer);
        let over = amounts.bytes().saturating_sub(accounts.quota.bytes);
        (over, amounts)
    }

    /// Returns the charges of all peers, and how many peers have names.
    pub fn all(&self) -> (Amounts, usize) {
        let accounts = self.accounts();
        let mut sum = Amounts::default();
        for one in accounts.peers.values() {
            sum.names = sum.names.saturating_add(one.names);
            for (sum, bytes) in sum.bytes.iter_mut().zip(one.bytes) {
                *sum = sum.saturating_add(bytes);
            }
        }
        let owners = accounts.peers.values().filter(|one| one.names > 0);
        (sum, owners.count())
    }
}

/// Bytes, and possibly a name, that a peer is charged with until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    ledger: Ledger,
    peer: PeerName,
    what: Use,
    bytes: u64,
    names: u64,
}

impl Charge {
    /// Returns its bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Splits off at most `bytes`, as a separate charge without a name.
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self {
            ledger: self.ledger.clone(),
            peer: self.peer.clone(),
            what: self.what,
            bytes,
            names: 0,
        }
    }

    /// Changes the use that is charged.
    pub fn turn(&mut self, what: Use) {
        self.change(|charge| charge.what = what);
    }

    /// Charges `peer` instead, even beyond its quota.
    pub fn transfer(&mut self, peer: &PeerName) {
        self.change(|charge| charge.peer = peer.clone());
    }

    fn change(&mut self, change: impl FnOnce(&mut Self)) {
        let ledger = self.ledger.clone();
        let mut accounts = ledger.accounts();
        accounts.apply(self, u64::saturating_sub);
        change(self);
        accounts.apply(self, u64::saturating_add);
    }

    /// Returns whether both are charged to the same peer.
    pub fn is_same_peer(&self, other: &Self) -> bool {
        self.peer == other.peer
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.change(|charge| (charge.bytes, charge.names) = (0, 0));
    }
}

/// Creations of one peer that run at once.
const OF_PEER: usize = 8;
/// Creations of all peers that run at once.
const OF_ALL: usize = 64;

/// Bounds the creations that run at once, each in a thread: tokio has 512 threads for all blocking work of the process.
/// Gives turns in the order in which they are asked for, those of a peer among its own.
#[derive(Debug)]
pub(crate) struct Turns {
    all: Arc<Semaphore>,
    peers: Mutex<HashMap<PeerName, Weak<Semaphore>>>,
}

/// A creation that runs until this is dropped.
pub(crate) type Turn = [Option<OwnedSemaphorePermit>; 2];

impl Default for Turns {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(OF_ALL)),
            peers: Mutex::default(),
        }
    }
}

impl Turns {
    /// Waits until a creation of this peer may run.
    pub async fn turn(&self, peer: &PeerName) -> Turn {
        let own = {
            let mut peers = lock(&self.peers);
            peers.retain(|_, own| own.strong_count() > 0);
            let known = peers.get(peer).and_then(Weak::upgrade);
            let own = known.unwrap_or_else(|| Arc::new(Semaphore::new(OF_PEER)));
            peers.insert(peer.clone(), Arc::downgrade(&own));
            own
        };
        // The peer's own first, so that none waits in the queue of all with more. Neither is ever closed.
        let peer = own.acquire_owned().await.ok();
        [peer, Arc::clone(&self.all).acquire_owned().await.ok()]
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use proptest::prelude::*;

    use super::*;

    const A: PeerName = PeerName::User(1);
    const B: PeerName = PeerName::User(2);
    const ALL: [Use; 4] = [Use::Named, Use::Unconfirmed, Use::Dirty, Use::Kept];

    fn ledger(quota: Quota) -> Ledger {
        let ledger = Ledger::default();
        ledger.set_quota(quota);
        ledger
    }

    /// A charge, and the state that the test expects of it.
    struct Known {
        peer: u32,
        charge: Charge,
        has_name: bool,
    }

    proptest! {
        #[test]
        fn charges_never_exceed_the_quota_and_return_to_zero(
            ops in proptest::collection::vec((0_u32..3, 0_u64..60, 0_u64..9, 0_u8..8), 0..200),
        ) {
            let quota = Quota { bytes: 100, names: 4 };
            let ledger = ledger(quota);
            let mut all: Vec<Known> = Vec::new();
            for (peer, bytes, optional, op) in ops {
                let sum = |all: &[Known], uses: &[Use]| -> u64 {
                    let of = all.iter().filter(|k| k.peer == peer && uses.contains(&k.charge.what));
                    of.map(|known| known.charge.bytes).sum()
                };
                let own = all.iter().position(|known| known.peer == peer);
                match (op, own) {
                    (0..=2, _) => {
                        let names = all.iter().filter(|k| k.peer == peer && k.has_name).count() as u64;
                        let committed = sum(&all, &ALL[..2]);
                        let fits = names < quota.names && committed + bytes <= quota.bytes;
                        let charged = ledger.charge(&PeerName::User(peer), bytes, optional);
                        prop_assert_eq!(charged.is_ok(), fits);
                        let Ok(charge) = charged else { continue };
                        let both = committed + bytes + optional <= quota.bytes;
                        prop_assert_eq!(charge.bytes(), bytes + if both { optional } else { 0 });
                        all.push(Known { peer, charge, has_name: true });
                        // Like the service before it pins anything: reclaims as much as possible.
                        while let (1.., _) = ledger.over(&all[all.len() - 1].charge) {
                            let victim = all.iter().position(|known| {
                                known.peer == peer && ALL[2..].contains(&known.charge.what)
                            });
                            prop_assert!(victim.is_some(), "what is committed fits");
                            drop(all.swap_remove(victim.unwrap_or(0)));
                            let at = all.iter().position(|known| known.peer == peer);
                            let last = all.len() - 1;
                            prop_assert!(at.is_some());
                            all.swap(at.unwrap_or(0), last);
                        }
                        prop_assert!(sum(&all, &ALL) <= quota.bytes);
                    }
                    (3, Some(at)) => drop(all.swap_remove(at)),
                    (4, Some(at)) => {
                        let part = all[at].charge.split(bytes);
                        all.push(Known { peer, charge: part, has_name: false });
                    }
                    (what, Some(at)) => {
                        // A charge loses its name with the memory, but not if the release is unconfirmed.
                        let to = ALL[usize::from(what - 4)];
                        if all[at].charge.what == Use::Named && (to == Use::Unconfirmed || !all[at].has_name) {
                            all[at].charge.turn(to);
                        }
                    }
                    (_, None) => {}
                }
                let (amounts, owners) = ledger.all();
                let bytes: u64 = all.iter().map(|known| known.charge.bytes).sum();
                prop_assert_eq!(amounts.bytes(), bytes);
                let named = |peer| all.iter().any(|known| known.peer == peer && known.has_name);
                prop_assert_eq!(owners, (0..3).filter(|&peer| named(peer)).count());
            }
            all.clear();
            prop_assert_eq!(ledger.all(), (Amounts::default(), 0));
            drop(ledger.charge(&A, 1, 0));
            prop_assert_eq!(ledger.accounts().peers.len(), 0, "peers without charges are forgotten");
        }
    }

    #[test]
    fn a_refusal_says_what_is_unconfirmed() {
        let ledger = ledger(Quota {
            bytes: 4 << 20,
            names: 2,
        });
        let mut unconfirmed = ledger.charge(&A, 3 << 20, 0).unwrap();
        unconfirmed.turn(Use::Unconfirmed);
        let why = ledger.charge(&A, 2 << 20, 0).unwrap_err();
        assert!(why.contains("; 3 MiB of what counts"), "{why}");
        let _other = ledger.charge(&B, 4 << 20, 0).unwrap();
        let _small = ledger.charge(&A, 1, 0).unwrap();
        let why = ledger.charge(&A, 1, 0).unwrap_err();
        assert!(why.contains("2 names") && why.contains("3 MiB"), "{why}");
        drop(unconfirmed);
        ledger.charge(&A, (4 << 20) - 1, 0).unwrap();
    }

    #[test]
    fn a_charge_goes_to_another_peer_even_beyond_its_quota() {
        let ledger = ledger(Quota { bytes: 9, names: 1 });
        let mut charge = ledger.charge(&A, 9, 0).unwrap();
        let _own = ledger.charge(&B, 9, 0).unwrap();
        charge.turn(Use::Unconfirmed);
        charge.transfer(&B);
        assert!(!ledger.is_silent_beyond(&B) && !ledger.is_silent_beyond(&A));
        let mut second = ledger.charge(&A, 9, 0).unwrap();
        second.turn(Use::Unconfirmed);
        second.transfer(&B);
        assert!(ledger.is_silent_beyond(&B));
        assert_eq!(
            (ledger.all().0.of(Use::Unconfirmed), ledger.all().0.names),
            (18, 3)
        );
        drop((charge, second));
        assert!(!ledger.is_silent_beyond(&B));
        assert_eq!(ledger.all().0.bytes(), 9);
    }

    #[test]
    fn a_sum_beyond_64_bits_is_refused() {
        let ledger = ledger(Quota {
            bytes: u64::MAX,
            names: 9,
        });
        let _all = ledger.charge(&A, u64::MAX, 9).unwrap();
        let why = ledger.charge(&A, 1, 0).unwrap_err();
        assert!(why.contains("1 B more"), "{why}");
    }

    /// Returns the turn if it need not be waited for.
    fn now(turns: &Turns, uid: u32) -> Option<Turn> {
        let peer = PeerName::User(uid);
        let mut turn = std::pin::pin!(turns.turn(&peer));
        match turn.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_peer_has_so_many_turns_and_all_have_more() {
        let turns = Turns::default();
        let mut first: Vec<_> = (0..OF_PEER).map(|_| now(&turns, 1).unwrap()).collect();
        assert!(now(&turns, 1).is_none());
        assert!(now(&turns, 2).is_some(), "another peer's");
        first.pop();
        first.push(now(&turns, 1).unwrap());
        let others: Vec<_> = (OF_PEER..OF_ALL)
            .map(|at| now(&turns, 2 + (at / OF_PEER) as u32).unwrap())
            .collect();
        assert!(now(&turns, 99).is_none());
        drop((first, others));
        assert!(now(&turns, 99).is_some());
        assert_eq!(lock(&turns.peers).len(), 1);
    }
}
