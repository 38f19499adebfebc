//! A pool: its memory in chunks, allocations, frees that their streams have not reached, attributes and access; devices' pools.

use std::sync::Arc;

use crate::sim::by_address::ByAddress;
use crate::sim::capacity::Charge;
use crate::sim::fault::{Answer, fail};
use crate::sim::memory::{Memory, Purpose};
use crate::sim::space::{FreeRanges, Range, is_covered};
use crate::sim::state::{Point, State};
use crate::*;

/// Allocations are aligned to, and a multiple of, this many bytes.
const UNIT: u64 = 512;

#[derive(Debug)]
pub struct Pool {
    pub memory: Arc<Memory>,
    /// How often it was imported and not destroyed again, which all imports have one handle for; 0: it is this simulator's.
    pub imports: u32,
    /// Whether it was exported: only then can pointers of it be.
    pub exported: bool,
    /// Whether an export as fabric was refused: a driver must not destroy it.
    pub is_damaged: bool,
    /// A device's own pool, which cannot be destroyed.
    pub is_default: bool,
    /// Its handle was destroyed; the pool lives until its last allocation is freed.
    pub destroyed: bool,
    pub host: Access,
    pub devices: Box<[Access]>,
    pub max_size: u64,
    pub chunks: ByAddress<Chunk>,
    /// Unused parts of the file, which has no end.
    pub holes: FreeRanges,
    /// Live allocations by address: chunk and length.
    pub live: ByAddress<Allocation>,
    /// Frees that their streams have not reached.
    pub freed: Vec<Freed>,
    /// By the numbers of [`PoolAttribute`], from 1 on.
    attributes: [u64; 9],
}

/// Part of a pool's memory at an address.
#[derive(Debug)]
pub struct Chunk {
    pub range: Range,
    /// Its start in the pool's file.
    pub offset: u64,
    /// Free addresses; an imported allocation's chunk has none.
    pub free: FreeRanges,
    pub _charge: Option<Charge>,
}

#[derive(Clone, Copy, Debug)]
pub struct Allocation {
    pub chunk: u64,
    /// The bytes it takes in the chunk.
    pub len: u64,
    /// The bytes requested.
    pub size: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Freed {
    pub start: u64,
    pub allocation: Allocation,
    pub point: Point,
}

impl Pool {
    fn new(memory: Arc<Memory>, mut devices: Box<[Access]>) -> Self {
        let mut host = Access::ReadWrite;
        if let Location::Device(device) = memory.label.location {
            host = Access::None;
            if let Some(own) = devices.get_mut(device as usize) {
                *own = Access::ReadWrite;
            }
        }
        Self {
            memory,
            imports: 0,
            exported: false,
            is_damaged: false,
            is_default: false,
            destroyed: false,
            host,
            devices,
            max_size: 0,
            chunks: ByAddress::default(),
            holes: FreeRanges::whole(0, i64::MAX as u64),
            live: ByAddress::default(),
            freed: Vec::new(),
            attributes: [0, 1, 1, 1, 0, 0, 0, 0, 0],
        }
    }

    pub const fn get(&self, attribute: PoolAttribute) -> u64 {
        self.attributes[attribute as usize]
    }

    /// Changes a counter, and its maximum so far, which has the next number.
    pub fn count(&mut self, current: PoolAttribute, more: u64, less: u64) {
        let at = current as usize;
        self.attributes[at] = self.attributes[at] + more - less;
        self.attributes[at + 1] = self.attributes[at].max(self.attributes[at + 1]);
    }

    pub fn is_imported(&self) -> bool {
        self.imports > 0
    }

    /// Returns the live allocation that contains an address: start and length.
    pub fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let &(start, Allocation { size, .. }) = self.live.up_to(address)?;
        (address - start < size).then_some((start, size))
    }

    /// Returns whether a whole range lies in one live allocation.
    pub fn is_live(&self, start: u64, len: u64) -> bool {
        let fits = |(at, size): (u64, u64)| len <= size - (start - at);
        self.allocation(start).is_some_and(fits)
    }

    /// Returns whether a range lies in allocations that are live, or whose frees their streams have not reached.
    pub fn is_in_use(&self, start: u64, len: u64) -> bool {
        is_covered(start, start + len, |at| {
            let live = self.live.up_to(at).map(|&(start, it)| (start, it.len));
            let freed = self.freed.iter().map(|it| (it.start, it.allocation.len));
            let ends = live
                .into_iter()
                .chain(freed)
                .filter(|(start, _)| *start <= at);
            ends.map(|(start, len)| start + len).find(|&end| end > at)
        })
    }

    /// Records an allocation.
    pub fn hold(&mut self, start: u64, allocation: Allocation) {
        self.live.insert(start, allocation);
        self.count(PoolAttribute::UsedCurrent, allocation.size, 0);
    }

    /// Ends the use of the allocation at an address.
    pub fn end_use(&mut self, ptr: DevicePtr) -> Answer<Allocation> {
        let allocation = self.live.remove(ptr.0).ok_or(Code::INVALID_VALUE)?;
        self.count(PoolAttribute::UsedCurrent, 0, allocation.size);
        Ok(allocation)
    }

    /// Returns whether an import of the allocation at `offset` in the file is still alive.
    pub fn has_imported(&self, offset: u64) -> bool {
        let freed = self.freed.iter().map(|it| (it.start, it.allocation));
        let live = self.live.entries().iter().copied();
        self.is_imported()
            && live.chain(freed).any(|(start, allocation)| {
                let chunk = self.chunks.get(allocation.chunk);
                chunk.is_some_and(|it| it.offset + (start - allocation.chunk) == offset)
            })
    }

    /// Takes the smallest free range that is large enough; never-used memory comes last.
    pub fn take_free(&mut self, size: u64) -> Option<(u64, Allocation)> {
        let len = size.checked_next_multiple_of(UNIT)?;
        let parts = self.chunks.entries().iter().flat_map(|&(chunk, ref it)| {
            let end = chunk + it.range.len;
            let part = move |(start, have)| (start + have == end, have, start, chunk);
            it.free.fitting(len).map(part)
        });
        let (_, _, start, chunk) = parts.min()?;
        let free = &mut self.chunks.get_mut(chunk)?.free;
        let allocation = Allocation { chunk, len, size };
        free.take_at(start, len).then_some((start, allocation))
    }

    /// Takes memory that was freed earlier in the same order.
    pub fn take_freed(
        &mut self,
        size: u64,
        is_ordered: impl Fn(Point) -> bool,
    ) -> Option<(u64, Allocation)> {
        let len = size.checked_next_multiple_of(UNIT)?;
        let fits = |freed: &Freed| freed.allocation.len >= len && is_ordered(freed.point);
        let index = self.freed.iter().rposition(fits)?;
        let freed = &mut self.freed[index];
        let (start, chunk) = (freed.start, freed.allocation.chunk);
        freed.start += len;
        freed.allocation.len -= len;
        if freed.allocation.len == 0 {
            self.freed.swap_remove(index);
        }
        Some((start, Allocation { chunk, len, size }))
    }

    /// Returns the chunks that can be given back to the system until at most `keep` bytes are held.
    pub fn releasable(&self, keep: u64) -> Vec<u64> {
        let mut held = self.get(PoolAttribute::ReservedCurrent);
        let mut chunks = Vec::new();
        for &(start, ref chunk) in self.chunks.entries() {
            if held <= keep {
                break;
            }
            if chunk.free.is_whole(start, chunk.range.len) {
                held -= chunk.range.len;
                chunks.push(start);
            }
        }
        chunks
    }
}

impl State {
    /// Adds a pool of this memory, which `change` gives its further properties.
    pub fn add_pool(&mut self, memory: Arc<Memory>, change: impl FnOnce(&mut Pool)) -> PoolHandle {
        let mut pool = Pool::new(memory, self.nobody());
        change(&mut pool);
        let handle = self.number();
        self.pools.insert(handle, pool);
        PoolHandle(handle)
    }

    pub fn pool(&mut self, handle: PoolHandle) -> Answer<&mut Pool> {
        match self.pools.get_mut(handle.0) {
            Some(pool) if !pool.destroyed => Ok(pool),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    pub fn pool_set_attribute(
        &mut self,
        handle: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Answer {
        let (pool, at) = (self.pool(handle)?, attribute as usize);
        pool.attributes[at] = match (attribute, value) {
            (reuse, value) if reuse.is_int() => value.min(1),
            (PoolAttribute::ReleaseThreshold, value) => value,
            (PoolAttribute::ReservedHigh | PoolAttribute::UsedHigh, 0) => pool.attributes[at - 1],
            _ => return fail(Code::INVALID_VALUE),
        };
        Ok(())
    }

    pub fn pool_get_attribute(
        &mut self,
        handle: PoolHandle,
        attribute: PoolAttribute,
    ) -> Answer<u64> {
        Ok(self.pool(handle)?.get(attribute))
    }

    pub fn pool_set_access(&mut self, handle: PoolHandle, descs: &[AccessDesc]) -> Answer {
        let location = self.pool(handle)?.memory.label.location;
        for desc in descs {
            self.check_pool_grant(desc, location)?;
        }
        let of_no_node = |desc: &AccessDesc| desc.location == Location::HostNumaCurrent;
        if descs.iter().any(of_no_node) {
            return fail(Code::INVALID_VALUE);
        }
        for desc in descs.iter().filter(|desc| desc.access == Access::None) {
            if desc.location == location && !location.is_host() {
                return fail(Code::INVALID_DEVICE);
            }
            if desc.location.is_host() {
                return fail(Code::NOT_SUPPORTED);
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
            for Chunk { range, .. } in pool.chunks.values() {
                range.protect(range.start, range.len, pool.host)?;
            }
        }
        Ok(())
    }

    /// Checks that a location exists and can be granted a pool's memory: pools grant reading and writing
    /// together.
    fn check_pool_grant(&self, desc: &AccessDesc, location: Location) -> Answer {
        let host_of_device = desc.location.is_host() && !location.is_host();
        if desc.access == Access::Read || (host_of_device && desc.access == Access::None) {
            return fail(Code::NOT_SUPPORTED);
        }
        if let Location::Device(device) = desc.location {
            self.device(device)?;
        }
        self.check_grant(desc, location)
    }

    pub fn pool_get_access(&mut self, handle: PoolHandle, location: Location) -> Answer<u64> {
        let pool = self.pool(handle)?;
        let access = match location {
            Location::Device(device) => pool.devices.get(device as usize),
            _ => Some(&pool.host),
        };
        Ok(access.ok_or(Code::INVALID_VALUE)?.flags().into())
    }

    pub fn device_default_pool(&mut self, device: i32) -> Answer<PoolHandle> {
        let index = self.device(device)?;
        if let Some(pool) = self.default_pools[index] {
            return Ok(PoolHandle(pool));
        }
        let location = Location::Device(device);
        let memory = self.new_memory(Purpose::Pool, location, HandleTypes::NONE, 0)?;
        let handle = self.add_pool(memory, |pool| pool.is_default = true);
        self.default_pools[index] = Some(handle.0);
        Ok(handle)
    }

    pub fn device_pool(&mut self, device: i32) -> Answer<PoolHandle> {
        let index = self.device(device)?;
        match self.current_pools[index] {
            Some(pool) => Ok(PoolHandle(pool)),
            None => self.device_default_pool(device),
        }
    }

    pub fn device_set_pool(&mut self, device: i32, handle: PoolHandle) -> Answer {
        let index = self.device(device)?;
        let host_allowed = self.machine.host_pool_for_device;
        let pool = self.pool(handle)?;
        let allowed = match pool.memory.label.location {
            Location::Device(owner) => owner == device,
            _ => host_allowed,
        };
        if pool.is_imported() || !allowed {
            return fail(Code::INVALID_VALUE);
        }
        self.current_pools[index] = Some(handle.0);
        Ok(())
    }
}
