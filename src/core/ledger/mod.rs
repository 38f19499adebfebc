//! The ledger: every live allocation of this process.
//!
//! The values that own memory (physical memory, a pool's buffer, pinned memory) have an [`Entry`] each, which exists
//! exactly as long as the memory does in this process: a mapping keeps the entry of the physical memory that it maps.
//! Nothing else makes or removes entries. A heap's chunks have entries, its blocks have none, so allocating from a heap
//! costs nothing here.
//!
//! # Design
//! `core/ledger/` has an entry for each live allocation. An entry is made and removed in one place, the type `Entry`, which the
//! value that owns the memory holds: physical memory and its mappings share one, since the driver keeps the memory until the
//! last of them is gone; a pool's allocation, pinned memory and device memory have one each. So the entries are made in
//! `core`, where these types are, and the ledger cannot miss memory or show memory that is gone. A release that the driver
//! refuses leaves its entry, marked as lost. An entry holds values and no reference to the memory.
//!
//! An entry's line is a `Site` (`core/ledger/site.rs`): a Rust caller, or what a binding gives by `called_from` for the
//! calls of a thread. It is read once, where the program calls, and carried from there by options and by the heap,
//! because memory may follow later and in other threads.
//!
//! Ranges of addresses are removed from an entry before they are given back, because the driver may hand them to another
//! thread at once. So ranges in the ledger never overlap (`tests/all/ledger/overlap.rs`).
//!
//! All entries are in one table under one lock, which is held for some tens of nanoseconds, and only beside a driver call. A
//! search by address looks at every entry: it is rare, and an index would make each allocation slower. A heap's chunks have
//! entries, its blocks have none. A forked child has a table of its own (`PerProcess`, `driver/fork.rs`): the
//! parent's may be locked by a thread that the child does not have, and the memory is not the child's.
//!
//! KV-cache tiers are in the ledger as weak references, which the crate `kv` adds ([`ShowTier`]). The thread that
//! reads the ledger copies the references, releases the registry's lock, and then asks each tier, which takes its own lock. It holds no
//! two locks at once.
//!
//! Sums, tables, drawings and the exchange of ledgers between processes are a crate above (`ledger/`): they need Unix sockets
//! (`share`), and nothing in `core` needs them. A process reads nothing from a process that asks for its ledger, and sends at
//! most 16 MiB. So that `EGMEM_PS=1` works without a call in the program, that crate has one function in `.init_array`, which
//! sets a hook in `core`; the hook runs once, after the first entry, and only then is the environment read.

mod allocation;
mod entry;
mod registry;
mod site;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Weak};

use serde::{Deserialize, Serialize};

pub use allocation::{
    AccessList, AllocPath, Allocation, CallSite, Grants, Imported, MappedAt, Party,
};
pub use entry::{
    BACKTRACES, Entry, NewEntry, capture_backtraces, captures_backtraces, on_first_entry,
};
pub use registry::MAX_PARTIES;
pub use site::{Label, Site, called_from};

use crate::driver::{Code, DevicePtr, Driver, HandleTypes, Location, PointerAttribute};
use crate::{GrowthState, Result};
use registry::{Range, Record, Registry, now_ms};

/// Returns the live allocations of `driver` in this process, the oldest first.
///
/// Allocations of other libraries are unknown here, and so are those made by bare calls of a
/// [`Backend`](crate::driver::Backend).
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::{Buffer, Driver, Machine, ledger};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let weights = Buffer::on(NodeId(0)).bytes(3 << 20).label("weights").allocate(&driver)?;
/// let [entry] = &ledger::allocations(&driver)[..] else { panic!() };
/// assert_eq!((entry.label.as_deref(), entry.bytes), (Some("weights"), 4 << 20));
/// drop(weights);
/// assert!(ledger::allocations(&driver).is_empty());
/// # Ok::<(), egmem::Error>(())
/// ```
pub fn allocations(driver: &Driver) -> Vec<Allocation> {
    let address = driver.address();
    allocations_if(&|record| record.driver == address)
}

/// Returns the live allocations of all drivers in this process, the oldest first. See [`allocations`].
pub fn all_allocations() -> Vec<Allocation> {
    allocations_if(&|_| true)
}

fn allocations_if(wanted: &dyn Fn(&Record) -> bool) -> Vec<Allocation> {
    let records = Registry::current().copies(wanted);
    let now = now_ms();
    let all = records.iter().map(|record| record.to_allocation(now));
    all.collect()
}

/// Returns the number of live allocations of this process.
pub fn count() -> usize {
    Registry::current().len()
}

/// Adds a tier to the ledger, which has it until its last handle is gone, and keeps none.
pub fn add_tier<T: ShowTier + 'static>(driver: &Driver, tier: &Arc<T>) {
    let tier: Weak<T> = Arc::downgrade(tier);
    let driver = driver.address();
    Registry::current().add_tier(Known { driver, tier });
}

/// Returns the tiers of `driver` that this process has open, the oldest first: at most [`MAX_TIERS`].
pub fn tiers(driver: &Driver) -> Vec<TierUse> {
    let address = driver.address();
    tiers_if(|known| known.driver == address)
}

/// Returns the tiers of all drivers that this process has open, the oldest first: at most [`MAX_TIERS`].
pub fn all_tiers() -> Vec<TierUse> {
    tiers_if(|_| true)
}

fn tiers_if(wanted: impl Fn(&Known) -> bool) -> Vec<TierUse> {
    // Without the registry's lock: a tier takes its own lock to answer, and one that ends here changes the ledger.
    let known = Registry::current().tiers().into_iter();
    let alive = known
        .filter(wanted)
        .filter_map(|known| known.tier.upgrade());
    alive.take(MAX_TIERS).map(ShowTier::show).collect()
}

/// The most tiers of a ledger: the oldest.
pub const MAX_TIERS: usize = 1024;

/// Counters of a KV-cache tier since it was created or attached, and the states of its pages now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct TierStats {
    /// The pages of the tier.
    pub pages: u64,
    /// The bytes of a page.
    pub page_bytes: u64,
    /// The pages whose memory is there: fewer than `pages` while a tier grows in the background, or if its growth was
    /// stopped. All other numbers of pages count these alone.
    pub usable: u64,
    /// Whether the tier grows.
    pub growth: GrowthState,
    /// The pages that are free.
    pub free: u64,
    /// The pages that stores are writing.
    pub writing: u64,
    /// The pages with contents that can be loaded.
    pub ready: u64,
    /// Those of the ready pages that loads and copies have pinned.
    pub pinned: u64,
    /// The keys that look-ups found.
    pub hits: u64,
    /// The keys that look-ups did not find, or that came after one.
    pub misses: u64,
    /// The pages that became ready by a commit.
    pub stores: u64,
    /// The ready pages that made room for others.
    pub evictions: u64,
    /// The ready pages that were found to have other bytes than were committed.
    pub damaged: u64,
    /// The bytes of jobs from pages to GPUs that have ended without an error.
    pub loaded_bytes: u64,
    /// The bytes of jobs from GPUs to pages that have ended without an error.
    pub stored_bytes: u64,
}

/// A KV-cache tier that a process has open, and the use of its pages.
///
/// Several processes may have one tier open: each has it in its ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TierUse {
    /// The name of the tier's memory: that of the allocation with its address.
    #[serde(default)]
    pub label: Option<String>,
    /// Where the memory lies.
    pub location: Location,
    /// The first address of the memory in this process.
    pub address: u64,
    /// Its numbers.
    #[serde(flatten)]
    pub stats: TierStats,
}

impl TierUse {
    /// Returns a tier without pages.
    pub fn new(location: Location, address: DevicePtr) -> Self {
        Self {
            label: None,
            location,
            address: address.0,
            stats: TierStats::default(),
        }
    }
}

/// A tier, or the shared state of its handles, that the ledger can ask.
pub trait ShowTier: Send + Sync {
    /// Returns the use of its pages now, without a label. The ledger calls it with no lock of its own held.
    ///
    /// A tier whose last handle is dropped meanwhile ends here, in the thread that asks.
    fn show(self: Arc<Self>) -> TierUse;
}

/// A tier that was added.
#[derive(Clone, Debug)]
struct Known {
    /// [`Driver::address`](crate::Driver::address): the tier keeps the driver alive.
    driver: usize,
    tier: Weak<dyn ShowTier>,
}

impl Known {
    fn is_alive(&self) -> bool {
        self.tier.strong_count() > 0
    }
}

/// The memory at an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Located {
    /// Memory of this process's ledger.
    Allocation {
        /// The allocation. For a heap's block it is the chunk.
        allocation: Box<Allocation>,
        /// Which of [`Allocation::mapped`] contains the address.
        mapping: usize,
        /// The bytes from that mapping's start.
        offset: u64,
    },
    /// Memory that the driver knows and this crate has not allocated.
    Foreign(Foreign),
    /// Memory that the driver does not know, such as a program's plain memory, or nothing.
    Unknown,
}

/// The driver's answers for memory that this crate has not allocated. `None`: it does not say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Foreign {
    /// [`Location::Host`] for host memory, whose node the driver does not report, or the GPU.
    pub location: Option<Location>,
    /// The start of the allocation.
    pub start: Option<u64>,
    /// The size of the allocation in bytes.
    pub bytes: Option<u64>,
    /// The address for the CPU.
    pub host_address: Option<u64>,
    /// How the memory may be exported.
    pub handle_types: Option<HandleTypes>,
}

/// `CU_MEMORYTYPE_HOST`, `CU_MEMORYTYPE_DEVICE`
const HOST: u64 = 1;
const DEVICE: u64 = 2;

/// Returns whose memory is at `address`: this process's allocation with its offset, its location, its users' access
/// and its label, or the driver's answers for memory of others.
///
/// It looks at every entry of the ledger: it is for diagnosis, not for a hot path.
///
/// Source for foreign memory: `cuPointerGetAttribute`, `cuMemGetAddressRange`.
///
/// # Errors
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) in a forked child, whose memory the driver's is not; the driver's errors except
/// INVALID_VALUE, which means that it does not know the address.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::ledger::{self, Located};
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let buffer = Buffer::on(NodeId(0)).bytes(2 << 20).label("weights").allocate(&driver)?;
/// let found = ledger::locate(&driver, buffer.device_ptr().add(4096))?;
/// let Located::Allocation { allocation, offset, .. } = found else { panic!() };
/// assert_eq!((allocation.label.as_deref(), offset), (Some("weights"), 4096));
/// # Ok::<(), egmem::Error>(())
/// ```
pub fn locate(driver: &Driver, address: DevicePtr) -> Result<Located> {
    driver.expect_this_process("driver")?;
    let of = driver.address();
    let records = Registry::current().copies(&|record| {
        let mut ranges = record.mapped.iter();
        let contains = |range: &Range| address.0.wrapping_sub(range.start.0) < range.bytes;
        record.driver == of && ranges.any(contains)
    });
    if let Some(record) = records.first() {
        let allocation = record.to_allocation(now_ms());
        let mut ranges = allocation.mapped.iter().enumerate();
        let found = ranges.find_map(|(index, range)| Some((index, range.offset_of(address.0)?)));
        if let Some((mapping, offset)) = found {
            return Ok(Located::Allocation {
                allocation: Box::new(allocation),
                mapping,
                offset,
            });
        }
    }
    foreign(driver, address)
}

/// Asks the driver.
fn foreign(driver: &Driver, address: DevicePtr) -> Result<Located> {
    let attribute = |attribute| driver.pointer_attribute(address, attribute);
    let kind = match attribute(PointerAttribute::MemoryType) {
        Ok(kind) => kind,
        Err(error) if error.code() == Some(Code::INVALID_VALUE) => return Ok(Located::Unknown),
        Err(error) => return Err(error),
    };
    let ordinal = || attribute(PointerAttribute::DeviceOrdinal).ok();
    let location = match kind {
        HOST => Some(Location::Host),
        DEVICE => ordinal()
            .and_then(|gpu| i32::try_from(gpu).ok())
            .map(Location::Device),
        _ => None,
    };
    // The attributes RANGE_START_ADDR and RANGE_SIZE are no help: they are the reservation's for a mapping, and an
    // offset for a pool's memory. For mapped host memory the base here is 0: see docs/driver-behaviour.md.
    let range = driver.mem_address_range(address).ok();
    let start = range.map(|(base, _)| base.0).filter(|&start| start != 0);
    let bytes = range.map(|(_, bytes)| bytes);
    let host = attribute(PointerAttribute::HostPointer);
    let handles = attribute(PointerAttribute::AllowedHandleTypes).ok();
    Ok(Located::Foreign(Foreign {
        location,
        start,
        bytes,
        host_address: host.ok().filter(|&at| at != 0),
        handle_types: handles
            .and_then(|bits| u32::try_from(bits).ok())
            .map(HandleTypes::from_bits),
    }))
}
