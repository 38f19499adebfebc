//! Pages by key.

use egmem::Driver;
use egmem::kv::Error;

use crate::kv::drivers::nothing_held;
use crate::kv::setup::{key, keys, store_nothing, tier};

pub fn keys_are_found_in_order(driver: &Driver) {
    let tier = tier(driver, 8, 100);
    assert_eq!(tier.lookup(&keys(0..4)), 0);
    store_nothing(&tier, &keys(0..3));
    store_nothing(&tier, &keys(4..6));
    assert_eq!(tier.lookup(&keys(0..6)), 3, "key 3 is missing");
    assert_eq!(tier.lookup(&[]), 0);
    let stats = tier.stats();
    assert_eq!((stats.hits, stats.misses, stats.stores), (3, 7, 5));
    assert_eq!((stats.free, stats.ready, stats.pages), (3, 5, 8));
    let error = tier.prepare_load(&keys(2..4)).unwrap_err();
    assert_eq!(
        error,
        Error::NotReady {
            key: key(3),
            index: 1
        }
    );
    assert_eq!(tier.stats().pinned, 0);
}

pub fn the_least_recently_used_page_makes_room(driver: &Driver) {
    let tier = tier(driver, 4, 64);
    store_nothing(&tier, &keys(0..4));
    // A list counts as used from its end, so that its first key goes last.
    let order: Vec<_> = tier.keys().iter().map(|&(key, _)| key).collect();
    assert_eq!(order, [key(3), key(2), key(1), key(0)]);
    tier.touch(&[key(3), key(77)]);
    let mut store = tier
        .prepare_store(&[key(2), key(9), key(9), key(10)])
        .unwrap();
    assert_eq!(store.keys(), [key(9), key(10)]);
    assert_eq!(store.indices(), [1, 3]);
    let evicted: Vec<_> = store.evicted().iter().map(|evicted| evicted.key).collect();
    assert_eq!(
        evicted,
        [key(1), key(0)],
        "not key 2, which is asked for, and not key 3"
    );
    store.commit().unwrap();
    store.commit().unwrap();
    assert!(store.view(0).is_err());
    drop(store);
    assert_eq!(tier.lookup(&[key(3), key(2), key(9), key(10)]), 4);
    assert_eq!(tier.stats().evictions, 2);
    // Loading counts as a use.
    drop(tier.prepare_load(&[key(2)]).unwrap());
    assert_eq!(tier.keys().last().unwrap().0, key(2));
    assert_eq!(tier.remove(&[key(2), key(2), key(5)]).unwrap(), 1);
    assert_eq!(tier.lookup(&[key(2)]), 0);
}

pub fn pinned_pages_stay(driver: &Driver) {
    let tier = tier(driver, 3, 64);
    store_nothing(&tier, &keys(0..3));
    let load = tier.prepare_load(&keys(0..2)).unwrap();
    let again = tier.prepare_load(&keys(0..1)).unwrap();
    assert_eq!(load.pages()[..1], *again.pages());
    let error = tier.prepare_store(&keys(3..5)).unwrap_err();
    let full = Error::Full {
        needed: 2,
        pages: 3,
        available: 1,
        pinned: 2,
        writing: 0,
        missing: 0,
        is_growing: false,
        evicted: Vec::new(),
    };
    assert_eq!(error, full);
    assert_eq!(tier.lookup(&keys(0..3)), 3, "nothing was evicted");
    assert_eq!(tier.remove(&keys(0..2)).unwrap(), 0);
    drop(load);
    assert_eq!(tier.stats().pinned, 1);
    let store = tier.prepare_store(&keys(3..5)).unwrap();
    assert_eq!(tier.lookup(&keys(0..1)), 1);
    drop((store, again));
    assert_eq!((tier.stats().pinned, tier.stats().free), (0, 2));
}

pub fn a_store_that_is_dropped_frees_its_pages(driver: &Driver) {
    let tier = tier(driver, 2, 64);
    let store = tier.prepare_store(&keys(0..2)).unwrap();
    assert_eq!((tier.stats().writing, tier.lookup(&keys(0..2))), (2, 0));
    drop(store);
    assert_eq!((tier.stats().free, tier.lookup(&keys(0..2))), (2, 0));
    store_nothing(&tier, &keys(0..2));
}

pub fn two_stores_of_one_key_share_nothing(driver: &Driver) {
    let tier = tier(driver, 4, 64);
    let mut first = tier.prepare_store(&keys(0..2)).unwrap();
    let second = tier.prepare_store(&keys(1..3)).unwrap();
    assert_eq!(second.keys(), [key(2)], "the first store has key 1");
    drop(second);
    first.commit().unwrap();
    assert!(tier.prepare_store(&keys(0..2)).unwrap().is_empty());
}

pub fn the_cpu_writes_and_reads_pages(driver: &Driver) {
    // Pages of an odd size lie side by side.
    let tier = tier(driver, 5, 333);
    let keys = keys(0..5);
    let mut store = tier.prepare_store(&keys).unwrap();
    for index in 0..5 {
        store
            .view(index)
            .unwrap()
            .fill(0, 333, index as u8 + 1)
            .unwrap();
        assert!(store.view(index).unwrap().fill(1, 333, 0).is_err());
    }
    store.commit().unwrap();
    let load = tier.prepare_load(&keys).unwrap();
    let mut bytes = [0; 333];
    for (index, &page) in load.pages().iter().enumerate() {
        load.view(index).unwrap().read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [index as u8 + 1; 333]);
        let address = load.view(index).unwrap().as_ptr().addr() as u64;
        assert_eq!(tier.page_ptr(page).unwrap().0, address);
    }
    assert!(load.view(5).is_err());
}

pub fn a_tier_gives_everything_back(driver: &Driver) {
    let tier = tier(driver, 100, 4096);
    let (store, load) = (
        tier.prepare_store(&keys(0..9)).unwrap(),
        tier.prepare_load(&[]).unwrap(),
    );
    drop(tier);
    drop(store);
    drop(load);
    nothing_held(driver);
}

#[test]
fn sizes_out_of_range_are_refused() {
    let driver = crate::kv::drivers::grace();
    let create = |pages, page_bytes| {
        let options = egmem::kv::Tier::on(egmem::driver::NodeId(0)).pages(pages);
        options.page_bytes(page_bytes).create(&driver)
    };
    for (pages, page_bytes) in [
        (0, 1),
        (1, 0),
        (1 << 31, 1),
        (1, 1 << 33),
        (1 << 30, 1 << 32),
    ] {
        assert!(
            create(pages, page_bytes).is_err(),
            "{pages} of {page_bytes}"
        );
    }
    nothing_held(&driver);
}
