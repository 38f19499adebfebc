//! Copies and fills of safe callers, checked before submission, and many copies in one call.

use smallvec::SmallVec;

use super::Stream;
use crate::driver::{Access, Code, MemcpyDesc};
use crate::memory::{Engine, GrantUse, Memory, expect_gpu_access, expect_no_cpu_fault};
use crate::{Error, Result};

/// The most copies that the driver gets in one call; more are several calls.
const MOST: usize = 1 << 16;

/// `CU_STREAM_LEGACY`; 0 means the same stream.
const LEGACY: u64 = 1;

/// The grants of pools that work relies on.
pub(super) type Grants = [Option<GrantUse>; 2];

/// Checked work. The memory's allocation comes first on the stream, and access to it cannot be revoked while
/// this lives.
#[derive(Debug)]
pub(super) struct Prepared {
    how: How,
    /// Several where a call would not take all: the driver's calls take memory of one kind only, the CPU's or a GPU's.
    pieces: SmallVec<[MemcpyDesc; 1]>,
    pub(super) grants: Grants,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// A copy for each piece.
    Each,
    /// Copies in few calls.
    Together,
    /// A fill of each piece's destination.
    Fill(u8),
}

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
    /// Copies between two memories and waits for the end. If pool memory belongs to another stream, the copy
    /// runs after its allocation and after all work submitted to that stream so far.
    /// [`start_copy`](Self::start_copy) does not wait.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::InvalidArgument`] for another driver's memory, for a stream that is
    /// being captured into a graph, and in a forked child; [`Error::NotAccessible`] if the GPU may not write
    /// the destination or not read the source, and if the source is host memory and the CPU may read the
    /// destination but not write it (the driver makes such copies with the CPU); the error of earlier work on
    /// the stream.
    pub fn copy(
        &self,
        to: &impl Memory,
        to_offset: u64,
        from: &impl Memory,
        from_offset: u64,
        bytes: u64,
    ) -> Result<()> {
        let copy = BatchCopy {
            to: to_offset,
            from: from_offset,
            bytes,
        };
        let Some(copy) = self.prepare_copies(to, from, &[copy], false)? else {
            return Ok(());
        };
        // SAFETY: both ranges are borrowed until the copy is done, which is before this returns.
        let put = unsafe { self.put(&copy) };
        put.and(self.finish())
    }

    /// Sets `bytes` bytes from `offset` on to `byte` with the GPU, and waits for the end.
    /// [`start_fill`](Self::start_fill) does not wait.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn fill(&self, to: &impl Memory, offset: u64, bytes: u64, byte: u8) -> Result<()> {
        let Some(fill) = self.prepare_fill((to, offset), bytes, byte)? else {
            return Ok(());
        };
        // SAFETY: the range is borrowed until the work is done, which is before this returns.
        let put = unsafe { self.put(&fill) };
        put.and(self.finish())
    }

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
        let Some(batch) = self.prepare_copies(to, from, copies, true)? else {
            return Ok(());
        };
        // SAFETY: both memories are borrowed until the copies are done, which is before this returns.
        let put = unsafe { self.put(&batch) };
        put.and(self.finish())
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
    unsafe fn copy_each(&self, copies: &[MemcpyDesc]) -> Result<()> {
        copies.iter().try_for_each(|copy| {
            // SAFETY: the caller's promise.
            unsafe { self.copy_async(copy.dst, copy.src, copy.bytes) }
        })
    }

    /// Checks copies from one memory to another. `None`: there are no bytes to copy. With `batch` they are for few calls, which
    /// take memory of one mapping each.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub(super) fn prepare_copies(
        &self,
        to: &impl Memory,
        from: &impl Memory,
        copies: &[BatchCopy],
        batch: bool,
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
        let mut pieces = SmallVec::new();
        for copy in copies() {
            let whole = |at, len| {
                let (to_at, from_at) = (copy.to + at, copy.from + at);
                let kind = to
                    .of_one_copy(to_at, len)
                    .min(from.of_one_copy(from_at, len));
                if !batch {
                    return kind;
                }
                let to = to.of_one_mapping(to_at, len).unwrap_or(len);
                kind.min(to)
                    .min(from.of_one_mapping(from_at, len).unwrap_or(len))
            };
            in_pieces(copy.bytes, whole, |at, bytes| {
                let (dst, src) = (copy.to + at, copy.from + at);
                expect_no_cpu_fault((to, dst), (from, src), bytes)?;
                let (dst, src) = (to.device_ptr().add(dst), from.device_ptr().add(src));
                pieces.push(MemcpyDesc { dst, src, bytes });
                Ok(())
            })?;
        }
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe {
            to.ready_on(self.handle())?;
            from.ready_on(self.handle())?;
        }
        let is_known = || {
            let to = to.of_one_mapping(0, to.len());
            to.is_some() && from.of_one_mapping(0, from.len()).is_some()
        };
        let how = if batch && is_known() {
            How::Together
        } else {
            How::Each
        };
        Ok(Some(Prepared {
            how,
            pieces,
            grants,
        }))
    }

    /// Refuses ranges that the GPU has no access `need` to. Asks for all of the memory before several ranges, because each
    /// costs the driver's answer.
    fn expect_access(
        &self,
        memory: &impl Memory,
        need: Access,
        mut ranges: impl Iterator<Item = (u64, u64)> + Clone,
    ) -> Result<()> {
        let by = (self.device(), Engine::Copy);
        if ranges.clone().nth(1).is_some()
            && expect_gpu_access(memory, by, (0, memory.len()), need).is_ok()
        {
            return Ok(());
        }
        ranges.try_for_each(|range| expect_gpu_access(memory, by, range, need))
    }

    /// Checks a fill of `bytes` from an offset in a memory on. `None`: there are none to fill.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub(super) fn prepare_fill(
        &self,
        (to, offset): (&impl Memory, u64),
        bytes: u64,
        byte: u8,
    ) -> Result<Option<Prepared>> {
        self.driver().expect_this_process("stream")?;
        self.driver().expect_same(to.driver(), "destination")?;
        let dst = to.range(offset, bytes)?;
        if bytes == 0 {
            return Ok(None);
        }
        self.expect_no_capture()?;
        let grants = [to.hold_grants(), None];
        let by = (self.device(), Engine::Copy);
        expect_gpu_access(to, by, (offset, bytes), Access::ReadWrite)?;
        let one_kind = |at, len| to.of_one_copy(offset + at, len);
        let mut pieces = SmallVec::new();
        in_pieces(bytes, one_kind, |at, bytes| {
            let (dst, src) = (dst.add(at), dst.add(at));
            pieces.push(MemcpyDesc { dst, src, bytes });
            Ok(())
        })?;
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe { to.ready_on(self.handle())? };
        let how = How::Fill(byte);
        Ok(Some(Prepared {
            how,
            pieces,
            grants,
        }))
    }

    /// Submits prepared work to the stream.
    ///
    /// # Errors
    /// The driver's errors. The work may be on the stream anyway.
    ///
    /// # Safety
    /// As [`copy_async`](Self::copy_async). The work was prepared for this stream.
    pub(super) unsafe fn put(&self, work: &Prepared) -> Result<()> {
        if work.how == How::Together {
            // SAFETY: the caller's promise.
            return unsafe { self.copy_batch_async(&work.pieces) };
        }
        let mut pieces = work.pieces.iter();
        pieces.try_for_each(|&MemcpyDesc { dst, src, bytes }| {
            // SAFETY: the caller's promise.
            unsafe {
                match work.how {
                    How::Fill(byte) => self.memset_async(dst, byte, bytes),
                    How::Each | How::Together => self.copy_async(dst, src, bytes),
                }
            }
        })
    }
}

/// Cuts `bytes` bytes where `whole` says that one call ends, and takes each piece.
fn in_pieces(
    bytes: u64,
    whole: impl Fn(u64, u64) -> u64,
    mut take: impl FnMut(u64, u64) -> Result<()>,
) -> Result<()> {
    let mut at = 0;
    while at < bytes {
        let len = whole(at, bytes - at).clamp(1, bytes - at);
        take(at, len)?;
        at += len;
    }
    Ok(())
}

fn is_unknown(error: &Error) -> bool {
    matches!(error, Error::MissingSymbol { .. }) || error.code() == Some(Code::NOT_SUPPORTED)
}

#[cfg(test)]
mod tests;
