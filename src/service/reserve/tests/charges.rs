//! The charges of returned memory.

use super::*;
use crate::quota::{Ledger, Quota, Use};

/// Waits until a ledger counts this many bytes.
fn until_charged(ledger: &Ledger, bytes: u64) {
    let end = Instant::now() + PATIENCE;
    while ledger.all().0.bytes() != bytes {
        assert!(Instant::now() < end, "still {:?}", ledger.all());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_a_peer_gave_back_counts_until_it_is_kept_for_nobody() {
    let driver = driver();
    let quota = Quota {
        bytes: 64 * MIB,
        names: 9,
    };
    for (reuse, left) in [
        (Reuse::SamePeer, 16 * MIB),
        (Reuse::Anyone, 0),
        (Reuse::Never, 0),
    ] {
        let mut plan = plan();
        plan.reserve.bytes = 0;
        plan.reuse.policy = reuse;
        let (reserve, _) = start(&driver, plan);
        let ledger = Ledger::default();
        ledger.set_quota(quota);
        let charge = ledger.charge(&A, 16 * MIB, 0).unwrap();
        let mut taken = take(&reserve, Some(&A), 16 * MIB).unwrap();
        for chunk in &mut taken {
            chunk.past.shown(Some(&A));
        }
        let other = ledger.charge(&B, 2 * MIB, 0).unwrap();
        assert_eq!(ledger.all().0.of(Use::Named), 18 * MIB);
        reserve.give_back(taken, Some(charge));
        until(&reserve, |levels| {
            (levels.dirty_warm + levels.dirty_kept) == 0
        });
        until_charged(&ledger, left + 2 * MIB);
        assert_eq!(ledger.all().0.of(Use::Kept), left);

        // A request evicts the peer's own memory, not that of other peers.
        let charge = ledger.charge(&A, 64 * MIB, 0).unwrap();
        assert_eq!(ledger.over(&charge).0, left);
        assert_eq!(reserve.evict_charged(&other, left), 0);
        assert_eq!(reserve.evict_charged(&charge, left), left);
        assert_eq!(ledger.over(&charge).0, 0);
        assert_eq!(reserve.levels().kept, 0);
        drop((charge, other));
        assert_eq!(ledger.all(), Default::default());
        drop(reserve);
        assert!(driver.sim().unwrap().held().is_empty());
    }
}
