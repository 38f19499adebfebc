//! The chunks of a new buffer: created and mapped one after the other, and granted.
//!
//! The pages of registered memory are created by threads, up to [`AHEAD`] chunks before the driver pins them.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::Result;
use crate::backing::Backing;
use crate::driver::Driver;
use crate::vmm::{Mapping, PhysicalMemory, PhysicalOptions, Reservation};

/// Chunks of registered memory that get their pages while one is pinned.
const AHEAD: usize = 4;

/// A chunk that is to be created.
#[derive(Clone, Debug)]
pub(super) struct Chunk {
    pub(super) bytes: u64,
    /// The index of its part: chunks of a part that cannot be shared have one entry in the ledger.
    pub(super) part: usize,
    pub(super) has_own_entry: bool,
    /// Whether the node's free memory is looked at first.
    pub(super) is_checked: bool,
    pub(super) options: PhysicalOptions,
}

/// A chunk that is mapped, without access yet.
pub(super) struct Made {
    // Unmapped before the memory is released.
    pub(super) mapping: Mapping,
    pub(super) memory: PhysicalMemory,
    pub(super) part: usize,
}

/// Creates and maps chunks side by side.
pub(super) struct Maker<'a, I> {
    driver: &'a Driver,
    backing: Backing,
    chunks: I,
    /// Bytes of addresses for all chunks.
    padded: u64,
    /// Reserved once the first chunk exists.
    reservation: Option<Arc<Reservation>>,
    at: u64,
    /// The options of the present part's next chunk, which name the entry of its first.
    next: Option<(usize, PhysicalOptions)>,
}

impl<'a, I: Iterator<Item = Chunk>> Maker<'a, I> {
    pub(super) const fn new(driver: &'a Driver, backing: Backing, padded: u64, chunks: I) -> Self {
        Self {
            driver,
            backing,
            chunks,
            padded,
            reservation: None,
            at: 0,
            next: None,
        }
    }

    fn make(&mut self, chunk: Chunk) -> Result<Made> {
        let options = match self.next.take() {
            Some((part, options)) if part == chunk.part => options,
            _ => chunk.options,
        };
        let checked = match chunk.is_checked {
            true => options.clone(),
            false => options.clone().overcommit(true),
        };
        let memory = checked.create(self.driver, chunk.bytes)?;
        let options = match chunk.has_own_entry {
            true => options,
            false => options.chunk_of(&memory),
        };
        self.next = Some((chunk.part, options));
        let reservation = match &self.reservation {
            Some(reservation) => reservation,
            None => {
                let options = Reservation::options().backing(self.backing);
                let all = options.reserve(self.driver, self.padded)?;
                if !chunk.has_own_entry {
                    all.prepare_for_private_pages()?;
                }
                self.reservation.insert(Arc::new(all))
            }
        };
        let mapping = reservation.map(self.at, &memory)?;
        self.at += memory.size().padded();
        Ok(Made {
            mapping,
            memory,
            part: chunk.part,
        })
    }

    /// Makes all chunks, and calls `take` with each, until it fails.
    ///
    /// # Errors
    /// Those of creating and mapping, and those of `take`. Chunks that were not taken are given back.
    pub(super) fn run(mut self, mut take: impl FnMut(Made) -> Result<()>) -> Result<()> {
        let ahead = match self.backing {
            Backing::Registered => AHEAD,
            _ => 1,
        };
        let mut made = VecDeque::new();
        loop {
            while made.len() < ahead
                && let Some(chunk) = self.chunks.next()
            {
                made.push_back(self.make(chunk)?);
            }
            match made.pop_front() {
                Some(next) => take(next)?,
                None => return Ok(()),
            }
        }
    }
}
