//! Caches of several GPUs that have a part of each page.

use egmem::Driver;
use egmem::driver::Call;
use egmem::kv::{CopyMethod, Error, GpuPages, PageId, Tier};
use egmem::memory::Memory;

use crate::kv::borders::{BYTES, MIB, chunked};
use crate::kv::copies::{expect_unsupported, is_refused};
use crate::kv::drivers;
use crate::kv::setup::{Cache, keys, tier};

const METHODS: [CopyMethod; 4] = [
    CopyMethod::Auto,
    CopyMethod::KERNEL,
    CopyMethod::Batch,
    CopyMethod::Loop,
];

/// A rank: its cache, and where in each page its part lies.
struct Rank {
    cache: Cache,
    gpu: GpuPages,
    at: u64,
}

impl Rank {
    fn new(cache: Cache, at: u64) -> Self {
        let gpu = cache.pages.clone().at(at);
        Self { cache, gpu, at }
    }

    /// Stores block `n` of the cache in page `n`.
    fn store(&self, tier: &Tier, method: CopyMethod, pairs: &[(PageId, u64)]) -> Result<(), Error> {
        let job = tier.store_by(method, &self.cache.stream, pairs, &self.gpu)?;
        assert_eq!(job.bytes(), pairs.len() as u64 * self.gpu.block_bytes());
        job.wait()
    }

    /// Returns a block: its parts side by side, out of the bytes of each part.
    fn block(&self, parts: &[Vec<u8>], block: u64) -> Vec<u8> {
        let shape = self.gpu.shape(0).unwrap();
        let at = (block * shape.stride) as usize;
        let parts = parts.iter();
        parts
            .flat_map(|part| &part[at..at + shape.bytes as usize])
            .copied()
            .collect()
    }
}

/// Two GPUs, or one twice, store and load parts of the same pages, with a gap between them.
pub fn ranks_share_pages(driver: &Driver) {
    share_pages(driver);
}

#[test]
fn ranks_of_several_gpus_share_pages() {
    share_pages(&drivers::grace());
}

fn share_pages(driver: &Driver) {
    const PAGES: u64 = 2100; // more than a kernel's first launch takes
    let mut random = fastrand::Rng::new();
    println!("seed {}", random.get_seed());
    let last = 1.min(driver.device_count().unwrap() - 1);
    let page_bytes = 96 + 32 + 160;
    let tier = tier(driver, PAGES, page_bytes);
    let ranks = [
        Rank::new(Cache::on(driver, 0, 2, PAGES, (64, 48)), 0),
        Rank::new(Cache::on(driver, last, 5, PAGES, (32, 32)), 128),
    ];
    let all = keys(0..PAGES);
    let blocks: Vec<u64> = (0..PAGES).collect();
    for method in METHODS {
        tier.remove(&all).unwrap();
        let before = [0, 1].map(|rank: usize| ranks[rank].cache.randomise(&mut random));
        let mut store = tier.prepare_store(&all).unwrap();
        for index in 0..all.len() {
            store.view(index).unwrap().fill(0, page_bytes, 7).unwrap();
        }
        let pairs = store.pairs(&blocks).unwrap();
        if let Err(error) = ranks[1].store(&tier, method, &pairs) {
            expect_unsupported(method, &ranks[1].cache.stream, 32, &error);
            continue;
        }
        ranks[0].store(&tier, method, &pairs).unwrap();
        store.commit().unwrap();

        let load = tier.prepare_load(&all).unwrap();
        let mut page = vec![0_u8; page_bytes as usize];
        for index in 0..PAGES {
            let view = load.view(index as usize).unwrap();
            view.read_at(0, &mut page).unwrap();
            let expected = [0, 1].map(|rank: usize| ranks[rank].block(&before[rank], index));
            let expected = [&expected[0][..], &[7; 32], &expected[1]].concat();
            assert!(page == expected, "page {index} by {method:?}");
        }
        let back: Vec<u64> = blocks.iter().rev().copied().collect();
        let pairs = load.pairs(&back).unwrap();
        for (rank, before) in ranks.iter().zip(&before) {
            rank.cache.randomise(&mut random);
            let stream = &rank.cache.stream;
            let job = tier.load_by(method, stream, &pairs, &rank.gpu);
            job.unwrap().wait().unwrap();
            let parts = rank.gpu.parts();
            let after: Vec<Vec<u8>> = (0..parts).map(|part| rank.cache.read(part)).collect();
            for block in 0..PAGES {
                let expected = rank.block(before, PAGES - 1 - block);
                let is = rank.block(&after, block) == expected;
                assert!(is, "block {block} at {} by {method:?}", rank.at);
            }
        }
    }
}

/// Halves of pages, some of which have a border inside.
pub fn parts_of_pages_lie_over_borders(driver: &Driver) {
    const HALF: u64 = BYTES / 2;
    let memory = chunked(driver, 16 * MIB);
    let tier = Tier::attach(memory.clone()).page_bytes(BYTES).pages(5);
    let tier = tier.open().unwrap();
    let ranks = [0, HALF].map(|at| Rank::new(Cache::new(driver, 1, 5, (HALF, HALF)), at));
    let all = keys(0..5);
    let single = || driver.sim().map(|sim| sim.count(Call::MemcpyAsync));
    for method in [CopyMethod::Loop, CopyMethod::Batch] {
        tier.remove(&all).unwrap();
        let mut store = tier.prepare_store(&all).unwrap();
        let pairs = store.pairs(&[0, 1, 2, 3, 4]).unwrap();
        for (seed, rank) in (3..).zip(&ranks) {
            let before = rank.cache.randomise(&mut fastrand::Rng::with_seed(seed));
            let earlier = single();
            rank.store(&tier, method, &pairs).unwrap();
            let has_border = |&&page: &&PageId| {
                let start = tier.page_ptr(page).unwrap().0 - memory.device_ptr().0 + rank.at;
                start / (4 * MIB) != (start + HALF - 1) / (4 * MIB)
            };
            let cut = store.pages().iter().filter(has_border).count() as u64;
            if method == CopyMethod::Loop {
                assert_eq!(single(), earlier.map(|earlier| earlier + 5 + cut));
            }
            for index in 0..5 {
                let mut bytes = vec![0; HALF as usize];
                let view = store.view(index as usize).unwrap();
                view.read_at(rank.at, &mut bytes).unwrap();
                assert!(bytes == rank.block(&before, index), "{method:?} {index}");
            }
        }
        store.commit().unwrap();
    }
}

pub fn a_block_lies_in_its_page(driver: &Driver) {
    let cache = Cache::new(driver, 1, 8, (32, 16));
    let tier = tier(driver, 4, 48);
    let mut store = tier.prepare_store(&keys(0..2)).unwrap();
    let pairs = store.pairs(&[0, 1]).unwrap();
    let copy = |gpu: &GpuPages| tier.store(&cache.stream, &pairs, gpu);
    assert!(is_refused(copy(&cache.pages)), "a block is not a page");
    for at in [33, 48, u64::MAX - 15, u64::MAX] {
        assert!(is_refused(copy(&cache.pages.clone().at(at))), "{at}");
    }
    for at in [0, 7, 32] {
        copy(&cache.pages.clone().at(at)).unwrap().wait().unwrap();
    }
    store.commit().unwrap();
    assert_eq!((tier.stats().pinned, tier.stats().stored_bytes), (0, 96));
}
