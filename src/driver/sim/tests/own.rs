//! The driver trait's calls on handles, for tests that use only live handles of their own.

use std::ffi::CStr;
use std::ops::Deref;

use crate::Result;
use crate::*;

macro_rules! own {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        /// Safe methods that shadow the unsafe calls of the same names.
        pub(super) trait OwnCalls {
            fn driver_pools(&self) -> OwnPools<'_>;
            $(fn $name(&self, $($arg: $type),*) -> Result<$out>;)*
        }

        impl OwnCalls for Driver {
            fn driver_pools(&self) -> OwnPools<'_> {
                OwnPools((**self).driver_pools())
            }
            $(fn $name(&self, $($arg: $type),*) -> Result<$out> {
                // SAFETY: the handles are the test's own and live, by this module's rule.
                unsafe { (**self).$name($($arg),*) }
            })*
        }
    };
}

own! {
    mem_export(handle: PhysicalHandle, kind: HandleType) -> ShareableHandle;
    mem_properties(handle: PhysicalHandle) -> AllocationProps;
    stream_synchronize(stream: StreamHandle) -> ();
    stream_query(stream: StreamHandle) -> bool;
    stream_wait_event(stream: StreamHandle, event: EventHandle) -> ();
    event_record(event: EventHandle, stream: StreamHandle) -> ();
    event_query(event: EventHandle) -> bool;
    event_elapsed_ms(start: EventHandle, end: EventHandle) -> f32;
    module_load(device: i32, ptx: &CStr) -> ModuleHandle;
    module_function(device: i32, module: ModuleHandle, name: &CStr) -> FunctionHandle;
}

/// The same for pool calls.
#[derive(Clone, Copy)]
pub(super) struct OwnPools<'a>(pub(super) &'a dyn PoolCalls);

impl<'a> Deref for OwnPools<'a> {
    type Target = dyn PoolCalls + 'a;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

macro_rules! own_pools {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        impl OwnPools<'_> {$(
            pub(super) fn $name(&self, $($arg: $type),*) -> Result<$out> {
                // SAFETY: the handles are the test's own and live, by this module's rule.
                unsafe { self.0.$name($($arg),*) }
            }
        )*}
    };
}

own_pools! {
    pool_set_attribute(pool: PoolHandle, attribute: PoolAttribute, value: u64) -> ();
    pool_get_attribute(pool: PoolHandle, attribute: PoolAttribute) -> u64;
    pool_trim_to(pool: PoolHandle, keep: u64) -> ();
    pool_get_access(pool: PoolHandle, location: Location) -> u64;
    pool_export(pool: PoolHandle, kind: HandleType) -> ShareableHandle;
    pool_import_pointer(pool: PoolHandle, export: &PoolPtrExport) -> DevicePtr;
    alloc_from_pool_async(pool: PoolHandle, size: u64, stream: StreamHandle) -> DevicePtr;
    alloc_async(size: u64, stream: StreamHandle) -> DevicePtr;
}
