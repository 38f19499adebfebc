//! The pool calls of the driver API and of the runtime API.

use std::ffi::c_void;
use std::ptr;

use super::abi::{MemAccessDesc, MemLocation, MemPoolProps, Opaque64};
use super::core::Core;
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

// The SAFETY comments below refer to this: pointers are to live values of the types in CUDA's headers. The
// call fills or reads them before it returns and does not keep them. The API checks numbers and handles.
// The caller guarantees, by the contract of `PoolCalls`, that nothing uses memory that a call removes.

/// Implements the pool calls of `$type` on the functions of its `api`. It calls them in a context by `at` and
/// `on_stream`. An address is an integer for the driver API and a pointer for the runtime API.
macro_rules! pool_calls_of {
    ($type:ty, $name:literal, $export:ident) => {
        // SAFETY: each method makes the call that it is named after and reports its result.
        unsafe impl PoolCalls for $type {
            fn api(&self) -> &'static str {
                $name
            }

            fn pool_create(&self, props: &PoolProps) -> Result<PoolHandle> {
                let (raw, mut pool) = (MemPoolProps::from(props), ptr::null_mut());
                // SAFETY: as said above.
                self.at(device_for(props.location), || unsafe {
                    self.api.pool_create(&mut pool, &raw)
                })
                .map_err(|error| self.age(error, props.location, props.handle_types))?;
                Ok(PoolHandle(pool as u64))
            }

            unsafe fn pool_destroy(&self, pool: PoolHandle) -> Result<()> {
                // SAFETY: as said above.
                self.at(0, || unsafe { self.api.pool_destroy(opaque(pool.0)) })
            }

            unsafe fn pool_set_attribute(
                &self,
                pool: PoolHandle,
                attribute: PoolAttribute,
                value: u64,
            ) -> Result<()> {
                let mut value = AttributeValue::new(attribute, value);
                self.at(0, || {
                    let value = value.as_mut_ptr();
                    // SAFETY: as said above; the value is as wide as the attribute.
                    unsafe {
                        self.api
                            .pool_set_attribute(opaque(pool.0), attribute as i32, value)
                    }
                })
            }

            unsafe fn pool_get_attribute(
                &self,
                pool: PoolHandle,
                attribute: PoolAttribute,
            ) -> Result<u64> {
                let mut value = AttributeValue::new(attribute, 0);
                self.at(0, || {
                    let value = value.as_mut_ptr();
                    // SAFETY: as said above; the value is as wide as the attribute.
                    unsafe {
                        self.api
                            .pool_get_attribute(opaque(pool.0), attribute as i32, value)
                    }
                })?;
                Ok(value.widened())
            }

            unsafe fn pool_trim_to(&self, pool: PoolHandle, keep: u64) -> Result<()> {
                // SAFETY: as said above.
                self.at(0, || unsafe {
                    self.api.pool_trim_to(opaque(pool.0), keep as usize)
                })
            }

            unsafe fn pool_set_access(
                &self,
                pool: PoolHandle,
                access: &[AccessDesc],
            ) -> Result<()> {
                let descs: Vec<MemAccessDesc> = access.iter().map(MemAccessDesc::from).collect();
                // SAFETY: as said above; the count is that of `descs`.
                self.at(0, || unsafe {
                    self.api
                        .pool_set_access(opaque(pool.0), descs.as_ptr(), descs.len())
                })
            }

            unsafe fn pool_get_access(&self, pool: PoolHandle, location: Location) -> Result<u64> {
                let (mut location, mut flags) = (MemLocation::from(location), 0);
                // SAFETY: as said above.
                self.at(0, || unsafe {
                    self.api
                        .pool_get_access(&mut flags, opaque(pool.0), &mut location)
                })?;
                Ok(flags.into())
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

            fn pool_export_pointer(&self, ptr: DevicePtr) -> Result<PoolPtrExport> {
                let mut data: Opaque64 = [0; 64];
                // SAFETY: as said above; the driver looks the address up and does not follow it.
                self.at(0, || unsafe {
                    self.api.pool_export_pointer(&mut data, ptr.0 as _)
                })?;
                Ok(PoolPtrExport(data))
            }

            unsafe fn pool_import_pointer(
                &self,
                pool: PoolHandle,
                export: &PoolPtrExport,
            ) -> Result<DevicePtr> {
                let (mut data, mut ptr) = (export.0, 0 as _);
                // SAFETY: as said above.
                self.at(0, || unsafe {
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
                let mut ptr = 0 as _;
                // SAFETY: as said above; the stream lives.
                self.on_stream(stream, |raw| unsafe {
                    self.api
                        .alloc_from_pool_async(&mut ptr, size as usize, opaque(pool.0), raw)
                })?;
                Ok(DevicePtr(ptr as u64))
            }

            unsafe fn alloc_async(&self, size: u64, stream: StreamHandle) -> Result<DevicePtr> {
                let mut ptr = 0 as _;
                // SAFETY: as said above; the stream lives.
                self.on_stream(stream, |raw| unsafe {
                    self.api.alloc_async(&mut ptr, size as usize, raw)
                })?;
                Ok(DevicePtr(ptr as u64))
            }

            unsafe fn free_async(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
                // SAFETY: as said above; the stream lives.
                self.on_stream(stream, |raw| unsafe {
                    self.api.free_async(ptr.0 as _, raw)
                })
            }

            fn device_default_pool(&self, ordinal: i32) -> Result<PoolHandle> {
                let (device, mut pool) = (self.device(ordinal)?, ptr::null_mut());
                // SAFETY: as said above.
                self.at(ordinal, || unsafe {
                    self.api.device_get_default_pool(&mut pool, device)
                })?;
                Ok(PoolHandle(pool as u64))
            }

            fn device_pool(&self, ordinal: i32) -> Result<PoolHandle> {
                let (device, mut pool) = (self.device(ordinal)?, ptr::null_mut());
                // SAFETY: as said above.
                self.at(ordinal, || unsafe {
                    self.api.device_get_pool(&mut pool, device)
                })?;
                Ok(PoolHandle(pool as u64))
            }

            unsafe fn device_set_pool(&self, ordinal: i32, pool: PoolHandle) -> Result<()> {
                let device = self.device(ordinal)?;
                // SAFETY: as said above.
                self.at(ordinal, || unsafe {
                    self.api.device_set_pool(device, opaque(pool.0))
                })
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
