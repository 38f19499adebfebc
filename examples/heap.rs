//! A heap from its options to its picture: blocks that the CPU and a GPU write, figures, memory given back.
//!
//! ```text
//! cargo run --example heap -- heap.svg
//! ```
//! On the first GPU's node; where there is no GPU, on a simulated machine. docs/heap.md explains the options.

use std::alloc::Layout;
use std::error::Error;

use egmem::heap::Relief;
use egmem::{Driver, Heap, Machine, Stream, Topology};

const MIB: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let heap = build(&driver)?;
    let stream = Stream::new(&driver, 0)?;

    // Blocks: of any size, at any alignment, from any thread.
    let weights = heap.allocate(Layout::from_size_align(3 << 20, 4096)?)?;
    weights.write_at(0, &[1.0_f32, 2.0, 3.0])?; // by the CPU
    let sums = heap.allocate_zeroed(Layout::new::<[f64; 1000]>())?;
    stream.fill(&sums, 0, 800, 0xff)?; // by the GPU, to its end
    println!(
        "blocks: {} B at {:?}, {} B at {:?}; sums end with {}",
        weights.len(),
        weights.device_ptr(),
        sums.len(),
        sums.device_ptr(),
        sums.get::<f64>(7992)?,
    );

    let stats = heap.stats();
    println!(
        "now: {} blocks of {} B live, {} MiB of memory by {} cuMemCreate; fragmentation {:.3}",
        stats.live_blocks,
        stats.live,
        stats.backed / MIB,
        stats.driver.create,
        stats.fragmentation(),
    );
    if let Some(path) = std::env::args_os().nth(1) {
        let picture = heap.occupancy().to_svg("The heap of examples/heap.rs");
        std::fs::write(&path, picture)?;
        println!("picture: {}", path.display());
    }

    drop((weights, sums));
    println!("trimmed: {} MiB", heap.trim()? / MIB);
    Ok(())
}

/// On the node next to the first GPU, for all GPUs.
fn build(driver: &Driver) -> egmem::Result<Heap> {
    let topology = Topology::discover(driver)?;
    Heap::on(topology.gpu(0)?.host_node()?)
        .access_by(topology.gpus())
        .limit(1 << 30) // addresses, at once
        .chunk(8 * MIB) // memory, as it is needed
        .reserve(8 * MIB) // and so much of it from the start
        .soft_limit(256 * MIB, |pressure| {
            println!("{} B more, beyond the soft limit", pressure.requested);
            Relief::Grow
        })
        .build(driver)
}
