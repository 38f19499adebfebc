//! Copies between pages and a GPU's cache.

use std::sync::Arc;

use egmem::driver::{Call, CudaVersion, DevicePtr};
use egmem::kv::{CopyMethod, Error, GpuPages, PartShape, Tier};
use egmem::memory::Memory;
use egmem::{Buffer, Driver, Stream};

use crate::kv::setup::{Cache, keys, tier};

/// The fault of an argument, or of a range.
pub fn is_refused<T>(result: Result<T, Error>) -> bool {
    let refused = |error: &egmem::Error| {
        matches!(
            error,
            egmem::Error::InvalidArgument { .. } | egmem::Error::OutOfRange { .. }
        )
    };
    result
        .err()
        .is_some_and(|error| error.memory().is_some_and(refused))
}

pub fn blocks_come_back_through_pages(driver: &Driver) {
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    let (blocks, page_bytes) = (40, 4 * 1008);
    let cache = Cache::new(driver, 4, blocks, (1024, 1008));
    let tier = tier(driver, 30, page_bytes);
    let before = cache.randomise(&mut random);
    let keys = keys(0..30);
    let mut from: Vec<u64> = (0..blocks).collect();
    random.shuffle(&mut from);
    from.truncate(30);
    let mut store = tier.prepare_store(&keys).unwrap();
    let job = tier
        .store(&cache.stream, &store.pairs(&from).unwrap(), &cache.pages)
        .unwrap();
    assert_eq!(job.bytes(), 30 * page_bytes);
    job.wait().unwrap();
    store.commit().unwrap();

    cache.randomise(&mut random);
    let mut to: Vec<u64> = (0..blocks).collect();
    random.shuffle(&mut to);
    let untouched = cache.read(0);
    let load = tier.prepare_load(&keys).unwrap();
    let mut job = tier
        .load(&cache.stream, &load.pairs(&to[..30]).unwrap(), &cache.pages)
        .unwrap();
    while !job.is_done().unwrap() {}
    for (part, before) in before.iter().enumerate() {
        let after = cache.read(part);
        for (from, to) in from.iter().zip(&to) {
            let (from, to) = ((from * 1024) as usize, (to * 1024) as usize);
            assert_eq!(
                after[to..to + 1008],
                before[from..from + 1008],
                "part {part}"
            );
        }
    }
    // Neither the blocks without a page nor the bytes between blocks have changed.
    let after = cache.read(0);
    for &block in &to[30..] {
        let at = (block * 1024) as usize;
        assert_eq!(
            after[at..at + 1024],
            untouched[at..at + 1024],
            "block {block}"
        );
    }
    for block in 0..blocks as usize {
        assert_eq!(
            after[block * 1024 + 1008..][..16],
            untouched[block * 1024 + 1008..][..16]
        );
    }
    let stats = tier.stats();
    assert_eq!(
        (stats.stored_bytes, stats.loaded_bytes),
        (30 * page_bytes, 30 * page_bytes)
    );
}

/// Every method moves the same bytes, for sizes of parts around those that a warp copies at a time.
pub fn every_method_moves_the_same_bytes(driver: &Driver) {
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    for (parts, part_bytes, stride) in [
        (1, 16, 16),
        (3, 48, 64),
        (2, 4096, 4096),
        (2, 4112, 8208),
        (5, 12_288, 16_384),
        (1, 70_000, 70_016),
    ] {
        let cache = Cache::new(driver, parts, 40, (stride, part_bytes));
        let tier = tier(driver, 32, parts * part_bytes);
        for method in [
            CopyMethod::Auto,
            CopyMethod::Loop,
            CopyMethod::Batch,
            CopyMethod::KERNEL,
            CopyMethod::Kernel { blocks: 1 },
            CopyMethod::Kernel { blocks: 300 },
        ] {
            println!("{method:?}: {parts} parts of {part_bytes} bytes");
            round_trip(&tier, &cache, method, &mut random);
        }
    }
}

/// Copies `pages` pages out of random blocks of a cache and back into others.
pub fn round_trip(tier: &Tier, cache: &Cache, method: CopyMethod, random: &mut fastrand::Rng) {
    let pages = tier.pages() as usize;
    let keys = keys(0..pages as u64);
    tier.remove(&keys).unwrap();
    let shape = cache.pages.shape(0).unwrap();
    let (stride, part_bytes) = (shape.stride as usize, shape.bytes as usize);
    let mut order: Vec<u64> = (0..cache.pages.blocks()).collect();
    random.shuffle(&mut order);
    let before = cache.randomise(random);
    let mut store = tier.prepare_store(&keys).unwrap();
    let pairs = store.pairs(&order[..pages]).unwrap();
    match tier.store_by(method, &cache.stream, &pairs, &cache.pages) {
        Ok(job) => job.wait().unwrap(),
        Err(error) => {
            return expect_unsupported(method, &cache.stream, shape.bytes, &error);
        }
    }
    store.commit().unwrap();
    let between = cache.randomise(random);
    let load = tier.prepare_load(&keys).unwrap();
    let from = order[..pages].to_vec();
    let to = order[order.len() - pages..].to_vec();
    let pairs = load.pairs(&to).unwrap();
    let job = tier.load_by(method, &cache.stream, &pairs, &cache.pages);
    job.unwrap().wait().unwrap();
    for (part, (before, mut expected)) in before.iter().zip(between).enumerate() {
        for (&from, &to) in from.iter().zip(&to) {
            let (from, to) = (from as usize * stride, to as usize * stride);
            expected[to..to + part_bytes].copy_from_slice(&before[from..from + part_bytes]);
        }
        assert!(cache.read(part) == expected, "part {part} by {method:?}");
    }
}

/// More pages than the kernel's first launch takes.
pub fn a_job_of_many_pages_moves_all_of_them(driver: &Driver) {
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    let cache = Cache::new(driver, 2, 6000, (48, 32));
    let tier = tier(driver, 5000, 64);
    for method in [CopyMethod::Auto, CopyMethod::KERNEL, CopyMethod::Batch] {
        round_trip(&tier, &cache, method, &mut random);
    }
}

/// The simulator runs no kernel of the tier's, a kernel needs aligned bytes, and old drivers have no batches.
pub fn expect_unsupported(method: CopyMethod, stream: &Stream, part_bytes: u64, error: &Error) {
    let driver = stream.driver();
    let may = match method {
        CopyMethod::Kernel { .. } => driver.is_simulated() || !part_bytes.is_multiple_of(16),
        CopyMethod::Batch => driver.driver_version().unwrap() < CudaVersion(12080),
        _ => false,
    };
    assert!(may, "{method:?}: {error}");
}

#[test]
fn a_tier_copies_by_its_method() {
    let driver = crate::kv::drivers::grace();
    let calls = |call| driver.sim().unwrap().count(call);
    let cache = Cache::new(&driver, 1, 4, (4096, 4096));
    let on = || Tier::on(egmem::driver::NodeId(0)).pages(4).page_bytes(4096);
    let too_many = on().copy_method(CopyMethod::Kernel { blocks: 1025 });
    assert!(is_refused(too_many.create(&driver)));
    let none = on().copy_method(CopyMethod::Kernel { blocks: 0 });
    assert!(is_refused(none.create(&driver)));
    for (method, batches) in [
        (CopyMethod::Loop, 0),
        (CopyMethod::Batch, 1),
        (CopyMethod::Auto, 2),
    ] {
        let tier = on().copy_method(method).create(&driver).unwrap();
        let store = tier.prepare_store(&keys(0..1)).unwrap();
        let pairs = store.pairs(&[0]).unwrap();
        let job = tier.store(&cache.stream, &pairs, &cache.pages).unwrap();
        job.wait().unwrap();
        assert_eq!(calls(Call::MemcpyBatchAsync), batches, "{method:?}");
    }
}

#[test]
fn tiers_and_jobs_go_between_threads() {
    fn expect<T: Send + Sync>() {}
    expect::<Tier>();
    expect::<egmem::kv::Job>();
    expect::<egmem::kv::Store>();
    expect::<egmem::kv::Load>();
    expect::<GpuPages>();
}

#[test]
fn a_driver_without_batches_is_asked_once() {
    let mut machine = egmem::Machine::gh200();
    machine.driver_version = CudaVersion(12060);
    let driver = Driver::simulated(machine).unwrap();
    let cache = Cache::new(&driver, 1, 4, (2 << 20, 2 << 20));
    let tier = tier(&driver, 4, 2 << 20);
    let calls = || driver.sim().unwrap().count(Call::MemcpyBatchAsync);
    let store = tier.prepare_store(&keys(0..1)).unwrap();
    let pairs = store.pairs(&[0]).unwrap();
    for _ in 0..3 {
        let job = tier.store(&cache.stream, &pairs, &cache.pages).unwrap();
        job.wait().unwrap();
        assert_eq!(calls(), 1);
    }
    let batch = tier.store_by(CopyMethod::Batch, &cache.stream, &pairs, &cache.pages);
    assert!(batch.is_err(), "asked for by name");
    drop(store);
    assert_eq!(tier.stats().free, 4);
}

pub fn parts_lie_where_the_cache_says(driver: &Driver) {
    // One allocation with two tensors behind each other, the second one at an offset.
    let memory = Arc::new(Buffer::near(driver, 0, 1 << 16).unwrap());
    let stream = egmem::Stream::new(driver, 0).unwrap();
    let parts = vec![(memory.clone(), 0), (memory.clone(), 32 << 10)];
    let gpu = GpuPages::over(parts, 4096, 4096).unwrap();
    assert_eq!(
        (gpu.blocks(), gpu.block_bytes()),
        (8, 8192),
        "the shortest part decides"
    );
    let tier = tier(driver, 4, 8192);
    for block in 0..16 {
        memory.write_at(block * 4096, &[block as u8; 4096]).unwrap();
    }
    let store = tier.prepare_store(&keys(0..1)).unwrap();
    tier.store(&stream, &store.pairs(&[3]).unwrap(), &gpu)
        .unwrap()
        .wait()
        .unwrap();
    let mut page = [0_u8; 8192];
    store.view(0).unwrap().read_at(0, &mut page).unwrap();
    assert!(page[..4096].iter().all(|&byte| byte == 3));
    assert!(page[4096..].iter().all(|&byte| byte == 11));
}

/// Parts of two sizes in turn, with gaps between the blocks, as the caches of attention and of its index.
pub fn parts_of_a_page_may_have_different_sizes(driver: &Driver) {
    const SHAPES: [(u64, u64); 4] = [(48, 32), (4112, 4112), (64, 32), (5120, 4112)];
    const BLOCKS: u64 = 2100; // more than a kernel's first launch takes
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    let stream = egmem::Stream::new(driver, 0).unwrap();
    let bases: Vec<u64> = (0..=4)
        .map(|part| {
            SHAPES[..part]
                .iter()
                .map(|(stride, _)| stride * BLOCKS)
                .sum()
        })
        .collect();
    let memory = Arc::new(Buffer::near(driver, 0, bases[4]).unwrap());
    let parts = SHAPES.iter().zip(&bases).map(|(&(stride, bytes), &at)| {
        let memory: Arc<dyn Memory + Send + Sync> = memory.clone();
        (memory, at, PartShape { stride, bytes })
    });
    let gpu = GpuPages::over_parts(parts.collect()).unwrap();
    assert_eq!((gpu.parts(), gpu.block_bytes()), (4, 8288));
    assert_eq!((gpu.shape(2).unwrap().stride, gpu.shape(4)), (64, None));
    let tier = tier(driver, BLOCKS, 8288);
    let all = keys(0..BLOCKS);
    let mut randomise = || {
        let mut bytes = vec![0_u8; memory.len() as usize];
        random.fill(&mut bytes);
        memory.write_at(0, &bytes).unwrap();
        bytes
    };
    for method in [
        CopyMethod::Auto,
        CopyMethod::KERNEL,
        CopyMethod::Batch,
        CopyMethod::Loop,
    ] {
        tier.remove(&all).unwrap();
        let before = randomise();
        let mut store = tier.prepare_store(&all).unwrap();
        let pairs = store.pairs(&(0..BLOCKS).collect::<Vec<_>>()).unwrap();
        match tier.store_by(method, &stream, &pairs, &gpu) {
            Ok(job) => job.wait().unwrap(),
            Err(error) => {
                expect_unsupported(method, &stream, 16, &error);
                continue;
            }
        }
        store.commit().unwrap();
        let mut expected = randomise();
        let load = tier.prepare_load(&all).unwrap();
        let pairs = load.pairs(&(0..BLOCKS).rev().collect::<Vec<_>>()).unwrap();
        let job = tier.load_by(method, &stream, &pairs, &gpu);
        job.unwrap().wait().unwrap();
        for (&(stride, bytes), base) in SHAPES.iter().zip(&bases) {
            for block in 0..BLOCKS {
                let at = |block: u64| (base + block * stride) as usize;
                let from = at(block)..at(block) + bytes as usize;
                let to = at(BLOCKS - 1 - block);
                expected[to..to + bytes as usize].copy_from_slice(&before[from]);
            }
        }
        let mut found = vec![0_u8; expected.len()];
        memory.read_at(0, &mut found).unwrap();
        assert!(found == expected, "by {method:?}");
    }
}

pub fn what_does_not_fit_is_refused(driver: &Driver) {
    let memory = Arc::new(Buffer::near(driver, 0, 1 << 16).unwrap());
    let over = |parts: Vec<u64>, stride, part_bytes| {
        let parts = parts.into_iter().map(|at| (memory.clone(), at)).collect();
        GpuPages::over(parts, stride, part_bytes)
    };
    assert!(is_refused(over(vec![], 16, 16)));
    assert!(is_refused(over(vec![0], 15, 16)));
    assert!(is_refused(over(vec![0], 16, 0)));
    assert!(is_refused(over(vec![65_521], 16, 16)));
    assert!(is_refused(over(vec![u64::MAX], 16, 16)));
    for (base, stride, part_bytes, blocks) in [
        (4096, u64::MAX, 16, 3),
        (4096, 16, 16, 0),
        (u64::MAX - 15, 16, 16, 2),
        (u64::MAX - 15, 16, 17, 1),
    ] {
        // SAFETY: nothing is copied.
        let raw = unsafe { GpuPages::from_raw(vec![DevicePtr(base)], stride, part_bytes, blocks) };
        assert!(is_refused(raw), "{base} {stride} {part_bytes} {blocks}");
    }
    let tier = tier(driver, 4, 32);
    let stream = egmem::Stream::new(driver, 0).unwrap();
    let store = tier.prepare_store(&keys(0..1)).unwrap();
    let gpu = over(vec![0], 16, 16).unwrap();
    let pairs = store.pairs(&[0]).unwrap();
    assert!(is_refused(tier.store(&stream, &pairs, &gpu)), "half a page");
    assert!(is_refused(store.pairs(&[0, 1])));
    assert!(is_refused(store.view(1)));
}
