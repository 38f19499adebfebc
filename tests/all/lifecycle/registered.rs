//! Registered pages as the memory of buffers.

use std::ops::ControlFlow;
use std::sync::Arc;

use egmem::backing::Why;
use egmem::driver::{Access, AccessDesc, Call, Code, HandleType, HandleTypes, Location};
use egmem::ledger::{AllocPath, Located, locate};
use egmem::pinned::DeviceMemory;
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::vmm::{Mapping, PhysicalMemory, Reservation};
use egmem::{Backing, Buffer, BufferOptions, Driver, Error, Growth, Machine, Memory, Stream};

use crate::lifecycle::{MIB, last, node, nothing_held};

/// Options for registered memory in chunks of 2 MiB.
fn registered(driver: &Driver) -> BufferOptions {
    Buffer::on(node(driver, 0))
        .backing(Backing::Registered)
        .growth(Growth::steady().chunk(2 * MIB))
        .bytes(7 * MIB + 8)
}

fn open_to_all(driver: &Driver) -> Vec<AccessDesc> {
    let gpus = (0..driver.device_count().unwrap()).map(Location::Device);
    gpus.chain([Location::Host])
        .map(AccessDesc::read_write)
        .collect()
}

pub fn registered_chunks_are_one_range(driver: &Driver) {
    let buffer = registered(driver).allocate(driver).unwrap();
    assert_eq!(buffer.backing().backing, Backing::Registered);
    assert_eq!((buffer.physical().len(), buffer.padded()), (4, 8 * MIB));
    assert_eq!(buffer.location(), node(driver, 0).into());
    for gpu in [0, last(driver)] {
        let prover = Prover::new(driver, gpu).unwrap();
        prover.prove(&buffer, &buffer.cpu().unwrap(), 5).unwrap();
    }
    let located = locate(driver, buffer.device_ptr().add(5 * MIB)).unwrap();
    let Located::Allocation {
        allocation: entry, ..
    } = located
    else {
        panic!("{located:?}");
    };
    assert_eq!((entry.path, entry.bytes), (AllocPath::Registered, 8 * MIB));
    assert_eq!(entry.backing.as_ref(), Some(buffer.backing()));
    assert!(format!("{buffer:?}").contains("Registered"));
    drop(buffer);
    nothing_held(driver);
}

pub fn copies_end_at_borders_of_registrations(driver: &Driver) {
    let gpu = last(driver);
    let buffer = registered(driver).allocate(driver).unwrap();
    let stream = Stream::new(driver, gpu).unwrap();
    let device = DeviceMemory::new(driver, gpu, buffer.len()).unwrap();
    write_pattern(&buffer.cpu().unwrap(), 3).unwrap();
    stream.copy(&device, 0, &buffer, 0, buffer.len()).unwrap();
    stream.fill(&buffer, 0, buffer.len(), 9).unwrap();
    assert_eq!(buffer.get::<u8>(5 * MIB), Ok(9));
    stream.copy(&buffer, 0, &device, 0, buffer.len()).unwrap();
    check_pattern(&buffer.cpu().unwrap(), 3).unwrap();
    // SAFETY: both are the test's, and large enough.
    let across = unsafe { stream.copy_async(device.device_ptr(), buffer.device_ptr(), 3 * MIB) };
    assert_eq!(across.unwrap_err().code(), Some(Code::INVALID_VALUE));
    drop((buffer, device, stream));
    nothing_held(driver);
}

pub fn private_pages_have_one_mapping(driver: &Driver) {
    let options = PhysicalMemory::options(node(driver, 0)).backing(Backing::Registered);
    let memory = options.create(driver, MIB).unwrap();
    assert_eq!(
        (memory.backing(), memory.handle()),
        (Backing::Registered, None)
    );
    let mapping = memory.map().unwrap();
    let second = memory.map().unwrap_err();
    assert!(
        matches!(second, Error::InvalidArgument { what: "memory", .. }),
        "{second}"
    );
    mapping.unmap().unwrap();
    let mut mapping = memory.map().unwrap();
    drop(memory);
    mapping.set_access(&open_to_all(driver)).unwrap();
    mapping.cpu().unwrap().put(0, 1_u64).unwrap();
    drop(mapping);
    nothing_held(driver);
}

pub fn each_of_several_mappings_has_the_access_that_was_granted(driver: &Driver) {
    let place = node(driver, 0);
    let addresses = Reservation::options().backing(Backing::Registered);
    let addresses = Arc::new(addresses.reserve(driver, 4 * MIB).unwrap());
    let options = PhysicalMemory::options(place).backing(Backing::Registered);
    let [a, b] = [(); 2].map(|()| options.clone().create(driver, 2 * MIB).unwrap());
    let mut a = addresses.map(0, &a).unwrap();
    let mut b = addresses.map(2 * MIB, &b).unwrap();
    let host = AccessDesc::read_write(Location::Host);
    a.set_access(&[host]).unwrap();
    b.set_access(&open_to_all(driver)).unwrap();
    let none = [Location::Host, Location::Device(0)].map(|at| AccessDesc::new(at, Access::None));
    // Refused for the second one, because a GPU has it, after the first one was changed.
    Mapping::set_access_together(&mut [&mut a, &mut b], &none).unwrap_err();
    assert!(a.cpu().is_err(), "its pages may not be read");
    b.cpu().unwrap().put(0, 1_u64).unwrap();
    drop((a, b, addresses));
    nothing_held(driver);
}

pub fn shareable_pages_have_many_mappings_and_importers(driver: &Driver) {
    let options = PhysicalMemory::options(node(driver, 0))
        .handle_types(HandleTypes::POSIX_FD)
        .backing(Backing::Registered);
    let memory = options.create(driver, 2 * MIB).unwrap();
    let fd = memory.export(HandleType::PosixFd).unwrap();
    let mut first = memory.map().unwrap();
    first.set_access(&open_to_all(driver)).unwrap();
    let wrong = PhysicalMemory::import(driver, &fd, 4 * MIB).unwrap_err();
    assert!(
        matches!(wrong, Error::InvalidArgument { what: "size", .. }),
        "{wrong}"
    );
    let imported = PhysicalMemory::import(driver, &fd, 2 * MIB).unwrap();
    assert_eq!(imported.backing(), Backing::Registered);
    assert_eq!(imported.location(), node(driver, 0).into());
    assert!(imported.export(HandleType::PosixFd).is_err());
    let mut second = imported.map().unwrap();
    second.set_access(&open_to_all(driver)).unwrap();
    drop((memory, imported));
    let prover = Prover::new(driver, last(driver)).unwrap();
    prover.prove(&second, &first.cpu().unwrap(), 8).unwrap();
    drop((first, second, fd, prover));
    nothing_held(driver);
}

pub fn what_registered_memory_cannot_be_is_refused(driver: &Driver) {
    let refused = |options: BufferOptions, why: Why| {
        let asked = options.clone().allocate(driver).unwrap_err();
        assert!(
            matches!(
                asked,
                Error::InvalidArgument {
                    what: "backing",
                    ..
                }
            ),
            "{asked}"
        );
        assert!(asked.to_string().contains(&why.to_string()), "{asked}");
        let chosen = options.backing(Backing::Auto).allocate(driver).unwrap();
        assert_eq!(
            (chosen.backing().backing, &chosen.backing().why),
            (Backing::Driver, &why)
        );
    };
    let gpu = Location::Device(0);
    refused(registered(driver).access(gpu, Access::Read), Why::Access);
    refused(
        registered(driver).access(Location::Host, Access::Read),
        Why::Access,
    );
    let on_gpu = Buffer::on(gpu).backing(Backing::Registered).bytes(MIB);
    refused(on_gpu, Why::Location);
    let mut buffer = registered(driver).allocate(driver).unwrap();
    for access in [Access::Read, Access::None] {
        let error = buffer
            .set_access(&[AccessDesc::new(gpu, access)])
            .unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "access", .. }),
            "{error}"
        );
        assert_eq!(buffer.access(gpu), Ok(Access::ReadWrite));
    }
    // The CPU's access is its page table's.
    buffer
        .set_access(&[AccessDesc::new(Location::Host, Access::Read)])
        .unwrap();
    assert!(buffer.put(0, 1_u8).is_err());
    assert_eq!(buffer.get::<u8>(0), Ok(0));
    drop(buffer);
    nothing_held(driver);
}

pub fn registered_memory_that_is_not_wanted_is_given_back(driver: &Driver) {
    for chunks in 1..4 {
        let mut left = chunks;
        let error = registered(driver).allocate_with(driver, |_| {
            left -= 1;
            match left {
                0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        });
        let (done, total) = (chunks * 2 * MIB, 8 * MIB);
        assert_eq!(error.unwrap_err(), Error::Cancelled { done, total });
        nothing_held(driver);
    }
}

pub fn addresses_are_for_one_kind_of_memory(driver: &Driver) {
    let kinds = [Backing::Driver, Backing::Registered];
    let memories = kinds.map(|backing| {
        let options = PhysicalMemory::options(node(driver, 0)).backing(backing);
        options.create(driver, 2 * MIB).unwrap()
    });
    for backing in kinds {
        let options = Reservation::options().alignment(1 << 30).backing(backing);
        let addresses = Arc::new(options.reserve(driver, 6 * MIB).unwrap());
        assert_eq!(addresses.backing(), backing);
        assert_eq!(addresses.start().0 % (1 << 30), 0);
        for memory in &memories {
            let mapped = addresses.map(2 * MIB, memory);
            if memory.backing() != backing {
                let error = mapped.unwrap_err();
                assert!(matches!(
                    error,
                    Error::InvalidArgument {
                        what: "reservation",
                        ..
                    }
                ));
                continue;
            }
            let mapped = mapped.unwrap();
            let other = PhysicalMemory::options(node(driver, 0)).backing(backing);
            let other = other.create(driver, 4 * MIB).unwrap();
            assert!(
                addresses.map(0, &other).is_err(),
                "something is mapped there"
            );
            drop(mapped);
            drop(addresses.map(0, &other).unwrap());
        }
    }
    drop(memories);
    nothing_held(driver);
}

#[test]
fn wrong_chunks_are_refused_before_registered_memory_is_tried() {
    let driver = Driver::simulated(Machine::h200x8()).unwrap();
    let auto = || {
        Buffer::on(node(&driver, 0))
            .bytes(4 * MIB)
            .backing(Backing::Auto)
    };
    for (what, options) in [
        ("chunk", auto().chunk(3 * MIB)),
        ("chunk", auto().chunk(0)),
        ("growth", auto().growth(Growth::steady().chunk(3 * MIB))),
    ] {
        let error = options.shareable().allocate(&driver).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: refused, .. } if refused == what),
            "{error}"
        );
    }
    let sim = driver.sim().unwrap();
    for call in [Call::MemHostRegister, Call::MemCreate] {
        assert_eq!(sim.count(call), 0, "{call}");
    }
    auto().chunk(2 * MIB).allocate(&driver).unwrap();
    assert!(sim.count(Call::MemHostRegister) > 0);
}

#[test]
fn a_failed_first_grant_opens_nothing_to_the_cpu() {
    let driver = &Driver::simulated(Machine::h200x8()).unwrap();
    let memory = PhysicalMemory::options(node(driver, 0))
        .backing(Backing::Registered)
        .create(driver, 2 * MIB)
        .unwrap();
    let mut mapping = memory.map().unwrap();
    let nothing = |mapping: &egmem::vmm::Mapping| {
        assert_eq!(mapping.access(Location::Host), Ok(Access::None));
        assert!(mapping.cpu().is_err());
    };
    nothing(&mapping);
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemHostRegister, 1, Code::OUT_OF_MEMORY);
    let error = mapping.set_access(&open_to_all(driver)).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    nothing(&mapping);
    mapping.set_access(&open_to_all(driver)).unwrap();
    mapping.cpu().unwrap().put(0, 1_u64).unwrap();
    // A later failure leaves what is there.
    mapping
        .set_access(&[AccessDesc::new(Location::Device(0), Access::None)])
        .unwrap_err();
    assert_eq!(mapping.cpu().unwrap().get::<u64>(0).unwrap(), 1);
    drop((mapping, memory));
    nothing_held(driver);
}

#[test]
fn registered_memory_is_shareable_by_fds_where_fabric_handles_work() {
    let mut machine = Machine::gh200();
    machine.imex_channel = true;
    let driver = &Driver::simulated(machine).unwrap();
    let buffer = registered(driver).shareable().allocate(driver).unwrap();
    assert_eq!(buffer.backing().backing, Backing::Registered);
    let types = buffer.physical()[0].props().handle_types;
    assert_eq!(types, HandleTypes::POSIX_FD);
    let heap = egmem::Heap::on(node(driver, 0)).limit(64 * MIB);
    let heap = heap.backing(Backing::Registered).shareable();
    let heap = heap.build(driver).unwrap();
    assert_eq!(heap.backing().backing, Backing::Registered);
    let auto = registered(driver).shareable().backing(Backing::Auto);
    assert_eq!(auto.allocate(driver).unwrap().backing().why, Why::Fabric);
}
