//! Buffers: the access that is granted, and that CPU and GPUs see the same bytes.

use egmem::driver::{Access, Call, HandleTypes, Location, NodeId};
use egmem::proof::Prover;
use egmem::topology::Placement;
use egmem::{Buffer, BufferOptions, Driver, Error, Memory};

use crate::lifecycle::{MIB, grace, grant, last, node, nothing_held};

pub fn one_call_grants_the_host_and_every_gpu(driver: &Driver) {
    let topology = egmem::Topology::discover(driver).unwrap();
    for gpu in topology.gpus() {
        let buffer = Buffer::near(driver, gpu.ordinal, 3 * MIB + 1).unwrap();
        assert_eq!(buffer.location(), gpu.host_node().unwrap().into());
        assert_eq!(buffer.len(), 3 * MIB + 1);
        assert_eq!(buffer.physical()[0].size().padded(), 4 * MIB);
        for who in [
            Location::Host,
            Location::Device(0),
            Location::Device(last(driver)),
        ] {
            assert_eq!(buffer.access(who).unwrap(), Access::ReadWrite, "{who}");
        }
        buffer.put(3 * MIB, 7_u8).unwrap();
        assert_eq!(buffer.get::<u8>(3 * MIB).unwrap(), 7);
        assert!(matches!(
            buffer.put(3 * MIB + 1, 7_u8),
            Err(Error::OutOfRange { .. })
        ));
    }
    nothing_held(driver);
}

pub fn cpu_and_gpus_see_the_same_bytes(driver: &Driver) {
    let buffer = Buffer::near(driver, last(driver), MIB + 40).unwrap();
    for gpu in 0..=last(driver) {
        let prover = Prover::new(driver, gpu).unwrap();
        prover
            .prove(&buffer, &buffer.cpu().unwrap(), 11 + gpu as u64)
            .unwrap();
    }
}

pub fn a_spread_buffer_is_one_range(driver: &Driver) {
    let topology = egmem::Topology::discover(driver).unwrap();
    let shares = Placement::Spread
        .request(11 * MIB + 8)
        .place(&topology)
        .unwrap();
    let mut buffer = Buffer::spread(&shares).allocate(driver).unwrap();
    assert_eq!(buffer.physical().len(), topology.nodes().len());
    assert_eq!(buffer.len(), 11 * MIB + 8);
    for gpu in topology.gpus() {
        let prover = Prover::new(driver, gpu.ordinal).unwrap();
        prover.prove(&buffer, &buffer.cpu().unwrap(), 5).unwrap();
    }
    buffer
        .set_access(&[grant(Location::Host, Access::None)])
        .unwrap();
    assert!(matches!(buffer.cpu(), Err(Error::NotAccessible { .. })));
    drop(buffer);
    assert!(matches!(
        Buffer::spread(&[]).allocate(driver),
        Err(Error::InvalidArgument { .. })
    ));
    nothing_held(driver);
}

pub fn a_front_on_the_gpu_and_the_rest_on_its_node_are_one_range(driver: &Driver) {
    let gpu = last(driver);
    let parts = [
        (Location::Device(gpu), 2 * MIB),
        (node(driver, gpu).into(), 4 * MIB),
    ];
    let buffer = Buffer::in_parts(parts).access_by([gpu_at(gpu)]);
    let buffer = buffer.allocate(driver).unwrap();
    assert_eq!((buffer.len(), buffer.padded()), (6 * MIB, 6 * MIB));
    // One kernel writes all of it.
    let prover = Prover::new(driver, gpu).unwrap();
    prover.write(&buffer, 9).unwrap();
    let pattern = |word| egmem::kernels::pattern(9, word);
    let host = buffer.cpu_at(2 * MIB, 4 * MIB).unwrap();
    assert_eq!(host.get::<u64>(0).unwrap(), pattern(2 * MIB / 8));
    assert_eq!(
        host.get::<u64>(4 * MIB - 8).unwrap(),
        pattern(6 * MIB / 8 - 1)
    );
    // And the GPU reads the words that the CPU writes: one copy over the border.
    host.put(0, 1_u64).unwrap();
    let seen = Buffer::near(driver, gpu, MIB).unwrap();
    let stream = egmem::Stream::new(driver, gpu).unwrap();
    stream.copy(&seen, 0, &buffer, 2 * MIB - 8, 16).unwrap();
    assert_eq!(
        seen.get::<[u64; 2]>(0).unwrap(),
        [pattern(2 * MIB / 8 - 1), 1]
    );
    stream.fill(&buffer, 2 * MIB - 8, 16, 0xff).unwrap();
    assert_eq!(host.get::<u64>(0).unwrap(), u64::MAX);
    // Over the border of both sides, by a ticket too.
    let other = [
        (node(driver, gpu).into(), 4 * MIB),
        (Location::Device(gpu), 2 * MIB),
    ];
    let other = Buffer::in_parts(other).access_by([gpu_at(gpu)]);
    let other = other.allocate(driver).unwrap();
    let calls = |call| driver.sim().map_or(0, |sim| sim.calls()[&call]);
    let before = calls(Call::MemcpyAsync);
    let copy = stream.start_copy((other, 0), (buffer, 0), 6 * MIB);
    let (other, buffer) = copy.unwrap().wait().unwrap();
    if driver.is_simulated() {
        // To 2 MiB, to 4 MiB and to the end: CUDA crashes the process when one touches both kinds.
        assert_eq!(calls(Call::MemcpyAsync) - before, 3);
    }
    prover.write(&buffer, 10).unwrap();
    stream.copy(&buffer, 0, &other, 0, 6 * MIB).unwrap();
    stream.copy(&seen, 0, &buffer, 2 * MIB - 16, 32).unwrap();
    let expected = [
        pattern(2 * MIB / 8 - 2),
        u64::MAX,
        u64::MAX,
        pattern(2 * MIB / 8 + 1),
    ];
    assert_eq!(seen.get::<[u64; 4]>(0).unwrap(), expected);

    for refused in [
        buffer.cpu(),
        buffer.cpu_at(0, 8),
        buffer.cpu_at(2 * MIB - 1, 2),
    ] {
        let error = refused.err().unwrap();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    }
    let error = buffer.cpu_at(2 * MIB, 4 * MIB + 1).err().unwrap();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    assert_eq!(buffer.cpu_at(6 * MIB, 0).unwrap().len(), 0);
}

/// The driver would make it with the CPU wherever the source is the CPU's, in whichever part.
pub fn a_copy_from_a_later_part_on_the_host_counts_as_one(driver: &Driver) {
    let gpu = last(driver);
    let node = node(driver, gpu);
    let parts = [(gpu_at(gpu), 2 * MIB), (node.into(), 2 * MIB)];
    let from = Buffer::in_parts(parts).access_by([gpu_at(gpu)]);
    let from = from.allocate(driver).unwrap();
    let to = Buffer::on(node)
        .access(gpu_at(gpu), Access::ReadWrite)
        .access(Location::Host, Access::Read)
        .bytes(MIB)
        .allocate(driver)
        .unwrap();
    let stream = egmem::Stream::new(driver, gpu).unwrap();
    stream.copy(&to, 0, &from, 0, 64).unwrap();
    for offset in [2 * MIB - 8, 2 * MIB] {
        let error = stream.copy(&to, 0, &from, offset, 16).unwrap_err();
        assert!(
            matches!(
                error,
                Error::NotAccessible {
                    who: Location::Host,
                    ..
                }
            ),
            "{error}"
        );
    }
}

fn gpu_at(gpu: i32) -> Location {
    Location::Device(gpu)
}

pub fn a_wrong_word_is_found_and_named(driver: &Driver) {
    let buffer = Buffer::near(driver, 0, MIB).unwrap();
    let prover = Prover::new(driver, 0).unwrap();
    prover.write(&buffer, 5).unwrap();
    buffer.put(4096, 0xbad_u64).unwrap();
    let error = prover.check_rewrite(&buffer, 5, 6).unwrap_err();
    assert!(
        matches!(
            error,
            Error::WrongBytes {
                by: Location::Device(0),
                offset: 4096,
                ..
            }
        ),
        "{error}"
    );
    let error = egmem::proof::check_pattern(&buffer.cpu().unwrap(), 6).unwrap_err();
    assert!(
        matches!(
            error,
            Error::WrongBytes {
                by: Location::Host,
                offset: 4096,
                found: 0xbad,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_gpu_without_access_is_refused_and_keeps_its_context() {
    let driver = grace();
    let buffer = Buffer::on(NodeId(0))
        .access_by([Location::Device(0)])
        .bytes(MIB)
        .allocate(&driver)
        .unwrap();
    let stranger = Prover::new(&driver, 1).unwrap();
    let error = stranger.write(&buffer, 1).unwrap_err();
    let expected = Error::NotAccessible {
        who: Location::Device(1),
        have: Access::None,
        need: Access::ReadWrite,
    };
    assert_eq!(error, expected);
    stranger.stream().synchronize().unwrap();
    Prover::new(&driver, 0).unwrap().write(&buffer, 1).unwrap();
}

pub fn access_changes_and_reads_back(driver: &Driver) {
    let mut buffer = Buffer::near(driver, 0, 2 * MIB).unwrap();
    let (host, gpu) = (Location::Host, Location::Device(last(driver)));
    buffer
        .set_access(&[grant(host, Access::Read), grant(gpu, Access::None)])
        .unwrap();
    assert_eq!(buffer.access(host).unwrap(), Access::Read);
    assert_eq!(buffer.access(gpu).unwrap(), Access::None);
    assert_eq!(buffer.get::<u8>(0).unwrap(), 0);
    assert!(matches!(
        buffer.put(0, 1_u8),
        Err(Error::NotAccessible { .. })
    ));
    buffer.set_access(&[grant(host, Access::None)]).unwrap();
    assert!(matches!(
        buffer.get::<u8>(0),
        Err(Error::NotAccessible { .. })
    ));
    buffer
        .set_access(&[grant(node(driver, last(driver)).into(), Access::ReadWrite)])
        .unwrap();
    buffer.put(0, 9_u8).unwrap();
    assert_eq!(buffer.get::<u8>(0).unwrap(), 9);
}

pub fn device_memory_is_shared_with_chosen_peers(driver: &Driver) {
    let peers = [0, last(driver)];
    let buffer = Buffer::on(Location::Device(0))
        .access_by(peers.map(Location::Device))
        .bytes(MIB)
        .allocate(driver)
        .unwrap();
    assert!(matches!(buffer.cpu(), Err(Error::NotAccessible { .. })));
    Prover::new(driver, 0).unwrap().write(&buffer, 3).unwrap();
    Prover::new(driver, last(driver))
        .unwrap()
        .check_rewrite(&buffer, 3, 4)
        .unwrap();
    if driver.is_simulated() {
        let stranger = Prover::new(driver, 2).unwrap();
        let error = stranger.read(&buffer).unwrap_err();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    }
}

fn host_alone(driver: &Driver) -> BufferOptions {
    Buffer::on(node(driver, 0))
        .access_by([] as [Location; 0])
        .bytes(MIB)
}

/// A slice without `unsafe`, as long as nothing else can reach the memory.
pub fn a_slice_is_lent_only_of_memory_that_the_host_alone_reaches(driver: &Driver) {
    let refused = |buffer: &mut Buffer, why: &str| {
        let error = buffer.exclusive_slice().unwrap_err();
        let found = matches!(
            &error,
            Error::InvalidArgument {
                what: "exclusive slice",
                ..
            }
        );
        assert!(found && error.to_string().contains(why), "{error}");
    };
    let mut buffer = host_alone(driver).allocate(driver).unwrap();
    let slice = buffer.exclusive_slice().unwrap();
    assert_eq!(slice.len() as u64, MIB);
    slice[9] = 7;
    assert_eq!(buffer.get::<u8>(9).unwrap(), 7);

    let mut again = buffer.physical()[0].map().unwrap();
    again
        .set_access(&[grant(Location::Host, Access::ReadWrite)])
        .unwrap();
    refused(&mut buffer, "mapped more than once");
    drop(again);
    assert_eq!(buffer.exclusive_slice().unwrap()[9], 7);

    let gpu = Location::Device(0);
    for access in [Access::ReadWrite, Access::None] {
        buffer.set_access(&[grant(gpu, access)]).unwrap();
        refused(&mut buffer, "GPU");
    }
    let mut by_default = Buffer::near(driver, 0, MIB).unwrap();
    refused(&mut by_default, "GPU");
    drop((buffer, by_default));
    nothing_held(driver);
}

#[test]
fn a_slice_of_memory_that_can_be_shared_or_only_read_is_refused() {
    let driver = &crate::lifecycle::grace();
    let mut shareable = host_alone(driver)
        .handle_types(HandleTypes::POSIX_FD)
        .allocate(driver)
        .unwrap();
    let error = shareable.exclusive_slice().unwrap_err();
    assert!(error.to_string().contains("exported"), "{error}");
    let mut read_only = host_alone(driver)
        .access(Location::Host, Access::Read)
        .allocate(driver)
        .unwrap();
    let error = read_only.exclusive_slice().unwrap_err();
    assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
}

/// A list of that many parts would be larger than all memory, and the process would abort.
#[test]
fn a_large_buffer_in_small_chunks_is_refused_before_it_is_cut() {
    let driver = &crate::lifecycle::grace();
    let chunked = |place: Location| Buffer::on(place).bytes(1 << 60).chunk(2 * MIB);
    let error = chunked(NodeId(0).into()).allocate(driver).unwrap_err();
    assert!(matches!(error, Error::NodeTooFull { .. }), "{error}");
    for options in [
        chunked(Location::Device(0)),
        chunked(NodeId(0).into()).overcommit(true),
        chunked(NodeId(0).into()).overcommit(true).bytes(u64::MAX),
        // Each part alone would do.
        Buffer::in_parts(vec![(Location::Device(0), 1 << 40); 3]).chunk(2 * MIB),
    ] {
        let error = options.allocate(driver).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { what: "chunk", .. }),
            "{error}"
        );
        assert!(error.to_string().contains("1048576"), "{error}");
    }
    let parts = vec![(Location::Device(0), 0); Buffer::MAX_PARTS + 1];
    let error = Buffer::in_parts(parts).allocate(driver).unwrap_err();
    assert!(
        matches!(error, Error::InvalidArgument { what: "parts", .. }),
        "{error}"
    );
    nothing_held(driver);
}
