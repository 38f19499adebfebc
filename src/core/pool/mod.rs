//! Stream-ordered memory pools on host nodes and GPUs.
//!
//! An allocation is ordered like work on a stream: later work on that stream may use the bytes, and after the
//! free other allocations may reuse them. [`PoolBuffer`] keeps that order for other streams and for the CPU
//! too.

mod access;
mod buffer;
mod current;
mod imported;
mod options;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use access::Granting;
pub use buffer::PoolBuffer;
pub use current::DevicePoolGuard;
pub use imported::{ImportedPool, ImportedPoolBuffer};
pub use options::{PoolOptions, Reuse};

use crate::driver::{
    Access, AccessDesc, Driver, Location, PoolApi, PoolAttribute, PoolCalls, PoolHandle, PoolProps,
};
use crate::explain::explain_pool;
use crate::guard::check_free;
use crate::memory::GrantUses;
use crate::stream::Stream;
use crate::teardown::{give_back, give_back_or_log};
use crate::{Error, Result};

/// A memory pool. Clones are the same pool; it is destroyed with the last clone and allocation.
///
/// ```
/// use egmem::driver::sim::Machine;
/// use egmem::{Driver, Pool, Stream};
/// use egmem::driver::NodeId;
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let pool = Pool::options(NodeId(0)).release_threshold(u64::MAX).create(&driver)?;
/// let stream = Stream::new(&driver, 0)?;
/// let buffer = pool.allocate(64 << 10, &stream)?;
/// buffer.cpu()?.put(0, 42_u64)?; // waits until the allocation has happened
/// buffer.free_on(&stream)?;
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    driver: Driver,
    api: PoolApi,
    handle: PoolHandle,
    props: PoolProps,
    overcommit: bool,
    /// Work in flight that relies on the pool's grants.
    uses: Arc<GrantUses>,
}

impl Inner {
    /// Returns the calls of the pool's API, which was available when the pool was created.
    fn calls(&self) -> Result<&dyn PoolCalls> {
        self.driver.pools(self.api)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        give_back_or_log(&self.driver, "a memory pool", || {
            // SAFETY: owned by `self`; the driver keeps what allocations in flight still need.
            unsafe { self.calls()?.pool_destroy(self.handle) }
        });
    }
}

/// A pool's memory, in bytes. Source: `CU_MEMPOOL_ATTR_…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStats {
    /// Held from the system now.
    pub reserved: u64,
    /// Most held since the last reset.
    pub reserved_high: u64,
    /// Allocated now.
    pub used: u64,
    /// Most allocated since the last reset.
    pub used_high: u64,
}

impl Pool {
    /// Returns options for a pool at `location`: a node's id, or any [`Location`].
    pub fn options(location: impl Into<Location>) -> PoolOptions {
        PoolOptions::at(location.into())
    }

    /// Allocates `bytes`, usable by work submitted to `stream` from now on.
    ///
    /// Source: `cuMemAllocFromPoolAsync`, `cudaMallocFromPoolAsync`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes or another driver's stream; [`Error::NodeTooFull`];
    /// [`Error::OutOfMemory`], also beyond the pool's largest size.
    pub fn allocate(&self, bytes: u64, stream: &Stream) -> Result<PoolBuffer> {
        self.0.driver.expect_same(stream.driver(), "stream")?;
        if bytes == 0 {
            return Err(Error::invalid_of(
                "size",
                "0 bytes cannot be allocated",
                "1 byte or more",
            ));
        }
        if !self.0.overcommit {
            check_free(&self.0.driver, self.0.props.location, bytes, || self.idle())?;
        }
        let calls = self.0.calls()?;
        // SAFETY: `self` and `stream` keep their handles alive.
        let start = unsafe { calls.alloc_from_pool_async(self.0.handle, bytes, stream.handle()) }
            .map_err(|error| explain_pool(&self.0.driver, error, &self.0.props, bytes))?;
        Ok(PoolBuffer::new(Arc::clone(&self.0), start, bytes, stream))
    }

    /// Returns the bytes that the pool holds and that are not allocated.
    fn idle(&self) -> u64 {
        match (
            self.get(PoolAttribute::ReservedCurrent),
            self.get(PoolAttribute::UsedCurrent),
        ) {
            (Ok(reserved), Ok(used)) => reserved.saturating_sub(used),
            _ => 0,
        }
    }

    fn granting(&self) -> Granting<'_> {
        // SAFETY: `self` keeps the pool alive.
        unsafe { Granting::new(&self.0.driver, self.0.api, self.0.handle, &self.0.uses) }
    }

    /// Changes what GPUs may do with all of the pool's memory, present and future.
    ///
    /// Source: `cuMemPoolSetAccess`. The owner's own access cannot be revoked.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], or the driver's; [`Error::InvalidArgument`] for read-only access, which pools do
    /// not support, and for the CPU's access to a host pool, which stays; [`Error::StillHeld`] for access
    /// that is revoked while a copy, a fill or a [ticket](crate::stream::Transfer) for one uses the memory.
    pub fn set_access(&self, access: &[AccessDesc]) -> Result<()> {
        self.granting().set(access)
    }

    /// Returns what `location` may do with the pool's memory.
    ///
    /// Source: `cuMemPoolGetAccess`.
    ///
    /// # Errors
    /// The driver's errors, and [`Error::InvalidArgument`] for flags that this crate does not know.
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        self.granting().get(location.into())
    }

    /// Gives free memory back to the system until `keep` bytes are held, or no more is free.
    ///
    /// Source: `cuMemPoolTrimTo`.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn trim_to(&self, keep: u64) -> Result<()> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.0.calls()?.pool_trim_to(self.0.handle, keep) }
    }

    /// Sets how many bytes the pool keeps at a synchronisation. See [`PoolOptions::release_threshold`].
    ///
    /// # Errors
    /// The driver's errors.
    pub fn set_release_threshold(&self, bytes: u64) -> Result<()> {
        self.set(PoolAttribute::ReleaseThreshold, bytes)
    }

    /// Returns what the pool holds and has allocated.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn stats(&self) -> Result<PoolStats> {
        Ok(PoolStats {
            reserved: self.get(PoolAttribute::ReservedCurrent)?,
            reserved_high: self.get(PoolAttribute::ReservedHigh)?,
            used: self.get(PoolAttribute::UsedCurrent)?,
            used_high: self.get(PoolAttribute::UsedHigh)?,
        })
    }

    /// Resets the high-water marks to the present values.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn reset_high_water(&self) -> Result<()> {
        self.set(PoolAttribute::ReservedHigh, 0)?;
        self.set(PoolAttribute::UsedHigh, 0)
    }

    /// Returns the value of a setting or counter.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn get(&self, attribute: PoolAttribute) -> Result<u64> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.0.calls()?.pool_get_attribute(self.0.handle, attribute) }
    }

    fn set(&self, attribute: PoolAttribute, value: u64) -> Result<()> {
        let calls = self.0.calls()?;
        // SAFETY: `self` keeps the handle alive.
        unsafe { calls.pool_set_attribute(self.0.handle, attribute, value) }
    }

    /// Returns location, handle types and largest size.
    pub fn props(&self) -> &PoolProps {
        &self.0.props
    }

    /// Returns the API through which the pool is used.
    pub fn api(&self) -> PoolApi {
        self.0.api
    }

    /// Returns the driver's handle, for calls of your own: `CUmemoryPool`, `cudaMemPool_t`.
    pub fn handle(&self) -> PoolHandle {
        self.0.handle
    }

    /// Returns the pool's driver.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }

    /// Destroys the pool if this is the last clone and no allocation is left; otherwise returns it.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn destroy(self) -> Result<Result<(), Self>> {
        match Arc::try_unwrap(self.0) {
            Ok(inner) => {
                let inner = std::mem::ManuallyDrop::new(inner);
                // SAFETY: this is the last reference; allocations hold one each.
                let result = give_back(&inner.driver, "a memory pool", || unsafe {
                    inner.calls()?.pool_destroy(inner.handle)
                });
                // SAFETY: `inner` is never used or dropped again, so each field is read out once.
                unsafe {
                    drop(std::ptr::read(&inner.driver));
                    drop(std::ptr::read(&inner.uses));
                }
                result.map(Ok)
            }
            Err(shared) => Ok(Err(Self(shared))),
        }
    }
}
