//! Stream-ordered memory pools.
//!
//! A pool has one memfd that grows; its chunks are mapped at separate addresses and divided among
//! allocations. Memory is freed when the stream reaches the free; later work in the same stream may reuse it
//! before that.

mod calls;
mod contents;
mod grow;
mod order;
mod settings;
mod share;

pub(super) use calls::Face;
pub(super) use contents::Pool;

use super::answer::{Answer, fail};
use super::memory::Purpose;
use super::state::{Kind, State};
use crate::{Code, CudaVersion, DevicePtr, HandleTypes, Location, PoolHandle, PoolProps};

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

    /// Returns the pool whose chunk contains an address.
    pub(super) fn pool_at(&self, ptr: DevicePtr) -> Answer<u64> {
        match self.region(ptr.0).map(|(_, region)| &region.kind) {
            Some(Kind::Chunk { pool }) => Ok(*pool),
            _ => fail(Code::INVALID_VALUE),
        }
    }

    pub(super) fn pool_destroy(&mut self, handle: PoolHandle) -> Answer<()> {
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
}
