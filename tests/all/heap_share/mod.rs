//! Blocks of a heap in other processes, and under names of the exchange.

#[cfg(feature = "portable")]
mod names;

use egmem_tests::drivers;

use std::alloc::Layout;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use egmem::driver::{Access, Call, HandleType, HandleTypes};
use egmem::proof::{Prover, check_pattern, write_pattern};
use egmem::share::{ImportOptions, Shared};
use egmem::{Block, Driver, Error, Heap, Machine};

use crate::share::process::{Place, Process, accept, connect, receive, say, wait_for_go};
use egmem_tests::drivers::{node, nothing_held};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Longer than anything here takes, even emulated.
const PATIENCE: Duration = Duration::from_secs(120);

/// With `EGMEM_REQUIRE_CUDA` this machine's driver, otherwise a simulated one.
fn open() -> Driver {
    drivers::cuda_or(Machine::gh200())
}

/// Chunks of 4 MiB, so that there are several.
fn heap(driver: &Driver) -> Heap {
    let options = Heap::on(node(driver)).chunk(4 * MIB).limit(64 * MIB);
    options.shareable().build(driver).unwrap()
}

fn block(heap: &Heap, bytes: u64) -> Arc<Block> {
    let layout = Layout::from_size_align(bytes as usize, 8).unwrap();
    Arc::new(heap.allocate(layout).unwrap())
}

fn share(block: &Arc<Block>) -> Shared {
    Arc::clone(block).share_arc().unwrap()
}

fn count(driver: &Driver, call: Call) -> Option<u64> {
    Some(driver.sim()?.count(call))
}

/// Small, middle and large ones, which lie in several chunks.
const SIZES: [u64; 8] = [16, 100, 1000, 8 * KIB, 100 * KIB, MIB, 3 * MIB, 4 * MIB];
const BLOCKS: usize = 24;

#[test]
fn blocks_go_to_another_process_and_each_chunk_once() {
    let driver = open();
    let heap = heap(&driver);
    let place = Place::new();
    let listener = place.listen();
    let mut peer = Process::start("blocks", &place.socket);
    let mut channel = accept(&listener);
    let blocks: Vec<_> = (0..BLOCKS)
        .map(|index| block(&heap, SIZES[index % SIZES.len()]))
        .collect();
    // The allocation tried an export to find out whether it can be shared.
    let before = count(&driver, Call::MemExportToShareableHandle);
    let mut chunks = Vec::new();
    let mut shares = Vec::new();
    for (seed, block) in (0..).zip(&blocks) {
        write_pattern(&block.cpu().unwrap(), seed).unwrap();
        let shared = share(block);
        assert_eq!(shared.len(), block.len());
        let description = shared.describe(Access::ReadWrite).unwrap();
        assert_eq!(description.parts.len(), 1, "a block lies in one chunk");
        chunks.push(description.parts[0].identity);
        channel.send(&shared, Access::ReadWrite).unwrap();
        shares.push(shared);
    }
    chunks.sort();
    chunks.dedup();
    assert!(chunks.len() > 2, "{}", chunks.len());
    let exports = count(&driver, Call::MemExportToShareableHandle);
    assert_eq!(exports, before.map(|before| before + chunks.len() as u64));
    peer.says("written");
    let prover = Prover::new(&driver, 0).unwrap();
    for (seed, block) in (1000..).zip(&blocks) {
        check_pattern(&block.cpu().unwrap(), seed).unwrap();
        prover.check_rewrite(&**block, seed, 0).unwrap();
    }
    drop(prover);
    peer.go();
    peer.ends_well();
    drop((blocks, shares));
    assert_eq!(heap.stats().live_blocks, 0);
    drop(heap);
    nothing_held(&driver);
}

pub fn peer(driver: &Driver, path: &Path) {
    let mut channel = connect(path);
    let imported: Vec<_> = (0..BLOCKS).map(|_| receive(&mut channel, driver)).collect();
    let mut chunks: Vec<_> = imported
        .iter()
        .map(|block| block.description().parts[0].identity)
        .collect();
    chunks.sort();
    chunks.dedup();
    if let Some(imports) = count(driver, Call::MemImportFromShareableHandle) {
        assert_eq!(imports, chunks.len() as u64);
    }
    let prover = Prover::new(driver, 0).unwrap();
    for (index, block) in imported.iter().enumerate() {
        let seed = index as u64;
        assert_eq!(block.len(), SIZES[index % SIZES.len()]);
        check_pattern(&block.cpu().unwrap(), seed).unwrap();
        // The GPU reads the bytes that the other process's CPU wrote, and the other way round.
        prover.check_rewrite(block, seed, 1000 + seed).unwrap();
    }
    drop(prover);
    say("written");
    wait_for_go();
}

#[test]
fn a_shared_block_stays_until_the_last_clone_and_its_chunk_with_it() {
    let driver = open();
    let heap = heap(&driver);
    let shared = heap
        .allocate(Layout::new::<[u64; 100]>())
        .unwrap()
        .share()
        .unwrap();
    shared.put_word(8, 7).unwrap();
    let clone = shared.clone();
    drop(shared);
    assert_eq!(heap.stats().live_blocks, 1);
    let other = block(&heap, 800);
    assert_ne!(
        share(&other).describe(Access::Read).unwrap().offset,
        clone.describe(Access::Read).unwrap().offset,
        "it is not given to others"
    );
    drop(other);
    let backed = heap.backed();
    assert_eq!((heap.trim().unwrap(), heap.backed()), (0, backed));
    assert_eq!(clone.word(8).unwrap(), 7);
    let before = clone.describe(Access::Read).unwrap().parts[0].identity;
    drop(clone);
    assert_eq!(heap.stats().live_blocks, 0);
    assert_eq!((heap.trim().unwrap(), heap.backed()), (backed, 0));
    // Memory that is there again is other memory.
    let again = [block(&heap, 800), block(&heap, 800)];
    let ids = again.each_ref().map(|block| {
        let description = share(block).describe(Access::Read).unwrap();
        description.parts[0].identity
    });
    assert_eq!(ids[0], ids[1]);
    assert_ne!(ids[0], before);
}

#[test]
fn shared_blocks_outlive_their_heaps_handles() {
    let driver = open();
    let shares: Vec<_> = {
        let heap = heap(&driver);
        (0..3).map(|_| share(&block(&heap, 5 * KIB))).collect()
    };
    for (value, shared) in (0_u64..).zip(&shares) {
        let description = shared.describe(Access::ReadWrite).unwrap();
        let handles = shared.export(HandleType::PosixFd).unwrap();
        let imported = ImportOptions::new()
            .import(&driver, &description, handles)
            .unwrap();
        imported.put(4 * KIB, value).unwrap();
        assert_eq!(shared.word(4 * KIB).unwrap(), value);
    }
    drop(shares);
    nothing_held(&driver);
}

#[test]
fn blocks_of_a_heap_that_is_not_shareable_are_refused() {
    let driver = open();
    let heap = Heap::on(node(&driver))
        .limit(64 * MIB)
        .build(&driver)
        .unwrap();
    let own = block(&heap, 100);
    let error = Arc::clone(&own).share_arc().unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    assert!(error.to_string().contains("shareable"), "{error}");
    own.put(0, 1_u8).unwrap();
    // By one way alone, where that is wanted.
    let fds_alone = Heap::on(node(&driver)).limit(64 * MIB);
    let fds_alone = fds_alone.handle_types(HandleTypes::POSIX_FD);
    let fds_alone = fds_alone.build(&driver).unwrap();
    let shared = share(&block(&fds_alone, 100));
    assert_eq!(shared.handle_types(), HandleTypes::POSIX_FD);
    shared.export(HandleType::Fabric).unwrap_err();
}

/// Sharing, freeing and trimming at once: no block moves, and nothing is left.
#[test]
fn blocks_are_shared_while_the_heap_is_trimmed() {
    let driver = open();
    {
        let heap = heap(&driver);
        let (heap, driver) = (&heap, &driver);
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                scope.spawn(move || {
                    for round in 0..30 {
                        let block = block(heap, 100 * KIB * (1 + (thread + round) % 5));
                        let shared = share(&block);
                        block.put(0, thread << 32 | round).unwrap();
                        let description = shared.describe(Access::Read).unwrap();
                        let handles = shared.export(HandleType::PosixFd).unwrap();
                        drop(block);
                        let imported = ImportOptions::new()
                            .import(driver, &description, handles)
                            .unwrap();
                        assert_eq!(imported.get::<u64>(0).unwrap(), thread << 32 | round);
                        drop(imported);
                        drop(shared);
                        if thread == 0 {
                            heap.trim().unwrap();
                        }
                    }
                });
            }
        });
        assert_eq!(heap.stats().live_blocks, 0);
        heap.trim().unwrap();
        assert_eq!(heap.backed(), 0);
    }
    nothing_held(&driver);
}
