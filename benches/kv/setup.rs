//! A tier and a cache to copy between.

use std::sync::Arc;

use egmem::driver::NodeId;
use egmem::kv::{CopyMethod, GpuPages, Job, Key, Load, PageId, Tier};
use egmem::pinned::DeviceMemory;
use egmem::{Backing, Driver, Stream, Topology};

use crate::Result;

/// A key of a number.
pub fn key(number: u64) -> Key {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Key::new(bytes)
}

/// The host node of GPU 0.
pub fn node(driver: &Driver) -> Result<NodeId> {
    Ok(Topology::discover(driver)?.gpu(0)?.host_node()?)
}

/// The bytes of the tier and of the cache, and those of one job.
pub fn sizes(driver: &Driver) -> (u64, u64) {
    match driver.is_simulated() {
        true => (16 << 20, 4 << 20),
        false => (2 << 30, 512 << 20),
    }
}

/// The most jobs beside each other.
pub const MOST: usize = 4;

/// From pages to the GPU, or back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    ToGpu,
    ToTier,
}

pub struct Setup {
    pub tier: Tier,
    pub stream: Stream,
    /// For jobs beside each other.
    more: Vec<Stream>,
    gpu: GpuPages,
    pages: Load,
    count: usize,
}

impl Setup {
    /// Pages of `page_bytes` in `parts` tensors.
    pub fn new(driver: &Driver, page_bytes: u64, parts: u64) -> Result<Self> {
        Self::with_backing(driver, page_bytes, parts, Backing::Auto)
    }

    pub fn with_backing(
        driver: &Driver,
        page_bytes: u64,
        parts: u64,
        backing: Backing,
    ) -> Result<Self> {
        let (bytes, job) = sizes(driver);
        let pages = bytes / page_bytes;
        let part_bytes = page_bytes / parts;
        let tensor =
            || DeviceMemory::new(driver, 0, pages * part_bytes).map(|tensor| (Arc::new(tensor), 0));
        let tensors = (0..parts)
            .map(|_| tensor())
            .collect::<egmem::Result<Vec<_>>>()?;
        let tier = Tier::on(node(driver)?).pages(pages).page_bytes(page_bytes);
        let tier = tier.backing(backing).create(driver)?;
        let keys: Vec<Key> = (0..pages).map(key).collect();
        tier.prepare_store(&keys)?.commit()?;
        Ok(Self {
            gpu: GpuPages::over(tensors, part_bytes, part_bytes)?,
            stream: Stream::new(driver, 0)?,
            more: (1..MOST)
                .map(|_| Stream::new(driver, 0))
                .collect::<egmem::Result<_>>()?,
            pages: tier.prepare_load(&keys)?,
            tier,
            count: (job / page_bytes) as usize,
        })
    }

    /// The bytes of a job.
    pub fn bytes(&self) -> u64 {
        self.count as u64 * self.tier.page_bytes()
    }

    /// Starts a job. `pairs` of a job to the tier have pages of a store.
    pub fn begin(
        &self,
        what: (Way, CopyMethod),
        pairs: &[(PageId, u64)],
    ) -> egmem::kv::Result<Job> {
        self.begin_on(&self.stream, what, pairs)
    }

    /// Starts a job as several ones, each on a stream of its own: at most [`MOST`].
    pub fn begin_split(
        &self,
        what: (Way, CopyMethod),
        jobs: usize,
        pairs: &[(PageId, u64)],
    ) -> egmem::kv::Result<Vec<Job>> {
        let streams = std::iter::once(&self.stream).chain(&self.more);
        let parts = pairs.chunks(pairs.len().div_ceil(jobs));
        let jobs = streams.zip(parts);
        jobs.map(|(stream, pairs)| self.begin_on(stream, what, pairs))
            .collect()
    }

    fn begin_on(
        &self,
        stream: &Stream,
        (way, method): (Way, CopyMethod),
        pairs: &[(PageId, u64)],
    ) -> egmem::kv::Result<Job> {
        match way {
            Way::ToGpu => self.tier.load_by(method, stream, pairs, &self.gpu),
            Way::ToTier => self.tier.store_by(method, stream, pairs, &self.gpu),
        }
    }

    /// Random pages that the tier has, with random blocks.
    pub fn loads(&self, random: &mut fastrand::Rng) -> Vec<(PageId, u64)> {
        let mut pages = self.pages.pages().to_vec();
        self.random_pairs(&mut pages, random)
    }

    /// Random ones of `pages` with random blocks.
    pub fn random_pairs(
        &self,
        pages: &mut [PageId],
        random: &mut fastrand::Rng,
    ) -> Vec<(PageId, u64)> {
        let mut blocks: Vec<u64> = (0..self.gpu.blocks()).collect();
        random.shuffle(pages);
        random.shuffle(&mut blocks);
        pages.iter().copied().zip(blocks).take(self.count).collect()
    }

    /// Lets all pages be written: frees them, and takes them for a store.
    pub fn into_writable(self) -> Result<(Self, egmem::kv::Store)> {
        let keys: Vec<Key> = (0..u64::from(self.tier.pages())).map(key).collect();
        let Self {
            tier,
            stream,
            more,
            gpu,
            pages,
            count,
        } = self;
        drop(pages);
        tier.remove(&keys)?;
        let store = tier.prepare_store(&keys)?;
        let pages = tier.prepare_load(&[])?;
        Ok((
            Self {
                tier,
                stream,
                more,
                gpu,
                pages,
                count,
            },
            store,
        ))
    }
}

/// The median.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
