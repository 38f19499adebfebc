//! The allocators that `replay` and the benchmark "heap" compare the heap with.
//!
//! Each manages memory that this program does not touch: a range of offsets, or of addresses that the
//! kernel backs only where the allocator itself writes. glibc and mimalloc take memory from the kernel
//! without a capacity.

mod best_fit;
mod buddy;
mod glibc;
mod kind;
mod mimalloc;
mod offset;
mod range;
mod talc;
#[cfg(test)]
mod tests;
mod tlsf;
pub mod umf;

pub use kind::{Kind, SharedVisitor, Visitor};

use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// An allocator for one thread.
pub trait Contestant {
    /// An allocated block.
    type Block: Send;

    /// Allocates, or not if there is no room. `layout` has at least one byte.
    fn allocate(&mut self, layout: Layout) -> Option<Self::Block>;

    /// Frees.
    ///
    /// # Safety
    /// `block` was allocated by this contestant with this `layout`.
    unsafe fn free(&mut self, block: Self::Block, layout: Layout);

    /// Where a block starts: an offset or an address, in bytes.
    fn start(&self, block: &Self::Block) -> u64;

    /// Bytes of its books that it maps by itself, as far as they are known.
    fn mapped(&self) -> u64 {
        0
    }
}

/// An allocator for many threads.
pub trait Shared: Sync {
    /// An allocated block; another thread may free it.
    type Block: Send;

    /// Allocates, or not if there is no room. `layout` has at least one byte.
    fn allocate(&self, layout: Layout) -> Option<Self::Block>;

    /// Frees.
    ///
    /// # Safety
    /// `block` was allocated by this contestant with this `layout`.
    unsafe fn free(&self, block: Self::Block, layout: Layout);

    /// Where a block starts: an offset or an address, in bytes.
    fn start(&self, block: &Self::Block) -> u64;

    /// Where a block's bytes are, if they are there: its owner may write them.
    fn address(&self, _block: &Self::Block) -> Option<NonNull<u8>> {
        None
    }

    /// The memory that it has, in bytes, where that is more than was written.
    fn backed(&self) -> Option<u64> {
        None
    }

    /// Bytes of its books that it maps by itself, as far as they are known.
    fn mapped(&self) -> u64 {
        0
    }
}

/// An allocator for many threads is also one for one thread.
impl<S: Shared> Contestant for S {
    type Block = S::Block;

    #[inline]
    fn allocate(&mut self, layout: Layout) -> Option<S::Block> {
        Shared::allocate(self, layout)
    }

    #[inline]
    unsafe fn free(&mut self, block: S::Block, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { Shared::free(self, block, layout) }
    }

    #[inline]
    fn start(&self, block: &S::Block) -> u64 {
        Shared::start(self, block)
    }

    fn mapped(&self) -> u64 {
        Shared::mapped(self)
    }
}

/// An allocator for one thread, behind a lock for many.
pub struct Locked<C>(Mutex<C>);

impl<C> Locked<C> {
    /// Puts it behind a lock.
    pub fn new(contestant: C) -> Self {
        Self(Mutex::new(contestant))
    }
}

impl<C: Contestant + Send> Shared for Locked<C> {
    type Block = C::Block;

    #[inline]
    fn allocate(&self, layout: Layout) -> Option<C::Block> {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.allocate(layout)
    }

    #[inline]
    unsafe fn free(&self, block: C::Block, layout: Layout) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as the caller promises; allocations went to `inner`.
        unsafe { inner.free(block, layout) }
    }

    fn start(&self, block: &C::Block) -> u64 {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.start(block)
    }
}

/// The requirements that a contestant is made for.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// The bytes that it may allocate, including its own metadata between them.
    pub capacity: u64,
    /// How many blocks live at once at most.
    pub blocks: u32,
    /// The greatest alignment that will be asked for.
    pub align: u64,
}

impl Room {
    /// Capacities are whole multiples of this, in bytes: a heap's limit is one.
    pub const UNIT: u64 = 2 << 20;
}
