//! Counts of objects that a program has not freed.

use std::fmt;

use super::state::{Allocator, Kind, State};

/// The objects of a simulated driver that are still alive: all zero after a program that freed everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Held {
    /// References to physical memory: created, imported or retained and not yet released.
    pub physical_handles: u64,
    /// Reserved address ranges.
    pub reservations: usize,
    /// Mappings in them.
    pub mappings: usize,
    /// Pools, created or imported; the devices' own do not count.
    pub pools: usize,
    /// Allocations from pools, not yet freed.
    pub pool_allocations: usize,
    /// `cuMemAlloc`.
    pub device_allocations: usize,
    /// `cuMemHostAlloc`.
    pub host_allocations: usize,
    /// `cuMemAllocManaged`.
    pub managed_allocations: usize,
    /// `cuMemHostRegister`.
    pub registrations: usize,
    /// Streams.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Loaded modules.
    pub modules: usize,
}

impl Held {
    /// Returns whether nothing is alive.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn of(state: &State) -> Self {
        let regions = |is_such: &dyn Fn(&Kind) -> bool| {
            let regions = state.regions.values();
            regions.filter(|region| is_such(&region.kind)).count()
        };
        let own = |this| regions(&|kind| matches!(kind, Kind::Own { by, .. } if *by == this));
        Self {
            physical_handles: state.references.values().map(|r| r.count).sum(),
            reservations: state.reservations.len(),
            mappings: regions(&|kind| matches!(kind, Kind::Mapping { .. })),
            pools: state
                .pools
                .values()
                .filter(|pool| !pool.is_default && !pool.destroyed)
                .count(),
            pool_allocations: state.pools.values().map(|pool| pool.live.len()).sum(),
            device_allocations: own(Allocator::Device),
            host_allocations: own(Allocator::Host),
            managed_allocations: own(Allocator::Managed),
            registrations: state.registered.len(),
            streams: state
                .streams
                .iter()
                .filter(|(key, stream)| key.1 != 0 && !stream.destroyed)
                .count(),
            events: state.events.len(),
            modules: state.modules.len(),
        }
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            (self.physical_handles, "physical handles"),
            (self.reservations as u64, "reservations"),
            (self.mappings as u64, "mappings"),
            (self.pools as u64, "pools"),
            (self.pool_allocations as u64, "pool allocations"),
            (self.device_allocations as u64, "device allocations"),
            (self.host_allocations as u64, "host allocations"),
            (self.managed_allocations as u64, "managed allocations"),
            (self.registrations as u64, "registrations"),
            (self.streams as u64, "streams"),
            (self.events as u64, "events"),
            (self.modules as u64, "modules"),
        ];
        let mut separator = "";
        for (count, what) in counts.into_iter().filter(|&(count, _)| count > 0) {
            write!(f, "{separator}{what}: {count}")?;
            separator = ", ";
        }
        if separator.is_empty() {
            f.write_str("nothing")?;
        }
        Ok(())
    }
}
