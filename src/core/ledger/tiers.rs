//! The KV-cache tiers of this process. A crate above adds each, and the ledger asks those that live.

use std::sync::{Arc, Weak};

use serde::{Deserialize, Serialize};

use crate::GrowthState;
use crate::driver::{DevicePtr, Location};

/// The most tiers of a ledger: the oldest.
pub const MAX_TIERS: usize = 1024;

/// Counters of a KV-cache tier since it was created or attached, and the states of its pages now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct TierStats {
    /// The pages of the tier.
    pub pages: u64,
    /// The bytes of a page.
    pub page_bytes: u64,
    /// The pages whose memory is there: fewer than `pages` while a tier grows in the background, or if its growth was
    /// stopped. All other numbers of pages count these alone.
    pub usable: u64,
    /// Whether the tier grows.
    pub growth: GrowthState,
    /// The pages that are free.
    pub free: u64,
    /// The pages that stores are writing.
    pub writing: u64,
    /// The pages with contents that can be loaded.
    pub ready: u64,
    /// Those of the ready pages that loads and copies have pinned.
    pub pinned: u64,
    /// The keys that look-ups found.
    pub hits: u64,
    /// The keys that look-ups did not find, or that came after one.
    pub misses: u64,
    /// The pages that became ready by a commit.
    pub stores: u64,
    /// The ready pages that made room for others.
    pub evictions: u64,
    /// The ready pages that were found to have other bytes than were committed.
    pub damaged: u64,
    /// The bytes of jobs from pages to GPUs that have ended without an error.
    pub loaded_bytes: u64,
    /// The bytes of jobs from GPUs to pages that have ended without an error.
    pub stored_bytes: u64,
}

/// A KV-cache tier that a process has open, and the use of its pages.
///
/// Several processes may have one tier open: each has it in its ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TierUse {
    /// The name of the tier's memory: that of the allocation with its address.
    #[serde(default)]
    pub label: Option<String>,
    /// Where the memory lies.
    pub location: Location,
    /// The first address of the memory in this process.
    pub address: u64,
    /// Its numbers.
    #[serde(flatten)]
    pub stats: TierStats,
}

impl TierUse {
    /// Returns a tier without pages.
    pub fn new(location: Location, address: DevicePtr) -> Self {
        Self {
            label: None,
            location,
            address: address.0,
            stats: TierStats::default(),
        }
    }
}

/// A tier, or the shared state of its handles, that the ledger can ask.
pub trait ShowTier: Send + Sync {
    /// Returns the use of its pages now, without a label. The ledger calls it with no lock of its own held.
    ///
    /// A tier whose last handle is dropped meanwhile ends here, in the thread that asks.
    fn show(self: Arc<Self>) -> TierUse;
}

/// A tier that was added.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// [`Driver::address`](crate::Driver::address): the tier keeps the driver alive.
    pub(super) driver: usize,
    pub(super) tier: Weak<dyn ShowTier>,
}

impl Known {
    pub(super) fn is_alive(&self) -> bool {
        self.tier.strong_count() > 0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::super::registry::Registry;
    use super::super::{add_tier, all_tiers, allocations, tiers};
    use super::*;
    use crate::per_driver::lock;
    use crate::{Driver, Machine};

    /// A tier that looks at the ledger while it is asked, and when it ends.
    struct Fake {
        driver: Driver,
        address: u64,
        lock: Mutex<()>,
    }

    impl ShowTier for Fake {
        fn show(self: Arc<Self>) -> TierUse {
            let _own = lock(&self.lock);
            allocations(&self.driver);
            Registry::current().tiers();
            TierUse::new(Location::Host, DevicePtr(self.address))
        }
    }

    impl Drop for Fake {
        fn drop(&mut self) {
            Registry::current().tiers();
        }
    }

    fn machine() -> Driver {
        Driver::simulated(Machine::gh200()).unwrap()
    }

    fn fake(driver: &Driver, address: u64) -> Arc<Fake> {
        let driver = driver.clone();
        let lock = Mutex::default();
        let tier = Arc::new(Fake {
            driver,
            address,
            lock,
        });
        add_tier(&tier.driver, &tier);
        tier
    }

    fn addresses(driver: &Driver) -> Vec<u64> {
        let tiers = tiers(driver);
        tiers.iter().map(|tier| tier.address).collect()
    }

    #[test]
    fn the_tiers_that_live_are_shown_by_driver() {
        let (one, two) = (machine(), machine());
        let [first, second] = [1, 2].map(|address| fake(&one, address));
        let other = fake(&two, 3);
        assert_eq!((addresses(&one), addresses(&two)), (vec![1, 2], vec![3]));
        // Other tests may have more than are shown.
        assert!(all_tiers().len() >= 3);
        drop(first);
        assert_eq!(addresses(&one), [2]);
        drop((second, other));
        assert_eq!((addresses(&one), addresses(&two)), (vec![], vec![]));
    }

    #[test]
    fn the_oldest_tiers_are_shown() {
        let driver = machine();
        let kept: Vec<_> = (0..MAX_TIERS as u64 + 2)
            .map(|address| fake(&driver, address))
            .collect();
        let shown = addresses(&driver);
        assert_eq!((shown.len(), shown[MAX_TIERS - 1]), (MAX_TIERS, 1023));
        drop(kept);
    }

    #[cfg(not(miri))]
    #[test]
    fn a_forked_child_has_no_tier_and_waits_for_none() {
        let driver = machine();
        let tier = fake(&driver, 1);
        // As a thread that the child does not have.
        let held = lock(&tier.lock);
        // SAFETY: the child looks at the ledger and ends at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let none = tiers(&driver).is_empty() && all_tiers().is_empty();
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!none)) }
        }
        let mut status = -1;
        // SAFETY: `status` is a local variable, and no other thread waits for the child.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        drop(held);
        assert_eq!(addresses(&driver), [1]);
    }
}
