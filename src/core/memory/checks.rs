//! What safe calls that touch memory from a GPU find out first.

use super::{Engine, GrantUse};
use crate::Result;
use crate::driver::{Access, StreamHandle};

/// What safe calls ask of memory before a GPU or a system call touches it.
///
/// # Safety
/// Safe calls trust the answers: one that allows more than the driver does faults, and the process loses its
/// GPU. While the value lives, and with it what [`hold_grants`](Self::hold_grants) returned, [`Memory`](super::Memory)'s
/// range must stay mapped and its grants may only grow.
pub unsafe trait AccessChecks {
    /// Returns what `engine` of GPU `gpu` may do with `len` bytes from `offset` on: the least over the range.
    ///
    /// Queries the driver for mappings (`cuMemGetAccess`) and pools (`cuMemPoolGetAccess`), because unsafe
    /// code can change their grants. For memory whose access is fixed at allocation the type decides.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`](crate::Error::NoSuchGpu), or the driver's error.
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access>;

    /// Returns whether the CPU may read, but not write, some of `len` bytes from `offset` on.
    fn is_read_only_for_cpu(&self, _offset: u64, _len: u64) -> bool {
        false
    }

    /// Keeps safe calls from revoking access to the memory while the result lives. `None` for memory whose
    /// grants change only through `&mut`.
    fn hold_grants(&self) -> Option<GrantUse> {
        None
    }

    /// Orders work submitted to `stream` from now on after the memory's allocation.
    ///
    /// # Errors
    /// The driver's errors.
    ///
    /// # Safety
    /// `stream` is a live stream of the memory's driver.
    unsafe fn ready_on(&self, _stream: StreamHandle) -> Result<()> {
        Ok(())
    }
}
