//! A heap as the allocator of collections: one body, for allocator-api2's trait and for std's.
//!
//! Collections lend their bytes as `&T` and `&mut T`, so nobody else may write them: safe code must have no
//! other way to a byte that the allocator has given out. This is why it has none:
//!
//! - **The block** is nobody's but the collection's: no [`Block`](super::Block), and no view of one, names it.
//! - **Earlier views** of the same bytes have ended: a `CpuView` borrows its block, and the block was freed.
//! - **GPU work** of safe functions (`Stream::copy`, `Stream::fill`, `Prover`) has ended when they return, also
//!   where waiting is refused; they refuse a stream that a graph is captured from. Work that unsafe code puts on
//!   a stream is its own responsibility; [`free_after`](super::Block::free_after) returns the bytes to the heap
//!   only after it.
//! - **A second mapping** of the memory, in this process or another, needs a handle of it. The driver exports
//!   only memory that was created with a handle type. A handle names a whole chunk and cannot be revoked, so
//!   an importer may write every block of the chunk, those of later owners too. Therefore a heap whose chunks
//!   can be exported gives collections nothing ([`Heap::check_collections`]), even if nothing is shared yet. The
//!   chunk's `PhysicalMemory` is not public, and a heap makes its own chunks: none is built over memory that
//!   somebody else has a mapping of.
//! - **A DMA-BUF** of the address range is made by an unsafe function of the driver alone.
//! - **The heap itself** writes only bytes that are in no block: scrubbed, quarantined and guard bytes.

use std::alloc::Layout;
use std::ptr::NonNull;

use super::Heap;
use super::classes::Class;
use super::piece::{Kind, Piece};
use super::shared::Shared;
use crate::driver::{Access, Location};
use crate::{Error, Result};

impl Heap {
    /// Says why the heap is no allocator of collections, if it is not. Its
    /// `Allocator` then returns `AllocError` for every size but 0, and logs this error as a warning; a
    /// collection's functions that do not return errors (`push`) then end the process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a heap whose chunks can be exported
    /// ([`shareable`](super::HeapOptions::shareable) or [`handle_types`](super::HeapOptions::handle_types)):
    /// an importer of one block can write all of its chunk, at any time, so no `&T` may point there. Put
    /// collections into a heap of their own. [`Error::NotAccessible`] where the CPU may not read and write.
    ///
    /// ```
    /// use egmem::driver::{HandleTypes, NodeId};
    /// use egmem::{Driver, Error, Heap, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?;
    /// let shared = Heap::on(NodeId(0)).handle_types(HandleTypes::POSIX_FD).build(&driver)?;
    /// assert!(matches!(shared.check_collections(), Err(Error::InvalidArgument { .. })));
    /// Heap::on(NodeId(0)).build(&driver)?.check_collections()?;
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn check_collections(&self) -> Result<()> {
        let have = self.shared().host;
        if have != Access::ReadWrite {
            return Err(Error::NotAccessible {
                who: Location::Host,
                have,
                need: Access::ReadWrite,
            });
        }
        if self.shared().exportable {
            let why = "its chunks can be exported, and importers could write to a collection: use a heap \
                       without `shareable` for collections";
            return Err(Error::invalid("heap", why));
        }
        Ok(())
    }

    fn pointer(&self, offset: u64, len: usize) -> NonNull<[u8]> {
        let address = (self.shared().start + offset) as usize;
        let first = std::ptr::with_exposed_provenance_mut(address);
        // Not null: the driver reserves no range at 0.
        let first = NonNull::new(first).unwrap_or(NonNull::dangling());
        NonNull::slice_from_raw_parts(first, len)
    }

    #[track_caller]
    fn allocate_for_cpu(&self, layout: Layout) -> Option<NonNull<[u8]>> {
        if layout.size() == 0 {
            return Some(nothing(layout));
        }
        self.check_collections()
            .inspect_err(|error| tracing::warn!(%error, "a heap gives collections no memory"))
            .ok()?;
        let block = self
            .allocate(layout)
            .inspect_err(|error| tracing::warn!(%error, "a collection in a heap gets no memory"))
            .ok()?;
        // Its owner gives it back by its address.
        self.shared().name(block.piece());
        if let Some(watch) = &self.shared().watch {
            watch.is_collections(block.offset());
        }
        let block = std::mem::ManuallyDrop::new(block);
        Some(self.pointer(block.offset(), layout.size()))
    }

    #[track_caller]
    fn allocate_zeroed_for_cpu(&self, layout: Layout) -> Option<NonNull<[u8]>> {
        let memory = self.allocate_for_cpu(layout)?;
        // SAFETY: so many bytes are new, and the CPU writes to them.
        unsafe { memory.cast::<u8>().write_bytes(0, layout.size()) };
        Some(memory)
    }

    /// # Safety
    /// `ptr` was given out by this file's functions of this heap for `layout`, and nobody uses it any
    /// more.
    unsafe fn deallocate_for_cpu(&self, ptr: NonNull<u8>, layout: Layout) {
        if !self.shared().born.is_current() {
            return; // a forked child: to look the block up may take a lock that is held for ever
        }
        if let Some(piece) = self.piece_of(ptr, layout) {
            // SAFETY: a block of this heap, by the caller's word; `self` is a handle.
            unsafe { self.shared().release(&piece) }
        }
    }

    /// The block behind a collection's memory; none where that has no bytes.
    fn piece_of(&self, ptr: NonNull<u8>, layout: Layout) -> Option<Piece> {
        if layout.size() == 0 {
            return None;
        }
        let address = ptr.as_ptr().expose_provenance() as u64;
        let (bytes, align) = (layout.size() as u64, layout.align() as u64);
        self.shared()
            .piece_at(address, bytes, align)
            .inspect_err(|error| tracing::error!(%error, "a collection's memory is not a block"))
            .ok()
    }

    /// The memory with the size and alignment of `new`, where it lies if that goes. Its first bytes are
    /// what they were, as many as both have.
    ///
    /// # Safety
    /// As [`deallocate_for_cpu`](Self::deallocate_for_cpu), with `old`. Unless the result is none, only
    /// the result is used from then on.
    #[track_caller]
    unsafe fn resize_for_cpu(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<NonNull<[u8]>> {
        if let Some(mut piece) = self.piece_of(ptr, old)
            // SAFETY: the caller's promise.
            && unsafe {
                self.shared()
                    .resize_for_layout(&mut piece, new.size() as u64, new.align() as u64)
            }
        {
            return Some(self.pointer(piece.offset, new.size()));
        }
        let memory = self.allocate_for_cpu(new)?;
        let bytes = old.size().min(new.size());
        // SAFETY: both have so many bytes, and the second is new. The first is the caller's, and is not
        // used any more.
        unsafe {
            memory.cast::<u8>().copy_from_nonoverlapping(ptr, bytes);
            self.deallocate_for_cpu(ptr, old);
        }
        Some(memory)
    }

    /// # Safety
    /// As [`resize_for_cpu`](Self::resize_for_cpu); `new` is no smaller than `old`.
    #[track_caller]
    unsafe fn grow_zeroed_for_cpu(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<NonNull<[u8]>> {
        // SAFETY: the caller's promise.
        let memory = unsafe { self.resize_for_cpu(ptr, old, new)? };
        let more = new.size().saturating_sub(old.size());
        // SAFETY: `memory` has the bytes of `new`, the last of them nobody's before.
        unsafe { memory.cast::<u8>().add(old.size()).write_bytes(0, more) };
        Some(memory)
    }
}

impl Shared {
    /// [Resizes](Self::resize) a block whose owner knows it by its layout alone: only where a block of
    /// the new layout is of the same kind, and may be at this address.
    ///
    /// # Safety
    /// As [`resize`](Self::resize).
    unsafe fn resize_for_layout(&self, piece: &mut Piece, bytes: u64, align: u64) -> bool {
        let fits = (self.start + piece.offset).is_multiple_of(align);
        let same = match (piece.key.kind(), Class::of(bytes, align)) {
            (Kind::Small(class), Some(wanted)) => class == wanted,
            (Kind::Range(_), None) => true,
            _ => false,
        };
        // SAFETY: the caller's promise.
        fits && same && unsafe { self.resize(piece, bytes) }
    }
}

/// Memory without bytes.
fn nothing(layout: Layout) -> NonNull<[u8]> {
    let dangling = std::ptr::without_provenance_mut(layout.align());
    let dangling = NonNull::new(dangling).unwrap_or(NonNull::dangling());
    NonNull::slice_from_raw_parts(dangling, 0)
}

/// Implements the trait of a module that has `Allocator` and `AllocError`, for they are two where
/// allocator-api2 does not pass on std's.
macro_rules! allocator {
    ($($of:ident)::+) => {
        // SAFETY: blocks stay where they are until they are deallocated, wherever the handle moves;
        // clones are handles of the same heap, and any of them gives back what another gave out. The
        // CPU can read and write them, as checked, and nobody else has a way to the same bytes, which the
        // module's documentation argues.
        unsafe impl $($of)::+::Allocator for Heap {
            #[track_caller]
            fn allocate(&self, layout: Layout) -> std::result::Result<NonNull<[u8]>, $($of)::+::AllocError> {
                self.allocate_for_cpu(layout).ok_or($($of)::+::AllocError)
            }

            #[track_caller]
            fn allocate_zeroed(
                &self,
                layout: Layout,
            ) -> std::result::Result<NonNull<[u8]>, $($of)::+::AllocError> {
                self.allocate_zeroed_for_cpu(layout).ok_or($($of)::+::AllocError)
            }

            unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
                // SAFETY: the caller's promise.
                unsafe { self.deallocate_for_cpu(ptr, layout) }
            }

            #[track_caller]
            unsafe fn grow(
                &self,
                ptr: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> std::result::Result<NonNull<[u8]>, $($of)::+::AllocError> {
                // SAFETY: the caller's promise.
                let grown = unsafe { self.resize_for_cpu(ptr, old, new) };
                grown.ok_or($($of)::+::AllocError)
            }

            #[track_caller]
            unsafe fn grow_zeroed(
                &self,
                ptr: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> std::result::Result<NonNull<[u8]>, $($of)::+::AllocError> {
                // SAFETY: the caller's promise.
                let grown = unsafe { self.grow_zeroed_for_cpu(ptr, old, new) };
                grown.ok_or($($of)::+::AllocError)
            }

            #[track_caller]
            unsafe fn shrink(
                &self,
                ptr: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> std::result::Result<NonNull<[u8]>, $($of)::+::AllocError> {
                // SAFETY: the caller's promise.
                let shrunk = unsafe { self.resize_for_cpu(ptr, old, new) };
                shrunk.ok_or($($of)::+::AllocError)
            }
        }
    };
}

#[cfg(feature = "allocator-api2")]
allocator!(allocator_api2::alloc);
#[cfg(feature = "nightly")]
allocator!(std::alloc);
