//! Memory with far more parts than either process may have files open.

use std::path::Path;

use egmem::driver::{Access, NodeId};
use egmem::share::{Channel, ImportOptions, Listener, Peers, Shared};
use egmem::{Buffer, Driver, Growth};
use egmem_tests::{FdLess, open_files};

use super::process::{Place, Process, connect, few_files, say, wait_for_go};
use super::{MIB, PATIENCE};

const PARTS: u64 = 400;

fn many_parts(driver: &Driver) -> Shared {
    let options = Buffer::on(NodeId(0)).bytes(PARTS * 2 * MIB).shareable();
    let options = options
        .growth(Growth::steady().chunk(2 * MIB))
        .overcommit(true);
    let shared = Shared::from(options.allocate(driver).unwrap());
    assert_eq!(shared.part_count() as u64, PARTS);
    shared
}

#[test]
fn hundreds_of_parts_pass_between_processes_with_few_files() {
    let place = Place::new();
    let mut owner = Process::start("few-owner", &place.socket);
    owner.says("listening");
    let mut peer = Process::start("few-peer", &place.socket);
    peer.says("imported");
    // Killed while it has received some of the parts.
    let mut half = Process::start("few-half", &place.socket);
    half.says("some");
    half.kill();
    let after = Process::start("few-peer", &place.socket);
    peer.go();
    peer.ends_well();
    let mut after = after;
    after.says("imported");
    after.go();
    after.ends_well();
    owner.ends_well();
}

pub fn owner(path: &Path) {
    let (_, driver) = FdLess::open();
    few_files();
    let shared = many_parts(&driver);
    let mut listener = Listener::bind(path, Peers::same_user()).unwrap();
    listener.set_timeout(PATIENCE).unwrap();
    say("listening");
    // The fds that are kept for the next peer.
    drop(
        shared
            .export_parts(0..64, egmem::driver::HandleType::PosixFd)
            .unwrap_err(),
    );
    let before = open_files();
    for _ in 0..3 {
        let mut channel = listener.accept().unwrap();
        channel.set_timeout(PATIENCE);
        // The one that is killed may be gone before it was sent all.
        let _ = channel.send(&shared, Access::ReadWrite);
    }
    assert!(
        open_files() <= before,
        "{} files, then {}",
        before,
        open_files()
    );
}

pub fn peer(path: &Path) {
    let (backend, driver) = FdLess::open();
    let mut channel: Channel = connect(path);
    few_files();
    let before = open_files();
    let imported = channel.receive().unwrap();
    let imported = imported.import(&driver, ImportOptions::new()).unwrap();
    assert_eq!(imported.len(), PARTS * 2 * MIB);
    // Each part once, in the order of the exporter's.
    let numbers = backend.imported();
    let first = numbers[0];
    assert_eq!(numbers, (first..first + PARTS).collect::<Vec<_>>());
    assert_eq!(open_files(), before);
    say("imported");
    wait_for_go();
}

/// Takes some of the parts, and waits for its end.
pub fn half(path: &Path) {
    let (_, driver) = FdLess::open();
    let mut channel: Channel = connect(path);
    few_files();
    let offer = channel.receive().unwrap();
    // All at once are too many for this process: it has received some by then.
    let (description, handles) = offer.into_parts();
    assert!(handles.is_empty());
    let error = ImportOptions::new().import(&driver, &description, handles);
    error.unwrap_err();
    say("some");
    loop {
        std::thread::park();
    }
}
