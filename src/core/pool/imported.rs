//! Pools of other processes, and their allocations.

mod buffer;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};

use super::handle::Inner;
use super::{Pool, PoolBuffer};
use crate::driver::{
    Access, AccessDesc, Driver, HandleType, HandleTypes, Location, PoolApi, PoolHandle, PoolProps,
    PoolPtrExport, ShareableHandle,
};
use crate::memory::Memory;
use crate::per_driver::lock;
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
            self.driver()
                .driver_pools()
                .pool_export(self.handle(), handle_type)
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
pub struct ImportedPool(Pool);

/// The imported pools of this process, by driver and handle. All imports of a pool share its grants, and so
/// the count of their uses.
fn imported() -> MutexGuard<'static, HashMap<(usize, PoolHandle), Weak<Inner>>> {
    type All = Mutex<HashMap<(usize, PoolHandle), Weak<Inner>>>;
    static IMPORTED: LazyLock<All> = LazyLock::new(Mutex::default);
    lock(&IMPORTED)
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
        driver.expect_this_process("driver")?;
        let mut all = imported();
        let handle = driver.driver_pools().pool_import(handle)?;
        all.retain(|_, pool| pool.strong_count() > 0);
        let key = (driver.address(), handle);
        if let Some(pool) = all.get(&key).and_then(Weak::upgrade) {
            // Its grants and its location stay as they are.
            pool.owned.fetch_add(1, Relaxed);
            return Ok(Self(Pool(pool)));
        }
        let pool = Pool(Arc::new(Inner {
            driver: driver.clone(),
            api: PoolApi::Driver,
            handle,
            props: PoolProps {
                location,
                handle_types: HandleTypes::NONE,
                max_size: 0,
            },
            overcommit: true,
            uses: Arc::default(),
            grants: Arc::default(),
            label: None,
            owned: 1.into(),
        }));
        let access: Vec<AccessDesc> = (0..driver.device_count()?)
            .map(Location::Device)
            .filter(|&gpu| location.is_host() || gpu == location)
            .map(AccessDesc::read_write)
            .collect();
        pool.set_access(&access)?;
        all.insert(key, Arc::downgrade(&pool.0));
        Ok(Self(pool))
    }

    /// Changes the access of GPUs to all of the pool's memory, in this process.
    ///
    /// Source: `cuMemPoolSetAccess`.
    ///
    /// # Errors
    /// As [`Pool::set_access`].
    pub fn set_access(&self, access: &[AccessDesc]) -> Result<()> {
        self.0.set_access(access)
    }

    /// Returns the access of `location` to the pool's memory.
    ///
    /// Source: `cuMemPoolGetAccess`.
    ///
    /// # Errors
    /// The driver's errors, and [`Error::InvalidArgument`] for flags that this crate does not know.
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        self.0.access(location)
    }

    /// Returns the location of the pool's memory, as its exporter claims.
    pub fn location(&self) -> Location {
        self.0.props().location
    }

    /// Returns the pool's driver.
    pub fn driver(&self) -> &Driver {
        self.0.driver()
    }
}
