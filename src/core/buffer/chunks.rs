//! The chunks of a new buffer: created and mapped one after the other, and granted.
//!
//! The pages of registered memory are touched by a second thread, up to [`AHEAD`] chunks before the driver pins them.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;

use crate::backing::Backing;
use crate::driver::Driver;
use crate::vmm::{Mapping, PhysicalMemory, PhysicalOptions, Reservation};
use crate::{Error, Result};

/// Chunks of registered memory that have their pages, but are not pinned yet.
const AHEAD: usize = 4;

/// A chunk that is to be created.
#[derive(Clone, Debug)]
pub(super) struct Chunk {
    pub(super) bytes: u64,
    /// The index of its part: chunks of a part that cannot be shared have one entry in the ledger.
    pub(super) part: usize,
    pub(super) has_own_entry: bool,
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

impl<'a, I: Iterator<Item = Chunk> + Send> Maker<'a, I> {
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
        let memory = options.clone().create(self.driver, chunk.bytes)?;
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

    /// Makes all chunks, and calls `take` with each in the calling thread, until it fails.
    ///
    /// # Errors
    /// Those of creating and mapping, and those of `take`. Chunks that were not taken are given back.
    pub(super) fn run(mut self, mut take: impl FnMut(Made) -> Result<()>) -> Result<()> {
        if self.backing == Backing::Driver {
            while let Some(chunk) = self.chunks.next() {
                take(self.make(chunk)?)?;
            }
            return Ok(());
        }
        self.run_ahead(take)
    }

    fn run_ahead(mut self, mut take: impl FnMut(Made) -> Result<()>) -> Result<()> {
        let (send, receive) = sync_channel(AHEAD - 1);
        thread::scope(|scope| {
            let feed = move || {
                while let Some(chunk) = self.chunks.next() {
                    let made = self.make(chunk);
                    let is_last = made.is_err();
                    if send.send(made).is_err() || is_last {
                        break;
                    }
                }
            };
            thread::Builder::new()
                .name("egmem-pages".into())
                .spawn_scoped(scope, feed)
                .map_err(|error| Error::system("starting a thread that creates pages", &error))?;
            // Dropped before the thread is joined, so that it stops after an error.
            let receive = receive;
            receive.iter().try_for_each(|made| take(made?))
        })
    }
}
