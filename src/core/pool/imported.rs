//! Pools of other processes, and their allocations.

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::buffer::Allocation;
use super::{Inner, Pool, PoolBuffer};
use crate::driver::{
    self, Access, AccessDesc, Code, DevicePtr, Driver, HandleType, HandleTypes, Location,
    PointerAttribute, PoolApi, PoolProps, PoolPtrExport, ShareableHandle,
};
use crate::fork::PerProcess;
use crate::ledger::{AccessList, AllocPath, Grants, Imported as From, Party, Site};
use crate::memory::{CpuView, Memory, impl_cpu_memory, memory_through};
use crate::per_driver::lock;
use crate::stream::Stream;
use crate::stream::{after_captures, run_due};
use crate::teardown::{give_back, log_lost};
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

/// The imported pools of this process. All imports of a pool share its grants, and so the count of their uses.
fn imported() -> MutexGuard<'static, Vec<Weak<Inner>>> {
    static IMPORTED: PerProcess<Mutex<Vec<Weak<Inner>>>> = PerProcess::new();
    lock(IMPORTED.get(|_| Mutex::default()))
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
        all.retain(|pool| pool.strong_count() > 0);
        let is_it =
            |pool: &Arc<Inner>| pool.handle == handle && pool.driver.address() == driver.address();
        if let Some(pool) = all.iter().filter_map(Weak::upgrade).find(is_it) {
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
            grants: Grants::of_pool(AccessList::new()),
            label: None,
            owned: 1.into(),
        }));
        let access: Vec<AccessDesc> = (0..driver.device_count()?)
            .map(Location::Device)
            .filter(|&gpu| location.is_host() || gpu == location)
            .map(AccessDesc::read_write)
            .collect();
        pool.set_access(&access)?;
        all.push(Arc::downgrade(&pool.0));
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

/// `CU_MEMORYTYPE_HOST`
const HOST_MEMORY: u64 = 1;

const WHAT: &str = "another process's pool memory";

impl ImportedPool {
    /// Returns whether the driver says that the CPU reaches the pool's memory.
    fn cpu_reaches(&self, start: DevicePtr) -> bool {
        let attribute = |attribute| self.driver().pointer_attribute(start, attribute);
        let has_address = attribute(PointerAttribute::HostPointer).is_ok_and(|at| at == start.0);
        // For drivers that know no host pointers of imported memory.
        has_address
            || (attribute(PointerAttribute::MemoryType).is_ok_and(|kind| kind == HOST_MEMORY)
                && self.location().is_host()
                && self.access(self.location()) == Ok(Access::ReadWrite))
    }

    /// Imports an allocation of `bytes`, to be freed on `stream`. The exporter keeps it while `tether` is
    /// open.
    ///
    /// Source: `cuMemPoolImportPointer`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream, and for an allocation that this process has imported and not freed; the driver's INVALID_VALUE for data that is not an allocation of the
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
        let driver = self.driver();
        driver.expect_same(stream.driver(), "stream")?;
        run_due(driver);
        let start = self.import_once(pointer)?;
        let (path, range, site) = (AllocPath::ImportedPool, (start, bytes), Site::here());
        // Owned from here on, so that a failing step releases it.
        let memory = Allocation::new(&self.0, path, range, stream, site);
        let mut buffer = ImportedPoolBuffer {
            memory: Arc::new(memory),
            cpu: false,
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
            self.0.0.grants.set_shared(&[host]);
        }
        Ok(buffer)
    }

    /// Imports an allocation that this process does not have, and notes that it has it now.
    fn import_once(&self, pointer: &PoolPtrExport) -> Result<DevicePtr> {
        self.driver().expect_this_process("memory pool")?;
        let mut live = live();
        // SAFETY: `self` keeps the handle alive; the driver checks the 64 bytes.
        let start = unsafe {
            self.0
                .calls()?
                .pool_import_pointer(self.0.handle(), pointer)
        };
        let again = || {
            let why = "it is imported in this process already, and not freed yet: use the buffer \
                       that was received first, or free it before the next one is received";
            Error::invalid("pool allocation", why)
        };
        let start = start.map_err(|error| match error.code() {
            Some(Code::ALREADY_MAPPED) => again(),
            _ => error,
        })?;
        let key = (self.driver().address(), start);
        if live.contains(&key) {
            // The driver returned the same address again: a free by one of two owners would free it for
            // the other as well.
            return Err(again());
        }
        live.push(key);
        Ok(start)
    }
}

/// The imported allocations of this process, by driver and address: a peer that sends one twice must not
/// create two owners.
fn live() -> MutexGuard<'static, Vec<(usize, DevicePtr)>> {
    static LIVE: PerProcess<Mutex<Vec<(usize, DevicePtr)>>> = PerProcess::new();
    lock(LIVE.get(|_| Mutex::default()))
}

/// An allocation of another process's pool.
///
/// Dropping it frees it on its stream, after the work there, and tells the exporter once that is done; so the
/// drop waits for the stream. Work on other streams must have finished before. While the stream is being captured into a
/// CUDA graph, the free waits for the end of the capture, as that of a [`PoolBuffer`](crate::PoolBuffer) does.
#[derive(Debug)]
pub struct ImportedPoolBuffer {
    memory: Arc<Allocation>,
    /// Whether the CPU reaches it.
    cpu: bool,
    /// Closing it tells the exporter that this process has freed the memory.
    tether: Option<OwnedFd>,
}

impl ImportedPoolBuffer {
    /// Returns the CPU's view of the bytes, after the work on the stream.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] if the CPU cannot reach the memory; [`Error::InvalidArgument`] while the stream is being
    /// captured into a graph; the error of earlier work on the stream.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        if !self.cpu {
            let (have, need) = (Access::None, Access::ReadWrite);
            return Err(Error::not_accessible(Location::Host, have, need));
        }
        self.stream().expect_no_capture()?;
        self.stream().synchronize()?;
        // SAFETY: mapped for the CPU, and at least `len` bytes, as the driver reported at the import; until
        // `self` is freed. Pools allocate in units larger than a word, and their only access is reading and
        // writing. Safe code reaches it through atomic views only.
        Ok(unsafe { CpuView::new(self.memory.start, self.memory.len, true) })
    }

    /// Returns the pool that it belongs to.
    pub fn pool(&self) -> ImportedPool {
        ImportedPool(self.memory.pool.clone())
    }

    /// Returns the stream that it will be freed on.
    pub fn stream(&self) -> &Stream {
        &self.memory.stream
    }

    /// Notes in the [ledger](crate::ledger) which process lends it.
    pub fn imported_from(&self, from: Party) {
        let from = From {
            from: Some(from),
            identity: None,
        };
        self.memory.entry.imported(from, None, Site::here());
    }

    /// Frees the allocation.
    ///
    /// Source: `cuMemFreeAsync`, then `cuStreamSynchronize`.
    ///
    /// # Errors
    /// The driver's errors: the exporter then keeps the memory until this process ends.
    pub fn free(mut self) -> Result<()> {
        self.memory.pool.driver().expect_this_process(WHAT)?;
        self.free_once()
    }

    fn free_once(&mut self) -> Result<()> {
        let Some(tether) = self.tether.take() else {
            return Ok(());
        };
        free(Arc::clone(&self.memory), tether)
    }
}

/// Frees imported memory once its stream is not being captured.
fn free(memory: Arc<Allocation>, tether: OwnedFd) -> Result<()> {
    if memory.stream.may_be_captured() {
        let streams = vec![memory.stream.clone()];
        after_captures(streams, move || log_lost(WHAT, free(memory, tether)));
        return Ok(());
    }
    let driver = memory.pool.driver();
    run_due(driver);
    let _relaxed = driver::Relaxed::new(driver);
    let freed = {
        // Until the memory is freed no other value owns it.
        let mut live = live();
        let freed = memory.give_back(&memory.stream);
        if freed.is_ok() {
            let own = (driver.address(), memory.start);
            live.retain(|other| *other != own);
        }
        freed
    }
    .and_then(|()| give_back(driver, "a stream", || memory.stream.synchronize()));
    if freed.is_err() {
        // It may still be in use, so the exporter must not hear that it was freed.
        std::mem::forget(tether);
    }
    freed
}

impl_cpu_memory!(ImportedPoolBuffer);

memory_through!(unsafe impl for ImportedPoolBuffer, |this| *this.memory);

impl Drop for ImportedPoolBuffer {
    fn drop(&mut self) {
        // A forked child frees nothing. The pipe stays open in its parent.
        if self.memory.pool.driver().is_of_this_process() {
            log_lost(WHAT, self.free_once());
        }
    }
}
