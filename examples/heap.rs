//! A heap from its options to its picture: blocks that the CPU and a GPU write, a map and a vector in it, release
//! after a GPU's work, a block shared with a child process.
//!
//! ```text
//! cargo run --example heap -- heap.svg
//! ```
//! On the first GPU's node; where there is no GPU, on a simulated machine. docs/heap.md goes through the same by
//! topics.

use std::alloc::Layout;
use std::error::Error as StdError;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use egmem::allocator_api2::vec::Vec as HeapVec;
use egmem::driver::{Access, DevicePtr};
use egmem::heap::Relief;
use egmem::share::{Channel, ImportOptions, Listener, Peers};
use egmem::{
    Block, Driver, Heap, HeapOptions, Machine, Memory, Result, Stream, Topology, Transfer,
};
use hashbrown::HashMap;

const MIB: u64 = 1 << 20;

fn main() -> std::result::Result<(), Box<dyn StdError>> {
    let driver = Driver::open().or_else(|_| Driver::simulated(Machine::gh200()))?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [peer, socket] if peer == "peer" => Ok(child(&driver, Path::new(socket))?),
        [] => all(&driver, None),
        [svg] => all(&driver, Some(Path::new(svg))),
        _ => Err("usage: heap [FILE.svg]".into()),
    }
}

fn all(driver: &Driver, svg: Option<&Path>) -> std::result::Result<(), Box<dyn StdError>> {
    if driver.is_simulated() {
        println!("SIMULATED: there is no GPU here");
    }
    let heap = build(driver)?.shareable().build(driver)?;
    // Importers of a block may write to its whole chunk, so collections get a heap that shares nothing.
    let own = build(driver)?.build(driver)?;
    let stream = Stream::new(driver, 0)?;

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

    overlap(&heap, &stream)?;
    free_after_work(&heap, &stream)?;
    collections(&own, &stream)?;
    share(&heap)?;

    let stats = heap.stats();
    println!(
        "now: {} blocks of {} B live, {} MiB of memory by {} cuMemCreate; fragmentation {:.3}",
        stats.live_blocks,
        stats.live,
        stats.backed / MIB,
        stats.driver.create,
        stats.fragmentation(),
    );
    if let Some(path) = svg {
        std::fs::write(
            path,
            heap.occupancy().to_svg("The heap of examples/heap.rs"),
        )?;
        println!("picture: {}", path.display());
    }

    drop((weights, sums));
    println!("trimmed: {} MiB", heap.trim()? / MIB);
    Ok(())
}

/// On the node next to the first GPU, for all GPUs.
fn build(driver: &Driver) -> Result<HeapOptions> {
    let topology = Topology::discover(driver)?;
    Ok(Heap::on(topology.gpu(0)?.host_node()?)
        .access_by(topology.gpus())
        .limit(1 << 30) // addresses, at once
        .chunk(8 * MIB) // memory, as it is needed
        .reserve(8 * MIB) // and so much of it from the start
        .soft_limit(256 * MIB, |pressure| {
            println!("{} B more, beyond the soft limit", pressure.requested);
            Relief::Grow
        }))
}

/// A copy from one block into a part of another.
type PartCopy = Transfer<(Arc<Block>, Block)>;

/// The CPU writes one block while the GPU copies another. Each copy's ticket owns its block until the copy has ended.
fn overlap(heap: &Heap, stream: &Stream) -> Result<()> {
    const PARTS: u64 = 8;
    let whole = Arc::new(heap.allocate(Layout::new::<[u8; 8 << 20]>())?);
    let mut slots: [Option<PartCopy>; 2] = [None, None];
    for part in 0..PARTS {
        let slot = &mut slots[part as usize % 2];
        let staged = match slot.take() {
            Some(copy) => Transfer::wait(copy)?.1,
            None => heap.allocate(Layout::new::<[u8; 1 << 20]>())?,
        };
        staged.fill(part as u8)?;
        *slot = Some(stream.start_copy((Arc::clone(&whole), part * MIB), (staged, 0), MIB)?);
    }
    drop(slots); // waits
    println!(
        "tickets: {} parts through two blocks; the last byte is {}",
        PARTS,
        whole.get::<u8>(whole.len() - 1)?,
    );
    Ok(())
}

/// A block is freed while the GPU writes to it: nobody waits, and nobody else gets it too soon.
fn free_after_work(heap: &Heap, stream: &Stream) -> Result<()> {
    let scratch = heap.allocate(Layout::new::<[u8; 1 << 20]>())?;
    // SAFETY: the block is freed after the stream's work, and nobody reads it.
    unsafe { stream.memset_async(scratch.device_ptr(), 7, scratch.len())? };
    free_after(scratch, stream)?;
    println!(
        "freed after GPU work: {} waits",
        heap.stats().deferred_blocks
    );
    stream.synchronize()?;
    println!("taken back: {}", heap.collect()?);
    Ok(())
}

/// Frees a block behind the stream's work, or else after it.
fn free_after(block: Block, stream: &Stream) -> Result<()> {
    let Err(refused) = block.free_after(stream) else {
        return Ok(());
    };
    match stream.synchronize() {
        // Nobody writes to the block any more.
        Ok(()) => {
            drop(refused);
            Ok(())
        }
        // Lost to the heap, which is better than two users of one block.
        Err(_) => Err(refused.forget()),
    }
}

/// `Heap` and `&Heap` are allocators; with a clone of the heap, a collection is `'static`.
fn collections(heap: &Heap, stream: &Stream) -> std::result::Result<(), Box<dyn StdError>> {
    let mut pages: HashMap<u64, [u32; 4], _, Heap> = HashMap::new_in(heap.clone());
    for page in 0..10_000 {
        pages.insert(page, [page as u32; 4]);
    }

    let mut numbers = HeapVec::new_in(heap);
    numbers.extend(0..10_000_u64);
    // What the vector points to is the GPU's as well.
    let copy = heap.allocate(Layout::for_value(numbers.as_slice()))?;
    let from = DevicePtr(numbers.as_ptr().expose_provenance() as u64);
    // SAFETY: both are there until the copy is done, and nobody writes to `numbers`.
    unsafe { stream.copy_async(Memory::device_ptr(&copy), from, copy.len())? };
    stream.synchronize()?;
    println!(
        "collections: page 77 has {:?}; the GPU's copy ends with {}",
        pages[&77],
        copy.get::<u64>(copy.len() - 8)?,
    );
    Ok(())
}

/// A child process works in a block of this one.
fn share(heap: &Heap) -> std::result::Result<(), Box<dyn StdError>> {
    let block = Arc::new(heap.allocate(Layout::new::<[u64; 1000]>())?);
    block.put(0, 41_u64)?;
    let shared = Arc::clone(&block).share_arc()?;

    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let mut listener = Listener::bind(&socket, Peers::same_user())?;
    listener.set_timeout(Duration::from_secs(60))?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg("peer")
        .arg(&socket)
        .spawn()?;
    let sent = listener
        .accept()
        .and_then(|mut peer| peer.send(&shared, Access::ReadWrite));
    let ended = child.wait()?;
    sent?;
    if !ended.success() {
        return Err(format!("the child ended with {ended}").into());
    }
    println!("shared: the child has made {} of 41", block.get::<u64>(0)?);
    // Only now may the block go: the child has unmapped it.
    drop((shared, block));
    Ok(())
}

/// In the child.
fn child(driver: &Driver, socket: &Path) -> Result<()> {
    let mut channel = Channel::connect(socket, Peers::same_user())?;
    let imported = channel.receive()?.import(driver, ImportOptions::new())?;
    let found: u64 = imported.get(0)?;
    imported.put(0, found + 1)
}
