//! A tier in this process's ledger.

use std::sync::Arc;

use egmem_core::ledger::{ShowTier, TierUse};

use crate::inner::Inner;
use crate::tier::Tier;

impl ShowTier for Inner {
    fn show(self: Arc<Self>) -> TierUse {
        let mut shown = TierUse::new(self.memory.location(), self.memory.device_ptr());
        shown.stats = self.glance();
        shown.stats.growth = Tier(self).growth();
        shown
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use egmem_core::ledger::{self, TierUse};
    use egmem_core::{Buffer, Machine, Memory};

    use crate::{Driver, Key, Tier};

    fn shown(driver: &Driver) -> TierUse {
        let [tier] = &ledger::tiers(driver)[..] else {
            panic!("one tier is open");
        };
        tier.clone()
    }

    #[test]
    fn the_ledger_shows_a_tiers_numbers_while_it_is_open() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let buffer = Arc::new(Buffer::near(&driver, 0, 1 << 20).unwrap());
        let attach = || Tier::attach(Arc::clone(&buffer)).pages(4).page_bytes(4096);
        let tier = attach().open().unwrap();
        let keys: Vec<Key> = (0..7).map(|n| Key::new([n; 32])).collect();
        tier.prepare_store(&keys[..4]).unwrap().commit().unwrap();
        tier.prepare_store(&keys[4..5]).unwrap().commit().unwrap();
        let store = tier.prepare_store(&keys[5..6]).unwrap();
        drop(tier.prepare_store(&keys[6..]).unwrap());
        let load = tier.prepare_load(&keys[4..5]).unwrap();
        assert_eq!(tier.lookup(&[keys[4], keys[5], keys[4]]), 1);

        let found = shown(&driver);
        let at = (found.address, found.location);
        assert_eq!(at, (buffer.device_ptr().0, buffer.location()));
        let found = found.stats;
        assert_eq!((found.page_bytes, found.pages, found.usable), (4096, 4, 4));
        let states = (found.free, found.writing, found.ready, found.pinned);
        assert_eq!(states, (1, 1, 2, 1));
        let counts = (found.hits, found.misses, found.evictions);
        assert_eq!(counts, (1, 2, 3));
        assert_eq!(found.growth, tier.growth());

        let other = tier.clone();
        drop((tier, store, load));
        assert_eq!(shown(&driver).stats.pinned, 0, "a handle is left");
        drop(other);
        assert!(ledger::tiers(&driver).is_empty());
        let again = attach().open().unwrap();
        assert_eq!(shown(&driver).stats.hits, 0);
        drop(again);
    }
}
