//! egmem's ledger over processes: whose memory it is, as tables and drawings.
//!
//! The entries themselves are made in [`egmem_core::ledger`], with the values that own memory. This crate sums them up,
//! offers them to other processes of the same user, and asks those for theirs.
//!
//! Programs depend on the crate `egmem`, which re-exports the items that they need.
#![deny(missing_docs)]

mod ask;
#[cfg(all(test, not(miri)))]
#[path = "../../tests/support/fork.rs"]
mod fork_check;
mod holders;
mod offer;
mod parts;
mod procs;
mod report;
mod shown;
#[cfg(test)]
mod tests;
mod text;

pub use ask::{Silent, processes};
pub use holders::{Holder, Holders, MAX_HOLDERS, NvmlGpu, NvmlProcess, OnGpu, Why};
pub use offer::{LEAKS, MAX_TEXT, Offer, PS, offer, report_leaks_at_exit};
pub use parts::{Cause, NodeUse, Part};
pub use report::{Exporter, GpuUse, Importer, Kept, Report};

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::de::IntoDeserializer;
use serde::de::value::StringDeserializer;
use serde::{Deserialize, Deserializer, Serialize};

use egmem_core::ledger as entries;
use egmem_core::{
    Error as MemoryError, Result as MemoryResult, driver, fork, report as writers, size,
    text as texts, topology, vmm,
};
use egmem_share::{Error, Result};

use driver::{Driver, Location};
use entries::{AllocPath, Allocation, MappedAt, TierUse};
use vmm::identity::{Identity, InstanceId};

/// A process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Process {
    /// Its process id, in its own PID namespace.
    pub pid: u32,
    /// The name of its program, as the kernel has it: at most 15 bytes.
    pub name: String,
    /// Its program and arguments, joined by blanks: at most 200 bytes. Empty if the kernel does not tell. Like the name it is
    /// shown to processes of the same user, who may read it in `/proc` anyway.
    #[serde(default)]
    pub command: String,
    /// The process as exporter of memory. `None`: the kernel has no random bytes.
    pub instance: Option<InstanceId>,
}

impl Process {
    /// Returns this process.
    pub fn current() -> Self {
        let pid = std::process::id();
        Self {
            pid,
            name: procs::name(pid).unwrap_or_default(),
            command: procs::command(pid).unwrap_or_default(),
            instance: InstanceId::current().ok(),
        }
    }

    /// Returns the command line, or else the program's name.
    pub fn title(&self) -> &str {
        procs::title(&self.command, &self.name)
    }
}

/// The sum of a process's allocations at one location.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Total {
    /// The driver: `"cuda"`, `"simulated"`, or a backend's own name.
    pub driver: String,
    /// The node or GPU.
    pub location: Location,
    /// The number of allocations.
    pub allocations: u64,
    /// The bytes that this process allocated, managed memory apart.
    pub own: u64,
    /// The bytes of managed memory that this process allocated for this GPU. They take room where they were touched last:
    /// in this GPU's memory, another's, the CPU's, or nowhere.
    #[serde(default)]
    pub managed: u64,
    /// The bytes that it has imported: another process has allocated them.
    pub imported: u64,
    /// The bytes by path, own, managed and imported.
    #[serde(deserialize_with = "added_up")]
    pub by_path: BTreeMap<AllocPath, u64>,
}

/// Reads sums by path. Several paths of a newer version are one here.
fn added_up<'de, D: Deserializer<'de>>(
    from: D,
) -> std::result::Result<BTreeMap<AllocPath, u64>, D::Error> {
    let named = HashMap::<String, u64>::deserialize(from)?;
    let mut sums = BTreeMap::new();
    for (name, bytes) in named {
        let name: StringDeserializer<D::Error> = name.into_deserializer();
        let sum: &mut u64 = sums.entry(AllocPath::deserialize(name)?).or_default();
        *sum = sum.saturating_add(bytes);
    }
    Ok(sums)
}

/// The allocations of one process.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::ledger::Ledger;
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let buffer = Buffer::on(NodeId(0)).bytes(3 << 20).label("weights").allocate(&driver)?;
/// let ledger = Ledger::of(&driver);
/// assert_eq!(ledger.totals[0].own, 4 << 20);
/// assert!(ledger.to_text().contains("weights"));
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Ledger {
    /// The process.
    pub process: Process,
    /// Sums by driver and location, of all allocations.
    pub totals: Vec<Total>,
    /// The live allocations, the oldest first.
    pub allocations: Vec<Allocation>,
    /// How many allocations are in the sums alone, because a ledger that is sent is bounded.
    pub omitted: u64,
    /// The KV-cache tiers that the process has open, the oldest first: at most [`MAX_TIERS`](egmem_core::ledger::MAX_TIERS).
    #[serde(default)]
    pub tiers: Vec<TierUse>,
}

impl Ledger {
    /// Returns this process's allocations of `driver`.
    pub fn of(driver: &Driver) -> Self {
        Self::from_parts(entries::allocations(driver), entries::tiers(driver))
    }

    /// Returns this process's allocations of all drivers.
    pub fn of_this_process() -> Self {
        Self::from_parts(entries::all_allocations(), entries::all_tiers())
    }

    fn from_parts(allocations: Vec<Allocation>, mut tiers: Vec<TierUse>) -> Self {
        for tier in &mut tiers {
            let has_tier = |at: &MappedAt| at.offset_of(tier.address).is_some();
            let mut entries = allocations.iter();
            let memory = entries.find(|entry| entry.mapped.iter().any(has_tier));
            tier.label = memory.and_then(|entry| entry.label.clone());
        }
        Self {
            process: Process::current(),
            totals: totals(&allocations),
            allocations,
            omitted: 0,
            tiers,
        }
    }
}

/// Sums allocations up, by driver and location.
fn totals(allocations: &[Allocation]) -> Vec<Total> {
    let mut totals = BTreeMap::new();
    for entry in allocations {
        let key = (&entry.driver, entry.location);
        let total = totals.entry(key).or_insert_with(|| Total {
            driver: entry.driver.clone(),
            location: entry.location,
            allocations: 0,
            own: 0,
            managed: 0,
            imported: 0,
            by_path: BTreeMap::new(),
        });
        total.allocations += 1;
        let sum = match entry.path {
            AllocPath::Managed => &mut total.managed,
            path if path.is_import() => &mut total.imported,
            _ => &mut total.own,
        };
        *sum = sum.saturating_add(entry.bytes);
        let sum = total.by_path.entry(entry.path).or_default();
        *sum = sum.saturating_add(entry.bytes);
    }
    totals.into_values().collect()
}

/// Returns the entries without repetition: an import is left out if a ledger has the memory as its own, or if another
/// import of it came before. An import without identity may be any of that, and is left out.
pub(crate) fn drawn_once(ledgers: &[Ledger]) -> impl Iterator<Item = (&Ledger, &Allocation)> {
    let entries = ledgers
        .iter()
        .flat_map(|ledger| ledger.allocations.iter().map(move |entry| (ledger, entry)));
    let own = entries.clone().filter(|(_, entry)| !entry.path.is_import());
    let mut seen: HashSet<Identity> = own.filter_map(|(_, entry)| entry.identity).collect();
    entries.filter(move |(_, entry)| {
        !entry.path.is_import() || source(entry).is_some_and(|identity| seen.insert(identity))
    })
}

/// Returns the identity of imported memory.
pub(crate) fn source(entry: &Allocation) -> Option<Identity> {
    entry.imported.as_ref()?.identity
}
