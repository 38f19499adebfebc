//! GPU 0 writes a table, every other processor may only read it.
use std::error::Error;

use egmem::driver::{Access, Location};
use egmem::proof::Prover;
use egmem::{Buffer, Driver, Machine, Topology};

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200x4()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let gpus = driver.device_count()?;
    let mut options = Buffer::on(node).access(Location::Device(0), Access::ReadWrite);
    options = options.access(Location::Host, Access::Read);
    for gpu in 1..gpus {
        options = options.access(Location::Device(gpu), Access::Read);
    }
    let table = options.bytes(64 << 20).allocate(&driver)?;

    let writer = Prover::new(&driver, 0)?;
    writer.write(&table, 42)?;
    let sum = writer.read(&table)?;
    for gpu in 1..gpus {
        let reader = Prover::new(&driver, gpu)?;
        assert_eq!(reader.read(&table)?, sum);
        let refused = reader.write(&table, 1).expect_err("it may only read");
        println!("GPU {gpu} reads; a write: {refused}");
    }
    let refused = table.put(0, 1_u64).expect_err("it may only read");
    println!(
        "the CPU reads {:#x}; a write: {refused}",
        table.get::<u64>(0)?
    );
    assert_eq!(writer.read(&table)?, sum);
    Ok(())
}
