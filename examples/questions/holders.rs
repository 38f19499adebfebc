//! Memory of a host node: the kernel counts it in the processes that map it for the CPU, the ledger knows its owner and its line.
use std::error::Error;

use egmem::driver::{Access, AccessDesc, Location};
use egmem::ledger::{self, Ledger};
use egmem::vmm::PhysicalMemory;
use egmem::{Driver, Machine, Topology};

const BYTES: u64 = 256 << 20;

/// Returns this process's resident memory, as the kernel counts it.
fn resident() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line
        .and_then(|line| line.split_whitespace().next())
        .ok_or("no VmRSS")?;
    Ok(kib.parse::<u64>()? << 10)
}

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    // The first memory makes the driver's context, which is resident.
    let first = PhysicalMemory::options(node).create(&driver, 2 << 20)?;
    let before = resident()?;
    let grown = || resident().map(|now| now.saturating_sub(before));

    let cache = PhysicalMemory::options(node).create(&driver, BYTES)?; // the line that the ledger shows
    let created = grown()?;
    let mut mapped = cache.map()?;
    mapped.set_access(&[AccessDesc::new(Location::Host, Access::ReadWrite)])?;
    mapped.cpu()?.put(0, 42_u64)?;
    println!(
        "{} MiB: VmRSS grew by {} MiB when created, {} when mapped for the CPU",
        BYTES >> 20,
        created >> 20,
        grown()? >> 20
    );
    if driver.is_simulated() {
        println!("SIMULATED: the memory is ordinary memory, resident once it is written");
    }

    let entries = ledger::allocations(&driver);
    assert!(entries.iter().any(|entry| entry.site.is_some()));
    print!("{}", Ledger::of(&driver).to_text());
    drop((first, mapped));
    Ok(())
}
