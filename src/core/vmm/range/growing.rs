//! A range whose parts are created one after the other.

use super::{MappedRange, Pairs, least};
use crate::vmm::{Mapping, PhysicalMemory};
use crate::{Error, Result};

/// The front of a range. Dropped before it is complete, it unmaps and releases its parts.
#[derive(Debug, Default)]
pub struct GrowingRange {
    pairs: Pairs<PhysicalMemory>,
    /// Bytes that have parts.
    done: u64,
}

impl GrowingRange {
    /// Adds a part, which is mapped behind those before it.
    pub fn push(&mut self, part: PhysicalMemory, mapping: Mapping) {
        self.done += mapping.size().padded();
        self.pairs.mappings.push(mapping);
        self.pairs.parts.push(part);
    }

    /// Returns the range.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has no part.
    pub fn finish(self) -> Result<MappedRange> {
        let Some(first) = self.pairs.mappings.first() else {
            return Err(Error::invalid("parts", "the list is empty"));
        };
        Ok(MappedRange {
            start: first.reservation().start(),
            padded: self.done,
            host: least(&self.pairs.mappings),
            pairs: self.pairs,
        })
    }
}
