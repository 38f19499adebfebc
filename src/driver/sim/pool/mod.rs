//! Stream-ordered memory pools.
//!
//! A pool has one memfd that grows; its chunks are mapped at separate addresses and divided among
//! allocations. Memory is freed when the stream reaches the free; later work in the same stream may reuse it
//! before that.

mod contents;
mod share;

use std::sync::Arc;

pub(super) use contents::Pool;
use contents::{Allocation, Chunk, Freed};

use super::capacity::Charge;
use super::fault::{Answer, Fail, fail};
use super::memory::Purpose;
use super::space::{FreeRanges, GRANULARITY, Range};
use super::state::{Kind, Point, Region, State, StreamKey, Work};
use crate::*;

impl State {
    pub fn pool_create(&mut self, props: &PoolProps) -> Answer<PoolHandle> {
        if self
            .check_location(props.location, props.handle_types)
            .is_err()
        {
            return fail(Code::INVALID_VALUE);
        }
        if props.location == Location::Host && props.handle_types != HandleTypes::NONE {
            return fail(Code::INVALID_VALUE);
        }
        let max_size = match self.machine.driver_version {
            CudaVersion(12020..) => props.max_size,
            _ => 0,
        };
        let memory = self.new_memory(Purpose::Pool, props.location, props.handle_types, 0)?;
        let pool = Pool::new(memory, max_size, self.nobody(), false);
        Ok(self.add_pool(pool))
    }

    pub fn add_pool(&mut self, pool: Pool) -> PoolHandle {
        let handle = self.number();
        self.pools.insert(handle, pool);
        PoolHandle(handle)
    }

    pub fn pool(&mut self, handle: PoolHandle) -> Answer<&mut Pool> {
        match self.pools.get_mut(&handle.0) {
            Some(pool) if !pool.destroyed => Ok(pool),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    /// Returns the pool whose chunk contains an address.
    pub fn pool_at(&self, ptr: DevicePtr) -> Answer<u64> {
        match self.region(ptr.0).map(|(_, region)| &region.kind) {
            Some(Kind::Chunk { pool }) => Ok(*pool),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    pub fn pool_destroy(&mut self, handle: PoolHandle) -> Answer {
        let pool = self.pool(handle)?;
        if pool.is_default {
            return fail(Code::INVALID_VALUE);
        }
        if pool.imports > 1 {
            if !pool.live.is_empty() {
                return fail(Code::INVALID_VALUE);
            }
            pool.imports -= 1;
            return Ok(());
        }
        pool.destroyed = true;
        for current in &mut self.current_pools {
            if *current == Some(handle.0) {
                *current = None; // the device falls back to its default pool
            }
        }
        self.reap(handle.0);
        Ok(())
    }

    /// Ends a destroyed pool once nothing in it is in use.
    fn reap(&mut self, handle: u64) {
        let done = |pool: &Pool| pool.destroyed && pool.live.is_empty() && pool.freed.is_empty();
        if self.pools.get(&handle).is_some_and(done)
            && let Some(pool) = self.pools.remove(&handle)
        {
            for start in pool.chunks.keys() {
                self.regions.remove(start);
            }
        }
    }

    pub fn alloc_from_pool_async(
        &mut self,
        handle: PoolHandle,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<DevicePtr> {
        let key = self.stream(stream)?;
        if self.pool(handle)?.is_imported() {
            return fail(Code::INVALID_VALUE);
        }
        if size == 0 {
            return Ok(DevicePtr(0)); // freed like any other
        }
        let (start, allocation) = self.find_room(handle, size, key)?;
        self.pool(handle)?.hold(start, allocation);
        Ok(DevicePtr(start))
    }

    fn find_room(
        &mut self,
        handle: PoolHandle,
        size: u64,
        key: StreamKey,
    ) -> Answer<(u64, Allocation)> {
        let pool = self.pool(handle)?;
        let found = pool
            .take_freed(size, |point| point.0 == key)
            .or_else(|| pool.take_free(size));
        if let Some(found) = found {
            return Ok(found);
        }
        if pool.reuse[0] == 1 {
            let mut ordered: Vec<Point> = pool.freed.iter().map(|freed| freed.point).collect();
            ordered.retain(|&point| self.is_ordered(key, point));
            let pool = self.pool(handle)?;
            if let Some(found) = pool.take_freed(size, |point| ordered.contains(&point)) {
                return Ok(found);
            }
        }
        let grown = self.grow(handle, size);
        if grown.is_err() {
            // Short of memory: waits for frees in other streams, then for whole chunks.
            let pool = self.pool(handle)?;
            if pool.reuse[2] == 1 {
                let points: Vec<Point> = pool.freed.iter().map(|freed| freed.point).collect();
                points.into_iter().for_each(|point| self.run(point));
                if let Some(found) = self.pool(handle)?.take_free(size) {
                    return Ok(found);
                }
            }
            self.release(handle.0, 0);
            self.grow(handle, size)?;
        }
        let found = self.pool(handle)?.take_free(size);
        Ok(found.ok_or(Code::OUT_OF_MEMORY)?)
    }

    pub fn free_async(&mut self, ptr: DevicePtr, stream: StreamHandle) -> Answer {
        if ptr.0 == 0 {
            return self.stream(stream).map(drop);
        }
        let handle = self.pool_at(ptr)?;
        let answer = self.stream(stream);
        if let Err(Fail::Code(_)) = answer {
            return answer.map(drop);
        }
        let key = (stream.device, stream.raw);
        // The memory is not the graph's.
        self.expect_not_captured(key, Code::INVALID_VALUE)?;
        let point = self.next_point(key);
        let pool = self.pools.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        let (start, allocation) = (ptr.0, pool.end_use(ptr)?);
        if answer.is_err() {
            // The context is lost: no stream will ever reach the free.
            self.give_back(handle, start, allocation);
            return answer.map(drop);
        }
        pool.freed.push(Freed {
            start,
            allocation,
            point,
        });
        self.submit(key, Work::Free { pool: handle });
        Ok(())
    }

    /// `cuMemFree` of a pool's memory: after all work of the device.
    pub fn free_now(&mut self, device: i32, handle: u64, ptr: DevicePtr) -> Answer {
        self.synchronize_device(device);
        let pool = self.pools.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        let allocation = pool.end_use(ptr)?;
        self.give_back(handle, ptr.0, allocation);
        self.release_pools();
        self.context(device).map(drop)
    }

    /// Handles a free that its stream has reached.
    pub fn free_reached(&mut self, handle: u64, point: Point) {
        if let Some(pool) = self.pools.get_mut(&handle)
            // None: later work in its stream has taken all of it.
            && let Some(index) = pool.freed.iter().position(|freed| freed.point == point)
        {
            let freed = pool.freed.remove(index);
            self.give_back(handle, freed.start, freed.allocation);
        }
        self.reap(handle);
    }

    /// Returns freed memory to its pool, and ends the pool if it was destroyed and this was its last.
    fn give_back(&mut self, handle: u64, start: u64, allocation: Allocation) {
        if let Some(pool) = self.pools.get_mut(&handle) {
            if pool.is_imported() {
                pool.chunks.remove(&allocation.chunk);
                self.regions.remove(&allocation.chunk);
            } else if let Some(chunk) = pool.chunks.get_mut(&allocation.chunk) {
                chunk.free.give(start, allocation.len);
            }
        }
        self.reap(handle);
    }

    /// Adds a chunk with room for `len` bytes: of the usual size, or just large enough.
    pub fn grow(&mut self, handle: PoolHandle, len: u64) -> Answer {
        let least = len.checked_next_multiple_of(GRANULARITY);
        let least = least.ok_or(Code::OUT_OF_MEMORY)?;
        let usual = least.max(self.machine.pool_chunk);
        match self.grow_by(handle, usual) {
            Err(_) if least < usual => self.grow_by(handle, least),
            answer => answer,
        }
    }

    fn grow_by(&mut self, handle: PoolHandle, len: u64) -> Answer {
        let usual = self.machine.pool_chunk;
        let pool = self.pool(handle)?;
        let held = pool.reserved.current.checked_add(len);
        // The limit counts whole chunks: measured, 100 MiB allowed 128.
        let limit = pool.max_size.checked_next_multiple_of(usual);
        let fits =
            held.is_some_and(|held| pool.max_size == 0 || limit.is_none_or(|limit| held <= limit));
        let location = pool.memory.label.location;
        if !fits {
            return fail(Code::OUT_OF_MEMORY);
        }
        let charge = self.charge(location, len)?;
        let range = Range::reserve(len, 0)?;
        let start = range.start;
        let pool = self.pool(handle)?;
        let offset = pool.holes.take(len).ok_or(Code::OUT_OF_MEMORY)?;
        let grown = pool.memory.grow(offset + len);
        let place = || range.place(start, len, pool.memory.file(), offset, pool.host);
        if let Err(error) = grown.and_then(|()| place()) {
            pool.holes.give(offset, len);
            return Err(error.into());
        }
        pool.reserved.add(len);
        self.add_chunk(handle, range, offset, Some(charge))
    }

    /// Adds a part of the pool's memory at an address: all of it free, or of an imported allocation, without a charge.
    fn add_chunk(
        &mut self,
        handle: PoolHandle,
        range: Range,
        offset: u64,
        charge: Option<Charge>,
    ) -> Answer {
        let pool = self.pool(handle)?;
        let (start, len) = (range.start, range.len);
        let region = Region {
            len,
            memory: Arc::clone(&pool.memory),
            offset,
            kind: Kind::Chunk { pool: handle.0 },
        };
        let free = match charge {
            Some(_) => FreeRanges::whole(start, len),
            None => FreeRanges::default(),
        };
        let chunk = Chunk {
            range,
            offset,
            free,
            _charge: charge,
        };
        pool.chunks.insert(start, chunk);
        self.regions.insert(start, region);
        Ok(())
    }

    pub fn pool_trim_to(&mut self, handle: PoolHandle, keep: u64) -> Answer {
        self.pool(handle)?;
        self.release(handle.0, keep);
        Ok(())
    }

    /// Gives back memory that pools hold above their thresholds, at a synchronisation.
    pub fn release_pools(&mut self) {
        let over = |pool: &Pool| pool.reserved.current > pool.release_threshold;
        let pools = self.pools.iter().filter(|(_, pool)| over(pool));
        let pools = pools.map(|(&handle, pool)| (handle, pool.release_threshold));
        for (handle, keep) in pools.collect::<Vec<_>>() {
            self.release(handle, keep);
        }
    }

    pub fn release(&mut self, handle: u64, keep: u64) {
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
