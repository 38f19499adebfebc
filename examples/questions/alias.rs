//! One physical memory that is mapped twice: two addresses, the same bytes.
use std::error::Error;

use egmem::driver::{Access, AccessDesc, Location};
use egmem::vmm::PhysicalMemory;
use egmem::{Driver, Machine, Memory, Topology};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let memory = PhysicalMemory::options(node).create(&driver, 2 << 20)?;
    let (mut one, mut two) = (memory.map()?, memory.map()?);
    let host = [AccessDesc::new(Location::Host, Access::ReadWrite)];
    one.set_access(&host)?;
    two.set_access(&host)?;
    assert_ne!(one.device_ptr(), two.device_ptr());

    one.cpu()?.put(0, 42_u64)?;
    let seen: u64 = two.cpu()?.get(0)?;
    println!(
        "written at {:#x}, read at {:#x}: {seen}",
        one.device_ptr().0,
        two.device_ptr().0
    );
    assert_eq!(seen, 42);
    Ok(())
}
