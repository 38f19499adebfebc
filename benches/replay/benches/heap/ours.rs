//! The heap, on memory of a simulated machine.

use std::alloc::Layout;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use egmem::driver::sim::Machine;
use egmem::{Driver, Heap, Topology};

use egmem_replay::contestants::{Room, Shared};

/// The least chunk: the heap's own default.
const CHUNK: u64 = 64 << 20;
/// The most chunks, however large the room: each is a mapping of this process.
const CHUNKS: u64 = 512;
/// Chunk sizes are multiples of this.
const GRANULE: u64 = 2 << 20;

/// egmem's heap.
pub struct Ours {
    heap: Heap,
}

impl Ours {
    /// With the capacity as its limit.
    ///
    /// # Errors
    /// The heap's.
    pub fn new(room: Room) -> io::Result<Self> {
        let capacity = room.capacity.next_multiple_of(GRANULE);
        let mut machine = Machine::gh200();
        for node in &mut machine.nodes {
            // More than the heap's limit, so that the node is never nearly full.
            node.memory = node.memory.max(capacity.saturating_mul(2));
        }
        Self::on(machine, capacity).map_err(io::Error::other)
    }

    fn on(machine: Machine, capacity: u64) -> egmem::Result<Self> {
        let driver = Driver::simulated(machine)?;
        let topology = Topology::discover(&driver)?;
        let chunk = (capacity / CHUNKS).next_multiple_of(GRANULE).max(CHUNK);
        let heap = Heap::on(topology.gpu(0)?.host_node()?)
            .access_by(topology.gpus())
            .limit(capacity)
            .chunk(chunk)
            .build(&driver)?;
        Ok(Self { heap })
    }
}

impl Shared for Ours {
    type Block = egmem::Block;

    #[inline]
    fn allocate(&self, layout: Layout) -> Option<Self::Block> {
        self.heap.allocate(layout).ok()
    }

    #[inline]
    unsafe fn free(&self, block: Self::Block, _layout: Layout) {
        drop(block);
    }

    #[inline]
    fn start(&self, block: &Self::Block) -> u64 {
        block.offset()
    }

    #[inline]
    fn address(&self, block: &Self::Block) -> Option<NonNull<u8>> {
        NonNull::new(block.device_ptr().0 as *mut u8)
    }

    fn backed(&self) -> Option<u64> {
        Some(self.heap.stats().backed)
    }

    /// All of them, though only the table of ranges is mapped: the rest, a 40th, counts twice.
    fn mapped(&self) -> u64 {
        self.heap.stats().metadata
    }
}

/// A heap for each of up to 16 threads that run at a time.
pub struct OursEach {
    heaps: Vec<Ours>,
}

impl OursEach {
    /// Each has the whole capacity as its limit.
    ///
    /// # Errors
    /// The heap's.
    pub fn new(room: Room) -> io::Result<Self> {
        let heaps = (0..16).map(|_| Ours::new(room)).collect::<Result<_, _>>()?;
        Ok(Self { heaps })
    }

    /// The calling thread's.
    #[inline]
    fn own(&self) -> &Ours {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        std::thread_local! {
            // Threads that run at a time started one after another.
            static NUMBER: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        &self.heaps[NUMBER.with(|number| *number) % self.heaps.len()]
    }
}

impl Shared for OursEach {
    type Block = egmem::Block;

    #[inline]
    fn allocate(&self, layout: Layout) -> Option<Self::Block> {
        self.own().allocate(layout)
    }

    #[inline]
    unsafe fn free(&self, block: Self::Block, _layout: Layout) {
        drop(block);
    }

    fn start(&self, block: &Self::Block) -> u64 {
        block.offset()
    }
}
