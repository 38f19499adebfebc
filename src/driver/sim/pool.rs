//! Stream-ordered memory pools.
//!
//! A pool has one memfd that grows; chunks of it are mapped at addresses of their own and divided
//! among allocations. Memory is freed when the stream reaches the free, and may before that be used
//! again by whatever comes later in the same stream.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::GRANULARITY;
use super::bind::bind;
use super::capacity::Charge;
use super::memory::{Memory, Purpose};
use super::ranges::FreeRanges;
use super::space::Range;
use super::state::{Answer, Kind, Region, State, exhausted, fail};
use super::stream::{Point, StreamKey, Work};
use crate::driver::{
    Access, AccessDesc, Code, CudaVersion, DevicePtr, HandleTypes, Location, PoolAttribute,
    PoolHandle, PoolProps, StreamHandle,
};

/// Allocations are aligned to, and a multiple of, this many bytes.
const UNIT: u64 = 512;

#[derive(Debug)]
pub(super) struct Pool {
    pub(super) location: Location,
    pub(super) handle_types: HandleTypes,
    pub(super) memory: Arc<Memory>,
    pub(super) imported: bool,
    /// A device's own pool, which cannot be destroyed.
    pub(super) is_default: bool,
    /// Its handle is gone; it lives until its last allocation is freed.
    pub(super) destroyed: bool,
    host: Access,
    pub(super) devices: Box<[Access]>,
    max_size: u64,
    pub(super) chunks: BTreeMap<u64, Chunk>,
    /// Unused parts of the file, and where it ends.
    holes: FreeRanges,
    end: u64,
    /// Live allocations by address: chunk and length.
    pub(super) live: BTreeMap<u64, Allocation>,
    /// What was freed in a stream that has not come so far.
    freed: Vec<Freed>,
    /// Follow events, opportunistic, internal dependencies.
    reuse: [u64; 3],
    release_threshold: u64,
    reserved: Level,
    used: Level,
}

/// A count and the most it has been.
#[derive(Debug, Default)]
struct Level {
    current: u64,
    high: u64,
}

/// Part of a pool's memory at an address.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) range: Range,
    /// Where in the pool's file it starts.
    pub(super) offset: u64,
    /// Free addresses; an imported allocation's chunk has none.
    free: FreeRanges,
    _charge: Option<Charge>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    pub(super) chunk: u64,
    pub(super) len: u64,
}

#[derive(Clone, Copy, Debug)]
struct Freed {
    start: u64,
    allocation: Allocation,
    point: Point,
}

impl Level {
    fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.high = self.high.max(self.current);
    }
}

impl Pool {
    pub(super) fn new(
        memory: Arc<Memory>,
        max_size: u64,
        devices: Box<[Access]>,
        imported: bool,
    ) -> Self {
        let location = memory.label.location;
        let mut pool = Self {
            location,
            handle_types: memory.label.handle_types,
            memory,
            imported,
            is_default: false,
            destroyed: false,
            host: match location {
                Location::Device(_) => Access::None,
                _ => Access::ReadWrite,
            },
            devices,
            max_size,
            chunks: BTreeMap::new(),
            holes: FreeRanges::default(),
            end: 0,
            live: BTreeMap::new(),
            freed: Vec::new(),
            reuse: [1; 3],
            release_threshold: 0,
            reserved: Level::default(),
            used: Level::default(),
        };
        if let Location::Device(device) = location {
            if let Some(own) = pool.devices.get_mut(device as usize) {
                *own = Access::ReadWrite;
            }
        }
        pool
    }

    /// The live allocation that an address lies in: start and length.
    pub(super) fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, allocation) = self.live.range(..=address).next_back()?;
        (address - start < allocation.len).then_some((start, allocation.len))
    }

    /// Whether a whole range lies in one live allocation.
    pub(super) fn is_live(&self, start: u64, len: u64) -> bool {
        let fits = |(at, size): (u64, u64)| len <= size - (start - at);
        self.allocation(start).is_some_and(fits)
    }

    /// Records an allocation.
    pub(super) fn hold(&mut self, start: u64, allocation: Allocation) {
        self.live.insert(start, allocation);
        self.used.add(allocation.len);
    }

    /// Records an imported allocation's chunk.
    pub(super) fn add_imported(&mut self, range: Range, offset: u64) {
        self.chunks.insert(
            range.start(),
            Chunk {
                range,
                offset,
                free: FreeRanges::default(),
                _charge: None,
            },
        );
    }

    fn take_free(&mut self, len: u64) -> Option<(u64, Allocation)> {
        self.chunks.iter_mut().find_map(|(&chunk, it)| {
            let start = it.free.take(len)?;
            Some((start, Allocation { chunk, len }))
        })
    }

    /// Takes from what was freed earlier in the same order.
    fn take_freed(
        &mut self,
        len: u64,
        is_ordered: impl Fn(Point) -> bool,
    ) -> Option<(u64, Allocation)> {
        let fits = |freed: &Freed| freed.allocation.len >= len && is_ordered(freed.point);
        let index = self.freed.iter().rposition(fits)?;
        let freed = &mut self.freed[index];
        let (start, chunk) = (freed.start, freed.allocation.chunk);
        freed.start += len;
        freed.allocation.len -= len;
        if freed.allocation.len == 0 {
            self.freed.swap_remove(index);
        }
        Some((start, Allocation { chunk, len }))
    }

    fn give_back(&mut self, start: u64, allocation: Allocation) {
        if self.imported {
            self.chunks.remove(&allocation.chunk);
        } else if let Some(chunk) = self.chunks.get_mut(&allocation.chunk) {
            chunk.free.give(start, allocation.len);
        }
    }

    /// The chunks that can be given back to the system until no more than `keep` bytes are held.
    fn releasable(&self, keep: u64) -> Vec<u64> {
        let mut held = self.reserved.current;
        let mut chunks = Vec::new();
        for (&start, chunk) in &self.chunks {
            if held <= keep {
                break;
            }
            if chunk.free.is_whole(start, chunk.range.len()) {
                held -= chunk.range.len();
                chunks.push(start);
            }
        }
        chunks
    }
}

impl State {
    pub(super) fn pool_create(&mut self, props: &PoolProps) -> Answer<PoolHandle> {
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

    pub(super) fn add_pool(&mut self, pool: Pool) -> PoolHandle {
        let handle = self.number();
        self.pools.insert(handle, pool);
        PoolHandle(handle)
    }

    pub(super) fn pool(&mut self, handle: PoolHandle) -> Answer<&mut Pool> {
        match self.pools.get_mut(&handle.0) {
            Some(pool) if !pool.destroyed => Ok(pool),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    pub(super) fn pool_destroy(&mut self, handle: PoolHandle) -> Answer<()> {
        let pool = self.pool(handle)?;
        if pool.is_default {
            return fail(Code::INVALID_VALUE);
        }
        pool.destroyed = true;
        for current in &mut self.current_pools {
            if *current == Some(handle.0) {
                *current = None; // The device falls back to its default pool.
            }
        }
        self.reap(handle.0);
        Ok(())
    }

    /// Ends a destroyed pool once nothing of it is in use.
    fn reap(&mut self, handle: u64) {
        let done = |pool: &Pool| pool.destroyed && pool.live.is_empty() && pool.freed.is_empty();
        if self.pools.get(&handle).is_some_and(done) {
            if let Some(pool) = self.pools.remove(&handle) {
                for start in pool.chunks.keys() {
                    self.regions.remove(start);
                }
            }
        }
    }

    pub(super) fn pool_set_attribute(
        &mut self,
        handle: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Answer<()> {
        let pool = self.pool(handle)?;
        match (attribute, value) {
            (PoolAttribute::ReuseFollowEventDependencies, _) => pool.reuse[0] = value.min(1),
            (PoolAttribute::ReuseAllowOpportunistic, _) => pool.reuse[1] = value.min(1),
            (PoolAttribute::ReuseAllowInternalDependencies, _) => pool.reuse[2] = value.min(1),
            (PoolAttribute::ReleaseThreshold, _) => pool.release_threshold = value,
            (PoolAttribute::ReservedHigh, 0) => pool.reserved.high = pool.reserved.current,
            (PoolAttribute::UsedHigh, 0) => pool.used.high = pool.used.current,
            _ => return fail(Code::INVALID_VALUE),
        }
        Ok(())
    }

    pub(super) fn pool_get_attribute(
        &mut self,
        handle: PoolHandle,
        attribute: PoolAttribute,
    ) -> Answer<u64> {
        let pool = self.pool(handle)?;
        Ok(match attribute {
            PoolAttribute::ReuseFollowEventDependencies => pool.reuse[0],
            PoolAttribute::ReuseAllowOpportunistic => pool.reuse[1],
            PoolAttribute::ReuseAllowInternalDependencies => pool.reuse[2],
            PoolAttribute::ReleaseThreshold => pool.release_threshold,
            PoolAttribute::ReservedCurrent => pool.reserved.current,
            PoolAttribute::ReservedHigh => pool.reserved.high,
            PoolAttribute::UsedCurrent => pool.used.current,
            PoolAttribute::UsedHigh => pool.used.high,
        })
    }

    pub(super) fn pool_set_access(
        &mut self,
        handle: PoolHandle,
        descs: &[AccessDesc],
    ) -> Answer<()> {
        let location = self.pool(handle)?.location;
        if descs.is_empty() {
            return fail(Code::INVALID_VALUE);
        }
        for desc in descs {
            self.check_grant(desc.location, location)?;
            if desc.location == location && desc.access == Access::None {
                return fail(Code::INVALID_VALUE);
            }
        }
        let pool = self.pool(handle)?;
        let before = pool.host;
        for desc in descs {
            match desc.location {
                Location::Device(device) => pool.devices[device as usize] = desc.access,
                _ => pool.host = desc.access,
            }
        }
        if pool.host != before {
            for chunk in pool.chunks.values() {
                let range = &chunk.range;
                range
                    .protect(range.start(), range.len(), pool.host)
                    .map_err(exhausted)?;
            }
        }
        Ok(())
    }

    pub(super) fn pool_get_access(
        &mut self,
        handle: PoolHandle,
        location: Location,
    ) -> Answer<u64> {
        let known = match location {
            Location::Device(device) => self.device(device).is_ok(),
            _ => true,
        };
        let pool = self.pool(handle)?;
        let access = match location {
            _ if !known => return fail(Code::INVALID_VALUE),
            Location::Device(device) => pool.devices[device as usize],
            _ => pool.host,
        };
        Ok(access.flags().into())
    }

    pub(super) fn alloc_from_pool(
        &mut self,
        handle: PoolHandle,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<DevicePtr> {
        let key = self.stream(stream)?;
        if self.pool(handle)?.imported || size == 0 {
            return fail(Code::INVALID_VALUE);
        }
        let Some(len) = size.checked_next_multiple_of(UNIT) else {
            return fail(Code::OUT_OF_MEMORY);
        };
        let (start, allocation) = self.find_room(handle, len, key)?;
        self.pool(handle)?.hold(start, allocation);
        Ok(DevicePtr(start))
    }

    fn find_room(
        &mut self,
        handle: PoolHandle,
        len: u64,
        key: StreamKey,
    ) -> Answer<(u64, Allocation)> {
        if let Some(found) = self.pool(handle)?.take_freed(len, |point| point.0 == key) {
            return Ok(found);
        }
        if let Some(found) = self.pool(handle)?.take_free(len) {
            return Ok(found);
        }
        if self.pool(handle)?.reuse[0] == 1 {
            let freed = self.pool(handle)?.freed.clone();
            let ordered: Vec<Point> = freed
                .iter()
                .map(|freed| freed.point)
                .filter(|&point| self.is_ordered(key, point))
                .collect();
            let pool = self.pool(handle)?;
            if let Some(found) = pool.take_freed(len, |point| ordered.contains(&point)) {
                return Ok(found);
            }
        }
        let grown = self.grow(handle, len);
        if grown.is_err() {
            // Short of memory: wait for what other streams have freed, then for whole chunks.
            let pool = self.pool(handle)?;
            if pool.reuse[2] == 1 {
                let points: Vec<Point> = pool.freed.iter().map(|freed| freed.point).collect();
                points.into_iter().for_each(|point| self.run(point));
                if let Some(found) = self.pool(handle)?.take_free(len) {
                    return Ok(found);
                }
            }
            self.release(handle.0, 0);
            self.grow(handle, len)?;
        }
        match self.pool(handle)?.take_free(len) {
            Some(found) => Ok(found),
            None => fail(Code::OUT_OF_MEMORY),
        }
    }

    /// Adds a chunk with room for `len` bytes: one of the usual size, or of just enough.
    fn grow(&mut self, handle: PoolHandle, len: u64) -> Answer<()> {
        let Some(least) = len.checked_next_multiple_of(GRANULARITY) else {
            return fail(Code::OUT_OF_MEMORY);
        };
        let usual = least.max(self.machine.pool_chunk);
        match self.add_chunk(handle, usual) {
            Err(_) if least < usual => self.add_chunk(handle, least),
            answer => answer,
        }
    }

    fn add_chunk(&mut self, handle: PoolHandle, len: u64) -> Answer<()> {
        let pool = self.pool(handle)?;
        let held = pool.reserved.current.checked_add(len);
        let fits = held.is_some_and(|held| pool.max_size == 0 || held <= pool.max_size);
        let location = pool.location;
        if !fits {
            return fail(Code::OUT_OF_MEMORY);
        }
        let charge = self.charge(location, len)?;
        let range = Range::reserve(len, 0, 0).map_err(exhausted)?;
        let start = range.start();
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

    pub(super) fn free_async(&mut self, ptr: DevicePtr, stream: StreamHandle) -> Answer<()> {
        let Some((
            _,
            Region {
                kind: Kind::Chunk { pool },
                ..
            },
        )) = self.region(ptr.0)
        else {
            return fail(Code::INVALID_VALUE);
        };
        let handle = *pool;
        let answer = self.stream(stream);
        if let Err(super::state::Fail::Code(_)) = answer {
            return answer.map(drop);
        }
        let key = (stream.device, stream.raw);
        let point = self.next_point(key);
        let Some(pool) = self.pools.get_mut(&handle) else {
            return fail(Code::INVALID_VALUE);
        };
        let Some(allocation) = pool.live.remove(&ptr.0) else {
            return fail(Code::INVALID_VALUE);
        };
        pool.used.current -= allocation.len;
        if answer.is_err() {
            // The context is lost: no stream will ever come to the free.
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
    pub(super) fn free_now(&mut self, device: i32, handle: u64, ptr: DevicePtr) -> Answer<()> {
        self.synchronize_device(device);
        let Some(pool) = self.pools.get_mut(&handle) else {
            return fail(Code::INVALID_VALUE);
        };
        let Some(allocation) = pool.live.remove(&ptr.0) else {
            return fail(Code::INVALID_VALUE);
        };
        pool.used.current -= allocation.len;
        pool.give_back(ptr.0, allocation);
        self.forget_imported(handle, allocation);
        self.release_pools();
        self.reap(handle);
        self.context(device).map(drop)
    }

    /// A stream came to a free.
    pub(super) fn free_reached(&mut self, handle: u64, point: Point) {
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

    pub(super) fn pool_trim_to(&mut self, handle: PoolHandle, keep: u64) -> Answer<()> {
        self.pool(handle)?;
        self.release(handle.0, keep);
        Ok(())
    }

    /// At a synchronisation, pools give back what they hold above their threshold.
    pub(super) fn release_pools(&mut self) {
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

    fn release(&mut self, handle: u64, keep: u64) {
        let Some(pool) = self.pools.get_mut(&handle) else {
            return;
        };
        for start in pool.releasable(keep) {
            self.regions.remove(&start);
            if let Some(chunk) = pool.chunks.remove(&start) {
                let len = chunk.range.len();
                pool.memory.discard(chunk.offset, len);
                pool.holes.give(chunk.offset, len);
                pool.reserved.current -= len;
            }
        }
    }
}
