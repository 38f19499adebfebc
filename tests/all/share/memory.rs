//! Memory, seen from both sides.

use std::path::Path;

use egmem::driver::{Access, HandleType, HandleTypes};
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::share::{self, ImportOptions, Shared, best_handle_types};
use egmem::{Driver, Error};

use super::process::{Place, Process, accept, connect, receive, say, wait_for_go};
use super::{MIB, buffer, last_gpu, node, nothing_held, open, spread};

/// Takes turns with the peer: each checks the bytes that the other wrote, by CPU and GPU, and writes new ones.
pub fn shows_the_same_bytes(driver: &Driver, shared: Shared) {
    let place = Place::new();
    let listener = place.listen();
    let mut peer = Process::start("peer", &place.socket);
    let mut channel = accept(&listener);
    assert_eq!(channel.peer().uid, rustix::process::getuid().as_raw());

    let prover = Prover::new(driver, 0).unwrap();
    let buffer = shared.buffer().unwrap();
    prover.write(&**buffer, 1).unwrap();
    channel.send(&shared, Access::ReadWrite).unwrap();
    peer.says("gpu wrote 2");
    check_pattern(&buffer.cpu().unwrap(), 2).unwrap();
    prover.check_rewrite(&**buffer, 2, 3).unwrap();
    peer.go();
    peer.says("cpu wrote 4");
    prover.check_rewrite(&**buffer, 4, 5).unwrap();
    write_pattern(&buffer.cpu().unwrap(), 6).unwrap();
    let last = shared.padded() - 8;
    shared.put_word(last, 77).unwrap();
    peer.go();
    peer.ends_well();
    assert_eq!(shared.word(last).unwrap(), 78);
    drop((shared, prover));
    nothing_held(driver);
}

pub fn peer(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let imported = receive(&mut channel, driver);
    assert_eq!(imported.via(), HandleType::PosixFd);
    let prover = Prover::new(driver, last_gpu(driver)).unwrap();
    check_pattern(&imported.cpu().unwrap(), 1).unwrap();
    prover.check_rewrite(&imported, 1, 2).unwrap();
    say("gpu wrote 2");
    wait_for_go();
    prover.check_rewrite(&imported, 3, 0).unwrap();
    write_pattern(&imported.cpu().unwrap(), 4).unwrap();
    say("cpu wrote 4");
    wait_for_go();
    prover.check_rewrite(&imported, 6, 7).unwrap();
    let last = imported.description().padded() - 8;
    assert_eq!(imported.word(last).unwrap(), 77);
    imported.put_word(last, 78).unwrap();
}

#[test]
fn a_buffer_shows_the_same_bytes_to_both() {
    let driver = open();
    let shared = buffer(&driver);
    shows_the_same_bytes(&driver, shared);
}

#[test]
fn a_buffer_in_parts_shows_the_same_bytes_to_both() {
    let driver = open();
    let shared = spread(&driver);
    assert!(shared.describe(Access::Read).unwrap().parts.len() > 1);
    shows_the_same_bytes(&driver, shared);
}

/// More parts than a message can carry fds.
#[test]
fn many_parts_go_in_batches() {
    const PARTS: usize = 260;
    let driver = open();
    let part = || {
        let options = egmem::vmm::PhysicalMemory::options(node(&driver));
        let options = options.handle_types(HandleTypes::POSIX_FD);
        options.create(&driver, 2 * MIB).unwrap()
    };
    let parts: Vec<_> = (0..PARTS).map(|_| part()).collect();
    let shared = Shared::from_physical(parts, PARTS as u64 * 2 * MIB).unwrap();
    let place = Place::new();
    let listener = place.listen();
    let peer = Process::start("many", &place.socket);
    let mut channel = accept(&listener);
    for part in 0..PARTS as u64 {
        shared.put_word(part * 2 * MIB, part).unwrap();
    }
    channel.send(&shared, Access::ReadWrite).unwrap();
    peer.ends_well();
    for part in 0..PARTS as u64 {
        assert_eq!(shared.word(part * 2 * MIB).unwrap(), part + 1);
    }
    drop(shared);
    nothing_held(&driver);
}

pub fn many(driver: &Driver, path: &Path) {
    let imported = receive(&mut connect(path), driver);
    for part in 0..imported.description().parts.len() as u64 {
        assert_eq!(imported.get::<u64>(part * 2 * MIB).unwrap(), part);
        imported.put(part * 2 * MIB, part + 1).unwrap();
    }
}

#[test]
fn an_owner_that_is_killed_leaves_the_memory() {
    owner_dies("owner");
}

/// The importer's memory lives on, with its bytes, for CPU and GPU.
pub fn owner_dies(role: &str) {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let mut owner = Process::start(role, &place.socket);
    let mut channel = accept(&listener);
    let imported = receive(&mut channel, &driver);
    owner.kill();
    let error = channel.receive().unwrap_err();
    assert!(matches!(error, share::Error::PeerLost { .. }), "{error}");
    check_pattern(&imported.cpu().unwrap(), 11).unwrap();
    let prover = Prover::new(&driver, last_gpu(&driver)).unwrap();
    prover.check_rewrite(&imported, 11, 12).unwrap();
    check_pattern(&imported.cpu().unwrap(), 12).unwrap();
    drop((imported, prover));
    nothing_held(&driver);
}

pub fn owner(shared: Shared, path: &Path) {
    Prover::new(shared.driver(), 0)
        .unwrap()
        .write(&**shared.buffer().unwrap(), 11)
        .unwrap();
    let mut channel = connect(path);
    channel.send(&shared, Access::ReadWrite).unwrap();
    wait_for_go();
}

/// Where fabric handles are refused, the reason is typed and the fd path is taken.
#[test]
fn without_fabric_there_are_fds_and_a_reason() {
    let driver = open();
    let best = best_handle_types(&driver, node(&driver).into()).unwrap();
    assert!(
        best.handle_types.contains(HandleTypes::POSIX_FD),
        "{best:?}"
    );
    let shared = buffer(&driver);
    assert_eq!(shared.handle_types(), best.handle_types);
    match best.no_fabric {
        Some(reason) => {
            let typed = matches!(
                reason,
                Error::NoImexChannel { .. } | Error::PlatformUnsupported { .. }
            );
            assert!(typed, "{reason}");
            println!("no fabric handles: {reason}");
            let error = shared.export(HandleType::Fabric).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
        None => assert_eq!(shared.export(HandleType::Fabric).unwrap().len(), 1),
    }
}

/// The driver refuses to map more or fewer bytes than the memory has.
#[test]
fn a_description_with_wrong_sizes_is_refused() {
    let driver = open();
    let shared = buffer(&driver);
    let right = shared.describe(Access::ReadWrite).unwrap();
    for bytes in [2 * MIB, 6 * MIB, 8 * MIB, 1 << 30, 1 << 44] {
        let mut wrong = right.clone();
        wrong.parts[0].bytes = bytes;
        wrong.len = 2 * MIB;
        let fds = shared.export(HandleType::PosixFd).unwrap();
        let error = ImportOptions::new()
            .import(&driver, &wrong, fds)
            .unwrap_err();
        assert!(error.driver_error().is_some(), "{bytes}: {error}");
        println!("seen: 4 MiB described as {bytes} bytes: {error}");
    }
    let fds = shared.export(HandleType::PosixFd).unwrap();
    let imported = ImportOptions::new().import(&driver, &right, fds).unwrap();
    imported.put(3 * MIB - 8, 1_u64).unwrap();
    drop((imported, shared));
    nothing_held(&driver);
}
