//! Hundreds of gigabytes in one range. Simulated memory takes none of the machine before it is touched.

use egmem::driver::{Call, Location};
use egmem::{Buffer, Growth};

use super::*;

const GIB: u64 = 1 << 30;

/// A node that has 600 GiB and a little more.
fn large() -> Driver {
    let mut machine = Machine::gh200();
    machine.nodes[0].memory = 608 * GIB;
    Driver::simulated(machine).unwrap()
}

/// Writes and reads a word at each end, and in the middle of a chunk.
fn check_ends(memory: &egmem::memory::CpuView<'_>) {
    let len = memory.len();
    for offset in [0, len / 2 - 8, len - 8] {
        memory.put(offset, offset ^ 7).unwrap();
        assert_eq!(memory.get::<u64>(offset).unwrap(), offset ^ 7);
    }
}

#[test]
#[cfg_attr(
    egmem_slow,
    ignore = "takes minutes where everything runs slowly, and has one thread"
)]
fn a_block_of_600_gib_costs_three_calls_for_each_chunk_and_little_metadata() {
    let driver = large();
    let sim = driver.sim().unwrap();
    let heap = Heap::on(NodeId(0))
        .limit(600 * GIB)
        .growth(Growth::steady().chunk(GIB));
    let heap = heap.build(&driver).unwrap();
    let empty = heap.stats().metadata;
    let block = heap.allocate(layout(600 * GIB)).unwrap();
    check_ends(&block.cpu().unwrap());
    let stats = heap.stats();
    let calls = (
        stats.driver.create,
        stats.driver.map,
        stats.driver.set_access,
    );
    assert_eq!(calls, (600, 600, 600));
    // docs/heap.md has the figures.
    println!(
        "metadata: {empty} bytes without memory, {} with 600 GiB",
        stats.metadata
    );
    assert!(stats.metadata < 1 << 20, "{} bytes", stats.metadata);
    drop(block);
    assert_eq!(heap.trim(), Ok(600 * GIB));
    assert_eq!(sim.free_bytes(Location::HostNuma(0)), 608 * GIB);
    assert_eq!(
        (sim.count(Call::MemUnmap), sim.count(Call::MemRelease)),
        (600, 600)
    );
    drop(heap);
    nothing_held(&driver);
}

#[test]
#[cfg_attr(
    egmem_slow,
    ignore = "takes minutes where everything runs slowly, and has one thread"
)]
fn a_buffer_of_600_gib_costs_three_calls_for_each_chunk() {
    let driver = large();
    let sim = driver.sim().unwrap();
    let buffer = Buffer::on(NodeId(0)).bytes(600 * GIB);
    let buffer = buffer.growth(Growth::steady().chunk(GIB));
    let buffer = buffer.allocate(&driver).unwrap();
    check_ends(&buffer.cpu().unwrap());
    let calls = [
        Call::MemCreate,
        Call::MemMap,
        Call::MemSetAccess,
        Call::MemAddressReserve,
    ];
    assert_eq!(calls.map(|call| sim.count(call)), [600, 600, 600, 1]);
    drop(buffer);
    assert_eq!(sim.count(Call::MemAddressFree), 1);
    nothing_held(&driver);
}
