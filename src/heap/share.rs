//! Shares blocks with other processes, as windows on their chunks.

use std::sync::Arc;

use egmem_share::Shared;

use super::Block;
use crate::{Error, Result};

pub(super) use self::chunks::Shares;

mod chunks;

impl Block {
    /// Prepares the block to be sent over a [`Channel`](egmem_share::Channel), published on the exchange or
    /// contributed to a group. The block becomes a window on its chunk, which is exported once, and imported
    /// once by each peer, for any number of its blocks.
    ///
    /// The block stays allocated until the last clone of the result is dropped, and its chunk is not trimmed
    /// meanwhile. To keep using the block here, share an `Arc` of it: `Arc::clone(&block).share_arc()`.
    ///
    /// **A handle grants the whole chunk.** An importer of the block can access every block of its chunk,
    /// including blocks allocated later, as [`Shared::window`] says: put data that importers must not see
    /// into a heap of its own.
    ///
    /// **It is not probed.** A fetch over the exchange with `probe` has no place to write its word, because
    /// the bytes behind a block may belong to another block: `Proof::why_not` says so.
    ///
    /// **A freed block is reused.** Importers that still have it mapped then read and write another block. On
    /// the exchange the publication holds the block until `Published::withdraw` returns without an error,
    /// which frees it. Over a channel, keep the block until the other process has confirmed that it and its
    /// GPU work are done.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the heap was not built [`shareable`](super::HeapOptions::shareable), and in a
    /// forked child. The block is freed then, except in a forked child.
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
    /// let shared = Arc::clone(&block).share_arc()?;
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
        Arc::new(self).share_arc()
    }

    /// As [`share`](Self::share), for a block that stays in use here.
    ///
    /// # Errors
    /// As [`share`](Self::share).
    pub fn share_arc(self: Arc<Self>) -> Result<Shared> {
        let heap = self.heap();
        heap.expect_this_process()?;
        let backing = heap.supply.backing();
        // Every block has a chunk behind it.
        let chunk = backing.as_ref().and_then(|all| all.chunk_at(self.offset()));
        let chunk = chunk.filter(|chunk| chunk.memory().props().handle_types.bits() != 0);
        let Some(chunk) = chunk else {
            let why = "its heap was built without `shareable`";
            return Err(Error::invalid("block", why));
        };
        let within = self.offset() - chunk.range().start;
        let held = heap.shares.hold(chunk);
        drop(backing);
        let len = crate::Memory::len(&*self);
        Shared::from_held(vec![held], within, len, self)
    }
}
