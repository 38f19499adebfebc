//! egmem's heap as an entrant.

use std::alloc::Layout;
use std::sync::OnceLock;

use egmem::driver::NodeId;
use egmem::heap::Block;
use egmem::{Driver, Error, Heap, Result, Topology};

use super::play::Sight;
use egmem_replay::contestants::{Room, Shared};

/// Where heaps are made.
pub struct Ground {
    driver: Driver,
    node: NodeId,
    thread_cache: Option<u64>,
}

impl Ground {
    /// On `node`, or on the first GPU's; heaps cache `thread_cache` bytes for each thread, or their default.
    ///
    /// # Errors
    /// The driver's; [`Error::NoSuchGpu`] where no GPU names a node.
    pub fn new(driver: Driver, node: Option<i32>, thread_cache: Option<u64>) -> Result<Self> {
        let node = match node {
            Some(node) => NodeId(node),
            None => Topology::discover(&driver)?.gpu(0)?.host_node()?,
        };
        Ok(Self {
            driver,
            node,
            thread_cache,
        })
    }

    /// Whether the memory is simulated.
    pub fn is_simulated(&self) -> bool {
        self.driver.is_simulated()
    }

    /// The node.
    pub fn node(&self) -> i32 {
        self.node.0
    }

    /// A heap that has no memory at first.
    ///
    /// # Errors
    /// The heap's.
    pub fn heap(&self, room: Room) -> Result<Ours> {
        let mut heap = Heap::on(self.node).limit(room.capacity);
        if let Some(bytes) = self.thread_cache {
            heap = heap.thread_cache(bytes);
        }
        let heap = heap.build(&self.driver)?;
        Ok(Ours {
            heap,
            refused: OnceLock::new(),
        })
    }
}

/// A heap.
pub struct Ours {
    heap: Heap,
    /// Why it gave no block, the first time.
    refused: OnceLock<Error>,
}

impl Ours {
    /// Why it gave no block, the first time that it did not.
    pub fn refused(&self) -> Option<&Error> {
        self.refused.get()
    }

    /// Returns its figures at this moment.
    pub fn sight(&self) -> Sight {
        Sight {
            fragmentation: Some(self.heap.stats().fragmentation()),
        }
    }

    /// Returns the present use of its memory as SVG.
    pub fn picture(&self, title: &str) -> String {
        self.heap.occupancy().to_svg(title)
    }
}

impl Shared for Ours {
    type Block = Block;

    #[inline]
    fn allocate(&self, layout: Layout) -> Option<Block> {
        match self.heap.allocate(layout) {
            Ok(block) => Some(block),
            Err(error) => {
                let _ = self.refused.set(error);
                None
            }
        }
    }

    #[inline]
    unsafe fn free(&self, block: Block, _layout: Layout) {
        drop(block);
    }

    #[inline]
    fn start(&self, block: &Block) -> u64 {
        block.offset()
    }
}
