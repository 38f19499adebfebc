//! A block of a heap.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::piece::Piece;
use super::shared::Shared;
use crate::accessors::cpu_accessors;
use crate::driver::{Access, DevicePtr, Driver, Location};
use crate::explain::name_missing;
use crate::memory::{CpuView, Engine, Memory, Sealed, impl_cpu_memory};
use crate::{Error, Event, Result, Stream};

/// Memory from a [`Heap`](super::Heap), given back when dropped.
///
/// # Dropping is host-ordered
/// A dropped block may be given out again at once, to any thread, while a GPU still works on it.
/// Drop it after that work has finished, or give it back by [`free_after`](Self::free_after).
///
/// A block may outlive all handles of its heap; the heap's memory goes with its last block.
pub struct Block {
    /// Kept by the heap's handles and, after the last one, by its blocks.
    heap: NonNull<Shared>,
    piece: Piece,
}

// SAFETY: `Shared` is Sync, and a block is freed by any thread.
unsafe impl Send for Block {}
// SAFETY: what a shared reference allows is reads of the piece and views, which are Sync.
unsafe impl Sync for Block {}

impl Block {
    /// # Safety
    /// The piece was allocated from this heap, is counted there, and is nobody else's.
    #[inline]
    pub(super) unsafe fn new(heap: &Shared, piece: Piece) -> Self {
        let heap = NonNull::from(heap);
        Self { heap, piece }
    }

    #[inline]
    pub(super) fn heap(&self) -> &Shared {
        // SAFETY: handles keep it while there are any; closing counts the live blocks, of which this
        // is one, and keeps it for them.
        unsafe { self.heap.as_ref() }
    }

    pub(super) fn piece(&self) -> &Piece {
        &self.piece
    }

    /// The piece alone; the block has no end then.
    pub(super) fn into_piece(self) -> Piece {
        std::mem::ManuallyDrop::new(self).piece
    }

    pub(super) fn piece_mut(&mut self) -> &mut Piece {
        &mut self.piece
    }

    /// Where it begins, in bytes from the heap's first address.
    pub fn offset(&self) -> u64 {
        self.piece.offset
    }

    /// Its address, the same for every GPU and, on host memory, for the CPU.
    #[inline]
    pub fn device_ptr(&self) -> DevicePtr {
        DevicePtr(self.heap().start + self.piece.offset)
    }

    /// The bytes asked for.
    pub fn len(&self) -> u64 {
        self.piece.bytes
    }

    /// Never: a block has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The CPU's window on the block.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        let have = self.heap().host;
        if have == Access::None {
            return Err(Error::NotAccessible {
                who: Location::Host,
                have,
                need: Access::Read,
            });
        }
        // SAFETY: the heap's memory stays mapped and granted while it has blocks; blocks begin and
        // end at multiples of 16 bytes, so that none shares a word with another; safe code reaches
        // the bytes through atomic views only.
        Ok(unsafe { CpuView::new(self.device_ptr(), self.len(), have == Access::ReadWrite) })
    }

    cpu_accessors!();

    /// The bytes as a slice.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    ///
    /// # Safety
    /// While the slice lives, nobody may write the bytes: no GPU work in flight, no other process,
    /// no [`CpuView`] in another thread.
    pub unsafe fn as_slice(&self) -> Result<&[u8]> {
        let view = self.cpu()?;
        // SAFETY: mapped and readable as `view` shows, initialised by the kernel or by who had it
        // before; unchanged by the caller's word.
        Ok(unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len() as usize) })
    }

    /// The bytes as a mutable slice.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may read and write.
    ///
    /// # Safety
    /// While the slice lives, nobody else may read or write the bytes: no GPU work in flight, no
    /// other process.
    pub unsafe fn as_mut_slice(&mut self) -> Result<&mut [u8]> {
        let view = self.cpu()?;
        // An empty write asks whether the view is writable.
        view.write_at::<u8>(0, &[])?;
        // SAFETY: as for `as_slice`, writable as just seen, exclusive by the caller's word.
        Ok(unsafe { std::slice::from_raw_parts_mut(view.as_ptr(), view.len() as usize) })
    }

    /// Gives the block back once all that is on `stream` by now has run.
    ///
    /// It is given out again when the heap sees that: when it would have to grow, or at
    /// [`Heap::collect`](super::Heap::collect). Many blocks cost one event with
    /// [`Heap::free_all_after`](super::Heap::free_all_after).
    ///
    /// Source: `cuEventRecord`, `cuEventQuery`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream, and for one that is being captured
    /// into a graph; the driver's. Then the block is in the error, not given back: wait for the GPU's work
    /// and drop it, or [`forget`](NotFreed::forget) it. `?` makes no [`Error`] of that by itself, for the
    /// block would be dropped then, and given out again under the GPU's hands.
    #[track_caller]
    pub fn free_after(self, stream: &Stream) -> Result<(), NotFreed> {
        self.defer(|deferred, piece| deferred.after_stream(stream, piece))
    }

    /// Gives the block back once the work has run that `event` marks by now. The event must not be
    /// recorded anew until then.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's event; the driver's, such as CAPTURED_EVENT for
    /// one that was recorded in a capture. Then the block is in the error, as with
    /// [`free_after`](Self::free_after).
    #[track_caller]
    pub fn free_after_event(self, event: Arc<Event>) -> Result<(), NotFreed> {
        self.defer(|deferred, piece| deferred.after_event(event, piece))
    }

    #[track_caller]
    fn defer(
        self,
        put: impl FnOnce(
            &mut super::deferred::Deferred<Piece>,
            Piece,
        ) -> Result<(), super::deferred::Refused<Piece>>,
    ) -> Result<(), NotFreed> {
        // It stays until the block is counted as freed and nothing of it is used any more.
        let Some(heap) = self.heap().this.upgrade() else {
            return Ok(()); // not while there is a block
        };
        if let Some(watch) = &heap.watch {
            watch.defer(self.piece.offset, std::panic::Location::caller());
        }
        let refused = match crate::per_driver::lock(&heap.deferred).as_mut() {
            Some(deferred) => put(deferred, self.piece).err(),
            None => None,
        };
        match refused {
            Some(refused) => {
                if let Some(watch) = &heap.watch {
                    watch.undo_defer(self.piece.offset);
                }
                Err(NotFreed {
                    error: Box::new(refused.error),
                    block: self,
                })
            }
            None => {
                let bytes = self.len();
                std::mem::forget(self);
                heap.note_freed_later(bytes);
                Ok(())
            }
        }
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: `heap()` is there; the piece is this block's, which is at its end, and nothing of
        // the heap is used after the call.
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

impl Sealed for Block {
    /// All chunks of a heap are granted alike, and for good, so the first byte tells of all.
    fn gpu_access(&self, gpu: i32, _: Engine, _: u64, _: u64) -> Result<Access> {
        let driver = &self.heap().driver;
        let who = Location::Device(gpu);
        let flags = driver
            .mem_get_access(who, self.device_ptr())
            .map_err(|error| name_missing(driver, error, who))?;
        Access::from_flags(flags)
            .ok_or_else(|| Error::invalid("access flags", format!("the driver says {flags:#x}")))
    }

    fn is_read_only_for_cpu(&self, _: u64, _: u64) -> bool {
        self.heap().host == Access::Read
    }
}

impl Memory for Block {
    fn driver(&self) -> &Driver {
        &self.heap().driver
    }
    fn device_ptr(&self) -> DevicePtr {
        self.device_ptr()
    }
    fn len(&self) -> u64 {
        self.piece.bytes
    }
    /// Where its first byte lies. A heap on several nodes may be growing: then this waits.
    fn location(&self) -> Location {
        let heap = self.heap();
        heap.location.unwrap_or_else(|| {
            let backing = crate::per_driver::lock(&heap.backing);
            let chunk = backing
                .as_ref()
                .and_then(|all| all.chunk_at(self.piece.offset));
            // There is a chunk at each block.
            chunk.map_or(Location::Host, |chunk| chunk.location())
        })
    }
}

/// Why a block was not given back, and the block.
#[derive(Debug)]
pub struct NotFreed {
    /// What the driver refused.
    pub error: Box<Error>,
    /// The block, as it was.
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
    /// The error alone. The block is lost to the heap, which is better than two users of one block:
    /// nobody gets it again, and the heap's memory is kept for it for good.
    ///
    /// `block.free_after(&stream).map_err(NotFreed::forget)?`
    pub fn forget(self) -> Error {
        std::mem::forget(self.block);
        *self.error
    }
}
