//! Windows on memory: the same handles, the same import, only their own bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use proptest::prelude::*;

use super::*;
use crate::memory::AccessChecks;
use crate::{Exports, Holds, ImportedBuffer};

fn import(driver: &Driver, window: &Shared) -> ImportedBuffer {
    let description = window.describe(Access::ReadWrite).unwrap();
    ours().import(driver, &description, fds(window)).unwrap()
}

#[test]
fn many_windows_of_one_memory_are_exported_and_imported_once() {
    let driver = driver();
    let before = held(&driver);
    {
        let buffer = Buffer::on(NodeId(0)).bytes(4 * MIB).shareable();
        let shared = Shared::from(buffer.allocate(&driver).unwrap());
        // A trial has already found out which handle types work.
        let counts = || {
            let calls = [
                Call::MemExportToShareableHandle,
                Call::MemImportFromShareableHandle,
            ];
            calls.map(|call| count(&driver, call))
        };
        let [exports, imports] = counts();
        let window = |index: u64| shared.window(index * 4096, 4096).unwrap();
        let imported: Vec<_> = (0..100)
            .map(|index| import(&driver, &window(index)))
            .collect();
        assert_eq!(counts(), [exports + 1, imports + 1]);
        assert_eq!(held(&driver).mappings, before.mappings + 2);
        let base = imported[0].device_ptr();
        for (index, window) in imported.iter().enumerate() {
            let at = index as u64 * 4096;
            assert_eq!(window.device_ptr(), base.add(at));
            assert_eq!((window.len(), window.cpu().unwrap().len()), (4096, 4096));
            window.fill(index as u8 + 1).unwrap();
        }
        let buffer = shared.buffer().unwrap();
        for index in 0..100 {
            let mut bytes = [0_u8; 4096];
            buffer.read_at(index * 4096, &mut bytes).unwrap();
            assert_eq!(bytes, [index as u8 + 1; 4096]);
        }
        assert_eq!(buffer.get::<u8>(100 * 4096).unwrap(), 0);
        for _ in 0..3 {
            window(7).export(HandleType::Fabric).unwrap();
        }
        assert_eq!(counts(), [exports + 2, imports + 1]);
    }
    assert_eq!(held(&driver), before);
}

#[test]
fn a_window_names_the_parts_that_it_touches() {
    let driver = driver();
    // 4 MiB, then 3 of 4 MiB.
    let shared = shared(&driver);
    let whole = shared.describe(Access::Read).unwrap();
    for (offset, len, parts, within) in [
        (0, 7 * MIB, 0..2, 0),
        (5, 10, 0..1, 5),
        (4 * MIB - 1, 1, 0..1, 4 * MIB - 1),
        (4 * MIB - 1, 2, 0..2, 4 * MIB - 1),
        (4 * MIB, 3 * MIB, 1..2, 0),
        (7 * MIB - 1, 1, 1..2, 3 * MIB - 1),
    ] {
        let window = shared.window(offset, len).unwrap();
        let description = window.describe(Access::Read).unwrap();
        assert_eq!(description.parts, whole.parts[parts]);
        assert_eq!(description.offset, Some(within));
        assert_eq!((description.len, window.len()), (len, len));
        assert_eq!(window.padded(), description.padded());
        assert_eq!(window.location(), description.parts[0].location);
        let border = (4 * MIB).checked_sub(offset);
        let border = border.filter(|border| (1..len).contains(border));
        let whole = import(&driver, &window).of_one_mapping(0, len);
        assert_eq!(whole, Some(border.unwrap_or(len)));
        assert_eq!(fds(&window).len(), description.parts.len());
    }
    for (offset, len) in [
        (0, 0),
        (0, 7 * MIB + 1),
        (7 * MIB, 1),
        (1, u64::MAX),
        (u64::MAX, 1),
    ] {
        assert!(shared.window(offset, len).is_err(), "{offset} {len}");
    }
    let window = shared.window(4 * MIB, MIB).unwrap();
    assert!(window.window(MIB, 1).is_err(), "beyond the window");
}

#[test]
fn words_and_copies_stay_in_the_window() {
    let driver = driver();
    let shared = shared(&driver);
    let window = shared.window(4 * MIB - 8, 24).unwrap();
    let imported = import(&driver, &window);
    for at in [0, 8, 16] {
        imported.put_word(at, at + 1).unwrap();
        assert_eq!(window.word(at).unwrap(), at + 1);
        window.put_word(at, at + 2).unwrap();
        assert_eq!(imported.word(at).unwrap(), at + 2);
        assert_eq!(shared.word(4 * MIB - 8 + at).unwrap(), at + 2);
    }
    for at in [17, 24, MIB, u64::MAX - 3] {
        assert!(imported.word(at).is_err());
        assert!(imported.put_word(at, 1).is_err());
        assert!(window.word(at).is_err());
        assert!(window.put_word(at, 1).is_err());
    }
    assert!(imported.get::<u64>(17).is_err());
    assert!(imported.range(17, 8).is_err());
    assert_eq!(
        imported.range(16, 8).unwrap(),
        imported.device_ptr().add(16)
    );
}

/// It begins inside a word: the GPU's kernels would fault there.
#[test]
fn a_window_at_an_odd_address_is_copied_but_not_proved_by_kernels() {
    let driver = driver();
    let shared = shared(&driver);
    let imported = import(&driver, &shared.window(4 * MIB - 13, 26).unwrap());
    let bytes: Vec<u8> = (0..26).collect();
    imported.write_at(0, &bytes).unwrap();
    let mut back = [0_u8; 28];
    let buffer = shared.buffer().unwrap();
    buffer.read_at(4 * MIB - 14, &mut back).unwrap();
    assert_eq!((back[0], &back[1..27], back[27]), (0, &bytes[..], 0));
    let prover = crate::proof::Prover::new(&driver, 0).unwrap();
    for result in [
        prover.write(&imported, 1),
        prover.check_rewrite(&imported, 1, 2),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    prover.read(&imported).unwrap_err();
}

/// A chunk like a heap's.
#[derive(Debug)]
struct Chunk {
    memory: PhysicalMemory,
    exports: Exports,
}

impl Holds for Chunk {
    fn physical(&self) -> &PhysicalMemory {
        &self.memory
    }
    fn exports(&self) -> &Exports {
        &self.exports
    }
}

fn chunk(driver: &Driver, bytes: u64) -> Arc<dyn Holds> {
    let options = PhysicalMemory::options(NodeId(0)).handle_types(HandleTypes::POSIX_FD);
    Arc::new(Chunk {
        memory: options.create(driver, bytes).unwrap(),
        exports: Exports::default(),
    })
}

/// A block that decrements the count when it is freed.
struct Block(Arc<AtomicUsize>);

impl Drop for Block {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

#[test]
fn blocks_of_kept_chunks_are_shared_and_keep_what_they_hold() {
    let driver = driver();
    let before = held(&driver);
    let chunks = [chunk(&driver, 2 * MIB), chunk(&driver, 4 * MIB)];
    let blocks = Arc::new(AtomicUsize::new(0));
    let share = |offset, len| {
        blocks.fetch_add(1, SeqCst);
        let block = Block(Arc::clone(&blocks));
        Shared::from_held(chunks.to_vec(), offset, len, block).unwrap()
    };
    let one = share(4096, 64);
    let other = share(2 * MIB - 64, 128);
    assert_eq!(one.describe(Access::Read).unwrap().parts.len(), 1);
    let imported = [&one, &other].map(|block| import(&driver, block));
    assert_eq!(count(&driver, Call::MemExportToShareableHandle), 2);
    assert_eq!(count(&driver, Call::MemImportFromShareableHandle), 2);
    imported[1].put(64, 7_u64).unwrap();
    assert_eq!(other.word(64).unwrap(), 7);
    let part = other.window(64, 8).unwrap();
    drop((one.clone(), other));
    assert_eq!(blocks.load(SeqCst), 2, "a window keeps it");
    assert_eq!(part.word(0).unwrap(), 7);
    drop(part);
    assert_eq!(blocks.load(SeqCst), 1);
    let more = Arc::new(AtomicUsize::new(1));
    let one = one.holding(Block(Arc::clone(&more)));
    assert_eq!((blocks.load(SeqCst), more.load(SeqCst)), (1, 1));
    drop(one);
    assert_eq!((blocks.load(SeqCst), more.load(SeqCst)), (0, 0));
    assert!(Shared::from_held(Vec::new(), 0, 1, ()).is_err());
    assert!(Shared::from_held(chunks.to_vec(), 6 * MIB, 1, ()).is_err());
    drop((chunks, imported));
    assert_eq!(held(&driver), before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// After importers write through windows, the memory has exactly those bytes changed.
    #[test]
    fn windows_show_exactly_their_bytes(
        windows in proptest::collection::vec((0..7 * MIB, 1..300_u64, any::<bool>()), 1..20),
    ) {
        let driver = driver();
        let shared = shared(&driver);
        // Windows lie near the boundaries of the parts, and near the end.
        let mut expected = vec![0_u8; 7 * MIB as usize];
        let mut alive = Vec::new();
        for (index, (at, len, near)) in windows.into_iter().enumerate() {
            let offset = match near {
                true => 4 * MIB - 150 + at % 150,
                false => at.min(7 * MIB - len),
            };
            let imported = import(&driver, &shared.window(offset, len).unwrap());
            imported.fill(index as u8 + 1).unwrap();
            let range = offset as usize..(offset + len) as usize;
            expected[range.clone()].fill(index as u8 + 1);
            alive.push((imported, range));
        }
        let mut found = vec![0_u8; expected.len()];
        shared.buffer().unwrap().read_at(0, &mut found).unwrap();
        prop_assert!(found == expected);
        for (imported, range) in alive {
            let mut bytes = vec![0_u8; range.len()];
            imported.read_at(0, &mut bytes).unwrap();
            prop_assert_eq!(&bytes[..], &expected[range]);
        }
        prop_assert!(count(&driver, Call::MemImportFromShareableHandle) <= 2);
    }
}
