//! Memory of a host node: the kernel counts it in no process, the ledger knows its owner and its line.
use std::error::Error;

use egmem::ledger::{self, Ledger};
use egmem::{Backing, Buffer, Driver, Machine, Topology};

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
    // Registered memory, the default on x86, is the process's own pages: VmRSS has those.
    let options = Buffer::on(node).backing(Backing::Driver);
    // The first buffer makes the driver's context, which is resident.
    let first = options.clone().bytes(1).label("first").allocate(&driver)?;
    let before = resident()?;
    let options = options.bytes(BYTES).label("kv cache");
    let cache = options.allocate(&driver)?; // the line that the ledger shows
    cache.fill(1)?;
    let grown = resident()?.saturating_sub(before);
    if driver.is_simulated() {
        println!("SIMULATED: the memory is ordinary memory, so VmRSS has it");
    } else {
        assert!(grown < BYTES / 2, "VmRSS has the driver's memory");
    }
    println!(
        "{} MiB allocated and written, VmRSS grew by {} MiB",
        BYTES >> 20,
        grown >> 20
    );

    let entries = ledger::allocations(&driver);
    let owner = entries
        .iter()
        .find(|entry| entry.label.as_deref() == Some("kv cache"));
    assert!(owner.is_some_and(|entry| entry.site.is_some()));
    print!("{}", Ledger::of(&driver).to_text());
    drop((first, cache));
    assert!(ledger::allocations(&driver).is_empty());
    Ok(())
}
