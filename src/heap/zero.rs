//! Writes zeros: when a block is allocated, and when it changes owners.

use super::debug::Left;
use super::inner::HeapInner;
use super::piece::Piece;
use crate::driver::{Access, DevicePtr, Location, Relaxed};
use crate::memory::CpuView;
use crate::{Error, Result, Stream};

impl HeapInner {
    /// Overwrites all bytes that a block takes with zeros and waits for the end. In debug mode, leaves the
    /// bytes beside the block's own.
    ///
    /// # Safety
    /// The piece is in use, and nothing else uses it.
    pub(super) unsafe fn zero(&self, piece: &Piece) -> Result<()> {
        let bytes = match self.watch {
            Some(_) => piece.bytes,
            None => piece.taken(),
        };
        // SAFETY: the caller's promise.
        unsafe { self.zero_range(piece.offset, bytes) }
    }

    /// Overwrites a part of a block: `bytes` from `offset`, counted from the heap's start, both multiples of
    /// 16.
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    pub(super) unsafe fn zero_range(&self, offset: u64, bytes: u64) -> Result<()> {
        let start = DevicePtr(self.facts.start + offset);
        if self.facts.host == Access::ReadWrite {
            // SAFETY: the heap's memory is mapped and granted while it has blocks. Nothing else uses a byte
            // of this block, and blocks are whole words.
            let view = unsafe { CpuView::new(start, bytes, true) };
            return view.fill(0, bytes, 0);
        }
        let Some(gpu) = self.facts.gpu else {
            return Err(Error::NotAccessible {
                who: Location::Host,
                have: self.facts.host,
                need: Access::ReadWrite,
            });
        };
        // Another thread may be capturing its streams.
        let _relaxed = Relaxed::new(&self.facts.driver);
        let stream = Stream::new(&self.facts.driver, gpu)?;
        // SAFETY: as above; the work ends before this returns.
        let put = unsafe { stream.memset_async(start, 0, bytes) };
        put.and(stream.synchronize())
    }

    /// Frees a block as the heap's options require. Does nothing in a forked child.
    ///
    /// # Safety
    /// As [`free`](Self::free).
    #[inline]
    pub(super) unsafe fn release(&self, piece: &Piece) {
        if self.facts.plain_in.is_current() {
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
        if !self.facts.born.is_current() {
            // In a forked child: locks may never be released, and the bytes are the parent's.
            return;
        }
        if let Some(watch) = &self.watch {
            // Keeps the heap alive until this returns.
            let Some(this) = self.this.upgrade() else {
                return; // unreachable: the block keeps the heap alive
            };
            if watch.free(piece.offset, &|left| self.take_back_left(&left)) {
                this.count_freed(piece.bytes);
            }
            watch.tell();
            return;
        }
        // SAFETY: the caller promises that the block is no longer used.
        if unsafe { self.may_be_used_again(piece) } {
            // SAFETY: the caller's promise.
            unsafe { self.free(piece) }
        } else if let Some(this) = self.this.upgrade() {
            this.note_freed_later(piece.bytes);
        }
    }

    /// Returns a block whose GPU work has finished to the core.
    ///
    /// # Safety
    /// The piece has no owner any more.
    pub(super) unsafe fn take_back_passed(&self, piece: &Piece) {
        match &self.watch {
            Some(watch) => watch.passed(piece.offset, &|left| self.take_back_left(&left)),
            // SAFETY: the caller's promise.
            None => unsafe { self.take_back_scrubbed(piece) },
        }
    }

    /// Returns a block directly to the core, scrubbed if the heap scrubs.
    ///
    /// # Safety
    /// The piece has no owner any more.
    unsafe fn take_back_scrubbed(&self, piece: &Piece) {
        // SAFETY: the caller's promise.
        if unsafe { self.may_be_used_again(piece) } {
            self.take_back(*piece);
        }
    }

    /// Returns a block that has left the debug mode's quarantine directly to the core.
    pub(super) fn take_back_left(&self, left: &Left) {
        // SAFETY: the block was freed and has left the table, so nothing else uses it.
        unsafe { self.take_back_scrubbed(left.piece()) };
    }

    /// Scrubs the block if the heap scrubs; returns whether it may be given to another owner.
    ///
    /// # Safety
    /// As [`zero`](Self::zero).
    unsafe fn may_be_used_again(&self, piece: &Piece) -> bool {
        if !self.facts.scrub {
            return true;
        }
        // SAFETY: the caller's promise.
        match unsafe { self.zero(piece) } {
            Ok(()) => true,
            Err(error) => {
                // Leaking the block is better than letting its next owner read the bytes.
                tracing::error!(%error, bytes = piece.bytes, "a block cannot be scrubbed and is withheld from reuse");
                false
            }
        }
    }
}
