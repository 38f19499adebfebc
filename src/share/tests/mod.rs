//! Sharing within one process, on the simulator.

mod events;
mod offers;
mod once;
mod queues;
mod registered;
#[cfg(not(miri))]
mod signals;
mod windows;

use crate::driver::sim::Held;
use crate::driver::{
    Access, Call, Code, FabricHandle, HandleType, HandleTypes, Location, NodeId, ShareableHandle,
};
use crate::per_driver::lock;
use crate::topology::Share;
use crate::vmm::PhysicalMemory;
use crate::{BootId, Description, ImportOptions, Origin, Shared, best_handle_types, import::PARTS};
use crate::{Buffer, Driver, Machine, Memory};
use egmem_core::Error;

const MIB: u64 = 1 << 20;

fn driver() -> Driver {
    let machine = Machine {
        imex_channel: true,
        ..Machine::gh200x4()
    };
    Driver::simulated(machine).unwrap()
}

fn held(driver: &Driver) -> Held {
    driver.sim().unwrap().held()
}

fn count(driver: &Driver, call: Call) -> u64 {
    driver.sim().unwrap().count(call)
}

/// Two parts, on two nodes.
fn shared(driver: &Driver) -> Shared {
    let shares = [(0, 4 * MIB), (1, 3 * MIB)].map(|(node, bytes)| Share {
        node: NodeId(node),
        bytes,
    });
    Buffer::spread(&shares)
        .shareable()
        .allocate(driver)
        .unwrap()
        .into()
}

fn fds(shared: &Shared) -> Vec<ShareableHandle> {
    shared.export(HandleType::PosixFd).unwrap()
}

fn ours() -> ImportOptions {
    ImportOptions::new().origin(Origin::User(1))
}

#[test]
fn both_ways_the_same_bytes() {
    let driver = driver();
    let before = held(&driver);
    {
        let shared = shared(&driver);
        assert_eq!((shared.len(), shared.padded()), (7 * MIB, 8 * MIB));
        let description = shared.describe(Access::ReadWrite).unwrap();
        for via in [HandleType::PosixFd, HandleType::Fabric] {
            let handles = shared.export(via).unwrap();
            assert_eq!(handles.len(), 2);
            let imported = ours().import(&driver, &description, handles).unwrap();
            assert_eq!(imported.via(), via);
            assert_eq!(imported.len(), 7 * MIB);
            assert_eq!(imported.description(), &description);
            imported.put(5 * MIB, 7_u64).unwrap();
            let buffer = shared.buffer().unwrap();
            assert_eq!(buffer.get::<u64>(5 * MIB).unwrap(), 7);
            for gpu in 0..4 {
                let access = imported.access(Location::Device(gpu)).unwrap();
                assert_eq!(access, Access::ReadWrite);
            }
            // Words in the padding can be read and written, other bytes cannot.
            assert!(imported.get::<u64>(7 * MIB).is_err());
            imported.put_word(8 * MIB - 8, 9).unwrap();
            assert_eq!(shared.word(8 * MIB - 8).unwrap(), 9);
            shared.put_word(7 * MIB, 10).unwrap();
            assert_eq!(imported.word(7 * MIB).unwrap(), 10);
            assert!(imported.word(8 * MIB - 7).is_err());
        }
    }
    assert_eq!(held(&driver), before);
}

#[test]
fn memory_without_a_mapping_is_shared_too() {
    let driver = driver();
    let physical = |node| {
        PhysicalMemory::options(NodeId(node))
            .handle_types(HandleTypes::POSIX_FD)
            .create(&driver, 2 * MIB)
            .unwrap()
    };
    for len in [0, 2 * MIB - 1, 4 * MIB + 1] {
        assert!(Shared::from_physical(vec![physical(0), physical(1)], len).is_err());
    }
    assert!(Shared::from_physical(Vec::new(), 1).is_err());
    let shared = Shared::from_physical(vec![physical(0), physical(1)], 3 * MIB).unwrap();
    assert_eq!(shared.handle_types(), HandleTypes::POSIX_FD);
    let description = shared.describe(Access::ReadWrite).unwrap();
    assert_eq!(held(&driver).mappings, 0);
    shared.put_word(3 * MIB, 5).unwrap();
    assert_eq!(held(&driver).mappings, 1, "only the part is mapped");
    assert!(shared.word(4 * MIB).is_err());
    let imported = ours().import(&driver, &description, fds(&shared)).unwrap();
    assert_eq!(imported.word(3 * MIB).unwrap(), 5);
    drop((imported, shared));
    assert!(held(&driver).is_empty(), "{}", held(&driver));
}

/// Drivers count exports: see docs/driver-behaviour.md.
#[test]
fn fds_are_exported_once() {
    let driver = driver();
    let shared = shared(&driver);
    let exports = || {
        driver
            .sim()
            .unwrap()
            .count(Call::MemExportToShareableHandle)
    };
    let before = exports();
    let all: Vec<_> = (0..300).map(|_| fds(&shared)).collect();
    assert_eq!(exports() - before, all[0].len() as u64);
}

#[test]
fn access_is_limited_to_the_description() {
    let driver = driver();
    let shared = shared(&driver);
    let description = shared.describe(Access::Read).unwrap();
    let import = |options: ImportOptions| options.import(&driver, &description, fds(&shared));
    for options in [ours(), ours().access_by([Location::Device(0)])] {
        let imported = import(options).unwrap();
        assert_eq!(imported.access(Location::Device(0)).unwrap(), Access::Read);
        assert_eq!(imported.get::<u64>(0).unwrap(), 0);
        let error = imported.put(0, 1_u8).unwrap_err();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    }
    for options in [
        ours().access(Location::Host, Access::ReadWrite),
        ours().access(Location::Device(0), Access::ReadWrite),
    ] {
        let error = import(options).unwrap_err();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    }
    let imported = import(ours().access(Location::Host, Access::None)).unwrap();
    assert!(imported.cpu().is_err());
    assert!(shared.describe(Access::None).is_err());
}

#[test]
fn wrong_descriptions_and_handles_are_refused_and_leave_nothing() {
    let driver = driver();
    let shared = shared(&driver);
    let description = shared.describe(Access::ReadWrite).unwrap();
    let before = held(&driver);
    let refused = |description: &Description, handles| {
        let error = ours().import(&driver, description, handles).unwrap_err();
        assert_eq!(held(&driver), before, "{error}");
        error
    };
    for bytes in [2 * MIB, 8 * MIB, 1 << 40, 1 << 62] {
        let mut wrong = description.clone();
        wrong.parts[1].bytes = bytes;
        wrong.len = 4 * MIB + 1;
        refused(&wrong, fds(&shared));
        // It does not block the right one.
        drop(ours().import(&driver, &description, fds(&shared)).unwrap());
    }
    let mut odd = description.clone();
    odd.parts[0].bytes = 3 * MIB;
    refused(&odd, fds(&shared));
    let mut handles = fds(&shared);
    handles.pop();
    refused(&description, handles);
    refused(&description, Vec::new());
    let mut handles = fds(&shared);
    handles[1] = shared.export(HandleType::Fabric).unwrap().remove(0);
    refused(&description, handles);
    let mut handles = fds(&shared);
    let null = std::fs::File::open("/dev/null").unwrap();
    handles[1] = ShareableHandle::PosixFd(null.into());
    assert_eq!(refused(&description, handles).code(), Some(Code::UNKNOWN));
    let garbage = || ShareableHandle::Fabric(FabricHandle::from_bytes(&[7; 64]));
    refused(&description, vec![garbage(), garbage()]);
    for call in [
        Call::MemImportFromShareableHandle,
        Call::MemGetAllocationPropertiesFromHandle,
        Call::MemAddressReserve,
        Call::MemMap,
        Call::MemSetAccess,
    ] {
        driver.sim().unwrap().fail(call, 1, Code::OUT_OF_MEMORY);
        let error = refused(&description, fds(&shared));
        assert_eq!(error.code(), Some(Code::OUT_OF_MEMORY));
    }
    assert_eq!(lock(&PARTS.of(&driver)).len(), 0);
}

#[test]
fn a_gpus_memory_is_granted_to_the_gpus_that_reach_it() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let buffer = Buffer::on(Location::Device(1))
        .bytes(2 * MIB)
        .shareable()
        .allocate(&driver)
        .unwrap();
    let shared = Shared::from(buffer);
    let description = shared.describe(Access::ReadWrite).unwrap();
    let imported = ours().import(&driver, &description, fds(&shared)).unwrap();
    assert_eq!(imported.location(), Location::Device(1));
    assert!(imported.cpu().is_err());
    let access = imported.access(Location::Device(1)).unwrap();
    assert_eq!(access, Access::ReadWrite);
    // The CPU cannot reach it on this machine.
    assert!(shared.word(0).is_err());
}

#[test]
fn the_best_types_come_with_the_reason_against_others() {
    let both = HandleTypes::FABRIC | HandleTypes::POSIX_FD;
    let node = Location::HostNuma(0);
    let best = best_handle_types(&driver(), node).unwrap();
    assert_eq!((best.handle_types, best.no_fabric), (both, None));
    let h200 = Driver::simulated(Machine::h200x8()).unwrap();
    let best = best_handle_types(&h200, node).unwrap();
    assert_eq!(best.handle_types, HandleTypes::POSIX_FD);
    let reason = best.no_fabric.unwrap();
    assert!(matches!(reason, Error::NoImexChannel { .. }), "{reason}");
    assert!(best_handle_types(&h200, Location::HostNuma(7)).is_err());
    let buffer = Buffer::on(node)
        .bytes(1)
        .shareable()
        .allocate(&h200)
        .unwrap();
    let error = Shared::from(buffer).export(HandleType::Fabric).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
}
