//! Pools' attributes and access rights; pools of devices, and pools and allocations that leave the process.

use std::sync::Arc;

use super::contents::{Allocation, Chunk, Pool};
use crate::sim::fault::{Answer, fail};
use crate::sim::memory::Purpose;
use crate::sim::share;
use crate::sim::space::{GRANULARITY, Range};
use crate::sim::state::State;
use crate::*;

const MAGIC: [u8; 8] = *b"egmemptr";

impl State {
    pub fn pool_set_attribute(
        &mut self,
        handle: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Answer {
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

    pub fn pool_get_attribute(
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
        let mut pool = Pool::new(memory, 0, self.nobody(), false);
        pool.is_default = true;
        let handle = self.add_pool(pool);
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
        self.check_fabric(memory.label.location, kind.into())?;
        let shareable = share::export(&memory, kind)?;
        self.pool(handle)?.exported = true;
        Ok(shareable)
    }

    pub fn pool_import(&mut self, handle: &ShareableHandle) -> Answer<PoolHandle> {
        let memory = share::import(handle, Purpose::Pool, self.machine.imex_channel)?;
        let same = |pool: &Pool| {
            pool.is_imported() && !pool.destroyed && pool.memory.label.id == memory.label.id
        };
        if let Some((&handle, pool)) = self.pools.iter_mut().find(|(_, pool)| same(pool)) {
            pool.imports += 1;
            return Ok(PoolHandle(handle));
        }
        let pool = Pool::new(Arc::new(memory), 0, self.nobody(), true);
        Ok(self.add_pool(pool))
    }

    pub fn pool_export_pointer(&mut self, ptr: DevicePtr) -> Answer<PoolPtrExport> {
        let pool = &self.pools[&self.pool_at(ptr)?];
        let (Some(allocation), true) = (pool.live.get(&ptr.0), pool.exported) else {
            return fail(Code::INVALID_VALUE);
        };
        let offset = pool.chunks[&allocation.chunk].offset + (ptr.0 - allocation.chunk);
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
        let pool = self.pool(handle)?;
        // Maps whole granules around it, because pages cannot be divided.
        let first = offset - offset % GRANULARITY;
        let whole = end.next_multiple_of(GRANULARITY) - first;
        let range = Range::reserve(whole, 0)?;
        let chunk = range.start;
        range.place(chunk, whole, pool.memory.file(), first, pool.host)?;
        let start = chunk + (offset - first);
        let size = len;
        pool.hold(start, Allocation { chunk, len, size });
        self.add_chunk(handle, range, first, None)?;
        Ok(DevicePtr(start))
    }
}
