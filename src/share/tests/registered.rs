//! Registered memory, which importers map and register.

use super::*;
use crate::GrowingImport;
use crate::memory::AccessChecks;
use egmem_core::{Backing, Growth, Stream};

fn discrete() -> Driver {
    Driver::simulated(Machine::h200x8()).unwrap()
}

/// Chunks of 2 MiB.
fn chunks(driver: &Driver, backing: Backing, bytes: u64) -> Shared {
    let buffer = Buffer::on(NodeId(0))
        .handle_types(HandleTypes::POSIX_FD)
        .backing(backing)
        .growth(Growth::steady().chunk(2 * MIB))
        .bytes(bytes)
        .allocate(driver)
        .unwrap();
    Shared::from(buffer)
}

fn registered(driver: &Driver, bytes: u64) -> Shared {
    chunks(driver, Backing::Registered, bytes)
}

fn import(driver: &Driver, shared: &Shared, access: Access) -> crate::ImportedBuffer {
    let description = shared.describe(access).unwrap();
    ours().import(driver, &description, fds(shared)).unwrap()
}

fn is_refused(result: egmem_core::Result<impl std::fmt::Debug>, what: &str) {
    match result.unwrap_err() {
        Error::InvalidArgument { what: found, .. } => assert_eq!(found, what),
        other => panic!("{other}"),
    }
}

#[test]
fn it_is_imported_once_and_windows_share_its_registration() {
    let driver = discrete();
    let shared = registered(&driver, 7 * MIB);
    assert_eq!(shared.handle_types(), HandleTypes::POSIX_FD);
    let window = shared.window(3 * MIB, 4096).unwrap();
    let registrations = || count(&driver, Call::MemHostRegister);
    let whole = import(&driver, &shared, Access::ReadWrite);
    let before = registrations();
    let again = import(&driver, &shared, Access::ReadWrite);
    assert_eq!(registrations(), before);
    let first = import(&driver, &window, Access::ReadWrite);
    let second = import(
        &driver,
        &shared.window(2 * MIB, 4096).unwrap(),
        Access::ReadWrite,
    );
    assert_eq!(registrations(), before + 1);
    first.put(8, 5_u64).unwrap();
    assert_eq!(whole.get::<u64>(3 * MIB + 8), Ok(5));
    assert_eq!(again.get::<u64>(3 * MIB + 8), Ok(5));
    shared.put_word(8 * MIB - 8, 9).unwrap();
    assert_eq!(whole.word(8 * MIB - 8), Ok(9));
    for gpu in 0..8 {
        let access = first.access(Location::Device(gpu));
        assert_eq!(access, Ok(Access::ReadWrite));
    }
    // Copies end where chunks do.
    let stream = Stream::new(&driver, 7).unwrap();
    stream.fill(&whole, MIB, 5 * MIB, 7).unwrap();
    assert_eq!(shared.buffer().unwrap().get::<u8>(5 * MIB), Ok(7));
    assert_eq!(whole.of_one_copy(MIB, 5 * MIB), MIB);
    assert_eq!(second.of_one_copy(0, 4096), 4096);
    drop((whole, again, first, second, window, shared, stream));
    assert!(held(&driver).is_empty(), "{}", held(&driver));
}

#[test]
fn memory_without_a_mapping_needs_no_gpu() {
    let driver = discrete();
    let options = PhysicalMemory::options(NodeId(0)).backing(Backing::Registered);
    let options = options.handle_types(HandleTypes::POSIX_FD);
    let create = || options.clone().create(&driver, 2 * MIB).unwrap();
    let shared = Shared::from_physical(vec![create(), create()], 3 * MIB).unwrap();
    shared.put_word(3 * MIB, 5).unwrap();
    let description = shared.describe(Access::ReadWrite).unwrap();
    let cpu = ours().access_by::<Location>([]);
    let imported = cpu.import(&driver, &description, fds(&shared)).unwrap();
    assert_eq!(imported.word(3 * MIB), Ok(5));
    assert_eq!(count(&driver, Call::MemHostRegister), 0);
    let other = PhysicalMemory::options(NodeId(0)).create(&driver, 2 * MIB);
    is_refused(
        Shared::from_physical(vec![create(), other.unwrap()], 4 * MIB),
        "memory",
    );
    drop((imported, shared));
    assert!(held(&driver).is_empty(), "{}", held(&driver));
}

#[test]
fn gpus_write_it_or_have_no_access() {
    let driver = discrete();
    let shared = registered(&driver, 2 * MIB);
    let gpu = Location::Device(0);
    let imported = import(&driver, &shared, Access::Read);
    assert_eq!(imported.access(Location::Host), Ok(Access::Read));
    assert_eq!(imported.access(gpu), Ok(Access::None));
    assert!(imported.put(0, 1_u8).is_err());
    let read = shared.describe(Access::Read).unwrap();
    let write = shared.describe(Access::ReadWrite).unwrap();
    is_refused(
        ours().access_by([gpu]).import(&driver, &read, fds(&shared)),
        "access",
    );
    let one = ours().access(gpu, Access::Read);
    is_refused(one.import(&driver, &write, fds(&shared)), "access");
    // One GPU's access is every GPU's.
    let one = ours().access_by([gpu]);
    let one = one.import(&driver, &write, fds(&shared)).unwrap();
    assert_eq!(one.access(Location::Device(7)), Ok(Access::ReadWrite));
}

#[test]
fn a_description_of_two_kinds_is_refused() {
    let driver = discrete();
    let kinds = [Backing::Registered, Backing::Driver];
    for (first, second) in [(0, 1), (1, 0)] {
        let [first, second] = [first, second].map(|kind| chunks(&driver, kinds[kind], 2 * MIB));
        let before = held(&driver);
        let mut description = first.describe(Access::ReadWrite).unwrap();
        let other = second.describe(Access::ReadWrite).unwrap();
        description.parts.extend(other.parts);
        description.len = 4 * MIB;
        let handles = fds(&first).into_iter().chain(fds(&second)).collect();
        is_refused(ours().import(&driver, &description, handles), "reservation");
        assert_eq!(held(&driver), before);
    }
}

#[test]
fn the_first_part_decides_what_a_growing_import_is() {
    let driver = discrete();
    let kinds = [Backing::Registered, Backing::Driver];
    for (backing, other) in [(kinds[0], kinds[1]), (kinds[1], kinds[0])] {
        let mut all = GrowingImport::reserve(&driver, 8 * MIB).unwrap();
        let add = |all: &mut GrowingImport, backing| {
            let shared = chunks(&driver, backing, 4 * MIB);
            shared.put_word(0, 7).unwrap();
            let description = shared.describe(Access::ReadWrite)?;
            all.add(&description, fds(&shared), &ours())
        };
        add(&mut all, backing).unwrap();
        let start = all.device_ptr();
        is_refused(add(&mut all, other), "reservation");
        add(&mut all, backing).unwrap();
        assert_eq!((all.device_ptr(), all.len()), (start, 8 * MIB));
        assert_eq!(all.cpu().unwrap().get(4 * MIB), Ok(7_u64));
        let one_copy = match backing {
            Backing::Registered => MIB,
            _ => 5 * MIB,
        };
        assert_eq!(all.of_one_copy(MIB, 5 * MIB), one_copy);
        drop(all);
        assert!(held(&driver).is_empty(), "{}", held(&driver));
    }
}
