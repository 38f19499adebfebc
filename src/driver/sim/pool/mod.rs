//! Stream-ordered memory pools.
//!
//! A pool has one memfd that grows; its chunks are mapped at separate addresses and divided among
//! allocations. Memory is freed when the stream reaches the free; later work in the same stream may reuse it
//! before that. Pools and allocations can leave the process.

mod contents;

use std::sync::Arc;

pub(super) use contents::Pool;
use contents::{Allocation, Chunk, Freed};

use super::capacity::Charge;
use super::fault::{Answer, Fail, fail};
use super::memory::{self, Purpose};
use super::space::{FreeRanges, GRANULARITY, Range};
use super::state::{Kind, Point, Region, State, StreamKey, Work};
use super::stream::key_of;
use crate::*;

/// What exported pointers begin with.
const MAGIC: [u8; 8] = *b"egmemptr";

impl State {
    pub fn pool_create(&mut self, props: &PoolProps) -> Answer<PoolHandle> {
        if self
            .check_location(props.location, props.handle_types)
            .is_err()
        {
            return fail(Code::INVALID_VALUE);
        }
        let max_size = match self.machine.driver_version {
            CudaVersion(12020..) => props.max_size,
            _ => 0,
        };
        let memory = self.new_memory(Purpose::Pool, props.location, props.handle_types, 0)?;
        Ok(self.add_pool(memory, |pool| pool.max_size = max_size))
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
        let is_damaged = pool.is_damaged;
        if pool.imports > 1 {
            if !pool.live.entries().is_empty() {
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
        if is_damaged {
            return fail(Code::UNKNOWN); // Measured: it corrupts the process's heap.
        }
        Ok(())
    }

    /// Ends a destroyed pool once nothing in it is in use.
    fn reap(&mut self, handle: u64) {
        let done =
            |pool: &Pool| pool.destroyed && pool.live.entries().is_empty() && pool.freed.is_empty();
        if self.pools.get(handle).is_some_and(done)
            && let Some(pool) = self.pools.remove(handle)
        {
            for (start, _) in pool.chunks.entries() {
                self.regions.remove(*start);
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
        let follows_events = pool.get(PoolAttribute::ReuseFollowEventDependencies) == 1;
        let waits = pool.get(PoolAttribute::ReuseAllowInternalDependencies) == 1;
        let points: Vec<Point> = pool.freed.iter().map(|freed| freed.point).collect();
        if follows_events {
            let ordered = |point: &Point| self.is_ordered(key, *point);
            let ordered: Vec<Point> = points.iter().copied().filter(ordered).collect();
            let pool = self.pool(handle)?;
            if let Some(found) = pool.take_freed(size, |point| ordered.contains(&point)) {
                return Ok(found);
            }
        }
        if self.grow(handle, size).is_err() {
            // Short of memory: waits for frees in other streams, then for whole chunks.
            if waits {
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
        let key = key_of(stream);
        // The memory is not the graph's.
        self.expect_not_captured(key, Code::INVALID_VALUE)?;
        let point = self.next_point(key);
        let pool = self.pools.get_mut(handle).ok_or(Code::INVALID_VALUE)?;
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
        let pool = self.pools.get_mut(handle).ok_or(Code::INVALID_VALUE)?;
        let allocation = pool.end_use(ptr)?;
        self.give_back(handle, ptr.0, allocation);
        self.release_pools();
        Ok(())
    }

    /// Handles a free that its stream has reached.
    pub fn free_reached(&mut self, handle: u64, point: Point) {
        if let Some(pool) = self.pools.get_mut(handle)
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
        if let Some(pool) = self.pools.get_mut(handle) {
            if pool.is_imported() {
                pool.chunks.remove(allocation.chunk);
                self.regions.remove(allocation.chunk);
            } else if let Some(chunk) = pool.chunks.get_mut(allocation.chunk) {
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
        let held = pool.get(PoolAttribute::ReservedCurrent).checked_add(len);
        // The limit counts whole chunks: measured, 100 MiB allowed 128.
        let limit = pool.max_size.checked_next_multiple_of(usual);
        let fits =
            held.is_some_and(|held| pool.max_size == 0 || limit.is_none_or(|limit| held <= limit));
        let location = pool.memory.label.location;
        if !fits {
            return fail(Code::OUT_OF_MEMORY);
        }
        let charge = self.charge(location, len)?;
        let pool = self.pool(handle)?;
        let offset = pool.holes.take(len).ok_or(Code::OUT_OF_MEMORY)?;
        let grown = pool.memory.grow(offset + len).map_err(Fail::from);
        let added = grown.and_then(|()| self.add_chunk(handle, offset, len, Some(charge)));
        let pool = self.pool(handle)?;
        match added {
            Ok(_) => pool.count(PoolAttribute::ReservedCurrent, len, 0),
            Err(_) => pool.holes.give(offset, len),
        }
        added.map(drop)
    }

    /// Maps a part of the pool's memory; returns its address. All of it is free, or, without a charge, an imported
    /// allocation's.
    fn add_chunk(
        &mut self,
        handle: PoolHandle,
        offset: u64,
        len: u64,
        charge: Option<Charge>,
    ) -> Answer<u64> {
        let range = Range::reserve(len, 0)?;
        let start = range.start;
        let pool = self.pool(handle)?;
        range.place(start, len, pool.memory.file(), offset, pool.host)?;
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
        Ok(start)
    }

    pub fn pool_trim_to(&mut self, handle: PoolHandle, keep: u64) -> Answer {
        self.pool(handle)?;
        self.release(handle.0, keep);
        Ok(())
    }

    /// Gives back memory that pools hold above their thresholds, at a synchronisation.
    pub fn release_pools(&mut self) {
        let threshold = |pool: &Pool| pool.get(PoolAttribute::ReleaseThreshold);
        let over = |pool: &Pool| pool.get(PoolAttribute::ReservedCurrent) > threshold(pool);
        let pools = self.pools.entries().iter().filter(|(_, pool)| over(pool));
        let pools = pools.map(|(handle, pool)| (*handle, threshold(pool)));
        for (handle, keep) in pools.collect::<Vec<_>>() {
            self.release(handle, keep);
        }
    }

    /// Gives back all that pools keep, whatever their thresholds.
    pub fn empty_pools(&mut self) {
        let pools: Vec<u64> = self.pools.keys().collect();
        pools.into_iter().for_each(|pool| self.release(pool, 0));
    }

    pub fn release(&mut self, handle: u64, keep: u64) {
        let Some(pool) = self.pools.get_mut(handle) else {
            return;
        };
        for start in pool.releasable(keep) {
            self.regions.remove(start);
            if let Some(chunk) = pool.chunks.remove(start) {
                let len = chunk.range.len;
                pool.memory.discard(chunk.offset, len);
                pool.holes.give(chunk.offset, len);
                pool.count(PoolAttribute::ReservedCurrent, 0, len);
            }
        }
    }

    pub fn alloc_async(&mut self, size: u64, stream: StreamHandle) -> Answer<DevicePtr> {
        let pool = self.device_pool(stream.device)?;
        self.alloc_from_pool_async(pool, size, stream)
    }

    pub fn pool_export(&mut self, handle: PoolHandle, kind: HandleType) -> Answer<ShareableHandle> {
        let pool = self.pool(handle)?;
        if pool.is_imported() || !pool.memory.label.handle_types.contains(kind.into()) {
            return fail(Code::INVALID_VALUE);
        }
        let memory = Arc::clone(&pool.memory);
        if let Err(refused) = self.check_fabric(memory.label.location, kind.into()) {
            self.pool(handle)?.is_damaged = true;
            return Err(refused);
        }
        let shareable = memory::export(&memory, kind)?;
        self.pool(handle)?.exported = true;
        Ok(shareable)
    }

    pub fn pool_import(&mut self, handle: &ShareableHandle) -> Answer<PoolHandle> {
        let memory = memory::import(handle, Purpose::Pool, self.machine.imex_channel)?;
        let same = |pool: &Pool| {
            pool.is_imported() && !pool.destroyed && pool.memory.label.id == memory.label.id
        };
        let known = self.pools.entries().iter().find(|(_, pool)| same(pool));
        if let Some(&(handle, _)) = known {
            self.pool(PoolHandle(handle))?.imports += 1;
            return Ok(PoolHandle(handle));
        }
        Ok(self.add_pool(Arc::new(memory), |pool| pool.imports = 1))
    }

    pub fn pool_export_pointer(&mut self, ptr: DevicePtr) -> Answer<PoolPtrExport> {
        let pool = &self.pools[self.pool_at(ptr)?];
        let (Some(allocation), true) = (pool.live.get(ptr.0), pool.exported) else {
            return fail(Code::INVALID_VALUE);
        };
        let offset = pool.chunks[allocation.chunk].offset + (ptr.0 - allocation.chunk);
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&pool.memory.label.id.to_le_bytes());
        bytes[24..32].copy_from_slice(&offset.to_le_bytes());
        bytes[32..40].copy_from_slice(&allocation.size.to_le_bytes());
        Ok(PoolPtrExport(bytes))
    }

    pub fn pool_import_pointer(
        &mut self,
        handle: PoolHandle,
        export: &PoolPtrExport,
    ) -> Answer<DevicePtr> {
        let pool = self.pool(handle)?;
        let bytes = &export.0;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let (offset, len) = (number(24), number(32));
        let same = bytes[..8] == MAGIC && bytes[8..24] == pool.memory.label.id.to_le_bytes();
        let most = pool.memory.size();
        let end = offset.checked_add(len).filter(|&end| end <= most);
        let (Some(end), true) = (end, same && pool.is_imported() && len > 0) else {
            return fail(Code::INVALID_VALUE);
        };
        let memory = pool.memory.label.id;
        let imports = |pool: &Pool| pool.memory.label.id == memory && pool.has_imported(offset);
        if self.pools.values().any(imports) {
            return fail(Code::ALREADY_MAPPED);
        }
        // Maps whole granules around it, because pages cannot be divided.
        let first = offset - offset % GRANULARITY;
        let whole = end.next_multiple_of(GRANULARITY) - first;
        let chunk = self.add_chunk(handle, first, whole, None)?;
        let (start, size) = (chunk + (offset - first), len);
        let allocation = Allocation { chunk, len, size };
        self.pool(handle)?.hold(start, allocation);
        Ok(DevicePtr(start))
    }
}
