//! Blocks that one call allocated, which are freed together.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use egmem::Block;

use crate::frees::free_after_gpus;

/// Blocks that one call allocated: they are freed together. The last reference is dropped without the GIL.
pub struct Many {
    /// The heap.
    pub heap: egmem::Heap,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// Their bytes.
    pub bytes: u64,
    /// Whether code outside of this crate may have an address.
    pub exposed: AtomicBool,
}

impl Many {
    /// Notes that code outside of this crate has the address of a block.
    pub fn expose(&self) {
        self.exposed.store(true, Relaxed);
    }
}

impl Drop for Many {
    /// Frees the blocks, if an address was given away only after the GPUs' work.
    fn drop(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        let driver = self.heap.driver();
        if !driver.is_of_this_process() {
            std::mem::forget(blocks);
        } else if *self.exposed.get_mut() {
            free_after_gpus(driver, self.bytes, blocks);
        }
    }
}

/// One of many blocks, which it keeps.
pub struct OfMany {
    /// The blocks, of which this is one.
    pub many: Arc<Many>,
    /// Its index.
    pub index: usize,
}

impl OfMany {
    /// Returns the block.
    pub fn block(&self) -> &Block {
        &self.many.blocks[self.index]
    }

    /// Notes that code outside of this crate has the address.
    pub fn expose(&self) {
        self.many.expose();
    }
}
