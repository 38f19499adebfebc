//! Tiers, keys and caches for tests.

use std::sync::Arc;

use egmem::driver::NodeId;
use egmem::kv::{GpuPages, Key, Tier};
use egmem::pinned::DeviceMemory;
use egmem::{Buffer, Driver, Stream};

use crate::kv::drivers::node_of;

/// A key of a number.
pub fn key(number: u64) -> Key {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Key::new(bytes)
}

/// Keys of a range of numbers.
pub fn keys(numbers: std::ops::Range<u64>) -> Vec<Key> {
    numbers.map(key).collect()
}

/// A tier on the host node of GPU 0.
pub fn tier(driver: &Driver, pages: u64, page_bytes: u64) -> Tier {
    tier_of(driver, 0, pages, page_bytes)
}

/// A tier on the host node of a GPU.
pub fn tier_of(driver: &Driver, gpu: i32, pages: u64, page_bytes: u64) -> Tier {
    let node: NodeId = node_of(driver, gpu);
    let options = Tier::on(node).pages(pages).page_bytes(page_bytes);
    options.create(driver).unwrap()
}

/// Makes keys ready, with nothing in their pages.
pub fn store_nothing(tier: &Tier, keys: &[Key]) {
    tier.prepare_store(keys).unwrap().commit().unwrap();
}

/// A cache in GPU 0's memory, of `parts` tensors of `blocks` blocks each, and a stage of the same size for the CPU.
pub struct Cache {
    parts: Vec<(Arc<DeviceMemory>, u64)>,
    stage: Arc<Buffer>,
    pub stream: Stream,
    pub pages: GpuPages,
}

impl Cache {
    pub fn new(driver: &Driver, parts: u64, blocks: u64, sizes: (u64, u64)) -> Self {
        Self::on(driver, 0, parts, blocks, sizes)
    }

    /// A cache in another GPU's memory.
    pub fn on(
        driver: &Driver,
        gpu: i32,
        parts: u64,
        blocks: u64,
        (stride, part_bytes): (u64, u64),
    ) -> Self {
        let bytes = blocks * stride;
        let memory = || Arc::new(DeviceMemory::new(driver, gpu, bytes).unwrap());
        let parts: Vec<_> = (0..parts).map(|_| (memory(), 0)).collect();
        let cache = Self {
            pages: GpuPages::over(parts.clone(), stride, part_bytes).unwrap(),
            stage: Arc::new(Buffer::near(driver, gpu, bytes).unwrap()),
            stream: Stream::new(driver, gpu).unwrap(),
            parts,
        };
        assert_eq!(cache.pages.blocks(), blocks);
        cache
    }

    /// Writes a part.
    pub fn write(&self, part: usize, bytes: &[u8]) {
        self.stage.write_at(0, bytes).unwrap();
        let (memory, _) = &self.parts[part];
        let len = bytes.len() as u64;
        self.stream.copy(memory, 0, &self.stage, 0, len).unwrap();
    }

    /// Reads a part.
    pub fn read(&self, part: usize) -> Vec<u8> {
        let (memory, _) = &self.parts[part];
        let len = self.stage.len();
        self.stream.copy(&self.stage, 0, memory, 0, len).unwrap();
        let mut bytes = vec![0; len as usize];
        self.stage.read_at(0, &mut bytes).unwrap();
        bytes
    }

    /// Fills every part with random bytes. Returns them.
    pub fn randomise(&self, random: &mut fastrand::Rng) -> Vec<Vec<u8>> {
        let fill = |part| {
            let mut bytes = vec![0; self.stage.len() as usize];
            random.fill(&mut bytes);
            self.write(part, &bytes);
            bytes
        };
        (0..self.parts.len()).map(fill).collect()
    }
}

/// Returns whether an emulator runs this. A tier's owner is distinguished from later processes by its start time, and
/// an emulator has another one in each thread's `/proc/self/stat`. A sanitizer's runner is no emulator.
pub fn is_emulated() -> bool {
    let is_set = |name| std::env::var_os(name).is_some();
    is_set("EGMEM_TEST_RUNNER") && !is_set("EGMEM_SANITIZER")
}
