//! Parts of the Python package that need no interpreter, with their own tests. cargo links no test of that crate itself: its symbols
//! are the interpreter's.

#[allow(dead_code)]
#[path = "../../src/python/torch_alloc/graphs.rs"]
mod graphs;
#[path = "../../src/python/holds.rs"]
mod holds;

use egmem::driver::{NodeId, StreamHandle};
use egmem::{Block, Driver, Heap, Machine};
use graphs::{Graphs, PoolId};

const GPU: i32 = 0;
const ONE: PoolId = [0, 1];
const TWO: PoolId = [7, 0];
const STREAM: StreamHandle = StreamHandle {
    device: GPU,
    raw: 1,
};

fn block() -> Block {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = Heap::on(NodeId(0)).build(&driver).unwrap();
    heap.allocate(std::alloc::Layout::new::<[u8; 512]>())
        .unwrap()
}

/// An allocation asks for the pools, and takes its block from the heap without the lock.
#[test]
fn a_pool_that_is_released_during_an_allocation_keeps_no_block() {
    let mut graphs = Graphs::default();
    graphs.begin(GPU, ONE);
    graphs.begin(GPU, TWO);
    let pools = graphs.of_capture(GPU);
    assert_eq!(pools, [ONE, TWO]);
    assert!(graphs.end(GPU, TWO));
    assert!(graphs.release(TWO).is_some_and(|unused| unused.is_empty()));
    let pools = graphs.without_released(pools);
    assert_eq!(pools, [ONE]);
    graphs.put(pools, block(), STREAM, false);
    assert!(graphs.end(GPU, ONE));
    assert_eq!(graphs.release(ONE).map(|unused| unused.len()), Some(1));
    assert!(graphs.without_released(vec![ONE, TWO]).is_empty());
}
