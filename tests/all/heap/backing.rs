//! What chunks are made of, and room for blocks where chunks do not join.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use egmem::backing::Why;
use egmem::driver::{Access, Call, Code, HandleTypes, Location};
use egmem::heap::{DebugOptions, NotFreed, Relief};
use egmem::{Backing, Error, Growth, NoRoom, Stream};

use super::*;

const LIMIT: u64 = 64 * MIB;

fn discrete() -> Driver {
    Driver::simulated(Machine::h200x8()).unwrap()
}

/// Heaps whose chunks do not join, and one whose chunks do.
fn kinds(driver: &Driver) -> [HeapOptions; 4] {
    let on = |backing| {
        let options = Heap::on(node(driver)).limit(LIMIT).chunk(4 * MIB);
        options.backing(backing)
    };
    [
        on(Backing::Registered),
        on(Backing::Registered).handle_types(HandleTypes::POSIX_FD),
        on(Backing::Driver).handle_types(HandleTypes::POSIX_FD),
        on(Backing::Driver),
    ]
}

#[test]
fn auto_takes_what_the_machine_the_access_and_the_sharing_allow() {
    let (discrete, coherent) = (discrete(), simulated());
    let on = |driver: &Driver| Heap::on(node(driver)).limit(LIMIT);
    let chosen = |options: HeapOptions, driver: &Driver| {
        let heap = options.build(driver).unwrap();
        (heap.backing().backing, heap.backing().why.clone())
    };
    let registered = (Backing::Registered, Why::Faster);
    assert_eq!(chosen(on(&discrete), &discrete), registered);
    let shared = on(&discrete).handle_types(HandleTypes::POSIX_FD);
    assert_eq!(chosen(shared, &discrete), registered);
    let gpu = Location::Device(0);
    let nobody = on(&discrete)
        .access_by::<Location>([])
        .access(Location::Host, Access::None);
    let cases = [
        (on(&coherent), &coherent, Why::Coherent),
        (on(&discrete).access_by([gpu]), &discrete, Why::Access),
        (nobody, &discrete, Why::Access),
        (Heap::on(gpu).limit(LIMIT), &discrete, Why::Location),
    ];
    for (options, driver, why) in cases {
        assert_eq!(
            chosen(options.clone(), driver),
            (Backing::Driver, why.clone())
        );
        let asked = options.backing(Backing::Registered).build(driver);
        match why {
            Why::Coherent => assert_eq!(asked.unwrap().backing().why, Why::Asked),
            _ => assert!(asked.unwrap_err().to_string().contains(&why.to_string())),
        }
    }
    assert_eq!(
        chosen(on(&discrete).backing(Backing::Driver), &discrete),
        (Backing::Driver, Why::Asked)
    );
    nothing_held(&discrete);
}

#[test]
fn a_block_is_copied_in_one_piece_wherever_it_lies() {
    let driver = discrete();
    for options in kinds(&driver) {
        let heap = options.build(&driver).unwrap();
        let stream = Stream::new(&driver, 7).unwrap();
        let mut random = Random(11);
        for _ in 0..40 {
            let bytes = 1 + random.below(9 * MIB);
            let block = heap.allocate(layout(bytes)).unwrap();
            // SAFETY: the block is this test's, and the wait follows.
            unsafe { stream.memset_async(block.device_ptr(), 7, bytes) }.unwrap();
            stream.synchronize().unwrap();
            assert_eq!(block.get::<u8>(bytes - 1), Ok(7));
            stream.fill(&block, 0, bytes, 9).unwrap();
            assert_eq!(block.get::<u8>(bytes - 1), Ok(9));
        }
    }
    nothing_held(&driver);
}

#[test]
fn a_block_may_be_larger_than_any_chunk_that_can_be_shared() {
    let driver = discrete();
    let heap = Heap::on(node(&driver))
        .limit(8 << 30)
        .build(&driver)
        .unwrap();
    let block = heap.allocate(layout(5 << 30)).unwrap();
    block.put((5 << 30) - 8, 7_u64).unwrap();
    assert_eq!(heap.stats().driver.create, 1);
    drop((block, heap));
    nothing_held(&driver);
}

#[test]
fn a_block_as_large_as_the_limit_fits_where_all_was_added_in_chunks() {
    let driver = discrete();
    for debug in [false, true] {
        for mut options in kinds(&driver) {
            if debug {
                options = options.debug(DebugOptions::new().guard(0));
            }
            let heap = options.build(&driver).unwrap();
            for _ in 0..3 {
                heap.reserve(LIMIT).unwrap();
                let block = heap.allocate(layout(LIMIT)).unwrap();
                block.put(LIMIT - 8, 1_u64).unwrap();
                drop(block);
                heap.trim().unwrap();
                assert_eq!(heap.backed(), 0);
            }
        }
    }
    nothing_held(&driver);
}

#[test]
fn blocks_in_caches_of_threads_are_in_nobodys_way() {
    let driver = discrete();
    for options in kinds(&driver) {
        let heap = options.build(&driver).unwrap();
        heap.reserve(LIMIT).unwrap();
        let turns = Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..3 {
                    // Two in each chunk, of which each thread keeps some in its cache.
                    let blocks: Vec<_> = (0..32)
                        .map(|_| heap.allocate(layout(2 * MIB)).unwrap())
                        .collect();
                    drop(blocks);
                    drop(heap.allocate(layout(100)).unwrap());
                    drop(heap.allocate(layout(50_000)).unwrap());
                    turns.wait();
                    turns.wait();
                }
            });
            for _ in 0..3 {
                turns.wait();
                assert!(heap.stats().cached > 0, "this tests nothing");
                drop(heap.allocate(layout(LIMIT)).unwrap());
                turns.wait();
            }
        });
    }
    nothing_held(&driver);
}

#[test]
fn a_block_in_use_keeps_its_chunk_and_only_as_many_chunks_go_as_must() {
    let driver = discrete();
    for options in &kinds(&driver)[..3] {
        let heap = options.clone().build(&driver).unwrap();
        heap.reserve(LIMIT).unwrap();
        let small = heap.allocate(layout(300)).unwrap();
        let chunk = small.offset() / (4 * MIB);
        small.put(0, 42_u64).unwrap();
        let before = heap.stats().driver;
        let error = heap.allocate(layout(LIMIT - 2 * MIB)).unwrap_err();
        assert!(
            matches!(
                error,
                Error::HeapFull {
                    why: NoRoom::Limit | NoRoom::Fragments,
                    ..
                }
            ),
            "{error}"
        );
        assert_eq!(
            (heap.backed(), heap.stats().driver.unmap),
            (LIMIT, before.unmap)
        );
        let block = heap.allocate(layout(11 * MIB)).unwrap();
        assert_eq!(heap.stats().driver.unmap, before.unmap + 3);
        assert_eq!(heap.backed(), LIMIT);
        assert_eq!(
            (small.get::<u64>(0), small.offset() / (4 * MIB)),
            (Ok(42), chunk)
        );
        drop((small, block));
        drop(heap.allocate(layout(LIMIT)).unwrap());
    }
    nothing_held(&driver);
}

#[test]
fn idle_chunks_make_room_on_a_full_node() {
    let mut machine = Machine::h200x8();
    machine.nodes[0].memory = 72 * MIB;
    let driver = Driver::simulated(machine).unwrap();
    for options in kinds(&driver).into_iter().take(3) {
        let heap = options.limit(256 * MIB).build(&driver).unwrap();
        heap.reserve(LIMIT).unwrap();
        let small = heap.allocate(layout(300)).unwrap();
        drop(heap.allocate(layout(60 * MIB)).unwrap());
        drop(small);
        let error = heap.allocate(layout(74 * MIB)).unwrap_err();
        assert!(matches!(error, Error::NodeTooFull { .. }), "{error}");
        drop(heap.allocate(layout(72 * MIB)).unwrap());
    }
    nothing_held(&driver);
}

#[test]
fn idle_chunks_make_room_before_anyone_is_asked_to_free_some() {
    let driver = discrete();
    for options in kinds(&driver) {
        let asked = std::sync::Arc::new(AtomicU64::new(0));
        let counter = std::sync::Arc::clone(&asked);
        let heap = options
            .limit(256 * MIB)
            .soft_limit(LIMIT, move |_| {
                counter.fetch_add(1, Relaxed);
                Relief::Refuse
            })
            .build(&driver)
            .unwrap();
        heap.reserve(LIMIT).unwrap();
        let block = heap.allocate(layout(LIMIT)).unwrap();
        assert_eq!((asked.load(Relaxed), heap.backed()), (0, LIMIT));
        heap.allocate(layout(MIB)).unwrap_err();
        assert_eq!(asked.load(Relaxed), 1);
        drop(block);
    }
    nothing_held(&driver);
}

#[test]
fn a_chunk_that_does_not_go_back_stays_and_the_request_fails() {
    let driver = discrete();
    let sim = driver.sim().unwrap();
    for (options, call) in kinds(&driver).into_iter().zip([
        Call::MemHostUnregister,
        Call::MemHostUnregister,
        Call::MemUnmap,
    ]) {
        let heap = options.build(&driver).unwrap();
        heap.reserve(LIMIT).unwrap();
        // The call and its retry.
        for _ in 0..2 {
            sim.fail(call, 3, Code::NOT_PERMITTED);
        }
        let error = heap.allocate(layout(LIMIT)).unwrap_err();
        assert_eq!(error.code(), Some(Code::NOT_PERMITTED));
        assert_eq!((heap.backed(), heap.stats().free), (4 * MIB, 4 * MIB));
        drop(heap.allocate(layout(LIMIT)).unwrap());
    }
    nothing_held(&driver);
}

/// A block, and the byte that all of it should have.
struct Filled(egmem::Block, u8);

impl Filled {
    fn new(heap: &Heap, bytes: u64, value: u8) -> Option<Self> {
        let block = heap.allocate(layout(bytes)).ok()?;
        block.fill(value).unwrap();
        Some(Self(block, value))
    }

    fn check(&self) {
        let last = self.0.len() - 1;
        for at in [0, last / 3, last / 2, last] {
            assert_eq!(
                self.0.get::<u8>(at),
                Ok(self.1),
                "byte {at} of {:?}",
                self.0
            );
        }
    }
}

/// Allocates, frees, resizes, trims and frees after GPU work at random, and checks that no block has another's bytes.
fn use_at_random(heap: &Heap, seed: u64) {
    let streams = [0, 7].map(|gpu| Stream::new(heap.driver(), gpu).unwrap());
    let on_stream = heap.on_stream(&streams[0]).unwrap();
    let (mut random, mut blocks) = (Random(seed), Vec::<Filled>::new());
    for step in 0..400_u64 {
        let sizes = [300, 20_000, 600_000, 3 * MIB, 11 * MIB, LIMIT];
        let size = sizes[random.below(6) as usize];
        let bytes = 1 + random.below(size);
        let at = random.below(blocks.len().max(1) as u64) as usize;
        match random.below(12) {
            0..=4 => blocks.extend(Filled::new(heap, bytes, step as u8)),
            _ if blocks.is_empty() => {}
            5 | 6 => drop(blocks.swap_remove(at)),
            7 => {
                let Filled(block, _) = blocks.swap_remove(at);
                let stream = &streams[(step % 2) as usize];
                // SAFETY: the block is this test's, and freed after the work.
                unsafe { stream.memset_async(block.device_ptr(), 0xee, block.len()) }.unwrap();
                block.free_after(stream).map_err(NotFreed::forget).unwrap();
            }
            8 => drop(heap.trim_to(random.below(LIMIT)).unwrap()),
            9 => {
                let block = on_stream.allocate(layout(1 + bytes / 8));
                if let Ok(block) = block {
                    let len = block.len();
                    streams[0].fill(&block, 0, len - len % 4, 0x55).unwrap();
                }
            }
            10 => drop(heap.reserve(random.below(LIMIT))),
            _ => drop(heap.collect_all().unwrap()),
        }
        assert!(heap.backed() <= heap.limit());
        if step % 16 == 0 {
            blocks.iter().for_each(Filled::check);
        }
    }
    blocks.iter().for_each(Filled::check);
}

#[test]
fn blocks_keep_their_bytes_whatever_chunks_are_made_of() {
    let driver = discrete();
    for (kind, options) in kinds(&driver).into_iter().enumerate() {
        for seed in 1..4 {
            let options = options.clone().scrub_on_free(seed == 2).growth(match seed {
                3 => Growth::gentle(),
                _ => Growth::steady(),
            });
            let options = match seed {
                1 => options.debug(DebugOptions::new()),
                _ => options.decay(Duration::from_millis(20)).grow_ahead(MIB),
            };
            let heap = options.build(&driver).unwrap();
            use_at_random(&heap, seed * 77 + kind as u64);
            if seed == 1 {
                heap.check().unwrap();
            }
        }
    }
    nothing_held(&driver);
}

/// At `vm.max_map_count` a chunk whose registration has ended can get no mapping without pages in its place. GPUs no longer have
/// its pages, so it is not put back.
#[test]
fn chunks_are_given_back_where_the_kernel_has_no_room_for_mappings() {
    let driver = discrete();
    let registered = || driver.sim().unwrap().count(Call::MemHostRegister);
    let unregistered = || driver.sim().unwrap().count(Call::MemHostUnregister);
    for options in kinds(&driver).into_iter().take(2) {
        let heap = options.build(&driver).unwrap();
        let at_work = || {
            let block = heap.allocate(layout(10 * MIB)).unwrap();
            assert_eq!(block.get::<u64>(9 * MIB).unwrap(), 0);
            block.put(9 * MIB, 7_u64).unwrap();
        };
        at_work();
        let before = unregistered();
        let refused = thread::scope(|scope| {
            let trim = || {
                let refused = crate::system_calls::refuse_clearing();
                heap.trim().unwrap();
                refused
            };
            scope.spawn(trim).join().unwrap()
        });
        if !refused {
            println!("not refused: no filters of system calls here");
        }
        assert!(heap.backed() == 0 && unregistered() > before);
        // At the same addresses.
        at_work();
        heap.trim().unwrap();
        drop(heap);
    }
    assert_eq!(registered(), unregistered());
    nothing_held(&driver);
}

#[test]
fn threads_grow_and_make_place_at_once() {
    let driver = discrete();
    for options in kinds(&driver) {
        let heap = options.build(&driver).unwrap();
        thread::scope(|scope| {
            for seed in 1..5_u64 {
                let heap = &heap;
                scope.spawn(move || {
                    let mut random = Random(seed);
                    for step in 0..150_u64 {
                        let size = [5 * MIB, LIMIT][(step % 2) as usize];
                        let bytes = 1 + random.below(size);
                        if let Some(block) = Filled::new(heap, bytes, (step * seed) as u8) {
                            block.check();
                        }
                    }
                });
            }
        });
        drop(heap.allocate(layout(LIMIT)).unwrap());
    }
    nothing_held(&driver);
}

#[cfg(feature = "portable")]
#[test]
fn collections_live_in_registered_memory_that_is_not_shared() {
    use egmem::allocator_api2::vec::Vec;

    let driver = discrete();
    let [registered, shared, ..] = kinds(&driver);
    assert!(shared.build(&driver).unwrap().check_collections().is_err());
    let heap = registered.build(&driver).unwrap();
    let mut numbers = Vec::new_in(&heap);
    // Over the borders of chunks, where it does not grow in place.
    numbers.extend(0..2_000_000_u64);
    assert!(numbers.iter().copied().eq(0..2_000_000));
    drop(numbers);
}
