//! Collections whose buffers lie in a heap.

use std::ptr::NonNull;

use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec as HeapVec;
use egmem::proof::Prover;
use proptest::prelude::*;

use super::*;

#[test]
fn a_vector_grows_in_the_heap() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut numbers = HeapVec::new_in(&heap);
    for n in 0..300_000_u64 {
        numbers.push(n);
    }
    let address = numbers.as_ptr() as u64;
    let range = heap.device_ptr().0..heap.device_ptr().0 + heap.limit();
    assert!(range.contains(&address));
    assert!(numbers.iter().enumerate().all(|(at, &n)| at as u64 == n));
    assert_eq!(heap.stats().live_blocks, 1);
    numbers.truncate(10);
    numbers.shrink_to_fit();
    assert_eq!(numbers.len(), 10);
    drop(numbers);
    let stats = heap.stats();
    assert_eq!((stats.live_blocks, stats.live), (0, 0));
}

#[test]
fn a_lone_vector_never_moves_and_has_no_more_memory_than_a_chunk_beyond_its_bytes() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut column: HeapVec<u64, &Heap> = HeapVec::with_capacity_in(1000, &heap);
    let first = column.as_ptr();
    for number in 0..(64 * MIB / 8) {
        column.push(number);
    }
    assert_eq!(column.as_ptr(), first);
    assert!(column.iter().copied().eq(0..64 * MIB / 8));
    let (capacity, backed) = (8 * column.capacity() as u64, heap.stats().backed_high_water);
    assert!(backed < capacity + 8 * MIB, "{backed} bytes for {capacity}");
}

/// Which only unsafe code can do. The effect on others' blocks is undefined, but the counts stay right.
#[test]
fn a_block_freed_twice_is_not_counted_twice_nor_given_out_twice() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let wall = heap.allocate(layout(3 * MIB)).unwrap();
    for large in [3 * MIB, 3 * MIB + 1] {
        let memory = Allocator::allocate(&&heap, layout(large)).unwrap();
        for _ in 0..2 {
            // SAFETY: the second time, of a value that nothing uses by then.
            unsafe { heap.deallocate(memory.cast(), layout(large)) };
        }
    }
    let stats = heap.stats();
    assert_eq!((stats.live_blocks, stats.live), (0, 0));
    assert_eq!((stats.free, stats.used), (5 * MIB, 3 * MIB));
    let one = heap.allocate(layout(3 * MIB)).unwrap();
    let other = heap.allocate(layout(3 * MIB)).unwrap();
    assert!(one.offset().abs_diff(other.offset()) >= 3 * MIB);
    drop((wall, one, other));
    assert_eq!(heap.stats().live_blocks, 0);
    // As many as were given back, or the heap would wait for blocks for ever.
    for _ in 0..2 {
        std::mem::forget(heap.allocate(layout(1)).unwrap());
    }
}

#[test]
fn a_collections_leak_is_told_as_that() {
    let driver = simulated();
    for backtraces in [false, true] {
        let debug = egmem::heap::DebugOptions::new().backtraces(backtraces);
        let heap = on(&driver).debug(debug).build(&driver).unwrap();
        let mut numbers = HeapVec::new_in(&heap);
        numbers.push(1_u8);
        let hint = "DebugOptions::backtraces(true)";
        let leaks = heap.leaks().unwrap();
        let site = &leaks.places[0].first.allocated;
        assert!(site.in_collection);
        // The place is in the vector's code, not in the heap's.
        let place = site.place.as_ref().unwrap();
        assert!(place.contains("allocator-api2"), "{place}");
        let text = leaks.to_string();
        assert!(
            text.starts_with("1 block with 8 bytes is not freed\n1 block, 8 bytes, allocated at "),
            "{text}"
        );
        assert_eq!(text.contains(hint), !backtraces, "{text}");
        drop(numbers);
        let block = heap.allocate(layout(1)).unwrap();
        let leaks = heap.leaks().unwrap();
        assert!(!leaks.places[0].first.allocated.in_collection);
        let text = leaks.to_string();
        assert!(
            text.starts_with("1 block with 1 byte is not freed\n") && !text.contains(hint),
            "{text}"
        );
        drop(block);
    }
}

#[test]
fn a_vector_grows_and_shrinks_where_it_lies() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut numbers = HeapVec::with_capacity_in(1000, &heap);
    let address = numbers.as_ptr();
    for n in 0..1_000_000_u64 {
        numbers.push(n);
    }
    assert_eq!(numbers.as_ptr(), address);
    // Another lies behind it, and is not overwritten.
    let mut second = HeapVec::new_in(&heap);
    second.resize(20_000, 7_u8);
    numbers.extend_from_slice(&[1; 500_000]);
    assert_ne!(numbers.as_ptr(), address);
    assert!(second.iter().all(|&byte| byte == 7));
    let address = numbers.as_ptr();
    numbers.truncate(5000);
    numbers.shrink_to_fit();
    assert_eq!(numbers.as_ptr(), address);
    assert!(numbers.iter().enumerate().all(|(at, &n)| at as u64 == n));
    let has = 40_000_u64.next_multiple_of(256) + (second.capacity() as u64).next_multiple_of(256);
    assert_eq!(heap.stats().live, has);
    // Smaller than a range may be: it moves to a small block.
    numbers.truncate(10);
    numbers.shrink_to_fit();
    assert_eq!(numbers.as_slice(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    drop((numbers, second));
    let stats = heap.stats();
    assert_eq!((stats.live, stats.live_blocks), (0, 0));
}

#[test]
fn collections_have_all_that_their_blocks_take_except_in_debug_mode() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let debug = on(&driver).debug(egmem::heap::DebugOptions::new());
    let debug = debug.build(&driver).unwrap();
    for (bytes, align, usable) in [
        (0, 8, 0),
        (1, 1, 16),
        (100, 64, 128),
        (129, 1, 144),
        (2049, 16, 2304),
    ] {
        for (heap, expected) in [(&heap, usable), (&debug, bytes)] {
            let layout = aligned(bytes, align);
            let memory = Allocator::allocate(heap, layout).unwrap();
            assert_eq!(memory.len() as u64, expected, "{bytes}");
            assert_eq!(heap.stats().live, expected);
            // SAFETY: allocated above, and not used.
            unsafe { Allocator::deallocate(heap, memory.cast(), layout) };
            assert_eq!(heap.stats().live, 0);
        }
    }
    assert!(Allocator::allocate(&heap, layout(u64::MAX >> 1)).is_err());
}

/// A request that a collection may make of its allocator.
#[derive(Clone, Debug)]
enum Wish {
    Resize {
        bytes: usize,
        log: u32,
        zeroed: bool,
    },
    /// Beside it, so that growth in place has something to run into.
    Allocate {
        bytes: usize,
        zeroed: bool,
    },
    Free(usize),
}

fn wish() -> impl Strategy<Value = Wish> {
    let bytes = || prop_oneof![0_usize..300, 0_usize..5000, 0_usize..300_000];
    prop_oneof![
        6 => (bytes(), prop_oneof![Just(0_u32), 0_u32..13], any::<bool>())
            .prop_map(|(bytes, log, zeroed)| Wish::Resize { bytes, log, zeroed }),
        2 => (bytes(), any::<bool>()).prop_map(|(bytes, zeroed)| Wish::Allocate { bytes, zeroed }),
        1 => any::<usize>().prop_map(Wish::Free),
    ]
}

/// Memory of a heap, and beside it its expected bytes: all that it has, which may be more than was requested.
struct Pair {
    memory: NonNull<u8>,
    layout: Layout,
    bytes: Vec<u8>,
}

impl Pair {
    fn new(heap: &Heap, bytes: usize, zeroed: bool) -> Self {
        let layout = layout(bytes as u64);
        let memory = match zeroed {
            true => Allocator::allocate_zeroed(heap, layout),
            false => Allocator::allocate(heap, layout),
        };
        let memory = memory.unwrap();
        assert!(memory.len() >= bytes);
        let mut new = Self {
            memory: memory.cast(),
            layout,
            bytes: vec![0; memory.len()],
        };
        if zeroed {
            new.check();
        }
        new.write(0);
        new
    }

    /// Gives the bytes from `from` on values that tell one block from another.
    fn write(&mut self, from: usize) {
        let seed = self.memory.as_ptr().addr() >> 4;
        for (at, byte) in self.bytes.iter_mut().enumerate().skip(from) {
            *byte = (at * 31 + seed + 1) as u8;
        }
        let new = &self.bytes[from..];
        // SAFETY: so many bytes are this block's.
        unsafe {
            let end = self.memory.as_ptr().add(from);
            end.copy_from_nonoverlapping(new.as_ptr(), new.len());
        }
    }

    fn check(&self) {
        // SAFETY: so many bytes are this block's, and written by it or the heap.
        let seen = unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.bytes.len()) };
        assert!(seen == self.bytes, "{:?}", self.layout);
    }

    /// Returns one of the layouts that the memory may be named by.
    fn fitting(&self, which: usize) -> Layout {
        let least = self.layout.size();
        let bytes = least + which % (self.bytes.len() - least + 1);
        Layout::from_size_align(bytes, self.layout.align()).unwrap()
    }

    fn resize(&mut self, heap: &Heap, new: Layout, zeroed: bool, which: usize) {
        let (old, memory) = (self.fitting(which), self.memory);
        // SAFETY: allocated from the heap with `old`; both functions allow the size of `new`.
        let resized = unsafe {
            match (new.size() >= old.size(), zeroed) {
                (false, _) => Allocator::shrink(heap, memory, old, new),
                (true, false) => Allocator::grow(heap, memory, old, new),
                (true, true) => Allocator::grow_zeroed(heap, memory, old, new),
            }
        };
        let resized = resized.unwrap();
        assert!(resized.len() >= new.size());
        self.memory = resized.cast();
        self.layout = new;
        assert!(self.memory.as_ptr().addr().is_multiple_of(new.align()));
        let kept = old.size().min(new.size());
        self.bytes.truncate(kept);
        self.bytes.resize(resized.len(), 0);
        if !zeroed || new.size() < old.size() {
            self.write(kept);
        }
        self.check();
        self.write(kept);
    }

    fn free(self, heap: &Heap, which: usize) {
        self.check();
        // SAFETY: allocated from the heap; the layout fits it.
        unsafe { Allocator::deallocate(heap, self.memory, self.fitting(which)) };
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn memory_that_grows_and_shrinks_has_the_bytes_of_a_plain_vector(
        wishes in proptest::collection::vec((any::<usize>(), wish()), 1..120),
    ) {
        let driver = simulated();
        let heap = on(&driver).build(&driver).unwrap();
        let mut pairs = vec![Pair::new(&heap, 100, true)];
        for (which, wish) in wishes {
            match wish {
                Wish::Resize { bytes, log, zeroed } => {
                    let at = which % pairs.len();
                    pairs[at].resize(&heap, aligned(bytes as u64, 1 << log), zeroed, which / 7);
                }
                Wish::Allocate { bytes, zeroed } => pairs.push(Pair::new(&heap, bytes, zeroed)),
                Wish::Free(which) if pairs.len() > 1 => {
                    let at = which % pairs.len();
                    pairs.swap_remove(at).free(&heap, which / 7);
                }
                Wish::Free(_) => {}
            }
            let live: usize = pairs.iter().map(|pair| pair.bytes.len()).sum();
            prop_assert_eq!(heap.stats().live, live as u64);
        }
        for pair in &pairs {
            pair.check();
        }
        pairs.into_iter().for_each(|pair| pair.free(&heap, 5));
        let stats = heap.stats();
        prop_assert_eq!((stats.live, stats.live_blocks), (0, 0));
        drop(heap);
        nothing_held(&driver);
    }
}

/// No other block would fit beside it.
#[test]
fn a_vector_of_over_a_kilobyte_is_resized_within_its_class_in_a_full_heap() {
    let driver = simulated();
    let heap = on(&driver).limit(2 * MIB).build(&driver).unwrap();
    heap.reserve(2 * MIB).unwrap();
    let mut bytes: HeapVec<u8, &Heap> = HeapVec::with_capacity_in(1450, &heap);
    let _rest = heap.allocate(layout(heap.limit() - 2048)).unwrap();
    let first = bytes.as_ptr();
    bytes.extend([7; 1100]);
    for capacity in [1500, 1460] {
        bytes.shrink_to(capacity);
        bytes.try_reserve_exact(capacity - bytes.len()).unwrap();
        assert_eq!((bytes.as_ptr(), bytes[1099]), (first, 7));
    }
}

#[test]
fn a_map_lives_in_the_heap_and_keeps_it() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut map = hashbrown::HashMap::new_in(heap);
    for n in 0..10_000_u32 {
        map.insert(n, n.to_string());
    }
    for n in (0..10_000).step_by(3) {
        assert_eq!(map.remove(&n), Some(n.to_string()));
    }
    assert_eq!(map.get(&1).map(String::as_str), Some("1"));
    drop(map);
    nothing_held(&driver);
}

#[test]
fn a_heap_out_of_the_cpus_reach_holds_no_collections() {
    let driver = simulated();
    let heap = on(&driver)
        .access(egmem::driver::Location::Host, egmem::driver::Access::None)
        .build(&driver)
        .unwrap();
    let mut numbers = HeapVec::<u8, _>::new_in(&heap);
    assert!(numbers.try_reserve(1).is_err());
    drop(numbers);
    // The GPU can still use it, and scrub it.
    let block = heap.allocate(layout(5000)).unwrap();
    assert!(block.cpu().is_err());
    let zeroed = heap.allocate_zeroed(layout(5000)).unwrap();
    let _ = Prover::new(&driver, 0).unwrap();
    drop((block, zeroed));
}
