//! Growth in steps, between which others may grow.

use super::*;

/// Returns the ranges of a step's chunks so far, with the counts of created and granted chunks.
fn counts(backing: &Backing) -> (u64, u64) {
    (backing.counts().create, backing.counts().set_access)
}

#[test]
fn a_chunk_is_granted_before_the_next_is_created_and_is_no_memory_of_the_heap_before_all_are() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let mut backing = Backing::new(&driver, &plan(64, 4)).unwrap();
    let mut order = backing.order(block(10 * MIB), u64::MAX).unwrap().unwrap();
    for made in 1..=3 {
        assert!(!order.is_made());
        assert_eq!(backing.step(&mut order), Ok(true));
        assert_eq!(counts(&backing), (made, made));
        assert_eq!((backing.backed(), backing.chunks().count()), (0, 0));
    }
    assert!(order.is_made());
    assert_eq!(backing.step(&mut order), Ok(false));
    assert!(backing.is_growing());
    let grown = backing.deliver(order);
    assert_eq!(mib(&grown[0]), 0..12);
    assert_eq!((backing.backed(), backing.is_growing()), (12 * MIB, false));
}

#[test]
fn growth_that_was_begun_keeps_its_addresses_and_its_part_of_the_limit() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let mut backing = Backing::new(&driver, &plan(64, 4)).unwrap();
    let mut order = backing.order(block(10 * MIB), u64::MAX).unwrap().unwrap();
    assert_eq!(backing.step(&mut order), Ok(true));
    assert_eq!(grown(&mut backing, block(4 * MIB)), [12..16]);
    // 12 MiB are promised and 4 MiB there.
    assert_eq!(backing.grow_within(block(8 * MIB), 22 * MIB), Ok(None));
    assert!(
        backing
            .grow_within(block(6 * MIB), 22 * MIB)
            .unwrap()
            .is_some()
    );
    while backing.step(&mut order).unwrap() {}
    assert_eq!(mib(&backing.deliver(order)[0]), 0..12);
    assert_eq!(backing.backed(), 22 * MIB);
}

#[test]
fn growth_that_fails_leaves_its_addresses_to_others() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let mut backing = Backing::new(&driver, &plan(64, 4)).unwrap();
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess] {
        let mut order = backing.order(block(10 * MIB), u64::MAX).unwrap().unwrap();
        assert_eq!(backing.step(&mut order), Ok(true));
        sim.fail(call, 1, Code::INVALID_VALUE);
        backing.step(&mut order).unwrap_err();
        assert!(!backing.is_growing());
        assert_eq!(sim.held().physical_handles, 0, "{call:?}");
    }
    assert_eq!(grown(&mut backing, block(64 * MIB)), [0..64]);
}
