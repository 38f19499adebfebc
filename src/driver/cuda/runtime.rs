//! The pool calls of the CUDA runtime API, through libcudart, loaded at run time.
//!
//! The runtime uses the current context, so each call makes a device's primary context current; without one,
//! the runtime would make device 0's current permanently.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use super::abi::{MemAccessDesc, MemLocation, MemPoolProps, Opaque64};
use super::core::Core;
use super::handles::{export, import, opaque};
use super::library::{Library, functions};
use super::pools::AttributeValue;
use super::symbols::Opaque;
use crate::*;
use crate::{Error, Result};

functions! {
    /// libcudart. Structs, flags and attribute numbers are those of the driver API.
    RuntimeApi;

    runtime_get_version = RtRuntimeGetVersion [c"cudaRuntimeGetVersion"] since 2020
        (version: *mut i32);
    pool_create = RtMemPoolCreate [c"cudaMemPoolCreate"] since 11020
        (pool: *mut Opaque, props: *const MemPoolProps);
    pool_destroy = RtMemPoolDestroy [c"cudaMemPoolDestroy"] since 11020 (pool: Opaque);
    pool_set_attribute = RtMemPoolSetAttribute [c"cudaMemPoolSetAttribute"] since 11020
        (pool: Opaque, attribute: i32, value: *mut c_void);
    pool_get_attribute = RtMemPoolGetAttribute [c"cudaMemPoolGetAttribute"] since 11020
        (pool: Opaque, attribute: i32, value: *mut c_void);
    pool_trim_to = RtMemPoolTrimTo [c"cudaMemPoolTrimTo"] since 11020 (pool: Opaque, keep: usize);
    pool_set_access = RtMemPoolSetAccess [c"cudaMemPoolSetAccess"] since 11020
        (pool: Opaque, desc: *const MemAccessDesc, count: usize);
    pool_get_access = RtMemPoolGetAccess [c"cudaMemPoolGetAccess"] since 11020
        (flags: *mut u32, pool: Opaque, location: *mut MemLocation);
    pool_export = RtMemPoolExportToShareableHandle
        [c"cudaMemPoolExportToShareableHandle"] since 11020
        (shareable: *mut c_void, pool: Opaque, kind: u32, flags: u32);
    pool_import = RtMemPoolImportFromShareableHandle
        [c"cudaMemPoolImportFromShareableHandle"] since 11020
        (pool: *mut Opaque, shareable: *mut c_void, kind: u32, flags: u32);
    pool_export_pointer = RtMemPoolExportPointer [c"cudaMemPoolExportPointer"] since 11020
        (data: *mut Opaque64, ptr: *mut c_void);
    pool_import_pointer = RtMemPoolImportPointer [c"cudaMemPoolImportPointer"] since 11020
        (ptr: *mut *mut c_void, pool: Opaque, data: *mut Opaque64);
    malloc_from_pool_async = RtMallocFromPoolAsync [c"cudaMallocFromPoolAsync"] since 11020
        (ptr: *mut *mut c_void, size: usize, pool: Opaque, stream: Opaque);
    malloc_async = RtMallocAsync [c"cudaMallocAsync"] since 11020
        (ptr: *mut *mut c_void, size: usize, stream: Opaque);
    free_async = RtFreeAsync [c"cudaFreeAsync"] since 11020 (ptr: *mut c_void, stream: Opaque);
    device_get_default_pool = RtDeviceGetDefaultMemPool
        [c"cudaDeviceGetDefaultMemPool"] since 11020 (pool: *mut Opaque, device: i32);
    device_get_pool = RtDeviceGetMemPool [c"cudaDeviceGetMemPool"] since 11020
        (pool: *mut Opaque, device: i32);
    device_set_pool = RtDeviceSetMemPool [c"cudaDeviceSetMemPool"] since 11020
        (device: i32, pool: Opaque);
}

impl RuntimeApi {
    fn learn_version(&mut self) -> Result<CudaVersion> {
        let mut version = 0;
        // SAFETY: `version` is a live integer.
        unsafe { self.runtime_get_version(&mut version)? };
        self.version = Some(CudaVersion(version));
        Ok(CudaVersion(version))
    }
}

/// The runtime API on top of the driver's contexts.
#[derive(Debug)]
pub(super) struct Runtime {
    core: Arc<Core>,
    api: RuntimeApi,
    version: CudaVersion,
}

impl Runtime {
    /// Loads the newest runtime library that the driver can serve.
    pub(super) fn open(core: &Arc<Core>) -> Result<Self> {
        let driver = core.api.version();
        let mut refused = Vec::new();
        for (name, path) in candidates(driver) {
            let library = match Library::open(&path, name) {
                Ok(library) => library,
                Err(words) => {
                    refused.push(words);
                    continue;
                }
            };
            let mut api = RuntimeApi::new(library);
            let version = api.learn_version()?;
            // Within a major version an older driver supports a newer runtime.
            if version.parts().0 > driver.parts().0 {
                return Err(too_new(driver, version));
            }
            return Ok(Self {
                core: core.clone(),
                api,
                version,
            });
        }
        // For the bare names the loader has searched its own folders; the remaining messages only add noise.
        refused.truncate(NAMES.len());
        Err(Error::MissingLibrary {
            library: "libcudart.so",
            detail: refused.join("; "),
        })
    }

    /// Runs `work` with the primary context of `device` current.
    fn on<T>(&self, device: i32, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.core
            .on(device, work)
            .map_err(|error| self.explain(error))
    }

    fn on_stream<T>(
        &self,
        stream: StreamHandle,
        work: impl FnOnce(Opaque) -> Result<T>,
    ) -> Result<T> {
        self.on(stream.device, || work(opaque(stream.raw)))
    }

    fn explain(&self, error: Error) -> Error {
        if error.code() == Some(Code::RUNTIME_NEEDS_NEWER_DRIVER) {
            too_new(self.core.api.version(), self.version)
        } else {
            error
        }
    }
}

fn too_new(have: CudaVersion, need: CudaVersion) -> Error {
    Error::DriverTooOld {
        what: "the installed CUDA runtime library",
        have,
        need,
    }
}

const NAMES: [&str; 3] = ["libcudart.so.13", "libcudart.so.12", "libcudart.so"];

/// Iterates over the places to look, best first: a runtime of the driver's own major version in the loader's
/// search path, then in the toolkit's folders, and last a runtime newer than the driver, to name it in the
/// error.
fn candidates(driver: CudaVersion) -> impl Iterator<Item = (&'static str, PathBuf)> {
    let mut names = NAMES;
    if driver.parts().0 < 13 {
        names = ["libcudart.so.12", "libcudart.so", "libcudart.so.13"];
    }
    let folders = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(std::env::var_os)
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from)
        .chain([PathBuf::from("/usr/local/cuda")])
        .map(|folder| folder.join("lib64"))
        .collect::<Vec<_>>();
    std::iter::once(PathBuf::new())
        .chain(folders)
        .flat_map(move |folder| names.map(|name| (name, Path::join(&folder, name))))
}

/// Returns the device whose context serves calls about memory at `location`.
fn device_for(location: Location) -> i32 {
    match location {
        Location::Device(ordinal) => ordinal,
        Location::Host | Location::HostNuma(_) | Location::HostNumaCurrent => 0,
    }
}

// The SAFETY comments below refer to this: pointers are to live values of the types in CUDA's headers. The
// call fills or reads them before it returns and does not keep them. The runtime checks numbers and handles.
// The caller guarantees, by the contract of `PoolCalls`, that nothing uses memory that a call removes.

// SAFETY: each method makes the call that it is named after and reports its result.
unsafe impl PoolCalls for Runtime {
    fn api(&self) -> &'static str {
        "runtime"
    }

    fn pool_create(&self, props: &PoolProps) -> Result<PoolHandle> {
        let device = device_for(props.location);
        let (raw, mut pool) = (MemPoolProps::from(props), ptr::null_mut());
        // SAFETY: as said above.
        self.on(device, || unsafe { self.api.pool_create(&mut pool, &raw) })
            .map_err(|error| self.core.age(error, props.location, props.handle_types))?;
        Ok(PoolHandle(pool as u64))
    }

    unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
        // SAFETY: as said above.
        self.on(0, || unsafe { self.api.pool_destroy(opaque(pool.0)) })
    }

    unsafe fn pool_set_attribute(
        &self,
        pool: PoolHandle,
        attribute: PoolAttribute,
        value: u64,
    ) -> Result<()> {
        let mut value = AttributeValue::new(attribute, value);
        let value = value.as_mut_ptr();
        // SAFETY: as said above; the value is as wide as the attribute.
        self.on(0, || unsafe {
            self.api
                .pool_set_attribute(opaque(pool.0), attribute as i32, value)
        })
    }

    unsafe fn pool_get_attribute(&self, pool: PoolHandle, attribute: PoolAttribute) -> Result<u64> {
        let mut value = AttributeValue::new(attribute, 0);
        let out = value.as_mut_ptr();
        // SAFETY: as said above; the value is as wide as the attribute.
        self.on(0, || unsafe {
            self.api
                .pool_get_attribute(opaque(pool.0), attribute as i32, out)
        })?;
        Ok(value.widened())
    }

    unsafe fn pool_trim_to(&self, pool: PoolHandle, keep: u64) -> Result<()> {
        // SAFETY: as said above.
        self.on(0, || unsafe {
            self.api.pool_trim_to(opaque(pool.0), keep as usize)
        })
    }

    unsafe fn pool_set_access(&self, pool: PoolHandle, access: &[AccessDesc]) -> Result<()> {
        let descs: Vec<MemAccessDesc> = access.iter().map(MemAccessDesc::from).collect();
        // SAFETY: as said above; the count is that of `descs`.
        self.on(0, || unsafe {
            self.api
                .pool_set_access(opaque(pool.0), descs.as_ptr(), descs.len())
        })
    }

    unsafe fn pool_get_access(&self, pool: PoolHandle, location: Location) -> Result<u64> {
        let (mut location, mut flags) = (MemLocation::from(location), 0);
        // SAFETY: as said above.
        self.on(0, || unsafe {
            self.api
                .pool_get_access(&mut flags, opaque(pool.0), &mut location)
        })?;
        Ok(flags.into())
    }

    unsafe fn pool_export(&self, pool: PoolHandle, kind: HandleType) -> Result<ShareableHandle> {
        export(Call::RtMemPoolExportToShareableHandle, kind, |out, bits| {
            // SAFETY: `out` is to an int or to 64 bytes, as `bits` says; the flags must be 0.
            self.on(0, || unsafe {
                self.api.pool_export(out, opaque(pool.0), bits, 0)
            })
        })
    }

    fn pool_import(&self, handle: &ShareableHandle) -> Result<PoolHandle> {
        let mut pool: Opaque = ptr::null_mut();
        import(handle, |os_handle, bits| {
            // SAFETY: `os_handle` is an open fd's number or to 64 bytes, as `bits` says; the flags
            // must be 0.
            self.on(0, || unsafe {
                self.api.pool_import(&mut pool, os_handle, bits, 0)
            })
        })?;
        Ok(PoolHandle(pool as u64))
    }

    fn pool_export_pointer(&self, ptr: DevicePtr) -> Result<PoolPtrExport> {
        let mut data: Opaque64 = [0; 64];
        // SAFETY: as said above; the runtime looks the address up and does not follow it.
        self.on(0, || unsafe {
            self.api.pool_export_pointer(&mut data, opaque(ptr.0))
        })?;
        Ok(PoolPtrExport(data))
    }

    unsafe fn pool_import_pointer(
        &self,
        pool: PoolHandle,
        export: &PoolPtrExport,
    ) -> Result<DevicePtr> {
        let (mut data, mut ptr) = (export.0, ptr::null_mut());
        // SAFETY: as said above.
        self.on(0, || unsafe {
            self.api
                .pool_import_pointer(&mut ptr, opaque(pool.0), &mut data)
        })?;
        Ok(DevicePtr(ptr as u64))
    }

    unsafe fn alloc_from_pool_async(
        &self,
        pool: PoolHandle,
        size: u64,
        stream: StreamHandle,
    ) -> Result<DevicePtr> {
        let mut ptr = ptr::null_mut();
        // SAFETY: as said above; the stream lives.
        self.on_stream(stream, |raw| unsafe {
            self.api
                .malloc_from_pool_async(&mut ptr, size as usize, opaque(pool.0), raw)
        })?;
        Ok(DevicePtr(ptr as u64))
    }

    unsafe fn alloc_async(&self, size: u64, stream: StreamHandle) -> Result<DevicePtr> {
        let mut ptr = ptr::null_mut();
        // SAFETY: as said above; the stream lives.
        self.on_stream(stream, |raw| unsafe {
            self.api.malloc_async(&mut ptr, size as usize, raw)
        })?;
        Ok(DevicePtr(ptr as u64))
    }

    unsafe fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        // SAFETY: as said above; the stream lives.
        self.on_stream(stream, |raw| unsafe {
            self.api.free_async(opaque(ptr.0), raw)
        })
    }

    fn device_default_pool(&self, device: i32) -> Result<PoolHandle> {
        let mut pool = ptr::null_mut();
        // SAFETY: as said above.
        self.on(device, || unsafe {
            self.api.device_get_default_pool(&mut pool, device)
        })?;
        Ok(PoolHandle(pool as u64))
    }

    fn device_pool(&self, device: i32) -> Result<PoolHandle> {
        let mut pool = ptr::null_mut();
        // SAFETY: as said above.
        self.on(device, || unsafe {
            self.api.device_get_pool(&mut pool, device)
        })?;
        Ok(PoolHandle(pool as u64))
    }

    unsafe fn device_set_pool(&self, device: i32, pool: PoolHandle) -> Result<()> {
        // SAFETY: as said above.
        self.on(device, || unsafe {
            self.api.device_set_pool(device, opaque(pool.0))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bare_names(driver: i32) -> Vec<PathBuf> {
        candidates(CudaVersion(driver))
            .map(|(_, path)| path)
            .take(3)
            .collect()
    }

    #[test]
    fn the_loaders_own_folders_come_first_and_a_runtime_too_new_last() {
        let paths = |names: [&str; 3]| names.map(PathBuf::from).to_vec();
        assert_eq!(bare_names(13000), paths(NAMES));
        assert_eq!(
            bare_names(12080),
            paths(["libcudart.so.12", "libcudart.so", "libcudart.so.13"])
        );
    }

    #[test]
    fn symbols_are_the_calls_names() {
        for (call, symbols, since) in RuntimeApi::TABLE {
            assert!(
                symbols.iter().all(|s| s.to_str() == Ok(call.name())),
                "{call}"
            );
            assert!(
                CudaVersion(*since) <= CudaVersion::OLDEST,
                "{call} since {since}"
            );
        }
    }

    #[test]
    fn the_toolkits_folder_is_tried() {
        let mut paths = candidates(CudaVersion(13000)).map(|(_, path)| path);
        assert!(paths.any(|path| path == Path::new("/usr/local/cuda/lib64/libcudart.so.13")));
    }
}
