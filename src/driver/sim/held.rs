//! Counts of objects that a program has not freed.

use std::fmt;

use super::state::{Allocator, Kind, State};

/// Defines the counts: their documentation, names and types, and where they are counted.
macro_rules! held {
    (|$state:ident| $($(#[$doc:meta])* $name:ident: $type:ty = $count:expr;)*) => {
        /// The objects of a simulated driver that are still alive: all zero after a program that freed everything.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub struct Held {
            $($(#[$doc])* pub $name: $type,)*
        }

        impl Held {
            pub(super) fn of($state: &State) -> Self {
                Self { $($name: $count,)* }
            }
        }

        impl fmt::Display for Held {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut separator = "";
                $(if self.$name > 0 {
                    let name = stringify!($name).replace('_', " ");
                    write!(f, "{separator}{name}: {}", self.$name)?;
                    separator = ", ";
                })*
                match separator {
                    "" => f.write_str("nothing"),
                    _ => Ok(()),
                }
            }
        }
    };
}

held! { |state|
    /// References to physical memory: created, imported or retained and not yet released.
    physical_handles: u64 = state.references.values().map(|reference| reference.count).sum();
    /// Reserved address ranges.
    reservations: usize = state.reservations.len();
    /// Mappings in them.
    mappings: usize = regions(state, |kind| matches!(kind, Kind::Mapping { .. }));
    /// Pools, created or imported; the devices' own do not count.
    pools: usize = state.pools.values().filter(|pool| !pool.is_default && !pool.destroyed).count();
    /// Allocations from pools, not yet freed.
    pool_allocations: usize = state.pools.values().map(|pool| pool.live.len()).sum();
    /// `cuMemAlloc`.
    device_allocations: usize = by(state, Allocator::Device);
    /// `cuMemHostAlloc`.
    host_allocations: usize = by(state, Allocator::Host);
    /// `cuMemAllocManaged`.
    managed_allocations: usize = by(state, Allocator::Managed);
    /// `cuMemHostRegister`.
    registrations: usize = state.registered.len();
    /// Streams.
    streams: usize = state.streams.iter().filter(|(key, stream)| key.1 != 0 && !stream.destroyed).count();
    /// Events.
    events: usize = state.events.len();
    /// Loaded modules.
    modules: usize = state.modules.len();
}

impl Held {
    /// Returns whether nothing is alive.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn regions(state: &State, is_such: impl Fn(&Kind) -> bool) -> usize {
    let regions = state.regions.values();
    regions.filter(|region| is_such(&region.kind)).count()
}

fn by(state: &State, allocator: Allocator) -> usize {
    regions(
        state,
        |kind| matches!(kind, Kind::Allocation { by, .. } if *by == allocator),
    )
}
