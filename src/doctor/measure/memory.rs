//! The kinds of host memory that are proved and measured, and the proofs: memory of every path on every node, seen by the CPU
//! and by every GPU.

use serde::{Deserialize, Serialize};

use super::{Proof, Step};
use crate::driver::{DeviceAttribute, DevicePtr, Location, NodeId, PoolApi};
use crate::{
    Backing, Buffer, Driver, Error, Memory, PinnedHost, Pool, PoolBuffer, Prover, Result, Stream,
};

/// How memory was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A buffer of the driver's memory.
    Vmm,
    /// A buffer of registered pages.
    Registered,
    /// A pool's allocation.
    Pool,
    /// The driver's pinned memory, without a node of the caller's choice.
    #[serde(rename = "cudaHostAlloc")]
    HostAlloc,
    /// Memory from `malloc`.
    Pageable,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 5] = [
        Self::Vmm,
        Self::Registered,
        Self::Pool,
        Self::HostAlloc,
        Self::Pageable,
    ];

    /// Returns its name, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vmm => "vmm",
            Self::Registered => "registered",
            Self::Pool => "pool",
            Self::HostAlloc => "cudaHostAlloc",
            Self::Pageable => "pageable",
        }
    }
}

/// Host memory of one kind, open to the CPU and to GPUs.
#[derive(Debug)]
pub(crate) enum HostMemory {
    /// [`Kind::Vmm`] or [`Kind::Registered`].
    Buffer(Buffer),
    /// [`Kind::Pool`].
    Pool(PoolBuffer),
    /// [`Kind::HostAlloc`].
    HostAlloc(PinnedHost),
    /// [`Kind::Pageable`].
    Pageable(Pageable),
}

impl HostMemory {
    /// Allocates `bytes` on a node, granted to `gpus`; the last two kinds are where the driver or this thread places them.
    /// A pool is one of `api`.
    ///
    /// # Errors
    /// Those of the allocation; [`Error::InvalidArgument`] for no GPU.
    pub(crate) fn allocate(
        driver: &Driver,
        (node, kind, api): (NodeId, Kind, PoolApi),
        gpus: &[i32],
        bytes: u64,
    ) -> Result<Self> {
        let access = gpus.iter().map(|&gpu| Location::Device(gpu));
        let first = gpus.first().copied();
        let first = first.ok_or_else(|| Error::invalid("GPUs", "there are none"))?;
        let buffer = Buffer::on(node).bytes(bytes);
        match kind {
            Kind::Vmm => buffer.access_by(access).allocate(driver).map(Self::Buffer),
            // It is open to every GPU, or to none.
            Kind::Registered => {
                let buffer = buffer.backing(Backing::Registered);
                buffer.allocate(driver).map(Self::Buffer)
            }
            Kind::Pool => {
                let pool = Pool::options(node).access_by(access).api(api);
                let stream = Stream::new(driver, first)?;
                let buffer = pool.create(driver)?.allocate(bytes, &stream)?;
                // From here on the memory is there for every stream.
                stream.synchronize()?;
                Ok(Self::Pool(buffer))
            }
            Kind::HostAlloc => PinnedHost::new(driver, first, bytes).map(Self::HostAlloc),
            Kind::Pageable => Pageable::new(driver, bytes).map(Self::Pageable),
        }
    }

    /// Proves that the CPU and the prover's GPU see the same bytes; see [`Prover::prove`].
    ///
    /// # Errors
    /// Those of [`Prover::prove`]; [`Error::InvalidArgument`] for pageable memory.
    fn prove(&self, prover: &Prover, seed: u64) -> Result<()> {
        match self {
            Self::Buffer(buffer) => prover.prove(buffer, &buffer.cpu()?, seed),
            Self::Pool(buffer) => prover.prove(buffer, &buffer.cpu()?, seed),
            Self::HostAlloc(memory) => prover.prove(memory, &memory.cpu(), seed),
            Self::Pageable(_) => Err(Error::invalid("memory", "pageable memory has no proof")),
        }
    }

    /// Returns the address of its first byte.
    pub(super) fn start(&self) -> DevicePtr {
        match self {
            Self::Buffer(buffer) => buffer.device_ptr(),
            Self::Pool(buffer) => buffer.device_ptr(),
            Self::HostAlloc(memory) => memory.device_ptr(),
            Self::Pageable(memory) => memory.start,
        }
    }

    /// Returns the offset and the length of the copies that make one of `bytes`: the driver copies registered memory within
    /// one registration alone, so the library makes a copy for each, and so does this.
    pub(super) fn copies(&self, bytes: u64) -> Vec<(u64, u64)> {
        match self {
            Self::Buffer(buffer) if buffer.backing().backing == Backing::Registered => {
                let chunks = buffer.mappings().iter().map(|mapping| mapping.range());
                chunks
                    .take_while(|range| range.start < bytes)
                    .map(|range| (range.start, range.end.min(bytes) - range.start))
                    .collect()
            }
            _ => vec![(0, bytes)],
        }
    }

    /// Returns whether a GPU's kernels can use it: pageable memory they reach on coherent machines, and with HMM.
    pub(super) fn reached_by_kernels_of(&self, gpu: i32) -> Result<bool> {
        match self {
            Self::Pageable(memory) => {
                let reaches = DeviceAttribute::PAGEABLE_MEMORY_ACCESS;
                Ok(memory.driver.device_attribute(gpu, reaches)? == 1)
            }
            _ => Ok(true),
        }
    }
}

/// A page of the least size.
#[derive(Clone, Debug)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "GPUs alone read it")] [u8; 4096]);

/// Memory from `malloc`, touched by the thread that allocates it. The measurement waits for the work that uses it.
#[derive(Debug)]
pub(crate) struct Pageable {
    driver: Driver,
    start: DevicePtr,
    _pages: Vec<Page>,
}

impl Pageable {
    fn new(driver: &Driver, bytes: u64) -> Result<Self> {
        let count = bytes.div_ceil(size_of::<Page>() as u64);
        let mut pages = Vec::new();
        pages.try_reserve_exact(count as usize).map_err(|error| {
            let why = format!("{bytes} bytes: {error}");
            Error::failed("allocating pageable memory", why)
        })?;
        // The first touch puts it on this thread's node.
        pages.resize(count as usize, Page([1; 4096]));
        Ok(Self {
            driver: driver.clone(),
            start: DevicePtr(pages.as_mut_ptr().expose_provenance() as u64),
            _pages: pages,
        })
    }
}

/// The proofs to make.
#[derive(Clone, Copy, Debug)]
pub struct Proofs<'a> {
    /// The driver.
    pub driver: &'a Driver,
    /// The nodes that memory is allocated on.
    pub nodes: &'a [NodeId],
    /// The ordinals of the GPUs that take part.
    pub gpus: &'a [i32],
    /// The bytes of each allocation.
    pub bytes: u64,
}

impl Proofs<'_> {
    /// Returns how often [`prove`](Self::prove) tells [`Step::Done`].
    pub fn steps(&self) -> u64 {
        (self.nodes.len() * self.gpus.len() * self.ways().len()) as u64
    }

    /// All paths, and the pool through each API that there is.
    fn ways(&self) -> Vec<(Kind, PoolApi)> {
        let paths = [Kind::Vmm, Kind::Registered, Kind::Pool];
        let mut ways = Vec::from(paths.map(|path| (path, PoolApi::Driver)));
        if self.runtime().is_ok() {
            ways.push((Kind::Pool, PoolApi::Runtime));
        }
        ways
    }

    /// Checks whether there is a runtime API to prove: its library does not come with the driver.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn runtime(&self) -> Result<()> {
        self.driver.pools(PoolApi::Runtime).map(drop)
    }

    /// Proves every pair of node and GPU by every path.
    pub fn prove(&self, progress: &mut dyn FnMut(Step<'_>)) -> Vec<Proof> {
        // One for each GPU, or why it has none.
        let prover = |&gpu: &i32| (gpu, Prover::new(self.driver, gpu));
        let provers: Vec<(i32, Result<Prover>)> = self.gpus.iter().map(prover).collect();
        let mut proofs = Vec::new();
        for &node in self.nodes {
            for (path, api) in self.ways() {
                // One memory that every GPU is granted; each proof overwrites it anew. Where the
                // grant fails for all together, each GPU tries alone, so that the reason stands
                // beside the one that it belongs to.
                let allocate = |gpus: &[i32]| {
                    HostMemory::allocate(self.driver, (node, path, api), gpus, self.bytes)
                };
                let shared = allocate(self.gpus);
                for (gpu, prover) in &provers {
                    progress(Step::Doing(&format!("proof: node {node}, GPU {gpu}")));
                    let outcome = match (prover, &shared) {
                        (Err(error), _) => Err(error.clone()),
                        (Ok(prover), Ok(memory)) => prove_one(memory, node, prover),
                        (Ok(prover), Err(_)) => {
                            allocate(&[*gpu]).and_then(|memory| prove_one(&memory, node, prover))
                        }
                    };
                    proofs.push(Proof::new(node, *gpu, (path, api_name(path, api)), outcome));
                    progress(Step::Done);
                }
            }
        }
        proofs
    }

    /// Proves whether plain `cudaMallocAsync` draws from a host pool once that is the GPU's current pool.
    pub fn malloc_async(&self) -> Vec<Proof> {
        if self.runtime().is_err() {
            return Vec::new();
        }
        let mut proofs = Vec::new();
        for &node in self.nodes {
            for &gpu in self.gpus {
                let outcome = self.malloc_async_on(node, gpu);
                proofs.push(Proof::new(node, gpu, (Kind::Pool, "runtime"), outcome));
            }
        }
        proofs
    }

    fn malloc_async_on(&self, node: NodeId, gpu: i32) -> Result<()> {
        let pool = Pool::options(node)
            .access_by([Location::Device(gpu)])
            .api(PoolApi::Runtime)
            .create(self.driver)?;
        let current = pool.make_current(gpu)?;
        let prover = Prover::new(self.driver, gpu)?;
        let buffer = current.allocate(self.bytes, prover.stream())?;
        prover.prove(&buffer, &buffer.cpu()?, 0xa5)
    }
}

fn prove_one(memory: &HostMemory, node: NodeId, prover: &Prover) -> Result<()> {
    // Another pattern for each pair, so that bytes left by an earlier proof are wrong.
    let seed = (node.0 as u64) << 32 ^ (prover.stream().device() as u64 + 1) << 8;
    memory.prove(prover, seed)
}

/// Returns the API's name; VMM and registration exist in the driver API alone.
fn api_name(path: Kind, api: PoolApi) -> &'static str {
    match (path, api) {
        (Kind::Pool, PoolApi::Runtime) => "runtime",
        _ => "driver",
    }
}
