//! Blocks for other processes: windows on their chunks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use super::Block;
use super::backing::Chunk;
use crate::per_driver::lock;
use crate::share::{Exports, Holds, Shared};
use crate::vmm::PhysicalMemory;
use crate::{Error, Result};

/// The chunks of a heap that have blocks which are shared, so that each is exported once.
#[derive(Debug, Default)]
pub(super) struct Shares(Mutex<HashMap<u64, Weak<SharedChunk>>>);

/// Keeps a chunk's memory, which is not given back meanwhile.
#[derive(Debug)]
struct SharedChunk {
    // In this order: nothing is exported any more when the memory is let go.
    exports: Exports,
    memory: Arc<PhysicalMemory>,
}

impl Holds for SharedChunk {
    fn physical(&self) -> &PhysicalMemory {
        &self.memory
    }
    fn exports(&self) -> &Exports {
        &self.exports
    }
}

impl Shares {
    fn hold(&self, chunk: &Chunk) -> Arc<SharedChunk> {
        let mut chunks = lock(&self.0);
        if let Some(held) = chunks.get(&chunk.order()).and_then(Weak::upgrade) {
            return held;
        }
        chunks.retain(|_, chunk| chunk.strong_count() > 0);
        let held = Arc::new(SharedChunk {
            exports: Exports::default(),
            memory: Arc::clone(chunk.memory()),
        });
        chunks.insert(chunk.order(), Arc::downgrade(&held));
        held
    }
}

impl Block {
    /// Makes the block fit to be sent over a [`Channel`](crate::share::Channel), published on the
    /// exchange or brought to a group: as a window on its chunk, which is exported once, and imported
    /// once by each peer, however many blocks of it go there.
    ///
    /// The block stays allocated until the last clone of the result is gone, and its chunk is not
    /// trimmed meanwhile. To go on using it here, share an `Arc` of it:
    /// `Shared::try_from(Arc::clone(&block))`.
    ///
    /// **A handle names all of the chunk.** Whoever imports the block can reach every block of its
    /// chunk, those allocated later too, as [`Shared::window`] says: give what others must not see a
    /// heap of its own.
    ///
    /// **It is not probed.** A fetch over the exchange with `probe` has nothing to write its word to, for
    /// what lies behind a block may be another's: `Proof::why_not` says so.
    ///
    /// **A freed block has a next user.** Importers that still have it mapped then read and write
    /// another block. On the exchange the publication holds the block until
    /// `Published::withdraw` has returned without an error, which gives it back; over a channel, until the other process has said that it is done, with its
    /// GPU work too.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the heap was not built
    /// [`shareable`](super::HeapOptions::shareable). The block is given back then.
    ///
    /// ```
    /// use std::alloc::Layout;
    /// use std::sync::Arc;
    /// use egmem::driver::{Access, HandleType, NodeId};
    /// use egmem::share::{ImportOptions, Shared};
    /// use egmem::{Driver, Heap, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let heap = Heap::on(NodeId(0)).shareable().build(&driver)?;
    /// let block = Arc::new(heap.allocate(Layout::new::<[u64; 1000]>())?);
    /// let shared = Shared::try_from(Arc::clone(&block))?;
    /// let (description, handles) = (
    ///     shared.describe(Access::ReadWrite)?,
    ///     shared.export(HandleType::PosixFd)?,
    /// );
    ///
    /// // In another process, to which `Channel::send` or the exchange has brought both:
    /// let imported = ImportOptions::new().import(&driver, &description, handles)?;
    /// assert_eq!(imported.len(), 8000);
    /// imported.put(16, 42_u64)?;
    /// assert_eq!(block.get::<u64>(16)?, 42);
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn share(self) -> Result<Shared> {
        Shared::try_from(Arc::new(self))
    }
}

impl TryFrom<Arc<Block>> for Shared {
    type Error = Error;

    /// As [`Block::share`], of a block that is used here too.
    fn try_from(block: Arc<Block>) -> Result<Self> {
        let heap = block.heap();
        let backing = lock(&heap.backing);
        // There is a chunk at each block.
        let chunk = backing
            .as_ref()
            .and_then(|all| all.chunk_at(block.offset()));
        let chunk = chunk.filter(|chunk| chunk.memory().props().handle_types.bits() != 0);
        let Some(chunk) = chunk else {
            let why = "its heap was built without `shareable`";
            return Err(Error::invalid("block", why));
        };
        let within = block.offset() - chunk.range().start;
        let held = heap.shares.hold(chunk);
        drop(backing);
        Self::from_held(vec![held], within, crate::Memory::len(&*block), block)
    }
}
