//! Growth when memory is short.

use super::*;
use crate::driver::AllocationProps;

/// Takes all of a node's memory except this many MiB.
fn leave(driver: &Driver, node: i32, mib: u64) {
    let node = Location::HostNuma(node);
    let free = driver.sim().unwrap().free_bytes(node);
    driver
        .mem_create(free - mib * MIB, &AllocationProps::at(node))
        .unwrap();
}

#[test]
fn chunks_are_halved_down_to_what_is_needed() {
    let driver = small(&[256]);
    leave(&driver, 0, 26);
    let mut backing = Backing::new(&driver, &plan(512, 64)).unwrap();
    // 64 and 32 are refused, 16 is more than needed.
    assert_eq!(grown(&mut backing, block(3 * MIB)), [0..16]);
    assert_eq!(backing.counts().halvings, 2);
    // The size that succeeded is now tried first: 16 is refused, 8 is not.
    assert_eq!(grown(&mut backing, block(3 * MIB)), [16..24]);
    assert_eq!(backing.counts().halvings, 3);
    assert_eq!(grown(&mut backing, block(1)), [24..26]);
    let before = backing.counts();
    let error = backing.grow(block(1)).unwrap_err();
    let expected = Error::NodeTooFull {
        node: NodeId(0),
        requested: 2 * MIB,
        free: 0,
    };
    assert_eq!(error, expected);
    // After the first refusal the heap checks the node and does not call the driver.
    assert_eq!(backing.counts().create, before.create);
    // With room again, chunks become larger again.
    assert_eq!(give_back(&mut backing, 0..24 * MIB).bytes(), 24 * MIB);
    let sizes: Vec<u64> = (0..4)
        .map(|_| grown(&mut backing, block(1))[0].clone())
        .map(|range| range.end - range.start)
        .collect();
    assert_eq!(sizes, [2, 4, 8, 10]);
}

#[test]
fn what_is_needed_is_pieced_together_from_what_is_left() {
    let driver = small(&[100, 30]);
    let spread = Plan {
        nodes: [0, 1].map(Location::HostNuma).to_vec(),
        ..plan(512, 16)
    };
    let mut backing = Backing::new(&driver, &spread).unwrap();
    assert_eq!(grown(&mut backing, block(62 * MIB)), [0..64]);
    assert_eq!(grown(&mut backing, block(64 * MIB)), [64..128]);
    let on = |node| {
        let chunks = backing.chunks();
        let bytes = chunks.filter(|chunk| chunk.location() == Location::HostNuma(node));
        bytes.map(Chunk::bytes).sum::<u64>() / MIB
    };
    assert!(on(0) >= 98 && on(0) + on(1) == 128, "{} {}", on(0), on(1));
}

#[test]
fn a_request_beyond_what_the_nodes_have_is_refused_before_a_call() {
    let driver = small(&[100, 30]);
    let sim = driver.sim().unwrap();
    let mut backing = Backing::new(&driver, &plan(512, 16)).unwrap();
    let error = backing.grow(block(110 * MIB)).unwrap_err();
    let expected = Error::NodeTooFull {
        node: NodeId(0),
        requested: 110 * MIB,
        free: 100 * MIB,
    };
    assert_eq!(error, expected);
    let spread = Plan {
        nodes: [0, 1].map(Location::HostNuma).to_vec(),
        ..plan(512, 16)
    };
    let mut both = Backing::new(&driver, &spread).unwrap();
    let error = both.grow(block(131 * MIB)).unwrap_err();
    let expected = Error::NodesTooFull {
        nodes: vec![NodeId(0), NodeId(1)],
        requested: 132 * MIB,
        free: 130 * MIB,
    };
    assert_eq!(error, expected);
    assert_eq!(sim.count(Call::MemCreate), 0);
    // With overcommit the driver refuses, and nothing stays.
    let insist = Plan {
        overcommit: true,
        ..plan(512, 16)
    };
    let mut insisting = Backing::new(&driver, &insist).unwrap();
    let error = insisting.grow(block(110 * MIB)).unwrap_err();
    assert!(
        matches!(error, Error::OutOfMemory { requested, .. } if requested == 110 * MIB),
        "{error}"
    );
    assert_eq!(sim.free_bytes(NODE), 100 * MIB);
    assert_eq!((insisting.backed(), chunks(&insisting).len()), (0, 0));
}

#[test]
fn small_chunks_are_guarded_too() {
    let driver = small(&[1024]);
    let sim = driver.sim().unwrap();
    let mut backing = Backing::new(&driver, &plan(512, 2)).unwrap();
    assert_eq!(grown(&mut backing, block(60 * MIB)), [0..60]);
    leave(&driver, 0, 0);
    let before = sim.count(Call::MemCreate);
    for mib in [2, 4] {
        let error = backing.grow(block(mib * MIB)).unwrap_err();
        let expected = Error::NodeTooFull {
            node: NodeId(0),
            requested: mib * MIB,
            free: 0,
        };
        assert_eq!(error, expected);
    }
    let mut large = Backing::new(&driver, &plan(512, 64)).unwrap();
    let error = large.grow(block(62 * MIB)).unwrap_err();
    assert!(matches!(error, Error::NodeTooFull { .. }), "{error}");
    assert_eq!(sim.count(Call::MemCreate), before);
}

/// Growth by at most so many bytes of all memory: the last chunk is smaller.
#[test]
fn a_bound_makes_the_last_chunk_smaller_and_refuses_what_is_needed_alone() {
    let driver = small(&[512]);
    let beside = |gap: &Range<u64>| {
        let after = if gap.end == 12 * MIB { 2 * MIB } else { 0 };
        gap.start..gap.end + after
    };
    let want = Want::Block {
        bytes: 4 * MIB,
        alignment: 1,
        with_free: &beside,
    };
    for (most, expected) in [
        // The hole's upper half.
        (16, Some(10..12)),
        (14, Some(10..12)),
        (12, None),
    ] {
        let mut backing = Backing::new(&driver, &plan(16, 4)).unwrap();
        assert_eq!(grown(&mut backing, block(16 * MIB)), [0..16]);
        give_back(&mut backing, 8 * MIB..12 * MIB);
        let grown = backing.grow_within(want, most * MIB).unwrap();
        assert_eq!(grown.map(|grown| mib(&grown[0])), expected);
    }
    let mut backing = Backing::new(&driver, &plan(64, 8)).unwrap();
    let more = |backing: &mut Backing, most| {
        let grown = backing.grow_within(Want::More { bytes: 10 * MIB }, most * MIB);
        grown.unwrap().map(|grown| mib(&grown[0]))
    };
    assert_eq!(more(&mut backing, 8), None);
    assert_eq!(more(&mut backing, 14), Some(0..14));
    assert_eq!(more(&mut backing, 64), Some(14..30));
}

#[test]
fn the_place_that_takes_least_is_taken() {
    let driver = small(&[64]);
    let mut backing = Backing::new(&driver, &plan(64, 2)).unwrap();
    assert_eq!(grown(&mut backing, Want::More { bytes: 40 * MIB }), [0..40]);
    give_back(&mut backing, 4 * MIB..14 * MIB);
    leave(&driver, 0, 4);
    // The hole at 4 needs 10 more; behind 40 there are 8 free, so 2 suffice.
    let beside = |gap: &Range<u64>| {
        let before = if gap.start == 40 * MIB { 8 * MIB } else { 0 };
        gap.start - before..gap.end
    };
    let want = Want::Block {
        bytes: 10 * MIB,
        alignment: 1,
        with_free: &beside,
    };
    assert_eq!(grown(&mut backing, want), [40..42]);
}

#[test]
fn a_shareable_block_has_one_chunk_or_none() {
    let driver = small(&[40, 24]);
    let fds = Plan {
        nodes: [1, 0].map(Location::HostNuma).to_vec(),
        handle_types: HandleTypes::POSIX_FD,
        ..plan(128, 32)
    };
    let mut backing = Backing::new(&driver, &fds).unwrap();
    // A whole chunk on the other node comes before a smaller one.
    assert_eq!(grown(&mut backing, block(20 * MIB)), [0..32]);
    assert_eq!(backing.chunk_at(0).unwrap().location(), NODE);
    assert_eq!(grown(&mut backing, block(20 * MIB)), [32..52]);
    assert_eq!(backing.counts().halvings, 1);
    let error = backing.grow(block(10 * MIB)).unwrap_err();
    let expected = Error::NodeTooFull {
        node: NodeId(0),
        requested: 10 * MIB,
        free: 8 * MIB,
    };
    assert_eq!(error, expected);
    assert_eq!(grown(&mut backing, block(8 * MIB)), [52..60]);
    assert!(give_back(&mut backing, 0..32 * MIB).error.is_none());
    // In a hole that is smaller than a chunk, if the block fits.
    assert_eq!(grown(&mut backing, block(32 * MIB)), [0..32]);
}

/// Half the size would need more mappings, so it is not tried.
#[test]
fn growth_that_the_kernel_has_no_mappings_for_is_undone() {
    let mut machine = Machine::gh200();
    machine.max_mappings = Some(3);
    let driver = Driver::simulated(machine).unwrap();
    let mut backing = Backing::new(&driver, &plan(512, 4)).unwrap();
    assert_eq!(grown(&mut backing, block(8 * MIB)), [0..8]);
    let held = driver.sim().unwrap().held();
    let error = backing.grow(block(8 * MIB)).unwrap_err();
    assert!(
        matches!(error, Error::TooManyMappings { limit: 3, .. }),
        "{error}"
    );
    assert_eq!(
        (backing.counts().halvings, driver.sim().unwrap().held()),
        (0, held)
    );
    let sim = driver.sim().unwrap();
    sim.fail(Call::MemCreate, 1, Code::OUT_OF_MEMORY);
    let error = backing.grow(block(3 * MIB)).unwrap_err();
    assert!(matches!(error, Error::TooManyMappings { .. }), "{error}");
    assert_eq!(backing.counts().halvings, 0);
    assert_eq!(grown(&mut backing, block(4 * MIB)), [8..12]);
}
