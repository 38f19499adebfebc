//! Copies whose end the driver does not report: their memory is leaked on purpose (`ci/lsan.supp`).

use std::sync::{Arc, Weak};

use egmem::Driver;
use egmem::driver::{Call, Code};
use egmem::kv::CopyMethod;

use crate::kv::setup::{Cache, keys, store_nothing, tier};

/// The calls that report the end of work.
const ENDS: [Call; 4] = [
    Call::EventSynchronize,
    Call::EventQuery,
    Call::StreamSynchronize,
    Call::StreamQuery,
];

pub fn a_forgotten_job_keeps_its_pages(driver: &Driver) {
    let cache = Cache::new(driver, 1, 8, (4096, 4096));
    let tier = tier(driver, 1, 4096);
    let all = keys(0..1);
    store_nothing(&tier, &all);
    let load = tier.prepare_load(&all).unwrap();
    let job = tier
        .load(&cache.stream, &load.pairs(&[0]).unwrap(), &cache.pages)
        .unwrap();
    cache.stream.synchronize().unwrap();
    std::mem::forget(job);
    drop(load);
    assert_eq!(tier.remove(&all).unwrap(), 0);
    assert_eq!(tier.stats().pinned, 1);
}

#[test]
fn a_silent_driver_keeps_pages_and_memory() {
    silence(&ENDS);
}

/// A thread that did not submit the copies cannot wait for their stream: with `CU_STREAM_PER_THREAD` it would wait
/// for its own.
#[test]
fn only_the_event_tells_the_end_of_copies() {
    silence(&[Call::EventSynchronize, Call::EventQuery]);
}

/// Copies whose end `calls` do not report: the pages and their memory are kept.
fn silence(calls: &[Call]) {
    let driver = crate::kv::drivers::grace();
    let sim = driver.sim().unwrap();
    let cache = Cache::new(&driver, 1, 8, (4096, 4096));
    let tier = tier(&driver, 1, 4096);
    let store = tier.prepare_store(&keys(0..1)).unwrap();
    let job = tier
        .store(&cache.stream, &store.pairs(&[0]).unwrap(), &cache.pages)
        .unwrap();
    for &call in calls {
        for nth in 1..100 {
            sim.fail(call, nth, Code::UNKNOWN);
        }
    }
    let job = std::thread::scope(|scope| scope.spawn(|| job.wait()).join().unwrap());
    assert!(job.is_err());
    drop(store);
    assert_eq!((tier.stats().free, tier.stats().writing), (0, 1));
    drop((tier, cache));
    assert!(!sim.held().is_empty(), "the GPU may still write");
}

/// A refused batch may run on as far as the driver says. Another method beside it would replace memory that the batch
/// may still use, and its end would be taken for that of both.
#[test]
fn no_other_method_follows_one_without_an_end() {
    let driver = crate::kv::drivers::grace();
    let sim = driver.sim().unwrap();
    let cache = Cache::new(&driver, 1, 8, (256 << 10, 256 << 10));
    let tier = tier(&driver, 1, 256 << 10);
    let store = tier.prepare_store(&keys(0..1)).unwrap();
    let pairs = store.pairs(&[0]).unwrap();
    sim.fail(Call::MemcpyBatchAsync, 1, Code::INVALID_VALUE);
    for call in ENDS {
        for nth in 1..100 {
            sim.fail(call, nth, Code::UNKNOWN);
        }
    }
    sim.reset_counts();
    let job = tier.store_by(CopyMethod::Auto, &cache.stream, &pairs, &cache.pages);
    assert!(job.is_err(), "{job:?}");
    let counts = [Call::MemcpyBatchAsync, Call::MemcpyAsync].map(|call| sim.count(call));
    assert_eq!(counts, [1, 0]);
    sim.cancel_all();
    drop(store);
    assert_eq!((tier.stats().free, tier.stats().writing), (0, 1));
}

/// The same where the driver reports that nothing of the batch runs: the next method copies.
#[test]
fn another_method_follows_one_that_has_ended() {
    let driver = crate::kv::drivers::grace();
    let sim = driver.sim().unwrap();
    let cache = Cache::new(&driver, 1, 8, (256 << 10, 256 << 10));
    let tier = tier(&driver, 1, 256 << 10);
    let mut store = tier.prepare_store(&keys(0..1)).unwrap();
    let pairs = store.pairs(&[0]).unwrap();
    sim.fail(Call::MemcpyBatchAsync, 1, Code::INVALID_VALUE);
    let job = tier.store(&cache.stream, &pairs, &cache.pages).unwrap();
    job.wait().unwrap();
    store.commit().unwrap();
}

/// The owners that `GpuPages` keeps go with the last job, and stay where the driver does not report its end.
#[test]
fn owners_live_as_long_as_their_copies_may_run() {
    for is_silent in [false, true] {
        let driver = crate::kv::drivers::grace();
        let sim = driver.sim().unwrap();
        let cache = Cache::new(&driver, 1, 8, (4096, 4096));
        let tier = tier(&driver, 1, 4096);
        store_nothing(&tier, &keys(0..1));
        let load = tier.prepare_load(&keys(0..1)).unwrap();
        let owners = [1, 2].map(Arc::new);
        let weak = owners.each_ref().map(Arc::downgrade);
        let alive = || weak.each_ref().map(|weak: &Weak<i32>| weak.strong_count());
        let pages = owners
            .into_iter()
            .fold(cache.pages.clone(), |pages, owner| pages.keeping(owner));
        let pairs = load.pairs(&[0]).unwrap();
        let job = tier.load(&cache.stream, &pairs, &pages).unwrap();
        drop(pages);
        assert_eq!(alive(), [1, 1]);
        if is_silent {
            for call in ENDS {
                for nth in 1..100 {
                    sim.fail(call, nth, Code::UNKNOWN);
                }
            }
        }
        assert_eq!(job.wait().is_err(), is_silent);
        assert_eq!(alive(), [usize::from(is_silent); 2]);
        sim.cancel_all();
    }
}
