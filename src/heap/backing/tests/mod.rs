//! The backing on the simulator.
// Many lists of ranges have one element.
#![allow(clippy::single_range_in_vec_init)]

mod faults;
mod fit;
mod model;
mod ops;
mod orders;
mod shares;
mod shortage;

use super::*;
use crate::Machine;
use crate::buffer::RequestedAccess;
use crate::driver::sim::{GpuSpec, NodeSpec, PeerAccess};
use crate::driver::{AccessDesc, Call, Code, HandleTypes, Location, NodeId};
use crate::proof::Prover;

pub(super) const MIB: u64 = 1 << 20;
const NODE: Location = Location::HostNuma(0);

/// Sizes in MiB; 0: the default.
pub(super) fn plan(limit: u64, chunk: u64) -> Plan {
    let mib = |mib: u64| (mib > 0).then_some(mib * MIB);
    Plan {
        limit: mib(limit),
        chunk: mib(chunk),
        backing: egmem_core::Backing::Driver,
        ..Plan::on(NodeId(0))
    }
}

/// Two GPUs, and nodes with this many MiB.
pub(super) fn small(nodes: &[u64]) -> Driver {
    let nodes = nodes.iter().zip(0..).map(|(mib, id)| NodeSpec {
        id,
        memory: mib * MIB,
        ..NodeSpec::default()
    });
    let gpu = GpuSpec {
        memory: 64 * MIB,
        host_numa: 0,
        ..GpuSpec::default()
    };
    Driver::simulated(Machine {
        nodes: nodes.collect(),
        gpus: vec![gpu; 2],
        ..Machine::default()
    })
    .unwrap()
}

pub(super) fn block(bytes: u64) -> Want<'static> {
    Want::Block {
        bytes,
        alignment: 1,
        with_free: &|gap| gap.clone(),
    }
}

fn mib(range: &Range<u64>) -> Range<u64> {
    assert!(range.start.is_multiple_of(MIB) && range.end.is_multiple_of(MIB));
    range.start / MIB..range.end / MIB
}

/// Returns the ranges that grew, in MiB.
pub(super) fn grown(backing: &mut Backing, want: Want<'_>) -> Vec<Range<u64>> {
    let grown = backing.grow(want).unwrap();
    grown.iter().map(mib).collect()
}

/// The ranges given back, and the first error.
#[derive(Default)]
pub(super) struct Given {
    gone: Vec<Range<u64>>,
    error: Option<Error>,
}

impl Given {
    fn bytes(&self) -> u64 {
        self.gone.iter().map(|range| range.end - range.start).sum()
    }
}

/// Gives back the chunks that lie wholly in `range`.
pub(super) fn give_back(backing: &mut Backing, range: Range<u64>) -> Given {
    let inside = |chunk: &Range<u64>| range.start <= chunk.start && chunk.end <= range.end;
    let chunks: Vec<_> = backing.chunks().map(Chunk::range).filter(inside).collect();
    let mut given = Given::default();
    backing.sweep();
    for chunk in chunks {
        let (is_gone, error) = backing.give_back(chunk.start);
        given.gone.extend(is_gone.then_some(chunk));
        given.error = given.error.or(error);
    }
    given
}

pub(super) fn chunks(backing: &Backing) -> Vec<Range<u64>> {
    backing.chunks().map(|chunk| mib(&chunk.range())).collect()
}

#[test]
fn a_new_heap_has_addresses_and_no_memory() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let free = sim.free_bytes(NODE);
    let backing = Backing::new(&driver, &plan(1024, 0)).unwrap();
    assert_eq!((backing.limit(), backing.backed()), (1024 * MIB, 0));
    assert_eq!(backing.chunk(), 64 * MIB);
    assert_eq!(backing.host_access(), Access::ReadWrite);
    assert_eq!(sim.free_bytes(NODE), free);
    assert_eq!(sim.held().reservations, 1);
    let other = Backing::new(&driver, &plan(64, 3)).unwrap();
    assert!(other.start().0.is_multiple_of(2 * MIB));
    assert_eq!(other.chunk(), 4 * MIB);
    drop((backing, other));
    assert!(sim.held().is_empty());
}

#[test]
fn a_limit_by_default_is_what_the_nodes_have_and_what_fits_the_address_space() {
    let driver = Driver::simulated(Machine::gh200x4()).unwrap();
    let sim = driver.sim().unwrap();
    let nodes = Plan {
        nodes: [2, 3, 2].map(Location::HostNuma).to_vec(),
        ..plan(0, 0)
    };
    let limit = |fails: u64| {
        for _ in 0..fails {
            sim.fail(Call::MemAddressReserve, 1, Code::OUT_OF_MEMORY);
        }
        Backing::new(&driver, &nodes).map(|backing| backing.limit() >> 30)
    };
    assert_eq!(limit(0), Ok(240));
    assert_eq!(limit(2), Ok(60));
    assert!(limit(20).is_err());
    sim.cancel_all();
    // An explicit limit is not reduced.
    sim.fail(Call::MemAddressReserve, 1, Code::OUT_OF_MEMORY);
    let error = Backing::new(&driver, &plan(64, 4)).unwrap_err();
    assert_eq!(error.code(), Some(Code::OUT_OF_MEMORY));
}

#[test]
fn plans_that_cannot_be_are_refused_before_anything_is_taken() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let good = plan(64, 0);
    let with = |change: fn(&mut Plan)| {
        let mut plan = good.clone();
        change(&mut plan);
        Backing::new(&driver, &plan).unwrap_err()
    };
    let invalid: [fn(&mut Plan); 7] = [
        |plan| plan.nodes.clear(),
        |plan| plan.nodes = vec![Location::HostNumaCurrent],
        |plan| plan.limit = Some(MIB),
        |plan| plan.limit = Some(0),
        |plan| plan.chunk = Some(0),
        |plan| plan.shares = vec![0],
        |plan| plan.shares = vec![MIB],
    ];
    for change in invalid {
        let error = with(change);
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    let error = with(|plan| plan.nodes = vec![Location::HostNuma(9)]);
    assert!(matches!(error, Error::NoSuchNode { .. }), "{error}");
    let no_gpus: [fn(&mut Plan); 2] = [
        |plan| plan.nodes = vec![Location::Device(1)],
        |plan| {
            plan.access.gpus = Some([AccessDesc::new(Location::Device(7), Access::Read)][..].into())
        },
    ];
    for change in no_gpus {
        let error = with(change);
        assert!(matches!(error, Error::NoSuchGpu { .. }), "{error}");
    }
    assert!(driver.sim().unwrap().held().is_empty());
}

#[test]
fn every_new_chunk_is_seen_by_the_cpu_and_by_the_gpus_it_is_for() {
    let driver = Driver::simulated(Machine::gh200x4()).unwrap();
    let gpus = [0, 3].map(|gpu| AccessDesc::new(Location::Device(gpu), Access::ReadWrite));
    let spread = Plan {
        nodes: [0, 1].map(Location::HostNuma).to_vec(),
        access: RequestedAccess {
            host: None,
            gpus: Some(gpus[..].into()),
        },
        ..plan(64, 4)
    };
    let mut backing = Backing::new(&driver, &spread).unwrap();
    assert_eq!(grown(&mut backing, block(15 * MIB)), [0..16]);
    assert_eq!(grown(&mut backing, block(MIB)), [16..20]);
    assert!(give_back(&mut backing, 4 * MIB..8 * MIB).error.is_none());
    assert_eq!(grown(&mut backing, block(MIB)), [4..8]);
    for gpu in [0, 3] {
        let prover = Prover::new(&driver, gpu).unwrap();
        for (seed, chunk) in (0..).zip(backing.chunks()) {
            let cpu = chunk.mapping().cpu().unwrap();
            prover.prove(chunk.mapping(), &cpu, seed).unwrap();
        }
    }
    for chunk in backing.chunks() {
        let access = |gpu| chunk.mapping().access(Location::Device(gpu)).unwrap();
        assert_eq!([0, 1, 2, 3].map(access).map(Access::flags), [3, 0, 0, 3]);
        let host = chunk.mapping().access(Location::Host).unwrap();
        assert_eq!(host, backing.host_access());
    }
    // Nodes take turns, and the refilled hole takes the next turn.
    let nodes: Vec<_> = backing.chunks().map(Chunk::location).collect();
    let turns = [0, 1, 0, 1, 0].map(Location::HostNuma);
    assert_eq!(nodes, turns);
    assert_eq!(
        backing.chunk_at(9 * MIB).unwrap().range(),
        8 * MIB..12 * MIB
    );
    assert!(backing.chunk_at(20 * MIB).is_none());
}

#[test]
fn each_chunk_is_granted_by_a_call_of_its_own() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let mut backing = Backing::new(&driver, &plan(256, 4)).unwrap();
    let calls = |backing: &mut Backing, bytes| {
        let before = backing.counts();
        backing.grow(block(bytes)).unwrap();
        let after = backing.counts();
        (
            after.create - before.create,
            after.set_access - before.set_access,
        )
    };
    assert_eq!(calls(&mut backing, 30 * MIB), (8, 8));
    assert_eq!(calls(&mut backing, 62 * MIB), (16, 16));
    let counts = backing.counts();
    assert_eq!(sim.count(Call::MemSetAccess), counts.set_access);
    assert_eq!(sim.count(Call::MemCreate), counts.create);
    assert_eq!(sim.count(Call::MemMap), counts.map);
    for chunk in backing.chunks() {
        chunk.mapping().cpu().unwrap().put(0, 1_u8).unwrap();
        assert_eq!(
            chunk.mapping().access(Location::Device(0)),
            Ok(Access::ReadWrite)
        );
    }
    assert_eq!(give_back(&mut backing, 0..256 * MIB).bytes(), 96 * MIB);
    let counts = backing.counts();
    assert_eq!((counts.unmap, counts.release), (24, 24));
    assert_eq!(sim.count(Call::MemUnmap), 24);
}

#[test]
fn all_chunks_are_granted_to_those_who_reach_all_nodes() {
    let machine = Machine {
        peer_access: PeerAccess::None,
        ..Machine::h200x8()
    };
    let driver = Driver::simulated(machine).unwrap();
    let granted = |nodes: &[Location]| {
        let nodes = Plan {
            nodes: nodes.to_vec(),
            ..plan(16, 2)
        };
        let mut backing = Backing::new(&driver, &nodes).unwrap();
        assert_eq!(grown(&mut backing, block(4 * MIB)), [0..4]);
        let gpus = (0..8).map(Location::Device);
        let who: Vec<Location> = gpus.chain([Location::Host]).collect();
        let may = |chunk: &Chunk| {
            let may = |who: &&Location| chunk.mapping().access(**who) == Ok(Access::ReadWrite);
            who.iter().filter(may).copied().collect::<Vec<_>>()
        };
        let all: Vec<_> = backing.chunks().map(may).collect();
        assert_eq!(all[0], all[1]);
        let host = all[0].contains(&Location::Host);
        assert_eq!(host, backing.host_access() == Access::ReadWrite);
        all[0].len()
    };
    let (gpu, other) = (Location::Device(2), Location::Device(3));
    assert_eq!(granted(&[NODE]), 9);
    assert_eq!(granted(&[gpu]), 1);
    assert_eq!(granted(&[NODE, gpu]), 1);
    assert_eq!(granted(&[gpu, other]), 0);
}

#[test]
fn nobody_need_be_granted_anything() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let nobody = Plan {
        access: RequestedAccess {
            host: Some(Access::None),
            gpus: Some([][..].into()),
        },
        ..plan(16, 2)
    };
    let mut backing = Backing::new(&driver, &nobody).unwrap();
    assert_eq!(grown(&mut backing, Want::More { bytes: 4 * MIB }), [0..4]);
    assert_eq!(backing.host_access(), Access::None);
    assert_eq!(backing.counts().set_access, 0);
    assert!(backing.chunks().all(|chunk| chunk.mapping().cpu().is_err()));
}

#[test]
fn what_is_given_back_leaves_holes_that_are_filled_first() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let free = sim.free_bytes(NODE);
    let mut backing = Backing::new(&driver, &plan(64, 4)).unwrap();
    assert_eq!(grown(&mut backing, Want::More { bytes: 20 * MIB }), [0..20]);
    let given = give_back(&mut backing, 2 * MIB..14 * MIB);
    let mibs = |ranges: &[Range<u64>]| ranges.iter().map(mib).collect::<Vec<_>>();
    assert_eq!(mibs(&given.gone), [4..8, 8..12]);
    assert_eq!(given.bytes(), 8 * MIB);
    assert_eq!(backing.backed(), 12 * MIB);
    assert_eq!(sim.free_bytes(NODE), free - 12 * MIB);
    assert_eq!(chunks(&backing), [0..4, 12..16, 16..20]);
    assert_eq!(give_back(&mut backing, 4 * MIB..12 * MIB).bytes(), 0);
    // Too large for the hole; then into it, with the free bytes before it.
    assert_eq!(grown(&mut backing, block(9 * MIB)), [20..32]);
    let beside = |gap: &Range<u64>| gap.start - MIB..gap.end;
    let want = Want::Block {
        bytes: 5 * MIB,
        alignment: MIB,
        with_free: &beside,
    };
    assert_eq!(grown(&mut backing, want), [4..8]);
    assert_eq!(grown(&mut backing, want), [8..12]);
    // Free bytes need no growth.
    let want = Want::Block {
        bytes: MIB,
        alignment: MIB,
        with_free: &beside,
    };
    assert_eq!(grown(&mut backing, want), []);
    let error = backing.grow(block(33 * MIB)).unwrap_err();
    assert!(
        matches!(error, Error::HeapFull { limit, .. } if limit == 64 * MIB),
        "{error}"
    );
    assert_eq!(grown(&mut backing, block(32 * MIB)), [32..64]);
    assert!(backing.grow(Want::More { bytes: 1 }).is_err());
}

#[cfg(feature = "share")]
#[test]
fn a_chunk_whose_memory_is_held_elsewhere_stays() {
    use crate::driver::HandleType;

    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let sim = driver.sim().unwrap();
    let shareable = Plan {
        shareable: true,
        ..plan(64, 4)
    };
    let mut backing = Backing::new(&driver, &shareable).unwrap();
    assert!(!backing.joins());
    assert_eq!(grown(&mut backing, block(MIB)), [0..4]);
    // No block lies in two chunks, so each chunk has room for its block.
    assert_eq!(grown(&mut backing, block(5 * MIB)), [4..10]);
    let want = Want::More { bytes: 7 * MIB };
    assert_eq!(grown(&mut backing, want), [10..14, 14..18]);
    for chunk in backing.chunks() {
        chunk.memory().export(HandleType::PosixFd).unwrap();
        chunk.memory().export(HandleType::Fabric).unwrap();
    }
    let held = Arc::clone(backing.chunk_at(4 * MIB).unwrap().memory());
    let given = give_back(&mut backing, 0..64 * MIB);
    assert!(!given.gone.contains(&(4 * MIB..10 * MIB)));
    assert_eq!(given.bytes(), 12 * MIB);
    assert_eq!(sim.held().mappings, 1);
    drop(held);
    assert_eq!(give_back(&mut backing, 0..64 * MIB).bytes(), 6 * MIB);

    // A clone keeps the memory alive, even beyond the heap.
    assert_eq!(grown(&mut backing, block(MIB)), [0..4]);
    let held = Arc::clone(backing.chunk_at(0).unwrap().memory());
    drop(backing);
    assert_eq!((sim.held().mappings, sim.held().reservations), (0, 0));
    held.export(HandleType::PosixFd).unwrap();
    drop(held);
    assert!(sim.held().is_empty());
}

#[test]
fn memory_that_may_be_exported_by_hand_is_not_joined_either() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let fds = Plan {
        handle_types: HandleTypes::POSIX_FD,
        ..plan(64, 4)
    };
    let mut backing = Backing::new(&driver, &fds).unwrap();
    let grown = backing.grow(Want::More { bytes: 8 * MIB }).unwrap();
    assert_eq!(grown.len(), 2);
    assert!(!backing.joins());
}
