//! The pool calls of the driver API and of the runtime API.

use std::ffi::c_void;
use std::ptr;

use super::abi::{MemLocation, MemPoolProps, descs};
use super::core::{Core, methods};
use super::handles::{export, import, opaque};
use super::symbols::Opaque;
use crate::Result;
use crate::*;

/// A pool attribute in CUDA's width: `int` or 64 bits.
pub(super) enum AttributeValue {
    Int(i32),
    Wide(u64),
}

impl AttributeValue {
    pub(super) fn new(attribute: PoolAttribute, value: u64) -> Self {
        if attribute.is_int() {
            // A value that does not fit is not 0 or 1; the driver refuses −1 in the same way.
            Self::Int(i32::try_from(value).unwrap_or(-1))
        } else {
            Self::Wide(value)
        }
    }

    pub(super) fn as_mut_ptr(&mut self) -> *mut c_void {
        match self {
            Self::Int(value) => ptr::from_mut(value).cast(),
            Self::Wide(value) => ptr::from_mut(value).cast(),
        }
    }

    pub(super) fn widened(self) -> u64 {
        match self {
            Self::Int(value) => i64::from(value) as u64,
            Self::Wide(value) => value,
        }
    }
}

/// Returns the device whose context serves calls about memory at `location`.
pub(super) fn device_for(location: Location) -> i32 {
    match location {
        Location::Device(ordinal) => ordinal,
        Location::Host | Location::HostNuma(_) | Location::HostNumaCurrent => 0,
    }
}

/// Implements the pool calls of `$type` on the functions of its `api`, in a context by `at` and `on`. An address
/// is an integer for the driver API and a pointer for the runtime API.
macro_rules! pool_calls_of {
    ($type:ty, $name:literal, $export:ident) => {
        impl $type {
            methods! { |this|
            [fn] create_pool(props: &PoolProps) -> PoolHandle {
                let (raw, mut pool) = (MemPoolProps::from(props), ptr::null_mut());
                @at(device_for(props.location)) pool_create(&mut pool, &raw) => PoolHandle(pool as u64)
            }
            }
        }

        // SAFETY: each method makes the call that it is named after and reports its result.
        unsafe impl PoolCalls for $type {
            fn api(&self) -> &'static str {
                $name
            }

            fn pool_create(&self, props: &PoolProps) -> Result<PoolHandle> {
                self.create_pool(props)
                    .map_err(|error| self.age(error, props.location, props.handle_types))
            }

            unsafe fn pool_export(
                &self,
                pool: PoolHandle,
                kind: HandleType,
            ) -> Result<ShareableHandle> {
                export(Call::$export, kind, |out, bits| {
                    // SAFETY: `out` is to an int or to 64 bytes, as `bits` says; the flags must be 0.
                    self.at(0, || unsafe {
                        self.api.pool_export(out, opaque(pool.0), bits, 0)
                    })
                })
            }

            fn pool_import(&self, handle: &ShareableHandle) -> Result<PoolHandle> {
                let mut pool: Opaque = ptr::null_mut();
                import(handle, |os_handle, bits| {
                    // SAFETY: `os_handle` is an open fd's number or to 64 bytes, as `bits` says; the flags
                    // must be 0.
                    self.at(0, || unsafe {
                        self.api.pool_import(&mut pool, os_handle, bits, 0)
                    })
                })?;
                Ok(PoolHandle(pool as u64))
            }

            methods! { |this|
            [unsafe fn] pool_destroy(pool: PoolHandle) -> () {
                @at(0) pool_destroy(opaque(pool.0)) => ()
            }
            [unsafe fn] pool_set_attribute(pool: PoolHandle, attribute: PoolAttribute, value: u64) -> () {
                let mut value = AttributeValue::new(attribute, value); // as wide as the attribute
                @at(0) pool_set_attribute(opaque(pool.0), attribute as i32, value.as_mut_ptr()) => ()
            }
            [unsafe fn] pool_get_attribute(pool: PoolHandle, attribute: PoolAttribute) -> u64 {
                let mut value = AttributeValue::new(attribute, 0); // as wide as the attribute
                @at(0) pool_get_attribute(opaque(pool.0), attribute as i32, value.as_mut_ptr())
                    => value.widened()
            }
            [unsafe fn] pool_trim_to(pool: PoolHandle, keep: u64) -> () {
                @at(0) pool_trim_to(opaque(pool.0), keep as usize) => ()
            }
            [unsafe fn] pool_set_access(pool: PoolHandle, access: &[AccessDesc]) -> () {
                let descs = descs(access);
                @at(0) pool_set_access(opaque(pool.0), descs.as_ptr(), descs.len()) => ()
            }
            [unsafe fn] pool_get_access(pool: PoolHandle, location: Location) -> u64 {
                let (mut location, mut flags) = (MemLocation::from(location), 0);
                @at(0) pool_get_access(&mut flags, opaque(pool.0), &mut location) => flags.into()
            }
            [fn] pool_export_pointer(ptr: DevicePtr) -> PoolPtrExport {
                let mut data = [0; 64];
                @at(0) pool_export_pointer(&mut data, ptr.0 as _) => PoolPtrExport(data)
            }
            [unsafe fn] pool_import_pointer(pool: PoolHandle, export: &PoolPtrExport) -> DevicePtr {
                let (mut data, mut ptr) = (export.0, 0 as _);
                @at(0) pool_import_pointer(&mut ptr, opaque(pool.0), &mut data) => DevicePtr(ptr as u64)
            }
            [unsafe fn] alloc_from_pool_async(pool: PoolHandle, size: u64, stream: StreamHandle) -> DevicePtr {
                let mut ptr = 0 as _;
                @on(stream.device)
                    alloc_from_pool_async(&mut ptr, size as usize, opaque(pool.0), opaque(stream.raw))
                    => DevicePtr(ptr as u64)
            }
            [unsafe fn] alloc_async(size: u64, stream: StreamHandle) -> DevicePtr {
                let mut ptr = 0 as _;
                @on(stream.device) alloc_async(&mut ptr, size as usize, opaque(stream.raw))
                    => DevicePtr(ptr as u64)
            }
            [unsafe fn] free_async(ptr: DevicePtr, stream: StreamHandle) -> () {
                @on(stream.device) free_async(ptr.0 as _, opaque(stream.raw)) => ()
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
    };
}
pub(super) use pool_calls_of;

pool_calls_of!(Core, "driver", MemPoolExportToShareableHandle);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_values_are_as_wide_as_cuda_says() {
        let mut value = AttributeValue::new(PoolAttribute::ReuseAllowOpportunistic, 1);
        // SAFETY: the attribute is an `int`, and `value` lives.
        assert_eq!(unsafe { *value.as_mut_ptr().cast::<i32>() }, 1);
        let mut value = AttributeValue::new(PoolAttribute::ReleaseThreshold, u64::MAX);
        // SAFETY: the attribute has 64 bits, and `value` lives.
        assert_eq!(unsafe { *value.as_mut_ptr().cast::<u64>() }, u64::MAX);
        assert_eq!(value.widened(), u64::MAX);
        // Truncating a wide value must not turn it into a valid flag.
        let value = AttributeValue::new(PoolAttribute::ReuseFollowEventDependencies, 1 << 32 | 1);
        assert_eq!(value.widened() as i64, -1);
    }
}
