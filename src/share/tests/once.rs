//! The same memory is imported once, for those that may share it.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::import::MAPPED;

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
    // The order of calls and their form do not matter.
    let same = ours()
        .access(Location::Device(1), Access::ReadWrite)
        .access(NodeId(0), Access::ReadWrite);
    assert_eq!(import(same).device_ptr(), third.device_ptr());
    assert_eq!(count(&driver, Call::MemImportFromShareableHandle), 2);
    drop(first);
    second.put(0, 1_u8).unwrap();
    drop((second, third));
    assert_eq!(held(&driver), before);
    assert_eq!(lock(&PARTS.of(&driver)).len(), 0);
    assert_eq!(lock(&MAPPED.of(&driver)).len(), 0);
    // With a new identity it would be imported again.
    let old = import(ours());
    shared.renew_identity();
    let renewed = shared.describe(Access::ReadWrite).unwrap();
    let new = ours().import(&driver, &renewed, fds(&shared)).unwrap();
    assert_ne!(new.device_ptr(), old.device_ptr());
}

/// A caller that requires host access does not get a mapping without it.
#[test]
fn a_mapping_without_the_host_is_not_shared_with_an_import_that_needs_it() {
    let driver = driver();
    let shared = shared(&driver);
    let mut description = shared.describe(Access::ReadWrite).unwrap();
    for part in &mut description.parts {
        // As if from another node.
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

/// Without the host it would be useless.
#[test]
fn who_needs_the_host_asks_for_access_once() {
    let driver = driver();
    let shared = shared(&driver);
    let description = shared.describe(Access::ReadWrite).unwrap();
    let before = count(&driver, Call::MemSetAccess);
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemSetAccess, 1, Code::OUT_OF_MEMORY);
    let refused = ours().import(&driver, &description, fds(&shared));
    assert_eq!(refused.unwrap_err().code(), Some(Code::OUT_OF_MEMORY));
    assert_eq!(count(&driver, Call::MemSetAccess), before + 1);
}

/// They are not even checked.
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
    // The pipe ends when every copy of its other end is closed.
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
                // No thread drops its import before all have one.
                barrier.wait();
                imported.put(0, 1_u8).unwrap();
            });
        }
    });
    assert_eq!(count(&driver, Call::MemImportFromShareableHandle), 2);
    assert_eq!(held(&driver), before);
}

/// The values that decide whether imports share, in the property below.
type Kind = (usize, bool, bool);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// For any order of imports and drops: one handle for each memory and origin, one mapping for each
    /// access.
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
        let mut alive: Vec<(Kind, crate::ImportedBuffer)> = Vec::new();
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
