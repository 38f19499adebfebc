//! Pools through the runtime API, and that they are the driver API's.

use egmem::Error;
use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::pools::{current_pools, plain};
use crate::conformance::raw::*;

/// The runtime API's calls, or a word about why there are none.
fn runtime(ctx: &Ctx) -> Option<Pools<'_>> {
    match ctx.driver.pools(PoolApi::Runtime) {
        Ok(calls) => Some(Pools(calls)),
        Err(error @ (Error::MissingLibrary { .. } | Error::PlatformUnsupported { .. })) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Each API's pool with the other's calls, in both directions.
pub fn the_two_apis_are_interchangeable(ctx: &Ctx) {
    let Some(runtime) = runtime(ctx) else { return };
    let driver = ctx.driver_pools();
    assert_eq!((driver.api(), runtime.api()), ("driver", "runtime"));
    for (one, other) in [(driver, runtime), (runtime, driver)] {
        let stream = ctx.stream_create(0).unwrap();
        let pool = one.pool_create(&plain(ctx.home())).unwrap();
        // Access that one API grants is read by the other.
        ctx.pool_access(other, pool, &[read_write(Location::Device(0))])
            .unwrap();
        let flags = one.pool_get_access(pool, Location::Device(0));
        assert_eq!(flags.unwrap(), 3);
        let set = PoolAttribute::ReleaseThreshold;
        one.pool_set_attribute(pool, set, 1 << 40).unwrap();
        assert_eq!(other.pool_get_attribute(pool, set).unwrap(), 1 << 40);
        let set = PoolAttribute::ReuseAllowOpportunistic;
        one.pool_set_attribute(pool, set, 0).unwrap();
        assert_eq!(other.pool_get_attribute(pool, set).unwrap(), 0);
        // Memory that one API allocates is freed by the other.
        for (allocate, free) in [(one, other), (other, one)] {
            let ptr = allocate.alloc_from_pool_async(pool, 8192, stream).unwrap();
            ctx.memset(ptr, 0x44, 8192, stream).unwrap();
            ctx.stream_synchronize(stream).unwrap();
            assert_eq!(peek(ptr), u64::from_ne_bytes([0x44; 8]));
            ctx.pool_free(free, ptr, stream).unwrap();
            ctx.stream_synchronize(stream).unwrap();
        }
        let used = other.pool_get_attribute(pool, PoolAttribute::UsedCurrent);
        assert_eq!(used.unwrap(), 0);
        other.pool_trim_to(pool, 0).unwrap();
        ctx.destroy_pool(other, pool).unwrap();
        ctx.destroy_stream(stream).unwrap();
    }
}

/// Both APIs name the same default pool.
pub fn the_default_pool_is_the_same_object(ctx: &Ctx) {
    let Some(runtime) = runtime(ctx) else { return };
    let _alone = current_pools();
    for gpu in ctx.gpus() {
        let pools = [runtime, ctx.driver_pools()].map(|calls| {
            let default = calls.device_default_pool(gpu).unwrap();
            assert_eq!(calls.device_pool(gpu).unwrap(), default);
            default
        });
        assert_eq!(pools[0], pools[1], "GPU {gpu}");
    }
}

/// cudaMallocAsync draws from the device's pool, cudaFreeAsync gives back.
pub fn malloc_async_draws_from_the_devices_pool(ctx: &Ctx) {
    let Some(runtime) = runtime(ctx) else { return };
    let _alone = current_pools();
    for gpu in ctx.gpus() {
        let stream = ctx.stream_create(gpu).unwrap();
        let ptr = runtime.alloc_async(8192, stream).unwrap();
        ctx.memset(ptr, 1, 8192, stream).unwrap();
        ctx.pool_free(runtime, ptr, stream).unwrap();
        ctx.stream_synchronize(stream).unwrap();
        let default = runtime.device_default_pool(gpu).unwrap();
        runtime.pool_trim_to(default, 0).unwrap();
        ctx.destroy_stream(stream).unwrap();
    }
}

/// Row: cudaDeviceSetMemPool(device, HOST_NUMA pool).
pub fn cuda_device_set_mem_pool_refuses_host_pools_where_the_driver_does(ctx: &Ctx) {
    let Some(runtime) = runtime(ctx) else { return };
    let _alone = current_pools();
    let pool = runtime.pool_create(&plain(ctx.home())).unwrap();
    let result = ctx.set_device_pool(runtime, 0, pool);
    match ctx.expect.host_pool_for_device {
        Some(false) => fails(result, Code::INVALID_VALUE),
        Some(true) => result.unwrap(),
        None => println!("cudaDeviceSetMemPool with a host pool: {result:?}"),
    }
    let default = runtime.device_default_pool(0).unwrap();
    ctx.set_device_pool(runtime, 0, default).unwrap();
    ctx.destroy_pool(runtime, pool).unwrap();
}
