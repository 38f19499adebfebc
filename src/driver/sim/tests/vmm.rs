use super::*;

fn props(location: Location, bits: u32) -> AllocationProps {
    AllocationProps::at(location).handle_types(HandleTypes::from_bits(bits))
}

#[test]
fn create_answers_as_measured() {
    let driver = h200();
    let create = |size, props: &AllocationProps| code(driver.mem_create(size, props));
    let node = Location::HostNuma;
    for (location, bits, expected) in [
        (node(0), 0, Code::SUCCESS),
        (node(0), 1, Code::SUCCESS),
        (node(0), 8, Code::NOT_PERMITTED),
        (node(0), 9, Code::NOT_PERMITTED),
        (Location::Device(0), 8, Code::NOT_PERMITTED),
        (Location::Device(7), 1, Code::SUCCESS),
        (node(1), 0, Code::INVALID_VALUE),
        (node(99), 0, Code::INVALID_VALUE),
        (node(-1), 0, Code::INVALID_VALUE),
        (Location::HostNumaCurrent, 0, Code::INVALID_VALUE),
        (Location::Host, 0, Code::SUCCESS),
        (Location::Host, 1, Code::INVALID_VALUE),
        (Location::Host, 8, Code::INVALID_VALUE),
    ] {
        let props = props(location, bits);
        assert_eq!(create(GRANULE, &props), expected, "{props:?}");
        for kind in [GranularityKind::Minimum, GranularityKind::Recommended] {
            assert_eq!(driver.mem_granularity(&props, kind).unwrap(), GRANULE);
        }
    }
    let plain = props(node(0), 0);
    let rdma = AllocationProps {
        gpu_direct_rdma: true,
        ..plain
    };
    assert_eq!(create(GRANULE, &rdma), Code::INVALID_VALUE);
    assert_eq!(create(0, &plain), Code::INVALID_VALUE);
    assert_eq!(create(GRANULE + 1, &plain), Code::INVALID_VALUE);
    assert_eq!(create(64 << 40, &plain), Code::OUT_OF_MEMORY);
}

#[test]
fn reserve_answers_as_measured() {
    let driver = h200();
    let reserve = |size, alignment| driver.mem_address_reserve(size, alignment, 0);
    assert_eq!(code(reserve(12345, 0)), Code::INVALID_VALUE);
    assert_eq!(code(reserve(0, 0)), Code::INVALID_VALUE);
    assert_eq!(code(reserve(GRANULE, 3)), Code::INVALID_VALUE);
    for size in [1 << 40, 64 << 40] {
        if std::env::var("EGMEM_SANITIZER").is_ok_and(|name| name == "thread") {
            continue; // it ends programs that map this much
        }
        // A sanitizer or an emulator may leave less of the address space than that.
        let expected = match address_space_has(size + (4 << 20)) {
            true => Code::SUCCESS,
            false => Code::OUT_OF_MEMORY,
        };
        assert_eq!(code(reserve(size, 0)), expected, "{size:#x}");
    }
    let aligned = reserve(GRANULE, 1 << 30).unwrap();
    assert!(aligned.0.is_multiple_of(1 << 30));
    // SAFETY: nothing was ever mapped there.
    unsafe {
        assert_eq!(
            code(driver.mem_address_free(aligned, GRANULE * 2)),
            Code::INVALID_VALUE
        );
        assert_eq!(
            code(driver.mem_address_free(aligned, GRANULE)),
            Code::SUCCESS
        );
        assert_eq!(
            code(driver.mem_address_free(aligned, GRANULE)),
            Code::INVALID_VALUE
        );
    }
}

fn address_space_has(size: u64) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping that no other code uses is created and unmapped.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), size as usize, 0, flags, -1, 0);
        start != libc::MAP_FAILED && libc::munmap(start, size as usize) == 0
    }
}

#[test]
fn map_unmap_release_answer_as_measured() {
    let driver = h200();
    let at = AllocationProps::at(Location::HostNuma(0));
    let handle = driver.mem_create(2 * GRANULE, &at).unwrap();
    let ptr = driver.mem_address_reserve(4 * GRANULE, 0, 0).unwrap();
    // SAFETY: the ranges and handles are this test's own.
    unsafe {
        let map = |at, size, offset| code(driver.mem_map(at, size, offset, handle));
        let half = ptr.add(GRANULE);
        assert_eq!(map(ptr, GRANULE, GRANULE), Code::NOT_SUPPORTED);
        assert_eq!(map(ptr, GRANULE, 0), Code::NOT_SUPPORTED);
        assert_eq!(map(ptr, 4 * GRANULE, 0), Code::INVALID_VALUE);
        assert_eq!(map(ptr, 2 * GRANULE, 0), Code::SUCCESS);
        assert_eq!(map(ptr, 2 * GRANULE, 0), Code::INVALID_VALUE);
        assert_eq!(map(half, 2 * GRANULE, 0), Code::INVALID_VALUE);
        assert_eq!(map(ptr.add(2 * GRANULE), 2 * GRANULE, 0), Code::SUCCESS);
        assert_eq!(
            code(driver.mem_address_free(ptr, 4 * GRANULE)),
            Code::INVALID_VALUE
        );

        // Released first, the mappings keep the memory; both show the same bytes.
        assert_eq!(code(driver.mem_release(handle)), Code::SUCCESS);
        assert_eq!(code(driver.mem_release(handle)), Code::INVALID_VALUE);
        let both = [desc(Location::Host, Access::ReadWrite)];
        let set = |at, size| code(driver.mem_set_access(at, size, &both));
        assert_eq!(set(ptr, GRANULE), Code::INVALID_VALUE);
        assert_eq!(set(ptr, 4 * GRANULE), Code::SUCCESS);
        poke(ptr, 42);
        assert_eq!(peek(ptr.add(2 * GRANULE)), 42);
        let again = driver.mem_retain(ptr.add(3 * GRANULE)).unwrap();
        assert_eq!(again, handle);
        assert_eq!(code(driver.mem_release(again)), Code::SUCCESS);

        assert_eq!(code(driver.mem_unmap(half, GRANULE)), Code::INVALID_VALUE);
        assert_eq!(code(driver.mem_unmap(ptr, 2 * GRANULE)), Code::SUCCESS);
        assert_eq!(code(driver.mem_unmap(ptr, 2 * GRANULE)), Code::SUCCESS);
        assert_eq!(set(ptr, 4 * GRANULE), Code::INVALID_VALUE);
        assert_eq!(code(driver.mem_unmap(ptr, 4 * GRANULE)), Code::SUCCESS);
        assert_eq!(
            code(driver.mem_address_free(ptr, 4 * GRANULE)),
            Code::SUCCESS
        );
    }
    assert!(sim(&driver).held().is_empty(), "{}", sim(&driver).held());
    assert_eq!(sim(&driver).free_bytes(Location::HostNuma(0)), 560 << 30);
}

#[test]
fn access_is_set_read_back_and_checked() {
    let driver = h200();
    let memory = Mapped::new(&driver, Location::HostNuma(0), GRANULE);
    let get = |location| driver.mem_get_access(location, memory.ptr);
    assert_eq!(get(Location::Host).unwrap(), 0);
    memory.grant(
        &driver,
        &[
            desc(Location::HostNuma(5), Access::ReadWrite), // the driver does not check the id
            desc(Location::Device(3), Access::Read),
        ],
    );
    // HOST: the lesser of GPU 0's and the CPU's access.
    assert_eq!(get(Location::Host).unwrap(), 3);
    assert_eq!(get(Location::HostNuma(0)).unwrap(), 3);
    assert_eq!(get(Location::Device(3)).unwrap(), 1);
    assert_eq!(get(Location::Device(0)).unwrap(), 0);
    memory.grant(&driver, &[desc(Location::Device(0), Access::Read)]);
    assert_eq!(get(Location::Host).unwrap(), 1);
    assert_eq!(get(Location::HostNuma(0)).unwrap(), 3);
    assert_eq!(code(get(Location::Device(8))), Code::INVALID_DEVICE);
    assert_eq!(code(get(Location::HostNumaCurrent)), Code::INVALID_DEVICE);
    let unknown = [
        desc(Location::Host, Access::None),
        desc(Location::Device(8), Access::Read),
    ];
    // SAFETY: the call is refused.
    let refused = unsafe { driver.mem_set_access(memory.ptr, GRANULE, &unknown) };
    assert_eq!(code(refused), Code::INVALID_VALUE);
    assert_eq!(
        get(Location::HostNuma(0)).unwrap(),
        3,
        "a refused call changes nothing"
    );
    memory.give_back(&driver);
}

#[test]
fn pointers_answer_as_measured() {
    let driver = h200();
    let handle = driver
        .mem_create(GRANULE, &props(Location::HostNuma(0), 1))
        .unwrap();
    let memory = Mapped::of(&driver, handle, GRANULE);
    let inside = memory.ptr.add(4096);
    for attribute in [
        PointerAttribute::HostPointer,
        PointerAttribute::DevicePointer,
    ] {
        let before_any_grant = driver.pointer_attribute(inside, attribute);
        assert_eq!(code(before_any_grant), Code::INVALID_VALUE);
    }
    assert_eq!(code(driver.mem_address_range(inside)), Code::NOT_FOUND);
    memory.grant_all(&driver);
    let attribute = |attribute| driver.pointer_attribute(inside, attribute).unwrap();
    assert_eq!(attribute(PointerAttribute::MemoryType), 1);
    assert_eq!(attribute(PointerAttribute::DeviceOrdinal), 0);
    assert_eq!(attribute(PointerAttribute::HostPointer), inside.0);
    assert_eq!(attribute(PointerAttribute::AllowedHandleTypes), 1);
    assert_eq!(
        driver.mem_address_range(inside).unwrap(),
        (DevicePtr(0), GRANULE)
    );
    // SAFETY: nothing is written through the fd.
    let refused = unsafe { driver.mem_dma_buf(memory.ptr, GRANULE) };
    assert_eq!(code(refused), Code::INVALID_VALUE);
    let old = driver.mem_alloc(3, 100).unwrap();
    let ordinal = driver.pointer_attribute(old, PointerAttribute::DeviceOrdinal);
    assert_eq!(ordinal.unwrap(), 3);
    let local = 7_u8;
    let stack = DevicePtr(&raw const local as u64);
    let unknown = driver.pointer_attribute(stack, PointerAttribute::MemoryType);
    assert_eq!(code(unknown), Code::INVALID_VALUE);
}

#[test]
fn shared_memory_comes_back_as_the_same_memory() {
    let driver = h200();
    let handle = driver
        .mem_create(GRANULE, &props(Location::HostNuma(0), 1))
        .unwrap();
    let refused = driver.mem_export(handle, HandleType::Fabric);
    assert_eq!(code(refused), Code::INVALID_VALUE);
    let fd = driver.mem_export(handle, HandleType::PosixFd).unwrap();
    let other = h200();
    for importer in [&driver, &other] {
        let imported = importer.mem_import(&fd).unwrap();
        let found = importer.mem_properties(imported).unwrap();
        assert_eq!(found, props(Location::HostNuma(0), 0));
        let there = Mapped::of(importer, imported, GRANULE);
        there.grant_all(importer);
        let here = Mapped::of(&driver, handle, GRANULE);
        here.grant_all(&driver);
        poke(here.ptr, 77);
        assert_eq!(peek(there.ptr), 77);
        there.give_back(importer);
    }
    let garbage = tempfile::tempfile().unwrap();
    let garbage = ShareableHandle::PosixFd(garbage.into());
    assert_eq!(code(driver.mem_import(&garbage)), Code::UNKNOWN);
    let garbage = ShareableHandle::Fabric(FabricHandle::from_bytes(&[7; 64]));
    assert_eq!(code(driver.mem_import(&garbage)), Code::NOT_SUPPORTED);
}

#[test]
fn fabric_handles_work_where_there_is_an_imex_channel() {
    let (exporter, importer) = (driver(Machine::gb200()), driver(Machine::gb200()));
    let handle = exporter
        .mem_create(GRANULE, &props(Location::HostNuma(1), 8))
        .unwrap();
    let fabric = exporter.mem_export(handle, HandleType::Fabric).unwrap();
    let imported = importer.mem_import(&fabric).unwrap();
    let location = importer.mem_properties(imported).unwrap().location;
    assert_eq!(location, Location::HostNuma(1));
    let (here, there) = (
        Mapped::of(&exporter, handle, GRANULE),
        Mapped::of(&importer, imported, GRANULE),
    );
    here.grant_all(&exporter);
    there.grant_all(&importer);
    poke(here.ptr, 5);
    assert_eq!(peek(there.ptr), 5);
    // Gone with its exporter, though an earlier mapping lives on.
    drop(exporter);
    assert_eq!(code(importer.mem_import(&fabric)), Code::INVALID_VALUE);
    assert_eq!(peek(there.ptr), 5);
    assert_eq!(code(h200().mem_import(&fabric)), Code::NOT_PERMITTED);
}

#[test]
fn peers_that_cannot_reach_each_other_are_not_granted() {
    let mut machine = Machine::h200x8();
    machine.peer_access = super::super::PeerAccess::Pairs(vec![(0, 1)]);
    let driver = driver(machine);
    assert!(driver.device_can_access_peer(1, 0).unwrap());
    let memory = Mapped::new(&driver, Location::Device(0), GRANULE);
    let set = |location| {
        let descs = [desc(location, Access::ReadWrite)];
        // SAFETY: only this test uses the range.
        code(unsafe { driver.mem_set_access(memory.ptr, GRANULE, &descs) })
    };
    assert_eq!(set(Location::Device(1)), Code::SUCCESS);
    assert_eq!(set(Location::Device(2)), Code::INVALID_DEVICE);
    assert_eq!(set(Location::Host), Code::NOT_SUPPORTED);
}

#[test]
fn links_between_gpus_are_those_of_the_machine() {
    let pairs = |pairs| super::super::PeerAccess::Pairs(pairs);
    let mut machine = Machine::h200x8();
    machine.peer_access = pairs(vec![(0, 1), (1, 2)]);
    machine.nvlink = pairs(vec![(0, 1), (2, 3)]);
    machine.driver_version = crate::CudaVersion(12090);
    let driver = driver(machine);
    // Rank, access, atomics, arrays.
    let all = |gpu, peer| {
        [1, 2, 3, 4].map(|number| {
            let answer = driver.device_p2p_attribute(gpu, peer, P2pAttribute(number));
            answer.unwrap()
        })
    };
    assert_eq!(all(1, 0), [0, 1, 1, 1]);
    assert_eq!(all(2, 1), [1, 1, 0, 1]);
    assert_eq!(all(3, 2), [0, 0, 0, 0]);
    for (gpu, peer, number, expected) in [
        (0, 0, 1, Code::INVALID_DEVICE),
        (0, 8, 1, Code::INVALID_DEVICE),
        (-1, 0, 1, Code::INVALID_DEVICE),
        (0, 1, 0, Code::INVALID_VALUE),
        (0, 1, 5, Code::INVALID_VALUE), // from 13.0 on
    ] {
        let answer = driver.device_p2p_attribute(gpu, peer, P2pAttribute(number));
        assert_eq!(code(answer), expected);
    }
}

#[test]
fn a_failed_call_names_itself_and_does_nothing() {
    let driver = h200();
    sim(&driver).fail(Call::MemCreate, 2, Code(12345));
    let at = AllocationProps::at(Location::HostNuma(0));
    let first = driver.mem_create(GRANULE, &at).unwrap();
    let error = driver.mem_create(GRANULE, &at).unwrap_err();
    assert_eq!(error, Error::driver(Call::MemCreate, Code(12345)));
    assert_eq!(sim(&driver).held().physical_handles, 1);
    assert_eq!(sim(&driver).count(Call::MemCreate), 2);
    // SAFETY: the handle is this test's own.
    unsafe { driver.mem_release(first) }.unwrap();
}
