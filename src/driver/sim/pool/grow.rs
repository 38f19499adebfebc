//! How pools get memory in chunks and give it back.

use std::sync::Arc;

use super::super::answer::{Answer, exhausted, fail};
use super::super::memory::bind;
use super::super::ranges::FreeRanges;
use super::super::space::GRANULARITY;
use super::super::space::Range;
use super::super::state::{Kind, Region, State};
use super::contents::{Chunk, Pool};
use crate::{Code, PoolHandle};

impl State {
    /// Adds a chunk with room for `len` bytes: of the usual size, or just large enough.
    pub(super) fn grow(&mut self, handle: PoolHandle, len: u64) -> Answer<()> {
        let least = len.checked_next_multiple_of(GRANULARITY);
        let least = least.ok_or(Code::OUT_OF_MEMORY)?;
        let usual = least.max(self.machine.pool_chunk);
        match self.add_chunk(handle, usual) {
            Err(_) if least < usual => self.add_chunk(handle, least),
            answer => answer,
        }
    }

    fn add_chunk(&mut self, handle: PoolHandle, len: u64) -> Answer<()> {
        let usual = self.machine.pool_chunk;
        let pool = self.pool(handle)?;
        let held = pool.reserved.current.checked_add(len);
        // The limit counts whole chunks: measured, 100 MiB allowed 128.
        let limit = pool.max_size.checked_next_multiple_of(usual);
        let fits =
            held.is_some_and(|held| pool.max_size == 0 || limit.is_none_or(|limit| held <= limit));
        let location = pool.location;
        if !fits {
            return fail(Code::OUT_OF_MEMORY);
        }
        let charge = self.charge(location, len)?;
        let range = Range::reserve(len, 0).map_err(exhausted)?;
        let start = range.start;
        let pool = self.pool(handle)?;
        let hole = pool.holes.take(len);
        let offset = hole.unwrap_or(pool.end);
        let placed = pool
            .memory
            .grow(offset + len)
            .and_then(|()| range.place(start, len, pool.memory.file(), offset, pool.host));
        if let Err(error) = placed {
            if hole.is_some() {
                pool.holes.give(offset, len);
            }
            return Err(exhausted(error));
        }
        bind(&pool.memory, offset, len);
        pool.end = pool.end.max(offset + len);
        pool.reserved.add(len);
        let memory = Arc::clone(&pool.memory);
        pool.chunks.insert(
            start,
            Chunk {
                range,
                offset,
                free: FreeRanges::whole(start, len),
                _charge: Some(charge),
            },
        );
        let kind = Kind::Chunk { pool: handle.0 };
        self.regions.insert(
            start,
            Region {
                len,
                memory,
                offset,
                kind,
            },
        );
        Ok(())
    }

    pub(super) fn pool_trim_to(&mut self, handle: PoolHandle, keep: u64) -> Answer<()> {
        self.pool(handle)?;
        self.release(handle.0, keep);
        Ok(())
    }

    /// Gives back memory that pools hold above their thresholds, at a synchronisation.
    pub(in crate::sim) fn release_pools(&mut self) {
        let over = |pool: &Pool| pool.reserved.current > pool.release_threshold;
        let pools: Vec<(u64, u64)> = self
            .pools
            .iter()
            .filter(|(_, pool)| over(pool))
            .map(|(&handle, pool)| (handle, pool.release_threshold))
            .collect();
        for (handle, keep) in pools {
            self.release(handle, keep);
        }
    }

    pub(super) fn release(&mut self, handle: u64, keep: u64) {
        let Some(pool) = self.pools.get_mut(&handle) else {
            return;
        };
        for start in pool.releasable(keep) {
            self.regions.remove(&start);
            if let Some(chunk) = pool.chunks.remove(&start) {
                let len = chunk.range.len;
                pool.memory.discard(chunk.offset, len);
                pool.holes.give(chunk.offset, len);
                pool.reserved.current -= len;
            }
        }
    }
}
