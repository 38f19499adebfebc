//! The caller's current context is the same after every call, and retained contexts are released.

use std::ffi::CStr;

use egmem::driver::{
    Call, CaptureMode, Code, DevicePtr, EventHandle, FunctionHandle, IpcEventHandle, LaunchDims,
    ModuleHandle, PointerAttribute, PoolApi, PoolHandle, StreamHandle,
};
use egmem::{Driver, Error, Result};

use crate::stub_driver::harness::{Stub, cuda, stubbed};

const PTR: DevicePtr = DevicePtr(0x1000);
const PTX: &CStr = c".version 6.0";

fn stream(driver: &Driver) -> StreamHandle {
    driver.stream_create(1).unwrap()
}

const EVENT: EventHandle = EventHandle { device: 1, raw: 1 };

type CallOnDriver = fn(&Driver) -> Result<()>;

/// Every call that runs in a device's context, on device 1.
fn calls_in_context() -> Vec<(&'static str, CallOnDriver)> {
    // SAFETY: of every block here: the stub follows no handle and no address.
    unsafe {
        vec![
            ("cuMemGetInfo_v2", |d| d.mem_info(1).map(drop)),
            ("cuMemAlloc_v2", |d| d.mem_alloc(1, 8).map(drop)),
            ("cuMemFree_v2", |d| d.mem_free(1, PTR)),
            ("cuMemHostAlloc", |d| d.mem_host_alloc(1, 8).map(drop)),
            ("cuMemFreeHost", |d| d.mem_free_host(1, PTR)),
            ("cuMemHostRegister_v2", |d| {
                d.mem_host_register(1, PTR, 8, false, None)
            }),
            ("cuMemHostUnregister", |d| d.mem_host_unregister(1, PTR)),
            ("cuMemHostGetDevicePointer_v2", |d| {
                d.mem_host_device_pointer(1, PTR).map(drop)
            }),
            ("cuMemAllocManaged", |d| d.mem_alloc_managed(1, 8).map(drop)),
            ("cuStreamCreate", |d| d.stream_create(1).map(drop)),
            ("cuStreamDestroy_v2", |d| d.stream_destroy(stream(d))),
            ("cuStreamSynchronize", |d| d.stream_synchronize(stream(d))),
            ("cuStreamQuery", |d| d.stream_query(stream(d)).map(drop)),
            ("cuStreamWaitEvent", |d| {
                d.stream_wait_event(stream(d), EVENT)
            }),
            ("cuStreamIsCapturing", |d| {
                let raw = StreamHandle::PER_THREAD;
                d.stream_is_capturing(StreamHandle { device: 1, raw })
                    .map(drop)
            }),
            ("cuCtxSynchronize", |d| d.ctx_synchronize(1)),
            ("cuEventCreate", |d| d.event_create(1, true).map(drop)),
            ("cuEventDestroy_v2", |d| d.event_destroy(EVENT)),
            ("cuEventRecord", |d| d.event_record(EVENT, stream(d))),
            ("cuEventSynchronize", |d| d.event_synchronize(EVENT)),
            ("cuEventQuery", |d| d.event_query(EVENT).map(drop)),
            ("cuEventElapsedTime", |d| {
                d.event_elapsed_ms(EVENT, EVENT).map(drop)
            }),
            ("cuIpcGetEventHandle", |d| {
                d.ipc_event_handle(EVENT).map(drop)
            }),
            ("cuIpcOpenEventHandle", |d| {
                d.ipc_open_event(1, &IpcEventHandle::from_bytes(&[1; 64]))
                    .map(drop)
            }),
            ("cuMemcpyAsync", |d| d.memcpy_async(PTR, PTR, 8, stream(d))),
            ("cuMemsetD8Async", |d| {
                d.memset_d8_async(PTR, 1, 8, stream(d))
            }),
            ("cuModuleLoadData", |d| d.module_load(1, PTX).map(drop)),
            ("cuModuleUnload", |d| d.module_unload(1, ModuleHandle(1))),
            ("cuModuleGetFunction", |d| {
                d.module_function(1, ModuleHandle(1), c"f").map(drop)
            }),
            ("cuLaunchKernel", |d| {
                let dims = LaunchDims {
                    blocks: 1,
                    threads: 1,
                };
                d.launch_kernel(FunctionHandle(1), dims, &[1; 5], stream(d))
            }),
            ("cuMemAllocFromPoolAsync", |d| {
                let pools = d.pools(PoolApi::Driver)?;
                pools
                    .alloc_from_pool_async(PoolHandle(1), 8, stream(d))
                    .map(drop)
            }),
            ("cuMemAllocAsync", |d| {
                d.pools(PoolApi::Driver)?
                    .alloc_async(8, stream(d))
                    .map(drop)
            }),
            ("cuMemFreeAsync", |d| {
                d.pools(PoolApi::Driver)?.free_async(PTR, stream(d))
            }),
        ]
    }
}

/// Runs every call, well and failing, and checks that the current context stays `before`.
fn all_leave(driver: &Driver, stub: &Stub, before: (usize, i32)) {
    for (name, call) in calls_in_context() {
        call(driver).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(stub.context(), before, "after {name}");
        stub.calls();
        stub.fail(name, 2);
        let error = call(driver).unwrap_err();
        assert_eq!(error.code(), Some(Code::OUT_OF_MEMORY), "{name}: {error}");
        assert!(
            name.starts_with(error.driver_error().unwrap().call.name()),
            "{name}: {error}"
        );
        assert_eq!(stub.context(), before, "after {name} has failed");
        let calls = stub.calls();
        assert!(
            calls.iter().any(|c| c.starts_with(&format!("{name} gpu1"))),
            "{calls:?}"
        );
        stub.fail("", 0);
    }
}

stubbed! {
    fn no_context_stays_no_context(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        all_leave(&driver, &stub, (0, 0));
    }

    fn somebody_elses_context_stays_current(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        stub.push(0xdead0);
        all_leave(&driver, &stub, (0xdead0, 1));
    }

    fn the_right_context_is_not_pushed_again(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        driver.mem_info(1).unwrap();
        let pushed = stub.calls();
        assert!(pushed.iter().any(|call| call.starts_with("cuCtxPushCurrent_v2")), "{pushed:?}");
        let context = stub.primary(8);
        stub.push(context);
        stub.calls();
        driver.mem_info(1).unwrap();
        assert_eq!(stub.calls(), ["cuMemGetInfo_v2 gpu1"]);
        assert_eq!(stub.context(), (context, 1));
    }

    fn a_push_that_reports_an_earlier_fault_is_taken_back(cuda().set("STUB_PUSH_CODE", 719)) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        match driver.mem_info(1).unwrap_err() {
            Error::ContextLost { device: 1, source } => {
                assert_eq!((source.call, source.code), (Call::CtxPushCurrent, Code::LAUNCH_FAILED));
            }
            error => panic!("{error:?}"),
        }
        assert_eq!(stub.context(), (0, 0));
    }

    fn a_fault_is_a_lost_context_and_names_the_gpu(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        for (name, call) in calls_in_context() {
            for code in [700, 214, 719, 716] {
                stub.fail(name, code);
                match call(&driver).unwrap_err() {
                    Error::ContextLost { device: 1, source } => assert_eq!(source.code, Code(code)),
                    error => panic!("{name}: {error:?}"),
                }
            }
            stub.fail("", 0);
        }
    }

    fn a_context_that_was_destroyed_is_named_and_never_used_again(cuda()) {
        for is_current in [false, true] {
            let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
            let stream = stream(&driver);
            if is_current {
                let context = stub.primary(8);
                stub.push(context);
            }
            let synchronize = || {
                // SAFETY: the stub follows no handle.
                let error = unsafe { driver.stream_synchronize(stream) }.unwrap_err();
                assert!(matches!(error, Error::ContextLost { device: 1, .. }), "{error:?}");
                assert!(error.to_string().contains("GPU 1 was destroyed"), "{error}");
                assert!(error.remedy().contains("cuDevicePrimaryCtxReset"), "{}", error.remedy());
            };
            stub.reset(1);
            synchronize();
            stub.make_anew(1);
            stub.calls();
            synchronize();
            assert_eq!(stub.calls(), [""; 0], "its streams are gone with it");
            driver.mem_info(0).unwrap();
        }
    }

    fn a_destroyed_context_is_noticed_where_its_number_is_refused(cuda().set("STUB_DESTROYED_CODE", 201)) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        let stream = stream(&driver);
        stub.reset(1);
        stub.calls();
        // SAFETY: the stub follows no handle.
        let error = unsafe { driver.stream_is_capturing(stream) }.unwrap_err();
        assert!(matches!(error, Error::ContextLost { device: 1, .. }), "{error:?}");
        assert_eq!(stub.calls(), [""; 0]);
    }

    fn a_context_that_was_made_anew_is_another_one(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        let stream = stream(&driver);
        stub.reset(1);
        stub.make_anew(1);
        stub.calls();
        // SAFETY: the stub follows no handle.
        let error = unsafe { driver.stream_synchronize(stream) }.unwrap_err();
        assert!(matches!(error, Error::ContextLost { device: 1, .. }), "{error:?}");
        assert_eq!(stub.calls(), [""; 0]);
        assert_eq!(driver.has_context(1), Some(true));
        assert_ne!(driver.active_device(), Some(1), "no call for any context goes there");
    }

    fn calls_for_any_context_leave_a_gpu_that_has_faulted(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        driver.mem_info(0).unwrap();
        let _stream = stream(&driver);
        assert_eq!(driver.active_device(), Some(0));
        stub.fail("cuMemGetInfo_v2", 700);
        driver.mem_info(0).unwrap_err();
        stub.fail("", 0);
        assert_eq!(driver.active_device(), Some(1));
    }

    fn work_that_is_not_done_is_no_error(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        let (stream, event) = (stream(&driver), driver.event_create(0, false).unwrap());
        // SAFETY: stream and event live.
        unsafe {
            assert_eq!(driver.stream_query(stream), Ok(true));
            assert_eq!(driver.event_query(event), Ok(true));
            stub.fail("cuStreamQuery", 600);
            assert_eq!(driver.stream_query(stream), Ok(false));
            stub.fail("cuEventQuery", 600);
            assert_eq!(driver.event_query(event), Ok(false));
        }
    }

    fn a_capture_is_asked_for_without_making_a_context_current(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        let stream = stream(&driver);
        stub.calls();
        // SAFETY: the stub follows no handle.
        let ask = || unsafe { driver.stream_is_capturing(stream) };
        ask().unwrap();
        let calls = stub.calls();
        assert!(matches!(&calls[..], [call] if call.starts_with("cuStreamIsCapturing stream")), "{calls:?}");
        stub.reset(1);
        assert!(matches!(ask(), Err(Error::ContextLost { device: 1, .. })));
        assert_eq!(stub.calls(), [""; 0]);
    }

    fn a_driver_that_wants_a_context_for_it_gets_one(cuda().set("STUB_STREAMS_WANT_CONTEXTS", 1)) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        let stream = stream(&driver);
        // SAFETY: the stub follows no handle.
        unsafe { driver.stream_is_capturing(stream) }.unwrap();
        let calls = stub.calls();
        assert!(calls.iter().any(|call| call.starts_with("cuStreamIsCapturing gpu1")), "{calls:?}");
        assert_eq!(stub.context(), (0, 0));
    }

    fn captures_are_seen_and_the_threads_mode_is_swapped(cuda()) {
        let driver = Driver::open().unwrap();
        let capturing = |raw| {
            // SAFETY: the stub follows no handle.
            unsafe { driver.stream_is_capturing(StreamHandle { device: 0, raw }) }
        };
        assert_eq!([0x8000, 0x8001, 0x8002].map(capturing), [Ok(false), Ok(true), Ok(true)]);
        for (set, before) in [
            (CaptureMode::RELAXED, CaptureMode::GLOBAL),
            (CaptureMode::THREAD_LOCAL, CaptureMode::RELAXED),
            (CaptureMode::GLOBAL, CaptureMode::THREAD_LOCAL),
        ] {
            assert_eq!(driver.thread_exchange_capture_mode(set), Ok(before));
        }
    }

    fn contexts_are_retained_on_first_use_once_and_released(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        assert_eq!(stub.retained_released(0), (0, 0), "not before it is needed");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| driver.mem_info(1).unwrap());
            }
        });
        assert_eq!(stub.retained_released(1), (1, 0));
        let clone = driver.clone();
        drop(driver);
        assert_eq!(stub.retained_released(1), (1, 0));
        drop(clone);
        assert_eq!(stub.retained_released(0), (0, 0));
        assert_eq!(stub.retained_released(1), (1, 1));
    }

    fn drivers_before_12_4_want_a_context_on_every_device(cuda().set("STUB_VERSION", 12030)) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        assert_eq!([stub.retained_released(0), stub.retained_released(1)], [(1, 0), (1, 0)]);
        assert_eq!(stub.context(), (0, 0));
        drop(driver);
        assert_eq!([stub.retained_released(0), stub.retained_released(1)], [(1, 1), (1, 1)]);
    }

    fn a_context_that_cannot_be_retained(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        stub.fail("cuDevicePrimaryCtxRetain", 2);
        assert_eq!(
            driver.stream_create(0).unwrap_err(),
            Error::driver(Call::DevicePrimaryCtxRetain, Code::OUT_OF_MEMORY)
        );
        stub.fail("", 0);
        driver.stream_create(0).unwrap();
        drop(driver);
        assert_eq!(stub.retained_released(0), (1, 1));
    }

    fn a_query_that_wants_some_context_gets_one(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        driver.pointer_attribute(PTR, PointerAttribute::MemoryType).unwrap();
        assert!(stub.calls().iter().any(|call| call.starts_with("cuPointerGetAttribute gpu0")));
        assert_eq!(stub.context(), (0, 0));
    }

    fn a_forked_child_gives_nothing_back(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        driver.mem_info(0).unwrap();
        // SAFETY: the child drops one value, reads one counter and ends without unwinding.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(driver);
            let (_, released) = stub.retained_released(0);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(released) };
        }
        let mut status = -1;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
        drop(driver);
        assert_eq!(stub.retained_released(0), (1, 1));
    }
}
