//! Shares blocks with other processes, as windows on their chunks.

use std::ops::Range;
use std::sync::Arc;

use egmem_share::Shared;

use super::inner::HeapInner;
use super::{Block, Heap};
use crate::{Error, Result};

use self::chunks::SharedChunk;
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
        let (held, range) = self.heap().hold_chunk(self.offset(), "block")?;
        let within = self.offset() - range.start;
        let len = crate::Memory::len(&*self);
        Shared::from_held(vec![held], within, len, self)
    }
}

impl Heap {
    /// Prepares the chunk that has the byte at `offset` from the heap's first address, as [`Block::share`] prepares one
    /// block: for processes that learn of many blocks by their [offsets](Block::offset). Returns all of the chunk, and the
    /// offset where it begins.
    ///
    /// The chunk is not trimmed until the last clone of the result is dropped. Its blocks are freed and reused meanwhile:
    /// see [`Block::share`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the heap was not built [`shareable`](super::HeapOptions::shareable), if it has no
    /// memory at the offset, and in a forked child.
    ///
    /// ```
    /// use std::alloc::Layout;
    /// use egmem::driver::NodeId;
    /// use egmem::{Driver, Heap, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let heap = Heap::on(NodeId(0)).shareable().build(&driver)?;
    /// let block = heap.allocate(Layout::new::<u64>())?;
    /// block.put(0, 42_u64)?;
    /// let (shared, start) = heap.share_chunk(block.offset())?;
    /// assert_eq!(shared.word(block.offset() - start)?, 42);
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn share_chunk(&self, offset: u64) -> Result<(Shared, u64)> {
        let (held, range) = self.inner().hold_chunk(offset, "heap")?;
        let shared = Shared::from_held(vec![held], 0, range.end - range.start, ())?;
        Ok((shared, range.start))
    }
}

impl HeapInner {
    /// Keeps the chunk at an offset, and returns its range.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    fn hold_chunk(
        &self,
        offset: u64,
        what: &'static str,
    ) -> Result<(Arc<SharedChunk>, Range<u64>)> {
        self.expect_this_process()?;
        let backing = self.supply.backing();
        let Some(chunk) = backing.as_ref().and_then(|all| all.chunk_at(offset)) else {
            let why = format!("it has no memory at offset {offset}");
            return Err(Error::invalid(what, why));
        };
        if chunk.memory().props().handle_types.bits() == 0 {
            let why = "the heap is not shareable";
            return Err(Error::invalid(what, why));
        }
        Ok((self.shares.hold(chunk), chunk.range()))
    }
}
