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
//! entries, its blocks have none. A forked child has a table of its own (`registry.rs`), found by the count of forks: the
//! parent's may be locked by a thread that the child does not have, and the memory is not the child's.
//!
//! KV-cache tiers are in the ledger as weak references, which the crate `kv` adds (`core/ledger/tiers.rs`). The thread that
//! reads the ledger copies the references, releases the registry's lock, and then asks each tier, which takes its own lock. It holds no
//! two locks at once.
//!
//! Sums, tables, drawings and the exchange of ledgers between processes are a crate above (`ledger/`): they need Unix sockets
//! (`share`), and nothing in `core` needs them. A process reads nothing from a process that asks for its ledger, and sends at
//! most 16 MiB. So that `EGMEM_PS=1` works without a call in the program, that crate has one function in `.init_array`, which
//! sets a hook in `core`; the hook runs once, after the first entry, and only then is the environment read.

mod allocation;
mod entry;
mod locate;
mod registry;
mod site;
#[cfg(test)]
mod tests;
mod tiers;

use std::sync::{Arc, Weak};
use std::time::Instant;

pub use allocation::{AllocPath, Allocation, CallSite, Grants, Imported, MappedAt, Party};
pub use entry::{
    BACKTRACES, Entry, NewEntry, capture_backtraces, captures_backtraces, on_first_entry,
};
pub use locate::{Foreign, Located, locate};
pub use registry::MAX_PARTIES;
pub use site::{Label, Site, called_from};
pub use tiers::{MAX_TIERS, ShowTier, TierStats, TierUse};

use crate::Driver;
use registry::{Record, Registry};
use tiers::Known;

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
    allocations_if(|record| record.driver == address)
}

/// Returns the live allocations of all drivers in this process, the oldest first. See [`allocations`].
pub fn all_allocations() -> Vec<Allocation> {
    allocations_if(|_| true)
}

fn allocations_if(wanted: impl Fn(&Record) -> bool) -> Vec<Allocation> {
    let records = Registry::current().copies(wanted);
    let now = Instant::now();
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
