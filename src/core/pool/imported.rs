//! Pools of other processes, and their allocations.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::panic::Location as Caller;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Weak};

use super::access::Granting;
use super::{Pool, PoolBuffer};
use crate::driver::{
    Access, AccessDesc, Code, DevicePtr, Driver, HandleType, Location, PointerAttribute, PoolApi,
    PoolCalls, PoolHandle, PoolPtrExport, ShareableHandle,
};
use crate::ledger::{AllocPath, Entry, Grants, Imported as From, NewEntry, Party};
use crate::memory::{AccessChecks, CpuView, Engine, GrantUse, GrantUses, Memory, impl_cpu_memory};
use crate::per_driver::lock;
use crate::stream::Stream;
use crate::teardown::{give_back, give_back_or_log, log_lost};
use crate::{Error, Result};

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
            return Err(Error::invalid(
                "handle type",
                format!(
                    "the pool was created with handle types {}, not {handle_type}",
                    self.0.props.handle_types
                ),
            ));
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
    /// Returns what an importer of the pool needs to import this allocation, which has happened then.
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
        self.stream().synchronize()?;
        let driver = self.driver();
        driver.driver_pools().pool_export_pointer(self.device_ptr())
    }
}

/// `CU_MEMORYTYPE_HOST`
const HOST_MEMORY: u64 = 1;

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
            .map(|gpu| AccessDesc::new(gpu, Access::ReadWrite))
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

    /// Changes what GPUs may do with all of the pool's memory, in this process.
    ///
    /// Source: `cuMemPoolSetAccess`.
    ///
    /// # Errors
    /// As [`Pool::set_access`].
    pub fn set_access(&self, access: &[AccessDesc]) -> Result<()> {
        self.0.granting().set(access)
    }

    /// Returns what `location` may do with the pool's memory.
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

    /// Returns whether the driver says that the CPU reaches the pool's memory.
    fn cpu_reaches(&self, start: DevicePtr) -> bool {
        let attribute = |attribute| self.0.driver.pointer_attribute(start, attribute);
        let has_address = attribute(PointerAttribute::HostPointer).is_ok_and(|at| at == start.0);
        // For drivers that know no host pointers of imported memory.
        has_address
            || (attribute(PointerAttribute::MemoryType).is_ok_and(|kind| kind == HOST_MEMORY)
                && self.0.location.is_host()
                && self.access(self.0.location) == Ok(Access::ReadWrite))
    }

    /// Imports an allocation of `bytes`, to be freed on `stream`. The exporter keeps it while `tether` is
    /// open.
    ///
    /// Source: `cuMemPoolImportPointer`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream, an impossible size, and an allocation that this
    /// process has imported and not freed; the driver's INVALID_VALUE for data that is not an allocation of the
    /// pool.
    ///
    /// # Safety
    /// Until the other end of `tether` is closed, the exporter does not free the allocation.
    #[track_caller]
    pub unsafe fn import_pointer(
        &self,
        pointer: &PoolPtrExport,
        bytes: u64,
        stream: &Stream,
        tether: OwnedFd,
    ) -> Result<ImportedPoolBuffer> {
        let driver = &self.0.driver;
        driver.expect_same(stream.driver(), "stream")?;
        let start = {
            let mut live = live();
            // SAFETY: `self` keeps the handle alive; the driver checks the 64 bytes.
            let start = unsafe { self.0.calls()?.pool_import_pointer(self.0.handle, pointer) };
            let again = || {
                let why = "it is imported in this process already, and not freed yet: use the buffer \
                           that was received first, or free it before the next one is received";
                Error::invalid("pool allocation", why)
            };
            let start = start.map_err(|error| match error.code() {
                Some(Code::ALREADY_MAPPED) => again(),
                _ => error,
            })?;
            if !live.insert((driver.address(), start)) {
                // The driver returned the same address again: a free by one of two owners would free it for
                // the other as well.
                return Err(again());
            }
            start
        };
        let new = NewEntry {
            driver,
            bytes,
            location: self.0.location,
            path: AllocPath::ImportedPool,
            label: None,
            site: Some(Caller::caller()),
        };
        // Owned from here on, so that a failing step releases it.
        let mut buffer = ImportedPoolBuffer {
            entry: Entry::mapped(new, start, Arc::clone(&self.0.grants)),
            pool: Arc::clone(&self.0),
            start,
            len: bytes,
            cpu: false,
            stream: stream.clone(),
            tether: Some(tether),
        };
        // The driver, not the peer, decides its size and whether the CPU reaches it.
        let size = driver
            .mem_address_range(start)
            .map(|(base, size)| match base {
                // The answer for mapped host memory: see docs/driver-behaviour.md.
                DevicePtr(0) => size,
                base => size.saturating_sub(start.0.saturating_sub(base.0)),
            })
            .or_else(|_| driver.pointer_attribute(start, PointerAttribute::RangeSize))?;
        if bytes > size {
            let why = format!("{bytes} bytes in memory of {size}");
            return Err(Error::invalid("size", why));
        }
        buffer.cpu = self.cpu_reaches(start);
        if buffer.cpu {
            let host = AccessDesc::new(Location::Host, Access::ReadWrite);
            self.0.grants.set(&[host]);
        }
        Ok(buffer)
    }
}

/// The imported allocations of this process, by driver and address: a peer that sends one twice must not
/// create two owners.
fn live() -> MutexGuard<'static, HashSet<(usize, DevicePtr)>> {
    static LIVE: LazyLock<Mutex<HashSet<(usize, DevicePtr)>>> = LazyLock::new(Mutex::default);
    lock(&LIVE)
}

/// An allocation of another process's pool.
///
/// Dropping it frees it on its stream, after the work there, and tells the exporter once that is done; so the
/// drop waits for the stream. Work on other streams must have finished before.
#[derive(Debug)]
pub struct ImportedPoolBuffer {
    pool: Arc<Imported>,
    start: DevicePtr,
    len: u64,
    /// Whether the CPU reaches it.
    cpu: bool,
    stream: Stream,
    /// Closing it tells the exporter that this process has freed the memory.
    tether: Option<OwnedFd>,
    entry: Entry,
}

impl ImportedPoolBuffer {
    /// Returns the CPU's view of the bytes, after the work on the stream.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] if the CPU cannot reach the memory, and the error of earlier work on the
    /// stream.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        if !self.cpu {
            return Err(Error::NotAccessible {
                who: Location::Host,
                have: Access::None,
                need: Access::ReadWrite,
            });
        }
        self.stream.synchronize()?;
        // SAFETY: mapped for the CPU, and at least `len` bytes, as the driver reported at the import; until
        // `self` is freed. Pools allocate in units larger than a word, and their only access is reading and
        // writing. Safe code reaches it through atomic views only.
        Ok(unsafe { CpuView::new(self.start, self.len, true) })
    }

    /// Returns the pool that it belongs to.
    pub fn pool(&self) -> ImportedPool {
        ImportedPool(Arc::clone(&self.pool))
    }

    /// Returns the stream that it will be freed on.
    pub const fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Notes in the [ledger](crate::ledger) which process lends it.
    pub fn imported_from(&self, from: Party) {
        let from = From {
            from: Some(from),
            identity: None,
        };
        self.entry.imported(from, None, None);
    }

    /// Frees the allocation.
    ///
    /// Source: `cuMemFreeAsync`, then `cuStreamSynchronize`.
    ///
    /// # Errors
    /// The driver's errors: the exporter then keeps the memory until this process ends.
    pub fn free(mut self) -> Result<()> {
        self.free_once()
    }

    fn free_once(&mut self) -> Result<()> {
        let Some(tether) = self.tether.take() else {
            return Ok(());
        };
        let freed = {
            let mut live = live();
            let mut freed = Ok(());
            self.entry.give_back(&self.pool.driver, || {
                freed = give_back(&self.pool.driver, "a pool's memory", || {
                    // SAFETY: owned by `self`, which is being dropped, and by no other value, as `live` shows;
                    // the free comes after the stream's work.
                    unsafe {
                        self.pool
                            .calls()?
                            .free_async(self.start, self.stream.handle())
                    }
                });
                freed.is_err()
            });
            if freed.is_ok() {
                live.remove(&(self.pool.driver.address(), self.start));
            }
            freed
        }
        .and_then(|()| give_back(&self.pool.driver, "a stream", || self.stream.synchronize()));
        if freed.is_err() {
            // It may still be in use: the exporter must not be told otherwise.
            std::mem::forget(tether);
        }
        freed
    }
}

impl_cpu_memory!(ImportedPoolBuffer);

// SAFETY: the pool's grants answer, and it is freed when this is dropped.
unsafe impl AccessChecks for ImportedPoolBuffer {
    fn gpu_access(&self, gpu: i32, _: Engine, _: u64, _: u64) -> Result<Access> {
        self.pool().access(Location::Device(gpu))
    }

    fn hold_grants(&self) -> Option<GrantUse> {
        Some(self.pool.uses.begin())
    }
}

impl Memory for ImportedPoolBuffer {
    fn driver(&self) -> &Driver {
        &self.pool.driver
    }
    fn device_ptr(&self) -> DevicePtr {
        self.start
    }
    fn len(&self) -> u64 {
        self.len
    }
    fn location(&self) -> Location {
        self.pool.location
    }
}

impl Drop for ImportedPoolBuffer {
    fn drop(&mut self) {
        // A forked child frees nothing. The pipe stays open in its parent.
        if self.pool.driver.is_of_this_process() {
            log_lost("another process's pool memory", self.free_once());
        }
    }
}
