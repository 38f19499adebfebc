//! The chunks of new memory, created and mapped before they are granted.
//!
//! The pages of registered memory are created by threads, up to [`AHEAD`] chunks before the driver pins them.

use std::collections::VecDeque;
use std::sync::Arc;

use super::allocate::{Chunk, Part};
use crate::backing::Backing;
use crate::driver::Driver;
use crate::vmm::{GrowingRange, Mapping, PhysicalMemory};
use crate::{Error, Result};

/// Chunks of registered memory that get their pages while one is pinned.
const AHEAD: usize = 4;

/// A chunk that is mapped, without access yet.
pub(super) struct Made {
    // Unmapped before the memory is released.
    pub(super) mapping: Mapping,
    pub(super) memory: PhysicalMemory,
    pub(super) part: Arc<Part>,
}

/// Creates and maps chunks side by side.
pub(super) struct Maker<I> {
    chunks: I,
    /// How many chunks there are at most before the first of them is taken.
    ahead: usize,
    made: VecDeque<Made>,
    /// Why the chunk behind those that are made was not.
    failed: Option<Error>,
    /// Where the next chunk goes.
    at: u64,
}

impl<I: Iterator<Item = Chunk>> Maker<I> {
    pub(super) const fn new(backing: Backing, chunks: I) -> Self {
        Self {
            chunks,
            ahead: match backing {
                Backing::Registered => AHEAD,
                _ => 1,
            },
            made: VecDeque::new(),
            failed: None,
            at: 0,
        }
    }

    /// Returns the next chunk, mapped in the range's addresses; `None` after the last.
    ///
    /// # Errors
    /// Those of creating and mapping, after the chunks before.
    pub(super) fn next(&mut self, driver: &Driver, range: &GrowingRange) -> Option<Result<Made>> {
        while self.made.len() < self.ahead
            && self.failed.is_none()
            && let Some(chunk) = self.chunks.next()
        {
            match self.make(driver, range, chunk) {
                Ok(made) => self.made.push_back(made),
                Err(error) => self.failed = Some(error),
            }
        }
        let made = self.made.pop_front().map(Ok);
        made.or_else(|| self.failed.take().map(Err))
    }

    fn make(&mut self, driver: &Driver, range: &GrowingRange, chunk: Chunk) -> Result<Made> {
        let memory = chunk.part.create(driver, &chunk)?;
        let mapping = range.reserve(driver)?.map(self.at, &memory)?;
        self.at += memory.size().padded();
        Ok(Made {
            mapping,
            memory,
            part: chunk.part,
        })
    }
}
