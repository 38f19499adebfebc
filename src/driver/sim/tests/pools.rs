use super::*;

fn props(location: Location, bits: u32, max_size: u64) -> PoolProps {
    PoolProps {
        location,
        handle_types: HandleTypes::from_bits(bits),
        max_size,
    }
}

fn pools(driver: &Driver) -> OwnPools<'_> {
    OwnPools(driver.pools(PoolApi::Driver).unwrap())
}

fn node_pool(driver: &Driver) -> PoolHandle {
    pools(driver)
        .pool_create(&props(Location::HostNuma(0), 0, 0))
        .unwrap()
}

fn free(driver: &Driver, ptr: DevicePtr, stream: StreamHandle) -> Code {
    // SAFETY: tests free only their own memory, or expect the refusal.
    code(unsafe { pools(driver).free_async(ptr, stream) })
}

#[test]
fn create_answers_as_measured() {
    let driver = h200();
    for (location, bits, expected) in [
        (Location::HostNuma(0), 0, Code::SUCCESS),
        (Location::HostNuma(0), 1, Code::SUCCESS),
        (Location::HostNuma(0), 8, Code::SUCCESS),
        (Location::HostNuma(1), 0, Code::INVALID_VALUE),
        (Location::HostNuma(77), 0, Code::INVALID_VALUE),
        (Location::Device(3), 1, Code::SUCCESS),
    ] {
        let made = pools(&driver).pool_create(&props(location, bits, 0));
        assert_eq!(code(made), expected, "{location} {bits}");
    }
}

#[test]
fn access_defaults_and_grants_are_as_measured() {
    let driver = h200();
    let pool = node_pool(&driver);
    let get = |location| pools(&driver).pool_get_access(pool, location).unwrap();
    assert_eq!(get(Location::Host), 3);
    assert_eq!(get(Location::HostNuma(0)), 3);
    assert_eq!(get(Location::Device(0)), 0);
    let stream = driver.stream_create(0).unwrap();
    let ptr = pools(&driver)
        .alloc_from_pool_async(pool, 100, stream)
        .unwrap();
    // SAFETY: the range is this test's own.
    let memset = |bytes| code(unsafe { driver.memset_d8_async(ptr, 7, bytes, stream) });
    assert_eq!(memset(100), Code::INVALID_VALUE);
    for location in [Location::Device(0), Location::HostNuma(0), Location::Host] {
        let grant = [desc(location, Access::ReadWrite)];
        // SAFETY: as above.
        unsafe { pools(&driver).pool_set_access(pool, &grant) }.unwrap();
    }
    assert_eq!(get(Location::Device(0)), 3);
    assert_eq!(memset(100), Code::SUCCESS);
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(peek(ptr), u64::from_ne_bytes([7; 8]));
    assert_eq!(memset(1000), Code::INVALID_VALUE, "beyond the allocation");
    assert_eq!(free(&driver, ptr, stream), Code::SUCCESS);
    assert_eq!(memset(100), Code::INVALID_VALUE, "after the free");
    assert_eq!(free(&driver, ptr, stream), Code::INVALID_VALUE);
}

#[test]
fn the_most_a_pool_may_hold_is_kept_and_counted() {
    let driver = h200();
    let calls = pools(&driver);
    // In chunks of 32 MiB, 100 MiB take 128.
    let limited = props(Location::HostNuma(0), 0, 100 * MIB);
    let pool = calls.pool_create(&limited).unwrap();
    let stream = driver.stream_create(0).unwrap();
    let first = calls.alloc_from_pool_async(pool, 96 * MIB, stream).unwrap();
    let second = calls.alloc_from_pool_async(pool, 64 * MIB, stream);
    assert_eq!(code(second), Code::OUT_OF_MEMORY);
    let nothing = calls.alloc_from_pool_async(pool, 0, stream).unwrap();
    assert_eq!(nothing, DevicePtr(0));
    assert_eq!(free(&driver, nothing, stream), Code::SUCCESS);
    let get = |attribute| calls.pool_get_attribute(pool, attribute).unwrap();
    assert_eq!(get(PoolAttribute::UsedCurrent), 96 * MIB);
    assert_eq!(get(PoolAttribute::ReservedCurrent), 96 * MIB);
    assert_eq!(free(&driver, first, stream), Code::SUCCESS);
    assert_eq!(get(PoolAttribute::UsedCurrent), 0);
    assert_eq!(get(PoolAttribute::UsedHigh), 96 * MIB);
    // Another stream gets the room, because the pool may wait for the free.
    let other = driver.stream_create(1).unwrap();
    let third = calls.alloc_from_pool_async(pool, 96 * MIB, other).unwrap();
    assert_eq!(free(&driver, third, other), Code::SUCCESS);
    driver.stream_synchronize(other).unwrap();
    assert_eq!(
        get(PoolAttribute::ReservedCurrent),
        0,
        "above the threshold of 0"
    );
    assert_eq!(get(PoolAttribute::ReservedHigh), 96 * MIB);
    let set = |attribute, value| code(calls.pool_set_attribute(pool, attribute, value));
    assert_eq!(set(PoolAttribute::UsedHigh, 1), Code::INVALID_VALUE);
    assert_eq!(set(PoolAttribute::UsedCurrent, 0), Code::INVALID_VALUE);
    assert_eq!(set(PoolAttribute::UsedHigh, 0), Code::SUCCESS);
    assert_eq!(get(PoolAttribute::UsedHigh), 0);
}

#[test]
fn threshold_and_trim_decide_what_is_kept() {
    let driver = h200();
    let calls = pools(&driver);
    let pool = node_pool(&driver);
    let stream = driver.stream_create(0).unwrap();
    calls
        .pool_set_attribute(pool, PoolAttribute::ReleaseThreshold, u64::MAX)
        .unwrap();
    let ptrs: Vec<_> = (0..4)
        .map(|_| calls.alloc_from_pool_async(pool, 32 * MIB, stream).unwrap())
        .collect();
    poke(ptrs[0], 99);
    for ptr in &ptrs {
        free(&driver, *ptr, stream);
    }
    driver.stream_synchronize(stream).unwrap();
    let reserved = || {
        calls
            .pool_get_attribute(pool, PoolAttribute::ReservedCurrent)
            .unwrap()
    };
    assert_eq!(reserved(), 128 * MIB);
    calls.pool_trim_to(pool, 40 * MIB).unwrap();
    assert_eq!(reserved(), 32 * MIB);
    calls.pool_trim_to(pool, 0).unwrap();
    assert_eq!(reserved(), 0);
    assert_eq!(sim(&driver).free_bytes(Location::HostNuma(0)), 560 << 30);
    let fresh = calls.alloc_from_pool_async(pool, 32 * MIB, stream).unwrap();
    assert_eq!(peek(fresh), 0, "fresh memory is zero");
}

#[test]
fn a_refused_allocation_empties_what_pools_keep() {
    let driver = h200();
    let calls = pools(&driver);
    let pool = node_pool(&driver);
    let stream = driver.stream_create(0).unwrap();
    let threshold = PoolAttribute::ReleaseThreshold;
    calls.pool_set_attribute(pool, threshold, u64::MAX).unwrap();
    let create = |size| driver.mem_create(size, &AllocationProps::at(Location::HostNuma(0)));
    let keep = |bytes| {
        let ptr = calls.alloc_from_pool_async(pool, bytes, stream).unwrap();
        free(&driver, ptr, stream);
        driver.stream_synchronize(stream).unwrap();
        assert_eq!(
            sim(&driver).free_bytes(Location::HostNuma(0)),
            (560 << 30) - bytes
        );
    };
    keep(559 << 30);
    let handle = create(2 << 30).unwrap();
    // SAFETY: the handle is this test's own.
    unsafe { driver.mem_release(handle) }.unwrap();
    assert_eq!(sim(&driver).free_bytes(Location::HostNuma(0)), 560 << 30);
    keep(64 * MIB);
    assert_eq!(code(create(64 << 40)), Code::OUT_OF_MEMORY);
    assert_eq!(sim(&driver).free_bytes(Location::HostNuma(0)), 560 << 30);
}

#[test]
fn a_stream_reuses_its_own_memory_and_another_only_when_ordered() {
    let driver = h200();
    let calls = pools(&driver);
    let pool = node_pool(&driver);
    let (a, b) = (
        driver.stream_create(0).unwrap(),
        driver.stream_create(0).unwrap(),
    );
    let allocate = |stream| calls.alloc_from_pool_async(pool, 4096, stream).unwrap();
    let first = allocate(a);
    free(&driver, first, a);
    assert_eq!(allocate(a), first, "same stream");
    free(&driver, first, a);
    let second = allocate(b);
    assert_ne!(second, first, "not ordered");
    let event = driver.event_create(0, false).unwrap();
    driver.event_record(event, a).unwrap();
    driver.stream_wait_event(b, event).unwrap();
    let used: Vec<_> = std::iter::repeat_with(|| allocate(b)).take(8191).collect();
    assert!(used.contains(&first), "ordered by the event");
}

#[test]
fn work_that_no_stream_orders_before_a_free_finds_no_memory() {
    let work = |is_ordered: bool| {
        let driver = h200();
        let calls = pools(&driver);
        let pool = node_pool(&driver);
        let gpu = [desc(Location::Device(0), Access::ReadWrite)];
        // SAFETY: the pool is this test's own.
        unsafe { calls.pool_set_access(pool, &gpu) }.unwrap();
        let [a, b] = [(); 2].map(|()| driver.stream_create(0).unwrap());
        let event = driver.event_create(0, false).unwrap();
        let allocate = || calls.alloc_from_pool_async(pool, 4096, a).unwrap();
        // It keeps the chunk.
        let (_other, ptr) = (allocate(), allocate());
        // SAFETY: the range is this test's own.
        unsafe { driver.memset_d8_async(ptr, 7, 4096, b) }.unwrap();
        if is_ordered {
            driver.event_record(event, b).unwrap();
            driver.stream_wait_event(a, event).unwrap();
        }
        free(&driver, ptr, a);
        driver.stream_synchronize(a).unwrap();
        code(driver.stream_synchronize(b))
    };
    assert_eq!(work(true), Code::SUCCESS);
    assert_eq!(work(false), Code::ILLEGAL_ADDRESS);
}

#[test]
fn device_pools_belong_to_their_device() {
    let driver = h200();
    let calls = pools(&driver);
    let own = calls.device_default_pool(2).unwrap();
    assert_eq!(calls.device_pool(2).unwrap(), own);
    assert_eq!(calls.pool_get_access(own, Location::Device(2)).unwrap(), 3);
    assert_eq!(calls.pool_get_access(own, Location::Device(1)).unwrap(), 0);
    let node = node_pool(&driver);
    // SAFETY: the pools are this test's own; the default one is refused.
    unsafe {
        assert_eq!(code(calls.device_set_pool(2, node)), Code::INVALID_VALUE);
        assert_eq!(code(calls.pool_destroy(own)), Code::INVALID_VALUE);
        let mine = calls
            .pool_create(&props(Location::Device(2), 0, 0))
            .unwrap();
        assert_eq!(code(calls.device_set_pool(1, mine)), Code::INVALID_VALUE);
        calls.device_set_pool(2, mine).unwrap();
        assert_eq!(calls.device_pool(2).unwrap(), mine);
        calls.pool_destroy(mine).unwrap();
    }
    assert_eq!(calls.device_pool(2).unwrap(), own);
    let stream = driver.stream_create(2).unwrap();
    let ptr = calls.alloc_async(MIB, stream).unwrap();
    let (free_bytes, total) = driver.mem_info(2).unwrap();
    assert_eq!(total - free_bytes, 32 * MIB);
    let memory_type = driver.pointer_attribute(ptr, PointerAttribute::MemoryType);
    assert_eq!(memory_type.unwrap(), 2);
    // SAFETY: the test is done with it.
    unsafe { driver.mem_free(2, ptr) }.unwrap();

    let grace = super::driver(Machine::gh200());
    let node = node_pool(&grace);
    // SAFETY: the pool is this test's own.
    unsafe { pools(&grace).device_set_pool(0, node) }.unwrap();
    let stream = grace.stream_create(0).unwrap();
    poke(pools(&grace).alloc_async(MIB, stream).unwrap(), 1);
}

#[test]
fn a_destroyed_pool_lives_until_its_last_allocation_is_freed() {
    let driver = h200();
    let calls = pools(&driver);
    let pool = node_pool(&driver);
    let stream = driver.stream_create(0).unwrap();
    let ptr = calls.alloc_from_pool_async(pool, 4096, stream).unwrap();
    // SAFETY: the pool is this test's own; its allocation stays usable.
    unsafe { calls.pool_destroy(pool) }.unwrap();
    let refused = calls.alloc_from_pool_async(pool, 4096, stream);
    assert_eq!(code(refused), Code::INVALID_VALUE);
    poke(ptr, 1);
    assert_eq!(sim(&driver).held().pool_allocations, 1);
    assert_eq!(free(&driver, ptr, stream), Code::SUCCESS);
    driver.stream_synchronize(stream).unwrap();
    assert_eq!(sim(&driver).free_bytes(Location::HostNuma(0)), 560 << 30);
}

#[test]
fn a_pool_whose_export_as_fabric_was_refused_must_not_be_destroyed() {
    let driver = h200();
    let calls = pools(&driver);
    let pool = calls
        .pool_create(&props(Location::HostNuma(0), 8, 0))
        .unwrap();
    let exported = calls.pool_export(pool, HandleType::Fabric);
    assert_eq!(code(exported), Code::NOT_PERMITTED);
    // SAFETY: the pool is this test's own.
    let destroyed = unsafe { calls.pool_destroy(pool) };
    assert_eq!(code(destroyed), Code::UNKNOWN);
}

#[test]
fn pools_and_pointers_travel() {
    let (exporter, importer) = (h200(), h200());
    let (calls, other) = (pools(&exporter), pools(&importer));
    let pool = calls
        .pool_create(&props(Location::HostNuma(0), 9, 0))
        .unwrap();
    assert_eq!(
        code(calls.pool_export(pool, HandleType::Fabric)),
        Code::NOT_PERMITTED
    );
    let fd = calls.pool_export(pool, HandleType::PosixFd).unwrap();
    let stream = exporter.stream_create(0).unwrap();
    let spare = calls
        .alloc_from_pool_async(pool, 40 * MIB + 512, stream)
        .unwrap();
    let ptr = calls.alloc_from_pool_async(pool, 4096, stream).unwrap();
    let export = calls.pool_export_pointer(ptr).unwrap();
    assert_eq!(
        code(calls.pool_export_pointer(ptr.add(512))),
        Code::INVALID_VALUE
    );

    let imported = other.pool_import(&fd).unwrap();
    let there = importer.stream_create(3).unwrap();
    let refused = other.alloc_from_pool_async(imported, 4096, there);
    assert_eq!(code(refused), Code::INVALID_VALUE);
    let shared = other.pool_import_pointer(imported, &export).unwrap();
    poke(ptr, 31);
    assert_eq!(peek(shared), 31);
    let grant = [desc(Location::Device(3), Access::ReadWrite)];
    // SAFETY: the ranges are this test's own.
    unsafe {
        other.pool_set_access(imported, &grant).unwrap();
        importer.memset_d8_async(shared, 1, 8, there).unwrap();
    }
    importer.stream_synchronize(there).unwrap();
    assert_eq!(peek(ptr), u64::from_ne_bytes([1; 8]));
    let mut garbage = export.clone();
    garbage.0[9] ^= 1;
    let refused = other.pool_import_pointer(imported, &garbage);
    assert_eq!(code(refused), Code::INVALID_VALUE);
    assert_eq!(
        code(calls.pool_import_pointer(pool, &export)),
        Code::INVALID_VALUE
    );
    assert_eq!(free(&importer, shared, there), Code::SUCCESS);
    // SAFETY: the test is done with the pool.
    unsafe { other.pool_destroy(imported) }.unwrap();
    importer.stream_synchronize(there).unwrap();
    assert_eq!(free(&exporter, spare, stream), Code::SUCCESS);
    assert_eq!(sim(&importer).held().pool_allocations, 0);
    assert_eq!(sim(&importer).held().pools, 0);
}

#[test]
fn both_apis_are_the_same_pools_under_their_own_names() {
    let driver = h200();
    let runtime = OwnPools(driver.pools(PoolApi::Runtime).unwrap());
    assert_eq!(runtime.api(), "runtime");
    let pool = node_pool(&driver);
    let stream = driver.stream_create(0).unwrap();
    let ptr = runtime.alloc_from_pool_async(pool, 4096, stream).unwrap();
    assert_eq!(free(&driver, ptr, stream), Code::SUCCESS);
    let error = runtime
        .alloc_from_pool_async(PoolHandle(1), 1, stream)
        .unwrap_err();
    let expected = Error::driver(Call::RtMallocFromPoolAsync, Code::INVALID_VALUE);
    assert_eq!(error, expected);
    assert_eq!(sim(&driver).count(Call::RtMallocFromPoolAsync), 2);
    assert_eq!(sim(&driver).count(Call::MemAllocFromPoolAsync), 0);
}

#[test]
fn memory_runs_out_where_it_is_asked_for() {
    let driver = driver(Machine::gh200x4());
    let calls = pools(&driver);
    let stream = driver.stream_create(0).unwrap();
    let pool = calls
        .pool_create(&props(Location::HostNuma(3), 0, 0))
        .unwrap();
    let most = calls.alloc_from_pool_async(pool, 120 << 30, stream);
    assert_eq!(code(most), Code::SUCCESS);
    assert_eq!(sim(&driver).free_bytes(Location::HostNuma(3)), 0);
    let one = driver.mem_create(GRANULE, &AllocationProps::at(Location::HostNuma(3)));
    assert_eq!(code(one), Code::OUT_OF_MEMORY);
    let one = driver.mem_create(GRANULE, &AllocationProps::at(Location::HostNuma(2)));
    assert_eq!(code(one), Code::SUCCESS);
    assert_eq!(code(driver.mem_alloc(1, 97 << 30)), Code::OUT_OF_MEMORY);
    let wrapped = calls.alloc_from_pool_async(pool, u64::MAX, stream);
    assert_eq!(code(wrapped), Code::OUT_OF_MEMORY);
}
