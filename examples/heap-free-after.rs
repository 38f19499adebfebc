//! A block is freed while a GPU writes to it: no thread waits, and the heap reuses it only after the GPU's work.
//!
//! ```text
//! cargo run --example heap-free-after
//! ```
//! On the first GPU's node; where there is no GPU, on a simulated machine.

use std::alloc::Layout;

use egmem::{Block, Driver, Heap, Machine, Result, Stream, Topology};

fn main() -> Result<()> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let topology = Topology::discover(&driver)?;
    let heap = Heap::on(topology.gpu(0)?.host_node()?).build(&driver)?;
    let stream = Stream::new(&driver, 0)?;

    let scratch = heap.allocate(Layout::new::<[u8; 1 << 20]>())?;
    // SAFETY: the block is freed after the stream's work, and no code reads it.
    unsafe { stream.memset_async(scratch.device_ptr(), 7, scratch.len())? };
    free_after(scratch, &stream)?;
    println!("{} block waits for the GPU", heap.stats().deferred_blocks);

    stream.synchronize()?;
    // The heap does this itself, too, before it grows.
    println!("collected: {}", heap.collect()?);
    Ok(())
}

/// Frees a block behind the stream's work, or else after it.
fn free_after(block: Block, stream: &Stream) -> Result<()> {
    let Err(refused) = block.free_after(stream) else {
        return Ok(());
    };
    match stream.synchronize() {
        // No work writes to the block now.
        Ok(()) => {
            drop(refused);
            Ok(())
        }
        // Lost to the heap, which is better than two users of one block.
        Err(_) => Err(refused.forget()),
    }
}
