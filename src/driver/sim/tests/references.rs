//! The limit of a memory's references, through the driver trait.

use super::*;

fn limited(references: u32) -> Driver {
    let mut machine = Machine::h200x8();
    machine.memory_references = Some(references);
    driver(machine)
}

fn create(driver: &Driver) -> PhysicalHandle {
    let at = AllocationProps::at(Location::HostNuma(0)).handle_types(HandleTypes::POSIX_FD);
    driver.mem_create(GRANULE, &at).unwrap()
}

fn set(driver: &Driver, at: DevicePtr, size: u64, who: &[AccessDesc]) -> Code {
    // SAFETY: only this test uses the range.
    code(unsafe { driver.mem_set_access(at, size, who) })
}

const HOST: [AccessDesc; 1] = [AccessDesc {
    location: Location::Host,
    access: Access::ReadWrite,
}];

#[test]
fn cpu_mappings_end_with_their_access_and_when_unmapped() {
    let driver = limited(2);
    let handle = create(&driver);
    let many = [(); 3].map(|()| Mapped::of(&driver, handle, GRANULE));
    let grant = |i: usize, who: &[AccessDesc]| set(&driver, many[i].ptr, GRANULE, who);
    assert_eq!(grant(0, &HOST), Code::SUCCESS);
    assert_eq!(grant(1, &HOST), Code::SUCCESS);
    assert_eq!(
        grant(1, &[desc(Location::Host, Access::Read)]),
        Code::SUCCESS
    );
    let both = [HOST[0], desc(Location::Device(1), Access::ReadWrite)];
    assert_eq!(grant(2, &both), Code::INVALID_VALUE);
    let access = driver.mem_get_access(Location::Device(1), many[2].ptr);
    assert_eq!(access.unwrap(), 0, "a refused call changes nothing");
    assert_eq!(grant(2, &both[1..]), Code::SUCCESS);
    assert_eq!(
        grant(0, &[desc(Location::Host, Access::None)]),
        Code::SUCCESS
    );
    assert_eq!(grant(2, &HOST), Code::SUCCESS);
    assert_eq!(grant(0, &HOST), Code::INVALID_VALUE);
    // SAFETY: only this test uses the range.
    unsafe { driver.mem_unmap(many[1].ptr, GRANULE) }.unwrap();
    assert_eq!(grant(0, &HOST), Code::SUCCESS);
}

#[test]
fn neighbours_are_granted_one_after_another() {
    let driver = limited(3);
    let handle = create(&driver);
    let range = driver.mem_address_reserve(4 * GRANULE, 0, 0).unwrap();
    let at = |i: u64| range.add(i * GRANULE);
    for i in 0..4 {
        // SAFETY: the range is this test's own.
        unsafe { driver.mem_map(at(i), GRANULE, 0, handle) }.unwrap();
    }
    assert_eq!(set(&driver, range, 4 * GRANULE, &HOST), Code::INVALID_VALUE);
    for (i, expected) in [3, 3, 3, 0].into_iter().enumerate() {
        let access = driver.mem_get_access(Location::HostNuma(0), at(i as u64));
        assert_eq!(access.unwrap(), expected);
    }
    assert_eq!(set(&driver, range, 3 * GRANULE, &HOST), Code::SUCCESS);
    assert_eq!(set(&driver, at(3), GRANULE, &HOST), Code::INVALID_VALUE);
}

#[test]
fn an_import_counts_in_every_process_until_it_is_unmapped() {
    // Two simulators share as little state as two processes.
    let (exporter, importer) = (limited(3), limited(3));
    let handle = create(&exporter);
    let own = Mapped::of(&exporter, handle, GRANULE);
    let fd = exporter.mem_export(handle, HandleType::PosixFd).unwrap();
    let imported = importer.mem_import(&fd).unwrap();
    let there = Mapped::of(&importer, imported, GRANULE);
    assert_eq!(set(&importer, there.ptr, GRANULE, &HOST), Code::SUCCESS);
    // The export, the import and the importer's mapping make three.
    assert_eq!(set(&exporter, own.ptr, GRANULE, &HOST), Code::INVALID_VALUE);
    // SAFETY: the test is done with the handle; the mapping keeps the memory.
    unsafe { importer.mem_release(imported) }.unwrap();
    assert_eq!(set(&exporter, own.ptr, GRANULE, &HOST), Code::INVALID_VALUE);
    // SAFETY: the test is done with the mapping.
    unsafe { importer.mem_unmap(there.ptr, GRANULE) }.unwrap();
    assert_eq!(set(&exporter, own.ptr, GRANULE, &HOST), Code::SUCCESS);
    own.give_back(&exporter);
}
