//! Pools of devices, and pools and allocations that leave the process.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::super::answer::{Answer, exhausted, fail};
use super::super::memory::{Memory, Purpose};
use super::super::share;
use super::super::space::GRANULARITY;
use super::super::space::Range;
use super::super::state::{Kind, Region, State};
use super::contents::{Allocation, Pool};
use crate::{
    Access, Code, DevicePtr, HandleType, HandleTypes, Location, PoolHandle, PoolPtrExport,
    ShareableHandle, StreamHandle,
};

const MAGIC: [u8; 8] = *b"egmemptr";

impl State {
    pub(super) fn device_default_pool(&mut self, device: i32) -> Answer<PoolHandle> {
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

    pub(super) fn device_pool(&mut self, device: i32) -> Answer<PoolHandle> {
        let index = self.device(device)?;
        match self.current_pools[index] {
            Some(pool) => Ok(PoolHandle(pool)),
            None => self.device_default_pool(device),
        }
    }

    pub(super) fn device_set_pool(&mut self, device: i32, handle: PoolHandle) -> Answer<()> {
        let index = self.device(device)?;
        let host_allowed = self.machine.host_pool_for_device;
        let pool = self.pool(handle)?;
        let allowed = match pool.location {
            Location::Device(owner) => owner == device,
            _ => host_allowed,
        };
        if pool.imported || !allowed {
            return fail(Code::INVALID_VALUE);
        }
        self.current_pools[index] = Some(handle.0);
        Ok(())
    }

    pub(super) fn alloc_async(&mut self, size: u64, stream: StreamHandle) -> Answer<DevicePtr> {
        let pool = self.device_pool(stream.device)?;
        self.alloc_from_pool_async(pool, size, stream)
    }

    pub(super) fn pool_export(
        &mut self,
        handle: PoolHandle,
        kind: HandleType,
    ) -> Answer<ShareableHandle> {
        let pool = self.pool(handle)?;
        if pool.imported || !pool.handle_types.contains(kind.into()) {
            return fail(Code::INVALID_VALUE);
        }
        let memory = Arc::clone(&pool.memory);
        self.check_fabric(memory.label.location, kind.into())?;
        let shareable = share::export(&memory, kind).map_err(exhausted)?;
        self.pool(handle)?.exported = true;
        Ok(shareable)
    }

    pub(super) fn pool_import(&mut self, handle: &ShareableHandle) -> Answer<PoolHandle> {
        let memory = match handle {
            ShareableHandle::PosixFd(fd) => {
                Memory::import(fd.as_fd(), Purpose::Pool).ok_or(Code::INVALID_VALUE)?
            }
            ShareableHandle::Fabric(handle) => {
                share::import(handle, Purpose::Pool, self.machine.imex_channel)?
            }
        };
        let same = |pool: &Pool| {
            pool.imported && !pool.destroyed && pool.memory.label.id == memory.label.id
        };
        if let Some((&handle, pool)) = self.pools.iter_mut().find(|(_, pool)| same(pool)) {
            pool.imports += 1;
            return Ok(PoolHandle(handle));
        }
        let pool = Pool::new(Arc::new(memory), 0, self.nobody(), true);
        Ok(self.add_pool(pool))
    }

    pub(super) fn pool_export_pointer(&mut self, ptr: DevicePtr) -> Answer<PoolPtrExport> {
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

    pub(super) fn pool_import_pointer(
        &mut self,
        handle: PoolHandle,
        export: &PoolPtrExport,
    ) -> Answer<DevicePtr> {
        let pool = self.pool(handle)?;
        let bytes = &export.0;
        let number = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let (offset, len) = (number(24), number(32));
        let same = bytes[..8] == MAGIC && bytes[8..24] == pool.memory.label.id.to_le_bytes();
        let end = offset
            .checked_add(len)
            .filter(|&end| end <= pool.memory.size());
        let (Some(end), true) = (end, same && pool.imported && len > 0) else {
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
        let host = match pool.location {
            Location::Device(_) => Access::None,
            _ => Access::ReadWrite,
        };
        let range = Range::reserve(whole, 0).map_err(exhausted)?;
        let chunk = range.start;
        range
            .place(chunk, whole, pool.memory.file(), first, host)
            .map_err(exhausted)?;
        let start = chunk + (offset - first);
        pool.add_imported(range, first);
        let size = len;
        pool.hold(start, Allocation { chunk, len, size });
        let region = Region {
            len: whole,
            memory: Arc::clone(&pool.memory),
            offset: first,
            kind: Kind::Chunk { pool: handle.0 },
        };
        self.regions.insert(chunk, region);
        Ok(DevicePtr(start))
    }
}
