//! Charges each peer for the memory that is pinned for it: from before the memory is created until it is free
//! for any peer again.
//!
//! A [`Charge`] follows its memory: to a name, to a chunk that waits to be zeroed or is kept for the peer, to
//! a release that a silent holder has not confirmed, which is charged to that holder. The memory is released before its charge is dropped, so
//! a peer never has more pinned than it is charged with.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::Duration;

use crate::per_driver::lock;
use crate::size::Bytes;

/// The limits of one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    /// Bytes, including padding.
    pub bytes: u64,
    /// Names.
    pub names: u64,
}

/// Why a charge is refused, as a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Over(pub String);

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

/// The charges of one peer, or of all peers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Amounts {
    /// Names, including deleted ones whose release is unconfirmed.
    pub names: u64,
    /// Bytes, by their [`Use`].
    pub named: u64,
    pub unconfirmed: u64,
    pub dirty: u64,
    pub kept: u64,
}

impl Amounts {
    /// Returns the bytes that only the peer or time can free.
    const fn committed(&self) -> u64 {
        self.named.saturating_add(self.unconfirmed)
    }

    /// Returns the bytes that the service frees as soon as the peer needs other memory.
    pub const fn reclaimable(&self) -> u64 {
        self.dirty.saturating_add(self.kept)
    }

    /// Returns all bytes.
    pub const fn bytes(&self) -> u64 {
        self.committed().saturating_add(self.reclaimable())
    }

    fn of(&mut self, what: Use) -> &mut u64 {
        match what {
            Use::Named => &mut self.named,
            Use::Unconfirmed => &mut self.unconfirmed,
            Use::Dirty => &mut self.dirty,
            Use::Kept => &mut self.kept,
        }
    }

    /// Describes the bytes of unconfirmed releases, for a message.
    fn unconfirmed_note(&self) -> String {
        match self.unconfirmed {
            0 => String::new(),
            bytes => format!(
                "; {} of what counts was deleted, but a holder that fell silent may still have it mapped",
                Bytes(bytes)
            ),
        }
    }
}

/// One peer's account. It lives as long as a charge on it.
#[derive(Debug, Default)]
struct Account {
    amounts: Mutex<Amounts>,
    changed: Condvar,
}

impl Account {
    fn amounts(&self) -> MutexGuard<'_, Amounts> {
        lock(&self.amounts)
    }
}

#[derive(Debug)]
struct QuotaTable<P> {
    quota: Quota,
    accounts: HashMap<P, Weak<Account>>,
}

/// Each peer's names and bytes. Peers that have none are not stored.
///
/// Its locks come last in the lock order, and no other lock is taken under them.
#[derive(Debug)]
pub(crate) struct Ledger<P>(Mutex<QuotaTable<P>>);

impl<P: Clone + Eq + Hash> Ledger<P> {
    pub fn new(quota: Quota) -> Self {
        Self(Mutex::new(QuotaTable {
            quota,
            accounts: HashMap::new(),
        }))
    }

    fn inner(&self) -> MutexGuard<'_, QuotaTable<P>> {
        lock(&self.0)
    }

    /// Changes the quota. A peer that is over it keeps its memory, and gets no more.
    pub fn set_quota(&self, quota: Quota) {
        self.inner().quota = quota;
    }

    /// Charges `peer` with one name of `bytes`, of which `optional` are left out if they do not fit.
    ///
    /// [Reclaimable](Amounts::reclaimable) bytes do not count against the quota here. Before any memory is
    /// pinned under the charge, the caller must reclaim until the charge is no longer [over](Self::over) the
    /// quota.
    ///
    /// # Errors
    /// [`Over`] if names or bytes do not fit beside those that only the peer or time can free.
    pub fn charge(&self, peer: &P, bytes: u64, optional: u64) -> Result<Charge, Over> {
        let mut inner = self.inner();
        let quota = inner.quota;
        inner
            .accounts
            .retain(|_, account| account.strong_count() > 0);
        let known = inner.accounts.get(peer).and_then(Weak::upgrade);
        let account = known.unwrap_or_default();
        let mut have = account.amounts();
        if have.names >= quota.names {
            return Err(Over(format!(
                "{} names, and no more are allowed{}",
                have.names,
                have.unconfirmed_note()
            )));
        }
        let fits = |bytes: u64| {
            let sum = have.committed().checked_add(bytes);
            sum.is_some_and(|sum| sum <= quota.bytes)
        };
        if !fits(bytes) {
            return Err(Over(format!(
                "{} of {} are taken, {} more were asked for{}",
                Bytes(have.committed()),
                Bytes(quota.bytes),
                Bytes(bytes),
                have.unconfirmed_note()
            )));
        }
        let bytes = match bytes.checked_add(optional) {
            Some(all) if fits(all) => all,
            _ => bytes,
        };
        have.names += 1;
        have.named += bytes;
        drop(have);
        inner
            .accounts
            .insert(peer.clone(), Arc::downgrade(&account));
        Ok(Charge {
            account,
            what: Use::Named,
            bytes,
            names: 1,
        })
    }

    /// Charges `peer` with what another one was charged with so far, even beyond its quota.
    pub fn transfer(&self, charge: &mut Charge, peer: &P) {
        let account = {
            let mut inner = self.inner();
            let known = inner.accounts.get(peer).and_then(Weak::upgrade);
            let account = known.unwrap_or_default();
            let weak = Arc::downgrade(&account);
            inner.accounts.insert(peer.clone(), weak);
            account
        };
        let mut amounts = account.amounts();
        amounts.names = amounts.names.saturating_add(charge.names);
        let bytes = amounts.of(charge.what);
        *bytes = bytes.saturating_add(charge.bytes);
        drop(amounts);
        let (what, bytes, names) = (charge.what, charge.bytes, charge.names);
        // Dropping the previous charge takes it from the other peer.
        *charge = Charge {
            account,
            what,
            bytes,
            names,
        };
    }

    /// Returns whether the unconfirmed releases of a peer use up its quota.
    pub fn is_silent_beyond(&self, peer: &P) -> bool {
        let inner = self.inner();
        let quota = inner.quota.bytes;
        let account = inner.accounts.get(peer).and_then(Weak::upgrade);
        drop(inner);
        account.is_some_and(|account| account.amounts().unconfirmed > quota)
    }

    /// Returns by how many bytes the charged peer is over its quota, and its charges.
    pub fn over(&self, charge: &Charge) -> (u64, Amounts) {
        let quota = self.inner().quota.bytes;
        let amounts = *charge.account.amounts();
        (amounts.bytes().saturating_sub(quota), amounts)
    }

    /// Returns the charges of all peers, and how many peers have names.
    pub fn all(&self) -> (Amounts, usize) {
        let inner = self.inner();
        let mut sum = Amounts::default();
        let mut owners = 0;
        for account in inner.accounts.values().filter_map(Weak::upgrade) {
            let mut one = *account.amounts();
            owners += usize::from(one.names > 0);
            sum.names = sum.names.saturating_add(one.names);
            for what in [Use::Named, Use::Unconfirmed, Use::Dirty, Use::Kept] {
                let more = *one.of(what);
                let all = sum.of(what);
                *all = all.saturating_add(more);
            }
        }
        (sum, owners)
    }
}

/// Bytes, and possibly a name, that a peer is charged with until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    account: Arc<Account>,
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
            account: Arc::clone(&self.account),
            what: self.what,
            bytes,
            names: 0,
        }
    }

    /// Changes the use that is charged.
    pub fn turn(&mut self, what: Use) {
        let mut amounts = self.account.amounts();
        let before = amounts.of(self.what);
        *before = before.saturating_sub(self.bytes);
        let after = amounts.of(what);
        *after = after.saturating_add(self.bytes);
        drop(amounts);
        self.what = what;
        self.account.changed.notify_all();
    }

    /// Returns whether both are charged to the same peer.
    pub fn is_same_peer(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.account, &other.account)
    }

    /// Waits until the peer's charges may have changed since they were `seen`, for at most `at_most`.
    pub fn changed_since(&self, seen: Amounts, at_most: Duration) {
        let amounts = self.account.amounts();
        let same = |amounts: &mut Amounts| *amounts == seen;
        // After a poisoned lock or a timeout the caller checks again.
        let _ = self
            .account
            .changed
            .wait_timeout_while(amounts, at_most, same);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut amounts = self.account.amounts();
        let bytes = amounts.of(self.what);
        *bytes = bytes.saturating_sub(self.bytes);
        amounts.names = amounts.names.saturating_sub(self.names);
        drop(amounts);
        self.account.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const USES: [Use; 4] = [Use::Named, Use::Unconfirmed, Use::Dirty, Use::Kept];

    /// A charge, and the state that the test expects of it.
    struct Known {
        peer: u8,
        charge: Charge,
        has_name: bool,
    }

    proptest! {
        #[test]
        fn charges_never_exceed_the_quota_and_return_to_zero(
            ops in proptest::collection::vec((0_u8..3, 0_u64..60, 0_u64..9, 0_u8..8), 0..200),
        ) {
            let quota = Quota { bytes: 100, names: 4 };
            let ledger = Ledger::new(quota);
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
                        let committed = sum(&all, &USES[..2]);
                        let fits = names < quota.names && committed + bytes <= quota.bytes;
                        let charged = ledger.charge(&peer, bytes, optional);
                        prop_assert_eq!(charged.is_ok(), fits);
                        let Ok(charge) = charged else { continue };
                        let both = committed + bytes + optional <= quota.bytes;
                        prop_assert_eq!(charge.bytes(), bytes + if both { optional } else { 0 });
                        all.push(Known { peer, charge, has_name: true });
                        // Like the service before it pins anything: reclaims as much as possible.
                        while let (1.., _) = ledger.over(&all[all.len() - 1].charge) {
                            let victim = all.iter().position(|known| {
                                known.peer == peer && USES[2..].contains(&known.charge.what)
                            });
                            prop_assert!(victim.is_some(), "what is committed fits");
                            drop(all.swap_remove(victim.unwrap_or(0)));
                            let at = all.iter().position(|known| known.peer == peer);
                            let last = all.len() - 1;
                            prop_assert!(at.is_some());
                            all.swap(at.unwrap_or(0), last);
                        }
                        prop_assert!(sum(&all, &USES) <= quota.bytes);
                    }
                    (3, Some(at)) => drop(all.swap_remove(at)),
                    (4, Some(at)) => {
                        let part = all[at].charge.split(bytes);
                        all.push(Known { peer, charge: part, has_name: false });
                    }
                    (what, Some(at)) => {
                        // A charge loses its name with the memory, but not if the release is unconfirmed.
                        let to = USES[usize::from(what - 4)];
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
            drop(ledger.charge(&0, 1, 0));
            prop_assert_eq!(ledger.inner().accounts.len(), 1, "peers without charges are forgotten");
        }
    }

    #[test]
    fn a_refusal_says_what_is_unconfirmed() {
        let ledger = Ledger::new(Quota {
            bytes: 4 << 20,
            names: 2,
        });
        let mut unconfirmed = ledger.charge(&"a", 3 << 20, 0).unwrap();
        unconfirmed.turn(Use::Unconfirmed);
        let Over(why) = ledger.charge(&"a", 2 << 20, 0).unwrap_err();
        assert!(why.contains("; 3 MiB of what counts"), "{why}");
        let _other = ledger.charge(&"b", 4 << 20, 0).unwrap();
        let _small = ledger.charge(&"a", 1, 0).unwrap();
        let Over(why) = ledger.charge(&"a", 1, 0).unwrap_err();
        assert!(why.contains("2 names") && why.contains("3 MiB"), "{why}");
        drop(unconfirmed);
        ledger.charge(&"a", (4 << 20) - 1, 0).unwrap();
    }

    #[test]
    fn a_charge_goes_to_another_peer_even_beyond_its_quota() {
        let ledger = Ledger::new(Quota { bytes: 9, names: 1 });
        let mut charge = ledger.charge(&"a", 9, 0).unwrap();
        let _own = ledger.charge(&"b", 9, 0).unwrap();
        charge.turn(Use::Unconfirmed);
        ledger.transfer(&mut charge, &"b");
        assert!(!ledger.is_silent_beyond(&"b") && !ledger.is_silent_beyond(&"a"));
        let mut second = ledger.charge(&"a", 9, 0).unwrap();
        second.turn(Use::Unconfirmed);
        ledger.transfer(&mut second, &"b");
        assert!(ledger.is_silent_beyond(&"b"));
        assert_eq!((ledger.all().0.unconfirmed, ledger.all().0.names), (18, 3));
        drop((charge, second));
        assert!(!ledger.is_silent_beyond(&"b"));
        assert_eq!(ledger.all().0.bytes(), 9);
    }

    #[test]
    fn a_sum_beyond_64_bits_is_refused() {
        let ledger = Ledger::new(Quota {
            bytes: u64::MAX,
            names: 9,
        });
        let _all = ledger.charge(&"a", u64::MAX, 9).unwrap();
        let Over(why) = ledger.charge(&"a", 1, 0).unwrap_err();
        assert!(why.contains("1 B more"), "{why}");
    }
}
