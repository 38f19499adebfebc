//! The proofs: memory of every path on every node, seen by the CPU and by every GPU.

use super::{HostMemory, Kind, Proof, Step};
use crate::driver::{Location, NodeId, PoolApi};
use crate::{Driver, Pool, Prover, Result};

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
