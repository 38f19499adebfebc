//! Jobs: the pages that they may have, how long they keep them, and drivers that refuse.

use std::sync::Arc;

use egmem::Driver;
use egmem::driver::{Call, Code, StreamHandle};
use egmem::kv::{CopyMethod, Error, PageId, Tier};

use crate::kv::copies::is_refused;
use crate::kv::drivers::nothing_held;
use crate::kv::setup::{Cache, keys, store_nothing, tier};

pub fn copies_out_of_bounds_are_refused(driver: &Driver) {
    let cache = Cache::new(driver, 1, 8, (32, 32));
    let tier = tier(driver, 4, 32);
    let store = tier.prepare_store(&keys(0..1)).unwrap();
    for block in [8, 1 << 59, u64::MAX] {
        let pairs = store.pairs(&[block]).unwrap();
        assert!(
            is_refused(tier.store(&cache.stream, &pairs, &cache.pages)),
            "{block}"
        );
    }
    for page in [1, 4, u32::MAX] {
        // Page 1 is free; the others do not exist.
        for copy in [
            tier.store(
                &cache.stream,
                &[(PageId::from_bits(page.into()), 0)],
                &cache.pages,
            ),
            tier.load(
                &cache.stream,
                &[(PageId::from_bits(page.into()), 0)],
                &cache.pages,
            ),
        ] {
            assert!(
                matches!(copy, Err(Error::WrongState { .. })),
                "page {page}: {copy:?}"
            );
        }
    }
    // A page that is being written cannot be loaded, and a ready page cannot be written.
    let pairs = store.pairs(&[0]).unwrap();
    let load = tier.load(&cache.stream, &pairs, &cache.pages);
    assert!(matches!(load, Err(Error::WrongState { .. })), "{load:?}");
    let other = keys(1..2);
    store_nothing(&tier, &other);
    let (_, page) = tier.keys()[0];
    for copy in [
        tier.store(&cache.stream, &[(page, 0)], &cache.pages),
        tier.load(&cache.stream, &[(page, 0)], &cache.pages), // not pinned
    ] {
        assert!(matches!(copy, Err(Error::WrongState { .. })), "{copy:?}");
    }
    assert_eq!(tier.stats().writing, 1);
}

pub fn a_page_that_has_another_key_by_now_is_refused(driver: &Driver) {
    let cache = Cache::new(driver, 1, 8, (4096, 4096));
    let tier = tier(driver, 1, 4096);
    let is_old = |copy: Result<egmem::kv::Job, Error>| {
        let error = copy.unwrap_err();
        let is =
            matches!(error, Error::WrongState { page: 0, is, .. } if is.contains("another key"));
        assert!(is, "{error}");
    };
    let first = tier.prepare_store(&keys(0..1)).unwrap();
    let old = first.pairs(&[0]).unwrap();
    drop(first);
    is_old(tier.store(&cache.stream, &old, &cache.pages)); // free
    let mut second = tier.prepare_store(&keys(1..2)).unwrap();
    assert_eq!(second.pages()[0].number(), old[0].0.number());
    is_old(tier.store(&cache.stream, &old, &cache.pages));
    second.view(0).unwrap().fill(0, 4096, 2).unwrap();
    second.commit().unwrap();
    let load = tier.prepare_load(&keys(1..2)).unwrap();
    is_old(tier.load(&cache.stream, &old, &cache.pages));
    let pairs = load.pairs(&[0]).unwrap();
    tier.load(&cache.stream, &pairs, &cache.pages)
        .unwrap()
        .wait()
        .unwrap();
    // Evicted, and removed.
    drop(load);
    let mut third = tier.prepare_store(&keys(2..3)).unwrap();
    assert_eq!(third.evicted()[0].page, pairs[0].0);
    third.commit().unwrap();
    let load = tier.prepare_load(&keys(2..3)).unwrap();
    is_old(tier.load(&cache.stream, &pairs, &cache.pages));
    let pairs = load.pairs(&[0]).unwrap();
    drop(load);
    assert_eq!(tier.remove(&keys(2..3)).unwrap(), 1);
    store_nothing(&tier, &keys(3..4));
    let _load = tier.prepare_load(&keys(3..4)).unwrap();
    is_old(tier.load(&cache.stream, &pairs, &cache.pages));
    let (_, page) = tier.keys()[0];
    assert_eq!(egmem::kv::PageId::from_bits(page.to_bits()), page);
}

/// Threads store and load keys of their own by jobs, in a tier that is too small for all of them.
pub fn threads_share_a_tier(driver: &Driver) {
    let tier = tier(driver, 6, 4096);
    let work = |thread: u64| {
        let cache = Cache::new(driver, 1, 4, (4096, 4096));
        let mut found = 0;
        for round in 0..40 {
            let keys = keys(thread << 32 | round..(thread << 32 | round) + 2);
            let byte = |index: u64| (thread * 100 + round + index) as u8;
            let bytes = [0, 1].map(|index| [byte(index); 4096]);
            cache.write(0, bytes.as_flattened());
            let mut store = tier.prepare_store(&keys).unwrap();
            let blocks: Vec<u64> = store.indices().iter().map(|&at| at as u64).collect();
            let pairs = store.pairs(&blocks).unwrap();
            let job = tier.store(&cache.stream, &pairs, &cache.pages);
            job.unwrap().wait().unwrap();
            store.commit().unwrap();
            // Another thread may have evicted them since.
            let Ok(load) = tier.prepare_load(&keys) else {
                continue;
            };
            let pairs = load.pairs(&[2, 3]).unwrap();
            let job = tier.load(&cache.stream, &pairs, &cache.pages);
            drop(load);
            job.unwrap().wait().unwrap();
            assert!(cache.read(0)[2 * 4096..] == *bytes.as_flattened());
            found += 1;
        }
        found
    };
    let found: u64 = std::thread::scope(|scope| {
        let threads = [1, 2].map(|thread| scope.spawn(move || work(thread)));
        threads.map(|thread| thread.join().unwrap()).iter().sum()
    });
    assert!(found > 0);
    let stats = tier.stats();
    assert_eq!((stats.pinned, stats.writing), (0, 0));
}

pub fn a_job_keeps_its_pages(driver: &Driver) {
    let cache = Cache::new(driver, 1, 8, (4096, 4096));
    let tier = tier(driver, 2, 4096);
    let old = keys(0..2);
    store_nothing(&tier, &old);
    let load = tier.prepare_load(&old).unwrap();
    let job = tier
        .load(&cache.stream, &load.pairs(&[0, 1]).unwrap(), &cache.pages)
        .unwrap();
    drop(load);
    let full = tier.prepare_store(&keys(2..3));
    assert!(
        matches!(
            full,
            Err(Error::Full {
                pinned: 2,
                available: 0,
                ..
            })
        ),
        "{full:?}"
    );
    job.wait().unwrap();
    let store = tier.prepare_store(&keys(2..3)).unwrap();
    assert_eq!(store.evicted().len(), 1);
}

pub fn a_page_under_a_copy_outlives_its_store(driver: &Driver) {
    let cache = Cache::new(driver, 1, 8, (4096, 4096));
    let tier = tier(driver, 1, 4096);
    let mut store = tier.prepare_store(&keys(0..1)).unwrap();
    let pairs = store.pairs(&[0]).unwrap();
    let job = tier.store(&cache.stream, &pairs, &cache.pages).unwrap();
    assert!(matches!(
        store.commit(),
        Err(Error::StillCopying { pages: 1 })
    ));
    drop(store);
    assert_eq!((tier.stats().free, tier.stats().writing), (0, 1));
    assert!(matches!(
        tier.prepare_store(&keys(0..1)),
        Err(Error::Full { writing: 1, .. })
    ));
    let again = tier.store(&cache.stream, &pairs, &cache.pages);
    assert!(
        matches!(again, Err(Error::WrongState { .. })),
        "the store is gone"
    );
    job.wait().unwrap();
    assert_eq!((tier.stats().free, tier.stats().writing), (1, 0));
}

pub fn a_job_outlives_the_tier(driver: &Driver) {
    let cache = Cache::new(driver, 1, 8, (4096, 4096));
    let before = cache.randomise(&mut fastrand::Rng::new());
    let tier = tier(driver, 1, 4096);
    let mut store = tier.prepare_store(&keys(0..1)).unwrap();
    tier.store(&cache.stream, &store.pairs(&[7]).unwrap(), &cache.pages)
        .unwrap()
        .wait()
        .unwrap();
    store.commit().unwrap();
    let load = tier.prepare_load(&keys(0..1)).unwrap();
    let job = tier
        .load(&cache.stream, &load.pairs(&[0]).unwrap(), &cache.pages)
        .unwrap();
    drop((tier, store, load));
    job.wait().unwrap();
    assert_eq!(cache.read(0)[..4096], before[0][7 * 4096..]);
}

#[test]
fn a_copy_that_is_refused_releases_its_pages() {
    let driver = crate::kv::drivers::grace();
    let sim = driver.sim().unwrap();
    let cache = Cache::new(&driver, 2, 8, (4096, 4096));
    let tier = tier(&driver, 4, 8192);
    let store = tier.prepare_store(&keys(0..4)).unwrap();
    let pairs = store.pairs(&[0, 1, 2, 3]).unwrap();
    sim.fail(Call::MemcpyAsync, 5, Code::UNKNOWN);
    let refused = tier.store_by(CopyMethod::Loop, &cache.stream, &pairs, &cache.pages);
    assert!(matches!(refused, Err(Error::Memory(_))), "{refused:?}");
    // The pages' contents are unknown until they are stored again.
    let mut store = store;
    assert_eq!(store.commit(), Err(Error::CopyFailed { pages: 4 }));
    drop(store);
    let stats = tier.stats();
    assert_eq!(
        (stats.free, stats.stored_bytes),
        (4, 0),
        "the copies before have ended"
    );
    store_nothing(&tier, &keys(0..4));
}

#[test]
fn a_tier_with_jobs_leaves_nothing() {
    let driver = crate::kv::drivers::grace();
    a_job_outlives_the_tier(&driver);
    nothing_held(&driver);
}

/// The legacy default stream takes no batches: a refused one would make the caller wait for all its work there.
#[test]
fn the_default_stream_is_not_waited_for() {
    let driver = crate::kv::drivers::grace();
    let sim = driver.sim().unwrap();
    let cache = Cache::new(&driver, 1, 4, (256 << 10, 256 << 10));
    let tier = tier(&driver, 4, 256 << 10);
    let handle = StreamHandle { device: 0, raw: 0 };
    // SAFETY: the default stream is there as long as the driver.
    let default = unsafe { egmem::Stream::borrowed(&driver, handle) };
    let mut store = tier.prepare_store(&keys(0..1)).unwrap();
    let pairs = store.pairs(&[3]).unwrap();
    sim.reset_counts();
    let job = tier.store(&default, &pairs, &cache.pages).unwrap();
    let counts = [Call::StreamSynchronize, Call::MemcpyBatchAsync].map(|call| sim.count(call));
    assert_eq!(counts, [0, 0]);
    job.wait().unwrap();
    store.commit().unwrap();
}

/// Captures of other threads go on while the kernel and its list are made. tests/all/captures/kv.rs shows it on a GPU.
#[test]
fn a_job_is_submitted_in_relaxed_mode() {
    let driver = crate::kv::drivers::grace();
    let sim = driver.sim().unwrap();
    let cache = Cache::new(&driver, 1, 4, (4096, 4096));
    let tier = tier(&driver, 4, 4096);
    let mut store = tier.prepare_store(&keys(0..1)).unwrap();
    let pairs = store.pairs(&[0]).unwrap();
    sim.reset_counts();
    let kernel = tier.store_by(CopyMethod::KERNEL, &cache.stream, &pairs, &cache.pages);
    assert!(kernel.is_err(), "the simulator has no such kernel");
    let exchanges = sim.count(Call::ThreadExchangeStreamCaptureMode);
    assert_eq!(exchanges, 2, "relaxed, and restored");
    // Nothing was submitted, so nothing has failed.
    let other = tier.store_by(CopyMethod::Loop, &cache.stream, &pairs, &cache.pages);
    other.unwrap().wait().unwrap();
    store.commit().unwrap();
}

/// Pool memory waits for its streams before the CPU may use it, and the driver may refuse that: during a capture, for
/// instance.
#[test]
fn memory_that_is_refused_keeps_no_page() {
    let driver = crate::kv::drivers::grace();
    let sim = driver.sim().unwrap();
    let cache = Cache::new(&driver, 1, 4, (4096, 4096));
    let pool = egmem::Pool::options(crate::kv::drivers::node(&driver));
    let pool = pool.create(&driver).unwrap();
    let memory = pool.allocate(1 << 20, &cache.stream).unwrap();
    let tier = Tier::attach(Arc::new(memory)).page_bytes(4096).pages(4);
    let tier = tier.open().unwrap();
    store_nothing(&tier, &keys(0..2));
    let refuse = || sim.fail(Call::StreamSynchronize, 1, Code::STREAM_CAPTURE_UNSUPPORTED);
    let load = tier.prepare_load(&keys(0..2)).unwrap();
    let store = tier.prepare_store(&keys(2..3)).unwrap();
    let pairs = store.pairs(&[0]).unwrap();
    let copy = tier.store_by(CopyMethod::Loop, &cache.stream, &pairs, &cache.pages);
    let job = copy.unwrap();
    refuse();
    drop(load);
    assert_eq!(tier.stats().pinned, 0);
    refuse();
    drop(store);
    refuse();
    job.wait().unwrap();
    assert_eq!((tier.stats().free, tier.stats().writing), (2, 0));
    assert_eq!(sim.cancel_all(), 0, "each was met");
    // A change that the memory does not record yet is recorded with the next one.
    store_nothing(&tier, &keys(4..8));
    assert_eq!(tier.lookup(&keys(4..8)), 4);
}
