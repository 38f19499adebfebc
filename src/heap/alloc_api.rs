//! A heap as the allocator of collections.

use std::alloc::Layout;
use std::ptr::NonNull;

use allocator_api2::alloc::{AllocError, Allocator};

use super::Heap;
use crate::driver::Access;

impl Heap {
    /// Whether Rust values may lie here.
    fn cpu_writes(&self) -> bool {
        self.shared().host == Access::ReadWrite
    }

    fn pointer(&self, offset: u64, len: usize) -> NonNull<[u8]> {
        let address = (self.shared().start + offset) as usize;
        let first = std::ptr::with_exposed_provenance_mut(address);
        // Not null: the driver reserves no range at 0.
        let first = NonNull::new(first).unwrap_or(NonNull::dangling());
        NonNull::slice_from_raw_parts(first, len)
    }

    fn allocate_for_cpu(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if layout.size() == 0 {
            let dangling = std::ptr::without_provenance_mut(layout.align());
            let dangling = NonNull::new(dangling).unwrap_or(NonNull::dangling());
            return Ok(NonNull::slice_from_raw_parts(dangling, 0));
        }
        if !self.cpu_writes() {
            tracing::warn!("a collection cannot lie in a heap that the CPU may not write to");
            return Err(AllocError);
        }
        let block = self.allocate(layout).map_err(|error| {
            tracing::warn!(%error, "a collection in a heap gets no memory");
            AllocError
        })?;
        // Its owner gives it back by its address.
        self.shared().name(block.piece());
        let block = std::mem::ManuallyDrop::new(block);
        Ok(self.pointer(block.offset(), layout.size()))
    }

    /// # Safety
    /// `ptr` was given out by [`allocate_for_cpu`](Self::allocate_for_cpu) of this heap for `layout`,
    /// and nobody uses it any more.
    unsafe fn deallocate_for_cpu(&self, ptr: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        let address = ptr.as_ptr().expose_provenance() as u64;
        let shared = self.shared();
        match shared.piece_at(address, layout.size() as u64, layout.align() as u64) {
            // SAFETY: a block of this heap, by the caller's word; `self` is a handle.
            Ok(piece) => unsafe { shared.release(&piece) },
            Err(error) => tracing::error!(%error, "a collection's memory is not given back"),
        }
    }
}

// SAFETY: blocks stay where they are until they are deallocated, wherever the handle moves; clones are
// handles of the same heap, and any of them gives back what another gave out. The CPU can read and
// write them, as checked, and nobody else is given the same bytes.
unsafe impl Allocator for Heap {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        self.allocate_for_cpu(layout)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.deallocate_for_cpu(ptr, layout) }
    }
}
