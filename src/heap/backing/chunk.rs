//! A chunk: physical memory, mapped and granted at its place in the heap.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

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
}

/// Counts of a heap's driver calls. Refused calls count too. The calls for a registered chunk are named after the driver's
/// that they stand for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DriverCounts {
    /// `cuMemCreate`; for a registered chunk that can be shared `memfd_create`, else nothing is called.
    pub create: u64,
    /// `cuMemMap`; for a registered chunk `mmap`, and its pages are created.
    pub map: u64,
    /// `cuMemSetAccess`; for a registered chunk `cuMemHostRegister`.
    pub set_access: u64,
    /// `cuMemUnmap`; for a registered chunk `cuMemHostUnregister`, and `mmap` of addresses without pages.
    pub unmap: u64,
    /// `cuMemRelease`; for a registered chunk that can be shared `close`, else nothing is called.
    pub release: u64,
    /// How often the heap asked for less after a shortage.
    pub halvings: u64,
}
