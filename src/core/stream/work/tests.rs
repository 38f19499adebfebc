//! Batches of copies.

use proptest::prelude::*;

use super::*;
use crate::driver::{Call, CudaVersion, Location, NodeId, StreamHandle};
use crate::{Buffer, Driver, Growth, Machine};

const MIB: u64 = 1 << 20;

/// A driver, a stream, host memory in chunks of 2 MiB and memory of the GPU, of as many bytes each.
fn place(version: Option<i32>) -> (Driver, Stream, Buffer, Buffer) {
    let mut machine = Machine::gh200();
    if let Some(version) = version {
        machine.driver_version = CudaVersion(version);
    }
    let driver = Driver::simulated(machine).unwrap();
    let stream = Stream::new(&driver, 0).unwrap();
    let growth = Growth::steady().chunk(2 * MIB);
    let host = Buffer::on(NodeId(0)).bytes(8 * MIB).growth(growth);
    let device = Buffer::on(Location::Device(0)).bytes(8 * MIB);
    let (host, device) = (host.allocate(&driver), device.allocate(&driver));
    (driver, stream, host.unwrap(), device.unwrap())
}

/// Returns copies whose destinations do not overlap.
fn apart(copies: &[(u64, u64, u64)]) -> Vec<BatchCopy> {
    let mut to = 0;
    let mut apart = Vec::new();
    for &(gap, from, bytes) in copies {
        to += gap;
        let bytes = bytes.min((8 * MIB).saturating_sub(to.max(from)));
        apart.push(BatchCopy { to, from, bytes });
        to = (to + bytes).min(8 * MIB);
    }
    apart
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn all_bytes_arrive_in_pieces_that_cross_no_border(
        copies in prop::collection::vec((0..MIB, 0..8 * MIB, prop_oneof![0..100_u64, 0..3 * MIB]), 0..12),
        single in any::<bool>(),
    ) {
        let (driver, stream, host, device) = place(single.then_some(12040));
        let words: Vec<u64> = (0..MIB).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
        host.write_at(0, &words).unwrap();
        let copies: Vec<BatchCopy> = apart(&copies).into_iter().filter(|copy| copy.to < 8 * MIB).collect();
        let prepared = stream.prepare_copies(&device, &host, &copies, true).unwrap();
        let pieces = prepared.map_or(SmallVec::new(), |prepared| {
            assert_eq!(prepared.how, How::Together);
            prepared.pieces
        });
        for piece in &pieces {
            let at = piece.src.0 - host.device_ptr().0;
            prop_assert_eq!(at / (2 * MIB), (at + piece.bytes - 1) / (2 * MIB));
        }
        stream.copy_batch(&device, &host, &copies).unwrap();
        let back = Buffer::on(NodeId(0)).bytes(8 * MIB).allocate(&driver).unwrap();
        stream.copy(&back, 0, &device, 0, 8 * MIB).unwrap();
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let mut expected = vec![0_u8; bytes.len()];
        for copy in &copies {
            let [to, from, len] = [copy.to, copy.from, copy.bytes].map(|n| n as usize);
            expected[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
        let mut seen = vec![0_u8; bytes.len()];
        back.read_at(0, &mut seen).unwrap();
        prop_assert!(seen == expected);
        let sim = driver.sim().unwrap();
        let batches = sim.count(Call::MemcpyBatchAsync);
        match (single, pieces.len()) {
            (false, 2..) => prop_assert_eq!((batches, sim.count(Call::MemcpyAsync)), (1, 1)),
            (_, pieces) => prop_assert_eq!(sim.count(Call::MemcpyAsync), pieces as u64 + 1),
        }
    }
}

#[test]
fn a_batch_that_cannot_be_is_refused_before_any_copy() {
    let (driver, stream, host, device) = place(None);
    let sim = driver.sim().unwrap();
    let good = BatchCopy {
        to: 0,
        from: 0,
        bytes: 8,
    };
    let beyond = BatchCopy {
        from: 8 * MIB - 7,
        ..good
    };
    let error = stream
        .copy_batch(&device, &host, &[good, beyond])
        .unwrap_err();
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
    let closed = Buffer::on(NodeId(0))
        .bytes(2 * MIB)
        .access_by([] as [Location; 0]);
    let closed = closed.allocate(&driver).unwrap();
    for (to, from) in [(&device, &closed), (&closed, &device)] {
        let error = stream.copy_batch(to, from, &[good, good]).unwrap_err();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
    }
    sim.fail(Call::StreamIsCapturing, 1, Code::UNKNOWN);
    stream.copy_batch(&device, &host, &[good]).unwrap_err();
    let none = BatchCopy { bytes: 0, ..good };
    assert_eq!(stream.copy_batch(&device, &host, &[none, none]), Ok(()));
    assert_eq!(stream.copy_batch(&device, &host, &[]), Ok(()));
    assert_eq!(
        (
            sim.count(Call::MemcpyBatchAsync),
            sim.count(Call::MemcpyAsync)
        ),
        (0, 0)
    );
}

#[test]
fn a_ticket_owns_the_memory_of_a_batch() {
    let (_, stream, host, device) = place(None);
    host.put(2 * MIB - 4, 7_u64).unwrap();
    let copy = BatchCopy {
        to: 8,
        from: 2 * MIB - 4,
        bytes: 8,
    };
    let ticket = stream.start_copy_batch(device, host, &[copy]).unwrap();
    let (device, host) = ticket.wait().unwrap();
    host.fill(0).unwrap();
    stream.copy(&host, 0, &device, 0, 16).unwrap();
    assert_eq!(host.get(8), Ok(7_u64));
}

#[test]
fn the_legacy_default_stream_gets_each_copy_by_itself() {
    let (driver, _, host, device) = place(None);
    let sim = driver.sim().unwrap();
    // SAFETY: the default stream lives as long as the device.
    let stream = unsafe { Stream::borrowed(&driver, StreamHandle { device: 0, raw: 0 }) };
    let copy = BatchCopy {
        to: 0,
        from: 2 * MIB - 4,
        bytes: 8,
    };
    stream.copy_batch(&device, &host, &[copy]).unwrap();
    assert_eq!(
        (
            sim.count(Call::MemcpyBatchAsync),
            sim.count(Call::MemcpyAsync)
        ),
        (0, 2)
    );
}

#[test]
fn work_of_a_stream_that_tells_nothing_has_ended_before_its_memory_is_given_back() {
    let (driver, stream, host, device) = place(None);
    let sim = driver.sim().unwrap();
    for call in [Call::StreamSynchronize, Call::StreamQuery] {
        for nth in 1..=100 {
            sim.fail(call, nth, Code::UNKNOWN);
        }
    }
    let copied = stream.copy(&host, 0, &device, 0, MIB);
    assert_eq!(copied.unwrap_err().code(), Some(Code::UNKNOWN));
    drop((host, device));
    sim.cancel_all();
    stream.synchronize().unwrap();
}
