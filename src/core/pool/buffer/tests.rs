use super::*;
use crate::Machine;
use crate::driver::{Call, Code, NodeId};

fn place() -> (Driver, Pool, Stream, Stream) {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let pool = Pool::options(NodeId(0)).create(&driver).unwrap();
    let [own, other] = [(); 2].map(|()| Stream::new(&driver, 0).unwrap());
    (driver, pool, own, other)
}

#[test]
fn a_free_waits_for_the_end_of_a_capture_and_leaves_it_alone() {
    let ways: [fn(PoolBuffer, &Stream); 3] = [
        |memory, _| drop(memory),
        |memory, other| memory.free_on(other).unwrap(),
        |memory, _| {
            let own = memory.stream().clone();
            memory.free_on(&own).unwrap();
        },
    ];
    for (captured, free) in [0, 1].into_iter().flat_map(|n| ways.map(|way| (n, way))) {
        let (driver, pool, own, other) = place();
        let sim = driver.sim().unwrap();
        let mut memory = pool.allocate(4096, &own).unwrap();
        memory.use_on(&other).unwrap();
        let stream = [&own, &other][captured].clone();
        sim.begin_capture(stream.handle(), false);
        free(memory, &other);
        assert_eq!(
            (sim.count(Call::MemFreeAsync), own.is_capturing()),
            (0, Ok(captured == 0))
        );
        assert_eq!(pool.stats().unwrap().used, 4096, "still captured");
        assert!(sim.end_capture(stream.handle()), "the capture is valid");
        pool.stats().unwrap();
        assert_eq!(sim.count(Call::MemFreeAsync), 1);
        own.synchronize().unwrap();
        other.synchronize().unwrap();
        assert_eq!(pool.stats().unwrap().used, 0);
        pool.destroy().unwrap().unwrap();
    }
}

#[test]
fn memory_is_ordered_after_its_allocation_without_a_wait_over_a_captures_border() {
    let (driver, pool, own, other) = place();
    let sim = driver.sim().unwrap();
    let mut memory = pool.allocate(4096, &own).unwrap();
    let refused = |result: Result<()>| matches!(result, Err(Error::InvalidArgument { .. }));
    sim.begin_capture(own.handle(), false);
    assert!(refused(memory.use_on(&other)));
    assert!(refused(memory.cpu().map(drop)));
    assert!(refused(pool.allocate(4096, &own).map(drop)));
    assert_eq!(other.is_capturing(), Ok(false));
    assert!(sim.end_capture(own.handle()));
    sim.begin_capture(other.handle(), false);
    memory.use_on(&other).unwrap();
    assert_eq!(sim.count(Call::StreamWaitEvent), 0, "the thread has waited");
    assert!(sim.end_capture(other.handle()));
}

/// Of a driver that tells nothing: the work may still run.
#[test]
fn memory_whose_users_can_be_neither_ordered_nor_waited_for_is_leaked() {
    let (driver, pool, own, other) = place();
    let sim = driver.sim().unwrap();
    let mut memory = pool.allocate(4096, &own).unwrap();
    memory.use_on(&other).unwrap();
    for nth in 1..100 {
        for call in [
            Call::EventRecord,
            Call::StreamSynchronize,
            Call::StreamQuery,
        ] {
            sim.fail(call, nth, Code::UNKNOWN);
        }
    }
    memory.free_on(&own).unwrap_err();
    assert_eq!(sim.count(Call::MemFreeAsync), 0);
    sim.cancel_all();
    assert_eq!(pool.stats().unwrap().used, 4096);
}

#[test]
fn an_error_that_is_not_of_captures_delays_no_free() {
    let (driver, pool, own, _) = place();
    let sim = driver.sim().unwrap();
    let memory = pool.allocate(4096, &own).unwrap();
    for nth in 1..100 {
        sim.fail(Call::StreamIsCapturing, nth, Code::INVALID_HANDLE);
    }
    memory.free_on(&own).unwrap();
    assert_eq!(sim.count(Call::MemFreeAsync), 1);
    sim.cancel_all();
}

#[test]
fn waits_use_the_same_event_again() {
    let (driver, pool, own, other) = place();
    let sim = driver.sim().unwrap();
    for _ in 0..5 {
        let mut memory = pool.allocate(4096, &own).unwrap();
        memory.use_on(&other).unwrap();
        other.fill(&memory, 0, 8, 1).unwrap();
        drop(memory);
    }
    // One of each stream.
    assert_eq!(
        (sim.count(Call::EventCreate), sim.count(Call::EventDestroy)),
        (2, 0)
    );
}
