//! Copies and fills of safe callers: checks before submission.

use super::Stream;
use crate::Result;
use crate::driver::{Access, DevicePtr};
use crate::memory::{Engine, GrantUse, Memory, expect_gpu_access, expect_no_cpu_fault};

/// The grants of pools that work relies on.
pub(super) type Grants = [Option<GrantUse>; 2];

/// Checked work. The memory's allocation comes first on the stream, and access to it cannot be revoked while
/// this lives.
#[derive(Debug)]
pub(super) struct Prepared {
    what: What,
    pub(super) grants: Grants,
}

#[derive(Clone, Copy, Debug)]
enum What {
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
        expect_no_cpu_fault((to, to_offset), (from, from_offset), bytes)?;
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe {
            to.ready_on(self.handle())?;
            from.ready_on(self.handle())?;
        }
        let what = What::Copy { dst, src, bytes };
        Ok(Some(Prepared { what, grants }))
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
        // SAFETY: the stream is `self`'s, of the same driver as just checked.
        unsafe { to.ready_on(self.handle())? };
        let what = What::Fill { dst, byte, bytes };
        Ok(Some(Prepared { what, grants }))
    }

    /// Submits prepared work to the stream.
    ///
    /// # Errors
    /// The driver's errors. The work may be on the stream anyway.
    ///
    /// # Safety
    /// As [`copy_async`](Self::copy_async). The work was prepared for this stream.
    pub(super) unsafe fn put(&self, work: &Prepared) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match work.what {
                What::Copy { dst, src, bytes } => self.copy_async(dst, src, bytes),
                What::Fill { dst, byte, bytes } => self.memset_async(dst, byte, bytes),
            }
        }
    }
}
