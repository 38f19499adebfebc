//! std's collections in a heap, by std's trait. Compiled with the feature `nightly` alone.

use std::collections::{BTreeMap, VecDeque};

use super::*;

#[test]
fn a_vector_of_stds_grows_where_it_lies() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut numbers = Vec::with_capacity_in(1000, &heap);
    let address = numbers.as_ptr();
    numbers.extend(0..1_000_000_u64);
    assert_eq!(numbers.as_ptr(), address);
    assert!(numbers.iter().enumerate().all(|(at, &n)| at as u64 == n));
    numbers.truncate(5000);
    numbers.shrink_to_fit();
    assert_eq!(numbers.as_ptr(), address);
    let stats = heap.stats();
    // Whole granules of 256 bytes: a collection has all the bytes that its block takes.
    assert_eq!((stats.live_blocks, stats.live), (1, 40_192));
    drop(numbers);
    assert_eq!(heap.stats().live, 0);
}

#[test]
fn others_of_std_live_in_a_heap_and_keep_it() {
    let driver = simulated();
    let heap = on(&driver).build(&driver).unwrap();
    let mut map = BTreeMap::new_in(heap.clone());
    let mut queue = VecDeque::new_in(heap.clone());
    let text: Box<[u8], _> = vec_of(b'x', 10_000, heap.clone()).into_boxed_slice();
    drop(heap);
    for n in 0..10_000_u32 {
        map.insert(n.wrapping_mul(0x9E37_79B9), n);
        queue.push_back(n);
        if n % 3 == 0 {
            queue.pop_front();
        }
    }
    assert_eq!(map.get(&0x9E37_79B9), Some(&1));
    assert_eq!(queue.front(), Some(&3334));
    assert!(text.iter().all(|&byte| byte == b'x'));
    drop((map, queue, text));
    nothing_held(&driver);
}

fn vec_of(byte: u8, count: usize, heap: Heap) -> Vec<u8, Heap> {
    let mut bytes = Vec::new_in(heap);
    bytes.resize(count, byte);
    bytes
}
