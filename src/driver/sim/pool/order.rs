//! Allocation and free, in the order of streams.

use super::super::answer::{Answer, Fail, fail};
use super::super::state::State;
use super::super::work::{Point, StreamKey, Work};
use super::contents::{Allocation, Freed, Pool};
use crate::{Code, DevicePtr, PoolHandle, StreamHandle};

impl State {
    pub(super) fn alloc_from_pool_async(
        &mut self,
        handle: PoolHandle,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<DevicePtr> {
        let key = self.stream(stream)?;
        if self.pool(handle)?.imported {
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

    pub(super) fn free_async(&mut self, ptr: DevicePtr, stream: StreamHandle) -> Answer<()> {
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
        let allocation = pool.end_use(ptr)?;
        if answer.is_err() {
            // The context is lost: no stream will ever reach the free.
            pool.give_back(ptr.0, allocation);
            self.forget_imported(handle, allocation);
            self.reap(handle);
            return answer.map(drop);
        }
        pool.freed.push(Freed {
            start: ptr.0,
            allocation,
            point,
        });
        self.submit(key, Work::Free { pool: handle });
        Ok(())
    }

    /// `cuMemFree` of a pool's memory: after all work of the device.
    pub(in crate::sim) fn free_now(
        &mut self,
        device: i32,
        handle: u64,
        ptr: DevicePtr,
    ) -> Answer<()> {
        self.synchronize_device(device);
        let pool = self.pools.get_mut(&handle).ok_or(Code::INVALID_VALUE)?;
        let allocation = pool.end_use(ptr)?;
        pool.give_back(ptr.0, allocation);
        self.forget_imported(handle, allocation);
        self.release_pools();
        self.reap(handle);
        self.context(device).map(drop)
    }

    /// Handles a free that its stream has reached.
    pub(in crate::sim) fn free_reached(&mut self, handle: u64, point: Point) {
        let Some(pool) = self.pools.get_mut(&handle) else {
            return;
        };
        let mut done = Vec::new();
        pool.freed.retain(|freed| {
            if freed.point == point {
                done.push((freed.start, freed.allocation));
            }
            freed.point != point
        });
        for (start, allocation) in done {
            if let Some(pool) = self.pools.get_mut(&handle) {
                pool.give_back(start, allocation);
            }
            self.forget_imported(handle, allocation);
        }
        self.reap(handle);
    }

    fn forget_imported(&mut self, handle: u64, allocation: Allocation) {
        let gone = |pool: &Pool| !pool.chunks.contains_key(&allocation.chunk);
        if self.pools.get(&handle).is_some_and(gone) {
            self.regions.remove(&allocation.chunk);
        }
    }
}
