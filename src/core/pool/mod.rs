//! Stream-ordered memory pools on host nodes and GPUs.
//!
//! An allocation is ordered like work on a stream: later work on that stream may use the bytes, and after the
//! free other allocations may reuse them. [`PoolBuffer`] keeps that order for other streams and for the CPU
//! too.
//!
//! # Design
//! A pool's allocation knows the stream it was made on and every stream it was lent to by `use_on`. Its free waits for all
//! of them by events, and so does the CPU's view; use after free across streams takes `unsafe`. Safe copies, fills and
//! proofs on another stream wait for the stream that knows the memory.
//!
//! A pool is a device's current one through a guard, one at a time per device: with two, memory of a GPU could be taken for
//! a host pool's, and the CPU would fault. A pool with fabric handles is made only after plain fabric memory could be made:
//! drivers corrupt the heap when such a pool was refused an export and is destroyed.

mod buffer;
mod imported;
mod options;

pub use buffer::PoolBuffer;
pub use imported::{ImportedPool, ImportedPoolBuffer};
pub use options::{PoolOptions, Reuse};

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use crate::driver::{
    Access, AccessDesc, Code, Driver, Location, PoolApi, PoolAttribute, PoolCalls, PoolHandle,
    PoolProps, refuse,
};
use crate::fork::PerProcess;
use crate::guard::{explain_access, on_gpu};
use crate::ledger::{Grants, Label};
use crate::memory::GrantUses;
use crate::per_driver::lock;
use crate::stream::Stream;
use crate::stream::run_due;
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
pub struct Pool(pub(super) Arc<Inner>);

/// A pool of this process or of another, which its handles and its allocations keep.
#[derive(Debug)]
pub(super) struct Inner {
    pub(super) driver: Driver,
    pub(super) api: PoolApi,
    pub(super) handle: PoolHandle,
    pub(super) props: PoolProps,
    pub(super) overcommit: bool,
    /// Work in flight that relies on the pool's grants.
    pub(super) uses: Arc<GrantUses>,
    /// For the entries of its allocations.
    pub(super) grants: Grants,
    pub(super) label: Option<Label>,
    /// How often the driver is to destroy it: it counts the imports of another process's pool, and has one handle for all.
    pub(super) owned: AtomicU32,
}

impl Drop for Inner {
    fn drop(&mut self) {
        for _ in 0..*self.owned.get_mut() {
            give_back_or_log(&self.driver, "a memory pool", || {
                // SAFETY: owned by `self`, this often; the driver keeps memory that allocations in flight still need.
                unsafe { self.driver.pools(self.api)?.pool_destroy(self.handle) }
            });
        }
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
    /// Returns the calls of the pool's API, which was available when the pool was created.
    pub(super) fn calls(&self) -> Result<&dyn PoolCalls> {
        self.0.driver.pools(self.0.api)
    }

    /// Returns the bytes that the pool holds and that are not allocated.
    pub(super) fn idle(&self) -> u64 {
        match (
            self.get(PoolAttribute::ReservedCurrent),
            self.get(PoolAttribute::UsedCurrent),
        ) {
            (Ok(reserved), Ok(used)) => reserved.saturating_sub(used),
            _ => 0,
        }
    }

    /// Changes the access of GPUs to all of the pool's memory, present and future.
    ///
    /// Source: `cuMemPoolSetAccess`. The owner's own access cannot be revoked.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], or the driver's;
    /// [`Error::InvalidArgument`] for read-only access, which pools do not
    /// support, and for the CPU's access to a host pool, which stays;
    /// [`Error::StillHeld`] for access that is revoked while a copy, a fill or a
    /// [ticket](crate::stream::Transfer) for one uses the memory.
    pub fn set_access(&self, access: &[AccessDesc]) -> Result<()> {
        for AccessDesc { location, access } in access {
            refuse! { |why| Error::invalid("access", why);
                *access == Access::Read => "a pool cannot be granted to {location} read-only";
                location.is_host() && *access == Access::None => "{location} keeps its access to a host pool";
            }
        }
        if access.is_empty() {
            return Ok(());
        }
        let Inner { driver, handle, .. } = &*self.0;
        driver.expect_this_process("memory pool")?;
        let calls = self.calls()?;
        self.0.uses.change(access, || {
            // SAFETY: `self` keeps the pool; the CPU's access is never revoked, as just checked, so views stay valid; work of
            // safe calls counts among the uses.
            unsafe { calls.pool_set_access(*handle, access) }
                .map_err(|error| explain_access(driver, error, self.props().location, access))?;
            self.0.grants.set_shared(access);
            Ok(())
        })
    }

    /// Returns the access of `location` to the pool's memory.
    ///
    /// Source: `cuMemPoolGetAccess`.
    ///
    /// # Errors
    /// The driver's errors, and [`Error::InvalidArgument`] for flags that this
    /// crate does not know.
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        // SAFETY: `self` keeps the pool.
        let flags = unsafe {
            self.calls()?
                .pool_get_access(self.0.handle, location.into())?
        };
        Access::from_flags(flags)
            .ok_or_else(|| Error::invalid_of("access flags", format!("{flags:#x}"), "0, 1 or 3"))
    }

    /// Gives free memory back to the system until `keep` bytes are held, or no more is free.
    ///
    /// Source: `cuMemPoolTrimTo`.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn trim_to(&self, keep: u64) -> Result<()> {
        run_due(&self.0.driver);
        // SAFETY: `self` keeps the handle alive.
        unsafe { self.calls()?.pool_trim_to(self.0.handle, keep) }
    }

    /// Sets how many bytes the pool keeps at a synchronisation. See
    /// [`PoolOptions::release_threshold`](PoolOptions::release_threshold).
    ///
    /// # Errors
    /// The driver's errors.
    pub fn set_release_threshold(&self, bytes: u64) -> Result<()> {
        self.set(PoolAttribute::ReleaseThreshold, bytes)
    }

    /// Returns the bytes that the pool holds and has allocated.
    ///
    /// # Errors
    /// The driver's errors.
    pub fn stats(&self) -> Result<PoolStats> {
        run_due(&self.0.driver);
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
        unsafe { self.calls()?.pool_get_attribute(self.0.handle, attribute) }
    }

    pub(super) fn set(&self, attribute: PoolAttribute, value: u64) -> Result<()> {
        let calls = self.calls()?;
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
        run_due(&self.0.driver);
        let mut inner = match Arc::try_unwrap(self.0) {
            Ok(inner) => inner,
            Err(shared) => return Ok(Err(Self(shared))),
        };
        *inner.owned.get_mut() = 0;
        let Inner {
            driver,
            api,
            handle,
            ..
        } = &inner;
        // SAFETY: this is the last reference; allocations hold one each.
        give_back(driver, "a memory pool", || unsafe {
            driver.pools(*api)?.pool_destroy(*handle)
        })
        .map(Ok)
    }
}

/// The devices whose current pool belongs to a guard, each with its driver's address. The lock is held over
/// every change and every allocation from the current pool, so that an allocation cannot come from another
/// pool.
fn current() -> MutexGuard<'static, Vec<(usize, i32)>> {
    static CURRENT: PerProcess<Mutex<Vec<(usize, i32)>>> = PerProcess::new();
    lock(CURRENT.get(|_| Mutex::default()))
}

/// While it lives, the pool is the device's current one, for the whole process.
///
/// A device has one guard at a time: with two, the earlier pool could become current again after it was
/// destroyed.
#[derive(Debug)]
#[must_use = "dropped, it makes the earlier pool current again"]
pub struct DevicePoolGuard {
    pool: Pool,
    device: i32,
    previous: PoolHandle,
}

impl Pool {
    /// Makes this pool the current one of GPU `device`, until the guard is dropped.
    ///
    /// Source: `cuDeviceSetMemPool`, `cudaDeviceSetMemPool`.
    ///
    /// # Errors
    /// [`Error::PlatformUnsupported`] if a host pool cannot be a device's pool, as on x86 machines with CUDA
    /// 13.0: allocate from the pool itself there. [`Error::InvalidArgument`] while another guard lives for
    /// the device; [`Error::NoSuchGpu`].
    pub fn make_current(&self, device: i32) -> Result<DevicePoolGuard> {
        self.driver().expect_this_process("memory pool")?;
        let calls = self.calls()?;
        let mut current = current();
        let key = (self.driver().address(), device);
        if current.contains(&key) {
            let why =
                format!("GPU {device} has a current pool by another guard: drop that one first");
            return Err(Error::invalid("device", why));
        }
        let previous = on_gpu(self.driver(), device, calls.device_pool(device))?;
        // SAFETY: the guard holds the pool while it is current.
        unsafe { calls.device_set_pool(device, self.handle()) }.map_err(|error| match error {
            Error::Driver(source)
                if self.props().location.is_host()
                    && matches!(source.code, Code::INVALID_VALUE | Code::NOT_SUPPORTED) =>
            {
                let what =
                    "a host memory pool as a device's current pool; allocate from the pool itself";
                Error::unsupported(what, Some(source))
            }
            other => other,
        })?;
        current.push(key);
        Ok(DevicePoolGuard {
            pool: self.clone(),
            device,
            previous,
        })
    }
}

impl DevicePoolGuard {
    /// Allocates `bytes` from the device's current pool.
    ///
    /// Source: `cuMemAllocAsync`, `cudaMallocAsync`.
    ///
    /// # Errors
    /// As [`Pool::allocate`]; [`Error::InvalidArgument`] for a stream of another GPU, or if code outside this
    /// crate has made another pool current meanwhile.
    #[track_caller]
    pub fn allocate(&self, bytes: u64, stream: &Stream) -> Result<PoolBuffer> {
        if stream.device() != self.device || bytes == 0 {
            let why = format!("{bytes} bytes on a stream of GPU {}", stream.device());
            return Err(Error::invalid("allocation", why));
        }
        self.pool.allocate_by(bytes, stream, |calls| {
            let _unchanged = current();
            if calls.device_pool(self.device)? != self.pool.handle() {
                let why = format!("it is no longer the current one of GPU {}", self.device);
                return Err(Error::invalid("pool", why));
            }
            // SAFETY: `stream` keeps its handle alive.
            unsafe { calls.alloc_async(bytes, stream.handle()) }
        })
    }
}

impl Drop for DevicePoolGuard {
    fn drop(&mut self) {
        if !self.pool.driver().is_of_this_process() {
            return;
        }
        let key = (self.pool.driver().address(), self.device);
        let mut current = current();
        current.retain(|&other| other != key);
        give_back_or_log(self.pool.driver(), "a device's current pool", || {
            // SAFETY: the earlier pool was current before and did not belong to a guard, so it is the
            // device's default one, or code outside this crate keeps it alive.
            unsafe {
                self.pool
                    .calls()?
                    .device_set_pool(self.device, self.previous)
            }
        });
    }
}
