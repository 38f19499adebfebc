//! The pool calls of the driver API and of the runtime API.
//!
//! The runtime API is libcudart's, loaded at run time. It uses the current context, so each call makes a device's primary
//! context current; without one, the runtime would make device 0's current permanently.

use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use super::abi::{MemLocation, MemPoolProps, Opaque, descs, export, import, opaque, widened};
use super::core::{Core, Work};
use super::library::{Library, methods};
use super::symbols::PoolFunctions;
use crate::*;

/// The pool calls of one API, on the driver's contexts.
#[derive(Debug)]
pub(super) struct Pools {
    core: Arc<Core>,
    kind: PoolApi,
    api: PoolFunctions,
}

impl Pools {
    /// Returns the pool calls of the driver API.
    pub fn of_driver(core: Arc<Core>) -> Self {
        Self {
            api: core.api.pools(),
            kind: PoolApi::Driver,
            core,
        }
    }

    /// Loads the newest runtime library that the driver can serve.
    pub fn of_runtime(core: &Arc<Core>) -> Result<Self> {
        let driver = core.api.version();
        let (mut refused, mut newer) = (Vec::new(), None);
        for (name, path) in candidates(driver) {
            let library = match Library::open(&path, name) {
                Ok(library) => library,
                Err(words) => {
                    refused.push(words);
                    continue;
                }
            };
            let mut api = PoolFunctions::new(library, PoolApi::Runtime, None);
            let version = match api.learn_version() {
                Ok(version) => version,
                Err(error) => {
                    refused.push(format!("{name}: {error}"));
                    continue;
                }
            };
            // Within a major version an older driver supports a newer runtime.
            if version.parts().0 > driver.parts().0 {
                newer.get_or_insert(version);
                continue;
            }
            return Ok(Self {
                core: Arc::clone(core),
                kind: PoolApi::Runtime,
                api,
            });
        }
        if let Some(newer) = newer {
            return Err(too_new(driver, newer));
        }
        // For the bare names the loader has searched its own folders; the remaining messages only add noise.
        refused.truncate(NAMES.len());
        Err(Error::MissingLibrary {
            library: "libcudart.so",
            detail: refused.join("; "),
        })
    }

    /// Runs a call that may be made in any context.
    fn at(&self, device: i32, work: Work<'_>) -> Result<()> {
        match self.kind {
            PoolApi::Driver => self.core.anywhere(work),
            PoolApi::Runtime => self.on(device, work),
        }
    }

    /// Runs a call that names no device.
    fn anywhere(&self, work: Work<'_>) -> Result<()> {
        match self.kind {
            PoolApi::Driver => self.core.anywhere(work),
            PoolApi::Runtime => {
                let mut work = || work().inspect_err(|error| self.forget(error));
                let done = self.core.on_any(&mut work);
                done.map_err(|error| self.explained(error))
            }
        }
    }

    /// Runs a call with the primary context of `device` current.
    fn on(&self, device: i32, work: Work<'_>) -> Result<()> {
        let mut work = || work().inspect_err(|error| self.forget(error));
        let done = self.core.on(device, &mut work);
        done.map_err(|error| self.explained(error))
    }

    fn explained(&self, error: Error) -> Error {
        match error.code() {
            Some(Code::RUNTIME_NEEDS_NEWER_DRIVER) => {
                too_new(self.core.api.version(), self.api.version())
            }
            _ => error,
        }
    }

    /// Clears the runtime's last error of this thread after a call of this crate was refused. The caller knows the error, and
    /// other code that asks the runtime for its own would get this one. After a success the last error may be other code's.
    fn forget(&self, error: &Error) {
        if self.kind == PoolApi::Runtime && error.driver_error().is_some() {
            // SAFETY: the call takes nothing. Its result is the error that it clears.
            let _cleared = unsafe { self.api.get_last_error() };
        }
    }

    /// Returns the device's number for the API: the runtime's is the ordinal.
    fn device(&self, ordinal: i32) -> Result<i32> {
        match self.kind {
            PoolApi::Driver => self.core.device(ordinal),
            PoolApi::Runtime => Ok(ordinal),
        }
    }

    methods! { |this|
    [fn] create(props: &PoolProps) -> PoolHandle {
        let (raw, mut pool) = (MemPoolProps::from(props), ptr::null_mut());
        let device = if let Location::Device(ordinal) = props.location { ordinal } else { 0 };
        @at(device) pool_create(&mut pool, &raw) => PoolHandle(pool as u64)
    }
    }
}

// SAFETY: each method makes the call that it is named after and reports its result.
unsafe impl PoolCalls for Pools {
    fn api(&self) -> &'static str {
        match self.kind {
            PoolApi::Driver => "driver",
            PoolApi::Runtime => "runtime",
        }
    }

    fn pool_create(&self, props: &PoolProps) -> Result<PoolHandle> {
        let created = self.create(props);
        created.map_err(|error| self.core.age(error, props.location, props.handle_types))
    }

    unsafe fn pool_export(&self, pool: PoolHandle, kind: HandleType) -> Result<ShareableHandle> {
        let by = match self.kind {
            PoolApi::Driver => Call::MemPoolExportToShareableHandle,
            PoolApi::Runtime => Call::RtMemPoolExportToShareableHandle,
        };
        export(by, kind, |out, bits| {
            // SAFETY: `out` is to an int or to 64 bytes, as `bits` says; the flags must be 0.
            self.anywhere(&mut || unsafe { self.api.pool_export(out, opaque(pool.0), bits, 0) })
        })
    }

    fn pool_import(&self, handle: &ShareableHandle) -> Result<PoolHandle> {
        let mut pool: Opaque = ptr::null_mut();
        import(handle, |os_handle, bits| {
            // SAFETY: `os_handle` is an open fd's number or to 64 bytes, as `bits` says; the flags
            // must be 0.
            self.anywhere(&mut || unsafe { self.api.pool_import(&mut pool, os_handle, bits, 0) })
        })?;
        Ok(PoolHandle(pool as u64))
    }

    methods! { |this|
    [unsafe fn] pool_destroy(pool: PoolHandle) -> () {
        @anywhere() pool_destroy(opaque(pool.0)) => ()
    }
    [unsafe fn] pool_set_attribute(pool: PoolHandle, attribute: PoolAttribute, value: u64) -> () {
        let mut value = narrowed(attribute, value);
        @anywhere() pool_set_attribute(opaque(pool.0), attribute as i32, (&raw mut value).cast()) => ()
    }
    [unsafe fn] pool_get_attribute(pool: PoolHandle, attribute: PoolAttribute) -> u64 {
        let mut value = 0_u64; // as wide as the widest attribute
        @anywhere() pool_get_attribute(opaque(pool.0), attribute as i32, (&raw mut value).cast())
            => if attribute.is_int() { widened(value) } else { value }
    }
    [unsafe fn] pool_trim_to(pool: PoolHandle, keep: u64) -> () {
        @anywhere() pool_trim_to(opaque(pool.0), keep as usize) => ()
    }
    [unsafe fn] pool_set_access(pool: PoolHandle, access: &[AccessDesc]) -> () {
        let descs = descs(access);
        @anywhere() pool_set_access(opaque(pool.0), descs.as_ptr(), descs.len()) => ()
    }
    [unsafe fn] pool_get_access(pool: PoolHandle, location: Location) -> u64 {
        let (mut location, mut flags) = (MemLocation::from(location), 0);
        @anywhere() pool_get_access(&mut flags, opaque(pool.0), &mut location) => flags.into()
    }
    [fn] pool_export_pointer(ptr: DevicePtr) -> PoolPtrExport {
        let mut data = [0; 64];
        @anywhere() pool_export_pointer(&mut data, ptr.0) => PoolPtrExport(data)
    }
    [unsafe fn] pool_import_pointer(pool: PoolHandle, export: &PoolPtrExport) -> DevicePtr {
        let (mut data, mut ptr) = (export.0, 0);
        @anywhere() pool_import_pointer(&mut ptr, opaque(pool.0), &mut data) => DevicePtr(ptr)
    }
    [unsafe fn] alloc_from_pool_async(pool: PoolHandle, size: u64, stream: StreamHandle) -> DevicePtr {
        let mut ptr = 0;
        @on(stream.device)
            alloc_from_pool_async(&mut ptr, size as usize, opaque(pool.0), opaque(stream.raw))
            => DevicePtr(ptr)
    }
    [unsafe fn] alloc_async(size: u64, stream: StreamHandle) -> DevicePtr {
        let mut ptr = 0;
        @on(stream.device) alloc_async(&mut ptr, size as usize, opaque(stream.raw))
            => DevicePtr(ptr)
    }
    [unsafe fn] free_async(ptr: DevicePtr, stream: StreamHandle) -> () {
        @on(stream.device) free_async(ptr.0, opaque(stream.raw)) => ()
    }
    [fn] device_default_pool(ordinal: i32) -> PoolHandle {
        let (device, mut pool) = (this.device(ordinal)?, ptr::null_mut());
        @at(ordinal) device_get_default_pool(&mut pool, device) => PoolHandle(pool as u64)
    }
    [fn] device_pool(ordinal: i32) -> PoolHandle {
        let (device, mut pool) = (this.device(ordinal)?, ptr::null_mut());
        @at(ordinal) device_get_pool(&mut pool, device) => PoolHandle(pool as u64)
    }
    [unsafe fn] device_set_pool(ordinal: i32, pool: PoolHandle) -> () {
        let device = this.device(ordinal)?;
        @at(ordinal) device_set_pool(device, opaque(pool.0)) => ()
    }
    }
}

/// Returns the value of a pool's attribute for the driver, which reads 4 bytes of an `int`: the low ones.
fn narrowed(attribute: PoolAttribute, value: u64) -> u64 {
    if attribute.is_int() {
        // A value that does not fit is not 0 or 1; the driver refuses −1 in the same way.
        i32::try_from(value).unwrap_or(-1) as u32 as u64
    } else {
        value
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
/// search path, then in the toolkit's folders. A runtime newer than the driver is passed over, and named in the error if there is no
/// other.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_values_are_as_wide_as_cuda_says() {
        let reuse = PoolAttribute::ReuseAllowOpportunistic;
        let low = |value: u64| {
            value
                .to_ne_bytes()
                .first_chunk()
                .copied()
                .map(i32::from_ne_bytes)
        };
        assert_eq!(low(narrowed(reuse, 1)), Some(1));
        // Truncating a wide value must not turn it into a valid flag.
        let wide = narrowed(reuse, 1 << 32 | 1);
        assert_eq!((low(wide), widened(wide) as i64), (Some(-1), -1));
        assert_eq!(
            narrowed(PoolAttribute::ReleaseThreshold, u64::MAX),
            u64::MAX
        );
    }

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
    fn the_toolkits_folder_is_tried() {
        let mut paths = candidates(CudaVersion(13000)).map(|(_, path)| path);
        assert!(paths.any(|path| path == Path::new("/usr/local/cuda/lib64/libcudart.so.13")));
    }
}
