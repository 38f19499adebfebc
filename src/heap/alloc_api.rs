//! Implements the `Allocator` traits of allocator-api2 and of std for a heap, with one shared body.
//!
//! Collections lend their bytes as `&T` and `&mut T`, so nothing else may write them: safe code must have no
//! other access to a byte that the allocator has handed out. It has none, for these reasons:
//!
//! - **The block** belongs to the collection alone: no [`Block`](super::Block), and no view of one, refers to
//!   it.
//! - **Earlier views** of the same bytes have ended: a `CpuView` borrows its block, and the block was freed.
//! - **GPU work** of safe functions (`Stream::copy`, `Stream::fill`, `Prover`) has ended when they return,
//!   even if the driver refuses to wait; they refuse a stream that is being captured into a graph. Work that
//!   unsafe code puts on a stream is its own responsibility; [`free_after`](super::Block::free_after) returns
//!   the bytes to the heap only after it.
//! - **A second mapping** of the memory, in this process or another, needs a handle of it. The driver exports
//!   only memory that was created with a handle type. A handle names a whole chunk and cannot be revoked, so
//!   an importer may write every block of the chunk, including blocks that are allocated later. Therefore a
//!   heap whose chunks can be exported refuses collections ([`Heap::check_collections`]), even if nothing is
//!   shared yet. The chunk's `PhysicalMemory` is not public, and a heap makes its own chunks: no heap is
//!   built over memory that other code has mapped.
//! - **A DMA-BUF** of the address range can be made only through an unsafe function of the driver.
//! - **The heap itself** writes only bytes that are in no block: scrubbed, quarantined and guard bytes.

use std::alloc::Layout;
use std::ptr::NonNull;

use super::Heap;
use super::classes::Class;
use super::inner::HeapInner;
use super::piece::{Extent, Kind, Piece};
use super::ranges::{Core, Owner};
use crate::driver::{Access, Location};
use crate::{Error, Result};

impl Heap {
    /// Checks that collections may allocate from this heap. If they may not, the heap's `Allocator` returns
    /// `AllocError` for every size except 0 and logs this error as a warning; collection functions that
    /// return no errors (`push`) then abort the process.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a heap whose chunks can be exported
    /// ([`shareable`](super::HeapOptions::shareable) or [`handle_types`](super::HeapOptions::handle_types)):
    /// an importer of one block can write its whole chunk at any time, so no `&T` may point there. Put
    /// collections into a heap of their own. [`Error::NotAccessible`] if the CPU may not read and write.
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
        let have = self.inner().facts.host;
        if have != Access::ReadWrite {
            return Err(Error::NotAccessible {
                who: Location::Host,
                have,
                need: Access::ReadWrite,
            });
        }
        if self.inner().facts.exportable {
            let why = "its chunks can be exported, and importers could write to a collection: use a heap \
                       without `shareable` for collections";
            return Err(Error::invalid("heap", why));
        }
        Ok(())
    }

    fn pointer(&self, offset: u64, len: usize) -> NonNull<[u8]> {
        let address = (self.inner().facts.start + offset) as usize;
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
            .allocate(self.inner().with_all_usable(layout))
            .inspect_err(|error| tracing::warn!(%error, "a collection in a heap gets no memory"))
            .ok()?;
        // The collection frees the block by its address.
        self.inner().name(block.piece());
        if let Some(watch) = &self.inner().watch {
            watch.is_collections(block.offset());
        }
        let block = std::mem::ManuallyDrop::new(block);
        Some(self.pointer(block.offset(), block.len() as usize))
    }

    #[track_caller]
    fn allocate_zeroed_for_cpu(&self, layout: Layout) -> Option<NonNull<[u8]>> {
        let memory = self.allocate_for_cpu(layout)?;
        // SAFETY: the block is new and has this many bytes, and the CPU may write to them.
        unsafe { memory.cast::<u8>().write_bytes(0, memory.len()) };
        Some(memory)
    }

    /// # Safety
    /// This heap's functions in this file returned `ptr` for `layout`, or for one of the same alignment and at most its
    /// size, with at least its size as the length; and it is no longer in use.
    unsafe fn deallocate_for_cpu(&self, ptr: NonNull<u8>, layout: Layout) {
        if let Some(piece) = self.piece_of(ptr, layout) {
            // SAFETY: the caller promises that this is an unused block of this heap; `self` is a handle.
            unsafe { self.inner().release(&piece) }
        }
    }

    /// Returns the block behind a collection's memory, or `None` for memory without bytes, and in a forked child: there
    /// the lookup may block on a lock whose owner does not exist.
    fn piece_of(&self, ptr: NonNull<u8>, layout: Layout) -> Option<Piece> {
        if layout.size() == 0 || !self.inner().facts.born.is_current() {
            return None;
        }
        let address = ptr.as_ptr().expose_provenance() as u64;
        // Every layout that fits the block has the same usable size, which is the size that was counted.
        let layout = self.inner().with_all_usable(layout);
        let (bytes, align) = (layout.size() as u64, layout.align() as u64);
        self.inner()
            .piece_at(address, bytes, align)
            .inspect_err(|error| tracing::error!(%error, "a collection's memory is not a block"))
            .ok()
    }

    /// Resizes the memory to `new`, in place if possible. Preserves the first bytes, up to the smaller of
    /// both sizes.
    ///
    /// # Safety
    /// As [`deallocate_for_cpu`](Self::deallocate_for_cpu), with `old`. If the result is `Some`, the caller
    /// uses only the result from then on.
    #[track_caller]
    unsafe fn resize_for_cpu(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<NonNull<[u8]>> {
        let usable = self.inner().with_all_usable(new);
        if let Some(mut piece) = self.piece_of(ptr, old)
            // SAFETY: the caller's promise.
            && unsafe {
                self.inner()
                    .resize_for_layout(&mut piece, usable.size() as u64, usable.align() as u64)
            }
        {
            self.inner().name(&piece);
            return Some(self.pointer(piece.offset, usable.size()));
        }
        let memory = self.allocate_for_cpu(new)?;
        let bytes = old.size().min(new.size());
        // SAFETY: both have this many bytes, and the second is new. The first belongs to the caller and is
        // not used afterwards.
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
        let more = memory.len().saturating_sub(old.size());
        // SAFETY: `memory` has this many bytes behind the old ones, which the caller does not use yet.
        unsafe { memory.cast::<u8>().add(old.size()).write_bytes(0, more) };
        Some(memory)
    }
}

impl HeapInner {
    /// Makes a block findable by its address.
    #[inline]
    fn name(&self, piece: &Piece) {
        let Kind::Range(node) = piece.key.kind() else {
            return;
        };
        self.slabs.pages.set(piece.offset, Owner::Range(node));
    }

    /// Returns the block that begins at an address and was [named](Self::name), for callers that know only
    /// the address.
    #[inline]
    fn piece_at(&self, address: u64, bytes: u64, align: u64) -> Result<Piece> {
        if let Some(watch) = &self.watch {
            return watch.piece_at(address, bytes, align);
        }
        let offset = address.wrapping_sub(self.facts.start);
        let class = Class::of(bytes, align);
        if let Some(class) = class.filter(|class| !class.may_be_range(align)) {
            return Ok(Extent::small(offset, class).with(bytes));
        }
        // Other small blocks may be ranges.
        let node = match (self.slabs.pages.get(offset), class) {
            (Some(Owner::Range(node)), _) => node,
            (_, Some(class)) => return Ok(Extent::small(offset, class).with(bytes)),
            (_, None) => {
                let why = format!("no block of {bytes} bytes begins at {address:#x}");
                return Err(Error::invalid("address", why));
            }
        };
        let granules = Core::range_granules(bytes) as u32; // no more than the block has
        Ok(Extent::new(offset, node, granules).with(bytes))
    }

    /// Returns the layout with all the bytes that its block takes. In debug mode a block has exactly the bytes requested:
    /// its guard begins behind them.
    fn with_all_usable(&self, layout: Layout) -> Layout {
        if layout.size() == 0 || self.watch.is_some() {
            return layout;
        }
        // A size beyond the largest block's is refused as it is.
        let usable = Heap::usable_size(layout) as usize;
        Layout::from_size_align(usable, layout.align()).unwrap_or(layout)
    }

    /// [Resizes](Self::resize) a block whose owner knows only its layout. Succeeds only if a block of the new
    /// layout may have this kind and start at this address.
    ///
    /// # Safety
    /// As [`resize`](Self::resize).
    unsafe fn resize_for_layout(&self, piece: &mut Piece, bytes: u64, align: u64) -> bool {
        let fits = (self.facts.start + piece.offset).is_multiple_of(align);
        let same = match (piece.key.kind(), Class::of(bytes, align)) {
            (Kind::Small(class), Some(wanted)) => class == wanted,
            (Kind::Range(_), None) => true,
            // It keeps its page.
            (Kind::Range(_), Some(wanted)) => wanted.may_be_range(align),
            (Kind::Small(_), None) => false,
        };
        // SAFETY: the caller's promise.
        fits && same && unsafe { self.resize(piece, bytes) }
    }
}

/// Returns a zero-sized slice for `layout`.
fn nothing(layout: Layout) -> NonNull<[u8]> {
    let dangling = std::ptr::without_provenance_mut(layout.align());
    let dangling = NonNull::new(dangling).unwrap_or(NonNull::dangling());
    NonNull::slice_from_raw_parts(dangling, 0)
}

/// Implements the trait of a module that has `Allocator` and `AllocError`. There are two such modules if
/// allocator-api2 does not re-export std's.
macro_rules! allocator {
    ($($of:ident)::+) => {
        const _: () = {
            use $($of)::+::{AllocError, Allocator};

            type Memory = std::result::Result<NonNull<[u8]>, AllocError>;

            // SAFETY: blocks stay in place until they are deallocated, even if the handle moves. Clones are
            // handles of the same heap, and each of them can deallocate blocks of the others. The CPU can read
            // and write the blocks, as checked, and no other code has access to the same bytes, as the module's
            // documentation argues.
            unsafe impl Allocator for Heap {
                #[track_caller]
                fn allocate(&self, layout: Layout) -> Memory {
                    self.allocate_for_cpu(layout).ok_or(AllocError)
                }

                #[track_caller]
                fn allocate_zeroed(&self, layout: Layout) -> Memory {
                    self.allocate_zeroed_for_cpu(layout).ok_or(AllocError)
                }

                unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
                    // SAFETY: the caller's promise.
                    unsafe { self.deallocate_for_cpu(ptr, layout) }
                }

                #[track_caller]
                unsafe fn grow(&self, ptr: NonNull<u8>, old: Layout, new: Layout) -> Memory {
                    // SAFETY: the caller's promise.
                    unsafe { self.resize_for_cpu(ptr, old, new) }.ok_or(AllocError)
                }

                #[track_caller]
                unsafe fn grow_zeroed(&self, ptr: NonNull<u8>, old: Layout, new: Layout) -> Memory {
                    // SAFETY: the caller's promise.
                    unsafe { self.grow_zeroed_for_cpu(ptr, old, new) }.ok_or(AllocError)
                }

                #[track_caller]
                unsafe fn shrink(&self, ptr: NonNull<u8>, old: Layout, new: Layout) -> Memory {
                    // SAFETY: the caller's promise.
                    unsafe { self.resize_for_cpu(ptr, old, new) }.ok_or(AllocError)
                }
            }
        };
    };
}

#[cfg(feature = "allocator-api2")]
allocator!(allocator_api2::alloc);
#[cfg(feature = "nightly")]
allocator!(std::alloc);
