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
