//! The chunks that have shared blocks.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use egmem_share::{Exports, Holds};

use crate::backing::Chunk;
use crate::per_driver::lock;
use crate::vmm::PhysicalMemory;

/// The chunks of a heap that have shared blocks, so that each chunk is exported once. By the address of the chunk's memory,
/// which no other memory has while the entry can be upgraded.
#[derive(Debug, Default)]
pub(crate) struct Shares(Mutex<HashMap<usize, Weak<SharedChunk>>>);

/// Keeps a chunk's memory, so that it is not given back meanwhile.
#[derive(Debug)]
pub(super) struct SharedChunk {
    // In this order: the exports are dropped before the memory.
    exports: Exports,
    memory: Arc<PhysicalMemory>,
}

impl Holds for SharedChunk {
    fn physical(&self) -> &PhysicalMemory {
        &self.memory
    }
    fn exports(&self) -> &Exports {
        &self.exports
    }
}

impl Shares {
    pub(super) fn hold(&self, chunk: &Chunk) -> Arc<SharedChunk> {
        let mut chunks = lock(&self.0);
        let key = Arc::as_ptr(chunk.memory()).addr();
        if let Some(held) = chunks.get(&key).and_then(Weak::upgrade) {
            return held;
        }
        chunks.retain(|_, chunk| chunk.strong_count() > 0);
        let held = Arc::new(SharedChunk {
            exports: Exports::default(),
            memory: Arc::clone(chunk.memory()),
        });
        chunks.insert(key, Arc::downgrade(&held));
        held
    }
}
