use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::*;
use crate::driver::{Call, Code, Location, NodeId};
use crate::{Buffer, CopyMethod, GpuPages, Key, Stream};
use egmem_core::{Growth, Machine};

const MIB: u64 = 1 << 20;
/// Pages lie over the borders of chunks, and the table is in front of them.
const PAGE: u64 = 3 * MIB / 2 - 64;
const PAGES: u64 = 7;
const CHUNK: u64 = 2 * MIB;
/// 10.5 MiB less 448 bytes, behind 8 KiB.
const CHUNKS: u64 = 6;
const TOTAL: u64 = 12 * MIB;

fn driver() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

fn options() -> TierOptions {
    let growth = Growth::steady().chunk(CHUNK);
    Tier::on(NodeId(0))
        .pages(PAGES)
        .page_bytes(PAGE)
        .growth(growth)
}

/// Returns how many pages lie in some chunks.
fn pages_in(chunks: u64) -> u64 {
    ((chunks * CHUNK - 8192) / PAGE).min(PAGES)
}

/// Returns how many copies some pages take: none goes over a border of chunks.
fn copies_of(pages: std::ops::Range<u64>) -> u64 {
    let borders = |page: u64| {
        let at = 8192 + page * PAGE;
        (at + PAGE - 1) / CHUNK - at / CHUNK
    };
    pages.map(|page| 1 + borders(page)).sum()
}

fn key(number: u64) -> Key {
    Key::from_bytes(&number.to_le_bytes())
}

fn goes_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Growth that goes on by a step for each `true`, and ends at a `false`.
struct Steps {
    allow: SyncSender<bool>,
    made: Receiver<u64>,
}

impl Steps {
    fn of(driver: &Driver, options: TierOptions) -> (Tier, Self) {
        let (allow, allowed) = sync_channel(1);
        let (tell, made) = sync_channel(0);
        let mut is_front = true;
        let tier = options.create_in_background(driver, move |progress| {
            assert_eq!(progress.total, TOTAL);
            if std::mem::take(&mut is_front) {
                return ControlFlow::Continue(());
            }
            // At the test's end nothing is held up.
            let told = tell.send(progress.done / CHUNK);
            match told.is_err() || allowed.recv().unwrap_or(true) {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        });
        (tier.unwrap(), Self { allow, made })
    }

    /// Waits until there are `chunks`, and holds the growth there.
    fn until(&self, chunks: u64) {
        while self.made.recv().unwrap() < chunks {
            self.allow.send(true).unwrap();
        }
    }
}

/// Blocks of a GPU, each with its own bytes, and room for as many more.
struct Blocks {
    memory: Arc<Buffer>,
    gpu: GpuPages,
    stream: Stream,
}

impl Blocks {
    fn new(driver: &Driver) -> Self {
        let memory = Buffer::near(driver, 0, 2 * PAGES * PAGE).unwrap();
        for block in 0..PAGES {
            memory
                .cpu()
                .unwrap()
                .fill(block * PAGE, PAGE, block as u8 + 1)
                .unwrap();
        }
        let memory = Arc::new(memory);
        Self {
            gpu: GpuPages::over(vec![(Arc::clone(&memory), 0)], PAGE, PAGE).unwrap(),
            stream: Stream::new(driver, 0).unwrap(),
            memory,
        }
    }

    fn store(&self, tier: &Tier, numbers: std::ops::Range<u64>, method: CopyMethod) {
        let keys: Vec<Key> = numbers.clone().map(key).collect();
        let mut store = tier.prepare_store(&keys).unwrap();
        let pairs = store.pairs(&numbers.collect::<Vec<_>>()).unwrap();
        let job = tier.store_by(method, &self.stream, &pairs, &self.gpu);
        job.unwrap().wait().unwrap();
        store.commit().unwrap();
    }

    /// Loads the pages of keys 0 to `count` to the blocks behind the others, and looks at them.
    fn check(&self, tier: &Tier, count: u64, method: CopyMethod) {
        let keys: Vec<Key> = (0..count).map(key).collect();
        self.memory
            .cpu()
            .unwrap()
            .fill(PAGES * PAGE, PAGES * PAGE, 0)
            .unwrap();
        let load = tier.prepare_load(&keys).unwrap();
        let blocks: Vec<u64> = (PAGES..PAGES + count).collect();
        let pairs = load.pairs(&blocks).unwrap();
        let job = tier.load_by(method, &self.stream, &pairs, &self.gpu);
        job.unwrap().wait().unwrap();
        for number in 0..count {
            let mut bytes = vec![0_u8; PAGE as usize];
            let at = (PAGES + number) * PAGE;
            self.memory.read_at(at, &mut bytes).unwrap();
            assert!(bytes == vec![number as u8 + 1; bytes.len()], "{number}");
        }
    }
}

fn nothing_held(driver: &Driver) {
    let held = driver.sim().unwrap().held();
    assert!(held.is_empty(), "{held}");
}

#[test]
fn pages_join_in_order_and_are_used_at_once() {
    let driver = driver();
    for method in [CopyMethod::Loop, CopyMethod::Batch] {
        let blocks = Blocks::new(&driver);
        let (tier, steps) = Steps::of(&driver, options());
        for chunks in 2..=CHUNKS {
            steps.until(chunks);
            let (before, now) = (pages_in(chunks - 1), pages_in(chunks));
            let stats = tier.stats();
            assert_eq!((stats.pages, stats.usable), (PAGES, now));
            // The test's first pages were free before it took them.
            let taken = if chunks == 2 { 0 } else { before };
            assert_eq!(
                (stats.free, stats.ready, stats.pinned),
                (now - taken, taken, 0)
            );
            assert_eq!(tier.growth(), GrowthState::Growing);
            assert_eq!(tier.grown(), Progress::new(chunks * CHUNK, TOTAL));
            let copies = || driver.sim().unwrap().count(Call::MemcpyAsync);
            let earlier = copies();
            blocks.store(&tier, taken..now, method);
            if method == CopyMethod::Loop {
                assert_eq!(copies() - earlier, copies_of(taken..now));
            }
            let pages = tier
                .keys()
                .into_iter()
                .map(|(key, page)| (key, page.number()));
            let mut pages: Vec<_> = pages.collect();
            pages.sort_by_key(|&(_, page)| page);
            assert!(
                pages
                    .into_iter()
                    .eq((0..now).map(|page| (key(page), page as u32)))
            );
            blocks.check(&tier, now, method);
            steps.allow.send(true).unwrap();
        }
        tier.wait_grown().unwrap();
        let stats = tier.stats();
        assert_eq!((stats.growth, stats.usable), (GrowthState::Complete, PAGES));
        assert_eq!(tier.growth_error(), None);
        blocks.check(&tier, PAGES, method);
        // The memory has a tier as any other.
        let memory = tier.0.growing.clone().unwrap();
        drop(tier);
        let tier = Tier::attach(memory).page_bytes(PAGE).open().unwrap();
        assert_eq!(tier.found().ready, PAGES);
        blocks.check(&tier, PAGES, method);
    }
    nothing_held(&driver);
}

#[test]
fn pages_without_memory_are_refused() {
    let driver = driver();
    let (tier, steps) = Steps::of(&driver, options());
    steps.until(2);
    let all: Vec<Key> = (0..PAGES).map(key).collect();
    let full = |is_growing| Error::Full {
        needed: PAGES as usize,
        pages: PAGES as usize,
        available: 2,
        pinned: 0,
        writing: 0,
        missing: 5,
        is_growing,
        evicted: Vec::new(),
    };
    assert_eq!(tier.prepare_store(&all).unwrap_err(), full(true));
    // Old pages make room for new ones, as in a tier of two pages.
    tier.prepare_store(&all[..2]).unwrap().commit().unwrap();
    let mut store = tier.prepare_store(&all[2..4]).unwrap();
    assert_eq!(store.evicted().len(), 2);
    store.commit().unwrap();
    let load = tier.prepare_load(&all[2..3]).unwrap();
    assert_eq!((tier.stats().pinned, tier.stats().ready), (1, 2));
    drop(load);
    // Numbers that the program makes up.
    for number in 2..PAGES {
        let error = tier.page_ptr(crate::PageId::from_bits(number)).unwrap_err();
        assert!(
            matches!(
                error,
                Error::WrongState {
                    is: "without memory",
                    ..
                }
            ),
            "{error}"
        );
        let blocks = Blocks::new(&driver);
        let pairs = [(crate::PageId::from_bits(number), 0)];
        let error = tier.store(&blocks.stream, &pairs, &blocks.gpu).unwrap_err();
        assert!(matches!(error, Error::WrongState { .. }), "{error}");
    }
    steps.allow.send(false).unwrap();
    let (done, total) = (2 * CHUNK, TOTAL);
    let error = MemoryError::Cancelled { done, total };
    assert_eq!(tier.wait_grown(), Err(error.clone().into()));
    assert_eq!(tier.growth_error(), Some(error));
    assert_eq!(tier.remove(&all), Ok(2));
    assert_eq!(tier.prepare_store(&all).unwrap_err(), full(false));
    assert_eq!(
        (tier.stats().growth, tier.stats().usable),
        (GrowthState::Stopped, 2)
    );
}

/// In each call for each chunk: the tier has its pages until then.
#[test]
fn a_failure_leaves_a_smaller_tier() {
    let driver = driver();
    let sim = driver.sim().unwrap();
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        for chunk in 1..=CHUNKS {
            sim.fail(call, chunk, Code::UNKNOWN);
            let tier = options().create_in_background(&driver, goes_on);
            if chunk == 1 {
                let error = tier.unwrap_err();
                assert_eq!(error.memory().unwrap().code(), Some(Code::UNKNOWN));
                nothing_held(&driver);
                continue;
            }
            let tier = tier.unwrap();
            let error = tier.wait_grown().unwrap_err();
            assert_eq!(
                error.memory().unwrap().code(),
                Some(Code::UNKNOWN),
                "{call:?}"
            );
            assert_eq!(tier.growth_error().as_ref(), error.memory());
            let (stats, pages) = (tier.stats(), pages_in(chunk - 1));
            assert_eq!((stats.growth, stats.usable), (GrowthState::Stopped, pages));
            let blocks = Blocks::new(&driver);
            blocks.store(&tier, 0..pages, CopyMethod::Auto);
            blocks.check(&tier, pages, CopyMethod::Auto);
            assert!(tier.prepare_store(&[key(99)]).unwrap().evicted().len() == 1);
            drop((tier, blocks));
            nothing_held(&driver);
        }
    }
}

#[test]
fn growth_is_cancelled_at_each_chunk() {
    let driver = driver();
    for chunk in 2..=CHUNKS {
        let (tier, steps) = Steps::of(&driver, options());
        steps.until(chunk);
        assert!(tier.wait_grown_timeout(Duration::ZERO).is_none());
        tier.cancel_growth();
        steps.allow.send(true).unwrap();
        assert_eq!(tier.wait_grown().is_ok(), chunk == CHUNKS);
        assert_eq!(tier.stats().usable, pages_in(chunk));
        let blocks = Blocks::new(&driver);
        blocks.store(&tier, 0..pages_in(chunk), CopyMethod::Auto);
        blocks.check(&tier, pages_in(chunk), CopyMethod::Auto);
        drop((tier, blocks, steps));
        nothing_held(&driver);
    }
}

/// The last of the handles, stores, loads and jobs ends the growth.
#[test]
fn a_tier_that_is_dropped_while_it_grows_gives_everything_back() {
    let driver = driver();
    for chunk in 2..=CHUNKS {
        let blocks = Blocks::new(&driver);
        let (tier, steps) = Steps::of(&driver, options());
        steps.until(chunk);
        let store = tier.prepare_store(&[key(0), key(1)]).unwrap();
        let pairs = store.pairs(&[0, 1]).unwrap();
        let job = tier.store(&blocks.stream, &pairs, &blocks.gpu).unwrap();
        drop((tier, store));
        // The thread goes on by itself: nothing waits for it any more.
        drop(steps);
        drop(job);
        drop(blocks);
        nothing_held(&driver);
    }
}

/// The progress function may have a handle: it is dropped with the function, at the growth's end.
#[test]
fn the_progress_function_may_use_the_tier() {
    let driver = driver();
    let (give, given) = sync_channel::<Tier>(1);
    let (tell, told) = sync_channel(CHUNKS as usize);
    let (mut own, caller) = (None, thread::current().id());
    let tier = options().create_in_background(&driver, move |_| {
        // The front is made by the caller, who has no tier yet.
        if own.is_none() && thread::current().id() != caller {
            own = given.recv().ok();
        }
        if let Some(tier) = &own {
            let error = tier.wait_grown().unwrap_err();
            let usable = tier.stats().usable;
            let kept = tier.prepare_store(&[key(usable)]).unwrap().commit();
            tell.send((kept, error.to_string())).unwrap();
        }
        ControlFlow::Continue(())
    });
    give.send(tier.unwrap()).unwrap();
    for (kept, error) in told {
        kept.unwrap();
        assert!(error.contains("wait for itself"), "{error}");
    }
}

#[test]
fn a_small_tier_needs_no_thread() {
    let driver = driver();
    let options = Tier::on(NodeId(0)).pages(4).page_bytes(64);
    let tier = options
        .clone()
        .create_in_background(&driver, goes_on)
        .unwrap();
    assert_eq!(
        (tier.growth(), tier.stats().usable),
        (GrowthState::Complete, 4)
    );
    tier.wait_grown().unwrap();
    // So is a tier that was not created so.
    let tier = options.create(&driver).unwrap();
    assert_eq!(
        (tier.growth(), tier.growth_error()),
        (GrowthState::Complete, None)
    );
    assert_eq!(tier.wait_grown_timeout(Duration::ZERO), Some(Ok(())));
    tier.cancel_growth();
    let host = Tier::on(Location::Host).pages(0).page_bytes(64);
    assert!(host.create_in_background(&driver, goes_on).is_err());
}

#[test]
fn a_tier_in_the_foreground_tells_its_progress() {
    let driver = driver();
    let mut told = Vec::new();
    let tier = options().create_with(&driver, |progress| {
        told.push(progress.done);
        ControlFlow::Continue(())
    });
    assert_eq!(tier.unwrap().stats().usable, PAGES);
    assert!(told.into_iter().eq((1..=CHUNKS).map(|chunk| chunk * CHUNK)));
    let error = options().create_with(&driver, |_| ControlFlow::Break(()));
    let (done, total) = (CHUNK, TOTAL);
    let cancelled = MemoryError::Cancelled { done, total };
    assert_eq!(error.unwrap_err(), cancelled.into());
    nothing_held(&driver);
}
