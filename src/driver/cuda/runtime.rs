//! The pool calls of the CUDA runtime API, through libcudart, loaded at run time.
//!
//! The runtime uses the current context, so each call makes a device's primary context current; without one,
//! the runtime would make device 0's current permanently.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

use super::abi::{MemAccessDesc, MemLocation, MemPoolProps, Opaque64, descs};
use super::core::{Core, methods};
use super::handles::{export, import, opaque};
use super::library::{Library, functions};
use super::pools::{AttributeValue, device_for, pool_calls_of};
use super::symbols::Opaque;
use crate::*;
use crate::{Error, Result};

functions! {
    /// libcudart. Structs, flags and attribute numbers are those of the driver API.
    RuntimeApi;

    get_last_error = RtGetLastError since 2020 ();
    runtime_get_version = RtRuntimeGetVersion since 2020 (version: *mut i32);
    pool_create = RtMemPoolCreate since 11020 (pool: *mut Opaque, props: *const MemPoolProps);
    pool_destroy = RtMemPoolDestroy since 11020 (pool: Opaque);
    pool_set_attribute = RtMemPoolSetAttribute since 11020
        (pool: Opaque, attribute: i32, value: *mut c_void);
    pool_get_attribute = RtMemPoolGetAttribute since 11020
        (pool: Opaque, attribute: i32, value: *mut c_void);
    pool_trim_to = RtMemPoolTrimTo since 11020 (pool: Opaque, keep: usize);
    pool_set_access = RtMemPoolSetAccess since 11020
        (pool: Opaque, desc: *const MemAccessDesc, count: usize);
    pool_get_access = RtMemPoolGetAccess since 11020
        (flags: *mut u32, pool: Opaque, location: *mut MemLocation);
    pool_export = RtMemPoolExportToShareableHandle since 11020
        (shareable: *mut c_void, pool: Opaque, kind: u32, flags: u32);
    pool_import = RtMemPoolImportFromShareableHandle since 11020
        (pool: *mut Opaque, shareable: *mut c_void, kind: u32, flags: u32);
    pool_export_pointer = RtMemPoolExportPointer since 11020
        (data: *mut Opaque64, ptr: *mut c_void);
    pool_import_pointer = RtMemPoolImportPointer since 11020
        (ptr: *mut *mut c_void, pool: Opaque, data: *mut Opaque64);
    alloc_from_pool_async = RtMallocFromPoolAsync since 11020
        (ptr: *mut *mut c_void, size: usize, pool: Opaque, stream: Opaque);
    alloc_async = RtMallocAsync since 11020 (ptr: *mut *mut c_void, size: usize, stream: Opaque);
    free_async = RtFreeAsync since 11020 (ptr: *mut c_void, stream: Opaque);
    device_get_default_pool = RtDeviceGetDefaultMemPool since 11020
        (pool: *mut Opaque, device: i32);
    device_get_pool = RtDeviceGetMemPool since 11020 (pool: *mut Opaque, device: i32);
    device_set_pool = RtDeviceSetMemPool since 11020 (device: i32, pool: Opaque);
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
    fn at<T>(&self, device: i32, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let work = || work().inspect_err(|error| self.forget(error));
        self.core
            .on(device, work)
            .map_err(|error| self.explain(error))
    }

    /// Clears the runtime's last error of this thread after a call of this crate was refused. The caller knows the error, and
    /// other code that asks the runtime for its own would get this one. After a success the last error may be other code's.
    fn forget(&self, error: &Error) {
        if error.driver_error().is_some() {
            // SAFETY: the call takes nothing. Its result is the error that it clears.
            let _cleared = unsafe { self.api.get_last_error() };
        }
    }

    /// Returns the device's number, which is its ordinal in this API.
    fn device(&self, ordinal: i32) -> Result<i32> {
        Ok(ordinal)
    }

    fn age(&self, error: Error, location: Location, handle_types: HandleTypes) -> Error {
        self.core.age(error, location, handle_types)
    }

    /// Runs `work` on a stream's device.
    fn on<T>(&self, device: i32, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.at(device, work)
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

pool_calls_of!(Runtime, "runtime", RtMemPoolExportToShareableHandle);

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
                symbols.iter().all(|symbol| *symbol == call.name()),
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
