mod addresses;

use super::*;
use crate::kernels;

const ALL: LaunchDims = LaunchDims {
    blocks: 4,
    threads: 256,
};

fn function(driver: &Driver, device: i32, name: &std::ffi::CStr) -> FunctionHandle {
    let module = driver.module_load(device, kernels::PTX).unwrap();
    driver.module_function(device, module, name).unwrap()
}

fn launch(driver: &Driver, function: FunctionHandle, args: &[u64], stream: StreamHandle) -> Code {
    // SAFETY: tests launch on their own memory, or expect the fault.
    code(unsafe { driver.launch_kernel(function, ALL, args, stream) })
}

fn memset(driver: &Driver, dst: DevicePtr, value: u8, bytes: u64, stream: StreamHandle) -> Code {
    // SAFETY: as above.
    code(unsafe { driver.memset_d8_async(dst, value, bytes, stream) })
}

fn copy(driver: &Driver, dst: u64, src: u64, bytes: u64, stream: StreamHandle) -> Code {
    // SAFETY: as above.
    code(unsafe { driver.memcpy_async(DevicePtr(dst), DevicePtr(src), bytes, stream) })
}

#[test]
fn work_runs_when_it_is_waited_for_and_not_before() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let stream = driver.stream_create(0).unwrap();
    assert_eq!(
        memset(&driver, memory.ptr, 1, GRANULE, stream),
        Code::SUCCESS
    );
    assert_eq!(peek(memory.ptr), 0, "nobody has waited");
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(peek(memory.ptr), u64::from_ne_bytes([1; 8]));

    sim(&driver).set_eager(true);
    assert_eq!(
        memset(&driver, memory.ptr, 2, GRANULE, stream),
        Code::SUCCESS
    );
    assert_eq!(peek(memory.ptr), u64::from_ne_bytes([2; 8]));
}

#[test]
fn a_destroyed_streams_work_runs_when_its_gpu_is_waited_for() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let [gone, other] = [(); 2].map(|()| driver.stream_create(0).unwrap());
    memset(&driver, memory.ptr, 1, GRANULE, gone);
    // SAFETY: nothing uses the stream.
    unsafe { driver.stream_destroy(gone) }.unwrap();
    driver.stream_synchronize(other).unwrap();
    assert_eq!(peek(memory.ptr), 0, "nobody has waited");
    driver.ctx_synchronize(0).unwrap();
    assert_eq!(peek(memory.ptr), u64::from_ne_bytes([1; 8]));
    for _ in 0..1001 {
        let gone = driver.stream_create(0).unwrap();
        memset(&driver, memory.ptr, 2, 8, gone);
        // SAFETY: nothing uses the stream.
        unsafe { driver.stream_destroy(gone) }.unwrap();
    }
    assert_eq!(
        peek(memory.ptr),
        u64::from_ne_bytes([2; 8]),
        "it is not kept for ever"
    );
}

#[test]
fn the_copies_of_a_batch_have_no_order() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let stream = driver.stream_create(0).unwrap();
    memset(&driver, memory.ptr, 1, 8, stream);
    let [src, dst, end] = [0, 8, 16].map(|at| memory.ptr.add(at));
    let piece = |dst, src| MemcpyDesc { dst, src, bytes: 8 };
    // SAFETY: the ranges are the test's, and the work ends before they do.
    unsafe { driver.memcpy_batch_async(&[piece(dst, src), piece(end, dst)], stream) }.unwrap();
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(peek(dst), u64::from_ne_bytes([1; 8]));
    assert_eq!(peek(end), 0, "the second does not see the first");
}

#[test]
fn each_thread_has_a_default_stream_besides_the_legacy_one() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let [legacy, own] = [1, StreamHandle::PER_THREAD].map(|raw| StreamHandle { device: 0, raw });
    let set = |at, stream| memset(&driver, memory.ptr.add(at), 1, 8, stream);
    assert_eq!([set(0, legacy), set(8, own)], [Code::SUCCESS; 2]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(set(16, own), Code::SUCCESS);
            driver.stream_synchronize(own).unwrap();
        });
    });
    let words = || [0, 8, 16].map(|at| peek(memory.ptr.add(at)) != 0);
    assert_eq!(words(), [false, false, true]);
    driver
        .stream_synchronize(StreamHandle { device: 0, raw: 0 })
        .unwrap();
    assert_eq!(words(), [true, false, true]);
    driver.stream_synchronize(own).unwrap();
    assert_eq!(words(), [true; 3]);
    assert_eq!(sim(&driver).held().streams, 0);
}

#[test]
fn a_fill_does_not_go_on_from_a_gpus_memory_into_the_cpus() {
    let driver = h200();
    let stream = driver.stream_create(0).unwrap();
    let places = [
        Location::HostNuma(0),
        Location::Device(0),
        Location::HostNuma(0),
    ];
    let start = driver.mem_address_reserve(3 * GRANULE, 0, 0).unwrap();
    for (at, place) in (0..).map(|index| start.add(index * GRANULE)).zip(places) {
        let handle = driver
            .mem_create(GRANULE, &AllocationProps::at(place))
            .unwrap();
        let gpu = [desc(Location::Device(0), Access::ReadWrite)];
        // SAFETY: only this test uses the range.
        unsafe {
            driver.mem_map(at, GRANULE, 0, handle).unwrap();
            driver.mem_set_access(at, GRANULE, &gpu).unwrap();
        }
    }
    let over = |border: u64| memset(&driver, start.add(border * GRANULE - 8), 1, 16, stream);
    assert_eq!([over(1), over(2)], [Code::SUCCESS, Code::INVALID_VALUE]);
}

#[test]
fn the_cpu_does_not_copy_to_what_it_may_only_read() {
    let driver = h200();
    let [from, to] = [(); 2].map(|()| Mapped::new(&driver, Location::HostNuma(0), GRANULE));
    let stream = driver.stream_create(0).unwrap();
    let copied = |cpu| {
        let who = [
            desc(Location::Host, cpu),
            desc(Location::Device(0), Access::ReadWrite),
        ];
        // SAFETY: nothing reads or writes the memory meanwhile.
        unsafe { driver.mem_set_access(to.ptr, GRANULE, &who) }.unwrap();
        copy(&driver, to.ptr.0, from.ptr.0, 8, stream)
    };
    from.grant_all(&driver);
    assert_eq!(copied(Access::Read), Code::UNKNOWN, "SIGSEGV in a driver");
    assert_eq!(copied(Access::ReadWrite), Code::SUCCESS);
    assert_eq!(copied(Access::None), Code::SUCCESS);
}

#[test]
fn a_gpu_is_busy_for_as_many_questions_as_a_test_wants() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let stream = driver.stream_create(0).unwrap();
    let event = driver.event_create(0, false).unwrap();
    memset(&driver, memory.ptr, 1, 8, stream);
    driver.event_record(event, stream).unwrap();
    for call in [Call::EventQuery, Call::StreamQuery] {
        sim(&driver).fail(call, 1, Code::NOT_READY);
    }
    assert_eq!(driver.event_query(event), Ok(false));
    assert_eq!(driver.stream_query(stream), Ok(false));
    assert_eq!(peek(memory.ptr), 0, "asking in vain runs nothing");
    assert_eq!(driver.event_query(event), Ok(true));
    assert_eq!(peek(memory.ptr), u64::from_ne_bytes([1; 8]));
}

#[test]
fn events_order_streams() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let (a, b) = (
        driver.stream_create(0).unwrap(),
        driver.stream_create(1).unwrap(),
    );
    let event = driver.event_create(0, true).unwrap();
    memset(&driver, memory.ptr, 1, 8, a);
    driver.event_record(event, a).unwrap();
    memset(&driver, memory.ptr.add(8), 1, 8, a);
    driver.stream_wait_event(b, event).unwrap();
    copy(&driver, memory.ptr.0 + 64, memory.ptr.0, 16, b);
    assert_eq!(code(driver.event_elapsed_ms(event, event)), Code::NOT_READY);
    driver.stream_synchronize(b).unwrap();
    let ones = u64::from_ne_bytes([1; 8]);
    assert_eq!(peek(memory.ptr.add(64)), ones, "before the event");
    assert_eq!(peek(memory.ptr.add(72)), 0, "after the event nothing ran");
    assert!(driver.event_query(event).unwrap());
    assert_eq!(driver.event_elapsed_ms(event, event).unwrap(), 0.0);
    let other = driver.event_create(1, false).unwrap();
    assert_eq!(code(driver.event_record(other, a)), Code::INVALID_HANDLE);
    assert_eq!(
        code(driver.event_elapsed_ms(event, other)),
        Code::INVALID_HANDLE
    );
    assert!(driver.stream_query(a).unwrap());
    assert_eq!(peek(memory.ptr.add(8)), ones);
}

#[test]
fn long_chains_of_events_need_no_deep_stack() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let streams = [
        driver.stream_create(0).unwrap(),
        driver.stream_create(0).unwrap(),
    ];
    memset(&driver, memory.ptr, 1, 8, streams[0]);
    for i in 0..100_000 {
        let event = driver.event_create(0, false).unwrap();
        driver.event_record(event, streams[i % 2]).unwrap();
        driver
            .stream_wait_event(streams[(i + 1) % 2], event)
            .unwrap();
        // SAFETY: no other code has the event.
        unsafe { driver.event_destroy(event) }.unwrap();
    }
    driver.stream_synchronize(streams[0]).unwrap();
    assert_eq!(peek(memory.ptr) & 0xff, 1);
}

#[test]
fn kernels_check_rewrite_read_and_write() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let stream = driver.stream_create(2).unwrap();
    let words = 100_000;
    let report = memory.ptr.0 + GRANULE - 16;
    let write = function(&driver, 2, kernels::WRITE);
    let check = function(&driver, 2, kernels::CHECK_REWRITE);
    let read = function(&driver, 2, kernels::READ);
    launch(&driver, write, &[memory.ptr.0, words, 11], stream);
    driver.stream_synchronize(stream).unwrap();
    for i in [0, 1, 77_777, words - 1] {
        assert_eq!(peek(memory.ptr.add(8 * i)), kernels::pattern(11, i));
    }
    assert_eq!(peek(memory.ptr.add(8 * words)), 0);
    poke(memory.ptr.add(8 * 500), 1);
    poke(memory.ptr.add(8 * 600), 2);
    poke(DevicePtr(report), u64::MAX);
    launch(
        &driver,
        check,
        &[memory.ptr.0, words, 11, 12, report],
        stream,
    );
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(peek(DevicePtr(report)), 500);
    assert_eq!(peek(DevicePtr(report + 8)), 2);
    assert_eq!(peek(memory.ptr.add(8 * 500)), 1);
    assert_eq!(peek(memory.ptr.add(8 * 501)), kernels::pattern(12, 501));
    poke(DevicePtr(report), 0);
    launch(&driver, read, &[memory.ptr.0, words, report], stream);
    driver.stream_synchronize(stream).unwrap();
    let xor = (0..words).fold(0, |all, i| all ^ peek(memory.ptr.add(8 * i)));
    assert_eq!(peek(DevicePtr(report)), xor);
    assert_eq!(launch(&driver, read, &[1, 2], stream), Code::INVALID_VALUE);
    assert_eq!(
        code(driver.module_load(0, c".version 8.0")),
        Code::INVALID_PTX
    );
}

#[test]
fn a_fault_loses_the_context_of_that_gpu_alone() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant(
        &driver,
        &[
            desc(Location::Host, Access::ReadWrite),
            desc(Location::Device(0), Access::Read),
            desc(Location::Device(1), Access::ReadWrite),
        ],
    );
    let stream = driver.stream_create(0).unwrap();
    let read = function(&driver, 0, kernels::READ);
    let write = function(&driver, 0, kernels::WRITE);
    let result = driver.mem_alloc(0, 4096).unwrap();
    launch(&driver, read, &[memory.ptr.0, 8, result.0], stream);
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(
        launch(&driver, write, &[memory.ptr.0, 8, 1], stream),
        Code::SUCCESS
    );
    let error = driver.stream_synchronize(stream).unwrap_err();
    assert!(
        matches!(error, Error::ContextLost { device: 0, .. }),
        "{error}"
    );
    assert_eq!(error.code(), Some(Code::ILLEGAL_ADDRESS));
    assert_eq!(code(driver.mem_alloc(0, 4096)), Code::ILLEGAL_ADDRESS);
    assert_eq!(code(driver.stream_create(0)), Code::ILLEGAL_ADDRESS);
    assert_eq!(peek(memory.ptr), 0);
    // SAFETY: both are this test's own.
    unsafe {
        assert_eq!(code(driver.stream_destroy(stream)), Code::ILLEGAL_ADDRESS);
        assert_eq!(code(driver.mem_free(0, result)), Code::ILLEGAL_ADDRESS);
    }
    let held = sim(&driver).held();
    assert_eq!((held.streams, held.device_allocations), (0, 0));
    // Another GPU continues to work, and so do calls that need no context.
    let stream = driver.stream_create(1).unwrap();
    assert_eq!(memset(&driver, memory.ptr, 3, 8, stream), Code::SUCCESS);
    driver.stream_synchronize(stream).unwrap();
    memory.give_back(&driver);
}

#[test]
fn a_devices_work_can_be_waited_for_as_a_whole() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    memory.grant_all(&driver);
    let streams = [0, 0, 1].map(|device| driver.stream_create(device).unwrap());
    for (i, stream) in streams.into_iter().enumerate() {
        memset(&driver, memory.ptr.add(64 * i as u64), 1, 8, stream);
    }
    driver.ctx_synchronize(0).unwrap();
    let ones = u64::from_ne_bytes([1; 8]);
    let words = [0, 64, 128].map(|at| peek(memory.ptr.add(at)));
    assert_eq!(words, [ones, ones, 0], "GPU 1 was not waited for");
    // SAFETY: the stream lives.
    assert_eq!(unsafe { driver.stream_is_capturing(streams[0]) }, Ok(false));
    memset(&driver, memory.ptr, 2, 8, streams[0]);
    memory.give_back(&driver);
    assert_eq!(code(driver.ctx_synchronize(0)), Code::ILLEGAL_ADDRESS);
    driver.stream_synchronize(streams[2]).unwrap_err();
    assert_eq!(code(driver.ctx_synchronize(99)), Code::INVALID_DEVICE);
}

#[test]
fn captures_are_disturbed_as_on_a_gpu() {
    let driver = driver(Machine::gh200x4());
    let sim = sim(&driver);
    let stream = |device| driver.stream_create(device).unwrap();
    let (captured, other, elsewhere) = (stream(0), stream(0), stream(1));
    let default = StreamHandle { device: 0, raw: 0 };
    // SAFETY: the streams live.
    let is_capturing = |stream| unsafe { driver.stream_is_capturing(stream) };
    let query = |stream| driver.stream_query(stream);
    let unsupported = Code::STREAM_CAPTURE_UNSUPPORTED;

    sim.begin_capture(captured, false);
    assert_eq!(is_capturing(captured), Ok(true));
    assert_eq!(is_capturing(other), Ok(false));
    assert_eq!(is_capturing(default), Ok(false));
    driver.ctx_synchronize(1).unwrap();
    let before = driver.thread_exchange_capture_mode(CaptureMode::RELAXED);
    assert_eq!(query(other), Ok(true));
    assert!(sim.end_capture(captured) && !sim.end_capture(captured));

    sim.begin_capture(captured, true);
    assert_eq!(code(is_capturing(default)), Code::STREAM_CAPTURE_IMPLICIT);
    assert_eq!(code(driver.ctx_synchronize(0)), unsupported);
    assert!(!sim.end_capture(captured));

    driver
        .thread_exchange_capture_mode(before.unwrap())
        .unwrap();
    sim.begin_capture(elsewhere, false);
    assert_eq!(code(query(other)), unsupported);
    assert!(!sim.end_capture(elsewhere));
    driver.ctx_synchronize(0).unwrap();
}

/// As a GPU answers: docs/driver-behaviour.md, "Captures".
#[test]
fn a_wait_draws_a_stream_into_a_capture_where_frees_are_refused() {
    let driver = driver(Machine::gh200());
    let sim = sim(&driver);
    let [user, own] = [(); 2].map(|()| driver.stream_create(0).unwrap());
    let event = driver.event_create(0, false).unwrap();
    let wait = |stream| driver.stream_wait_event(stream, event);
    let record = |stream| driver.event_record(event, stream);
    // SAFETY: the stream lives.
    let is_capturing = |stream| unsafe { driver.stream_is_capturing(stream) };
    let props = PoolProps {
        location: Location::HostNuma(0),
        handle_types: HandleTypes::NONE,
        max_size: 0,
    };
    let pools = OwnPools(driver.pools(PoolApi::Driver).unwrap());
    let pool = pools.pool_create(&props).unwrap();
    let memory = pools.alloc_from_pool_async(pool, 4096, own).unwrap();
    // SAFETY: nothing uses the memory.
    let free = || unsafe { pools.free_async(memory, own) };
    let before = driver.thread_exchange_capture_mode(CaptureMode::RELAXED);
    let draw_in = || {
        sim.begin_capture(user, false);
        record(user).unwrap();
        wait(own).unwrap();
        assert_eq!(is_capturing(own), Ok(true));
    };

    draw_in();
    assert_eq!(code(driver.event_query(event)), Code::CAPTURED_EVENT);
    record(own).unwrap();
    wait(user).unwrap();
    assert!(sim.end_capture(user), "the other stream has joined again");
    assert_eq!(is_capturing(own), Ok(false));
    assert_eq!(code(wait(own)), Code::CAPTURED_EVENT);

    draw_in();
    assert!(!sim.end_capture(user), "the other stream has not joined");

    draw_in();
    assert_eq!(code(free()), Code::INVALID_VALUE);
    assert_eq!(code(record(user)), Code::STREAM_CAPTURE_INVALIDATED);
    assert!(!sim.end_capture(user));
    free().unwrap();

    record(own).unwrap();
    sim.begin_capture(user, false);
    assert_eq!(code(wait(user)), Code::STREAM_CAPTURE_ISOLATION);
    assert!(!sim.end_capture(user));
    sim.begin_capture(user, false);
    let unsupported = Code::STREAM_CAPTURE_UNSUPPORTED;
    assert_eq!(code(driver.stream_query(user)), unsupported);
    assert!(!sim.end_capture(user));
    driver
        .thread_exchange_capture_mode(before.unwrap())
        .unwrap();
}
