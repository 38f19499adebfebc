//! A map and a vector whose memory is a heap's, so that a GPU reaches their elements.
//!
//! ```text
//! cargo run --example heap-collections
//! ```
//! On the first GPU's node; where there is no GPU, on a simulated machine.

use std::alloc::Layout;

use egmem::allocator_api2::vec::Vec as HeapVec;
use egmem::driver::DevicePtr;
use egmem::{Driver, Heap, Machine, Memory, Result, Stream, Topology};
use hashbrown::HashMap;

fn main() -> Result<()> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let topology = Topology::discover(&driver)?;
    // Not a shareable heap: importers of a block may write to its whole chunk, so that one refuses collections.
    let heap = Heap::on(topology.gpu(0)?.host_node()?).build(&driver)?;
    let stream = Stream::new(&driver, 0)?;

    // `Heap` and `&Heap` are allocators; with a clone of the heap, a collection is `'static`.
    let mut pages: HashMap<u64, [u32; 4], _, Heap> = HashMap::new_in(heap.clone());
    for page in 0..10_000 {
        pages.insert(page, [page as u32; 4]);
    }
    println!("page 77 has {:?}", pages[&77]);

    let mut numbers = HeapVec::new_in(&heap);
    numbers.extend(0..10_000_u64);
    // The GPU reaches the vector's elements too.
    let copy = heap.allocate(Layout::for_value(numbers.as_slice()))?;
    let from = DevicePtr(numbers.as_ptr().expose_provenance() as u64);
    // SAFETY: both live until the copy is done, and no code writes to `numbers`.
    unsafe { stream.copy_async(Memory::device_ptr(&copy), from, copy.len())? };
    stream.synchronize()?;
    let last = copy.get::<u64>(copy.len() - 8)?;
    println!("the GPU's copy of the vector ends with {last}");
    Ok(())
}
