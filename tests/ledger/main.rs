//! The ledger through the public API, on simulated machines and on CUDA.

mod entries;
mod events;
mod overlap;
mod processes;

use egmem::driver::{Location, NodeId};
use egmem::ledger::{self, Allocation};
use egmem::{Driver, Machine};

const MIB: u64 = 1 << 20;

fn grace() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

/// This machine's driver, where it has one; `EGMEM_REQUIRE_CUDA=1` makes a missing one a failure.
fn cuda() -> Option<Driver> {
    match Driver::open() {
        Ok(driver) => Some(driver),
        Err(error) if std::env::var_os("EGMEM_REQUIRE_CUDA").is_some() => panic!("{error}"),
        Err(error) => {
            println!("skipped on CUDA: {error}");
            None
        }
    }
}

/// The host node of GPU 0.
fn node(driver: &Driver) -> NodeId {
    let topology = egmem::Topology::discover(driver).unwrap();
    topology.gpu(0).unwrap().host_node().unwrap()
}

/// Every host node that is some GPU's, and every GPU.
fn places(driver: &Driver) -> Vec<Location> {
    let topology = egmem::Topology::discover(driver).unwrap();
    let gpus = topology.gpus();
    let nodes = gpus.iter().filter_map(|gpu| gpu.host_node().ok());
    let mut places: Vec<Location> = nodes.map(Location::from).collect();
    places.extend(gpus.iter().map(|gpu| Location::Device(gpu.ordinal)));
    places.sort();
    places.dedup();
    places
}

/// The entries whose label begins with `prefix`: tests on CUDA share one driver and one ledger.
fn labelled(driver: &Driver, prefix: &str) -> Vec<Allocation> {
    let mut entries = ledger::allocations(driver);
    entries.retain(|entry| {
        let label = entry.label.as_deref();
        label.is_some_and(|label| label.starts_with(prefix))
    });
    entries
}

/// Makes of each `fn name(driver: &Driver)` a test on a simulated Grace node and one on CUDA.
macro_rules! on_both {
    ($($module:ident { $($name:ident,)* })*) => {
        mod simulated {
            $($(#[test] fn $name() { crate::$module::$name(&crate::grace()); })*)*
        }
        mod cuda {
            $($(#[test] fn $name() {
                if let Some(driver) = crate::cuda() { crate::$module::$name(&driver); }
            })*)*
        }
    };
}

on_both! {
    entries {
        each_path_has_its_entry,
        a_block_is_found_in_its_heaps_chunk,
        heaps_blocks_have_no_entries,
        an_import_tells_where_it_comes_from,
        foreign_memory_is_what_the_driver_says,
    }
    events {
        allocations_and_driver_calls_are_traced,
    }
    overlap {
        live_ranges_never_overlap,
    }
    processes {
        a_process_is_seen_if_it_asks_for_it,
        memory_of_a_dead_exporter_is_kept_by_its_importer,
        what_is_left_at_the_exit_is_reported,
    }
}
