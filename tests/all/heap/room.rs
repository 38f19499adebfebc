//! The errors of a heap without room, and that it reports them before it makes memory.

use egmem::driver::{Access, Call};
use egmem::heap::{DebugOptions, Relief};
use egmem::topology::Share;
use egmem::{Block, Error, Explained, NoRoom, Stream};

use super::*;

const GIB: u64 = 1 << 30;

fn creates(driver: &Driver) -> u64 {
    driver.sim().unwrap().count(Call::MemCreate)
}

fn why(error: &Error) -> NoRoom {
    match error {
        Error::HeapFull { why, .. } => *why,
        other => panic!("{other}"),
    }
}

#[test]
fn more_than_the_node_has_is_not_reserved_in_part() {
    let mut machine = Machine::gh200();
    machine.nodes[0].memory = GIB;
    let driver = Driver::simulated(machine).unwrap();
    let heap = on(&driver).limit(16 * GIB).build(&driver).unwrap();
    let block = heap.allocate(layout(1)).unwrap();
    let before = creates(&driver);
    let error = heap.reserve(8 * GIB).unwrap_err();
    let expected = matches!(error, Error::NodeTooFull { requested, free, .. }
        if requested == 8 * GIB && free == GIB - 8 * MIB);
    assert!(expected, "{error}");
    assert_eq!((creates(&driver), heap.backed()), (before, 8 * MIB));
    drop((block, heap));
    let options = on(&driver).limit(16 * GIB).reserve(8 * GIB);
    let error = options.build(&driver).unwrap_err();
    assert!(matches!(error, Error::NodeTooFull { .. }), "{error}");
    assert_eq!(creates(&driver), before);
    nothing_held(&driver);
}

/// Where the kernel's counters would not be asked for so little by allocations.
#[test]
fn a_little_more_than_the_node_has_is_not_reserved_in_part() {
    let mut machine = Machine::gh200();
    machine.nodes[0].memory = 32 * MIB;
    let driver = Driver::simulated(machine).unwrap();
    let heap = on(&driver).chunk(2 * MIB).build(&driver).unwrap();
    let error = heap.reserve(40 * MIB).unwrap_err();
    assert!(matches!(error, Error::NodeTooFull { .. }), "{error}");
    assert_eq!(heap.backed(), 0);
    heap.reserve(32 * MIB).unwrap();
}

#[test]
fn more_than_the_nodes_have_is_not_reserved_in_part() {
    let mut machine = Machine::gh200x4();
    for node in &mut machine.nodes[..2] {
        node.memory = GIB;
    }
    let driver = Driver::simulated(machine).unwrap();
    let shares = [0, 1].map(|node| Share {
        node: NodeId(node),
        bytes: 8 * GIB,
    });
    let heap = Heap::spread(&shares).build(&driver).unwrap();
    let error = heap.reserve(4 * GIB).unwrap_err();
    assert!(matches!(error, Error::NodesTooFull { .. }), "{error}");
    assert_eq!((creates(&driver), heap.backed()), (0, 0));
}

#[test]
fn more_than_the_limit_is_not_reserved_in_part() {
    let driver = simulated();
    let heap = on(&driver).limit(64 * MIB).build(&driver).unwrap();
    let _block = heap.allocate(layout(3 * MIB)).unwrap();
    for bytes in [62 * MIB, 2 * GIB, u64::MAX] {
        let error = heap.reserve(bytes).unwrap_err();
        let Error::HeapFull {
            requested,
            limit,
            used,
            free,
            ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!(why(&error), NoRoom::Limit);
        assert_eq!(
            (requested, limit, used, free),
            (bytes, 64 * MIB, 3 * MIB, 5 * MIB)
        );
    }
    assert_eq!(heap.backed(), 8 * MIB);
    heap.reserve(61 * MIB).unwrap();
}

#[test]
fn caches_of_threads_are_free_for_a_reservation() {
    let driver = simulated();
    let heap = on(&driver).limit(8 * MIB).build(&driver).unwrap();
    drop(heap.allocate(layout(64 << 10)).unwrap());
    assert!(heap.stats().cached > 0, "this tests nothing");
    heap.reserve(8 * MIB).unwrap();
}

#[test]
fn a_full_heap_says_how_full_it_is() {
    let driver = simulated();
    let heap = on(&driver).limit(64 * MIB).build(&driver).unwrap();
    let mut blocks: Vec<Block> = (0..64)
        .map(|_| heap.allocate(layout(MIB)).unwrap())
        .collect();
    let error = heap.allocate(layout(MIB)).unwrap_err();
    assert_eq!(why(&error), NoRoom::Limit);
    assert!(error.remedy().contains("larger limit"));
    // Half of it is free, in pieces.
    let mut keep = false;
    blocks.retain(|_| {
        keep = !keep;
        keep
    });
    let error = heap.allocate(layout(2 * MIB)).unwrap_err();
    assert_eq!(
        error,
        Error::HeapFull {
            requested: 2 * MIB,
            align: 1,
            guards: 0,
            why: NoRoom::Fragments,
            limit: 64 * MIB,
            used: 32 * MIB,
            free: 32 * MIB,
            largest_free: MIB,
        }
    );
    assert_eq!(
        Explained(&error).to_string(),
        "a heap has no room for 2 MiB: enough is free, but it is fragmented (limit 64 MiB; 32 MiB in use, \
         32 MiB free, largest free range 1 MiB); ask for smaller blocks, free those in between, or build \
         the heap with a larger limit: unused addresses take no memory"
    );
    let error = heap.allocate(aligned(MIB, 4 * MIB)).unwrap_err();
    assert!(
        error.to_string().contains("1 MiB aligned to 4 MiB"),
        "{error}"
    );
    assert_eq!(heap.stats().failed, 3);
}

#[test]
fn a_piece_at_the_wrong_address_is_told_from_none() {
    let driver = simulated();
    let heap = on(&driver).limit(8 * MIB).build(&driver).unwrap();
    let four: Vec<Block> = (0..4)
        .map(|_| heap.allocate(layout(2 * MIB)).unwrap())
        .collect();
    let at = four[0].device_ptr().0 + 2 * MIB;
    // Of the three last ones, those at multiples of 4 MiB stay.
    let kept: Vec<Block> = four
        .into_iter()
        .filter(|block| block.device_ptr().0.is_multiple_of(4 * MIB))
        .collect();
    assert!(kept.len() < 4 && at > 0);
    let error = heap.allocate(aligned(MIB, 4 * MIB)).unwrap_err();
    assert_eq!(why(&error), NoRoom::Alignment);
    heap.allocate(layout(MIB)).unwrap();
}

#[test]
fn a_request_beyond_all_memory_is_refused_at_once() {
    let driver = simulated();
    let heap = on(&driver).limit(64 * MIB).build(&driver).unwrap();
    for align in [1 << 40, 1 << 62] {
        let error = heap.allocate(aligned(1, align)).unwrap_err();
        let named = matches!(
            error,
            Error::InvalidArgument {
                what: "alignment",
                ..
            }
        );
        assert!(named, "{error}");
    }
    let error = heap.allocate(layout(64 * MIB + 1)).unwrap_err();
    assert_eq!(why(&error), NoRoom::Limit);
    assert_eq!((creates(&driver), heap.stats().failed), (0, 3));
    heap.allocate(aligned(64 * MIB, 2 * MIB)).unwrap();
}

#[test]
fn a_guard_that_leaves_no_room_is_refused_and_others_are_told() {
    let driver = simulated();
    let debug = |guard| {
        let options = on(&driver).limit(8 * MIB);
        options.debug(DebugOptions::new().guard(guard))
    };
    let error = debug(u32::MAX).build(&driver).unwrap_err();
    let named = matches!(error, Error::InvalidArgument { what: "guard", .. });
    assert!(named, "{error}");
    nothing_held(&driver);
    let heap = debug(3 << 20).build(&driver).unwrap();
    drop(heap.allocate(layout(MIB)).unwrap());
    let error = heap.allocate(layout(4 * MIB)).unwrap_err();
    let told = matches!(error, Error::HeapFull { requested, guards, .. }
        if requested == 4 * MIB && guards == 6 * MIB);
    assert!(told, "{error}");
    assert!(error.to_string().contains("6 MiB of guards"), "{error}");
}

#[test]
fn a_refusing_callback_is_named() {
    let driver = simulated();
    let heap = on(&driver)
        .soft_limit(16 * MIB, |_| Relief::Refuse)
        .build(&driver)
        .unwrap();
    let error = heap.allocate(layout(17 * MIB)).unwrap_err();
    assert_eq!(why(&error), NoRoom::SoftLimit { bytes: 16 * MIB });
    let text = Explained(&error).to_string();
    assert!(
        text.contains("soft limit of 16 MiB, which was refused")
            && text.contains("allow the growth"),
        "{text}"
    );
}

/// The error names the whole request, not only the part that the heap's free memory lacks.
#[test]
fn a_full_node_is_told_with_the_bytes_requested_of_the_heap() {
    let mut machine = Machine::gh200();
    machine.nodes[0].memory = 128 * MIB;
    let driver = Driver::simulated(machine).unwrap();
    let heap = on(&driver).limit(GIB).build(&driver).unwrap();
    let _block = heap.allocate(layout(MIB)).unwrap();
    let error = heap.allocate(layout(200 * MIB)).unwrap_err();
    let told = matches!(error, Error::NodeTooFull { requested, free, .. }
        if requested == 200 * MIB && free == 120 * MIB);
    assert!(told, "{error}");
}

#[test]
fn too_many_addresses_are_told_as_that() {
    let driver = simulated();
    let error = on(&driver).limit(1 << 52).build(&driver).unwrap_err();
    let told = matches!(error, Error::OutOfAddresses { requested, .. } if requested == 1 << 52);
    assert!(told, "{error}");
    let text = Explained(&error).to_string();
    assert!(
        text.contains("4 PiB of contiguous addresses") && text.contains("whole limit"),
        "{text}"
    );
    let error = on(&driver).limit(u64::MAX).build(&driver).unwrap_err();
    let told = matches!(&error, Error::InvalidArgument { what: "limit", why, .. } if why.contains(&u64::MAX.to_string()));
    assert!(told, "{error}");
}

#[test]
fn a_gpu_without_access_is_named() {
    let driver = simulated();
    let heap = on(&driver).access(egmem::driver::Location::Device(0), Access::None);
    let heap = heap.build(&driver).unwrap();
    let block = heap.allocate(layout(100)).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let error = stream.fill(&block, 0, 100, 1).unwrap_err();
    let told = matches!(
        error,
        Error::NotAccessible {
            who: egmem::driver::Location::Device(0),
            have: Access::None,
            ..
        }
    );
    assert!(told, "{error}");
}

/// A class that has much memory asks for large slabs, but takes others.
#[test]
fn small_blocks_lie_in_whatever_holes_there_are() {
    // Holes of 32 KiB, of which no one is as large as such a slab; and of 2304 bytes, of which one in four
    // has a page of 2 KiB.
    for (hole, percent) in [(32 << 10, 90), (2304, 20)] {
        for driver in drivers() {
            let options = on(&driver).limit(4 * MIB).chunk(4 * MIB);
            let heap = options.build(&driver).unwrap();
            let allocate = |bytes| heap.allocate(layout(bytes));
            let mut small: Vec<Block> = (0..8192).map(|_| allocate(64).unwrap()).collect();
            let all = std::iter::from_fn(|| allocate(hole).ok());
            let large: Vec<Block> = all.collect();
            let large: Vec<Block> = large.into_iter().step_by(2).collect();
            let free = heap.stats().free;
            assert!(free > MIB);
            let more: Vec<Block> = std::iter::from_fn(|| allocate(64).ok()).collect();
            let bytes = more.len() as u64 * 64;
            assert!(bytes * 100 > free * percent, "{bytes} of {free}");
            small.extend(more);
            drop((small, large));
            assert_eq!(heap.stats().live_blocks, 0);
        }
    }
}

/// Frees blocks of 1500 bytes between large ones, and returns whether the free memory is in one piece.
fn leaves_one_piece(small: usize, rounds: usize) -> bool {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).limit(64 << 20).build(&driver).unwrap();
    heap.reserve(64 << 20).unwrap();
    let block = |bytes| {
        heap.allocate(Layout::from_size_align(bytes, 16).unwrap())
            .unwrap()
    };
    let large = block(1 << 20);
    let blocks: Vec<_> = (0..small).map(|_| block(1500)).collect();
    drop((large, blocks));
    for _ in 0..rounds {
        drop(block(1 << 20));
    }
    heap.stats().fragmentation() == 0.0
}

#[test]
fn a_small_block_that_is_seldom_needed_leaves_no_page_behind() {
    assert!(leaves_one_piece(4, 1));
}

#[test]
fn small_blocks_that_are_no_longer_needed_go_back_after_large_ones() {
    assert!(
        !leaves_one_piece(100, 0),
        "a thread keeps blocks of a class that it often needs"
    );
    assert!(leaves_one_piece(100, 300));
}

/// A large block moves a page off its borders.
#[test]
fn a_page_between_other_blocks_is_free_for_its_size_again() {
    let driver = simulated();
    let heap = on(&driver).limit(2 * MIB).build(&driver).unwrap();
    let mut blocks = vec![heap.allocate(layout(2304)).unwrap()];
    blocks.extend((0..8).map(|_| heap.allocate(layout(2048)).unwrap()));
    while let free @ 1.. = heap
        .stats()
        .largest_free
        .max(u64::from(heap.stats().backed == 0))
    {
        blocks.push(heap.allocate(layout(free)).unwrap());
    }
    drop(blocks.remove(1));
    // Twice: a thread does not keep it either.
    for _ in 0..2 {
        heap.allocate(layout(2048)).unwrap();
    }
    let other = std::thread::scope(|scope| {
        let thread = scope.spawn(|| heap.allocate(layout(1500)).map(drop));
        thread.join().unwrap()
    });
    other.unwrap();
}

#[test]
fn blocks_that_another_thread_has_put_aside_are_used_before_all_caches_are_taken() {
    let driver = simulated();
    let heap = on(&driver).limit(2 * MIB).build(&driver).unwrap();
    let all = std::iter::from_fn(|| heap.allocate(layout(2048)).ok());
    let mut blocks: Vec<_> = all.collect();
    // The thread keeps 32 of these and puts 16 aside, where others find them.
    blocks.truncate(blocks.len() - 49);
    let before = heap.stats().cache_takings;
    let other = std::thread::scope(|scope| {
        let thread = scope.spawn(|| heap.allocate(layout(2048)).map(drop));
        thread.join().unwrap()
    });
    other.unwrap();
    assert_eq!(heap.stats().cache_takings, before);
}
