//! Sharing within one process, on the simulator.

use std::collections::BTreeSet;

use proptest::prelude::*;

use crate::driver::sim::Held;
use crate::driver::{
    Access, Call, Code, FabricHandle, HandleType, HandleTypes, Location, NodeId, ShareableHandle,
};
use crate::share::{
    BootId, Description, ImportOptions, Origin, Shared, best_handle_types, imports::Imports,
};
use crate::topology::Share;
use crate::vmm::PhysicalMemory;
use crate::{Buffer, Driver, Error, Machine, Memory};

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
            // In the padding, where only words are read and written.
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
fn the_same_memory_is_imported_once() {
    let driver = driver();
    let shared = shared(&driver);
    let description = shared.describe(Access::ReadWrite).unwrap();
    let before = held(&driver);
    let import =
        |options: ImportOptions| options.import(&driver, &description, fds(&shared)).unwrap();
    let first = import(ours());
    let second = import(ours());
    assert_eq!(first.device_ptr(), second.device_ptr());
    let only_gpu_1 = ours().access_by([Location::Device(1)]);
    let third = import(only_gpu_1.clone());
    assert_ne!(first.device_ptr(), third.device_ptr());
    assert_eq!(third.access(Location::Device(0)).unwrap(), Access::None);
    // The order of words and their form do not matter.
    let same = ours()
        .access(Location::Device(1), Access::ReadWrite)
        .access(NodeId(0), Access::ReadWrite);
    assert_eq!(import(same).device_ptr(), third.device_ptr());
    assert_eq!(count(&driver, Call::MemImportFromShareableHandle), 2);
    drop(first);
    second.put(0, 1_u8).unwrap();
    drop((second, third));
    assert_eq!(held(&driver), before);
    assert_eq!(Imports::of(&driver).parts.len(), 0);
    assert_eq!(Imports::of(&driver).mapped.len(), 0);
    // As other memory it would be imported anew.
    let old = import(ours());
    shared.renew_identity();
    let renewed = shared.describe(Access::ReadWrite).unwrap();
    let new = ours().import(&driver, &renewed, fds(&shared)).unwrap();
    assert_ne!(new.device_ptr(), old.device_ptr());
}

/// A mapping that does without the host is not for somebody who asks for it by name.
#[test]
fn a_mapping_without_the_host_is_not_shared_with_who_needs_it() {
    let driver = driver();
    let shared = shared(&driver);
    let mut description = shared.describe(Access::ReadWrite).unwrap();
    for part in &mut description.parts {
        // As of another node.
        part.identity.boot = BootId::from_bytes([7; 16]);
    }
    let import =
        |options: ImportOptions| options.import(&driver, &description, fds(&shared)).unwrap();
    driver
        .sim()
        .unwrap()
        .fail(Call::MemSetAccess, 1, Code::INVALID_VALUE);
    let gpus_alone = import(ours());
    assert!(gpus_alone.cpu().is_err());
    let with_host = import(ours().access(Location::Host, Access::ReadWrite));
    with_host.put(0, 1_u8).unwrap();
}

/// They are not even looked at.
#[test]
fn handles_of_what_is_imported_already_are_closed() {
    let driver = driver();
    let shared = shared(&driver);
    let description = shared.describe(Access::ReadWrite).unwrap();
    let _first = ours().import(&driver, &description, fds(&shared)).unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    let handles =
        [writer.try_clone().unwrap(), writer].map(|end| ShareableHandle::PosixFd(end.into()));
    let _second = ours()
        .import(&driver, &description, handles.into())
        .unwrap();
    // The pipe's end comes when every copy of its other end is closed.
    assert_eq!(std::io::Read::read(&mut reader, &mut [0]).unwrap(), 0);
}

/// A peer that claims another's identity gets its own memory, not the other's.
#[test]
fn who_claims_anothers_identity_gets_only_its_own() {
    let driver = driver();
    let (one, other) = (shared(&driver), shared(&driver));
    let description = one.describe(Access::ReadWrite).unwrap();
    let trusted = ours().import(&driver, &description, fds(&one)).unwrap();
    for options in [
        ImportOptions::new(),
        ImportOptions::new().origin(Origin::User(2)),
        ImportOptions::new().origin(Origin::Peer("1".into())),
    ] {
        let liar = options.import(&driver, &description, fds(&other)).unwrap();
        liar.put(0, 0xbad_u64).unwrap();
        assert_eq!(trusted.get::<u64>(0).unwrap(), 0);
        assert_eq!(other.word(0).unwrap(), 0xbad);
        other.put_word(0, 0).unwrap();
    }
}

#[test]
fn threads_that_import_at_once_import_once() {
    let driver = driver();
    let shared = shared(&driver);
    let description = shared.describe(Access::ReadWrite).unwrap();
    let before = held(&driver);
    let barrier = std::sync::Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                barrier.wait();
                let imported = ours().import(&driver, &description, fds(&shared)).unwrap();
                // Nobody drops before all have one.
                barrier.wait();
                imported.put(0, 1_u8).unwrap();
            });
        }
    });
    assert_eq!(count(&driver, Call::MemImportFromShareableHandle), 2);
    assert_eq!(held(&driver), before);
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
        // It does not stand in the way of what is right.
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
    assert_eq!(Imports::of(&driver).parts.len(), 0);
}

#[test]
fn a_gpus_memory_goes_to_those_who_reach_it() {
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

/// What an import may share with others, in the property below.
type Kind = (usize, bool, bool);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Whatever is imported and dropped in whatever order: one handle for each memory and origin,
    /// one mapping for each access.
    #[test]
    fn imports_are_counted(steps in proptest::collection::vec(
        (any::<bool>(), 0..2_usize, any::<bool>(), any::<bool>(), any::<prop::sample::Index>()),
        0..40,
    )) {
        let driver = driver();
        let memory: Vec<Shared> = [0, 1].map(|node| {
            let options = Buffer::on(NodeId(node)).bytes(MIB);
            options.handle_types(HandleTypes::POSIX_FD).allocate(&driver).unwrap().into()
        }).into();
        let before = held(&driver);
        let mut alive: Vec<(Kind, crate::share::ImportedBuffer)> = Vec::new();
        for (drops, index, gpus, other, which) in steps {
            if drops && !alive.is_empty() {
                alive.swap_remove(which.index(alive.len()));
            } else {
                let mut options = ImportOptions::new().origin(Origin::User(other.into()));
                if !gpus {
                    options = options.access_by([Location::Device(0)]);
                }
                let shared = &memory[index];
                let description = shared.describe(Access::ReadWrite).unwrap();
                let imported = options.import(&driver, &description, fds(shared)).unwrap();
                imported.put(0, index as u64 + 1).unwrap();
                alive.push(((index, other, gpus), imported));
            }
            let parts: BTreeSet<_> = alive.iter().map(|(kind, _)| (kind.0, kind.1)).collect();
            let maps: BTreeSet<_> = alive.iter().map(|(kind, _)| *kind).collect();
            let now = held(&driver);
            prop_assert_eq!(now.physical_handles - before.physical_handles, parts.len() as u64);
            prop_assert_eq!(now.mappings - before.mappings, maps.len());
            prop_assert_eq!(now.reservations - before.reservations, maps.len());
            for (kind, imported) in &alive {
                prop_assert_eq!(imported.get::<u64>(0).unwrap(), kind.0 as u64 + 1);
            }
        }
    }
}
