//! The arguments of each call as C code sees them, compiled from structs and signatures of its own.

use std::os::fd::{AsRawFd, OwnedFd};

use egmem::driver::{
    Access, AccessDesc, AllocationProps, Call, DevicePtr, EventHandle, FabricHandle,
    GranularityKind, HandleType, HandleTypes, IpcEventHandle, LaunchDims, Location, MemcpyDesc,
    ModuleHandle, PhysicalHandle, PointerAttribute, PoolApi, PoolAttribute, PoolHandle, PoolProps,
    PoolPtrExport, ShareableHandle,
};
use egmem::{Driver, Error, Result, kernels};

use crate::stub_driver::harness::{Stub, cuda, stubbed};

const MIB2: u64 = 2 << 20;

fn export(driver: &Driver, kind: HandleType) -> Result<ShareableHandle> {
    // SAFETY: the stub follows no handle.
    unsafe { driver.mem_export(PhysicalHandle(5), kind) }
}

fn open() -> (Driver, Stub) {
    let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
    driver.mem_info(0).unwrap();
    stub.calls();
    (driver, stub)
}

/// The calls since the last time, less the bracket of pushing and popping a context.
fn calls(stub: &Stub) -> Vec<String> {
    let mut calls = stub.calls();
    calls.retain(|call| !call.starts_with("cuCtxP"));
    calls
}

fn fd(handle: ShareableHandle) -> OwnedFd {
    match handle {
        ShareableHandle::PosixFd(fd) => fd,
        ShareableHandle::Fabric(_) => panic!("a fabric handle"),
    }
}

fn granted() -> [AccessDesc; 3] {
    [
        (Location::Host, Access::ReadWrite),
        (Location::Device(1), Access::Read),
        (Location::HostNuma(3), Access::None),
    ]
    .map(|(location, access)| AccessDesc { location, access })
}

stubbed! {
    fn physical_memory_from_creation_to_release(cuda()) {
        let (driver, stub) = open();
        let props = AllocationProps::at(Location::HostNuma(3)).handle_types(HandleTypes::POSIX_FD);
        assert_eq!(driver.mem_granularity(&props, GranularityKind::Recommended), Ok(MIB2));
        let handle = driver.mem_create(MIB2, &props).unwrap();
        assert_eq!(handle, PhysicalHandle(0xabcd_ef01_2345_6789));
        let ptr = driver.mem_address_reserve(MIB2, 1 << 30, 0x5000_0000).unwrap();
        assert_eq!(ptr, DevicePtr(0x7000_0000_0000));
        // SAFETY: the stub maps nothing, and nothing is touched.
        unsafe {
            driver.mem_map(ptr, MIB2, 4096, handle).unwrap();
            driver.mem_set_access(ptr, MIB2, &granted()).unwrap();
            assert_eq!(driver.mem_get_access(Location::HostNuma(3), ptr), Ok(3));
            driver.mem_unmap(ptr, MIB2).unwrap();
            driver.mem_release(handle).unwrap();
            driver.mem_address_free(ptr, MIB2).unwrap();
        }
        let props = "type=1 handles=1 location=3:3 win32=(nil) compression=0 rdma=0 usage=0 reserved=0";
        assert_eq!(stub.calls(), [
            &*format!("cuMemGetAllocationGranularity {props} option=1"),
            &*format!("cuMemCreate size=2097152 {props} flags=0"),
            "cuMemAddressReserve size=2097152 alignment=1073741824 addr=0x50000000 flags=0",
            "cuMemMap ptr=0x700000000000 size=2097152 offset=4096 handle=0xabcdef0123456789 flags=0",
            "cuMemSetAccess ptr=0x700000000000 size=2097152 2:0=3 1:1=1 3:3=0",
            "cuMemGetAccess 3:3 ptr=0x700000000000",
            "cuMemUnmap ptr=0x700000000000 size=2097152",
            "cuMemRelease handle=0xabcdef0123456789",
            "cuMemAddressFree ptr=0x700000000000 size=2097152",
        ]);
    }

    fn properties_of_device_memory(cuda()) {
        let (driver, stub) = open();
        let props = AllocationProps {
            gpu_direct_rdma: true,
            ..AllocationProps::at(Location::Device(1))
                .handle_types(HandleTypes::POSIX_FD | HandleTypes::FABRIC)
        };
        driver.mem_create(MIB2, &props).unwrap();
        driver.mem_create(MIB2, &AllocationProps::at(Location::HostNumaCurrent)).unwrap();
        assert_eq!(stub.calls(), [
            "cuMemCreate size=2097152 type=1 handles=9 location=1:1 win32=(nil) compression=0 rdma=1 \
             usage=0 reserved=0 flags=0",
            "cuMemCreate size=2097152 type=1 handles=0 location=4:0 win32=(nil) compression=0 rdma=0 \
             usage=0 reserved=0 flags=0",
        ]);
        // SAFETY: the stub follows no handle.
        let read = unsafe { driver.mem_properties(PhysicalHandle(1)) }.unwrap();
        assert_eq!(read, AllocationProps {
            location: Location::HostNuma(2),
            handle_types: HandleTypes::from_bits(0x49),
            gpu_direct_rdma: true,
        });
    }

    fn a_location_type_of_a_newer_driver(cuda().set("STUB_LOCATION_TYPE", 9)) {
        let (driver, _stub) = open();
        // SAFETY: the stub follows no handle.
        let error = unsafe { driver.mem_properties(PhysicalHandle(1)) }.unwrap_err();
        assert!(matches!(error, Error::System { .. }), "{error:?}");
        assert!(error.to_string().contains('9'), "{error}");
    }

    fn an_exported_fd_is_owned_and_closes_on_exec(cuda()) {
        let (driver, stub) = open();
        let shareable = export(&driver, HandleType::PosixFd).unwrap();
        assert_eq!(driver.mem_import(&shareable), Ok(PhysicalHandle(5)));
        assert_eq!(stub.calls(), [
            "cuMemExportToShareableHandle handle=0x5 type=1 flags=0",
            "cuMemImportFromShareableHandle open=1 type=1",
        ]);
        let fd = fd(shareable);
        let raw = fd.as_raw_fd();
        // SAFETY: F_GETFD touches no memory.
        assert_eq!(unsafe { libc::fcntl(raw, libc::F_GETFD) }, libc::FD_CLOEXEC);
        drop(fd);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::fcntl(raw, libc::F_GETFD) }, -1);
    }

    fn a_negative_fd_is_an_error(cuda().set("STUB_EXPORT_FD", -1)) {
        let (driver, _stub) = open();
        for error in [
            export(&driver, HandleType::PosixFd).map(drop).unwrap_err(),
            // SAFETY: the stub has no memory there, and nothing is written.
            unsafe { driver.mem_dma_buf(DevicePtr(4096), 8) }.map(drop).unwrap_err(),
        ] {
            assert!(matches!(error, Error::System { .. }), "{error:?}");
        }
    }

    fn an_export_that_fails_makes_no_fd(cuda()) {
        let (driver, stub) = open();
        stub.fail("cuMemExportToShareableHandle", 800);
        let error = export(&driver, HandleType::PosixFd).map(drop);
        assert_eq!(error.unwrap_err().driver_error().unwrap().call, Call::MemExportToShareableHandle);
    }

    fn a_fabric_handle_is_64_bytes_both_ways(cuda()) {
        let (driver, stub) = open();
        let shareable = export(&driver, HandleType::Fabric).unwrap();
        let ShareableHandle::Fabric(fabric) = &shareable else { panic!("{shareable:?}") };
        assert_eq!(*fabric.expose_bytes(), std::array::from_fn(|i| i as u8));
        let mut bytes = [0; 64];
        (bytes[0], bytes[63]) = (17, 99);
        driver.mem_import(&ShareableHandle::Fabric(FabricHandle::from_bytes(&bytes))).unwrap();
        assert_eq!(stub.calls(), [
            "cuMemExportToShareableHandle handle=0x5 type=8 flags=0",
            "cuMemImportFromShareableHandle first=17 last=99 type=8",
        ]);
    }

    fn a_dma_buf(cuda()) {
        let (driver, stub) = open();
        let file = tempfile::tempfile().unwrap();
        stub.give_fd(OwnedFd::from(file));
        // SAFETY: the stub has no memory there, and nothing is written.
        let fd = unsafe { driver.mem_dma_buf(DevicePtr(4096), 8) }.unwrap();
        assert!(fd.as_raw_fd() >= 0);
        assert_eq!(
            stub.calls(),
            ["cuMemGetHandleForAddressRange ptr=0x1000 size=8 type=1 flags=0"]
        );
    }

    fn queries_of_addresses(cuda()) {
        let (driver, stub) = open();
        let ptr = DevicePtr(0xffff_0000_0000);
        let get = |attribute| driver.pointer_attribute(ptr, attribute).unwrap();
        assert_eq!(get(PointerAttribute::MemoryType), 1);
        assert_eq!(get(PointerAttribute::DeviceOrdinal) as i64, -2);
        assert_eq!(get(PointerAttribute::RangeSize), 0xfedc_ba98_7654_3210);
        assert_eq!(driver.mem_retain(ptr), Ok(PhysicalHandle(6)));
        assert_eq!(driver.mem_address_range(ptr), Ok((DevicePtr(ptr.0 - 16), 64)));
        let calls = calls(&stub);
        assert_eq!(calls[0], "cuPointerGetAttribute gpu0 attribute=2 ptr=0xffff00000000");
        assert_eq!(calls[3..], [
            "cuMemRetainAllocationHandle addr=0xffff00000000",
            "cuMemGetAddressRange_v2 ptr=0xffff00000000",
        ]);
    }

    fn devices(cuda()) {
        let (driver, _stub) = open();
        assert_eq!(driver.driver_version().unwrap().0, 13000);
        assert_eq!(driver.device_count(), Ok(2));
        assert_eq!(driver.device_uuid(0).unwrap()[15], 0xff);
        assert_eq!(driver.device_total_mem(0), Ok(96 << 30));
        assert_eq!(driver.device_can_access_peer(0, 1), Ok(true));
        assert_eq!(driver.device_can_access_peer(0, 0), Ok(false));
        assert_eq!(driver.mem_info(0), Ok((1000, 2000)));
    }

    fn plain_memory_streams_events_and_launches(cuda()) {
        let (driver, stub) = open();
        let stream = driver.stream_create(0).unwrap();
        assert_eq!((stream.device, stream.raw), (0, 0x8000));
        let event = |raw| EventHandle { device: 0, raw };
        let (timed, plain) = (driver.event_create(0, true).unwrap(), driver.event_create(0, false).unwrap());
        assert_eq!((timed, plain), (event(0x9000), event(0x9002)));
        // SAFETY: the stub follows no handle and no address but those of the arguments.
        unsafe {
            assert_eq!(driver.event_elapsed_ms(timed, plain), Ok(1.5));
            assert_eq!(driver.module_load(0, kernels::PTX), Ok(ModuleHandle(0xa000)));
            let function = driver.module_function(0, ModuleHandle(0xa000), kernels::READ).unwrap();
            let device = driver.mem_alloc(0, 100).unwrap();
            let host = driver.mem_host_alloc(0, 200).unwrap();
            driver.memcpy_async(device, host, 100, stream).unwrap();
            let copy = |bytes| MemcpyDesc { dst: device, src: host, bytes };
            driver.memcpy_batch_async(&[copy(10), copy(20)], stream).unwrap();
            driver.memset_d8_async(device, 255, 100, stream).unwrap();
            let dims = LaunchDims { blocks: 7, threads: 256 };
            driver.launch_kernel(function, dims, &[u64::MAX - 1, 2, 3, 4, 5], stream).unwrap();
            driver.event_record(timed, stream).unwrap();
            driver.stream_wait_event(stream, plain).unwrap();
            driver.mem_free(0, device).unwrap();
            driver.mem_free_host(0, host).unwrap();
            driver.module_unload(0, ModuleHandle(0xa000)).unwrap();
            let shared = driver.event_create_interprocess(0).unwrap();
            let mut bytes = *driver.ipc_event_handle(shared).unwrap().expose_bytes();
            assert_eq!(bytes, [0x77; 64]);
            bytes[63] = 0x78;
            let opened = driver.ipc_open_event(0, &IpcEventHandle::from_bytes(&bytes));
            assert_eq!(opened, Ok(event(0x9100)));
            driver.event_destroy(timed).unwrap();
            driver.stream_destroy(stream).unwrap();
        }
        assert_eq!(calls(&stub), [
            "cuStreamCreate gpu0 flags=1",
            "cuEventCreate gpu0 flags=0",
            "cuEventCreate gpu0 flags=2",
            "cuEventElapsedTime gpu0 start=0x9000 end=0x9002",
            "cuModuleLoadData gpu0 image=// Gener",
            "cuModuleGetFunction gpu0 module=0xa000 name=egmem_read",
            "cuMemAlloc_v2 gpu0 size=100",
            "cuMemHostAlloc gpu0 size=200 flags=3",
            "cuMemcpyAsync gpu0 dst=0x10000 src=0x20000 bytes=100 stream=0x8000",
            "cuMemcpyBatchAsync gpu0 count=2 last=0x10000,0x20000,20 attributes=1,0,1,0,0,0 stream=0x8000",
            "cuMemsetD8Async gpu0 dst=0x10000 value=255 bytes=100 stream=0x8000",
            "cuLaunchKernel gpu0 function=0xb000 grid=7,1,1 block=256,1,1 shared=0 stream=0x8000 \
             first=0xfffffffffffffffe last=0x5 extra=(nil)",
            "cuEventRecord gpu0 event=0x9000 stream=0x8000",
            "cuStreamWaitEvent gpu0 stream=0x8000 event=0x9002 flags=0",
            "cuMemFree_v2 gpu0 ptr=0x10000",
            "cuMemFreeHost gpu0 ptr=0x20000",
            "cuModuleUnload gpu0 module=0xa000",
            "cuEventCreate gpu0 flags=6",
            "cuIpcGetEventHandle gpu0 event=0x9006",
            "cuIpcOpenEventHandle gpu0 first=0x77 last=0x78",
            "cuEventDestroy_v2 gpu0 event=0x9000",
            "cuStreamDestroy_v2 gpu0 stream=0x8000",
        ]);
    }

    fn other_host_memory(cuda()) {
        let (driver, stub) = open();
        let ptr = DevicePtr(0x4000);
        // SAFETY: the stub follows no address.
        unsafe {
            driver.mem_host_register(0, ptr, 4096, false, None).unwrap();
            driver.mem_host_register(0, ptr, 4096, true, None).unwrap();
            assert_eq!(driver.mem_host_device_pointer(0, ptr), Ok(DevicePtr(0x4001)));
            driver.mem_host_unregister(0, ptr).unwrap();
        }
        assert_eq!(driver.mem_alloc_managed(0, 100), Ok(DevicePtr(0x30000)));
        assert_eq!(calls(&stub), [
            "cuMemHostRegister_v2 gpu0 ptr=0x4000 size=4096 flags=3",
            "cuMemHostRegister_v2 gpu0 ptr=0x4000 size=4096 flags=11",
            "cuMemHostGetDevicePointer_v2 gpu0 ptr=0x4000 flags=0",
            "cuMemHostUnregister gpu0 ptr=0x4000",
            "cuMemAllocManaged gpu0 size=100 flags=1",
        ]);
    }

    fn pools(cuda()) {
        let (driver, stub) = open();
        let stream = driver.stream_create(0).unwrap();
        calls(&stub);
        let pools = driver.pools(PoolApi::Driver).unwrap();
        assert_eq!(pools.api(), "driver");
        let pool = pools
            .pool_create(&PoolProps {
                location: Location::HostNuma(1),
                handle_types: HandleTypes::POSIX_FD,
                max_size: 100 << 20,
            })
            .unwrap();
        // SAFETY: the stub follows no handle and no address.
        unsafe {
            pools.pool_set_attribute(pool, PoolAttribute::ReuseAllowOpportunistic, 1).unwrap();
            pools.pool_set_attribute(pool, PoolAttribute::ReleaseThreshold, u64::MAX).unwrap();
            assert_eq!(pools.pool_get_attribute(pool, PoolAttribute::ReuseFollowEventDependencies), Ok(1));
            assert_eq!(pools.pool_get_attribute(pool, PoolAttribute::UsedHigh), Ok(u64::MAX));
            pools.pool_trim_to(pool, 4096).unwrap();
            assert_eq!(pools.pool_get_access(pool, Location::Device(1)), Ok(1));
            let exported = pools.pool_export(pool, HandleType::PosixFd).unwrap();
            assert_eq!(pools.pool_import(&exported), Ok(PoolHandle(0x3001)));
            assert_eq!(pools.pool_export_pointer(DevicePtr(64)).unwrap().0, [9; 64]);
            let mut bytes = [0; 64];
            (bytes[0], bytes[63]) = (3, 4);
            assert_eq!(pools.pool_import_pointer(pool, &PoolPtrExport(bytes)), Ok(DevicePtr(0x40000)));
            assert_eq!(pools.alloc_from_pool_async(pool, 10, stream), Ok(DevicePtr(0x50000)));
            assert_eq!(pools.alloc_async(11, stream), Ok(DevicePtr(0x60000)));
            assert_eq!(pools.device_default_pool(1), Ok(PoolHandle(0x3002)));
            assert_eq!(pools.device_pool(1), Ok(PoolHandle(0x3003)));
            pools.pool_set_access(pool, &granted()).unwrap();
            pools.free_async(DevicePtr(0x50000), stream).unwrap();
            pools.device_set_pool(1, pool).unwrap();
            pools.pool_destroy(pool).unwrap();
        }
        assert_eq!(calls(&stub), [
            "cuMemPoolCreate type=1 handles=1 location=3:1 win32=(nil) max=104857600 usage=0 reserved=0",
            "cuMemPoolSetAttribute pool=0x3000 attribute=2 value=1",
            "cuMemPoolSetAttribute pool=0x3000 attribute=4 value=18446744073709551615",
            "cuMemPoolGetAttribute pool=0x3000 attribute=1",
            "cuMemPoolGetAttribute pool=0x3000 attribute=8",
            "cuMemPoolTrimTo pool=0x3000 keep=4096",
            "cuMemPoolGetAccess pool=0x3000 1:1",
            "cuMemPoolExportToShareableHandle pool=0x3000 type=1 flags=0",
            "cuMemPoolImportFromShareableHandle open=1 type=1 flags=0",
            "cuMemPoolExportPointer ptr=0x40",
            "cuMemPoolImportPointer pool=0x3000 first=3 last=4",
            "cuMemAllocFromPoolAsync gpu0 size=10 pool=0x3000 stream=0x8000",
            "cuMemAllocAsync gpu0 size=11 stream=0x8000",
            "cuDeviceGet ordinal=1",
            "cuDeviceGetDefaultMemPool device=8",
            "cuDeviceGetMemPool device=8",
            "cuMemPoolSetAccess pool=0x3000 count=3 first=2:0=3 last=3:3=0",
            "cuMemFreeAsync gpu0 ptr=0x50000 stream=0x8000",
            "cuDeviceSetMemPool device=8 pool=0x3000",
            "cuMemPoolDestroy pool=0x3000",
        ]);
    }
}
