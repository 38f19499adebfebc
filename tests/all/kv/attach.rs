//! Tiers in memory that outlives them.

use std::sync::Arc;

use egmem::kv::{AttachOptions, Error, Key, Tier};
use egmem::{Buffer, Driver};

use crate::kv::setup::{Cache, is_emulated, key, keys, store_nothing};

const PAGE: u64 = 4096;
/// Where the word of the first member lies, and a bit of it for another PID namespace.
pub const MEMBER: u64 = 4096;
const SPACE: u64 = 1 << 30;

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
    memory.put(MEMBER, 0_u64).unwrap(); // the member has ended

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

pub fn tiers_of_several_members_are_one(driver: &Driver) {
    let memory = memory(driver);
    let first = options(&memory).open().unwrap();
    let second = options(&memory).open().unwrap();
    assert_eq!(
        (first.found().generation, second.found().generation),
        (1, 2)
    );
    let members = second.members();
    let own = std::process::id();
    assert!(
        members
            .iter()
            .map(|member| (member.pid, member.is_self))
            .eq([(own, false), (own, true)])
    );
    // What one stores, the other finds, with its order of use.
    store_nothing(&first, &keys(0..16));
    assert_eq!(second.lookup(&keys(0..16)), 16);
    let load = second.prepare_load(&keys(15..16)).unwrap();
    first.touch(&keys(14..15));
    let mut store = first.prepare_store(&keys(20..22)).unwrap();
    let evicted: Vec<Key> = store.evicted().iter().map(|gone| gone.key).collect();
    assert_eq!(
        evicted,
        [key(13), key(12)],
        "neither the pinned nor the touched one"
    );
    // A key that one writes is none that the other stores, nor one that it loads.
    assert!(second.prepare_store(&keys(20..21)).unwrap().is_empty());
    assert!(second.prepare_load(&keys(20..21)).is_err());
    assert_eq!(first.remove(&keys(15..16)), Ok(0), "pinned");
    store.commit().unwrap();
    drop(load);
    assert_eq!((first.stats().pinned, second.stats().pinned), (0, 0));
    assert!(order(&first) == order(&second) && second.lookup(&keys(20..22)) == 2);
    // The last handle ends the membership, whichever it is.
    let load = first.prepare_load(&keys(20..21)).unwrap();
    drop((store, first));
    assert_eq!((second.members().len(), second.stats().pinned), (2, 1));
    drop(load);
    assert_eq!((second.members().len(), second.stats().pinned), (1, 0));
    // A tier that has members is not reset.
    let mine = Error::InUse {
        pid: own,
        is_elsewhere: false,
    };
    for reset in [false, true] {
        let again = options(&memory).pages(15).reset(true).take_over(reset);
        assert_eq!(again.open().unwrap_err(), mine);
    }
    let more: Vec<Tier> = (1..64).map(|_| options(&memory).open().unwrap()).collect();
    let error = options(&memory).open().unwrap_err();
    assert_eq!(error, Error::TooManyMembers { members: 64 });
    drop((second, more));
    assert!(
        options(&memory)
            .pages(15)
            .reset(true)
            .open()
            .unwrap()
            .found()
            .is_new
    );
}

pub fn members_elsewhere_are_taken_over(driver: &Driver) {
    let memory = memory(driver);
    let tier = options(&memory).open().unwrap();
    store_nothing(&tier, &keys(0..3));
    // A process of another PID namespace: a process here cannot find out whether it lives.
    let word: u64 = memory.get(MEMBER).unwrap();
    memory.put(MEMBER, word ^ SPACE).unwrap();
    let elsewhere = Error::InUse {
        pid: std::process::id(),
        is_elsewhere: true,
    };
    assert_eq!(options(&memory).open().unwrap_err(), elsewhere);
    let taken = options(&memory).take_over(true).open().unwrap();
    assert_eq!((taken.found().generation, taken.found().ready), (2, 3));
    assert_eq!(taken.members().len(), 1);
    // The tier that it was taken from does nothing more, and does not release memory that has another member by then.
    assert!(tier.prepare_store(&keys(5..6)).is_err() && tier.lookup(&keys(0..3)) == 0);
    memory.put(MEMBER, word ^ SPACE).unwrap();
    drop((tier, taken));
    assert_eq!(memory.get::<u64>(MEMBER).unwrap(), word ^ SPACE);
    // A process that has ended, whose number was given out again.
    memory.put(MEMBER, word ^ 1).unwrap();
    options(&memory).open().unwrap();
    assert_eq!(memory.get::<u64>(MEMBER).unwrap(), 0, "given up");
}

/// Of threads that open a tier at the same time, all have it, and one has made it.
pub fn many_open_at_once(driver: &Driver) {
    if is_emulated() {
        return;
    }
    for _ in 0..30 {
        let memory = memory(driver);
        let barrier = std::sync::Barrier::new(4);
        let open = || {
            barrier.wait();
            let tier = options(&memory).open().unwrap();
            store_nothing(&tier, &keys(0..3));
            tier
        };
        let opened: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            let threads = threads.into_iter();
            threads.map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(opened.iter().filter(|tier| tier.found().is_new).count(), 1);
        let mut generations: Vec<u64> = opened.iter().map(|tier| tier.found().generation).collect();
        generations.sort_unstable();
        assert_eq!(generations, [1, 2, 3, 4]);
        for tier in &opened {
            assert_eq!((tier.lookup(&keys(0..3)), tier.members().len()), (3, 4));
        }
    }
}

pub fn a_damaged_header_gives_no_tier_away(driver: &Driver) {
    for (at, what) in [(8, 2_u64), (16, 3), (80, 0), (8192, 5), (0, 7)] {
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
        // A member of another PID namespace: only the word of other data than a tier means nothing.
        let tier = options(&memory).open().unwrap();
        let word: u64 = memory.get(MEMBER).unwrap();
        drop(tier);
        memory.put(at, what).unwrap();
        memory.put(MEMBER, word ^ SPACE).unwrap();
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
