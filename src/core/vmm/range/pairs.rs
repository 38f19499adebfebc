//! Mappings and the memory that each maps.

use crate::vmm::Mapping;

/// Mappings, and the memory of each in the same order. When dropped, each mapping is unmapped first, and then its memory
/// released, before the next: other processes wait for a release, and for several that follow each other at once.
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
