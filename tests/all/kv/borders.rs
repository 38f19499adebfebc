//! Memory of several allocations: no copy goes over a border.

use std::sync::Arc;

use egmem::driver::{Access, Call, DevicePtr, Location, NodeId};
use egmem::kv::{CopyMethod, Error, GpuPages, Tier};
use egmem::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory};
use egmem::shapes::Growable;
use egmem::{Buffer, Driver, Growth, Heap, Stream};

use crate::kv::setup::{Cache, keys, tier};

pub const MIB: u64 = 1 << 20;
/// Of pages and blocks.
pub const BYTES: u64 = 3 * MIB - 64;

/// Memory in chunks of 4 MiB.
pub fn chunked(driver: &Driver, bytes: u64) -> Arc<Buffer> {
    let growth = Growth::steady().chunk(4 * MIB);
    let node: NodeId = crate::kv::drivers::node(driver);
    let buffer = Buffer::on(node).growth(growth).bytes(bytes);
    Arc::new(buffer.allocate(driver).unwrap())
}

/// Pages and blocks of 3 MiB less 64 bytes over borders at each 4 MiB, in a tier of its own and in an attached one.
pub fn pages_and_blocks_lie_over_borders(driver: &Driver) {
    let growth = Growth::steady().chunk(4 * MIB);
    let node: NodeId = crate::kv::drivers::node(driver);
    let own = Tier::on(node).pages(5).page_bytes(BYTES).growth(growth);
    let attached = || Tier::attach(chunked(driver, 16 * MIB)).page_bytes(BYTES);
    let cache = Cache::new(driver, 1, 5, (BYTES, BYTES));
    let single = || driver.sim().map(|sim| sim.count(Call::MemcpyAsync));
    for method in [CopyMethod::Loop, CopyMethod::Batch] {
        for tier in [
            own.clone().create(driver).unwrap(),
            attached().pages(5).open().unwrap(),
        ] {
            let before = cache.randomise(&mut fastrand::Rng::with_seed(7));
            let earlier = single();
            store(&tier, method, &cache.stream, &cache.pages);
            if method == CopyMethod::Loop {
                // Of the 15 MiB from 8 KiB on, borders are inside of three pages.
                assert_eq!(single(), earlier.map(|earlier| earlier + 5 + 3));
            }
            cache.randomise(&mut fastrand::Rng::with_seed(8));
            load(&tier, method, &cache.stream, &cache.pages);
            assert!(cache.read(0) == before[0], "{method:?}");

            // The blocks too: three of them have a border inside, at other places than the pages'. They are in host
            // memory, as the pages are; a batch of such copies was not tried on CUDA.
            if method == CopyMethod::Batch && !driver.is_simulated() {
                continue;
            }
            let blocks = chunked(driver, 16 * MIB);
            let pages = GpuPages::over(vec![(Arc::clone(&blocks), 0)], BYTES, BYTES).unwrap();
            let earlier = single();
            load(&tier, method, &cache.stream, &pages);
            if method == CopyMethod::Loop {
                assert_eq!(single(), earlier.map(|earlier| earlier + 5 + 3 + 3));
            }
            let mut bytes = vec![0; before[0].len()];
            blocks.read_at(0, &mut bytes).unwrap();
            assert!(bytes == before[0], "{method:?}");
        }
    }
}

/// As PyTorch's expandable segments: the driver reports the borders of allocations, once for each of them.
pub fn blocks_of_other_code_lie_over_borders(driver: &Driver) {
    let blocks = Buffer::on(Location::Device(0)).chunk(4 * MIB);
    let blocks = Arc::new(blocks.bytes(16 * MIB).allocate(driver).unwrap());
    let all = [4 * MIB, 8 * MIB, 12 * MIB];
    assert_eq!(borders(&*blocks), Some(all.to_vec()));
    let count = |call| driver.sim().map(|sim| sim.count(call));
    let tier = tier(driver, 5, BYTES);
    let cache = Cache::new(driver, 1, 5, (BYTES, BYTES));
    let before = cache.randomise(&mut fastrand::Rng::with_seed(7));
    store(&tier, CopyMethod::Loop, &cache.stream, &cache.pages);
    // SAFETY: the buffer has the five blocks, and lives until the jobs have ended; nothing else uses it.
    let raw = unsafe { GpuPages::from_raw(vec![blocks.device_ptr()], BYTES, BYTES, 5).unwrap() };
    let raw = raw.keeping(Arc::clone(&blocks));
    load(&tier, CopyMethod::Loop, &cache.stream, &raw);
    let earlier = [Call::MemGetAddressRange, Call::MemcpyAsync].map(count);
    for method in [CopyMethod::Batch, CopyMethod::Batch, CopyMethod::Loop] {
        load(&tier, method, &cache.stream, &raw);
    }
    let later = [Call::MemGetAddressRange, Call::MemcpyAsync].map(count);
    let more = [0, 1].map(|at| {
        later[at]
            .zip(earlier[at])
            .map(|(later, earlier)| later - earlier)
    });
    // Borders are inside of three blocks.
    assert!(
        more == [Some(4), Some(5 + 3)] || more == [None, None],
        "{more:?}"
    );
    cache.randomise(&mut fastrand::Rng::with_seed(8));
    store(&tier, CopyMethod::Batch, &cache.stream, &raw);
    load(&tier, CopyMethod::Loop, &cache.stream, &cache.pages);
    assert!(cache.read(0) == before[0]);
}

/// Stores blocks 0 to 4.
fn store(tier: &Tier, method: CopyMethod, stream: &Stream, gpu: &GpuPages) {
    tier.remove(&keys(0..5)).unwrap();
    let mut store = tier.prepare_store(&keys(0..5)).unwrap();
    let pairs = store.pairs(&[0, 1, 2, 3, 4]).unwrap();
    let job = tier.store_by(method, stream, &pairs, gpu);
    job.unwrap().wait().unwrap();
    store.commit().unwrap();
}

fn load(tier: &Tier, method: CopyMethod, stream: &Stream, gpu: &GpuPages) {
    let load = tier.prepare_load(&keys(0..5)).unwrap();
    let pairs = load.pairs(&[0, 1, 2, 3, 4]).unwrap();
    let job = tier.load_by(method, stream, &pairs, gpu);
    job.unwrap().wait().unwrap();
}

/// Returns where `memory` continues in another mapping; `None` if it does not report that.
fn borders(memory: &impl Memory) -> Option<Vec<u64>> {
    let (mut borders, mut at) = (Vec::new(), 0);
    while at < memory.len() {
        at += memory.of_one_mapping(at, memory.len() - at)?;
        borders.push(at);
    }
    assert_eq!(borders.pop(), Some(memory.len()));
    Some(borders)
}

#[test]
fn each_memory_knows_its_borders() {
    let driver = crate::kv::drivers::grace();
    let buffer = chunked(&driver, 10 * MIB);
    assert_eq!(borders(&*buffer), Some(vec![4 * MIB, 8 * MIB]));
    assert_eq!(borders(&Arc::clone(&buffer)), borders(&*buffer));
    let heap = Heap::on(NodeId(0)).chunk(4 * MIB).build(&driver).unwrap();
    let layout = |bytes| std::alloc::Layout::from_size_align(bytes, 256).unwrap();
    let small = heap.allocate(layout(4096)).unwrap();
    assert_eq!(borders(&small), Some(vec![]));
    let large = heap.allocate(layout(10 << 20)).unwrap();
    let found = borders(&large).unwrap();
    let apart = found.windows(2).all(|two| two[1] - two[0] == 4 * MIB);
    let (first, last) = (found[0], found[found.len() - 1]);
    assert!(
        apart && first <= 4 * MIB && last + 4 * MIB >= 10 * MIB,
        "{found:?}"
    );
    let growable = Growable::<u8>::on(NodeId(0)).max_len(64 << 20);
    let mut growable = growable.create(&driver).unwrap();
    growable.extend_from_slice(&[1; 10 << 20]).unwrap();
    growable.extend_from_slice(&[1; 10 << 20]).unwrap();
    let borders = borders(&growable).unwrap();
    assert_eq!(borders.len(), growable.chunks() - 1);
    assert!(
        borders
            .iter()
            .all(|border| (2 * MIB..20 * MIB).contains(border))
    );
}

/// Memory that does not report its borders.
struct Unknown(Buffer);

// SAFETY: the buffer answers, and lives as long.
unsafe impl AccessChecks for Unknown {
    fn gpu_access(&self, gpu: i32, engine: Engine, at: u64, len: u64) -> egmem::Result<Access> {
        self.0.gpu_access(gpu, engine, at, len)
    }
}

impl Memory for Unknown {
    fn driver(&self) -> &Driver {
        self.0.driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        self.0.device_ptr()
    }
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn location(&self) -> Location {
        self.0.location()
    }
}

impl CpuMemory for Unknown {
    fn cpu(&self) -> egmem::Result<CpuView<'_>> {
        self.0.cpu()
    }
}

/// No batch is made where it may go over a border.
#[test]
fn unknown_borders_are_copied_one_by_one() {
    let driver = crate::kv::drivers::grace();
    let memory = || Arc::new(Unknown(Buffer::near(&driver, 0, 16 * MIB).unwrap()));
    let cache = Cache::new(&driver, 1, 5, (BYTES, BYTES));
    let unknown = GpuPages::over(vec![(memory(), 0)], BYTES, BYTES).unwrap();
    let attached = Tier::attach(memory()).page_bytes(BYTES).pages(5);
    let batches = || driver.sim().unwrap().count(Call::MemcpyBatchAsync);
    for (tier, pages) in [
        (attached.open().unwrap(), &cache.pages),
        (tier(&driver, 5, BYTES), &unknown),
    ] {
        store(&tier, CopyMethod::Auto, &cache.stream, pages);
        assert_eq!(batches(), 0);
        let load = tier.prepare_load(&keys(0..1)).unwrap();
        let pairs = load.pairs(&[0]).unwrap();
        let batch = tier.load_by(CopyMethod::Batch, &cache.stream, &pairs, pages);
        let is_refused = matches!(batch, Err(Error::UnusableMethod { .. }));
        assert!(is_refused, "{batch:?}");
        assert_eq!(batches(), 0);
    }
}
