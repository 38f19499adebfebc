//! Blocks of one stream on the simulator.

use super::*;
use crate::driver::{Call, Code, NodeId};
use crate::{HeapOptions, Machine};

fn layout(bytes: u64) -> Layout {
    Layout::from_size_align(bytes as usize, 256).unwrap()
}

fn with(options: impl FnOnce(HeapOptions) -> HeapOptions) -> (Driver, Heap, Stream) {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let heap = options(Heap::on(NodeId(0)).limit(64 << 20));
    let stream = Stream::new(&driver, 0).unwrap();
    (driver.clone(), heap.build(&driver).unwrap(), stream)
}

#[test]
fn a_freed_block_is_the_same_streams_again_without_an_event() {
    let (driver, heap, stream) = with(|options| options);
    let sim = driver.sim().unwrap();
    let (on, other) = (
        heap.on_stream(&stream).unwrap(),
        heap.on_stream(&stream).unwrap(),
    );
    for bytes in [100, 1200, 2000, 5000, 65_536, 1 << 20] {
        let first = on.allocate(layout(bytes)).unwrap().device_ptr();
        let elsewhere = heap.allocate(layout(bytes)).unwrap();
        assert_ne!(elsewhere.device_ptr(), first, "another thread may have it");
        assert_ne!(other.allocate(layout(bytes)).unwrap().device_ptr(), first);
        let again = on.allocate(layout(bytes - 1)).unwrap();
        assert_eq!((again.device_ptr(), again.len()), (first, bytes - 1));
        // While the block is in use, no other request gets it.
        assert_ne!(on.allocate(layout(bytes)).unwrap().device_ptr(), first);
    }
    assert_eq!(
        (
            sim.count(Call::EventRecord),
            sim.count(Call::StreamSynchronize)
        ),
        (0, 0)
    );
    let kept = (on.kept.borrow().count + other.kept.borrow().count) as u64;
    assert_eq!(
        (heap.stats().deferred_blocks, heap.stats().live_blocks),
        (0, kept)
    );
    drop((on, other));
    // One event for each handle.
    assert_eq!(
        (sim.count(Call::EventRecord), heap.stats().deferred_blocks),
        (2, kept)
    );
    assert_eq!(heap.collect_all(), Ok(kept as usize));
    assert_eq!((heap.stats().live_blocks, heap.stats().live), (0, 0));
}

#[test]
fn the_cpu_waits_for_the_work_of_earlier_users() {
    let (driver, heap, stream) = with(|options| options);
    let on = heap.on_stream(&stream).unwrap();
    let first = on.allocate(layout(64)).unwrap();
    // SAFETY: allocated until the work has ended, as `again` below sees to.
    unsafe { stream.memset_async(first.device_ptr(), 7, 64).unwrap() };
    drop(first);
    let again = on.allocate(layout(64)).unwrap();
    again.put(0, 5_u8).unwrap();
    stream.synchronize().unwrap();
    assert_eq!((again.get(0), again.get(1)), (Ok(5_u8), Ok(7_u8)));
    // So does another stream.
    // SAFETY: as above.
    unsafe { stream.memset_async(again.device_ptr(), 9, 64).unwrap() };
    drop(again);
    let again = on.allocate(layout(64)).unwrap();
    let second = Stream::new(&driver, 0).unwrap();
    second.fill(&again, 0, 64, 3).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(again.get(63), Ok(3_u8));
}

#[test]
fn what_is_too_much_is_freed_with_one_event() {
    let (driver, heap, stream) = with(|options| options);
    let sim = driver.sim().unwrap();
    let on = heap.on_stream(&stream).unwrap();
    let blocks: Vec<_> = (0..5)
        .map(|_| on.allocate(layout(1 << 20)).unwrap())
        .collect();
    drop(blocks);
    // A 16th of 64 MiB, and the fifth.
    assert_eq!((on.kept(), sim.count(Call::EventRecord)), (0, 1));
    assert_eq!(heap.stats().deferred_blocks, 5);
    let many: Vec<_> = (0..MOST_BLOCKS + 1)
        .map(|_| on.allocate(layout(16)).unwrap())
        .collect();
    drop(many);
    assert_eq!((on.kept(), sim.count(Call::EventRecord)), (0, 2));
}

#[test]
fn an_allocation_that_would_fail_has_what_was_kept_for_other_sizes() {
    let (_, heap, stream) = with(|options| options.wait_for_gpu(true));
    let on = heap.on_stream(&stream).unwrap();
    drop(on.allocate(layout(3 << 20)).unwrap());
    assert_eq!(on.kept(), 3 << 20);
    assert_eq!(on.allocate(layout(64 << 20)).unwrap().len(), 64 << 20);
}

#[test]
fn nothing_is_kept_while_captures_cannot_be_ruled_out_or_bytes_are_looked_after() {
    let (driver, heap, stream) = with(|options| options);
    let sim = driver.sim().unwrap();
    let on = heap.on_stream(&stream).unwrap();
    sim.fail(Call::StreamIsCapturing, 1, Code::UNKNOWN);
    on.allocate(layout(64)).unwrap_err();
    let block = on.allocate(layout(64)).unwrap();
    sim.fail(Call::StreamIsCapturing, 1, Code::UNKNOWN);
    drop(block);
    assert_eq!((on.kept(), heap.stats().deferred_blocks), (0, 1));
    let options: [fn(HeapOptions) -> HeapOptions; 2] = [
        |options| options.scrub_on_free(true),
        |options| options.debug(crate::DebugOptions::new()),
    ];
    for options in options {
        let (_, heap, stream) = with(options);
        let on = heap.on_stream(&stream).unwrap();
        drop(on.allocate(layout(64)).unwrap());
        assert_eq!((on.kept(), heap.stats().deferred_blocks), (0, 1));
    }
}

#[test]
fn other_drivers_and_heaps_and_streams_of_each_thread_are_refused() {
    let (_, heap, stream) = with(|options| options);
    let (driver, other, _) = with(|options| options);
    let refused = |result: Result<OnStream>| {
        matches!(result, Err(Error::InvalidArgument { what: "stream", .. }))
    };
    assert!(refused(other.on_stream(&stream)));
    let raw = StreamHandle::PER_THREAD;
    // SAFETY: the handle lives as long as the device, and nothing is submitted to it.
    let own = unsafe { Stream::borrowed(&driver, StreamHandle { device: 0, raw }) };
    assert!(refused(other.on_stream(&own)));
    let on = heap.on_stream(&stream).unwrap();
    let block = other.allocate(layout(64)).unwrap();
    let refused = on.free(block).unwrap_err();
    assert!(matches!(
        *refused.error,
        Error::InvalidArgument { what: "block", .. }
    ));
    let own = heap.allocate(layout(64)).unwrap();
    let address = own.device_ptr();
    on.free(own).unwrap();
    assert_eq!(on.allocate(layout(64)).unwrap().device_ptr(), address);
}

#[test]
fn blocks_that_cannot_be_freed_after_their_work_are_waited_for_or_lost() {
    for silent in [false, true] {
        let (driver, heap, stream) = with(|options| options);
        let sim = driver.sim().unwrap();
        let on = heap.on_stream(&stream).unwrap();
        drop(on.allocate(layout(64)).unwrap());
        sim.fail(Call::EventRecord, 1, Code::UNKNOWN);
        for nth in 1..100 {
            if silent {
                sim.fail(Call::StreamSynchronize, nth, Code::UNKNOWN);
                sim.fail(Call::StreamQuery, nth, Code::UNKNOWN);
            }
        }
        drop(on);
        assert_eq!(heap.stats().live_blocks, u64::from(silent));
        sim.cancel_all();
    }
}

#[test]
fn blocks_that_are_dropped_during_a_capture_are_freed_after_it() {
    for keeps_handle in [true, false] {
        let (driver, heap, stream) = with(|options| options);
        let sim = driver.sim().unwrap();
        let on = heap.on_stream(&stream).unwrap();
        let first = on.allocate(layout(64)).unwrap();
        let address = first.device_ptr();
        let other = Stream::new(&driver, 0).unwrap();
        sim.begin_capture(stream.handle(), false);
        other.fill(&first, 0, 64, 1).unwrap_err();
        drop(first);
        assert!(on.allocate(layout(64)).is_err() && on.flush().is_err());
        if keeps_handle {
            assert!(sim.end_capture(stream.handle()));
            assert_eq!(on.allocate(layout(64)).unwrap().device_ptr(), address);
        } else {
            drop(on);
            assert_eq!(heap.stats().live_blocks, 1);
            assert!(sim.end_capture(stream.handle()));
            heap.on_stream(&stream).unwrap();
            assert_eq!(heap.collect_all(), Ok(1));
            assert_eq!(heap.stats().live_blocks, 0);
        }
    }
}
