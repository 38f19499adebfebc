//! Stream-ordered pools through the driver API.

use std::os::fd::AsFd;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

fn props(location: Location, types: HandleTypes, max_size: u64) -> PoolProps {
    PoolProps {
        location,
        handle_types: types,
        max_size,
    }
}

pub fn plain(location: Location) -> PoolProps {
    props(location, HandleTypes::NONE, 0)
}

/// Keeps other tests away from the GPUs' current pools, which are the process's.
pub fn current_pools() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Row: cuMemPoolCreate HOST_NUMA id 0 (handles none, fd, fabric) / id 1, 77.
pub fn pool_create_on_nodes_that_exist(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    for node in &ctx.expect.nodes {
        for types in [
            HandleTypes::NONE,
            HandleTypes::POSIX_FD,
            HandleTypes::FABRIC,
        ] {
            let pool = calls.pool_create(&props(Location::HostNuma(*node), types, 0));
            ctx.destroy_pool(calls, pool.unwrap()).unwrap();
        }
    }
    for node in [77, ctx.expect.missing] {
        let result = calls.pool_create(&plain(Location::HostNuma(node)));
        fails(result, Code::INVALID_VALUE);
    }
}

/// Row: pool access before any grant: host / device.
pub fn pool_access_starts_with_the_host_alone(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    assert_eq!(calls.pool_get_access(pool, Location::Host).unwrap(), 3);
    for gpu in ctx.gpus() {
        let flags = calls.pool_get_access(pool, Location::Device(gpu));
        assert_eq!(flags.unwrap(), 0);
    }
    ctx.destroy_pool(calls, pool).unwrap();
}

/// Row: cuMemPoolSetAccess device; host-numa; host.
pub fn pool_set_access_for_device_node_and_host_succeeds(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    for location in [Location::Device(0), ctx.home(), Location::Host] {
        ctx.pool_access(calls, pool, &[read_write(location)])
            .unwrap();
    }
    let flags = calls.pool_get_access(pool, Location::Device(0));
    assert_eq!(flags.unwrap(), 3);
    ctx.destroy_pool(calls, pool).unwrap();
}

/// Row: pool with maxSize 100 MiB, second allocation over it; used memory reads back right.
pub fn a_pool_keeps_to_its_max_size_and_counts_what_is_used(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let limited = props(ctx.home(), HandleTypes::NONE, 100 << 20);
    let pool = calls.pool_create(&limited).unwrap();
    let used = || {
        calls
            .pool_get_attribute(pool, PoolAttribute::UsedCurrent)
            .unwrap()
    };
    let size = 64 << 20;
    let first = calls.alloc_from_pool_async(pool, size, stream).unwrap();
    assert_eq!(used(), size);
    // Another 64 MiB still fit on a real driver: the limit is kept in whole chunks.
    fails(
        calls.alloc_from_pool_async(pool, 3 * size, stream),
        Code::OUT_OF_MEMORY,
    );
    assert_eq!(used(), size);
    ctx.pool_free(calls, first, stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    assert_eq!(used(), 0);
    let high = calls.pool_get_attribute(pool, PoolAttribute::UsedHigh);
    assert_eq!(high.unwrap(), size);
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}

/// Row: cuDeviceSetMemPool(device, HOST_NUMA pool).
pub fn a_host_pool_becomes_a_devices_pool_only_where_the_platform_lets_it(ctx: &Ctx) {
    let _alone = current_pools();
    let calls = ctx.driver_pools();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    let result = ctx.set_device_pool(calls, 0, pool);
    match ctx.expect.host_pool_for_device {
        Some(false) => fails(result, Code::INVALID_VALUE),
        Some(true) => {
            result.unwrap();
            assert_eq!(calls.device_pool(0).unwrap(), pool);
        }
        None => println!("cuDeviceSetMemPool with a host pool: {result:?}"),
    }
    let default = calls.device_default_pool(0).unwrap();
    ctx.set_device_pool(calls, 0, default).unwrap();
    assert_eq!(calls.device_pool(0).unwrap(), default);
    ctx.destroy_pool(calls, pool).unwrap();
}

/// Row: pool export as POSIX fd, cuMemPoolExportPointer.
pub fn a_pool_and_its_pointers_export_as_posix_fd(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let shared = props(ctx.home(), HandleTypes::POSIX_FD, 0);
    let pool = calls.pool_create(&shared).unwrap();
    let exported = calls.pool_export(pool, HandleType::PosixFd).unwrap();
    assert_eq!(exported.handle_type(), HandleType::PosixFd);
    let ptr = calls.alloc_from_pool_async(pool, 4096, stream).unwrap();
    calls.pool_export_pointer(ptr).unwrap();
    ctx.pool_free(calls, ptr, stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}

const POINTER: &str = "EGMEM_CONFORMANCE_POINTER";

/// Row: cuMemPoolImportPointer of the same allocation again, not freed yet. In another process than
/// the exporter's.
pub fn a_pool_pointer_is_imported_once_at_a_time(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let shared = props(ctx.home(), HandleTypes::POSIX_FD, 0);
    let pool = calls.pool_create(&shared).unwrap();
    let exported = match calls.pool_export(pool, HandleType::PosixFd).unwrap() {
        ShareableHandle::PosixFd(fd) => fd,
        ShareableHandle::Fabric(_) => panic!("an fd was asked for"),
    };
    let ptr = calls.alloc_from_pool_async(pool, 4096, stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    poke(ptr, 41);
    let pointer = calls.pool_export_pointer(ptr).unwrap().0;
    let pointer: String = pointer.iter().map(|byte| format!("{byte:02x}")).collect();
    let child = ctx
        .child("imports_a_pointer_twice")
        .env(POINTER, pointer)
        .stdin(Stdio::from(exported))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{}\n{errors}", child.status);
    assert_eq!(peek(ptr), 42);
    ctx.pool_free(calls, ptr, stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}

pub fn imports_a_pointer_twice(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let fd = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let pool = calls.pool_import(&ShareableHandle::PosixFd(fd)).unwrap();
    let text = std::env::var(POINTER).unwrap();
    let byte = |i: usize| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap();
    let pointer = PoolPtrExport(std::array::from_fn(byte));
    let ptr = calls.pool_import_pointer(pool, &pointer).unwrap();
    for _ in 0..2 {
        let again = calls.pool_import_pointer(pool, &pointer);
        fails(again, Code::ALREADY_MAPPED);
    }
    // The first is as it was.
    assert_eq!(peek(ptr), 41);
    poke(ptr, 42);
    ctx.pool_free(calls, ptr, stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    if ctx.simulated() {
        // The rest was not tried on a real driver.
        let next = calls.pool_import_pointer(pool, &pointer).unwrap();
        assert_eq!(peek(next), 42);
        ctx.pool_free(calls, next, stream).unwrap();
        ctx.stream_synchronize(stream).unwrap();
    }
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}

/// Row: pool export as fabric without IMEX. On the simulator only: refused by the real driver, it
/// corrupts the heap.
pub fn pool_export_as_fabric_is_not_permitted_without_an_imex_channel(ctx: &Ctx) {
    if !ctx.simulated() {
        return println!("skipped: refused by the real driver, it corrupts the heap");
    }
    let calls = ctx.driver_pools();
    let fabric = props(ctx.home(), HandleTypes::FABRIC, 0);
    let pool = calls.pool_create(&fabric).unwrap();
    let result = calls.pool_export(pool, HandleType::Fabric);
    if ctx.expect.imex {
        result.unwrap();
        ctx.destroy_pool(calls, pool).unwrap();
    } else {
        fails(result, Code::NOT_PERMITTED);
        fails(ctx.destroy_pool(calls, pool), Code::UNKNOWN);
    }
}

/// Row: cuMemsetD8 on pool memory the device has no access to. In a child process.
pub fn memset_of_pool_memory_without_access_is_invalid(ctx: &Ctx) {
    ctx.run_child("memset_ungranted_pool");
}

pub fn memset_ungranted_pool(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    let ptr = calls.alloc_from_pool_async(pool, 4096, stream).unwrap();
    fails(ctx.memset(ptr, 1, 4096, stream), Code::INVALID_VALUE);
}

/// CPU and GPU see the same bytes of a pool's allocations.
pub fn pool_memory_is_shared_by_host_and_every_gpu(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    for node in &ctx.expect.nodes {
        let pool = calls
            .pool_create(&plain(Location::HostNuma(*node)))
            .unwrap();
        for gpu in ctx.gpus() {
            ctx.pool_access(calls, pool, &[read_write(Location::Device(gpu))])
                .unwrap();
            let stream = ctx.stream_create(gpu).unwrap();
            let ptr = calls.alloc_from_pool_async(pool, 8192, stream).unwrap();
            ctx.memset(ptr, 0x21, 8192, stream).unwrap();
            ctx.stream_synchronize(stream).unwrap();
            assert_eq!(peek(ptr.add(8184)), u64::from_ne_bytes([0x21; 8]));
            cpu_write(ptr, 512, 9);
            ctx.copy(ptr.add(4096), ptr, 4096, stream).unwrap();
            ctx.stream_synchronize(stream).unwrap();
            cpu_check(ptr.add(4096), 512, 9);
            ctx.pool_free(calls, ptr, stream).unwrap();
            ctx.stream_synchronize(stream).unwrap();
            ctx.destroy_stream(stream).unwrap();
        }
        ctx.destroy_pool(calls, pool).unwrap();
    }
}

/// Attributes read back as set; counters and unknown values are refused.
pub fn pool_attributes_read_back(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    for (attribute, values) in [
        (PoolAttribute::ReuseFollowEventDependencies, [0, 1]),
        (PoolAttribute::ReuseAllowOpportunistic, [0, 1]),
        (PoolAttribute::ReuseAllowInternalDependencies, [0, 1]),
        (PoolAttribute::ReleaseThreshold, [1 << 30, u64::MAX]),
    ] {
        for value in values {
            calls.pool_set_attribute(pool, attribute, value).unwrap();
            let read = calls.pool_get_attribute(pool, attribute).unwrap();
            assert_eq!(read, value, "{attribute:?}");
        }
    }
    for attribute in [PoolAttribute::UsedHigh, PoolAttribute::ReservedHigh] {
        calls.pool_set_attribute(pool, attribute, 0).unwrap();
        let result = calls.pool_set_attribute(pool, attribute, 1);
        fails(result, Code::INVALID_VALUE);
    }
    ctx.destroy_pool(calls, pool).unwrap();
}

/// With a threshold the pool keeps freed memory; trimmed, it gives it back.
pub fn the_release_threshold_keeps_memory_until_it_is_trimmed(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    let reserved = || {
        calls
            .pool_get_attribute(pool, PoolAttribute::ReservedCurrent)
            .unwrap()
    };
    calls
        .pool_set_attribute(pool, PoolAttribute::ReleaseThreshold, u64::MAX)
        .unwrap();
    // A refused allocation, as other tests make some meanwhile, takes what the process's pools keep.
    let is_kept = || {
        let ptr = calls.alloc_from_pool_async(pool, 4 * MIB2, stream).unwrap();
        ctx.pool_free(calls, ptr, stream).unwrap();
        ctx.stream_synchronize(stream).unwrap();
        reserved() >= 4 * MIB2
    };
    assert!((0..100).any(|_| is_kept()));
    calls.pool_trim_to(pool, 0).unwrap();
    assert_eq!(reserved(), 0);
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}

/// cuMemAllocAsync draws from the device's default pool.
pub fn alloc_async_draws_from_the_devices_pool(ctx: &Ctx) {
    let _alone = current_pools();
    let calls = ctx.driver_pools();
    for gpu in ctx.gpus() {
        let stream = ctx.stream_create(gpu).unwrap();
        let ptr = calls.alloc_async(8192, stream).unwrap();
        let back = ctx.mem_host_alloc(gpu, 8192).unwrap();
        ctx.memset(ptr, 0x33, 8192, stream).unwrap();
        ctx.copy(back, ptr, 8192, stream).unwrap();
        ctx.pool_free(calls, ptr, stream).unwrap();
        ctx.stream_synchronize(stream).unwrap();
        assert_eq!(peek(back), u64::from_ne_bytes([0x33; 8]));
        ctx.free_host(gpu, back).unwrap();
        ctx.destroy_stream(stream).unwrap();
    }
    // The default pools' free memory belongs to them: give it back.
    for gpu in ctx.gpus() {
        let default = calls.device_default_pool(gpu).unwrap();
        calls.pool_trim_to(default, 0).unwrap();
    }
}

/// A size of 0 is no allocation, but no error either.
pub fn an_empty_allocation_is_null(ctx: &Ctx) {
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    let nothing = calls.alloc_from_pool_async(pool, 0, stream).unwrap();
    assert_eq!(nothing, DevicePtr(0));
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}
