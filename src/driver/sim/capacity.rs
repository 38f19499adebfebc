//! How much memory each place has, and how much of it is in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Machine;
use crate::Location;

/// The machine's memories. Counters are independent of the simulator's lock, so that memory that dies late (a
/// mapping outlives its handle) returns its bytes wherever it dies.
#[derive(Debug)]
pub(super) struct Capacity {
    places: Vec<Place>,
}

#[derive(Debug)]
struct Place {
    /// A host node or a GPU.
    location: Location,
    total: u64,
    used: AtomicU64,
}

impl Capacity {
    pub(super) fn of(machine: &Machine) -> Self {
        let place = |location, total| Place {
            location,
            total,
            used: AtomicU64::new(0),
        };
        let nodes = machine
            .nodes
            .iter()
            .map(|node| place(Location::HostNuma(node.id), node.memory));
        let gpus = machine
            .gpus
            .iter()
            .zip(0..)
            .map(|(gpu, ordinal)| place(Location::Device(ordinal), gpu.memory));
        Self {
            places: nodes.chain(gpus).collect(),
        }
    }

    /// Returns the free bytes at a location; for the host as a whole, the sum over its nodes.
    pub(super) fn free(&self, location: Location) -> u64 {
        self.at(location).map(|(_, place)| place.free()).sum()
    }

    /// Returns the most that any place of a location could ever hold.
    pub(super) fn largest(&self, location: Location) -> u64 {
        let totals = self.at(location).map(|(_, place)| place.total);
        totals.max().unwrap_or(0)
    }

    /// Takes `bytes` at a location; for the host as a whole, on the node with the most free.
    pub(super) fn take(self: &Arc<Self>, location: Location, bytes: u64) -> Option<Charge> {
        let (index, place) = self.at(location).max_by_key(|(_, place)| place.free())?;
        place.take(bytes).then(|| Charge {
            capacity: Arc::clone(self),
            index,
            bytes,
        })
    }

    fn at(&self, location: Location) -> impl Iterator<Item = (usize, &Place)> {
        self.places
            .iter()
            .enumerate()
            .filter(move |(_, place)| match location {
                Location::Host | Location::HostNumaCurrent => place.location.is_host(),
                _ => place.location == location,
            })
    }
}

impl Place {
    fn free(&self) -> u64 {
        self.total - self.used.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(bytes).filter(|&used| used <= self.total)
            })
            .is_ok()
    }
}

/// Bytes taken; returned when dropped.
#[derive(Debug)]
pub(super) struct Charge {
    capacity: Arc<Capacity>,
    index: usize,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.capacity.places[self.index]
            .used
            .fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_taken_and_given_back_adds_up(
            steps in prop::collection::vec((0_i32..5, 0_u64..200 << 30, any::<bool>()), 0..60),
        ) {
            let capacity = Arc::new(Capacity::of(&Machine::gh200x4()));
            let mut charges: Vec<Charge> = Vec::new();
            let mut used = [0_u64; 4];
            for (node, bytes, give_back) in steps {
                if give_back && !charges.is_empty() {
                    let charge = charges.remove(0);
                    used[charge.index] -= charge.bytes;
                } else {
                    let free = capacity.free(Location::HostNuma(node));
                    let taken = capacity.take(Location::HostNuma(node), bytes);
                    prop_assert_eq!(taken.is_some(), node < 4 && bytes <= free);
                    if let Some(charge) = taken {
                        used[node as usize] += bytes;
                        charges.push(charge);
                    }
                }
                for (node, used) in (0..).zip(used) {
                    prop_assert_eq!(capacity.free(Location::HostNuma(node)), (120 << 30) - used);
                }
            }
            drop(charges);
            prop_assert_eq!(capacity.free(Location::Host), 480 << 30);
        }
    }

    #[test]
    fn threads_cannot_take_more_than_there_is() {
        let capacity = Arc::new(Capacity::of(&Machine::gh200()));
        let kept = std::sync::Mutex::new(Vec::new());
        let taken: usize = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        (0..200)
                            .map_while(|_| capacity.take(Location::Device(0), 1 << 30))
                            .map(|charge| kept.lock().unwrap().push(charge))
                            .count()
                    })
                })
                .collect();
            workers.into_iter().map(|w| w.join().unwrap()).sum()
        });
        assert_eq!(taken, 96);
    }
}
