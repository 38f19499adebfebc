//! Many copies in one call.

use super::work::Prepared;
use super::{Started, Stream, Transfer};
use crate::driver::{Access, Code, MemcpyDesc};
use crate::memory::{Engine, Memory, expect_gpu_access, expect_no_cpu_fault};
use crate::{Error, Result};

/// The most copies that the driver gets in one call; more are several calls.
const MOST: usize = 1 << 16;

/// `CU_STREAM_LEGACY`; 0 means the same stream.
const LEGACY: u64 = 1;

/// A copy of a [batch](Stream::copy_batch): offsets and a number, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchCopy {
    /// Where it goes, from the start of the destination.
    pub to: u64,
    /// Where it comes from, from the start of the source.
    pub from: u64,
    /// How many bytes; a copy of 0 is left out.
    pub bytes: u64,
}

impl Stream {
    /// Makes many copies from one memory to another and waits for their end. They run in any order: where the
    /// destinations of two overlap, or one reads bytes that another writes, the bytes are those of either.
    ///
    /// Copies are divided where chunks of the memory border, because drivers were reported to refuse others in a
    /// batch. On the legacy default stream, with drivers before CUDA 12.8, and for memory that does not report where
    /// its chunks border, each copy is submitted by itself.
    ///
    /// Source: `cuMemcpyBatchAsync`, `cuMemcpyAsync`.
    ///
    /// # Errors
    /// As [`copy`](Self::copy). All copies are checked before the first is submitted; after an error of the driver
    /// some may have been made.
    ///
    /// ```
    /// use egmem::stream::BatchCopy;
    /// use egmem::{Buffer, Driver, Machine, Stream};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?;
    /// let stream = Stream::new(&driver, 0)?;
    /// let (from, to) = (Buffer::near(&driver, 0, 4096)?, Buffer::near(&driver, 0, 4096)?);
    /// from.write_at(0, &[1_u32, 2, 3])?;
    /// let copy = |to, from| BatchCopy { to, from, bytes: 4 };
    /// stream.copy_batch(&to, &from, &[copy(100, 8), copy(0, 4)])?;
    /// assert_eq!((to.get::<u32>(100)?, to.get::<u32>(0)?), (3, 2));
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn copy_batch(
        &self,
        to: &impl Memory,
        from: &impl Memory,
        copies: &[BatchCopy],
    ) -> Result<()> {
        let Some(batch) = self.prepare_batch(to, from, copies)? else {
            return Ok(());
        };
        // SAFETY: both memories are borrowed until the copies are done, which is before this returns.
        let put = unsafe { self.put(&batch) };
        put.and(self.finish())
    }

    /// Submits many copies, and returns a ticket that owns the destination and the source. Otherwise as
    /// [`copy_batch`](Self::copy_batch) and [`start_copy`](Self::start_copy).
    ///
    /// # Errors
    /// As `copy_batch`. The error contains the operands.
    pub fn start_copy_batch<D, S>(&self, to: D, from: S, copies: &[BatchCopy]) -> Started<(D, S)>
    where
        D: Memory + 'static,
        S: Memory + 'static,
    {
        let prepared = self.prepare_batch(&to, &from, copies);
        // SAFETY: the operands are the memory of the copies.
        unsafe { Transfer::start(self, prepared, (to, from)) }
    }

    /// Submits many copies of memory that the caller keeps allocated, none of which reaches over a border of two
    /// allocations, mappings or registrations. They run in any order.
    ///
    /// Source: `cuMemcpyBatchAsync`, `cuMemcpyAsync`.
    ///
    /// # Errors
    /// The driver's errors. Some of the copies may be on the stream then.
    ///
    /// # Safety
    /// As [`copy_async`](Self::copy_async), for each of the copies.
    pub unsafe fn copy_batch_async(&self, copies: &[MemcpyDesc]) -> Result<()> {
        let handle = self.handle();
        let mut left = copies;
        while left.len() > 1 && handle.raw > LEGACY {
            let (first, rest) = left.split_at(left.len().min(MOST));
            // SAFETY: the caller's promise; `self` keeps the stream alive.
            match unsafe { self.driver().memcpy_batch_async(first, handle) } {
                Ok(()) => left = rest,
                // The driver does not know the call, so none of the copies is submitted.
                Err(error) if is_unknown(&error) => break,
                Err(error) => return Err(error),
            }
        }
        // SAFETY: the caller's promise.
        unsafe { self.copy_each(left) }
    }

    /// Submits copies as [`copy_batch_async`](Self::copy_batch_async) does, but each by itself.
    ///
    /// # Safety
    /// As for `copy_batch_async`.
    pub(super) unsafe fn copy_each(&self, copies: &[MemcpyDesc]) -> Result<()> {
        copies.iter().try_for_each(|copy| {
            // SAFETY: the caller's promise.
            unsafe { self.copy_async(copy.dst, copy.src, copy.bytes) }
        })
    }

    /// Checks a batch. `None`: there are no bytes to copy.
    fn prepare_batch(
        &self,
        to: &impl Memory,
        from: &impl Memory,
        copies: &[BatchCopy],
    ) -> Result<Option<Prepared>> {
        self.driver().expect_this_process("stream")?;
        self.driver().expect_same(to.driver(), "destination")?;
        self.driver().expect_same(from.driver(), "source")?;
        for copy in copies {
            to.range(copy.to, copy.bytes)?;
            from.range(copy.from, copy.bytes)?;
        }
        let copies = || copies.iter().filter(|copy| copy.bytes > 0);
        if copies().next().is_none() {
            return Ok(None);
        }
        self.expect_no_capture()?;
        // Before the checks: their result stays valid.
        let grants = [to.hold_grants(), from.hold_grants()];
        let (writes, reads) = (Access::ReadWrite, Access::Read);
        self.expect_access(to, writes, copies().map(|copy| (copy.to, copy.bytes)))?;
        self.expect_access(from, reads, copies().map(|copy| (copy.from, copy.bytes)))?;
        let mut pieces = Vec::new();
        for copy in copies() {
            let mut done = 0;
            while done < copy.bytes {
                let (dst, src, left) = (copy.to + done, copy.from + done, copy.bytes - done);
                let bytes = whole(to, dst, left)
                    .min(whole(from, src, left))
                    .clamp(1, left);
                expect_no_cpu_fault((to, dst), (from, src), bytes)?;
                let (dst, src) = (to.device_ptr().add(dst), from.device_ptr().add(src));
                pieces.push(MemcpyDesc { dst, src, bytes });
                done += bytes;
            }
        }
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe {
            to.ready_on(self.handle())?;
            from.ready_on(self.handle())?;
        }
        let known = to.of_one_mapping(0, to.len()).is_some()
            && from.of_one_mapping(0, from.len()).is_some();
        Ok(Some(Prepared::batch(pieces, known, grants)))
    }

    /// Refuses ranges that the GPU has no access `need` to. Asks for all of the memory first, because each range
    /// costs the driver's answer.
    fn expect_access(
        &self,
        memory: &impl Memory,
        need: Access,
        mut ranges: impl Iterator<Item = (u64, u64)>,
    ) -> Result<()> {
        let by = (self.device(), Engine::Copy);
        if expect_gpu_access(memory, by, (0, memory.len()), need).is_ok() {
            return Ok(());
        }
        ranges.try_for_each(|range| expect_gpu_access(memory, by, range, need))
    }
}

/// Returns how many of `len` bytes one copy of a batch may take.
fn whole(memory: &impl Memory, offset: u64, len: u64) -> u64 {
    let kind = memory.of_one_copy(offset, len);
    kind.min(memory.of_one_mapping(offset, len).unwrap_or(len))
}

fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::MissingSymbol { .. }) || error.code() == Some(Code::NOT_SUPPORTED)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::driver::{Call, CudaVersion, Location, NodeId, StreamHandle};
    use crate::stream::work::Work;
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
            let prepared = stream.prepare_batch(&device, &host, &copies).unwrap();
            let pieces = match prepared.map(|prepared| prepared.work) {
                Some(Work::Batch(pieces)) => pieces,
                None => Vec::new(),
                other => panic!("{other:?}"),
            };
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
}
