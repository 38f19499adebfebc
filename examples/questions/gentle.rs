//! Memory that is pinned in small pieces with rests, for the machine's other processes.
use std::alloc::Layout;
use std::error::Error;
use std::time::Instant;

use egmem::{Buffer, Driver, Growth, Heap, Machine, Topology};

const BYTES: u64 = 256 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here, so no times are shown");
    }
    let node = Topology::discover(&driver)?.gpu(0)?.host_node()?;
    let mut parts = Vec::new();
    for (name, growth) in [("chunks", Growth::default()), ("gentle", Growth::gentle())] {
        let start = Instant::now();
        let buffer = Buffer::on(node)
            .bytes(BYTES)
            .growth(growth)
            .shareable()
            .allocate(&driver)?;
        let time = start.elapsed();
        parts.push(buffer.mappings().len());
        print!(
            "{name}: {} MiB in {} driver calls",
            BYTES >> 20,
            buffer.mappings().len()
        );
        println!(
            "{}",
            if driver.is_simulated() {
                String::new()
            } else {
                format!(", {time:.0?}")
            }
        );
    }
    assert!(parts[0] < parts[1]); // 64 and 16 MiB at a time

    let heap = Heap::on(node).growth(Growth::gentle()).build(&driver)?; // grows in the same way
    let block = heap.allocate(Layout::from_size_align(64 << 20, 256)?)?;
    block.put(0, 42_u64)?;
    assert_eq!(block.get::<u64>(0)?, 42);
    Ok(())
}
