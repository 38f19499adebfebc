//! A reader's hold on one version, in the copy near to it.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use super::version::{Copy, Source};
use crate::driver::{Access, DevicePtr, Driver, Location};
use crate::memory::{AccessChecks, CpuMemory, CpuView, Engine, Memory, check_range};
use crate::{Error, Result, Stream};

/// A copy of one version of the data, whose bytes do not change while this lives.
///
/// It is memory that can be read: in kernels by its address, in [`Stream::copy`] and tickets, and, on a host node, by the CPU.
/// Safe calls refuse to write it.
///
/// # GPU work
/// Work that reads the address must have been submitted while this lives, and this must live until the work has run: a
/// ticket ([`Stream::start_copy`]) owns it that long, and [`release_after`](Self::release_after) keeps the version for
/// the work of a stream without waiting. Otherwise the next but one version may overwrite the memory
/// that the work reads.
pub struct Replica<T> {
    version: Arc<dyn Source>,
    place: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T> Clone for Replica<T> {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.version), self.place)
    }
}

impl<T> Replica<T> {
    pub(super) const fn new(version: Arc<dyn Source>, place: usize) -> Self {
        Self {
            version,
            place,
            elements: PhantomData,
        }
    }

    fn buffer(&self) -> &dyn Copy {
        self.version.copy(self.place)
    }

    /// Returns the version's number: 1 is the first.
    pub fn epoch(&self) -> u64 {
        self.version.epoch()
    }

    /// Returns the number of elements: at least 1.
    pub fn len(&self) -> usize {
        self.buffer().len() as usize / size_of::<T>()
    }

    /// Returns `false`: there is at least one element.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the address of the first element.
    pub fn device_ptr(&self) -> DevicePtr {
        self.buffer().device_ptr()
    }

    /// Returns the copy's location.
    pub fn location(&self) -> Location {
        self.buffer().location()
    }

    /// Returns the CPU's view of the elements, which can only read.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] for a copy in a GPU's memory.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        let view = self.buffer().cpu()?;
        // SAFETY: the bytes are those of a view that borrows the same memory.
        Ok(unsafe { CpuView::new(self.device_ptr(), view.len(), false) })
    }

    /// Drops this once the work submitted to `stream` so far has run, without waiting: the version is kept until then.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another driver's stream and for one that is being captured; the driver's errors. The
    /// error has the replica.
    pub fn release_after(self, stream: &Stream) -> Result<(), Box<(Self, Error)>> {
        match self.version.read_by(stream) {
            Ok(()) => Ok(()),
            Err(error) => Err(Box::new((self, error))),
        }
    }
}

impl<T: AnyBitPattern + NoUninit> Replica<T> {
    /// Returns the element at `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; otherwise as [`cpu`](Self::cpu).
    pub fn get(&self, index: usize) -> Result<T> {
        let offset = (index as u64).saturating_mul(size_of::<T>() as u64);
        check_range(offset, size_of::<T>() as u64, self.buffer().len())?;
        self.cpu()?.get(offset)
    }
}

impl<T> std::fmt::Debug for Replica<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica")
            .field("epoch", &self.epoch())
            .field("location", &self.location())
            .finish_non_exhaustive()
    }
}

impl<T> CpuMemory for Replica<T> {
    fn cpu(&self) -> Result<CpuView<'_>> {
        Self::cpu(self)
    }
}

// SAFETY: the buffer answers for its range, which is mapped while the version lives, and whose grants never change; the
// answers allow no writing.
unsafe impl<T> AccessChecks for Replica<T> {
    fn gpu_access(&self, gpu: i32, engine: Engine, offset: u64, len: u64) -> Result<Access> {
        let access = self.buffer().gpu_access(gpu, engine, offset, len)?;
        Ok(access.min(Access::Read))
    }

    fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
        self.buffer().may_be_on_host(offset, len)
    }

    fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
        self.buffer().of_one_copy(offset, len)
    }

    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        self.buffer().of_one_mapping(offset, len)
    }

    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        self.may_be_on_host(offset, len)
    }
}

impl<T> Memory for Replica<T> {
    fn driver(&self) -> &Driver {
        self.buffer().driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        self.buffer().device_ptr()
    }
    fn len(&self) -> u64 {
        self.buffer().len()
    }
    fn location(&self) -> Location {
        self.buffer().location()
    }
}
