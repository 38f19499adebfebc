//! A chunk: physical memory, mapped and granted at its place in the heap.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::driver::Location;
use crate::vmm::{Mapped, MappedPart, PhysicalMemory};

/// Physical memory at its place in the heap.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(super) part: MappedPart<Arc<PhysicalMemory>>,
    pub(super) order: u64,
    /// The index of the site it was created at.
    pub(super) turn: usize,
    /// No longer part of the heap, but still mapped: the driver refused to unmap it.
    pub(super) dead: bool,
}

impl Chunk {
    /// Returns the chunk's range, in bytes from the heap's start.
    pub(crate) fn range(&self) -> Range<u64> {
        self.part.mapping().range()
    }

    /// Returns the chunk's size in bytes: at least 2 MiB.
    pub(crate) fn bytes(&self) -> u64 {
        self.part.mapping().size().padded()
    }

    /// Returns the memory. While a clone of it is held elsewhere, the chunk is not given back.
    #[cfg_attr(not(feature = "share"), allow(dead_code, reason = "for sharing"))]
    pub(crate) const fn memory(&self) -> &Arc<PhysicalMemory> {
        self.part.memory()
    }

    /// Returns the mapping.
    #[cfg(test)]
    pub(crate) fn mapping(&self) -> &crate::vmm::Mapping {
        self.part.mapping()
    }

    /// Returns the memory's location.
    pub(crate) fn location(&self) -> Location {
        self.part.memory().location()
    }

    /// Returns the chunk's number in the order of creation, from 0.
    #[cfg_attr(not(feature = "share"), allow(dead_code, reason = "for sharing"))]
    pub(crate) const fn order(&self) -> u64 {
        self.order
    }

    /// Unmaps and releases it, unless other code holds its memory.
    pub(super) fn retire(self, counts: &mut DriverCounts) -> Retired {
        let Self {
            part,
            order,
            turn,
            dead,
        } = self;
        let kept = |part, error| {
            let chunk = Self {
                part,
                order,
                turn,
                dead,
            };
            Retired::Kept(Box::new(chunk), error)
        };
        if Arc::strong_count(part.memory()) > 1 {
            return kept(part, None);
        }
        counts.unmap += 1;
        let memory = match part.unmap() {
            Ok(memory) => memory,
            Err(refused) => {
                let (part, error) = *refused;
                return kept(part, Some(error));
            }
        };
        counts.release += 1;
        match Arc::into_inner(memory).map(PhysicalMemory::try_release) {
            Some(Err(refused)) => {
                let (memory, error) = *refused;
                Retired::Unmapped(memory, Some(error))
            }
            _ => Retired::Unmapped(None, None),
        }
    }
}

/// The outcome of retiring a chunk.
pub(super) enum Retired {
    /// Unchanged: other code holds its memory, or the driver refused to unmap it.
    Kept(Box<Chunk>, Option<Error>),
    /// Unmapped. If the driver refused to release the memory, there is an error, and the memory unless there is no such
    /// memory.
    Unmapped(Option<PhysicalMemory>, Option<Error>),
}

/// Counts of a heap's driver calls. Refused calls count too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DriverCounts {
    /// `cuMemCreate`.
    pub create: u64,
    /// `cuMemMap`.
    pub map: u64,
    /// `cuMemSetAccess`.
    pub set_access: u64,
    /// `cuMemUnmap`.
    pub unmap: u64,
    /// `cuMemRelease`.
    pub release: u64,
    /// How often the heap asked for less after OUT_OF_MEMORY.
    pub halvings: u64,
}
