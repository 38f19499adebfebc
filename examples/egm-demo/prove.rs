//! The proofs: memory of every path on every node, seen by the CPU and by every GPU.

use egmem::driver::{Driver, Location, NodeId, PoolApi};
use egmem::proof::Prover;
use egmem::{Backing, Buffer, Pool, PoolBuffer, Result, Stream};
use indicatif::ProgressBar;

use super::report::{Path, Proof};

/// The proofs to make.
pub struct Plan<'a> {
    pub driver: &'a Driver,
    pub nodes: &'a [NodeId],
    pub gpus: &'a [i32],
    pub bytes: u64,
}

impl Plan<'_> {
    /// Steps that `prove` advances its progress bar by.
    pub fn steps(&self) -> u64 {
        (self.nodes.len() * self.gpus.len() * self.ways().len()) as u64
    }

    /// All paths, and the pool through each API that there is.
    fn ways(&self) -> Vec<(Path, PoolApi)> {
        let paths = [Path::Vmm, Path::Registered, Path::Pool];
        let mut ways = Vec::from(paths.map(|path| (path, PoolApi::Driver)));
        if self.runtime().is_ok() {
            ways.push((Path::Pool, PoolApi::Runtime));
        }
        ways
    }

    /// Returns whether there is a runtime API to prove: its library does not come with the driver.
    pub fn runtime(&self) -> Result<()> {
        self.driver.pools(PoolApi::Runtime).map(drop)
    }

    /// Proves every pair of node and GPU by every path.
    pub fn prove(&self, progress: &ProgressBar) -> Vec<Proof> {
        // One for each GPU, or why it has none.
        let provers: Vec<(i32, Result<Prover>)> = self
            .gpus
            .iter()
            .map(|&gpu| (gpu, Prover::new(self.driver, gpu)))
            .collect();
        let mut proofs = Vec::new();
        for &node in self.nodes {
            for (path, api) in self.ways() {
                // One memory that every GPU is granted; each proof overwrites it anew. Where the
                // grant fails for all together, each GPU tries alone, so that the reason stands
                // beside the one that it belongs to.
                let shared =
                    HostMemory::allocate(self.driver, node, path, api, self.gpus, self.bytes);
                for (gpu, prover) in &provers {
                    progress.set_message(format!("proof: node {node}, GPU {gpu}"));
                    let outcome = match (prover, &shared) {
                        (Err(error), _) => Err(error.clone()),
                        (Ok(prover), Ok(memory)) => self.prove_one(memory, node, prover),
                        (Ok(prover), Err(_)) => {
                            HostMemory::allocate(self.driver, node, path, api, &[*gpu], self.bytes)
                                .and_then(|memory| self.prove_one(&memory, node, prover))
                        }
                    };
                    proofs.push(Proof::new(node.0, *gpu, path, api_name(path, api), outcome));
                    progress.inc(1);
                }
            }
        }
        proofs
    }

    fn prove_one(&self, memory: &HostMemory, node: NodeId, prover: &Prover) -> Result<()> {
        // Another pattern for each pair, so that bytes left by an earlier proof are wrong.
        let seed = (node.0 as u64) << 32 ^ (prover.stream().device() as u64 + 1) << 8;
        memory.prove(prover, seed)
    }

    /// Whether plain `cudaMallocAsync` draws from a host pool once that is the GPU's current pool.
    pub fn malloc_async(&self) -> Vec<Proof> {
        if self.runtime().is_err() {
            return Vec::new();
        }
        let mut proofs = Vec::new();
        for &node in self.nodes {
            for &gpu in self.gpus {
                let outcome = self.malloc_async_on(node, gpu);
                proofs.push(Proof::new(node.0, gpu, Path::Pool, "runtime", outcome));
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

/// The API's name; VMM and registration exist in the driver API alone.
fn api_name(path: Path, api: PoolApi) -> &'static str {
    match (path, api) {
        (Path::Pool, PoolApi::Runtime) => "runtime",
        _ => "driver",
    }
}

/// Memory on a host node, granted to the CPU and to GPUs.
enum HostMemory {
    Buffer(Buffer),
    Pool(PoolBuffer),
}

impl HostMemory {
    fn allocate(
        driver: &Driver,
        node: NodeId,
        path: Path,
        api: PoolApi,
        gpus: &[i32],
        bytes: u64,
    ) -> Result<Self> {
        let access = gpus.iter().map(|&gpu| Location::Device(gpu));
        match path {
            Path::Vmm => Buffer::on(node)
                .access_by(access)
                .bytes(bytes)
                .allocate(driver)
                .map(Self::Buffer),
            // It is open to every GPU, or to none.
            Path::Registered => Buffer::on(node)
                .backing(Backing::Registered)
                .bytes(bytes)
                .allocate(driver)
                .map(Self::Buffer),
            Path::Pool => {
                let pool = Pool::options(node)
                    .access_by(access)
                    .api(api)
                    .create(driver)?;
                let stream = Stream::new(driver, gpus.first().copied().unwrap_or(0))?;
                let buffer = pool.allocate(bytes, &stream)?;
                // From here on the memory is there for every stream.
                stream.synchronize()?;
                Ok(Self::Pool(buffer))
            }
        }
    }

    fn prove(&self, prover: &Prover, seed: u64) -> Result<()> {
        match self {
            Self::Buffer(buffer) => prover.prove(buffer, &buffer.cpu()?, seed),
            Self::Pool(buffer) => prover.prove(buffer, &buffer.cpu()?, seed),
        }
    }
}
