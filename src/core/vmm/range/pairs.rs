//! Mappings and the memory that each maps.

use crate::vmm::Mapping;

/// Mappings, and the memory of each in the same order. Memory behind the last mapping is not mapped.
///
/// When dropped, the first mapping is unmapped and its memory released, then the second, and so on: other processes wait
/// longer for releases that follow one another without a pause (docs/driver-behaviour.md).
#[derive(Debug)]
pub(super) struct Pairs<P> {
    pub mappings: Vec<Mapping>,
    pub parts: Vec<P>,
}

impl<P> Drop for Pairs<P> {
    fn drop(&mut self) {
        for (mapping, part) in self.mappings.drain(..).zip(self.parts.drain(..)) {
            drop(mapping);
            drop(part);
        }
    }
}
