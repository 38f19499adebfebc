//! The runtime API on a stub libcudart.

use egmem::driver::{
    Access, AccessDesc, Call, Code, CudaVersion, DevicePtr, HandleType, HandleTypes, Location,
    PoolApi, PoolAttribute, PoolHandle, PoolProps, PoolPtrExport,
};
use egmem::{Driver, Error};

use crate::stub_driver::harness::{Installed, Stub, cuda, loadable, stubbed};

const PROPS: PoolProps = PoolProps {
    location: Location::HostNuma(1),
    handle_types: HandleTypes::NONE,
    max_size: 1 << 20,
};

fn both() -> Installed {
    cuda().stub("libcudart.so.13", "cudart.c")
}

fn refused(driver: &Driver) -> Error {
    driver.pools(PoolApi::Runtime).map(|_| ()).unwrap_err()
}

stubbed! {
    fn no_runtime_library(cuda()) {
        let driver = Driver::open().unwrap();
        let libraries = ["libcudart.so.13", "libcudart.so.12", "libcudart.so",
                         "/usr/local/cuda/lib64/libcudart.so"];
        let there = libraries.into_iter().any(loadable);
        if there {
            eprintln!("this machine has a CUDA runtime library of its own");
            return;
        }
        let error = refused(&driver);
        match &error {
            Error::MissingLibrary { detail, .. } => {
                for name in &libraries[..3] {
                    assert!(detail.contains(&format!("{name}: ")), "{detail}");
                }
            }
            error => panic!("{error:?}"),
        }
        assert_eq!(refused(&driver), error, "it stays so");
    }

    fn the_toolkits_folder_is_searched(
        cuda().stub("lib64/libcudart.so.13", "cudart.c").set("CUDA_HOME", "@FOLDER@")
    ) {
        assert!(Driver::open().unwrap().pools(PoolApi::Runtime).is_ok());
    }

    fn a_runtime_newer_than_the_driver(both().set("STUB_VERSION", 12080)) {
        let driver = Driver::open().unwrap();
        // Where the machine has a runtime 12 of its own, that one is taken.
        if let Err(error) = driver.pools(PoolApi::Runtime) {
            let what = "the installed CUDA runtime library";
            let (have, need) = (CudaVersion(12080), CudaVersion(13000));
            assert_eq!(error, Error::DriverTooOld { what, have, need });
        }
    }

    fn a_runtime_newer_within_the_major_version(
        cuda().stub("libcudart.so.12", "cudart.c")
            .set("STUB_VERSION", 12020).set("STUB_RUNTIME_VERSION", 12080)
    ) {
        assert!(Driver::open().unwrap().pools(PoolApi::Runtime).is_ok());
    }

    fn a_runtime_that_refuses_the_driver(both().set("STUB_RUNTIME_CODE", 35)) {
        let driver = Driver::open().unwrap();
        let error = driver.pools(PoolApi::Runtime).unwrap().pool_create(&PROPS).unwrap_err();
        assert!(matches!(error, Error::DriverTooOld { .. }), "{error:?}");
    }

    fn a_runtime_without_pools(both().without("cudaMallocFromPoolAsync")) {
        let driver = Driver::open().unwrap();
        let pools = driver.pools(PoolApi::Runtime).unwrap();
        let stream = driver.stream_create(0).unwrap();
        assert_eq!(
            // SAFETY: the stub follows no handle.
            unsafe { pools.alloc_from_pool_async(PoolHandle(1), 8, stream) }.unwrap_err(),
            Error::MissingSymbol { symbol: "cudaMallocFromPoolAsync", library: "libcudart.so.13" }
        );
    }

    fn every_call_runs_in_the_devices_context_and_leaves_the_callers(both()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        stub.push(0xdead0);
        let before = stub.context();
        let pools = driver.pools(PoolApi::Runtime).unwrap();
        let runtime = Stub::open("libcudart.so.13");
        let stream = driver.stream_create(1).unwrap();
        assert_eq!(pools.api(), "runtime");
        let pool = pools.pool_create(&PROPS).unwrap();
        let on_device = PoolProps { location: Location::Device(1), ..PROPS };
        pools.pool_create(&on_device).unwrap();
        // SAFETY: the stub follows no handle and no address.
        unsafe {
            pools.pool_set_attribute(pool, PoolAttribute::ReuseFollowEventDependencies, 1).unwrap();
            pools.pool_set_attribute(pool, PoolAttribute::ReleaseThreshold, 1 << 40).unwrap();
            assert_eq!(pools.pool_get_attribute(pool, PoolAttribute::UsedCurrent), Ok(77));
            pools.pool_trim_to(pool, 5).unwrap();
            assert_eq!(pools.pool_get_access(pool, Location::HostNuma(1)), Ok(3));
            let exported = pools.pool_export(pool, HandleType::PosixFd).unwrap();
            assert_eq!(pools.pool_import(&exported), Ok(PoolHandle(0x3001)));
            assert_eq!(pools.pool_export_pointer(DevicePtr(64)).unwrap().0, [9; 64]);
            let export = PoolPtrExport([5; 64]);
            assert_eq!(pools.pool_import_pointer(pool, &export), Ok(DevicePtr(0x40000)));
            assert_eq!(pools.alloc_from_pool_async(pool, 10, stream), Ok(DevicePtr(0x50000)));
            assert_eq!(pools.alloc_async(11, stream), Ok(DevicePtr(0x60000)));
            assert_eq!(pools.device_default_pool(1), Ok(PoolHandle(0x3002)));
            assert_eq!(pools.device_pool(1), Ok(PoolHandle(0x3003)));
            let access = AccessDesc { location: Location::Device(1), access: Access::Read };
            pools.pool_set_access(pool, &[access]).unwrap();
            pools.free_async(DevicePtr(0x50000), stream).unwrap();
            pools.device_set_pool(1, pool).unwrap();
            pools.pool_destroy(pool).unwrap();
        }
        assert_eq!(stub.context(), before);
        let props = "win32=(nil) max=1048576 usage=0 reserved=0";
        assert_eq!(runtime.calls(), [
            &*format!("cudaMemPoolCreate gpu0 type=1 handles=0 location=3:1 {props}"),
            &*format!("cudaMemPoolCreate gpu1 type=1 handles=0 location=1:1 {props}"),
            "cudaMemPoolSetAttribute gpu0 pool=0x3000 attribute=1 value=1",
            "cudaMemPoolSetAttribute gpu0 pool=0x3000 attribute=4 value=1099511627776",
            "cudaMemPoolGetAttribute gpu0 pool=0x3000 attribute=7",
            "cudaMemPoolTrimTo gpu0 pool=0x3000 keep=5",
            "cudaMemPoolGetAccess gpu0 pool=0x3000 3:1",
            "cudaMemPoolExportToShareableHandle gpu0 pool=0x3000 type=1 flags=0",
            "cudaMemPoolImportFromShareableHandle gpu0 open=1 type=1 flags=0",
            "cudaMemPoolExportPointer gpu0 ptr=0x40",
            "cudaMemPoolImportPointer gpu0 pool=0x3000 first=5 last=5",
            "cudaMallocFromPoolAsync gpu1 size=10 pool=0x3000 stream=0x8000",
            "cudaMallocAsync gpu1 size=11 stream=0x8000",
            "cudaDeviceGetDefaultMemPool gpu1 device=1",
            "cudaDeviceGetMemPool gpu1 device=1",
            "cudaMemPoolSetAccess gpu0 pool=0x3000 count=1 first=1:1=1",
            "cudaFreeAsync gpu1 ptr=0x50000 stream=0x8000",
            "cudaDeviceSetMemPool gpu1 device=1 pool=0x3000",
            "cudaMemPoolDestroy gpu0 pool=0x3000",
        ]);
    }

    fn a_failing_call_is_named_and_leaves_the_context(both()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        let pools = driver.pools(PoolApi::Runtime).unwrap();
        let runtime = Stub::open("libcudart.so.13");
        runtime.fail("cudaMallocAsync", 700);
        let stream = driver.stream_create(1).unwrap();
        // SAFETY: the stub follows no handle.
        match unsafe { pools.alloc_async(8, stream) }.unwrap_err() {
            Error::ContextLost { device: 1, source } => {
                assert_eq!((source.call, source.code), (Call::RtMallocAsync, Code::ILLEGAL_ADDRESS));
            }
            error => panic!("{error:?}"),
        }
        runtime.fail("cudaMemPoolCreate", 801);
        assert_eq!(
            pools.pool_create(&PROPS).unwrap_err(),
            Error::driver(Call::RtMemPoolCreate, Code::NOT_SUPPORTED)
        );
        assert_eq!(stub.context(), (0, 0));
    }

    fn a_refused_call_leaves_no_error_for_others_and_a_success_clears_none(both()) {
        let driver = Driver::open().unwrap();
        let pools = driver.pools(PoolApi::Runtime).unwrap();
        let runtime = Stub::open("libcudart.so.13");
        pools.device_pool(1).unwrap();
        assert_eq!(runtime.calls(), ["cudaDeviceGetMemPool gpu1 device=1"]);
        runtime.fail("cudaDeviceGetMemPool", 801);
        pools.device_pool(1).unwrap_err();
        assert_eq!(
            runtime.calls(),
            ["cudaDeviceGetMemPool gpu1 device=1", "cudaGetLastError of=801"]
        );
    }
}
