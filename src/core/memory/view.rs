//! The CPU's view of memory that other code may write meanwhile.

use std::marker::PhantomData;
use std::mem::size_of_val;
use std::ops::Deref;

use bytemuck::{AnyBitPattern, NoUninit};

use super::{check_range, words};
use crate::driver::{Access, DevicePtr, Location};
use crate::{Error, Result};

/// A view through which the CPU reads and writes memory that other code may write meanwhile.
///
/// GPUs, other processes and other threads may access the bytes, so they are never lent as `&[T]`.
///
/// # Concurrent writers
/// Copies access the memory by relaxed atomic accesses of whole words, 8 bytes that are aligned to 8, so a
/// concurrent write is not a data race:
/// - An aligned value of 1, 2, 4 or 8 bytes is read and written whole. Larger and unaligned values may be
///   torn: a reader may see a part of an old and a part of a new value.
/// - The order in which a copy accesses its words is not specified.
/// - Bytes beside those written keep the values that other code writes to them.
///
/// Nothing orders a copy against other threads' copies or against GPU work: synchronise the threads, and the
/// stream of the GPU's work.
///
/// Long copies are assembly on x86-64 and aarch64, which is opaque to the compiler. It does the same as the
/// loop over `AtomicU64` on other processors: one aligned access for each word or pair of words. The
/// processors' manuals guarantee that such an access is not split. docs/performance.md compares it with
/// libc's `memcpy`.
#[derive(Clone, Copy, Debug)]
pub struct CpuView<'a> {
    pub(super) base: *mut u8,
    pub(super) len: u64,
    pub(super) writable: bool,
    memory: PhantomData<&'a ()>,
}

// SAFETY: all access through the pointer is atomic, or assembly of the same effect, and bounds-checked;
// the lifetime keeps it valid.
unsafe impl Send for CpuView<'_> {}
// SAFETY: as above.
unsafe impl Sync for CpuView<'_> {}

impl<'a> CpuView<'a> {
    /// Creates a view of `len` bytes at `base`.
    ///
    /// # Safety
    /// For `'a` the range, widened to multiples of 8, must stay mapped and readable by the CPU, and writable
    /// too if `writable`. Any other access to it in this process must be atomic in the same words, or ordered
    /// by other means. (Atomic accesses of different sizes race.)
    pub unsafe fn new(base: DevicePtr, len: u64, writable: bool) -> Self {
        Self {
            base: std::ptr::with_exposed_provenance_mut(base.0 as usize),
            len,
            writable,
            memory: PhantomData,
        }
    }

    /// As [`new`](Self::new), for memory to which the host has the access `have`.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    ///
    /// # Safety
    /// As [`new`](Self::new); the host keeps this access for `'a`.
    pub unsafe fn granted(base: DevicePtr, len: u64, have: Access) -> Result<Self> {
        if have == Access::None {
            let (who, need) = (Location::Host, Access::Read);
            return Err(Error::NotAccessible { who, have, need });
        }
        // SAFETY: the caller's promise.
        Ok(unsafe { Self::new(base, len, have == Access::ReadWrite) })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the view is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the CPU may write.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns the address of the first byte, for code of your own.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Copies `values` to `offset` bytes from the start.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::NotAccessible`] if the CPU may only read.
    pub fn write_at<T: NoUninit>(&self, offset: u64, values: &[T]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let at = self.check_write(offset, bytes.len() as u64)?;
        // SAFETY: the range is inside the window, whose words are mapped and writable for the CPU.
        unsafe { words::store(at, bytes) };
        Ok(())
    }

    /// Copies from `offset` bytes from the start into `values`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn read_at<T: AnyBitPattern + NoUninit>(
        &self,
        offset: u64,
        values: &mut [T],
    ) -> Result<()> {
        check_range(offset, size_of_val(values) as u64, self.len)?;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        // SAFETY: the range is inside the window, whose words are mapped and readable for the CPU.
        unsafe { words::load(self.base.add(offset as usize), bytes) };
        Ok(())
    }

    /// Writes one value at `offset` bytes from the start.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn put<T: NoUninit>(&self, offset: u64, value: T) -> Result<()> {
        self.write_at(offset, &[value])
    }

    /// Reads one value at `offset` bytes from the start.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    pub fn get<T: AnyBitPattern + NoUninit>(&self, offset: u64) -> Result<T> {
        let mut value = [T::zeroed()];
        self.read_at(offset, &mut value)?;
        Ok(value[0])
    }

    /// Sets `len` bytes from `offset` on to `byte`.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at).
    pub fn fill(&self, offset: u64, len: u64, byte: u8) -> Result<()> {
        let at = self.check_write(offset, len)?;
        // SAFETY: the range is inside the window, whose words are mapped and writable for the CPU.
        unsafe { words::fill(at, len as usize, byte) };
        Ok(())
    }

    /// Returns a view of a part.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<CpuView<'a>> {
        check_range(offset, len, self.len)?;
        // SAFETY: the range is inside the window.
        let base = unsafe { self.base.add(offset as usize) };
        Ok(Self { base, len, ..*self })
    }

    pub(super) fn check_write(&self, offset: u64, len: u64) -> Result<*mut u8> {
        check_range(offset, len, self.len)?;
        if !self.writable {
            let (have, need) = (Access::Read, Access::ReadWrite);
            return Err(Error::not_accessible(Location::Host, have, need));
        }
        // SAFETY: the offset is inside the window.
        Ok(unsafe { self.base.add(offset as usize) })
    }
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

impl<P: Deref<Target: CpuMemory> + ?Sized> CpuMemory for P {
    fn cpu(&self) -> Result<CpuView<'_>> {
        self.deref().cpu()
    }
}

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
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in crate::memory) fn view(words: &mut [u64], writable: bool) -> CpuView<'_> {
        let base = DevicePtr(words.as_mut_ptr().expose_provenance() as u64);
        // SAFETY: the slice is exclusively borrowed for the view's life, and whole words.
        unsafe { CpuView::new(base, size_of_val(words) as u64, writable) }
    }

    fn bytes(words: &[u64]) -> &[u8] {
        bytemuck::cast_slice(words)
    }

    proptest! {
        #[test]
        fn copies_touch_exactly_the_range(offset in 0_usize..64, data in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut memory = [u64::from_ne_bytes([0xee; 8]); 24];
            view(&mut memory, true).write_at(offset as u64, &data).unwrap();
            let mut expected = vec![0xee_u8; 192];
            expected[offset..offset + data.len()].copy_from_slice(&data);
            prop_assert_eq!(bytes(&memory), &expected);

            let mut back = vec![0_u8; data.len()];
            view(&mut memory, false).read_at(offset as u64, &mut back).unwrap();
            prop_assert_eq!(&back, &data);

            view(&mut memory, true).fill(offset as u64, data.len() as u64, 7).unwrap();
            expected[offset..offset + data.len()].fill(7);
            prop_assert_eq!(bytes(&memory), &expected);
        }

        #[test]
        fn ranges_outside_are_refused(offset in any::<u64>(), len in 0_u64..300) {
            let mut memory = [0_u64; 16];
            let fits = offset.checked_add(len).is_some_and(|end| end <= 128);
            prop_assert_eq!(view(&mut memory, true).fill(offset, len, 1).is_ok(), fits);
            prop_assert_eq!(view(&mut memory, true).slice(offset, len).is_ok(), fits);
        }
    }

    #[test]
    fn a_read_only_view_refuses_writes() {
        let mut memory = [0_u64];
        let error = view(&mut memory, false).put(0, 1_u8).unwrap_err();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
        assert_eq!(memory, [0]);
    }

    #[test]
    fn writers_of_neighbouring_bytes_do_not_undo_each_other() {
        let mut memory = [0_u64; 2];
        let view = view(&mut memory, true);
        std::thread::scope(|scope| {
            for byte in 0..8_u8 {
                // Each thread owns one byte of the first word and one of the last.
                scope.spawn(move || {
                    for round in 0..=200_u8 {
                        view.put(byte.into(), round).unwrap();
                        view.fill(8 + u64::from(byte), 1, round).unwrap();
                        assert_eq!(view.get::<u8>(byte.into()).unwrap(), round);
                        assert_eq!(view.get::<u8>(8 + u64::from(byte)).unwrap(), round);
                    }
                });
            }
        });
        assert_eq!(bytes(&memory), [200; 16]);
    }

    #[test]
    fn typed_values_come_back() {
        let mut memory = [0_u64; 8];
        let view = view(&mut memory, true);
        view.put(3, 1.5_f64).unwrap();
        view.write_at(16, &[1_u32, 2, 3]).unwrap();
        assert_eq!(view.get::<f64>(3).unwrap(), 1.5);
        let mut back = [0_u32; 3];
        view.read_at(16, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3]);
    }
}
