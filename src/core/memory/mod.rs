//! Interfaces that all memory of this crate shares, and the CPU's safe access to it.
//!
//! # Access by the CPU
//! GPUs and other processes write the same bytes, so safe code never gets `&[T]`. `CpuView` copies in and out by relaxed
//! atomic accesses of whole aligned words, since accesses of different sizes to the same bytes would race. This is sound
//! with any concurrent writer; a racing value of more than a word may be torn. Long copies are assembly with the same
//! effect (`core/memory/words`): the compiler makes one move per relaxed access, which is half as fast as `memcpy`, and
//! `memcpy` itself would rest on behaviour that C leaves undefined. `as_slice` is `unsafe`, with its contract.
//! `exclusive_slice` is safe: it checks that the host alone reaches the memory. A view borrows the mapping, and taking the
//! CPU's access away needs the mapping exclusively, so a view never faults.
//!
//! Host access has one meaning per mapping. The driver wants it named by the memory's own node; the types translate every
//! name of the host to that.

mod checks;
mod file;
mod parallel;
mod view;
mod words;

pub use checks::{
    AccessChecks, Engine, GrantUse, GrantUses, access_checks, expect_gpu_access,
    expect_no_cpu_fault, impl_memory, is_of_one_kind, memory_through,
};
pub use parallel::ParallelCopy;
pub use view::CpuView;

use std::ops::{Deref, Range};
use std::rc::Rc;
use std::sync::Arc;

use crate::driver::{DevicePtr, Driver, Location};
use crate::{Error, Result};

pub use parallel::in_threads;

/// Memory with an address in CUDA's unified address space.
pub trait Memory: AccessChecks {
    /// Returns the memory's driver.
    fn driver(&self) -> &Driver;
    /// Returns the address of the first byte, the same for every GPU and, for host memory, for the CPU.
    fn device_ptr(&self) -> DevicePtr;
    /// Returns the number of usable bytes.
    fn len(&self) -> u64;
    /// Returns the memory's location: of memory in several places, such as a spread [`Buffer`](crate::Buffer), that of
    /// its first byte.
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

// Shared memory, which a [ticket](crate::stream::Transfer) and its owner may both have: it lives as long as the pointer.
memory_through!(unsafe impl [M: Memory + ?Sized] for Arc<M>, |this| **this);

/// Checks that `len` bytes from `offset` on lie in memory of `size` bytes.
///
/// # Errors
/// [`Error::OutOfRange`].
pub fn check_range(offset: u64, len: u64, size: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfRange { offset, len, size }),
    }
}

/// Returns those of `parts` that contain some of `len` bytes from `offset` on. The parts are side by side from 0 on, in
/// the order of addresses, and `range` tells where each lies.
pub fn overlapping<P>(
    parts: &[P],
    range: impl Fn(&P) -> Range<u64>,
    offset: u64,
    len: u64,
) -> &[P] {
    let end = offset.saturating_add(len);
    let first = parts.partition_point(|part| range(part).end <= offset);
    let parts = &parts[first..];
    &parts[..parts.partition_point(|part| range(part).start < end)]
}

/// Memory with a CPU view, for functions that accept any such type.
///
/// All memory of this crate implements it, except that of a single GPU, and so do references, `Box`, `Rc` and
/// `Arc`. A type of your own that owns such memory can lend its view:
///
/// ```
/// use egmem::memory::{CpuMemory, CpuView};
/// use egmem::{Buffer, Driver, Machine};
///
/// /// The words' sum.
/// fn sum(memory: &impl CpuMemory) -> egmem::Result<u64> {
///     let view = memory.cpu()?;
///     (0..view.len() / 8).map(|word| view.get::<u64>(word * 8)).sum()
/// }
///
/// struct Weights(Buffer);
///
/// impl CpuMemory for Weights {
///     fn cpu(&self) -> egmem::Result<CpuView<'_>> {
///         self.0.cpu()?.slice(0, 64)
///     }
/// }
///
/// let driver = Driver::simulated(Machine::gh200())?;
/// let weights = Weights(Buffer::near(&driver, 0, 4096)?);
/// weights.0.put(8, 40_u64)?;
/// assert_eq!(sum(&weights)?, 40);
/// # Ok::<(), egmem::Error>(())
/// ```
pub trait CpuMemory {
    /// Returns the CPU's view of the memory. Pool memory waits for the work on its streams first.
    ///
    /// # Errors
    /// [`Error::NotAccessible`](crate::Error::NotAccessible) unless the CPU may at least read; for pool
    /// memory, the error of work on its streams.
    fn cpu(&self) -> Result<CpuView<'_>>;
}

impl CpuMemory for CpuView<'_> {
    fn cpu(&self) -> Result<CpuView<'_>> {
        Ok(*self)
    }
}

/// Implements [`CpuMemory`] for a type whose own `cpu` lends the view.
#[macro_export]
macro_rules! impl_cpu_memory {
    ($name:ty) => {
        impl $crate::memory::CpuMemory for $name {
            fn cpu(&self) -> $crate::Result<$crate::memory::CpuView<'_>> {
                <$name>::cpu(self)
            }
        }
    };
}
pub use impl_cpu_memory;

/// Implements it for pointers to such memory.
macro_rules! lends_through {
    ($($pointer:ty),*) => {$(
        impl<M: CpuMemory + ?Sized> CpuMemory for $pointer {
            fn cpu(&self) -> Result<CpuView<'_>> {
                self.deref().cpu()
            }
        }
    )*};
}

lends_through!(&M, &mut M, Box<M>, Rc<M>, Arc<M>);

/// Defines inherent methods of a type whose `cpu()` lends a [`CpuView`](crate::memory::CpuView), or of one that names
/// another view of `len` bytes from `offset` on, and where in that view they start.
#[macro_export]
macro_rules! cpu_accessors {
    () => {
        $crate::cpu_accessors!(|this, offset, _len| (this.cpu()?, offset));
    };
    (|$this:ident, $offset:ident, $len:ident| $view:expr) => {
        /// Copies `values` to `offset` bytes from the start, with the CPU.
        ///
        /// # Errors
        /// [`Error::NotAccessible`](crate::Error::NotAccessible),
        /// [`Error::OutOfRange`](crate::Error::OutOfRange).
        pub fn write_at<T: ::bytemuck::NoUninit>(
            &self,
            offset: u64,
            values: &[T],
        ) -> $crate::Result<()> {
            let ($this, $offset, $len) = (self, offset, size_of_val(values) as u64);
            let (view, at) = $view;
            view.write_at(at, values)
        }

        /// Copies from `offset` bytes from the start into `values`, with the CPU.
        ///
        /// # Errors
        /// As [`write_at`](Self::write_at).
        pub fn read_at<T: ::bytemuck::AnyBitPattern + ::bytemuck::NoUninit>(
            &self,
            offset: u64,
            values: &mut [T],
        ) -> $crate::Result<()> {
            let ($this, $offset, $len) = (self, offset, size_of_val(values) as u64);
            let (view, at) = $view;
            view.read_at(at, values)
        }

        /// Writes one value.
        ///
        /// # Errors
        /// As [`write_at`](Self::write_at).
        pub fn put<T: ::bytemuck::NoUninit>(&self, offset: u64, value: T) -> $crate::Result<()> {
            let ($this, $offset, $len) = (self, offset, size_of::<T>() as u64);
            let (view, at) = $view;
            view.put(at, value)
        }

        /// Reads one value.
        ///
        /// # Errors
        /// As [`write_at`](Self::write_at).
        pub fn get<T: ::bytemuck::AnyBitPattern + ::bytemuck::NoUninit>(
            &self,
            offset: u64,
        ) -> $crate::Result<T> {
            let ($this, $offset, $len) = (self, offset, size_of::<T>() as u64);
            let (view, at) = $view;
            view.get(at)
        }

        /// Sets every byte to `byte`, with the CPU.
        ///
        /// # Errors
        /// [`Error::NotAccessible`](crate::Error::NotAccessible).
        pub fn fill(&self, byte: u8) -> $crate::Result<()> {
            self.cpu()?.fill(0, self.len(), byte)
        }
    };
}

pub use cpu_accessors;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_overlap_if_they_share_a_byte(
            sizes in prop::collection::vec(1_u64..9, 0..9),
            offset in 0_u64..80,
            len in prop_oneof![1_u64..80, Just(u64::MAX)],
        ) {
            let mut end = 0;
            let parts: Vec<Range<u64>> = sizes
                .iter()
                .map(|size| {
                    end += size;
                    end - size..end
                })
                .collect();
            let range = offset..offset.saturating_add(len);
            let shares = |part: &&Range<u64>| part.start < range.end && range.start < part.end;
            let expected: Vec<_> = parts.iter().filter(shares).cloned().collect();
            prop_assert_eq!(overlapping(&parts, Clone::clone, offset, len), &expected[..]);
        }
    }
}
