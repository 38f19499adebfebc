//! The child's side of a survey: makes one part of it, and says each row when it is there.
//!
//! So the parent keeps the rows of a child that crashes or hangs afterwards.

use std::collections::BTreeMap;
use std::time::Instant;

use egmem_core::proof::{check_pattern, write_pattern};
use egmem_core::vmm::{MappedRange, PhysicalMemory};
use serde::{Deserialize, Serialize};

use crate::driver::{AccessDesc, HandleType, HandleTypes, Location, NodeId, PoolApi};
use crate::measure::{
    BandwidthRow, Fabric, Figure, HostMemory, Kind, Part, Pinned, Placed, Problem, Proof, Proofs,
    Rates, Step, Taken,
};
use crate::{Driver, Error, Prover, Result, Topology};

/// A part to make, for these GPUs.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ask {
    pub(crate) part: Part,
    pub(crate) gpus: Vec<i32>,
}

/// What a child says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Said {
    Row(serde_json::Value),
    Problem(Problem),
    End,
}

/// The bytes that parts use: on GPUs, and on the simulator, whose memory this machine's CPU writes.
const PROOF: [u64; 2] = [64 << 20, 256 << 10];
const COPY: [u64; 2] = [256 << 20, 256 << 10];
const WORD: [u64; 2] = [8, 8];
const PIN: [u64; 2] = [4 << 30, 4 << 20];
const PLACE: [u64; 2] = [1 << 30, 4 << 20];

/// How often each figure of bandwidth and latency is measured.
const REPEATS: u32 = 9;

/// The share of a node's free memory that a part takes at most.
const SHARE: u64 = 4;

/// A unit of allocation.
const UNIT: u64 = 2 << 20;

impl Ask {
    /// Makes the part. An error of a node and GPU is said, and ends no other's work.
    pub(crate) fn answer(
        &self,
        driver: &Driver,
        say: &mut dyn FnMut(Said) -> Result<()>,
    ) -> Result<()> {
        let topology = match Topology::discover(driver) {
            Ok(topology) => topology,
            Err(error) => return say(Said::Problem(Problem::new((None, None), "topology", error))),
        };
        let work = Work {
            driver,
            topology: &topology,
            gpus: &self.gpus,
        };
        for node in topology.node_ids() {
            match self.part {
                Part::Proofs => work.pairs(node, say, |gpu, _| Ok(work.proofs(node, gpu)))?,
                Part::Bandwidth => work.pairs(node, say, |gpu, tell| {
                    let measure = |rates: Rates<'_>| Ok(rates.measure(tell)?.rows);
                    work.rates((node, gpu), COPY, measure)
                })?,
                Part::Latency => work.pairs(node, say, |gpu, tell| {
                    work.rates((node, gpu), WORD, |rates| rates.latency(tell))
                })?,
                Part::Pinning => work.kinds(node, say, |kind| work.pin(node, kind))?,
                Part::Placement => work.kinds(node, say, |kind| work.place(node, kind))?,
                Part::Fabric => work.pairs(node, say, |gpu, _| {
                    work.fabric(node, gpu)?;
                    Ok(vec![Fabric { node: node.0, gpu }])
                })?,
            }
        }
        Ok(())
    }
}

struct Work<'a> {
    driver: &'a Driver,
    topology: &'a Topology,
    gpus: &'a [i32],
}

impl Work<'_> {
    /// Has `work` make the rows of each GPU.
    fn pairs<R: Serialize>(
        &self,
        node: NodeId,
        say: &mut dyn FnMut(Said) -> Result<()>,
        mut work: impl FnMut(i32, &mut dyn FnMut(Step<'_>)) -> Result<Vec<R>>,
    ) -> Result<()> {
        for &gpu in self.gpus {
            let mut problems = Vec::new();
            let at = (Some(node.0), Some(gpu));
            let rows = work(gpu, &mut |step| {
                if let Step::Without(what, error) = step {
                    problems.push(Problem::new(at, what, error));
                }
            });
            match rows {
                Ok(rows) => rows.iter().try_for_each(|row| say(as_row(row)?))?,
                Err(error) => problems.push(Problem::new(at, "", error)),
            }
            problems
                .into_iter()
                .map(Said::Problem)
                .try_for_each(&mut *say)?;
        }
        Ok(())
    }

    /// Has `work` make a row of each kind of memory.
    fn kinds<R: Serialize>(
        &self,
        node: NodeId,
        say: &mut dyn FnMut(Said) -> Result<()>,
        work: impl Fn(Kind) -> Result<R>,
    ) -> Result<()> {
        for kind in [Kind::Registered, Kind::Vmm] {
            // The first call makes contexts, which take time and memory, and tries registration.
            let warm = self.allocate(node, kind, UNIT).map(drop);
            say(match warm.and_then(|()| work(kind)) {
                Ok(row) => as_row(&row)?,
                Err(error) => Said::Problem(Problem::new((Some(node.0), None), kind.name(), error)),
            })?;
        }
        Ok(())
    }

    /// Returns the size for this driver, within the node's share.
    fn bytes(&self, node: NodeId, [real, simulated]: [u64; 2]) -> u64 {
        if self.driver.is_simulated() {
            return simulated;
        }
        let free = self.topology.free_memory(node).ok().flatten();
        let most = free.map_or(u64::MAX, |free| free / SHARE / UNIT * UNIT);
        real.min(most).max(UNIT.min(real))
    }

    fn figure<R>(&self, figure: R) -> Figure<R> {
        if self.driver.is_simulated() {
            return Figure::Simulated;
        }
        Figure::Measured(figure)
    }

    fn proofs(&self, node: NodeId, gpu: i32) -> Vec<Proof> {
        let proofs = Proofs {
            driver: self.driver,
            nodes: &[node],
            gpus: &[gpu],
            bytes: self.bytes(node, PROOF),
        };
        proofs.prove(&mut |_| ())
    }

    fn rates(
        &self,
        (node, gpu): (NodeId, i32),
        bytes: [u64; 2],
        measure: impl FnOnce(Rates<'_>) -> Result<Vec<BandwidthRow>>,
    ) -> Result<Vec<BandwidthRow<Figure>>> {
        // Memory of all kinds is there at once.
        let kinds = Kind::ALL.len() as u64;
        let bytes = (self.bytes(node, bytes.map(|bytes| kinds * bytes)) / kinds) & !7;
        let is_simulated = self.driver.is_simulated();
        let repeats = if is_simulated { 1 } else { REPEATS };
        let rows = measure(Rates {
            driver: self.driver,
            topology: self.topology,
            nodes: &[node],
            gpus: &[gpu],
            bytes,
            repeats,
        })?;
        let figures = |row: BandwidthRow| {
            let figures = row.rates().map(|rate| Some(self.figure(rate?)));
            BandwidthRow::new((row.node, row.gpu, row.memory), figures)
        };
        Ok(rows.into_iter().map(figures).collect())
    }

    fn allocate(&self, node: NodeId, kind: Kind, bytes: u64) -> Result<HostMemory> {
        HostMemory::allocate(self.driver, (node, kind, PoolApi::Driver), self.gpus, bytes)
    }

    fn pin(&self, node: NodeId, kind: Kind) -> Result<Pinned> {
        let bytes = self.bytes(node, PIN);
        let began = Instant::now();
        let memory = self.allocate(node, kind, bytes)?;
        let allocate = began.elapsed().as_secs_f64();
        let began = Instant::now();
        drop(memory);
        Ok(Pinned {
            node: node.0,
            backing: kind,
            bytes,
            allocate_s: self.figure(allocate),
            release_s: self.figure(began.elapsed().as_secs_f64()),
        })
    }

    /// Allocates memory, and looks which nodes have less free memory then.
    fn place(&self, node: NodeId, kind: Kind) -> Result<Placed> {
        let bytes = self.bytes(node, PLACE);
        let before = self.free();
        let memory = self.allocate(node, kind, bytes)?;
        let after = self.free();
        drop(memory);
        let taken = before.iter().filter_map(|(&node, &before)| {
            let bytes = before.saturating_sub(*after.get(&node)?);
            Some(Taken { node, bytes })
        });
        Ok(Placed::new(node.0, kind, bytes, taken.collect()))
    }

    /// Returns the free memory of each node, those of GPUs' memory too, as far as it is known.
    fn free(&self) -> BTreeMap<i32, u64> {
        let gpus = self.topology.gpus().iter();
        let own = gpus.filter_map(|gpu| gpu.memory_node);
        let nodes = self.topology.node_ids().into_iter().chain(own);
        let free = |node: NodeId| match self.topology.counts(node) {
            Some(counts) => Some(counts.free),
            None => self.topology.free_memory(node).ok().flatten(),
        };
        nodes
            .filter_map(|node| Some((node.0, free(node)?)))
            .collect()
    }

    /// Makes memory with a fabric handle, imports it by the handle, and proves that both are the same memory.
    fn fabric(&self, node: NodeId, gpu: i32) -> Result<()> {
        let options = PhysicalMemory::options(node).handle_types(HandleTypes::FABRIC);
        let memory = options.create(self.driver, UNIT)?;
        let bytes = memory.size().padded();
        let handle = memory.export(HandleType::Fabric)?;
        let import = PhysicalMemory::import(self.driver, &handle, bytes)?;
        let access = [Location::Host, Location::Device(gpu)].map(AccessDesc::read_write);
        let own = MappedRange::map(self.driver, vec![memory], &access)?;
        let imported = MappedRange::map(self.driver, vec![import], &access)?;
        let seed = 0x6661_6272_6963;
        write_pattern(&own.first().cpu()?, seed)?;
        Prover::new(self.driver, gpu)?.check_rewrite(imported.first(), seed, !seed)?;
        check_pattern(&own.first().cpu()?, !seed)
    }
}

fn as_row(row: &impl Serialize) -> Result<Said> {
    let value = serde_json::to_value(row);
    let value = value.map_err(|error| Error::invalid("row", error.to_string()))?;
    Ok(Said::Row(value))
}

#[cfg(all(test, feature = "simulator"))]
mod tests {
    use egmem_core::Machine;
    use egmem_core::driver::{Call, Code};

    use super::*;

    const PARTS: [Part; 6] = [
        Part::Proofs,
        Part::Bandwidth,
        Part::Latency,
        Part::Pinning,
        Part::Placement,
        Part::Fabric,
    ];

    /// Makes a part for two GPUs, and returns its rows and the failures in it: problems, and proofs that did not hold.
    fn made(driver: &Driver, part: Part) -> (usize, Vec<String>) {
        let (mut rows, mut failures) = (0, Vec::new());
        let gpus = vec![0, 1];
        let ask = Ask { part, gpus };
        ask.answer(driver, &mut |said| {
            match said {
                Said::Row(row) if row["verified"] == false => failures.push(row.to_string()),
                Said::Row(_) => rows += 1,
                Said::Problem(problem) => failures.push(problem.reason.to_string()),
                Said::End => {}
            }
            Ok(())
        })
        .unwrap();
        (rows, failures)
    }

    #[test]
    fn a_refused_call_costs_its_own_row_alone() {
        for part in PARTS {
            let whole = made(&Driver::simulated(Machine::gb200()).unwrap(), part);
            assert_eq!(whole.1, [""; 0], "{part}");
            let driver = Driver::simulated(Machine::gb200()).unwrap();
            let sim = driver.sim().unwrap();
            // The proof tries a second time, with the GPU alone.
            for nth in 1..=2 {
                sim.fail(Call::MemCreate, nth, Code::NOT_SUPPORTED);
            }
            let (rows, failures) = made(&driver, part);
            let refused = |failure: &String| failure.contains("cuMemCreate");
            assert!(failures.iter().any(refused), "{part}: {failures:?}");
            // Bandwidth and latency have a row for each kind of memory.
            assert_eq!(rows + failures.len(), whole.0, "{part}: {failures:?}");
            assert_eq!(sim.held().to_string(), "nothing", "{part}");
        }
    }

    #[test]
    fn a_gpu_that_cannot_run_kernels_leaves_the_others() {
        for part in [Part::Proofs, Part::Bandwidth, Part::Latency, Part::Fabric] {
            let driver = Driver::simulated(Machine::gb200()).unwrap();
            let sim = driver.sim().unwrap();
            sim.fail(Call::ModuleLoadData, 1, Code::INVALID_PTX);
            let (rows, failures) = made(&driver, part);
            assert!(rows > 0 && !failures.is_empty(), "{part}: {failures:?}");
            assert_eq!(sim.held().to_string(), "nothing", "{part}");
        }
    }
}
