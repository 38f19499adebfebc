//! Zeros: when a block is allocated, and when it changes owners.

use super::piece::Piece;
use super::shared::Shared;
use crate::driver::{Access, DevicePtr, Location, Relaxed};
use crate::memory::CpuView;
use crate::{Error, Result, Stream};

impl Shared {
    /// Overwrites all that a block takes with zeros and waits for the end. In debug mode, what it takes
    /// beside its own bytes is left.
    ///
    /// # Safety
    /// The piece is in use, and nobody else uses it.
    pub(super) unsafe fn zero(&self, piece: &Piece) -> Result<()> {
        let bytes = match self.watch {
            Some(_) => piece.bytes,
            None => piece.taken(),
        };
        // SAFETY: the caller's promise.
        unsafe { self.zero_range(piece.offset, bytes) }
    }

    /// The same for a part of it: from `offset`, in bytes from the heap's start, so many `bytes`, both
    /// multiples of 16.
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    pub(super) unsafe fn zero_range(&self, offset: u64, bytes: u64) -> Result<()> {
        let start = DevicePtr(self.start + offset);
        if self.host == Access::ReadWrite {
            // SAFETY: the heap's memory is mapped and granted while it has blocks, and of this one
            // nobody else has a byte; blocks are whole words.
            let view = unsafe { CpuView::new(start, bytes, true) };
            return view.fill(0, bytes, 0);
        }
        let Some(gpu) = self.gpu else {
            return Err(Error::NotAccessible {
                who: Location::Host,
                have: self.host,
                need: Access::ReadWrite,
            });
        };
        // Another thread may be capturing its streams.
        let _relaxed = Relaxed::new(&self.driver);
        let stream = Stream::new(&self.driver, gpu)?;
        // SAFETY: as above; the work ends before this returns.
        let put = unsafe { stream.memset_async(start, 0, bytes) };
        put.and(stream.synchronize())
    }

    /// Takes a block back the way that the heap's options want. Does nothing in a forked child.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    #[inline]
    pub(super) unsafe fn release(&self, piece: &Piece) {
        if self.plain_in.is_current() {
            // SAFETY: the caller's promise.
            unsafe { self.free(piece) }
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.release_with_care(piece) }
        }
    }

    #[cold]
    #[inline(never)]
    unsafe fn release_with_care(&self, piece: &Piece) {
        if !self.born.is_current() {
            // Locks may be held for ever here, and the bytes are the parent's.
            return;
        }
        if let Some(watch) = &self.watch {
            // The heap ends no sooner than this.
            let Some(this) = self.this.upgrade() else {
                return; // not while there is a block
            };
            if watch.free(self, piece.offset) {
                this.count_freed(piece.bytes);
            }
            watch.tell();
            return;
        }
        // SAFETY: the caller's promise: the block is at its end.
        if unsafe { self.may_be_used_again(piece) } {
            // SAFETY: the caller's promise.
            unsafe { self.free(piece) }
        } else if let Some(this) = self.this.upgrade() {
            this.note_freed_later(piece.bytes);
        }
    }

    /// Takes a block back that was freed after GPU work, which has passed.
    ///
    /// # Safety
    /// The piece is no longer anybody's.
    pub(super) unsafe fn take_back_passed(&self, piece: &Piece) {
        match &self.watch {
            Some(watch) => watch.passed(self, piece.offset),
            // SAFETY: the caller's promise.
            None => unsafe { self.take_back_scrubbed(piece) },
        }
    }

    /// Gives a block straight back to the core, scrubbed where the heap is to.
    ///
    /// # Safety
    /// The piece is no longer anybody's.
    pub(super) unsafe fn take_back_scrubbed(&self, piece: &Piece) {
        // SAFETY: the caller's promise.
        if unsafe { self.may_be_used_again(piece) } {
            self.take_back(*piece);
        }
    }

    /// Whether a block may be given to another owner; it is scrubbed where the heap is to.
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    unsafe fn may_be_used_again(&self, piece: &Piece) -> bool {
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
