//! Parts of the Python package that need no interpreter, with their own tests. cargo links no test of that crate itself: its symbols
//! are the interpreter's.

#[allow(dead_code)]
#[path = "../../src/python/torch_alloc/graphs.rs"]
mod graphs;
#[path = "../../src/python/holds.rs"]
mod holds;
#[allow(dead_code)]
#[path = "../../src/python/kv/once.rs"]
mod once;

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

/// A thread that waits for a job panics, with another one behind it.
#[test]
fn a_wait_that_panics_ends_the_waits_of_other_threads() {
    let once = once::Once::new((), "lost");
    let (begun, has_begun) = std::sync::mpsc::channel();
    let (end, is_to_end) = std::sync::mpsc::channel::<()>();
    let panics = move |(): ()| -> &'static str {
        begun.send(()).unwrap();
        is_to_end.recv().unwrap();
        panic!("for the test");
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| once.wait(panics));
        has_begun.recv().unwrap();
        assert_eq!(once.poll(|()| Ok::<_, ()>(Some("asked"))), Ok(None));
        let second = scope.spawn(|| once.wait(|()| "waited twice"));
        end.send(()).unwrap();
        assert!(first.join().is_err());
        assert_eq!(second.join().unwrap(), "lost");
    });
    assert!(once.is_over());
    assert_eq!(once.poll(|()| Ok::<_, ()>(None)), Ok(Some("lost")));
    assert_eq!(once.wait(|()| "waited again"), "lost");
}
