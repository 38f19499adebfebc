//! The elements that a vector had at one time.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::Result;
use crate::driver::{DevicePtr, Driver, Location};
use crate::memory::{CpuView, check_range};
use crate::vmm::{Adjacent, MappedPart};

/// The elements that a [`Growable`](super::Growable) had when [`prefix`](super::Growable::prefix) was called, at the
/// same addresses.
///
/// It keeps their memory mapped, also after the vector is dropped; clones share it. It is the same memory, not a
/// copy: elements that the vector changes, or truncates and appends again, change here too.
#[derive(Clone)]
pub struct Prefix<T> {
    pub(super) chunks: Arc<[Arc<MappedPart>]>,
    pub(super) driver: Driver,
    pub(super) location: Location,
    pub(super) start: DevicePtr,
    pub(super) len: usize,
    pub(super) elements: PhantomData<fn() -> T>,
}

impl<T> Prefix<T> {
    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first element.
    pub const fn device_ptr(&self) -> DevicePtr {
        self.start
    }

    /// Returns the CPU's view of the elements.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible) unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        // SAFETY: the chunks are the vector's first ones, and this keeps them; the access of a chunk that is shared
        // does not change.
        unsafe { Adjacent(&self.chunks).cpu(self.start, 0, self.bytes()) }
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.len as u64 * size_of::<T>() as u64
    }
}

impl<T: AnyBitPattern + NoUninit> Prefix<T> {
    /// Returns the element at `index`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), [`Error::NotAccessible`](crate::Error::NotAccessible).
    pub fn get(&self, index: usize) -> Result<T> {
        let element = size_of::<T>() as u64;
        let offset = (index as u64).saturating_mul(element);
        check_range(offset, element, self.bytes())?;
        // SAFETY: as in `cpu`; the range is inside the elements.
        unsafe { Adjacent(&self.chunks).cpu(self.start, offset, element)? }.get(0)
    }
}

impl<T> fmt::Debug for Prefix<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefix")
            .field("start", &self.start)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
