//! The report of memory and its owners, over all processes of a user.

use std::collections::{BTreeMap, HashSet};

use egmem_share::{BootId, Identity};
use serde::{Deserialize, Serialize};

use crate::ask::{Silent, processes};
use crate::driver::{Driver, Location};
use crate::entries::{AllocPath, Allocation, Party};
use crate::holders::Holders;
use crate::parts::{self, NodeUse, Part};
use crate::topology::{GpuUuid, Topology};
use crate::{Ledger, MemoryResult, Process, drawn_once, procs, source};

/// A GPU's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GpuUse {
    /// The GPU's ordinal.
    pub gpu: i32,
    /// All of its memory in bytes. `None`: the driver does not say, and [`why`](Self::why) has the reason.
    pub total: Option<u64>,
    /// The bytes in use, as the driver reports it: `cuMemGetInfo`. `None`: the driver does not say, for instance because
    /// the GPU has no memory left for a context.
    pub used: Option<u64>,
    /// The bytes in the ledgers, managed memory apart.
    pub accounted: u64,
    /// The bytes of managed memory that were allocated for this GPU. They take room where they were touched last.
    #[serde(default)]
    pub managed: u64,
    /// The bytes in use that no ledger accounts for: contexts (also that of the asking process), other libraries, other
    /// users, memory that pools hold and have not allocated, and pages of managed memory. `None` where `used` is.
    pub unaccounted: Option<u64>,
    /// The driver's error, where it did not say something.
    pub why: Option<String>,
}

/// A process that has imported memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Importer {
    /// The process.
    pub process: Process,
    /// Its name for the memory.
    pub label: Option<String>,
}

/// The state of the process that exported memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Exporter {
    /// It has ended: its importers alone keep the memory.
    Ended(Party),
    /// It runs and offers no ledger, or no longer has the memory.
    Running(Party),
    /// It is on another machine, or on this one before its last boot.
    Elsewhere(Option<Party>),
    /// Nothing tells which process it was.
    Unknown(Option<Party>),
}

/// Memory that importers keep and that is in no ledger as a process's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Kept {
    /// The memory, as its exporter named it.
    pub identity: Identity,
    /// Where it lies.
    pub location: Location,
    /// Its size in bytes.
    pub bytes: u64,
    /// The process that exported it.
    pub exporter: Exporter,
    /// The processes that have it mapped or hold a handle.
    pub importers: Vec<Importer>,
}

/// The ledgers of all processes of a user that offer theirs, beside the machine's own figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// The processes, by their ids.
    pub processes: Vec<Ledger>,
    /// Processes that did not answer.
    pub silent: Vec<Silent>,
    /// GPUs; none without a driver.
    pub gpus: Vec<GpuUse>,
    /// Host nodes.
    pub nodes: Vec<NodeUse>,
    /// Imported memory that no process has as its own.
    pub kept: Vec<Kept>,
    /// The driver's errors that are no single GPU's: GPUs or nodes are missing for these reasons.
    pub warnings: Vec<String>,
    /// All processes that may hold memory, with a ledger or without. `None`: the machine is simulated.
    #[serde(default)]
    pub holders: Option<Holders>,
    /// The memory in use on nodes and GPUs, by cause. None if the machine is simulated.
    #[serde(default)]
    pub parts: Vec<Part>,
}

impl Report {
    /// Asks all processes of this user that offer their ledgers, this one, and the machine; without a driver, the host's nodes alone.
    ///
    /// Errors of the driver hide nothing else: they are in [`GpuUse::why`] and [`Report::warnings`].
    ///
    /// Of a real machine it looks at all other processes as well ([`Holders`]), as far as this one may.
    ///
    /// Source: `cuDeviceTotalMem`; `cuMemGetInfo`, which makes a context on each GPU; `/sys/devices/system/node`; `/proc`;
    /// with the feature `nvml` NVML's lists of processes.
    pub fn gather(driver: Option<&Driver>) -> Self {
        let (mut processes, silent) = processes();
        add_own(&mut processes, Ledger::of_this_process());
        let mut report = Self::of(processes, silent, driver);
        if !driver.is_some_and(Driver::is_simulated) {
            report.look_at_holders(driver);
        }
        report
    }

    /// Adds the processes without ledgers, and divides the memory in use up.
    fn look_at_holders(&mut self, driver: Option<&Driver>) {
        let host = Topology::of_host();
        let only = self.nodes.len() == 1;
        let holders = Holders::gather(&self.processes, !only);
        for node in &self.nodes {
            if let Some(counts) = host.counts(node.node) {
                let parts = parts::of_node(node, &counts, only, &holders, &self.processes);
                self.parts.extend(parts);
            }
        }
        for gpu in &self.gpus {
            let uuid = driver.and_then(|driver| uuid(driver, gpu.gpu));
            self.parts
                .extend(parts::of_gpu(gpu, uuid.as_deref(), &holders));
        }
        self.holders = Some(holders);
    }

    /// As [`gather`](Self::gather), of ledgers that were asked for before.
    pub(crate) fn of(processes: Vec<Ledger>, silent: Vec<Silent>, driver: Option<&Driver>) -> Self {
        let name = driver.map_or("cuda", |driver| driver.name());
        let sums = Sums::of(&processes, name);
        let mut warnings = Vec::new();
        Self {
            gpus: driver.map_or_else(Vec::new, |driver| gpus(driver, &sums, &mut warnings)),
            nodes: nodes(driver, &sums, &mut warnings),
            kept: kept(&processes),
            processes,
            silent,
            warnings,
            holders: None,
            parts: Vec::new(),
        }
    }
}

/// Returns a GPU's UUID, as NVML has it.
fn uuid(driver: &Driver, gpu: i32) -> Option<String> {
    let bytes = driver.device_uuid(gpu).ok()?;
    let name = driver.device_name(gpu).ok()?;
    Some(GpuUuid::of_device(bytes, &name).to_string())
}

/// Adds this process's ledger to those in the order of their processes' numbers, unless it is empty: it need not be offered to others.
pub(crate) fn add_own(processes: &mut Vec<Ledger>, own: Ledger) {
    let (pid, instance) = (own.process.pid, own.process.instance);
    processes.retain(|ledger| (ledger.process.pid, ledger.process.instance) != (pid, instance));
    if !own.allocations.is_empty() {
        let before = processes.partition_point(|ledger| ledger.process.pid <= pid);
        processes.insert(before, own);
    }
}

/// The bytes that the ledgers have at each location, each byte once.
struct Sums(BTreeMap<(Location, AllocPath), u64>);

impl Sums {
    /// Sums the memory of one driver up.
    fn of(processes: &[Ledger], driver: &str) -> Self {
        let mut sums = Self(BTreeMap::new());
        for (_, entry) in drawn_once(processes).filter(|(_, entry)| entry.driver == driver) {
            sums.add(entry.location, entry.room_path(), entry.bytes);
        }
        // Entries that were not sent are in a process's own sums.
        for ledger in processes.iter().filter(|ledger| ledger.omitted > 0) {
            for total in ledger.totals.iter().filter(|total| total.driver == driver) {
                let own = total.by_path.iter().filter(|(path, _)| !path.is_import());
                for (&path, &bytes) in own {
                    let sent = ledger.allocations.iter().filter(|entry| {
                        let place = (entry.path, entry.location);
                        place == (path, total.location) && entry.driver == driver
                    });
                    let sent = sent.fold(0_u64, |sum, entry| sum.saturating_add(entry.bytes));
                    sums.add(total.location, path, bytes.saturating_sub(sent));
                }
            }
        }
        sums
    }

    fn add(&mut self, location: Location, path: AllocPath, bytes: u64) {
        let sum = self.0.entry((location, path)).or_default();
        *sum = sum.saturating_add(bytes);
    }

    /// Returns the bytes that take room at a location.
    fn accounted(&self, location: Location) -> u64 {
        let at = self.0.iter().filter(|((at, _), _)| *at == location);
        let at = at.filter(|((_, path), _)| path.takes_room());
        at.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Returns the bytes of one path at a location: of managed memory, those that were allocated for the GPU.
    fn by_path(&self, location: Location, path: AllocPath) -> u64 {
        self.0.get(&(location, path)).copied().unwrap_or(0)
    }

    /// Returns the bytes of host memory that are on no node that the driver tells, but for those that the kernel counts:
    /// of a real machine pinned memory is shared pages without a file.
    fn unplaced(&self, is_simulated: bool) -> u64 {
        let host = Location::Host;
        let pinned = self.by_path(host, AllocPath::Pinned);
        let counted = if is_simulated { 0 } else { pinned };
        self.accounted(host).saturating_sub(counted)
    }
}

fn gpus(driver: &Driver, sums: &Sums, warnings: &mut Vec<String>) -> Vec<GpuUse> {
    let count = driver.device_count().unwrap_or_else(|error| {
        warnings.push(format!("GPUs are not shown: {error}"));
        0
    });
    let gpu = |gpu| {
        let mut why = None;
        let accounted = sums.accounted(Location::Device(gpu));
        // The total needs no context, for which a full GPU has no memory.
        let total = noted(driver.device_total_mem(gpu), &mut why);
        let info = noted(driver.mem_info(gpu), &mut why);
        let used = info.map(|(free, total)| total.saturating_sub(free));
        GpuUse {
            gpu,
            total,
            used,
            accounted,
            managed: sums.by_path(Location::Device(gpu), AllocPath::Managed),
            unaccounted: used.map(|used| used.saturating_sub(accounted)),
            why,
        }
    };
    (0..count).map(gpu).collect()
}

/// Returns the value, or keeps the error's text.
fn noted<T>(result: MemoryResult<T>, why: &mut Option<String>) -> Option<T> {
    result.map_err(|error| *why = Some(error.to_string())).ok()
}

fn nodes(driver: Option<&Driver>, sums: &Sums, warnings: &mut Vec<String>) -> Vec<NodeUse> {
    let is_simulated = driver.is_some_and(Driver::is_simulated);
    let topology = match driver.map(Topology::discover) {
        None => Topology::of_host(),
        Some(Ok(topology)) => topology,
        Some(Err(error)) => {
            warnings.push(format!("the driver does not tell the topology: {error}"));
            // A simulated machine's nodes are not this host's.
            if is_simulated {
                return Vec::new();
            }
            Topology::of_host()
        }
    };
    // With one node, it is on that.
    let unplaced = match topology.nodes().len() {
        1 => sums.unplaced(is_simulated),
        _ => 0,
    };
    let uses = topology.nodes().iter().map(|node| {
        let counts = topology.counts(node.id);
        let free = counts.map_or(node.memory_free, |counts| Some(counts.free));
        // The kernel counts registered memory, which is the process's own. No kernel counts that of a simulated machine.
        let registered = sums.by_path(node.id.into(), AllocPath::Registered);
        let registered = (is_simulated && registered > 0).then_some(registered);
        let kernel = counts.map_or(registered, |counts| Some(counts.ordinary));
        let total = node.memory_total;
        let accounted = sums.accounted(node.id.into()).saturating_add(unplaced);
        let used = total.saturating_sub(free.unwrap_or(total));
        let explained = accounted.saturating_add(kernel.unwrap_or(0));
        // Where the kernel does not report its own use, the rest says nothing on a real machine.
        let is_known = free.is_some() && (is_simulated || kernel.is_some());
        NodeUse {
            node: node.id,
            total,
            used,
            kernel,
            accounted,
            unaccounted: is_known.then(|| used.saturating_sub(explained)),
        }
    });
    uses.collect()
}

/// Returns imported memory that no process has as its own.
fn kept(processes: &[Ledger]) -> Vec<Kept> {
    let all = || processes.iter().flat_map(|ledger| &ledger.allocations);
    let own = all().filter(|entry| !entry.path.is_import());
    let own: HashSet<Identity> = own.filter_map(|entry| entry.identity).collect();
    let mut kept: Vec<Kept> = Vec::new();
    for ledger in processes {
        for entry in &ledger.allocations {
            let Some(identity) = source(entry).filter(|identity| !own.contains(identity)) else {
                continue;
            };
            let importer = Importer {
                process: ledger.process.clone(),
                label: entry.label.clone(),
            };
            match kept.iter_mut().find(|known| known.identity == identity) {
                Some(known) => known.importers.push(importer),
                None => kept.push(Kept {
                    identity,
                    location: entry.location,
                    bytes: entry.bytes,
                    exporter: exporter(processes, entry, &identity),
                    importers: vec![importer],
                }),
            }
        }
    }
    kept
}

/// Finds out the state of the exporter of an imported entry.
fn exporter(processes: &[Ledger], entry: &Allocation, identity: &Identity) -> Exporter {
    let from = entry.imported.as_ref();
    let from = from.and_then(|imported| imported.from.clone());
    if BootId::current().is_ok_and(|boot| boot != identity.boot) {
        return Exporter::Elsewhere(from);
    }
    let is_of = |ledger: &&Ledger| ledger.process.instance == Some(identity.instance);
    if let Some(ledger) = processes.iter().find(is_of) {
        return Exporter::Running(Party {
            pid: Some(ledger.process.pid),
            name: ledger.process.name.clone(),
        });
    }
    let party = match from {
        Some(party) if party.pid.is_some() => party,
        from => return Exporter::Unknown(from),
    };
    // A process that is younger than the import has the id of the one that has ended.
    match party.pid.and_then(procs::age_ms) {
        Some(age) if age.saturating_add(1000) >= entry.age_ms => Exporter::Running(party),
        _ => Exporter::Ended(party),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_memory_of_a_real_machine_is_the_kernels() {
        let mut sums = Sums(BTreeMap::new());
        for (path, bytes) in [
            (AllocPath::Pinned, 5),
            (AllocPath::Vmm, 2),
            (AllocPath::System, 9),
        ] {
            sums.add(Location::Host, path, bytes);
        }
        assert_eq!((sums.unplaced(true), sums.unplaced(false)), (7, 2));
    }
}
