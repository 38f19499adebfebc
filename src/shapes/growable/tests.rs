use proptest::prelude::*;

use super::*;
use crate::Driver;
use crate::driver::{Access, Call, Code, Location, NodeId};
use egmem_core::Machine;

#[test]
fn a_refusal_in_the_middle_changes_the_access_to_no_chunk() {
    const MIB: u64 = 1 << 20;
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let gpu = Location::Device(0);
    let mut vector = Growable::<u64>::on(NodeId(0))
        .access_by([gpu])
        .max_len(1 << 20)
        .step(2 * MIB)
        .create(&driver)
        .unwrap();
    let chunk = (2 * MIB / 8) as usize;
    for _ in 0..3 {
        vector.extend_from_slice(&vec![1; chunk]).unwrap();
    }
    // The first chunk differs from the others before.
    let hidden = [AccessDesc::new(gpu, Access::None)];
    vector.set_access_of(0..1, &hidden).unwrap();
    let new = [
        AccessDesc::new(Location::Host, Access::Read),
        AccessDesc::new(gpu, Access::Read),
    ];
    let access = |vector: &Growable<u64>| -> Vec<_> {
        let chunks = vector.chunks.iter().map(|chunk| chunk.mapping());
        chunks
            .map(|mapping| (mapping.host(), mapping.access(gpu).unwrap()))
            .collect()
    };
    let before = access(&vector);
    assert_eq!(before[0], (Access::ReadWrite, Access::None));
    assert_eq!(before[1..], [(Access::ReadWrite, Access::ReadWrite); 2]);
    let sim = driver.sim().unwrap();
    for nth in 1..=3 {
        sim.fail(Call::MemSetAccess, nth, Code::UNKNOWN);
        let error = vector.set_access(&new).unwrap_err();
        assert_eq!(error.code(), Some(Code::UNKNOWN));
        assert_eq!(access(&vector), before, "chunk {nth}");
        sim.fail(Call::MemSetAccess, nth, Code::UNKNOWN);
        let all = 0..3 * chunk;
        assert!(vector.set_access_of(all, &new).is_err());
        assert_eq!(access(&vector), before, "chunk {nth}");
    }
    // Memory that is added later is granted as before too.
    vector.push(1).unwrap();
    assert_eq!(access(&vector)[3], before[2]);
    vector.set_access(&new).unwrap();
    assert_eq!(access(&vector), [(Access::Read, Access::Read); 4]);
}

const GRANULE: u64 = 2 << 20;

proptest! {
    #[test]
    fn growth_is_whole_enough_and_fits(
        mapped in 0_u64..1 << 20,
        need in 1_u64..1 << 12,
        more in 0_u64..1 << 12,
        step in 0_u64..1 << 34,
    ) {
        let [mapped, need, room] = [mapped, need, need + more].map(|units| units * GRANULE);
        let bytes = growth((mapped, need, room), step, Granularity::TWO_MIB);
        prop_assert!(Granularity::TWO_MIB.divides(bytes));
        prop_assert!((need..=room).contains(&bytes));
        let wanted = if step == 0 { (mapped / 8).min(LARGEST_STEP) } else { step };
        prop_assert!(bytes >= wanted.min(room));
        // Never more than the step, except to fit the elements.
        prop_assert!(bytes == need || bytes < wanted + GRANULE || bytes == GRANULE);
    }
}
