//! Pools of other processes, and their allocations.

mod buffer;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};

use super::access::Granting;
use super::{Pool, PoolBuffer};
use crate::driver::{
    Access, AccessDesc, Driver, HandleType, Location, PoolApi, PoolCalls, PoolHandle,
    PoolPtrExport, ShareableHandle,
};
use crate::ledger::Grants;
use crate::memory::{GrantUses, Memory};
use crate::per_driver::lock;
use crate::teardown::give_back_or_log;
use crate::{Error, Result};

pub use buffer::ImportedPoolBuffer;

impl Pool {
    /// Exports the pool: the handle grants access to all of its memory, present and future.
    ///
    /// Source: `cuMemPoolExportToShareableHandle`. A pool that can be exported as fabric is created only if
    /// plain fabric memory works: otherwise drivers corrupt the process's heap.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a pool that was created without this handle type; the driver's errors.
    pub fn export(&self, handle_type: HandleType) -> Result<ShareableHandle> {
        if !self.0.props.handle_types.contains(handle_type.into()) {
            let why = format!(
                "the pool was created with handle types {}, not {handle_type}",
                self.0.props.handle_types
            );
            return Err(Error::invalid("handle type", why));
        }
        // SAFETY: `self` keeps the handle alive. The driver API's call works for pools of both APIs.
        unsafe {
            self.0
                .driver
                .driver_pools()
                .pool_export(self.0.handle, handle_type)
        }
    }
}

impl PoolBuffer {
    /// Waits for the allocation and returns the token by which an importer of the pool imports it.
    ///
    /// Source: `cuMemPoolExportPointer`, which needs the pool to have been exported.
    ///
    /// # Errors
    /// The error of earlier work on its stream, and the driver's.
    ///
    /// # Safety
    /// The allocation is freed only after every importer has freed it: `LentPoolBuffer` of the crate
    /// `egmem-share` sees to that.
    pub unsafe fn export_pointer(&self) -> Result<PoolPtrExport> {
        self.stream().expect_no_capture()?;
        self.stream().synchronize()?;
        let driver = self.driver();
        driver.driver_pools().pool_export_pointer(self.device_ptr())
    }
}

/// Another process's pool. It imports that process's allocations; nothing can be allocated from it.
///
/// `Channel::receive_pool` returns it, with an example. Clones are the same pool; it is released
/// with the last clone and allocation.
#[derive(Clone, Debug)]
pub struct ImportedPool(Arc<Imported>);

#[derive(Debug)]
struct Imported {
    driver: Driver,
    handle: PoolHandle,
    location: Location,
    /// How often the driver has imported it: the driver counts imports, and has one handle for all.
    imports: AtomicU32,
    /// Work in flight that relies on the pool's grants.
    uses: Arc<GrantUses>,
    /// For the entries of its allocations.
    grants: Arc<Grants>,
}

/// The imported pools of this process, by driver and handle. All imports of a pool share its grants, and so
/// the count of their uses.
fn imported() -> MutexGuard<'static, HashMap<(usize, PoolHandle), Weak<Imported>>> {
    type All = Mutex<HashMap<(usize, PoolHandle), Weak<Imported>>>;
    static IMPORTED: LazyLock<All> = LazyLock::new(Mutex::default);
    lock(&IMPORTED)
}

impl Imported {
    /// Imports a pool and grants it to GPUs, or counts one more import of a pool that this process has: its grants and
    /// location stay as they are.
    fn of(driver: &Driver, handle: &ShareableHandle, location: Location) -> Result<Arc<Self>> {
        driver.expect_this_process("driver")?;
        let mut all = imported();
        let handle = driver.driver_pools().pool_import(handle)?;
        all.retain(|_, pool| pool.strong_count() > 0);
        let key = (driver.address(), handle);
        if let Some(pool) = all.get(&key).and_then(Weak::upgrade) {
            pool.imports.fetch_add(1, Relaxed);
            return Ok(pool);
        }
        let pool = Arc::new(Self {
            driver: driver.clone(),
            handle,
            location,
            imports: AtomicU32::new(1),
            uses: Arc::default(),
            grants: Arc::default(),
        });
        pool.grant_at_first()?;
        all.insert(key, Arc::downgrade(&pool));
        Ok(pool)
    }

    /// Grants a pool of the host to every GPU, and a GPU's to that GPU.
    fn grant_at_first(&self) -> Result<()> {
        let access: Vec<AccessDesc> = (0..self.driver.device_count()?)
            .map(Location::Device)
            .filter(|&gpu| self.location.is_host() || gpu == self.location)
            .map(AccessDesc::read_write)
            .collect();
        self.granting().set(&access)
    }

    fn granting(&self) -> Granting<'_> {
        // SAFETY: `self` keeps the pool alive.
        unsafe {
            Granting::new(
                &self.driver,
                PoolApi::Driver,
                self.handle,
                &self.uses,
                &self.grants,
            )
        }
    }

    fn calls(&self) -> Result<&dyn PoolCalls> {
        self.driver.pools(PoolApi::Driver)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        for _ in 0..*self.imports.get_mut() {
            give_back_or_log(&self.driver, "an imported pool", || {
                // SAFETY: owned by `self`, and imported this often; allocations hold a reference, so none is
                // left.
                unsafe { self.calls()?.pool_destroy(self.handle) }
            });
        }
    }
}

impl ImportedPool {
    /// Imports a pool, which lies at `location` according to its exporter. Grants host memory to every GPU,
    /// and a GPU's memory to that GPU.
    ///
    /// Source: `cuMemPoolImportFromShareableHandle`.
    ///
    /// # Errors
    /// The driver's, for example INVALID_VALUE for a handle that is not a pool's.
    pub fn import(driver: &Driver, handle: &ShareableHandle, location: Location) -> Result<Self> {
        Imported::of(driver, handle, location).map(Self)
    }

    /// Changes the access of GPUs to all of the pool's memory, in this process.
    ///
    /// Source: `cuMemPoolSetAccess`.
    ///
    /// # Errors
    /// As [`Pool::set_access`].
    pub fn set_access(&self, access: &[AccessDesc]) -> Result<()> {
        self.0.granting().set(access)
    }

    /// Returns the access of `location` to the pool's memory.
    ///
    /// Source: `cuMemPoolGetAccess`.
    ///
    /// # Errors
    /// The driver's errors, and [`Error::InvalidArgument`] for flags that this crate does not know.
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        self.0.granting().get(location.into())
    }

    /// Returns the location of the pool's memory, as its exporter claims.
    pub fn location(&self) -> Location {
        self.0.location
    }

    /// Returns the pool's driver.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
    }
}
