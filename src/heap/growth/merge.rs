//! Makes room for a block by giving idle chunks back, in heaps whose chunks do not join.
//!
//! There a free chunk serves no block that is larger, however many lie side by side, and at the limit, or on a full node,
//! nothing can be added. So before a request fails, chunks without a block go back to the machine and make place for one
//! chunk.

use std::ops::Range;

use super::super::backing::Locked;
use super::super::core::Core;
use super::super::inner::HeapInner;
use crate::Result;

impl HeapInner {
    /// Gives back idle chunks after which growth for a block has room below `most` bytes of all memory: those in its place, or
    /// all if that is too little memory. Returns `false` if none would do; the caller has emptied the threads' caches if that
    /// helps.
    ///
    /// The lock is not released between the chunks: growth of other threads would take the place.
    ///
    /// # Errors
    /// The driver's error if a chunk does not go back; it stays memory of the heap.
    pub(super) fn make_place(
        &self,
        locked: &mut Locked<'_>,
        (bytes, align): (u64, u64),
        most: u64,
    ) -> Result<bool> {
        let backing = locked.backing()?;
        if backing.joins() {
            return Ok(false);
        }
        let idle: Vec<Range<u64>> = {
            let mut core = self.core();
            core.release_empty_slabs();
            let own = backing.own_chunks();
            own.filter(|chunk| is_idle(&core, chunk)).collect()
        };
        if idle.is_empty() {
            return Ok(false);
        }
        let Some(chunks) = backing.to_give_back((bytes, align, most), &idle) else {
            return Ok(false);
        };
        {
            let mut core = self.core();
            // Other threads may have allocated from them meanwhile.
            if !chunks.iter().all(|chunk| is_idle(&core, chunk)) {
                return Ok(false);
            }
            for chunk in &chunks {
                core.remove(chunk.clone());
            }
        }
        let mut kept = None;
        for chunk in chunks {
            let (is_gone, refused) = backing.give_back(chunk.start);
            if !is_gone {
                self.core().add(chunk, false);
                kept = kept.or(Some(refused));
            } else if let Some(error) = refused {
                self.reports.add(move || {
                    tracing::warn!(%error, "memory of a chunk that went back cannot be released yet");
                });
            }
        }
        self.front.budget.follow(backing.backed());
        match kept {
            None => Ok(true),
            Some(None) => Ok(false),
            Some(Some(error)) => Err(error),
        }
    }
}

/// Returns whether all of a chunk that joins no other is free.
fn is_idle(core: &Core, chunk: &Range<u64>) -> bool {
    core.ranges().free_after(chunk.start) == chunk.end - chunk.start
}
