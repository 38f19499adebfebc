//! Ledgers over processes, as one process can show it: with memory of a simulated machine, in folders of its own.

mod held;
mod offers;
mod shown;
mod sums;
mod tiers;

use egmem_core::{Buffer, Driver, Machine};

use crate::driver::{Access, HandleTypes, Location, NodeId};
use crate::entries::{AllocPath, Entry, NewEntry, Site};

const MIB: u64 = 1 << 20;

fn machine() -> Driver {
    Driver::simulated(Machine::gh200x4()).unwrap()
}

fn buffer(driver: &Driver, label: &str, bytes: u64) -> Buffer {
    let buffer = Buffer::on(NodeId(1)).bytes(bytes).label(label);
    let buffer = buffer.handle_types(HandleTypes::POSIX_FD);
    buffer
        .access(Location::Device(0), Access::Read)
        .allocate(driver)
        .unwrap()
}

/// Buffers of 2, 4, 6 … MiB.
fn several(driver: &Driver, label: &str, count: u64) -> Vec<Buffer> {
    (1..=count)
        .map(|n| buffer(driver, label, n * 2 * MIB))
        .collect()
}

/// An entry without memory.
fn entry(driver: &Driver, path: AllocPath, location: Location, bytes: u64) -> Entry {
    Entry::new(NewEntry {
        driver,
        bytes,
        location,
        path,
        label: None,
        site: Site::unknown(),
    })
}
