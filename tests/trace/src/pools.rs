//! The pool operations of a run.

use super::Value;
use super::addr::{Addr, Memory, Slot};
use super::op::Op;
use super::run::{Run, Step, done};
use super::state::{Grants, Pool, Pooled};
use egmem::Result;
use egmem::driver::{HandleType, PoolHandle, StreamHandle};

impl Run<'_> {
    fn pool(&self, slot: Slot) -> Option<PoolHandle> {
        self.state.pools.get(&slot)?.handle
    }

    pub(super) fn pool_step(&mut self, op: &Op) -> Step {
        let calls = self.driver.driver_pools();
        match *op {
            Op::PoolCreate { out, ref props } => {
                let handle = calls.pool_create(props);
                Some(handle.map(|handle| {
                    let pool = Pool {
                        handle: Some(handle),
                        access: Grants::of(props.location),
                    };
                    self.state.pools.insert(out, pool);
                    Vec::new()
                }))
            }
            Op::PoolDestroy { pool } => {
                let handle = self.pool(pool)?;
                // SAFETY: the pool is this run's own and its slot is emptied, so it is not used
                // again; CUDA keeps it until its allocations are freed.
                let result = unsafe { calls.pool_destroy(handle) };
                if result.is_ok() {
                    // A device whose pool it was goes back to its default pool.
                    self.state
                        .current_pools
                        .retain(|_, current| *current != pool);
                    self.state.pools.get_mut(&pool)?.handle = None;
                }
                done(result)
            }
            Op::PoolSet {
                pool,
                attribute,
                value,
            } => {
                let pool = self.pool(pool)?;
                // SAFETY: the pool is this run's own and not destroyed.
                done(unsafe { calls.pool_set_attribute(pool, attribute, value) })
            }
            Op::PoolGet { pool, attribute } => {
                let pool = self.pool(pool)?;
                // SAFETY: the pool is this run's own and not destroyed.
                let value = unsafe { calls.pool_get_attribute(pool, attribute) };
                Some(value.map(|value| vec![Value::Number(value)]))
            }
            Op::PoolTrim { pool, keep } => {
                let pool = self.pool(pool)?;
                // SAFETY: the pool is this run's own and not destroyed.
                done(unsafe { calls.pool_trim_to(pool, keep) })
            }
            Op::PoolSetAccess { pool, ref access } => {
                let handle = self.pool(pool)?;
                // SAFETY: the pool is this run's own and no work on it is under way.
                let result = unsafe { calls.pool_set_access(handle, access) };
                let grants = &mut self.state.pools.get_mut(&pool)?.access;
                for desc in access {
                    // A failed call may have granted access to a part of the locations.
                    match result.is_ok() {
                        true => grants.set(*desc),
                        false => grants.limit(*desc),
                    }
                }
                done(result)
            }
            Op::PoolGetAccess { pool, location } => {
                let pool = self.pool(pool)?;
                // SAFETY: the pool is this run's own and not destroyed.
                let flags = unsafe { calls.pool_get_access(pool, location) };
                Some(flags.map(|flags| vec![Value::Number(flags)]))
            }
            Op::PoolExport { pool } => {
                let pool = self.pool(pool)?;
                // SAFETY: the pool is this run's own and not destroyed.
                done(unsafe { calls.pool_export(pool, HandleType::PosixFd) })
            }
            Op::PoolExportPointer { alloc } => {
                let alloc = self.state.pooled.get(&alloc)?;
                done(calls.pool_export_pointer(alloc.ptr))
            }
            Op::PoolAlloc {
                out,
                pool,
                size,
                stream,
            } => {
                let stream = self.stream(stream)?;
                let (from, ptr) = match pool {
                    Some(slot) => {
                        let pool = self.pool(slot)?;
                        // SAFETY: pool and stream are this run's own and not destroyed.
                        let ptr = unsafe { calls.alloc_from_pool_async(pool, size, stream) };
                        (Ok(slot), ptr)
                    }
                    None => {
                        let current = self.state.current_pools.get(&stream.device);
                        let from = current.copied().ok_or(stream.device);
                        // SAFETY: the stream is this run's own and not destroyed.
                        (from, unsafe { calls.alloc_async(size, stream) })
                    }
                };
                Some(ptr.and_then(|ptr| {
                    let alloc = Pooled {
                        ptr,
                        size,
                        pool: from,
                        defined: false,
                    };
                    self.state.pooled.insert(out, alloc);
                    self.synchronize(stream)?;
                    let at = Addr {
                        of: Memory::Pooled(out),
                        offset: 0,
                    };
                    self.zero(at, size, stream)?;
                    Ok(Vec::new())
                }))
            }
            Op::PoolFree { alloc, stream } => {
                let stream = self.stream(stream)?;
                let alloc = self.state.pooled.remove(&alloc)?;
                // SAFETY: the allocation is this run's own and its slot is emptied.
                let result = unsafe { calls.free_async(alloc.ptr, stream) };
                done(result.and_then(|()| self.synchronize(stream)))
            }
            Op::DevicePool { device } => Some(calls.device_pool(device).map(|pool| {
                let same = |handle: &Pool| handle.handle == Some(pool);
                let held = self.state.pools.iter().find(|(_, held)| same(held));
                let default = calls.device_default_pool(device).ok();
                vec![Value::Text(match held {
                    Some((slot, _)) => format!("p{slot}"),
                    None if default == Some(pool) => "default".into(),
                    None => "elsewhere".into(),
                })]
            })),
            Op::SetDevicePool { device, pool } => {
                let handle = self.pool(pool)?;
                // SAFETY: the pool is this run's own; `give_back` restores the default pool before
                // it is destroyed.
                let result = unsafe { calls.device_set_pool(device, handle) };
                if result.is_ok() {
                    self.state.current_pools.insert(device, pool);
                }
                done(result)
            }
            _ => None,
        }
    }

    pub(super) fn give_back_pools(&mut self, note: &mut impl FnMut(String, Result<()>)) {
        let calls = self.driver.driver_pools();
        for device in self.state.current_pools.keys() {
            let restored = calls.device_default_pool(*device).and_then(|pool| {
                // SAFETY: the default pool is always there.
                unsafe { calls.device_set_pool(*device, pool) }
            });
            note(format!("the pool of device {device}"), restored);
        }
        let stream = StreamHandle { device: 0, raw: 0 };
        for (slot, alloc) in &self.state.pooled {
            // SAFETY: the allocation is this run's own, and all work has been waited for.
            note(format!("a{slot}"), unsafe {
                calls.free_async(alloc.ptr, stream)
            });
        }
        if !self.state.pooled.is_empty() {
            note("frees".into(), self.synchronize(stream));
        }
        for (slot, pool) in &self.state.pools {
            if let Some(handle) = pool.handle {
                // SAFETY: the pool is this run's own and is not used again.
                note(format!("p{slot}"), unsafe { calls.pool_destroy(handle) });
            }
        }
    }
}
