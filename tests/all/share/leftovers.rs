//! Nothing is left behind.

use std::fs;
use std::path::Path;

use egmem::Driver;
use egmem::driver::Access;
use egmem::share::Error;
use egmem_tests::{leave_files, open_files, set_file_limit};

use super::process::{Place, Process, accept, connect, receive};
use super::{buffer, open, spread};

const CYCLES: usize = 1000;

/// Returns the open fds, the mappings in the address space, and the simulator's objects.
fn counts(driver: &Driver) -> (usize, usize, Option<egmem::driver::sim::Held>) {
    let fds = open_files();
    let maps = fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count();
    (fds, maps, driver.sim().map(|sim| sim.held()))
}

#[test]
fn a_thousand_imports_leave_nothing_behind() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let peer = Process::start("cycles", &place.socket);
    let mut channel = accept(&listener);
    let shared = buffer(&driver);
    for _ in 0..CYCLES {
        channel.send(&shared, Access::ReadWrite).unwrap();
    }
    peer.ends_well();
    assert_eq!(shared.word(0).unwrap(), CYCLES as u64);
}

pub fn cycles(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let mut early = None;
    for cycle in 0..CYCLES {
        if cycle == CYCLES / 10 {
            early = Some(counts(driver));
        }
        let imported = receive(&mut channel, driver);
        let count = imported.word(0).unwrap();
        imported.put_word(0, count + 1).unwrap();
    }
    let (early, late) = (early.unwrap(), counts(driver));
    assert_eq!((early.0, early.2), (late.0, late.2));
    // The allocator may have mapped some more for itself.
    assert!(
        late.1 <= early.1 + 50,
        "{} mappings, then {}",
        early.1,
        late.1
    );
}

/// A process that may not have as many fds as come closes those that it got.
#[test]
fn fds_that_are_too_many_for_the_process_are_closed() {
    let driver = open();
    let place = Place::new();
    let listener = place.listen();
    let peer = Process::start("poor", &place.socket);
    let shared = spread(&driver);
    accept(&listener).send(&shared, Access::Read).unwrap();
    peer.ends_well();
}

pub fn poor(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let before = counts(driver).0;
    let limit = leave_files(1);
    let error = channel.receive().unwrap_err();
    set_file_limit(limit);
    // The other process did nothing wrong.
    assert!(error.memory().is_some(), "{error}");
    assert!(error.to_string().contains("ulimit -n"), "{error}");
    assert_eq!(counts(driver).0, before);
    let error = channel.receive().unwrap_err();
    assert!(matches!(error, Error::PeerLost { .. }), "{error}");
}
