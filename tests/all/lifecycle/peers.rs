//! GPU memory that other GPUs use: granted by mappings, one GPU at a time.

use std::sync::Arc;

use egmem::driver::sim::PeerAccess;
use egmem::driver::{Access, Location};
use egmem::pinned::DeviceMemory;
use egmem::proof::Prover;
use egmem::{Buffer, Driver, Error, Machine, Pool, Stream, Topology};

use crate::lifecycle::{MIB, grant, last, nothing_held};

/// Granted to a GPU, read by its kernel, and taken away again: no other grant changes.
pub fn a_gpus_memory_is_its_peers_to_use_as_granted(driver: &Driver) {
    let (owner, peer) = (0, last(driver));
    let mut memory = Buffer::on(Location::Device(owner))
        .access_by([Location::Device(owner)])
        .bytes(4 * MIB)
        .allocate(driver)
        .unwrap();
    let provers = [owner, peer].map(|gpu| Prover::new(driver, gpu).unwrap());
    provers[0].write(&memory, 1).unwrap();
    if owner == peer {
        return;
    }
    let refused = |result: egmem::Result<()>, have, need| {
        let who = Location::Device(peer);
        assert_eq!(result, Err(Error::NotAccessible { who, have, need }));
    };
    refused(
        provers[1].read(&memory).map(drop),
        Access::None,
        Access::Read,
    );
    memory
        .set_access(&[grant(Location::Device(peer), Access::Read)])
        .unwrap();
    provers[1].read(&memory).unwrap();
    refused(
        provers[1].write(&memory, 2),
        Access::Read,
        Access::ReadWrite,
    );
    memory
        .set_access(&[grant(Location::Device(peer), Access::ReadWrite)])
        .unwrap();
    provers[1].check_rewrite(&memory, 1, 2).unwrap();
    memory
        .set_access(&[grant(Location::Device(peer), Access::None)])
        .unwrap();
    refused(
        provers[1].read(&memory).map(drop),
        Access::None,
        Access::Read,
    );
    provers[0].check_rewrite(&memory, 2, 3).unwrap();
    drop((provers, memory));
    nothing_held(driver);
}

/// Each GPU copies its left neighbour's memory, step by step; a single GPU is both ranks.
pub fn a_ring_of_gpus_passes_on_what_each_wrote(driver: &Driver) {
    let topology = Topology::discover(driver).unwrap();
    let ranks = topology.gpus().len().max(2);
    let gpu = |rank: usize| &topology.gpus()[rank % topology.gpus().len()];
    let mut all = Vec::new();
    for rank in 0..ranks {
        let buffer = Buffer::on(gpu(rank)).access_by([gpu(rank), gpu(rank + 1)]);
        let buffer = buffer.bytes(ranks as u64 * MIB).allocate(driver).unwrap();
        let stream = Stream::new(driver, gpu(rank).ordinal).unwrap();
        stream
            .fill(&buffer, rank as u64 * MIB, MIB, 1 + rank as u8)
            .unwrap();
        all.push((Arc::new(buffer), stream));
    }
    for step in 1..ranks {
        let mut copies = Vec::new();
        for (rank, (own, stream)) in all.iter().enumerate() {
            let left = &all[(rank + ranks - 1) % ranks].0;
            let slot = ((rank + ranks - step) % ranks) as u64 * MIB;
            let copy = stream.start_copy((Arc::clone(own), slot), (Arc::clone(left), slot), MIB);
            copies.push(copy.unwrap());
        }
        for copy in copies {
            copy.wait().unwrap();
        }
    }
    let seen = Buffer::near(driver, 0, ranks as u64 * MIB).unwrap();
    for (own, stream) in &all {
        stream
            .copy(&seen, 0, &**own, 0, ranks as u64 * MIB)
            .unwrap();
        for rank in 0..ranks {
            for at in [0, MIB - 1] {
                let byte: u8 = seen.get(rank as u64 * MIB + at).unwrap();
                assert_eq!(byte, 1 + rank as u8);
            }
        }
    }
}

#[test]
fn a_gpu_that_cannot_reach_another_is_named() {
    let mut machine = Machine::h200x8();
    machine.peer_access = PeerAccess::Pairs(vec![(0, 1)]);
    let driver = Driver::simulated(machine).unwrap();
    let named = |error: Error| {
        let source = error.driver_error().unwrap();
        assert_eq!(
            error,
            Error::NoPeerAccess {
                gpu: 2,
                owner: 0,
                source
            }
        );
        assert!(error.remedy().contains("host node"));
    };
    // By default every GPU that can reach the memory is granted it.
    let mut memory = Buffer::on(Location::Device(0))
        .bytes(MIB)
        .allocate(&driver)
        .unwrap();
    for (gpu, access) in [
        (0, Access::ReadWrite),
        (1, Access::ReadWrite),
        (2, Access::None),
    ] {
        assert_eq!(memory.access(Location::Device(gpu)), Ok(access));
    }
    let both = [1, 2].map(|gpu| grant(Location::Device(gpu), Access::Read));
    named(memory.set_access(&both).unwrap_err());
    let options = Buffer::on(Location::Device(0)).access_by([0, 2].map(Location::Device));
    named(options.bytes(MIB).allocate(&driver).unwrap_err());
    let pool = Pool::options(Location::Device(0)).create(&driver).unwrap();
    let uses = [grant(Location::Device(2), Access::ReadWrite)];
    named(pool.set_access(&uses).unwrap_err());
    // Copies reach it without a grant.
    let plain = DeviceMemory::new(&driver, 0, MIB).unwrap();
    let own = DeviceMemory::new(&driver, 2, MIB).unwrap();
    Stream::new(&driver, 2)
        .unwrap()
        .copy(&own, 0, &plain, 0, MIB)
        .unwrap();
    drop((memory, plain, own, pool));
    nothing_held(&driver);
}
