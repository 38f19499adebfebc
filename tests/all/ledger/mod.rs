//! The ledger through the public API, on simulated machines and on CUDA.

mod entries;
mod events;
mod holders;
mod overlap;
mod processes;

use egmem_tests::drivers;

use egmem::Driver;
use egmem::driver::Location;
use egmem::ledger::{self, Allocation};

use drivers::{grace, node, on_both};

const MIB: u64 = 1 << 20;

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

on_both! {
    egmem::Machine::gh200x4();
    entries {
        each_path_has_its_entry,
        each_shape_has_its_entries,
        a_block_is_found_in_its_heaps_chunk,
        heaps_blocks_have_no_entries,
        chunks_have_the_line_that_built_their_heap,
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
        the_tiers_of_a_process_are_shown,
        memory_of_a_dead_exporter_is_kept_by_its_importer,
        what_is_left_at_the_exit_is_reported,
    }
}
