//! Memory that grows gently: its many small chunks all reach a process with few files.

use std::path::Path;

use egmem::driver::{Access, NodeId};
use egmem::share::{ImportOptions, Listener, Peers, Shared};
use egmem::{Buffer, Driver, Growth};
use egmem_tests::FdLess;

use super::process::{Place, Process, accept, connect, few_files, say};
use super::{MIB, PATIENCE};

/// Growth and bytes of each buffer, and the bytes of its chunks: a gentle buffer, and one with the most chunks.
const BUFFERS: [(Growth, u64, u64); 2] = [
    (Growth::gentle(), 8 << 30, 16 * MIB),
    (Growth::gentle().chunk(2 * MIB), 4 << 30, 2 * MIB),
];
fn buffer(driver: &Driver, growth: Growth, bytes: u64) -> Shared {
    let options = Buffer::on(NodeId(0)).bytes(bytes).shareable();
    let options = options.growth(growth).overcommit(true);
    Shared::from(options.allocate(driver).unwrap())
}

#[test]
fn the_small_chunks_of_gentle_memory_are_imported_whole_with_few_files() {
    let place = Place::new();
    let mut owner = Process::start("gentle-owner", &place.socket);
    owner.says("listening");
    let mut peer = Process::start("gentle-peer", &place.socket);
    peer.says("imported");
    peer.ends_well();
    owner.ends_well();
}

pub fn owner(path: &Path) {
    let (_, driver) = FdLess::open();
    few_files();
    let mut listener = Listener::bind(path, Peers::same_user()).unwrap();
    listener.set_timeout(PATIENCE).unwrap();
    say("listening");
    let mut channel = accept(&listener);
    for (growth, bytes, _) in BUFFERS {
        let shared = buffer(&driver, growth, bytes);
        channel.send(&shared, Access::ReadWrite).unwrap();
    }
}

pub fn peer(path: &Path) {
    let (backend, driver) = FdLess::open();
    let mut channel = connect(path);
    few_files();
    for (_, bytes, chunk) in BUFFERS {
        let chunks = bytes / chunk;
        let before = backend.imported().len();
        let offer = channel.receive().unwrap();
        let imported = offer.import(&driver, ImportOptions::new()).unwrap();
        let description = imported.description();
        assert_eq!(
            (description.len, description.parts.len() as u64),
            (bytes, chunks)
        );
        assert!(description.parts.iter().all(|part| part.bytes == chunk));
        // One driver call for each, in the order of the exporter's.
        let numbers = backend.imported().split_off(before);
        let first = numbers[0];
        assert_eq!(numbers, (first..first + chunks).collect::<Vec<_>>());
    }
    say("imported");
}
