//! The driver trait's unsafe calls, on memory that one case alone holds.
//!
//! Every case makes its own memory, streams, pools and events, shares them with no other code, waits
//! for work before it gives anything back, and uses nothing afterwards: the answer to each
//! obligation of the trait's contract.

use std::ffi::CStr;
use std::ops::Deref;

use egmem::Result;
use egmem::driver::*;
use egmem::kernels;

use crate::conformance::harness::Ctx;

pub const MIB2: u64 = 2 << 20;

pub const fn grant(location: Location, access: Access) -> AccessDesc {
    AccessDesc { location, access }
}

pub const fn read_write(location: Location) -> AccessDesc {
    grant(location, Access::ReadWrite)
}

macro_rules! raw {
    ($($name:ident => $call:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        impl Ctx {$(
            pub fn $name(&self, $($arg: $type),*) -> Result<$out> {
                // SAFETY: by the rules that every case keeps, above.
                unsafe { self.driver.$call($($arg),*) }
            }
        )*}
    };
}

raw! {
    release => mem_release(handle: PhysicalHandle) -> ();
    address_free => mem_address_free(ptr: DevicePtr, size: u64) -> ();
    map => mem_map(ptr: DevicePtr, size: u64, offset: u64, handle: PhysicalHandle) -> ();
    unmap => mem_unmap(ptr: DevicePtr, size: u64) -> ();
    set_access => mem_set_access(ptr: DevicePtr, size: u64, access: &[AccessDesc]) -> ();
    free => mem_free(device: i32, ptr: DevicePtr) -> ();
    free_host => mem_free_host(device: i32, ptr: DevicePtr) -> ();
    register => mem_host_register(device: i32, ptr: DevicePtr, size: u64, read_only: bool, node: Option<NodeId>) -> ();
    unregister => mem_host_unregister(device: i32, ptr: DevicePtr) -> ();
    destroy_stream => stream_destroy(stream: StreamHandle) -> ();
    destroy_event => event_destroy(event: EventHandle) -> ();
    copy => memcpy_async(dst: DevicePtr, src: DevicePtr, bytes: u64, stream: StreamHandle) -> ();
    copy_batch => memcpy_batch_async(copies: &[MemcpyDesc], stream: StreamHandle) -> ();
    memset => memset_d8_async(dst: DevicePtr, value: u8, bytes: u64, stream: StreamHandle) -> ();
    unload => module_unload(device: i32, module: ModuleHandle) -> ();
    mem_export => mem_export(handle: PhysicalHandle, kind: HandleType) -> ShareableHandle;
    mem_properties => mem_properties(handle: PhysicalHandle) -> AllocationProps;
    stream_synchronize => stream_synchronize(stream: StreamHandle) -> ();
    stream_query => stream_query(stream: StreamHandle) -> bool;
    stream_wait_event => stream_wait_event(stream: StreamHandle, event: EventHandle) -> ();
    event_record => event_record(event: EventHandle, stream: StreamHandle) -> ();
    event_synchronize => event_synchronize(event: EventHandle) -> ();
    event_query => event_query(event: EventHandle) -> bool;
    event_handle => ipc_event_handle(event: EventHandle) -> IpcEventHandle;
    open_event => ipc_open_event(device: i32, handle: &IpcEventHandle) -> EventHandle;
    event_elapsed_ms => event_elapsed_ms(start: EventHandle, end: EventHandle) -> f32;
    module_load => module_load(device: i32, ptx: &CStr) -> ModuleHandle;
    module_function => module_function(device: i32, module: ModuleHandle, name: &CStr)
        -> FunctionHandle;
}

impl Ctx {
    pub fn driver_pools(&self) -> Pools<'_> {
        Pools(self.driver.driver_pools())
    }

    pub fn destroy_pool(&self, calls: Pools<'_>, pool: PoolHandle) -> Result<()> {
        // SAFETY: by the rules that every case keeps, above.
        unsafe { calls.pool_destroy(pool) }
    }

    pub fn pool_access(
        &self,
        calls: Pools<'_>,
        pool: PoolHandle,
        access: &[AccessDesc],
    ) -> Result<()> {
        // SAFETY: by the rules that every case keeps, above.
        unsafe { calls.pool_set_access(pool, access) }
    }

    pub fn pool_free(&self, calls: Pools<'_>, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        // SAFETY: by the rules that every case keeps, above.
        unsafe { calls.free_async(ptr, stream) }
    }

    pub fn set_device_pool(&self, calls: Pools<'_>, device: i32, pool: PoolHandle) -> Result<()> {
        // SAFETY: by the rules that every case keeps, above.
        unsafe { calls.device_set_pool(device, pool) }
    }

    /// Launches a kernel of `egmem::kernels` over memory that the caller made.
    pub fn launch(
        &self,
        kernel: &Loaded<'_>,
        name: &CStr,
        args: &[u64],
        stream: StreamHandle,
    ) -> Result<()> {
        let function = self.module_function(kernel.device, kernel.module, name)?;
        let dims = LaunchDims {
            blocks: 8,
            threads: 256,
        };
        // SAFETY: by the rules that every case keeps, above; the arguments are the kernel's.
        unsafe { self.driver.launch_kernel(function, dims, args, stream) }?;
        self.stream_synchronize(stream)
    }

    /// The simulator must hold nothing after a case. The real driver's objects are not known.
    pub fn assert_nothing_held(&self) {
        if let Some(sim) = self.driver.sim() {
            let held = sim.held();
            assert!(held.is_empty(), "not given back: {held:?}");
        }
    }
}

/// The pool calls on handles.
#[derive(Clone, Copy)]
pub struct Pools<'a>(pub &'a dyn PoolCalls);

impl<'a> Deref for Pools<'a> {
    type Target = dyn PoolCalls + 'a;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

macro_rules! pools {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        impl Pools<'_> {$(
            pub fn $name(&self, $($arg: $type),*) -> Result<$out> {
                // SAFETY: by the rules that every case keeps, above.
                unsafe { self.0.$name($($arg),*) }
            }
        )*}
    };
}

pools! {
    pool_set_attribute(pool: PoolHandle, attribute: PoolAttribute, value: u64) -> ();
    pool_get_attribute(pool: PoolHandle, attribute: PoolAttribute) -> u64;
    pool_trim_to(pool: PoolHandle, keep: u64) -> ();
    pool_get_access(pool: PoolHandle, location: Location) -> u64;
    pool_export(pool: PoolHandle, kind: HandleType) -> ShareableHandle;
    pool_import_pointer(pool: PoolHandle, export: &PoolPtrExport) -> DevicePtr;
    alloc_from_pool_async(pool: PoolHandle, size: u64, stream: StreamHandle) -> DevicePtr;
    alloc_async(size: u64, stream: StreamHandle) -> DevicePtr;
}

/// The kernels, loaded for a device.
pub struct Loaded<'a> {
    ctx: &'a Ctx,
    pub device: i32,
    module: ModuleHandle,
}

impl<'a> Loaded<'a> {
    pub fn new(ctx: &'a Ctx, device: i32) -> Self {
        let module = ctx.module_load(device, kernels::PTX).unwrap();
        Self {
            ctx,
            device,
            module,
        }
    }
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        let result = self.ctx.unload(self.device, self.module);
        if !std::thread::panicking() {
            result.unwrap();
        }
    }
}

/// Physical memory, mapped.
pub struct Mapped<'a> {
    ctx: &'a Ctx,
    pub handle: PhysicalHandle,
    pub ptr: DevicePtr,
    pub size: u64,
}

impl<'a> Mapped<'a> {
    /// Memory of `props`, mapped and granted.
    pub fn new(ctx: &'a Ctx, props: AllocationProps, size: u64, access: &[AccessDesc]) -> Self {
        let handle = ctx.mem_create(size, &props).unwrap();
        Self::of(ctx, handle, size, access)
    }

    /// The same of a handle, which it takes over.
    pub fn of(ctx: &'a Ctx, handle: PhysicalHandle, size: u64, access: &[AccessDesc]) -> Self {
        let ptr = ctx.mem_address_reserve(size, 0, 0).unwrap();
        ctx.map(ptr, size, 0, handle).unwrap();
        if !access.is_empty() {
            ctx.set_access(ptr, size, access).unwrap();
        }
        Self {
            ctx,
            handle,
            ptr,
            size,
        }
    }

    /// On the node next to GPU 0, for the host and every GPU.
    pub fn shared(ctx: &'a Ctx, size: u64) -> Self {
        let mut access = vec![read_write(Location::Host)];
        access.extend(ctx.gpus().map(|gpu| read_write(Location::Device(gpu))));
        Self::new(ctx, AllocationProps::at(ctx.home()), size, &access)
    }
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        let unmapped = self.ctx.unmap(self.ptr, self.size);
        let released = self.ctx.release(self.handle);
        let freed = self.ctx.address_free(self.ptr, self.size);
        if !std::thread::panicking() {
            unmapped.and(released).and(freed).unwrap();
        }
    }
}

/// Reads the 64-bit word at `ptr` with the CPU.
pub fn peek(ptr: DevicePtr) -> u64 {
    // SAFETY: by the rules above: mapped for the CPU, or the case is about the fault.
    unsafe { (ptr.0 as *const u64).read_volatile() }
}

/// Writes the 64-bit word at `ptr` with the CPU.
pub fn poke(ptr: DevicePtr, word: u64) {
    // SAFETY: as above.
    unsafe { (ptr.0 as *mut u64).write_volatile(word) }
}

/// Writes `kernels::pattern` with the CPU.
pub fn cpu_write(ptr: DevicePtr, words: u64, seed: u64) {
    (0..words).for_each(|i| poke(ptr.add(8 * i), kernels::pattern(seed, i)));
}

/// Checks `kernels::pattern` with the CPU.
#[track_caller]
pub fn cpu_check(ptr: DevicePtr, words: u64, seed: u64) {
    for i in 0..words {
        let found = peek(ptr.add(8 * i));
        assert_eq!(found, kernels::pattern(seed, i), "word {i} of {words}");
    }
}
