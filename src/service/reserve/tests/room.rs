//! Requests for more than is ready: the cap, the headroom, and what the driver has.

use super::*;

#[test]
fn the_cap_and_the_headroom_hold_and_free_chunks_give_way_to_requests() {
    let driver = driver();
    let mut cap = plan();
    cap.limits.max_bytes = 40 * MIB;
    let (reserve, filled) = start(&driver, cap);
    filled.unwrap();
    // 32 are warm, and only new memory fits 4; 8 more may be created.
    let small: Vec<_> = (0..3)
        .map(|_| take(&reserve, Some(&A), 4 * MIB).unwrap())
        .collect();
    let levels = reserve.levels();
    assert!(levels.pinned <= 40 * MIB, "{levels:?}");
    let error = take(&reserve, Some(&B), 40 * MIB).unwrap_err();
    assert!(matches!(error, Error::LimitReached { .. }), "{error}");
    assert!(reserve.levels().pinned <= 40 * MIB);
    drop(small);

    let free = free_now(&driver, NodeId(0)).unwrap();
    let mut headroom = plan();
    headroom.limits.headroom = free - 20 * MIB;
    let (reserve, filled) = start(&driver, headroom);
    assert!(
        matches!(
            filled,
            Err(Error::Share(ShareError::Memory(
                MemoryError::NodeTooFull { .. }
            )))
        ),
        "{filled:?}"
    );
    assert!(reserve.levels().warm <= 20 * MIB);
    let error = take(&reserve, Some(&B), 30 * MIB).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Share(ShareError::Memory(MemoryError::NodeTooFull { .. }))
        ),
        "{error}"
    );
}

#[test]
fn a_request_that_cannot_fit_pins_nothing() {
    let driver = driver();
    let free = free_now(&driver, NodeId(0)).unwrap();
    let mut short = plan();
    short.reserve.bytes = 8 * MIB;
    short.limits.headroom = free - 24 * MIB;
    // After the refusal, until the warm chunk is back, the reserve lacks memory.
    short.limits.quiet = PATIENCE;
    let (reserve, filled) = start(&driver, short.clone());
    filled.unwrap();
    let sim = driver.sim().unwrap();
    let made = sim.count(Call::MemCreate);
    let error = take(&reserve, Some(&A), 26 * MIB).unwrap_err();
    let full = MemoryError::NodeTooFull {
        node: NodeId(0),
        requested: 26 * MIB,
        free: 24 * MIB,
    };
    assert_eq!(error, full.into());
    assert_eq!(sim.count(Call::MemCreate), made);
    drop(take(&reserve, Some(&A), 24 * MIB).unwrap());
    drop(reserve);

    let mut cap = short;
    cap.limits.max_bytes = 24 * MIB;
    cap.limits.headroom = 0;
    let (reserve, filled) = start(&driver, cap);
    filled.unwrap();
    let made = sim.count(Call::MemCreate);
    let error = take(&reserve, Some(&A), 26 * MIB).unwrap_err();
    assert!(matches!(error, Error::LimitReached { .. }), "{error}");
    assert_eq!(sim.count(Call::MemCreate), made);
    drop(reserve);

    let mut many = plan();
    many.limits.quiet = PATIENCE;
    let (reserve, _) = start(&driver, many);
    let made = sim.count(Call::MemCreate);
    let parts = crate::share::MAX_PARTS as u64;
    let error = take(&reserve, Some(&A), parts * 8 * MIB + 40 * MIB).unwrap_err();
    assert!(
        matches!(
            error,
            Error::LimitReached {
                what: "parts of one buffer",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(sim.count(Call::MemCreate), made);
}

#[test]
fn overcommit_leaves_the_limit_to_the_driver() {
    let driver = driver();
    let free = free_now(&driver, NodeId(0)).unwrap();
    let mut plan = plan();
    plan.reserve.bytes = 0;
    plan.limits.headroom = free;
    let (reserve, _) = start(&driver, plan.clone());
    take(&reserve, Some(&A), 4 * MIB).unwrap_err();
    let mut allowed = plan;
    allowed.overcommit = Overcommit::Allow;
    let (reserve, _) = start(&driver, allowed);
    take(&reserve, Some(&A), 4 * MIB).unwrap();
}

#[test]
fn a_request_waits_for_memory_that_the_driver_is_releasing() {
    let driver = driver();
    let free = free_now(&driver, NodeId(0)).unwrap();
    let mut full = plan();
    full.reserve.bytes = 0;
    full.limits.headroom = free - 16 * MIB;
    let (reserve, _) = start(&driver, full);
    let chunks = take(&reserve, Some(&A), 16 * MIB).unwrap();
    let mut state = reserve.state();
    state.pinned -= 16 * MIB;
    state.returning += 16 * MIB;
    drop(state);
    let reserve = &reserve;
    std::thread::scope(|scope| {
        let request = scope.spawn(|| take(reserve, Some(&B), 8 * MIB));
        until(reserve, |_| {
            request.is_finished() || reserve.counts().failed_chunks > 0
        });
        drop(chunks);
        let mut state = reserve.state();
        state.returning -= 16 * MIB;
        state.arrived();
        drop(state);
        reserve.changed.notify_all();
        assert_eq!(total(&request.join().unwrap().unwrap()), 8 * MIB);
    });
    assert_eq!(reserve.state().returning, 0);
}

#[test]
fn a_granule_for_probes_evicts_nothing() {
    let driver = driver();
    let mut cap = plan();
    cap.limits.max_bytes = 36 * MIB;
    let (reserve, filled) = start(&driver, cap);
    filled.unwrap();
    let granules = [(); 2].map(|()| reserve.add_granule(1).unwrap());
    assert!(granules.iter().all(|chunk| chunk.bytes() == 2 * MIB));
    assert!(reserve.add_granule(1).is_none());
    let levels = reserve.levels();
    assert_eq!((levels.warm, levels.pinned), (32 * MIB, 36 * MIB));
    // The reserve was not too small.
    assert_eq!(reserve.counts().taken_cold_bytes, 0);
    reserve.give_back(Vec::from(granules), None);
    assert!(reserve.add_granule(crate::share::MAX_PARTS).is_none());
    drop(reserve);
    assert!(driver.sim().unwrap().held().is_empty());
}

#[test]
fn memory_goes_without_a_granule_that_the_driver_refuses() {
    let driver = driver();
    let (reserve, filled) = start(&driver, plan());
    filled.unwrap();
    let before = reserve.levels().pinned;
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 1, Code::OUT_OF_MEMORY);
    assert!(reserve.add_granule(1).is_none());
    assert_eq!(reserve.levels().pinned, before);
}
