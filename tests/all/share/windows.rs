//! Windows of one memory, in another process.

use std::path::Path;

use egmem::driver::{Access, Call, HandleType};
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::share::{ImportOptions, Shared};
use egmem::{Driver, Memory};

use super::process::{Place, Process, accept, connect, receive, say, wait_for_go};
use super::{MIB, buffer, last_gpu, nothing_held, open, spread};

const WINDOWS: u64 = 40;

/// Where each begins, and its bytes: some in each part, and some over the boundary.
fn layout(shared: &Shared) -> Vec<(u64, u64)> {
    let step = shared.len() / WINDOWS / 8 * 8;
    (0..WINDOWS)
        .map(|index| (index * step, step - 64))
        .collect()
}

fn goes_as_windows(driver: &Driver, shared: Shared) {
    let place = Place::new();
    let listener = place.listen();
    let mut peer = Process::start("windows", &place.socket);
    let mut channel = accept(&listener);
    let cpu = shared.buffer().unwrap().cpu().unwrap();
    cpu.fill(0, cpu.len(), 0xee).unwrap();
    let exports = || {
        let sim = driver.sim()?;
        Some(sim.count(Call::MemExportToShareableHandle))
    };
    // The allocation tried an export to find out whether it can be shared.
    let before = exports();
    for (index, (offset, len)) in layout(&shared).into_iter().enumerate() {
        write_pattern(&cpu.slice(offset, len).unwrap(), index as u64).unwrap();
        let window = shared.window(offset, len).unwrap();
        channel.send(&window, Access::ReadWrite).unwrap();
    }
    let parts = shared.describe(Access::Read).unwrap().parts.len() as u64;
    assert_eq!(exports(), before.map(|before| before + parts));
    peer.says("written");
    for (index, (offset, len)) in layout(&shared).into_iter().enumerate() {
        let seed = 1000 + index as u64;
        check_pattern(&cpu.slice(offset, len).unwrap(), seed).unwrap();
        // The bytes between the windows are untouched.
        let mut between = [0_u8; 64];
        cpu.read_at(offset + len, &mut between).unwrap();
        assert_eq!(between, [0xee; 64]);
    }
    peer.go();
    peer.ends_well();
    drop(shared);
    nothing_held(driver);
}

pub fn peer(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let imported: Vec<_> = (0..WINDOWS)
        .map(|_| receive(&mut channel, driver))
        .collect();
    let mut parts: Vec<_> = imported
        .iter()
        .flat_map(|window| &window.description().parts)
        .map(|part| part.identity)
        .collect();
    parts.sort();
    parts.dedup();
    if let Some(sim) = driver.sim() {
        let imports = sim.count(Call::MemImportFromShareableHandle);
        assert_eq!(imports, parts.len() as u64, "one for each part");
    }
    let prover = Prover::new(driver, last_gpu(driver)).unwrap();
    for (index, window) in imported.iter().enumerate() {
        let seed = index as u64;
        assert_eq!(window.via(), HandleType::PosixFd);
        assert_eq!(window.len(), window.cpu().unwrap().len());
        check_pattern(&window.cpu().unwrap(), seed).unwrap();
        prover.check_rewrite(window, seed, 1000 + seed).unwrap();
    }
    say("written");
    wait_for_go();
}

#[test]
fn windows_of_a_buffer_show_their_bytes() {
    let driver = open();
    let shared = buffer(&driver);
    goes_as_windows(&driver, shared);
}

#[test]
fn windows_of_a_buffer_in_parts_show_their_bytes() {
    let driver = open();
    let shared = spread(&driver);
    goes_as_windows(&driver, shared);
}

/// It is the memory's owner that errs: the importer maps nothing beyond the memory.
#[test]
fn a_window_beyond_its_memory_is_refused() {
    let driver = open();
    let shared = buffer(&driver);
    let window = shared.window(MIB, MIB).unwrap();
    let right = window.describe(Access::ReadWrite).unwrap();
    for (offset, len) in [(3 * MIB, 2 * MIB), (4 * MIB, 1), (u64::MAX, 2), (0, 0)] {
        let mut wrong = right.clone();
        (wrong.offset, wrong.len) = (Some(offset), len);
        let fds = window.export(HandleType::PosixFd).unwrap();
        ImportOptions::new()
            .import(&driver, &wrong, fds)
            .unwrap_err();
    }
    let fds = window.export(HandleType::PosixFd).unwrap();
    let imported = ImportOptions::new().import(&driver, &right, fds).unwrap();
    imported.put(MIB - 8, 5_u64).unwrap();
    let buffer = shared.buffer().unwrap();
    assert_eq!(buffer.get::<u64>(2 * MIB - 8).unwrap(), 5);
    assert!(imported.range(MIB - 7, 8).is_err());
    drop((imported, window, shared));
    nothing_held(&driver);
}
