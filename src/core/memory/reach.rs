//! Memory that the CPU can access, of any type.

use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use super::CpuView;
use crate::Result;

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
