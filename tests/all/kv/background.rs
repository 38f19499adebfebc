//! Tiers whose memory grows in the background.

use std::ops::ControlFlow;
use std::sync::mpsc::sync_channel;

use egmem::kv::{CopyMethod, Tier};
use egmem::{Driver, Growth, GrowthState};

use crate::kv::drivers::{node, nothing_held};
use crate::kv::setup::{Cache, keys};

/// Over the borders of chunks.
const PAGE: u64 = 300 * 1024 - 16;
const CHUNK: u64 = 2 << 20;
const THREADS: u64 = 3;
const ROUNDS: u64 = 16;
/// Chunks of the tier, of which each round of a thread lets one more come.
const CHUNKS: u64 = 24;

/// Threads store and load keys of their own by jobs, by each method, and each round lets the tier grow by a chunk.
pub fn threads_use_a_tier_that_grows(driver: &Driver) {
    let (allow, allowed) = sync_channel::<()>(CHUNKS as usize);
    let pages = CHUNKS * CHUNK / PAGE - 1;
    let options = Tier::on(node(driver)).pages(pages).page_bytes(PAGE);
    let options = options.growth(Growth::steady().chunk(CHUNK));
    let mut is_first = true;
    let tier = options.create_in_background(driver, move |_| {
        if !std::mem::take(&mut is_first) {
            // When the threads have ended, the rest comes by itself.
            let _ = allowed.recv();
        }
        ControlFlow::Continue(())
    });
    let tier = tier.unwrap();
    assert_eq!(tier.growth(), GrowthState::Growing);
    let work = |thread: u64| {
        let cache = Cache::new(driver, 1, 4, (PAGE, PAGE));
        let (mut found, mut usable) = (0, 0);
        for round in 0..ROUNDS {
            // The last thread's first keys, too: of a few pages they are evicted.
            let keys = keys(thread << 32 | round..(thread << 32 | round) + 2);
            let before = cache.randomise(&mut fastrand::Rng::with_seed(thread << 32 | round));
            let method = [CopyMethod::Loop, CopyMethod::Batch][round as usize % 2];
            // Each thread has two pages at most, and the first chunk has six.
            let mut store = tier.prepare_store(&keys).unwrap();
            let blocks: Vec<u64> = store.indices().iter().map(|&at| at as u64).collect();
            let pairs = store.pairs(&blocks).unwrap();
            // A key that was stored in the round before keeps its bytes.
            let fresh = pairs.len() == 2;
            let job = tier.store_by(method, &cache.stream, &pairs, &cache.pages);
            job.unwrap().wait().unwrap();
            store.commit().unwrap();
            let now = tier.stats().usable;
            assert!(now >= usable && now <= pages);
            usable = now;
            let _ = allow.try_send(());
            // Another thread may have evicted them since.
            let Ok(load) = tier.prepare_load(&keys) else {
                continue;
            };
            let pairs = load.pairs(&[2, 3]).unwrap();
            let job = tier.load_by(method, &cache.stream, &pairs, &cache.pages);
            job.unwrap().wait().unwrap();
            let (after, page) = (cache.read(0), PAGE as usize);
            assert!(after[3 * page..] == before[0][page..2 * page]);
            assert!(!fresh || after[2 * page..3 * page] == before[0][..page]);
            found += 1;
        }
        found
    };
    let found: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum()
    });
    assert!(found > 0);
    drop(allow);
    tier.wait_grown().unwrap();
    let stats = tier.stats();
    assert_eq!((stats.usable, stats.growth), (pages, GrowthState::Complete));
    assert_eq!((stats.pinned, stats.writing), (0, 0));
    drop(tier);
    nothing_held(driver);
}

/// Of a tier that stopped to grow, all pages that are there are used.
pub fn a_tier_that_stopped_is_a_smaller_one(driver: &Driver) {
    let options = Tier::on(node(driver)).pages(20).page_bytes(PAGE);
    let options = options.growth(Growth::steady().chunk(CHUNK));
    let tier = options.create_in_background(driver, |progress| match progress.done {
        done if done > CHUNK => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    });
    let tier = tier.unwrap();
    assert!(tier.wait_grown().is_err() && tier.growth_error().is_some());
    let stats = tier.stats();
    assert_eq!((stats.growth, stats.usable), (GrowthState::Stopped, 13));
    let cache = Cache::new(driver, 1, 13, (PAGE, PAGE));
    let before = cache.randomise(&mut fastrand::Rng::with_seed(3));
    let blocks: Vec<u64> = (0..13).collect();
    let mut store = tier.prepare_store(&keys(0..13)).unwrap();
    let pairs = store.pairs(&blocks).unwrap();
    let job = tier.store(&cache.stream, &pairs, &cache.pages);
    job.unwrap().wait().unwrap();
    store.commit().unwrap();
    cache.randomise(&mut fastrand::Rng::with_seed(4));
    let load = tier.prepare_load(&keys(0..13)).unwrap();
    let pairs = load.pairs(&blocks).unwrap();
    let job = tier.load(&cache.stream, &pairs, &cache.pages);
    job.unwrap().wait().unwrap();
    assert!(cache.read(0) == before[0]);
    assert!(tier.prepare_store(&keys(20..34)).is_err());
}
