//! Zeros: when a block is allocated, and when it changes owners.

use super::shared::{Piece, Shared};
use crate::driver::{Access, DevicePtr, Location};
use crate::memory::CpuView;
use crate::{Error, Result, Stream};

impl Shared {
    /// Overwrites all that a block takes with zeros and waits for the end.
    ///
    /// # Safety
    /// The piece is in use, and nobody else uses it.
    pub(super) unsafe fn zero(&self, piece: &Piece) -> Result<()> {
        let start = DevicePtr(self.start + piece.offset);
        if self.host == Access::ReadWrite {
            // SAFETY: the heap's memory is mapped and granted while it has blocks, and of this one
            // nobody else has a byte; blocks are whole words.
            let view = unsafe { CpuView::new(start, piece.taken(), true) };
            return view.fill(0, piece.taken(), 0);
        }
        let Some(gpu) = self.gpu else {
            return Err(Error::NotAccessible {
                who: Location::Host,
                have: self.host,
                need: Access::ReadWrite,
            });
        };
        let stream = Stream::new(&self.driver, gpu)?;
        // SAFETY: as above; the work ends before this returns.
        let put = unsafe { stream.memset_async(start, 0, piece.taken()) };
        put.and(stream.synchronize())
    }

    /// Takes a block back the way that the heap's options want.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    #[inline]
    pub(super) unsafe fn release(&self, piece: &Piece) {
        if self.scrub {
            // SAFETY: the caller's promise.
            unsafe { self.release_with_care(piece) }
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.free(piece) }
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn release_with_care(&self, piece: &Piece) {
        // SAFETY: the caller's promise: the block is at its end.
        if unsafe { self.may_be_used_again(piece) } {
            // SAFETY: the caller's promise.
            unsafe { self.free(piece) }
        } else if let Some(this) = self.this.upgrade() {
            this.note_freed_later(piece.bytes);
        }
    }

    /// Whether a block may be given to another owner; it is scrubbed where the heap is to.
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    pub(super) unsafe fn may_be_used_again(&self, piece: &Piece) -> bool {
        if !self.scrub {
            return true;
        }
        // SAFETY: the caller's promise.
        match unsafe { self.zero(piece) } {
            Ok(()) => true,
            Err(error) => {
                // Better out of use for good than read by its next owner.
                tracing::error!(%error, bytes = piece.bytes, "a block cannot be scrubbed and is not used again");
                false
            }
        }
    }
}
