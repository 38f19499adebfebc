//! Interfaces that all memory of this crate shares, and the CPU's safe access to it.

mod cursor;
mod gpu;
mod grants;
mod parallel;
mod reach;
mod view;
mod words;

pub use cursor::Cursor;
pub use parallel::ParallelCopy;
pub use reach::CpuMemory;
pub(crate) use reach::impl_cpu_memory;
pub use view::CpuView;

use std::sync::Arc;

use crate::driver::{Access, DevicePtr, Driver, Location, StreamHandle};
use crate::{Error, Result};

mod sealed {
    pub use super::gpu::Engine;
    pub use super::grants::GrantUse;
    use crate::Result;
    use crate::driver::{Access, StreamHandle};

    pub trait Sealed {
        /// Returns what `engine` of GPU `gpu` may do with `len` bytes from `offset` on: the least over the
        /// range.
        ///
        /// Queries the driver for mappings (`cuMemGetAccess`) and pools (`cuMemPoolGetAccess`), because
        /// unsafe code can change their grants. For memory whose access is fixed at allocation the type
        /// decides.
        ///
        /// # Errors
        /// [`Error::NoSuchGpu`](crate::Error::NoSuchGpu), or the driver's error.
        fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access>;

        /// Returns whether the CPU may read, but not write, some of `len` bytes from `offset` on.
        fn is_read_only_for_cpu(&self, _offset: u64, _len: u64) -> bool {
            false
        }

        /// Keeps safe calls from revoking access to the memory while the result lives. `None` for memory
        /// whose grants change only through `&mut`.
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
}
pub(crate) use gpu::{
    expect_gpu_access, expect_no_cpu_fault, gpu_access_of_neighbours, is_read_only_for_cpu,
};
pub(crate) use grants::GrantUses;
pub(crate) use sealed::{Engine, GrantUse, Sealed};

/// Memory with an address in CUDA's unified address space.
pub trait Memory: Sealed {
    /// Returns the memory's driver.
    fn driver(&self) -> &Driver;
    /// Returns the address of the first byte, the same for every GPU and, for host memory, for the CPU.
    fn device_ptr(&self) -> DevicePtr;
    /// Returns the number of usable bytes.
    fn len(&self) -> u64;
    /// Returns the memory's location.
    fn location(&self) -> Location;

    /// Returns whether there are no bytes; memory of this crate always has some.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that `len` bytes follow at `offset`; returns the address there.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    fn range(&self, offset: u64, len: u64) -> Result<DevicePtr> {
        check_range(offset, len, self.len())?;
        Ok(self.device_ptr().add(offset))
    }
}

/// Shared memory, which a [ticket](crate::stream::Transfer) and its owner may both have.
impl<M: Memory + ?Sized> Sealed for Arc<M> {
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access> {
        (**self).gpu_access(gpu, engine, offset, len)
    }

    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        (**self).is_read_only_for_cpu(offset, len)
    }

    fn hold_grants(&self) -> Option<GrantUse> {
        (**self).hold_grants()
    }

    unsafe fn ready_on(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { (**self).ready_on(stream) }
    }
}

impl<M: Memory + ?Sized> Memory for Arc<M> {
    fn driver(&self) -> &Driver {
        (**self).driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        (**self).device_ptr()
    }
    fn len(&self) -> u64 {
        (**self).len()
    }
    fn location(&self) -> Location {
        (**self).location()
    }
}

pub(crate) fn check_range(offset: u64, len: u64, size: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfRange { offset, len, size }),
    }
}
