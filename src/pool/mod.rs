//! Stream-ordered memory pools on host nodes and GPUs.
//!
//! An allocation is ordered like work on a stream: the bytes may be used by what comes after it on
//! that stream, and may be given to somebody else after the free. [`PoolBuffer`] keeps that order
//! for other streams and for the CPU too.

mod buffer;
mod current;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use buffer::PoolBuffer;
pub use current::DevicePoolGuard;

use crate::driver::{
    Access, AccessDesc, Driver, HandleTypes, Location, PoolApi, PoolAttribute, PoolCalls,
    PoolHandle, PoolProps,
};
use crate::explain::{explain_access, explain_pool};
use crate::guard::check_free;
use crate::stream::Stream;
use crate::teardown::{give_back, give_back_or_log};
use crate::{Error, Result};

/// When a pool may reuse memory that was freed on another stream. The driver's default: all three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reuse {
    /// When an event orders the free before the allocation.
    pub follow_event_dependencies: bool,
    /// When the free is seen to have completed.
    pub allow_opportunistic: bool,
    /// By making the allocating stream wait for the freeing one.
    pub allow_internal_dependencies: bool,
}

impl Default for Reuse {
    fn default() -> Self {
        Self {
            follow_event_dependencies: true,
            allow_opportunistic: true,
            allow_internal_dependencies: true,
        }
    }
}

/// What a pool is to be; [`create`](Self::create) makes it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `create`"]
pub struct PoolOptions {
    props: PoolProps,
    release_threshold: u64,
    reuse: Reuse,
    access: Option<Vec<AccessDesc>>,
    api: PoolApi,
    overcommit: bool,
}

impl PoolOptions {
    /// The most bytes the pool may hold; 0, the default, leaves it to the driver. The driver may
    /// round it up to its own unit.
    pub const fn max_size(mut self, bytes: u64) -> Self {
        self.props.max_size = bytes;
        self
    }

    /// How many bytes the pool keeps when a stream, event or device is synchronised; what is free
    /// beyond goes back to the system. Default 0. `u64::MAX` keeps all.
    pub const fn release_threshold(mut self, bytes: u64) -> Self {
        self.release_threshold = bytes;
        self
    }

    /// When memory freed on another stream may be reused.
    pub const fn reuse(mut self, reuse: Reuse) -> Self {
        self.reuse = reuse;
        self
    }

    /// How the pool may be shared; by default not at all. FABRIC needs an IMEX channel.
    pub const fn handle_types(mut self, handle_types: HandleTypes) -> Self {
        self.props.handle_types = handle_types;
        self
    }

    /// Which GPUs may read and write. Without this, every GPU for a host pool, and the owner alone
    /// for a GPU's pool. The CPU has access to a host pool in any case.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.access
            .get_or_insert_default()
            .extend(who.into_iter().map(|who| AccessDesc {
                location: who.into(),
                access: Access::ReadWrite,
            }));
        self
    }

    /// Whether to ask the driver even for more than the node has free. See
    /// [`PhysicalOptions::overcommit`](crate::vmm::PhysicalOptions::overcommit).
    pub const fn overcommit(mut self, on: bool) -> Self {
        self.overcommit = on;
        self
    }

    /// Through which API the pool is used. Both make the same kind of object.
    pub const fn api(mut self, api: PoolApi) -> Self {
        self.api = api;
        self
    }

    /// Creates the pool and grants it. It takes no memory before the first allocation.
    ///
    /// Source: `cuMemPoolCreate`, `cudaMemPoolCreate`.
    ///
    /// # Errors
    /// [`Error::NoSuchNode`] and [`Error::NoSuchGpu`]; [`Error::NoImexChannel`] for FABRIC without
    /// a channel; [`Error::PlatformUnsupported`];
    /// [`Error::MissingLibrary`] for the runtime API without its library; or the driver's.
    pub fn create(self, driver: &Driver) -> Result<Pool> {
        if self.props.handle_types.contains(HandleTypes::FABRIC) {
            // A fabric pool that the driver refuses to export corrupts the heap when destroyed, so
            // it is made only where plain fabric memory can be had.
            crate::vmm::PhysicalMemory::options(self.props.location)
                .handle_types(HandleTypes::FABRIC)
                .create(driver, 1)?;
        }
        let calls = driver.pools(self.api)?;
        let handle = calls
            .pool_create(&self.props)
            .map_err(|error| explain_pool(driver, error, &self.props, 0))?;
        let pool = Pool(Arc::new(Inner {
            driver: driver.clone(),
            api: self.api,
            handle,
            props: self.props,
            overcommit: self.overcommit,
        }));
        let defaults = Reuse::default();
        for (attribute, on, default) in [
            (
                PoolAttribute::ReuseFollowEventDependencies,
                self.reuse.follow_event_dependencies,
                defaults.follow_event_dependencies,
            ),
            (
                PoolAttribute::ReuseAllowOpportunistic,
                self.reuse.allow_opportunistic,
                defaults.allow_opportunistic,
            ),
            (
                PoolAttribute::ReuseAllowInternalDependencies,
                self.reuse.allow_internal_dependencies,
                defaults.allow_internal_dependencies,
            ),
        ] {
            if on != default {
                pool.set(attribute, on.into())?;
            }
        }
        if self.release_threshold != 0 {
            pool.set_release_threshold(self.release_threshold)?;
        }
        let access = match self.access {
            Some(access) => access,
            None if self.props.location.is_host() => every_gpu(driver)?,
            None => Vec::new(),
        };
        pool.set_access(&access)?;
        Ok(pool)
    }
}

fn every_gpu(driver: &Driver) -> Result<Vec<AccessDesc>> {
    Ok((0..driver.device_count()?)
        .map(|gpu| AccessDesc {
            location: Location::Device(gpu),
            access: Access::ReadWrite,
        })
        .collect())
}

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
}

impl Inner {
    /// The calls of the pool's API, which was there when the pool was made.
    fn calls(&self) -> Result<&dyn PoolCalls> {
        self.driver.pools(self.api)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        give_back_or_log("a memory pool", || {
            // SAFETY: owned by `self`; the driver keeps what allocations in flight still need.
            unsafe { self.calls()?.pool_destroy(self.handle) }
        });
    }
}

/// What a pool holds, in bytes. Source: `CU_MEMPOOL_ATTR_…`.
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
    /// Options for a pool at `location`: a node's id, or any [`Location`].
    pub fn options(location: impl Into<Location>) -> PoolOptions {
        PoolOptions {
            props: PoolProps {
                location: location.into(),
                handle_types: HandleTypes::NONE,
                max_size: 0,
            },
            release_threshold: 0,
            reuse: Reuse::default(),
            access: None,
            api: PoolApi::Driver,
            overcommit: false,
        }
    }

    /// Allocates `bytes`, usable by work put on `stream` from now on.
    ///
    /// Source: `cuMemAllocFromPoolAsync`, `cudaMallocFromPoolAsync`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes or another driver's stream; [`Error::NodeTooFull`];
    /// [`Error::OutOfMemory`], also beyond the pool's largest size.
    pub fn allocate(&self, bytes: u64, stream: &Stream) -> Result<PoolBuffer> {
        self.0.driver.expect_same(stream.driver(), "stream")?;
        if bytes == 0 {
            return Err(Error::invalid("size", "0 bytes cannot be allocated"));
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

    /// Bytes that the pool holds and nobody uses.
    fn idle(&self) -> u64 {
        match (
            self.get(PoolAttribute::ReservedCurrent),
            self.get(PoolAttribute::UsedCurrent),
        ) {
            (Ok(reserved), Ok(used)) => reserved.saturating_sub(used),
            _ => 0,
        }
    }

    /// Changes what GPUs may do with all of the pool's memory, present and future.
    ///
    /// Source: `cuMemPoolSetAccess`. The owner's own access cannot be taken away.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], or the driver's; [`Error::InvalidArgument`] for reading alone, which
    /// pools do not know, and for the CPU's access to a host pool, which stays.
    pub fn set_access(&self, access: &[AccessDesc]) -> Result<()> {
        if let Some(desc) = access.iter().find(|desc| desc.access == Access::Read) {
            return Err(Error::invalid(
                "access",
                format!(
                    "a pool cannot be granted to {} for reading alone",
                    desc.location
                ),
            ));
        }
        if let Some(desc) = access
            .iter()
            .find(|desc| desc.location.is_host() && desc.access == Access::None)
        {
            return Err(Error::invalid(
                "access",
                format!("{} keeps its access to a host pool", desc.location),
            ));
        }
        if access.is_empty() {
            return Ok(());
        }
        // SAFETY: the CPU's access is never taken away, as just checked, so views stay valid.
        unsafe { self.0.calls()?.pool_set_access(self.0.handle, access) }
            .map_err(|error| explain_access(self.driver(), error, access))
    }

    /// What `location` may do with the pool's memory.
    ///
    /// Source: `cuMemPoolGetAccess`.
    ///
    /// # Errors
    /// The driver's, and [`Error::InvalidArgument`] for flags that this crate does not know.
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        let calls = self.0.calls()?;
        // SAFETY: `self` keeps the handle alive.
        let flags = unsafe { calls.pool_get_access(self.0.handle, location.into())? };
        Access::from_flags(flags)
            .ok_or_else(|| Error::invalid("access flags", format!("the driver says {flags:#x}")))
    }

    /// Gives free memory back to the system until `keep` bytes are held, or no more is free.
    ///
    /// Source: `cuMemPoolTrimTo`.
    ///
    /// # Errors
    /// The driver's.
    pub fn trim_to(&self, keep: u64) -> Result<()> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.0.calls()?.pool_trim_to(self.0.handle, keep) }
    }

    /// How many bytes the pool keeps at a synchronisation. See [`PoolOptions::release_threshold`].
    ///
    /// # Errors
    /// The driver's.
    pub fn set_release_threshold(&self, bytes: u64) -> Result<()> {
        self.set(PoolAttribute::ReleaseThreshold, bytes)
    }

    /// What the pool holds and has allocated.
    ///
    /// # Errors
    /// The driver's.
    pub fn stats(&self) -> Result<PoolStats> {
        Ok(PoolStats {
            reserved: self.get(PoolAttribute::ReservedCurrent)?,
            reserved_high: self.get(PoolAttribute::ReservedHigh)?,
            used: self.get(PoolAttribute::UsedCurrent)?,
            used_high: self.get(PoolAttribute::UsedHigh)?,
        })
    }

    /// Sets the high-water marks to the present values.
    ///
    /// # Errors
    /// The driver's.
    pub fn reset_high_water(&self) -> Result<()> {
        self.set(PoolAttribute::ReservedHigh, 0)?;
        self.set(PoolAttribute::UsedHigh, 0)
    }

    /// The value of a setting or counter.
    ///
    /// # Errors
    /// The driver's.
    pub fn get(&self, attribute: PoolAttribute) -> Result<u64> {
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.0.calls()?.pool_get_attribute(self.0.handle, attribute) }
    }

    fn set(&self, attribute: PoolAttribute, value: u64) -> Result<()> {
        let calls = self.0.calls()?;
        // SAFETY: `self` keeps the handle alive.
        unsafe { calls.pool_set_attribute(self.0.handle, attribute, value) }
    }

    /// Location, handle types and largest size.
    pub fn props(&self) -> &PoolProps {
        &self.0.props
    }

    /// Through which API the pool is used.
    pub fn api(&self) -> PoolApi {
        self.0.api
    }

    /// The driver's handle, for calls of your own: `CUmemoryPool`, `cudaMemPool_t`.
    pub fn handle(&self) -> PoolHandle {
        self.0.handle
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }

    /// Destroys the pool and says how that went, if this is the last clone and no allocation is
    /// left; otherwise gives the pool back.
    ///
    /// # Errors
    /// The driver's.
    pub fn destroy(self) -> Result<Result<(), Self>> {
        match Arc::try_unwrap(self.0) {
            Ok(inner) => {
                let inner = std::mem::ManuallyDrop::new(inner);
                // SAFETY: this is the last reference; allocations hold one each.
                let result = give_back(|| unsafe { inner.calls()?.pool_destroy(inner.handle) });
                // SAFETY: `inner` is never used or dropped again, so the clone is read out once.
                drop(unsafe { std::ptr::read(&inner.driver) });
                result.map(Ok)
            }
            Err(shared) => Ok(Err(Self(shared))),
        }
    }
}
