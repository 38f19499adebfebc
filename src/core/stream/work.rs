//! Copies and fills of safe callers: checks before submission.

use super::Stream;
use crate::Result;
use crate::driver::{Access, DevicePtr, MemcpyDesc};
use crate::memory::{Engine, GrantUse, Memory, expect_gpu_access, expect_no_cpu_fault};

/// The grants of pools that work relies on.
pub(super) type Grants = [Option<GrantUse>; 2];

/// Checked work. The memory's allocation comes first on the stream, and access to it cannot be revoked while
/// this lives.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) work: Work,
    pub(super) grants: Grants,
}

#[derive(Debug)]
pub(super) enum Work {
    /// The first piece, and those that follow it: the driver's calls take memory of one kind only, the CPU's or a GPU's.
    Pieces(What, Vec<What>),
    Batch(Vec<MemcpyDesc>),
    OneByOne(Vec<MemcpyDesc>),
}

impl Prepared {
    /// `together`: in few calls of the driver, else in one for each copy.
    pub(super) const fn batch(copies: Vec<MemcpyDesc>, together: bool, grants: Grants) -> Self {
        let work = if together {
            Work::Batch(copies)
        } else {
            Work::OneByOne(copies)
        };
        Self { work, grants }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Copy {
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
    },
    Fill {
        dst: DevicePtr,
        byte: u8,
        bytes: u64,
    },
}

impl Stream {
    /// Checks a copy of `bytes`, from a memory and an offset to another. `None`: there are none to copy.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub(super) fn prepare_copy(
        &self,
        (to, to_offset): (&impl Memory, u64),
        (from, from_offset): (&impl Memory, u64),
        bytes: u64,
    ) -> Result<Option<Prepared>> {
        self.driver().expect_this_process("stream")?;
        self.driver().expect_same(to.driver(), "destination")?;
        self.driver().expect_same(from.driver(), "source")?;
        let dst = to.range(to_offset, bytes)?;
        let src = from.range(from_offset, bytes)?;
        if bytes == 0 {
            return Ok(None);
        }
        self.expect_no_capture()?;
        // Before the checks: their result stays valid.
        let grants = [to.hold_grants(), from.hold_grants()];
        let by = (self.device(), Engine::Copy);
        expect_gpu_access(to, by, (to_offset, bytes), Access::ReadWrite)?;
        expect_gpu_access(from, by, (from_offset, bytes), Access::Read)?;
        let one_kind = |at, len| {
            let to = to.of_one_copy(to_offset + at, len);
            to.min(from.of_one_copy(from_offset + at, len))
        };
        let work = in_pieces(bytes, one_kind, |at, bytes| {
            expect_no_cpu_fault((to, to_offset + at), (from, from_offset + at), bytes)?;
            let (dst, src) = (dst.add(at), src.add(at));
            Ok(What::Copy { dst, src, bytes })
        });
        let (first, rest) = work?;
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe {
            to.ready_on(self.handle())?;
            from.ready_on(self.handle())?;
        }
        let work = Work::Pieces(first, rest);
        Ok(Some(Prepared { work, grants }))
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
        let work = in_pieces(bytes, one_kind, |at, bytes| {
            let dst = dst.add(at);
            Ok(What::Fill { dst, byte, bytes })
        });
        let (first, rest) = work?;
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe { to.ready_on(self.handle())? };
        let work = Work::Pieces(first, rest);
        Ok(Some(Prepared { work, grants }))
    }

    /// Submits prepared work to the stream.
    ///
    /// # Errors
    /// The driver's errors. The work may be on the stream anyway.
    ///
    /// # Safety
    /// As [`copy_async`](Self::copy_async). The work was prepared for this stream.
    pub(super) unsafe fn put(&self, work: &Prepared) -> Result<()> {
        let (first, rest) = match &work.work {
            Work::Pieces(first, rest) => (first, rest),
            // SAFETY: the caller's promise.
            Work::Batch(copies) => return unsafe { self.copy_batch_async(copies) },
            // SAFETY: the caller's promise.
            Work::OneByOne(copies) => return unsafe { self.copy_each(copies) },
        };
        for &what in std::iter::once(first).chain(rest) {
            // SAFETY: the caller's promise.
            unsafe {
                match what {
                    What::Copy { dst, src, bytes } => self.copy_async(dst, src, bytes)?,
                    What::Fill { dst, byte, bytes } => self.memset_async(dst, byte, bytes)?,
                }
            }
        }
        Ok(())
    }
}

/// Cuts `bytes` bytes, at least 1, where `one_kind` says that memory of one kind ends, and prepares each piece.
fn in_pieces(
    bytes: u64,
    one_kind: impl Fn(u64, u64) -> u64,
    mut prepare: impl FnMut(u64, u64) -> Result<What>,
) -> Result<(What, Vec<What>)> {
    let piece = |at| one_kind(at, bytes - at).clamp(1, bytes - at);
    let mut at = piece(0);
    let first = prepare(0, at)?;
    let mut rest = Vec::new();
    while at < bytes {
        let len = piece(at);
        rest.push(prepare(at, len)?);
        at += len;
    }
    Ok((first, rest))
}
