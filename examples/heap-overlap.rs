//! The CPU writes one block while a GPU copies another: each copy's ticket owns its block until the copy has ended.
//!
//! ```text
//! cargo run --example heap-overlap
//! ```
//! On the first GPU's node; where there is no GPU, on a simulated machine.

use std::alloc::Layout;
use std::sync::Arc;

use egmem::{Block, Driver, Heap, Machine, Result, Stream, Topology, Transfer};

const PART: u64 = 1 << 20;
const PARTS: u64 = 8;

/// A copy from a part's block into its place in the whole.
type PartCopy = Transfer<(Arc<Block>, Block)>;

fn main() -> Result<()> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let topology = Topology::discover(&driver)?;
    let heap = Heap::on(topology.gpu(0)?.host_node()?).build(&driver)?;
    let stream = Stream::new(&driver, 0)?;

    let whole = Arc::new(heap.allocate(Layout::new::<[u8; (PART * PARTS) as usize]>())?);
    let mut slots: [Option<PartCopy>; 2] = [None, None];
    for part in 0..PARTS {
        let slot = &mut slots[part as usize % 2];
        let staged = match slot.take() {
            Some(copy) => Transfer::wait(copy)?.1,
            None => heap.allocate(Layout::new::<[u8; PART as usize]>())?,
        };
        staged.fill(part as u8)?; // the copy of the other block goes on meanwhile
        *slot = Some(stream.start_copy((Arc::clone(&whole), part * PART), (staged, 0), PART)?);
    }
    drop(slots); // waits
    println!(
        "{PARTS} parts through two blocks; the last byte is {}",
        whole.get::<u8>(whole.len() - 1)?,
    );
    Ok(())
}
