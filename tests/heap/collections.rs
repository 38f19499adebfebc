//! Collections whose buffers lie in a heap.

use allocator_api2::vec::Vec as HeapVec;
use egmem::proof::Prover;

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
    // The GPU can use it all the same, and scrub it.
    let block = heap.allocate(layout(5000)).unwrap();
    assert!(block.cpu().is_err());
    let zeroed = heap.allocate_zeroed(layout(5000)).unwrap();
    let _ = Prover::new(&driver, 0).unwrap();
    drop((block, zeroed));
}
