//! Tiers in memory that outlives them.

use std::sync::Arc;

use egmem::kv::{AttachOptions, Error, Key, Tier};
use egmem::{Buffer, Driver};

use crate::kv::setup::{Cache, is_emulated, key, keys, store_nothing};

const PAGE: u64 = 4096;

pub fn memory(driver: &Driver) -> Arc<Buffer> {
    Arc::new(Buffer::near(driver, 0, 2 << 20).unwrap())
}

fn options(memory: &Arc<Buffer>) -> AttachOptions {
    Tier::attach(Arc::clone(memory)).page_bytes(PAGE).pages(16)
}

fn order(tier: &Tier) -> Vec<Key> {
    tier.keys().into_iter().map(|(key, _)| key).collect()
}

pub fn pages_are_found_again_in_their_order(driver: &Driver) {
    let memory = memory(driver);
    let cache = Cache::new(driver, 1, 16, (PAGE, PAGE));
    let before = cache.randomise(&mut fastrand::Rng::new());
    let tier = options(&memory).open().unwrap();
    assert!(tier.found().is_new && tier.found().generation == 1);
    let mut store = tier.prepare_store(&keys(0..12)).unwrap();
    let blocks: Vec<u64> = (0..12).collect();
    let pairs = store.pairs(&blocks).unwrap();
    tier.store(&cache.stream, &pairs, &cache.pages)
        .unwrap()
        .wait()
        .unwrap();
    store.commit().unwrap();
    tier.touch(&keys(3..5));
    tier.remove(&keys(7..8)).unwrap();
    drop(tier.prepare_load(&keys(9..10)).unwrap());
    let expected = order(&tier);
    // The tier ends as in a process that is killed: pages that are being written are not finished.
    let unfinished = tier.prepare_store(&keys(20..22)).unwrap();
    let image = read(&memory);
    drop((unfinished, tier, store));
    memory.write_at(0, &image).unwrap();
    memory.put(136, 0_u64).unwrap(); // the owner has ended

    let tier = options(&memory).open().unwrap();
    let found = tier.found();
    assert_eq!(
        (
            found.generation,
            found.ready,
            found.unfinished,
            found.damaged
        ),
        (2, 11, 2, 0)
    );
    assert_eq!(order(&tier), expected);
    assert_eq!((tier.stats().free, tier.stats().ready), (5, 11));
    for number in (0..12).filter(|&number| number != 7) {
        let load = tier.prepare_load(&[key(number)]).unwrap();
        tier.load(&cache.stream, &load.pairs(&[15]).unwrap(), &cache.pages)
            .unwrap()
            .wait()
            .unwrap();
        let at = (number * PAGE) as usize;
        assert_eq!(
            cache.read(0)[15 * 4096..],
            before[0][at..at + 4096],
            "key {number}"
        );
    }
}

pub fn read(memory: &Buffer) -> Vec<u8> {
    let mut image = vec![0; memory.len() as usize];
    memory.read_at(0, &mut image).unwrap();
    image
}

pub fn one_tier_at_a_time_has_the_memory(driver: &Driver) {
    let memory = memory(driver);
    let tier = options(&memory).open().unwrap();
    let mine = Error::InUse {
        pid: std::process::id(),
        is_elsewhere: false,
    };
    for again in [
        options(&memory),
        options(&memory).take_over(true),
        options(&memory).reset(true),
    ] {
        assert_eq!(again.open().unwrap_err(), mine);
    }
    // The last handle gives it up, whichever it is.
    let load = tier.prepare_load(&[]).unwrap();
    drop(tier);
    assert_eq!(options(&memory).open().unwrap_err(), mine);
    drop(load);
    let tier = options(&memory).open().unwrap();
    // A process of another PID namespace: a process here cannot find out whether it lives.
    let word: u64 = memory.get(136).unwrap();
    memory.put(136, word ^ 1 << 30).unwrap();
    let elsewhere = Error::InUse {
        pid: std::process::id(),
        is_elsewhere: true,
    };
    assert_eq!(options(&memory).open().unwrap_err(), elsewhere);
    let taken = options(&memory).take_over(true).open().unwrap();
    assert_eq!(taken.found().generation, 3);
    // A tier that ends does not release memory that has another owner by then.
    memory.put(136, word ^ 1 << 30).unwrap();
    drop((tier, taken));
    assert_eq!(memory.get::<u64>(136).unwrap(), word ^ 1 << 30);
    // A process that has ended, whose number was given out again.
    memory.put(136, word ^ 1).unwrap();
    options(&memory).open().unwrap();
    assert_eq!(memory.get::<u64>(136).unwrap(), 0, "given up");
}

/// Of threads that open a tier at the same time, one has it.
pub fn one_of_many_opens_at_once_succeeds(driver: &Driver) {
    if is_emulated() {
        return;
    }
    let memory = memory(driver);
    for _ in 0..100 {
        let barrier = std::sync::Barrier::new(4);
        let open = || {
            barrier.wait();
            options(&memory).open()
        };
        let opened: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            let threads = threads.into_iter();
            threads.map(|thread| thread.join().unwrap()).collect()
        });
        let refused = opened.iter().filter_map(|opened| opened.as_ref().err());
        assert!(
            refused
                .clone()
                .all(|error| matches!(error, Error::InUse { .. }))
        );
        assert_eq!(refused.count(), 3);
    }
}

pub fn a_damaged_header_gives_no_tier_away(driver: &Driver) {
    for (at, what) in [(8, 3_u64), (16, 3), (80, 0), (0, 7)] {
        let memory = memory(driver);
        let tier = options(&memory).open().unwrap();
        let good: u64 = memory.get(at).unwrap();
        memory.put(at, what).unwrap();
        let refused = options(&memory).open().unwrap_err();
        assert!(matches!(refused, Error::NotATier { .. }), "{refused}");
        let image = read(&memory);
        let pid = std::process::id();
        let is_elsewhere = false;
        for again in [
            options(&memory).reset(true),
            options(&memory).reset(true).take_over(true),
        ] {
            assert_eq!(
                again.open().unwrap_err(),
                Error::InUse { pid, is_elsewhere }
            );
        }
        assert_eq!(read(&memory), image, "nothing was written");
        memory.put(at, good).unwrap();
        drop(tier);
        // An owner of another PID namespace: only the word of other data than a tier means nothing.
        let tier = options(&memory).open().unwrap();
        let word: u64 = memory.get(136).unwrap();
        drop(tier);
        memory.put(at, what).unwrap();
        memory.put(136, word ^ 1 << 30).unwrap();
        let reset = options(&memory).reset(true);
        if at == 0 {
            assert!(reset.open().unwrap().found().is_new);
        } else {
            let is_elsewhere = true;
            assert_eq!(
                reset.open().unwrap_err(),
                Error::InUse { pid, is_elsewhere }
            );
            let reset = options(&memory).reset(true).take_over(true);
            assert!(reset.open().unwrap().found().is_new);
        }
    }
}

pub fn other_memory_is_refused(driver: &Driver) {
    let memory = memory(driver);
    memory.write_at(0, b"not zero").unwrap();
    let image = read(&memory);
    let refused = options(&memory).open().unwrap_err();
    assert!(matches!(refused, Error::NotATier { .. }), "{refused}");
    assert_eq!(read(&memory), image, "nothing was written");
    let tier = options(&memory).reset(true).open().unwrap();
    store_nothing(&tier, &keys(0..3));
    drop(tier);
    for other in [
        options(&memory).pages(15),
        options(&memory).page_bytes(PAGE / 2),
        options(&memory).tag([1; 32]),
    ] {
        let refused = other.open().unwrap_err();
        assert!(matches!(refused, Error::OtherTier { .. }), "{refused}");
    }
    assert_eq!(
        Tier::attach(memory.clone())
            .open()
            .unwrap()
            .lookup(&keys(0..3)),
        3
    );
    let reset = options(&memory).tag([1; 32]).reset(true).open().unwrap();
    assert!(reset.found().is_new && reset.lookup(&keys(0..1)) == 0);
    drop(reset);
    // Too small, and of unknown size.
    let reset = || Tier::attach(memory.clone()).reset(true).tag([2; 32]);
    assert!(reset().page_bytes(PAGE).pages(512).open().is_err());
    assert!(reset().open().is_err());
    assert!(reset().page_bytes(2 << 20).open().is_err());
    assert_eq!(
        options(&memory)
            .tag([1; 32])
            .open()
            .unwrap()
            .found()
            .generation,
        2
    );
}

pub fn a_tier_takes_as_many_pages_as_fit(driver: &Driver) {
    let memory = memory(driver);
    let tier = Tier::attach(memory.clone())
        .page_bytes(PAGE)
        .open()
        .unwrap();
    let pages = u64::from(tier.pages());
    assert!(Tier::bytes_needed(pages, PAGE).unwrap() <= memory.len());
    assert!(Tier::bytes_needed(pages + 1, PAGE).unwrap() > memory.len());
    let all = keys(0..pages);
    let store = tier.prepare_store(&all).unwrap();
    let last = tier.page_ptr(*store.pages().iter().max().unwrap()).unwrap();
    assert!(last.0 + PAGE <= memory.device_ptr().0 + memory.len());
}
