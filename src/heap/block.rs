//! A block of a heap.

use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::Location as Caller;
use std::ptr::NonNull;
use std::sync::Arc;

use egmem_core::Backing;

use super::backing::Chunk;
use super::deferred::Deferred;
use super::inner::HeapInner;
use super::piece::Piece;
use crate::driver::{Access, DevicePtr, Driver, Location};
use crate::guard::name_missing;
use crate::memory::{AccessChecks, CpuView, Engine, Memory, cpu_accessors, impl_cpu_memory};
use crate::{Error, Event, Result, Stream};

/// Memory from a [`Heap`](super::Heap), freed on drop.
///
/// # Dropping is host-ordered
/// The heap may hand out a dropped block again at once, to any thread, while a GPU still works on it. Drop
/// the block after that work has finished, or free it with [`free_after`](Self::free_after).
///
/// A block may outlive all handles of its heap; the heap's memory is released with its last block.
pub struct Block {
    /// Kept alive by the heap's handles and, after the last one, by its blocks.
    heap: NonNull<HeapInner>,
    piece: Piece,
}

// SAFETY: `HeapInner` is Sync, and any thread may free a block.
unsafe impl Send for Block {}
// SAFETY: a shared reference allows only reads of the piece and views, which are Sync.
unsafe impl Sync for Block {}

impl Block {
    /// # Safety
    /// The piece was allocated from this heap, is counted there, and has no other owner.
    #[inline]
    pub(super) unsafe fn new(heap: &HeapInner, piece: Piece) -> Self {
        let heap = NonNull::from(heap);
        Self { heap, piece }
    }

    #[inline]
    pub(super) fn heap(&self) -> &HeapInner {
        // SAFETY: the heap's handles keep it alive. Closing counts the live blocks, which include this one,
        // and keeps the heap for them.
        unsafe { self.heap.as_ref() }
    }

    pub(super) fn piece(&self) -> &Piece {
        &self.piece
    }

    /// Returns the piece without freeing it.
    pub(super) fn into_piece(self) -> Piece {
        ManuallyDrop::new(self).piece
    }

    pub(super) fn piece_mut(&mut self) -> &mut Piece {
        &mut self.piece
    }

    /// Returns the block's offset in bytes from the heap's first address.
    pub fn offset(&self) -> u64 {
        self.piece.offset
    }

    /// Returns the block's address: the same for every GPU and, on host memory, for the CPU.
    #[inline]
    pub fn device_ptr(&self) -> DevicePtr {
        DevicePtr(self.heap().facts.start + self.piece.offset)
    }

    /// Returns the number of bytes requested.
    pub fn len(&self) -> u64 {
        self.piece.bytes
    }

    /// Returns `false`: a block has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the CPU's view of the block.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        // SAFETY: the heap's memory stays mapped and granted while it has blocks. Blocks begin and end at
        // multiples of 16 bytes, so no two share a word. Safe code reaches the bytes through atomic views
        // only.
        unsafe { CpuView::granted(self.device_ptr(), self.len(), self.heap().facts.host) }
    }

    cpu_accessors!();

    /// Returns the bytes as a slice.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    ///
    /// # Safety
    /// While the slice lives, nothing may write the bytes: no GPU work in flight, no other process, no
    /// [`CpuView`] in another thread.
    pub unsafe fn as_slice(&self) -> Result<&[u8]> {
        let view = self.cpu()?;
        // SAFETY: `view` shows that the bytes are mapped and readable. The kernel or a previous owner
        // initialised them. The caller promises that nothing changes them.
        Ok(unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len() as usize) })
    }

    /// Returns the bytes as a mutable slice.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may read and write.
    ///
    /// # Safety
    /// While the slice lives, nothing else may read or write the bytes: no GPU work in flight, no other
    /// process.
    pub unsafe fn as_mut_slice(&mut self) -> Result<&mut [u8]> {
        let view = self.cpu()?;
        // An empty write fails unless the view is writable.
        view.write_at::<u8>(0, &[])?;
        // SAFETY: as for `as_slice`; writable as just checked, exclusive by the caller's promise.
        Ok(unsafe { std::slice::from_raw_parts_mut(view.as_ptr(), view.len() as usize) })
    }

    /// Frees the block once all work submitted to `stream` so far has run.
    ///
    /// The heap takes the block back when it would otherwise have to grow, or in
    /// [`Heap::collect`](super::Heap::collect). [`Heap::free_all_after`](super::Heap::free_all_after) frees
    /// many blocks at the cost of one event.
    ///
    /// Source: `cuEventRecord`, `cuEventQuery`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream, and for one that is being captured into a
    /// graph; the driver's errors. The error then contains the block, which is not freed: wait for the GPU's
    /// work and drop it, or [`forget`](NotFreed::forget) it. `?` does not convert this into an [`Error`],
    /// because that would drop the block, and the heap would hand it out while the GPU still uses it.
    #[track_caller]
    pub fn free_after(self, stream: &Stream) -> Result<(), NotFreed> {
        self.defer(|deferred, piece| deferred.after_stream(stream, &mut vec![piece]))
    }

    /// Frees the block once the work that `event` currently marks has run. Do not record the event again
    /// before then.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's event, and for an event of several processes
    /// ([`Event::interprocess`], [`Event::import`]), which another process can record again: use
    /// [`free_after`](Self::free_after); the driver's errors, such as CAPTURED_EVENT for an event that was recorded during
    /// a capture. The error then contains the block, as in [`free_after`](Self::free_after).
    #[track_caller]
    pub fn free_after_event(self, event: Arc<Event>) -> Result<(), NotFreed> {
        self.defer(|deferred, piece| deferred.after_event(event, piece))
    }

    #[track_caller]
    fn defer(
        self,
        put: impl FnOnce(&mut Deferred<Piece>, Piece) -> Result<()>,
    ) -> Result<(), NotFreed> {
        if let Err(error) = self.heap().expect_this_process() {
            return Err(NotFreed::new(error, self));
        }
        let block = ManuallyDrop::new(self);
        // Keeps the heap alive until the block is counted as freed and this function is done with it.
        let Some(heap) = block.heap().this.upgrade() else {
            return Ok(()); // unreachable: the block keeps the heap alive
        };
        let put = |deferred: &mut Deferred<Piece>| put(deferred, block.piece);
        heap.free_later(&[block.piece], Caller::caller(), put)
            .map_err(|error| NotFreed::new(error, ManuallyDrop::into_inner(block)))
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the block keeps `heap()` alive. The piece belongs to this block, which is being dropped,
        // and nothing of the heap is used after the call.
        unsafe { self.heap().release(&self.piece) }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("offset", &self.piece.offset)
            .field("len", &self.piece.bytes)
            .field("device_ptr", &self.device_ptr())
            .finish()
    }
}

impl_cpu_memory!(Block);

// SAFETY: the heap keeps the chunk below it mapped while the block lives, and the chunk's mapping answers.
unsafe impl AccessChecks for Block {
    /// All chunks of a heap have the same access for their whole life, so the first byte answers for all.
    fn gpu_access(&self, gpu: i32, _: Engine, _: u64, _: u64) -> Result<Access> {
        let driver = &self.heap().facts.driver;
        let who = Location::Device(gpu);
        if self.heap().facts.chosen.backing == Backing::Registered {
            // It is open to all GPUs, and no mapping of the driver's that could answer.
            Error::expect_gpu(gpu, driver.device_count()?)?;
            return Ok(Access::ReadWrite);
        }
        let flags = driver
            .mem_get_access(who, self.device_ptr())
            .map_err(|error| name_missing(driver, error, who))?;
        Access::from_flags(flags)
            .ok_or_else(|| Error::invalid_of("access flags", format!("{flags:#x}"), "0, 1 or 3"))
    }

    fn may_be_on_host(&self, _: u64, _: u64) -> bool {
        self.location().is_host()
    }

    /// Waits while the heap creates a chunk.
    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        let at = self.piece.offset + offset;
        let end = self.heap().at_chunk(at, |chunk| chunk.range().end);
        Some(len.min(end? - at))
    }

    fn is_read_only_for_cpu(&self, _: u64, _: u64) -> bool {
        self.heap().facts.host == Access::Read
    }
}

impl Memory for Block {
    fn driver(&self) -> &Driver {
        &self.heap().facts.driver
    }
    fn device_ptr(&self) -> DevicePtr {
        self.device_ptr()
    }
    fn len(&self) -> u64 {
        self.piece.bytes
    }
    /// Returns the location of the block's first byte. In a heap on several nodes this waits while the heap
    /// is growing, and a forked child gets [`Location::Host`].
    fn location(&self) -> Location {
        let heap = self.heap();
        heap.facts.location.unwrap_or_else(|| {
            // Every block has a chunk behind it.
            let location = heap.at_chunk(self.piece.offset, Chunk::location);
            location.unwrap_or(Location::Host)
        })
    }
}

/// The block that was not freed, and the reason.
#[derive(Debug)]
pub struct NotFreed {
    /// The heap's or the driver's error.
    pub error: Box<Error>,
    /// The block, unchanged.
    pub block: Block,
}

impl fmt::Display for NotFreed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a block was not given back: {}", self.error)
    }
}

impl std::error::Error for NotFreed {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.error)
    }
}

impl NotFreed {
    pub(super) fn new(error: Error, block: Block) -> Self {
        let error = Box::new(error);
        Self { error, block }
    }

    /// Returns the error and leaks the block: no thread gets it again, and the heap's memory is never
    /// released. Two users of one block would be worse.
    ///
    /// `block.free_after(&stream).map_err(NotFreed::forget)?`
    pub fn forget(self) -> Error {
        std::mem::forget(self.block);
        *self.error
    }
}
