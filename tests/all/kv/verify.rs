//! Checksums of pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use egmem::kv::{Error, Key, PageId, Store, Tier, Verify};
use egmem::{Buffer, Driver};

use crate::kv::drivers::node;
use crate::kv::setup::{Cache, key, keys};

fn verified(driver: &Driver, pages: u64, page_bytes: u64, verify: Verify) -> Tier {
    let options = Tier::on(node(driver)).pages(pages).page_bytes(page_bytes);
    options.verify(verify).create(driver).unwrap()
}

/// Stores keys whose pages have a byte each.
fn store(tier: &Tier, keys: &[Key]) {
    let mut store: Store = tier.prepare_store(keys).unwrap();
    for index in 0..store.keys().len() {
        let view = store.view(index).unwrap();
        view.fill(0, tier.page_bytes(), index as u8 + 1).unwrap();
    }
    store.commit().unwrap();
}

/// Changes a bit of a page behind the tier's back.
fn damage(tier: &Tier, page: PageId, at: u64) {
    let byte = tier.page_ptr(page).unwrap().0 + at;
    let byte = std::ptr::with_exposed_provenance_mut(byte as usize);
    // SAFETY: the byte is of a page of the tier, which lives, in memory of the host. Nothing else accesses it meanwhile.
    unsafe { AtomicU8::from_ptr(byte) }.fetch_xor(0x10, Relaxed);
}

fn page_of(tier: &Tier, key: Key) -> PageId {
    let all = tier.keys();
    all.into_iter().find(|(other, _)| *other == key).unwrap().1
}

#[track_caller]
fn is_missing<T: std::fmt::Debug>(result: Result<T, Error>, key: Key, index: usize) {
    assert_eq!(result.unwrap_err(), Error::NotReady { key, index });
}

pub fn a_damaged_page_is_a_miss(driver: &Driver) {
    for page_bytes in [1, 333, (32 << 10) + 5] {
        let tier = verified(driver, 6, page_bytes, Verify::Always);
        for (round, at) in [0, page_bytes / 2, page_bytes - 1].into_iter().enumerate() {
            store(&tier, &keys(0..4));
            drop(tier.prepare_load(&keys(0..4)).unwrap());
            damage(&tier, page_of(&tier, key(2)), at);
            damage(&tier, page_of(&tier, key(3)), at);
            let again = [key(0), key(2), key(2), key(3)];
            is_missing(tier.prepare_load(&again), key(2), 1);
            let stats = tier.stats();
            let counts = (stats.damaged, stats.pinned, stats.writing, stats.free);
            assert_eq!(counts, (2 * (round as u64 + 1), 0, 0, 4));
            is_missing(tier.prepare_load(&keys(3..4)), key(3), 0);
            assert_eq!(tier.lookup(&keys(0..4)), 2);
            drop(tier.prepare_load(&keys(0..2)).unwrap());
        }
        store(&tier, &keys(0..6));
    }
}

/// The page is not given out again before their last use, and no copy of it begins.
pub fn a_damaged_page_that_others_have_is_freed_by_them(driver: &Driver) {
    let tier = verified(driver, 1, 4096, Verify::Always);
    let cache = Cache::new(driver, 1, 1, (4096, 4096));
    store(&tier, &keys(0..1));
    let load = tier.prepare_load(&keys(0..1)).unwrap();
    let pairs = load.pairs(&[0]).unwrap();
    let job = tier.load(&cache.stream, &pairs, &cache.pages).unwrap();
    damage(&tier, load.pages()[0], 7);
    is_missing(tier.prepare_load(&keys(0..1)), key(0), 0);
    assert_eq!((tier.lookup(&keys(0..1)), tier.keys().len()), (0, 0));
    let copy = tier.load(&cache.stream, &pairs, &cache.pages);
    assert!(matches!(copy, Err(Error::WrongState { .. })), "{copy:?}");
    let is_full = || matches!(tier.prepare_store(&keys(0..1)), Err(Error::Full { .. }));
    assert!(is_full());
    drop(load);
    assert!(is_full(), "the job has it");
    job.wait().unwrap();
    assert_eq!((tier.stats().free, tier.stats().damaged), (1, 1));
    store(&tier, &keys(0..1));
    drop(tier.prepare_load(&keys(0..1)).unwrap());
}

#[test]
fn a_sample_of_the_pages_is_checked() {
    let driver = crate::kv::drivers::grace();
    let tier = verified(&driver, 1, 64, Verify::Sample);
    store(&tier, &keys(0..1));
    let load = || tier.prepare_load(&keys(0..1));
    drop(load().unwrap()); // checked
    damage(&tier, page_of(&tier, key(0)), 0);
    for _ in 1..16 {
        drop(load().unwrap());
    }
    is_missing(load(), key(0), 0);
}

#[test]
fn nothing_is_checked_unless_it_was_asked_for() {
    let driver = crate::kv::drivers::grace();
    let memory = Arc::new(Buffer::near(&driver, 0, 2 << 20).unwrap());
    let attach = |verify| {
        let options = Tier::attach(memory.clone()).page_bytes(4096).verify(verify);
        options.open().unwrap()
    };
    for verify in [Verify::Never, Verify::Always] {
        let tier = attach(verify);
        store(&tier, &keys(0..1));
        damage(&tier, page_of(&tier, key(0)), 9);
        let load = tier.prepare_load(&keys(0..1));
        assert_eq!(load.is_err(), verify == Verify::Always);
        drop(load);
        tier.remove(&keys(0..1)).unwrap();
    }
}

/// A page's checksum is that of its present contents.
#[test]
fn a_page_that_is_stored_again_has_another_checksum() {
    let driver = crate::kv::drivers::grace();
    let tier = verified(&driver, 1, 64, Verify::Always);
    for number in 0..3 {
        let keys = keys(number..number + 1);
        let mut store = tier.prepare_store(&keys).unwrap();
        store.view(0).unwrap().fill(0, 64, number as u8).unwrap();
        store.commit().unwrap();
        drop(tier.prepare_load(&keys).unwrap());
    }
    assert_eq!((tier.stats().evictions, tier.stats().damaged), (2, 0));
}

#[test]
fn a_page_under_a_copy_is_not_committed() {
    let driver = crate::kv::drivers::grace();
    let tier = verified(&driver, 1, 4096, Verify::Always);
    let cache = Cache::new(&driver, 1, 1, (4096, 4096));
    cache.write(0, &[9; 4096]);
    let mut store = tier.prepare_store(&keys(0..1)).unwrap();
    let pairs = store.pairs(&[0]).unwrap();
    let job = tier.store(&cache.stream, &pairs, &cache.pages).unwrap();
    assert_eq!(store.commit(), Err(Error::StillCopying { pages: 1 }));
    job.wait().unwrap();
    store.commit().unwrap();
    drop(tier.prepare_load(&keys(0..1)).unwrap());
}

#[test]
fn checksums_are_found_with_their_pages() {
    let driver = crate::kv::drivers::grace();
    let bytes = Tier::bytes_needed(4, 4096).unwrap();
    let memory = Arc::new(
        Buffer::on(node(&driver))
            .bytes(bytes)
            .allocate(&driver)
            .unwrap(),
    );
    let open = |verify| {
        let options = Tier::attach(Arc::clone(&memory)).page_bytes(4096).pages(4);
        options.verify(verify).open().unwrap()
    };
    let tier = open(Verify::Always);
    store(&tier, &keys(0..2));
    drop(tier);
    let unchecked = open(Verify::Never);
    store(&unchecked, &keys(2..3));
    let tier = open(Verify::Always); // beside the other one
    for index in 1..3 {
        damage(&tier, page_of(&tier, key(index)), 7);
    }
    drop(tier.prepare_load(&keys(0..1)).unwrap());
    is_missing(tier.prepare_load(&keys(1..2)), key(1), 0);
    assert_eq!(unchecked.lookup(&keys(1..2)), 0, "for all processes");
    drop(tier.prepare_load(&keys(2..3)).unwrap()); // it was stored without a checksum
}
