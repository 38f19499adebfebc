//! Physical memory, mappings and their access.

use std::sync::Arc;

use egmem::driver::sim::Machine;
use egmem::driver::{Access, Call, Code, HandleType, HandleTypes, Location, NodeId};
use egmem::vmm::{PhysicalMemory, Reservation};
use egmem::{Driver, Error};

use crate::lifecycle::{MIB, grace, grant, last, node, nothing_held};

fn shareable(driver: &Driver, gpu: i32) -> PhysicalMemory {
    PhysicalMemory::options(node(driver, gpu))
        .handle_types(HandleTypes::POSIX_FD)
        .create(driver, 2 * MIB)
        .unwrap()
}

pub fn exported_memory_outlives_its_maker(driver: &Driver) {
    let physical = shareable(driver, last(driver));
    assert!(matches!(
        physical.export(HandleType::Fabric),
        Err(Error::InvalidArgument {
            what: "handle type",
            ..
        })
    ));
    let shared = physical.export(HandleType::PosixFd).unwrap();
    let mut first = physical.map().unwrap();
    first
        .set_access(&[grant(Location::Host, Access::ReadWrite)])
        .unwrap();
    first.cpu().unwrap().put(8, 77_u64).unwrap();
    drop((first, physical));

    let imported = PhysicalMemory::import(driver, &shared, 2 * MIB).unwrap();
    assert_eq!(imported.location(), node(driver, last(driver)).into());
    assert_eq!(imported.props().handle_types, HandleTypes::NONE);
    let mut mapping = imported.map().unwrap();
    drop((imported, shared));
    mapping
        .set_access(&[grant(Location::Host, Access::Read)])
        .unwrap();
    assert_eq!(mapping.cpu().unwrap().get::<u64>(8).unwrap(), 77);
    drop(mapping);
    nothing_held(driver);
}

pub fn import_of_the_wrong_size_is_refused(driver: &Driver) {
    let physical = shareable(driver, 0);
    let shared = physical.export(HandleType::PosixFd).unwrap();
    assert!(PhysicalMemory::import(driver, &shared, MIB).is_err());
    let larger = PhysicalMemory::import(driver, &shared, 4 * MIB).unwrap();
    assert!(larger.map().is_err());
    drop((larger, physical, shared));
    nothing_held(driver);
}

/// A refusal because of too many references names the cause and the remedy.
#[test]
fn memory_that_is_shared_too_often_is_the_gpus_alone() {
    let mut machine = Machine::h200x8();
    machine.memory_references = Some(3);
    let driver = Driver::simulated(machine).unwrap();
    let physical = shareable(&driver, 0);
    let _shared = physical.export(HandleType::PosixFd).unwrap();
    let everyone = [
        grant(Location::Host, Access::ReadWrite),
        grant(Location::Device(0), Access::ReadWrite),
    ];
    let mut granted = [(); 2].map(|()| physical.map().unwrap());
    for mapping in &mut granted {
        mapping.set_access(&everyone).unwrap();
    }
    let mut refused = physical.map().unwrap();
    for access in [&everyone[..], &everyone[..1]] {
        let error = refused.set_access(access).unwrap_err();
        assert!(matches!(error, Error::TooManyReferences { .. }), "{error}");
        assert_eq!(error.code(), Some(Code::INVALID_VALUE));
        assert!(error.remedy().contains("duplicates"));
        assert!(refused.cpu().is_err());
    }
    refused.set_access(&everyone[1..]).unwrap();
    let [first, _second] = granted;
    drop(first);
    refused.set_access(&everyone).unwrap();
    refused.cpu().unwrap().put(0, 1_u8).unwrap();
}

/// The driver's INVALID_VALUE is not always the host's fault, and a refusal changes nothing.
#[test]
fn a_refusal_that_is_not_the_hosts_keeps_its_code_and_the_hosts_access() {
    let driver = grace();
    let sim = driver.sim().unwrap();
    let physical = shareable(&driver, 0);
    let mut mapping = physical.map().unwrap();
    for before in [Access::None, Access::Read] {
        mapping
            .set_access(&[grant(Location::Host, before)])
            .unwrap();
        sim.fail(Call::MemSetAccess, 1, Code::INVALID_VALUE);
        let error = mapping
            .set_access(&[grant(Location::Host, Access::ReadWrite)])
            .unwrap_err();
        assert!(matches!(error, Error::Driver(_)), "{error}");
        assert_eq!(mapping.access(Location::Host).unwrap(), before);
        assert_eq!(mapping.cpu().is_ok(), before == Access::Read);
    }
}

pub fn mappings_lie_side_by_side_in_one_reservation(driver: &Driver) {
    let range = Reservation::options()
        .alignment(1 << 30)
        .reserve(driver, 8 * MIB)
        .unwrap();
    assert_eq!(range.start().0 % (1 << 30), 0);
    let range = Arc::new(range);
    let physical = PhysicalMemory::options(node(driver, 0))
        .create(driver, 2 * MIB)
        .unwrap();
    let mut low = range.map(0, &physical).unwrap();
    let mut high = range.map(2 * MIB, &physical).unwrap();
    assert!(range.map(2 * MIB, &physical).is_err(), "over a mapping");
    assert!(matches!(
        range.map(7 * MIB, &physical),
        Err(Error::OutOfRange { .. })
    ));
    for mapping in [&mut low, &mut high] {
        mapping
            .set_access(&[grant(Location::Host, Access::ReadWrite)])
            .unwrap();
    }
    low.cpu().unwrap().put(0, 123_u32).unwrap();
    assert_eq!(high.cpu().unwrap().get::<u32>(0).unwrap(), 123);
}

/// The host has many names; the CPU's windows must not believe an overruled one.
#[test]
fn the_last_word_on_the_hosts_access_counts() {
    let driver = grace();
    let physical = PhysicalMemory::options(NodeId(0))
        .create(&driver, MIB)
        .unwrap();
    let mut mapping = physical.map().unwrap();
    for (first, last) in [
        (Access::ReadWrite, Access::None),
        (Access::None, Access::Read),
        (Access::Read, Access::ReadWrite),
    ] {
        mapping
            .set_access(&[
                grant(Location::HostNuma(0), first),
                grant(Location::Device(0), Access::ReadWrite),
                grant(Location::Host, last),
            ])
            .unwrap();
        assert_eq!(mapping.access(Location::Host).unwrap(), last);
        let written = mapping.cpu().and_then(|cpu| cpu.put(0, 1_u8));
        assert_eq!(written.is_ok(), last == Access::ReadWrite);
    }
}
