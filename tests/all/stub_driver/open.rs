//! `Driver::open` with any set of installed libraries.

use egmem::driver::{
    AllocationProps, Call, Code, CudaVersion, DeviceAttribute, HandleTypes, Location, P2pAttribute,
    PoolApi, PoolProps,
};
use egmem::{Driver, Error};

use crate::stub_driver::harness::{Stub, cuda, loadable, nothing, stubbed};

fn refused() -> Error {
    Driver::open().unwrap_err()
}

fn init_fails_with(code: i32) {
    let error = refused();
    assert_eq!(error, Error::driver(Call::Init, Code(code)));
    assert!(!error.to_string().is_empty() && !error.remedy().is_empty());
}

stubbed! {
    fn no_library_is_no_driver(nothing()) {
        let there = ["libcuda.so.1", "libcuda.so"].into_iter().any(loadable);
        match Driver::open() {
            Err(Error::NoDriver { detail }) => {
                assert!(!there, "{detail}");
                for word in ["libcuda.so.1: ", "libcuda.so: ", "No such file"] {
                    assert!(detail.contains(word), "{detail}");
                }
            }
            // A machine with a driver cannot hide it from the loader.
            answer => assert!(there, "{answer:?}"),
        }
    }

    fn a_file_that_is_no_library_is_no_driver(
        nothing().garbage("libcuda.so.1").garbage("libcuda.so")
    ) {
        match refused() {
            Error::NoDriver { detail } => {
                assert_eq!(detail.matches("invalid ELF header").count(), 2, "{detail}");
            }
            error => panic!("{error:?}"),
        }
    }

    fn the_drivers_own_name_comes_before_the_toolkits_stub(
        cuda().garbage("libcuda.so")
    ) {
        Driver::open().unwrap();
    }

    fn the_other_name_serves_where_the_first_is_broken(
        nothing().garbage("libcuda.so.1").stub("libcuda.so", "cuda.c")
    ) {
        assert_eq!(Driver::open().unwrap().device_count(), Ok(2));
    }

    fn without_cu_init(cuda().without("cuInit")) {
        assert_eq!(
            refused(),
            Error::MissingSymbol { symbol: "cuInit", library: "libcuda.so.1" }
        );
    }

    fn without_a_version(cuda().without("cuDriverGetVersion")) {
        assert_eq!(
            refused(),
            Error::MissingSymbol { symbol: "cuDriverGetVersion", library: "libcuda.so.1" }
        );
    }

    fn no_device(cuda().set("STUB_INIT", 100)) {
        init_fails_with(Code::NO_DEVICE.0);
    }

    fn the_toolkits_stub(cuda().set("STUB_INIT", 34)) {
        init_fails_with(Code::STUB_LIBRARY.0);
        assert!(refused().remedy().contains("stubs"));
    }

    fn a_library_that_does_not_match_the_kernel_module(cuda().set("STUB_INIT", 803)) {
        init_fails_with(Code::SYSTEM_DRIVER_MISMATCH.0);
    }

    fn a_code_that_nobody_knows(cuda().set("STUB_INIT", 99999)) {
        init_fails_with(99999);
        assert!(refused().to_string().contains("unknown code 99999"));
    }

    fn a_negative_code(cuda().set("STUB_INIT", -1)) {
        init_fails_with(-1);
    }

    fn a_driver_for_11_8(cuda().set("STUB_VERSION", 11080)) {
        let (have, need) = (CudaVersion(11080), CudaVersion::OLDEST);
        assert_eq!(refused(), Error::DriverTooOld { what: "egmem", have, need });
    }

    fn a_driver_for_12_1(cuda().set("STUB_VERSION", 12010)) {
        assert!(matches!(refused(), Error::DriverTooOld { .. }));
    }

    fn no_device_count(cuda().set("STUB_COUNT_CODE", 3)) {
        assert_eq!(refused(), Error::driver(Call::DeviceGetCount, Code::NOT_INITIALIZED));
    }

    fn a_negative_device_count(cuda().set("STUB_COUNT", -5)) {
        let driver = Driver::open().unwrap();
        assert_eq!(
            driver.mem_info(0).unwrap_err(),
            Error::driver(Call::DeviceGet, Code::INVALID_DEVICE)
        );
    }

    fn a_driver_with_a_function_missing(cuda().without("cuMemCreate")) {
        let driver = Driver::open().unwrap();
        let error = driver.mem_create(2 << 20, &AllocationProps::at(Location::HostNuma(0)));
        assert_eq!(
            error.unwrap_err(),
            Error::MissingSymbol { symbol: "cuMemCreate", library: "libcuda.so.1" }
        );
        // The rest works on.
        assert!(driver.mem_address_reserve(2 << 20, 0, 0).is_ok());
    }

    fn a_request_newer_than_the_driver(cuda().set("STUB_VERSION", 12020)) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        let (have, node) = (CudaVersion(12020), AllocationProps::at(Location::HostNuma(0)));
        let too_old = |what, need| Error::DriverTooOld { what, have, need: CudaVersion(need) };
        stub.fail("cuMemCreate", 1);
        assert_eq!(
            driver.mem_create(2 << 20, &node.handle_types(HandleTypes::FABRIC)).unwrap_err(),
            too_old("a fabric handle", 12030)
        );
        assert_eq!(
            driver.mem_create(2 << 20, &AllocationProps::at(Location::Host)).unwrap_err(),
            too_old("memory at Location::Host", 13000)
        );
        assert_eq!(
            driver.mem_create(2 << 20, &node).unwrap_err(),
            Error::driver(Call::MemCreate, Code::INVALID_VALUE)
        );
        stub.fail("cuMemPoolCreate", 801);
        let pool = PoolProps {
            location: Location::Host,
            handle_types: HandleTypes::NONE,
            max_size: 0,
        };
        assert_eq!(
            driver.pools(PoolApi::Driver).unwrap().pool_create(&pool).unwrap_err(),
            too_old("memory at Location::Host", 13000)
        );
    }

    fn a_driver_without_context_calls(cuda().without("cuCtxPushCurrent_v2")) {
        let driver = Driver::open().unwrap();
        assert!(matches!(
            driver.stream_create(0),
            Err(Error::MissingSymbol { symbol: "cuCtxPushCurrent_v2", .. })
        ));
    }

    fn an_old_driver_names_uuids_in_its_own_way(cuda().without("cuDeviceGetUuid_v2")) {
        assert_eq!(Driver::open().unwrap().device_uuid(1), Ok([1; 16]));
    }

    fn attributes_that_the_driver_does_not_know_are_its_to_refuse(cuda()) {
        let driver = Driver::open().unwrap();
        assert_eq!(driver.device_attribute(0, DeviceAttribute::HOST_NUMA_ID), Ok(-1));
        for attribute in [DeviceAttribute(0), DeviceAttribute(-7), DeviceAttribute(4000),
                          DeviceAttribute::HOST_NUMA_MULTINODE_IPC_SUPPORTED] {
            assert_eq!(
                driver.device_attribute(0, attribute).unwrap_err(),
                Error::driver(Call::DeviceGetAttribute, Code::INVALID_VALUE)
            );
        }
    }

    fn text_from_the_driver_is_taken_as_it_comes(cuda()) {
        let driver = Driver::open().unwrap();
        let name = driver.device_name(1).unwrap();
        assert!(name.starts_with("x\u{fffd}xxx"), "{name}");
        assert_eq!(driver.device_pci_bus_id(1).unwrap(), "0000:08:00.0");
    }

    fn devices_are_asked_by_their_handles(cuda()) {
        let (driver, stub) = (Driver::open().unwrap(), Stub::open("libcuda.so.1"));
        stub.calls();
        driver.device_total_mem(1).unwrap();
        driver.device_can_access_peer(1, 0).unwrap();
        let ask = |attribute| driver.device_p2p_attribute(1, 0, attribute);
        assert_eq!(ask(P2pAttribute::NATIVE_ATOMIC_SUPPORTED), Ok(30));
        let unknown = ask(P2pAttribute::ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED).unwrap_err();
        assert_eq!(unknown, Error::driver(Call::DeviceGetP2PAttribute, Code::INVALID_VALUE));
        assert_eq!(stub.calls(), [
            "cuDeviceGet ordinal=1",
            "cuDeviceTotalMem_v2 device=8",
            "cuDeviceGet ordinal=0",
            "cuDeviceCanAccessPeer device=8 peer=7",
            "cuDeviceGetP2PAttribute attribute=3 device=8 peer=7",
            "cuDeviceGetP2PAttribute attribute=5 device=8 peer=7",
        ]);
        for ordinal in [-1, 2, i32::MAX, i32::MIN] {
            assert_eq!(
                driver.device_total_mem(ordinal).unwrap_err(),
                Error::driver(Call::DeviceGet, Code::INVALID_DEVICE)
            );
        }
    }

    fn opened_twice_it_is_two_drivers(cuda()) {
        let (a, b) = (Driver::open().unwrap(), Driver::open().unwrap());
        assert!(!a.same(&b) && a.same(&a.clone()));
        assert_eq!(b.device_count(), Ok(2));
    }
}
