//! The debug mode: damage to blocks is found, whichever thread or GPU did it.

use std::sync::{Arc, Mutex};

use egmem::driver::{Access, Location};
use egmem::heap::debug::{Damage, DamageKind, DebugOptions, LeakReport, Seen};
use egmem::{Block, Error, Stream};

use super::*;

fn watched(driver: &Driver) -> HeapOptions {
    on(driver).debug(DebugOptions::new())
}

/// A GPU's write to `bytes` bytes from `from` on, counted from the block's first, has run.
fn gpu_writes(driver: &Driver, start: u64, from: i64, bytes: u64) {
    let stream = Stream::new(driver, 0).unwrap();
    let at = egmem::driver::DevicePtr(start.wrapping_add_signed(from));
    // SAFETY: the heap's memory, which has no values of Rust.
    unsafe { stream.memset_async(at, 1, bytes).unwrap() };
    stream.synchronize().unwrap();
}

fn damage(heap: &Heap) -> Vec<Damage> {
    match heap.check() {
        Err(Error::HeapDamaged { report }) => report.damage,
        Ok(()) => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

type Told = Arc<Mutex<Vec<Damage>>>;

/// Options that note the reported damage.
fn noting() -> (DebugOptions, Told) {
    let told = Told::default();
    let notes = Arc::clone(&told);
    let options =
        DebugOptions::new().on_damage(move |damage| notes.lock().unwrap().push(damage.clone()));
    (options, told)
}

/// Returns a heap that the CPU and the GPU reach, and one that only the GPU reaches.
fn heaps(driver: &Driver) -> [Heap; 2] {
    let alone = watched(driver).access(Location::Host, Access::None);
    [
        watched(driver).build(driver).unwrap(),
        alone.build(driver).unwrap(),
    ]
}

#[test]
fn a_gpus_writes_beside_blocks_of_all_sizes_are_found() {
    for driver in drivers() {
        for heap in heaps(&driver) {
            for bytes in [1, 48, 100, 2048, 5001, 300_000, 3 * MIB] {
                for align in [1, 256, 65_536] {
                    let line = line!() + 1;
                    let block = heap.allocate(aligned(bytes, align)).unwrap();
                    assert_eq!(block.device_ptr().0 % align, 0);
                    let start = block.device_ptr().0;
                    gpu_writes(&driver, start, -3, 2);
                    gpu_writes(&driver, start, bytes as i64, 1);
                    assert_eq!(heap.stats().live, bytes);
                    drop(block);
                    let found = damage(&heap);
                    let kinds: Vec<_> = found.iter().map(|damage| damage.kind).collect();
                    assert_eq!(kinds, [DamageKind::Underrun, DamageKind::Overrun]);
                    let ranges: Vec<_> = found
                        .iter()
                        .map(|damage| damage.bytes.as_ref().unwrap())
                        .map(|wrong| (wrong.first, wrong.last, wrong.count, wrong.found.clone()))
                        .collect();
                    let end = bytes as i64;
                    assert_eq!(ranges[0], (-3, -2, 2, vec![1, 1]));
                    assert_eq!(ranges[1], (end, end, 1, vec![1]));
                    assert_eq!(found[1].address, start + bytes);
                    let block = found[1].block.as_ref().unwrap();
                    assert_eq!((block.bytes, block.align), (bytes, align));
                    let place = block.allocated.place.as_ref().unwrap();
                    assert!(place.contains(&format!("debug.rs:{line}:")), "{place}");
                    assert_eq!(damage(&heap), [], "each is reported once");
                }
            }
        }
    }
}

#[test]
fn a_check_finds_damage_of_blocks_in_use_once() {
    for driver in drivers() {
        for heap in heaps(&driver) {
            let block = heap.allocate(layout(4096)).unwrap();
            assert_eq!(damage(&heap), []);
            gpu_writes(&driver, block.device_ptr().0, 4096 + 5, 3);
            let found = damage(&heap);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(
                (found[0].kind, found[0].seen),
                (DamageKind::Overrun, Seen::Checked)
            );
            drop(block);
            assert_eq!(damage(&heap), []);
        }
    }
}

#[test]
fn a_write_to_a_freed_block_is_found_wherever_it_is_then() {
    for driver in drivers() {
        for (way, expected) in [
            ("check", Seen::Checked),
            ("quarantine", Seen::LeftQuarantine),
            ("trim", Seen::LeftQuarantine),
            ("end", Seen::Ended),
        ] {
            let (options, told) = noting();
            let heap = on(&driver)
                .debug(options.quarantine(100_000))
                .build(&driver)
                .unwrap();
            let block = heap.allocate(layout(20_000)).unwrap();
            let start = block.device_ptr().0;
            drop(block);
            gpu_writes(&driver, start, 19_000, 8);
            match way {
                "check" => drop(damage(&heap)),
                // The next ones push it out.
                "quarantine" => (0..6).for_each(|_| drop(heap.allocate(layout(20_000)).unwrap())),
                "trim" => assert!(heap.trim().unwrap() > 0),
                _ => drop(heap),
            }
            let told = told.lock().unwrap();
            assert_eq!(told.len(), 1, "{way}: {told:?}");
            assert_eq!(
                (told[0].kind, told[0].seen),
                (DamageKind::UseAfterFree, expected)
            );
            let wrong = told[0].bytes.as_ref().unwrap();
            assert_eq!(
                (wrong.first, wrong.last, wrong.expected),
                (19_000, 19_007, 0xdd)
            );
            assert!(told[0].block.as_ref().unwrap().freed.is_some());
        }
        nothing_held(&driver);
    }
}

#[test]
fn work_that_a_block_waits_for_may_write_to_it_and_later_work_may_not() {
    for driver in drivers() {
        let heap = watched(&driver).build(&driver).unwrap();
        let stream = Stream::new(&driver, 0).unwrap();
        let block = heap.allocate(layout(MIB)).unwrap();
        let start = block.device_ptr();
        // SAFETY: the block is freed after the stream's work.
        unsafe { stream.memset_async(start, 3, MIB).unwrap() };
        block.free_after(&stream).unwrap();
        assert_eq!(heap.live_blocks().unwrap(), []);
        assert_eq!(heap.stats().deferred_blocks, 1);
        stream.synchronize().unwrap();
        assert_eq!(heap.collect().unwrap(), 1);
        assert_eq!(damage(&heap), []);
        gpu_writes(&driver, start.0, 0, 16);
        let found = damage(&heap);
        assert_eq!(found[0].kind, DamageKind::UseAfterFree);
        let freed = found[0].block.as_ref().unwrap().freed.as_ref().unwrap();
        assert!(
            freed.place.as_ref().unwrap().contains("debug.rs"),
            "{freed}"
        );
        // A deferred block is checked when the heap ends, too.
        let (options, told) = noting();
        let heap = on(&driver).debug(options).build(&driver).unwrap();
        let block = heap.allocate(layout(100)).unwrap();
        gpu_writes(&driver, block.device_ptr().0, 100, 1);
        block.free_after(&stream).unwrap();
        drop(heap);
        assert_eq!(told.lock().unwrap()[0].kind, DamageKind::Overrun);
        drop(stream);
    }
}

#[test]
fn a_refused_deferral_leaves_the_block_in_use() {
    let (driver, other) = (simulated(), simulated());
    let heap = watched(&driver).build(&driver).unwrap();
    let stream = Stream::new(&other, 0).unwrap();
    let block = heap.allocate(layout(100)).unwrap();
    let refused = block.free_after(&stream).unwrap_err();
    assert_eq!(heap.live_blocks().unwrap().len(), 1);
    drop(refused);
    assert_eq!(heap.live_blocks().unwrap(), []);
    assert_eq!(damage(&heap), []);
}

#[cfg(feature = "portable")]
#[test]
fn wrong_frees_by_address_are_refused_and_told() {
    use allocator_api2::alloc::Allocator;

    let driver = simulated();
    let heap = watched(&driver).build(&driver).unwrap();
    for bytes in [100, 10_000, 2 * MIB] {
        let (right, less) = (layout(bytes), layout(bytes - 1));
        let pointer = Allocator::allocate(&heap, right).unwrap().cast::<u8>();
        let address = pointer.as_ptr() as u64;
        // SAFETY: against the contract; the heap under test must refuse invalid frees.
        unsafe {
            heap.deallocate(pointer.add(16), right);
            assert_eq!(heap.stats().live_blocks, 1);
            heap.deallocate(pointer, less);
            assert_eq!((heap.stats().live_blocks, heap.stats().live), (0, 0));
            heap.deallocate(pointer, right);
        }
        assert_eq!(heap.stats().live_blocks, 0);
        let found = damage(&heap);
        let seen: Vec<_> = found
            .iter()
            .map(|damage| (damage.kind, damage.address))
            .collect();
        assert_eq!(
            seen,
            [
                (DamageKind::InvalidFree, address + 16),
                (DamageKind::WrongLayout, address),
                (DamageKind::DoubleFree, address),
            ]
        );
        // The address is within a block, whose words come along.
        assert_eq!(found[0].block.as_ref().unwrap().bytes, bytes);
        assert!(found.iter().all(|damage| damage.by.is_some()));
    }
    // SAFETY: as above; an address that is not the heap's.
    unsafe { heap.deallocate(std::ptr::NonNull::dangling(), layout(8)) };
    assert_eq!(damage(&heap)[0].kind, DamageKind::InvalidFree);
}

#[test]
fn new_blocks_and_freed_ones_are_full_of_their_patterns() {
    let driver = simulated();
    let options = DebugOptions::new().fresh(0xff).freed(0x11);
    let heap = on(&driver).debug(options).build(&driver).unwrap();
    for bytes in [3, 3000, MIB] {
        let block = heap.allocate(layout(bytes)).unwrap();
        let mut found = vec![0_u8; bytes as usize];
        block.read_at(0, &mut found).unwrap();
        assert!(found.iter().all(|&byte| byte == 0xff));
        let zeroed = heap.allocate_zeroed(layout(bytes)).unwrap();
        zeroed.read_at(0, &mut found).unwrap();
        assert!(found.iter().all(|&byte| byte == 0));
        let pointer = block.cpu().unwrap().as_ptr();
        drop(block);
        // SAFETY: the heap's memory, which nothing writes meanwhile.
        let freed = unsafe { std::slice::from_raw_parts(pointer, bytes as usize) };
        assert!(freed.iter().all(|&byte| byte == 0x11));
    }
    assert_eq!(damage(&heap), []);
}

#[test]
fn blocks_in_quarantine_are_not_given_out_and_fail_no_allocation() {
    let driver = simulated();
    let options = DebugOptions::new().quarantine(64 * MIB);
    let heap = on(&driver)
        .limit(16 * MIB)
        .debug(options)
        .build(&driver)
        .unwrap();
    let mut offsets = std::collections::HashSet::new();
    for _ in 0..100 {
        let block = heap.allocate(layout(1000)).unwrap();
        assert!(offsets.insert(block.offset()));
    }
    let stats = heap.stats();
    assert_eq!((stats.live_blocks, stats.used), (0, 0));
    assert!(stats.quarantined >= 100_000, "{stats:?}");
    let totals = heap.occupancy().totals();
    assert_eq!((totals.used, totals.cached), (0, stats.quarantined));
    // Two of them, no more, beside each other.
    for _ in 0..4 {
        drop(heap.allocate(layout(6 * MIB)).unwrap());
    }
    assert_eq!(damage(&heap), []);
    heap.trim().unwrap();
    assert_eq!((heap.backed(), heap.stats().quarantined), (0, 0));
}

#[test]
fn leaks_are_told_by_place_when_the_last_handle_goes() {
    let driver = simulated();
    let told: Arc<Mutex<Vec<LeakReport>>> = Arc::default();
    let notes = Arc::clone(&told);
    let options =
        DebugOptions::new().on_leaks(move |report| notes.lock().unwrap().push(report.clone()));
    let heap = on(&driver).debug(options).build(&driver).unwrap();
    let other = heap.clone();
    let few = line!() + 1;
    let large: Vec<Block> = (0..2)
        .map(|_| heap.allocate(layout(5000)).unwrap())
        .collect();
    let many = line!() + 1;
    let small: Vec<Block> = (0..5).map(|_| heap.allocate(layout(50)).unwrap()).collect();
    drop(heap.allocate(layout(9)).unwrap());
    let live = heap.live_blocks().unwrap();
    assert_eq!(live.len(), 7);
    assert!(live.is_sorted_by_key(|block| block.number));
    drop(heap);
    assert_eq!(told.lock().unwrap().len(), 0, "there is another handle");
    drop(other);
    {
        let told = told.lock().unwrap();
        let report = &told[0];
        assert_eq!((report.blocks, report.bytes), (7, 10_250));
        let places: Vec<_> = report.places.iter().map(|p| (p.blocks, p.bytes)).collect();
        assert_eq!(places, [(2, 10_000), (5, 250)]);
        for (leaks, line) in report.places.iter().zip([few, many]) {
            let place = leaks.first.allocated.place.as_ref().unwrap();
            // Each statement has three lines.
            let lines = (line..line + 3).map(|line| format!("debug.rs:{line}:"));
            assert!(lines.into_iter().any(|at| place.contains(&at)), "{place}");
        }
        assert!(
            report.to_string().contains("5 blocks, 250 bytes"),
            "{report}"
        );
    }
    drop((large, small));
    nothing_held(&driver);
    assert_eq!(told.lock().unwrap().len(), 1);
}

#[test]
fn the_callback_may_use_the_heap_and_backtraces_name_the_dropping_code() {
    let driver = simulated();
    let kept: Arc<Mutex<Option<Heap>>> = Arc::default();
    let notes: Arc<Mutex<Vec<String>>> = Arc::default();
    let (theirs, words) = (Arc::clone(&kept), Arc::clone(&notes));
    let options = DebugOptions::new()
        .backtraces(true)
        .on_damage(move |damage| {
            let heap = theirs.lock().unwrap().clone();
            if let Some(heap) = heap {
                drop(heap.allocate(layout(100)).unwrap());
                assert!(heap.stats().live_blocks < 2);
            }
            words.lock().unwrap().push(damage.to_string());
        });
    let heap = on(&driver).debug(options).build(&driver).unwrap();
    *kept.lock().unwrap() = Some(heap.clone());
    let block = heap.allocate(layout(64)).unwrap();
    gpu_writes(&driver, block.device_ptr().0, 64, 8);
    drops_it(block);
    let notes = notes.lock().unwrap();
    assert_eq!(notes.len(), 1);
    // A stripped program has no names to print.
    let named = notes[0].contains("drops_it") || notes[0].contains("0: <unknown>");
    assert!(named, "{}", notes[0]);
    // Nor are they of the heap's own code and of the code that began the thread.
    let ours = ["egmem_heap::debug", "__rust_begin_short_backtrace"];
    assert!(
        !ours.iter().any(|ours| notes[0].contains(ours)),
        "{}",
        notes[0]
    );
    kept.lock().unwrap().take();
}

#[inline(never)]
fn drops_it(block: Block) {
    drop(block);
}

#[test]
fn a_hundred_thousand_blocks_of_many_threads_are_watched() {
    let driver = simulated();
    let (options, told) = noting();
    let heap = on(&driver).debug(options).build(&driver).unwrap();
    let most = Arc::new(Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for seed in 1..=4 {
            let (heap, most) = (&heap, &most);
            scope.spawn(move || {
                let mut random = Random(seed);
                for _ in 0..25_000 {
                    let block = heap.allocate(layout(1 + random.below(300))).unwrap();
                    block.put(0, 7_u8).unwrap();
                    let mut all = most.lock().unwrap();
                    all.push(block);
                    // Those of other threads too.
                    let other = random.below(all.len() as u64 * 3) as usize;
                    let gone = (other < all.len()).then(|| all.swap_remove(other));
                    drop(all);
                    drop(gone);
                }
            });
        }
    });
    let blocks = std::mem::take(&mut *most.lock().unwrap());
    assert!(blocks.len() > 50_000, "{}", blocks.len());
    assert_eq!(heap.live_blocks().unwrap().len(), blocks.len());
    let live: u64 = blocks.iter().map(|block| block.len()).sum();
    assert_eq!(heap.stats().live, live);
    assert_eq!(damage(&heap), []);
    gpu_writes(&driver, blocks[777].device_ptr().0, -1, 1);
    assert_eq!(damage(&heap).len(), 1);
    drop(heap);
    drop(blocks);
    assert_eq!(told.lock().unwrap().len(), 1);
    nothing_held(&driver);
}

#[test]
fn reports_are_data_and_words() {
    let driver = simulated();
    let heap = watched(&driver).build(&driver).unwrap();
    let block = heap.allocate(layout(64)).unwrap();
    gpu_writes(&driver, block.device_ptr().0, 64, 40);
    let Err(Error::HeapDamaged { report }) = heap.check() else {
        panic!("40 bytes after the block");
    };
    let text = serde_json::to_string(&report).unwrap();
    let back: egmem::heap::debug::DamageReport = serde_json::from_str(&text).unwrap();
    assert_eq!(back, *report);
    let words = report.to_string();
    for part in [
        "bytes after a block",
        "40 bytes from 64 to 103",
        "should be 0xfd but read 01 01",
        "64 bytes at offset",
        "debug.rs",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
}

#[test]
fn a_heap_without_the_debug_mode_says_so() {
    let driver = simulated();
    let heap = Heap::on(NodeId(0)).build(&driver).unwrap();
    for error in [
        heap.check().unwrap_err(),
        heap.live_blocks().unwrap_err(),
        heap.leaks().unwrap_err(),
    ] {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
}

#[cfg(feature = "portable")]
#[test]
fn a_shared_block_has_its_guards_and_an_importers_write_is_found() {
    use egmem::driver::HandleType;
    use egmem::share::ImportOptions;

    let driver = simulated();
    let heap = watched(&driver).shareable().build(&driver).unwrap();
    let block = Arc::new(heap.allocate(layout(1000)).unwrap());
    let shared = Arc::clone(&block).share_arc().unwrap();
    let description = shared.describe(Access::ReadWrite).unwrap();
    let handles = shared.export(HandleType::PosixFd).unwrap();
    let imported = ImportOptions::new()
        .import(&driver, &description, handles)
        .unwrap();
    imported.put(992, 42_u64).unwrap();
    assert_eq!(block.get::<u64>(992).unwrap(), 42);
    assert_eq!(damage(&heap), []);
    gpu_writes(&driver, egmem::Memory::device_ptr(&imported).0, 1000, 8);
    assert_eq!(damage(&heap)[0].kind, DamageKind::Overrun);
}
