//! The heap through the public API: on the simulator always, on CUDA where there is a GPU.

mod ahead;
mod backing;
mod blocks;
#[cfg(feature = "portable")]
mod collections;
mod debug;
mod ending;
#[cfg(feature = "portable")]
mod exposure;
mod growth;
mod large;
#[cfg(feature = "portable")]
mod logs;
mod membership;
mod picture;
mod refusals;
mod refused;
mod resize;
mod room;
#[cfg(feature = "nightly")]
mod std_collections;
mod streams;
mod threads;

use egmem_tests::drivers;

use std::alloc::Layout;

use egmem::driver::NodeId;
use egmem::{Driver, Heap, HeapOptions, Machine};

use egmem_tests::drivers::{node, nothing_held};

const MIB: u64 = 1 << 20;

fn simulated() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

/// The simulator, and this machine's driver where it has one.
fn drivers() -> Vec<Driver> {
    std::iter::once(simulated())
        .chain(drivers::cuda())
        .collect()
}

fn on(driver: &Driver) -> HeapOptions {
    Heap::on(node(driver)).limit(256 * MIB).chunk(8 * MIB)
}

/// 64 MiB over the nodes of four superchips.
fn spread() -> Heap {
    let driver = Driver::simulated(Machine::gh200x4()).unwrap();
    let topology = egmem::Topology::discover(&driver).unwrap();
    let shares = egmem::topology::Placement::Spread
        .request(64 * MIB)
        .place(&topology)
        .unwrap();
    Heap::spread(&shares).chunk(8 * MIB).build(&driver).unwrap()
}

fn layout(bytes: u64) -> Layout {
    aligned(bytes, 1)
}

fn aligned(bytes: u64, align: u64) -> Layout {
    Layout::from_size_align(bytes as usize, align as usize).unwrap()
}

/// A small generator of numbers, the same in each run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}
