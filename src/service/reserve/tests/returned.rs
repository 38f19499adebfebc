//! Memory that comes back from peers.

use super::*;

#[test]
fn a_peer_gets_its_own_back_zeroed_under_another_identity_and_nobody_else_does() {
    let driver = driver();
    let mut none = plan();
    none.reserve.bytes = 0;
    let (reserve, _) = start(&driver, none);
    let mut taken = take(&reserve, Some(&A), 8 * MIB).unwrap();
    assert_eq!(use_by(&mut taken, A, 0xaa), [0]);
    let before = taken[0].memory.identity().unwrap();
    reserve.give_back(taken, None);
    until(&reserve, |levels| levels.kept == 8 * MIB);

    let mut others = take(&reserve, Some(&B), 8 * MIB).unwrap();
    assert_ne!(
        others[0].memory.identity().unwrap().allocation,
        before.allocation
    );
    assert_eq!(use_by(&mut others, B, 0xbb), [0]);

    let mut again = take(&reserve, Some(&A), 8 * MIB).unwrap();
    let after = again[0].memory.identity().unwrap();
    assert_eq!(after.allocation, before.allocation);
    assert_ne!(after.generation, before.generation);
    assert_eq!(use_by(&mut again, A, 0xcc), [0]);
    assert_eq!(reserve.counts().scrubbed_bytes, 8 * MIB);
}

#[test]
fn memory_that_somebody_may_still_have_mapped_goes_back_to_the_driver() {
    let driver = driver();
    for reuse in [Reuse::SamePeer, Reuse::Anyone, Reuse::Never] {
        let mut plan = plan();
        plan.reserve.bytes = 0;
        plan.reuse.policy = reuse;
        let (reserve, _) = start(&driver, plan);
        let mut taken = take(&reserve, Some(&A), 8 * MIB).unwrap();
        use_by(&mut taken, A, 0xaa);
        taken[0].past = Past::Tainted;
        reserve.give_back(taken, None);
        assert_eq!(reserve.levels(), Levels::default(), "{reuse:?}");
        let counts = reserve.counts();
        assert_eq!(counts.discarded_tainted_bytes, 8 * MIB);
        assert!(driver.sim().unwrap().held().is_empty());
    }
}

#[test]
fn with_trust_anybody_gets_it_but_zeroed() {
    let driver = driver();
    let mut plan = plan();
    plan.reserve.bytes = 8 * MIB;
    plan.reuse.policy = Reuse::Anyone;
    let (reserve, _) = start(&driver, plan);
    let mut taken = take(&reserve, Some(&A), 8 * MIB).unwrap();
    let before = taken[0].memory.identity().unwrap();
    use_by(&mut taken, A, 0xaa);
    reserve.give_back(taken, None);
    until(&reserve, |levels| {
        (levels.dirty_warm + levels.dirty_kept) == 0 && levels.warm >= 8 * MIB
    });
    let mut seen = false;
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut others = take(&reserve, Some(&B), 8 * MIB).unwrap();
        let identity = others[0].memory.identity().unwrap();
        seen |= identity.allocation == before.allocation;
        assert_eq!(use_by(&mut others, B, 0xbb), [0]);
        held.push(others);
    }
    assert!(seen, "it was given to another peer");
}

#[test]
fn no_more_is_kept_than_the_plan_says_and_what_cannot_be_zeroed_is_discarded() {
    let driver = driver();
    let mut plan = plan();
    plan.reserve.bytes = 0;
    plan.reuse.keep = 8 * MIB;
    let (reserve, _) = start(&driver, plan);
    let mut taken = take(&reserve, Some(&A), 16 * MIB).unwrap();
    use_by(&mut taken, A, 1);
    reserve.give_back(taken, None);
    let levels = until(&reserve, |levels| {
        (levels.dirty_warm + levels.dirty_kept) == 0
    });
    assert_eq!((levels.kept, levels.pinned), (8 * MIB, 8 * MIB));

    let mut taken = take(&reserve, Some(&A), 8 * MIB).unwrap();
    use_by(&mut taken, A, 1);
    driver
        .sim()
        .unwrap()
        .fail(Call::MemMap, 1, Code::OUT_OF_MEMORY);
    reserve.give_back(taken, None);
    let levels = until(&reserve, |levels| {
        (levels.dirty_warm + levels.dirty_kept) == 0 && levels.pinned == 0
    });
    assert_eq!(levels.kept, 0);
    assert_eq!(reserve.counts().scrub_failures, 1);
}
