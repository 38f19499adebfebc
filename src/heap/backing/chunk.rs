//! A chunk: physical memory, mapped and granted at its place in the heap.

use std::ops::Range;
use std::sync::Arc;

use crate::Error;
use crate::driver::Location;
use crate::vmm::{Mapping, PhysicalMemory};

/// Physical memory at its place in the heap.
#[derive(Debug)]
pub(crate) struct Chunk {
    // In this order: `mapping` is dropped before `memory`.
    pub(super) mapping: Mapping,
    pub(super) memory: Arc<PhysicalMemory>,
    pub(super) start: u64,
    pub(super) order: u64,
    /// The index of the site it was created at.
    pub(super) turn: usize,
    /// No longer part of the heap, but still mapped: the driver refused to unmap it.
    pub(super) dead: bool,
}

impl Chunk {
    /// Returns the chunk's range, in bytes from the heap's start.
    pub(crate) const fn range(&self) -> Range<u64> {
        self.start..self.end()
    }

    pub(super) const fn end(&self) -> u64 {
        self.start + self.mapping.size().padded()
    }

    /// Returns the chunk's size in bytes: at least 2 MiB.
    pub(crate) const fn bytes(&self) -> u64 {
        self.mapping.size().padded()
    }

    /// Returns the memory. While a clone of it is held elsewhere, the chunk is not given back.
    #[cfg_attr(not(feature = "share"), allow(dead_code, reason = "for sharing"))]
    pub(crate) const fn memory(&self) -> &Arc<PhysicalMemory> {
        &self.memory
    }

    /// Returns the mapping.
    #[cfg(test)]
    pub(crate) const fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Returns the memory's location.
    pub(crate) fn location(&self) -> Location {
        self.memory.location()
    }

    /// Returns the chunk's number in the order of creation, from 0.
    #[cfg_attr(not(feature = "share"), allow(dead_code, reason = "for sharing"))]
    pub(crate) const fn order(&self) -> u64 {
        self.order
    }

    /// Returns whether other code holds the memory too.
    pub(crate) fn is_held(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }

    /// Unmaps and releases it.
    pub(super) fn retire(self, counts: &mut Counts) -> Retired {
        let Self {
            mapping,
            memory,
            start,
            order,
            turn,
            dead,
        } = self;
        let again = |mapping, memory| {
            Box::new(Self {
                mapping,
                memory,
                start,
                order,
                turn,
                dead,
            })
        };
        let memory = match Arc::try_unwrap(memory) {
            Ok(memory) => memory,
            Err(memory) => return Retired::Held(again(mapping, memory)),
        };
        counts.unmap += 1;
        if let Err(refused) = mapping.unmap() {
            let (mapping, error) = *refused;
            return Retired::Refused(again(mapping, Arc::new(memory)), error);
        }
        counts.release += 1;
        match memory.try_release() {
            Ok(()) => Retired::Gone,
            Err(refused) => {
                let (memory, error) = *refused;
                Retired::Unmapped(memory, error)
            }
        }
    }
}

/// The outcome of retiring a chunk.
pub(super) enum Retired {
    /// Unmapped and released.
    Gone,
    /// Unchanged: other code holds its memory.
    Held(Box<Chunk>),
    /// Unchanged: the driver refused to unmap it.
    Refused(Box<Chunk>, Error),
    /// Unmapped, but the driver refused to release the memory; `None`: there is no such memory.
    Unmapped(Option<PhysicalMemory>, Error),
}

/// Counts of the driver calls for a heap's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Counts {
    /// `cuMemCreate`; refused calls count too, here and below.
    pub create: u64,
    /// `cuMemMap`
    pub map: u64,
    /// `cuMemSetAccess`
    pub set_access: u64,
    /// `cuMemUnmap`
    pub unmap: u64,
    /// `cuMemRelease`
    pub release: u64,
    /// Chunks that became part of the heap.
    pub chunks_made: u64,
    /// Chunks that were given back.
    pub chunks_given_back: u64,
    /// How often a smaller chunk was tried because memory was short.
    pub halvings: u64,
}
