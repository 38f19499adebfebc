//! What all memory of this crate has in common, and how the CPU reaches it safely.

use std::marker::PhantomData;
use std::mem::size_of_val;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

use bytemuck::{AnyBitPattern, NoUninit};

use crate::driver::{DevicePtr, Driver, Location};
use crate::{Error, Result};

mod sealed {
    pub trait Sealed {
        /// Makes work put on `stream` from now on come after the memory's allocation.
        ///
        /// # Errors
        /// The driver's.
        ///
        /// # Safety
        /// `stream` is a live stream of the memory's driver.
        unsafe fn ready_on(&self, _stream: crate::driver::StreamHandle) -> crate::Result<()> {
            Ok(())
        }
    }
}
pub(crate) use sealed::Sealed;

/// Memory with an address in CUDA's unified address space.
pub trait Memory: Sealed {
    /// The driver that the memory belongs to.
    fn driver(&self) -> &Driver;
    /// The address of the first byte, the same for every GPU and, for host memory, for the CPU.
    fn device_ptr(&self) -> DevicePtr;
    /// The usable bytes.
    fn len(&self) -> u64;
    /// Where the memory lies.
    fn location(&self) -> Location;

    /// Whether there are no bytes; memory of this crate always has some.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The address `offset` bytes into the memory, after a check that `len` bytes follow there.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    fn range(&self, offset: u64, len: u64) -> Result<DevicePtr> {
        check_range(offset, len, self.len())?;
        Ok(self.device_ptr().add(offset))
    }
}

pub(crate) fn check_range(offset: u64, len: u64, size: u64) -> Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfRange { offset, len, size }),
    }
}

/// A window through which the CPU reads and writes memory that others may write meanwhile.
///
/// GPUs, other processes and other threads may share the bytes, so they are never lent as `&[T]`.
/// Copies go through relaxed atomic accesses of one to eight bytes: a concurrent writer can tear
/// a value, but nothing worse. Order them against GPU work by synchronising its stream.
#[derive(Clone, Copy, Debug)]
pub struct CpuView<'a> {
    base: *mut u8,
    len: u64,
    writable: bool,
    memory: PhantomData<&'a ()>,
}

// SAFETY: all access through the pointer is atomic and bounds-checked; the lifetime keeps it valid.
unsafe impl Send for CpuView<'_> {}
// SAFETY: as above.
unsafe impl Sync for CpuView<'_> {}

impl<'a> CpuView<'a> {
    /// A window on `len` bytes at `base`.
    ///
    /// # Safety
    /// For `'a` the range must stay mapped and readable by the CPU, and writable too if `writable`;
    /// whoever else accesses it in this process must do so atomically, or be ordered by other means.
    pub(crate) unsafe fn new(base: DevicePtr, len: u64, writable: bool) -> Self {
        Self {
            base: std::ptr::with_exposed_provenance_mut(base.0 as usize),
            len,
            writable,
            memory: PhantomData,
        }
    }

    /// The bytes in the window.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the window is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for code of your own.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base
    }

    /// Copies `values` to `offset` bytes from the start.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::NotAccessible`] where the CPU may only read.
    pub fn write_at<T: NoUninit>(&self, offset: u64, values: &[T]) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let at = self.check_write(offset, bytes.len() as u64)?;
        // SAFETY: the range is inside the window, which is mapped and writable for the CPU.
        unsafe { store(at, bytes) };
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
        // SAFETY: the range is inside the window, which is mapped and readable for the CPU.
        unsafe { load(self.base.add(offset as usize), bytes) };
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
        // SAFETY: the range is inside the window, which is mapped and writable for the CPU.
        unsafe { fill(at, len as usize, byte) };
        Ok(())
    }

    /// A smaller window.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<CpuView<'a>> {
        check_range(offset, len, self.len)?;
        // SAFETY: the range is inside the window.
        let base = unsafe { self.base.add(offset as usize) };
        Ok(Self { base, len, ..*self })
    }

    fn check_write(&self, offset: u64, len: u64) -> Result<*mut u8> {
        check_range(offset, len, self.len)?;
        if !self.writable {
            return Err(Error::NotAccessible {
                who: Location::Host,
                have: crate::driver::Access::Read,
                need: crate::driver::Access::ReadWrite,
            });
        }
        // SAFETY: the offset is inside the window.
        Ok(unsafe { self.base.add(offset as usize) })
    }
}

/// The bytes before the first address that is a multiple of 8, of `len` at `at`.
fn head(at: *const u8, len: usize) -> usize {
    ((at as usize).wrapping_neg() & 7).min(len)
}

/// # Safety
/// `at..at + from.len()` is mapped and writable.
unsafe fn store(at: *mut u8, from: &[u8]) {
    let (first, rest) = from.split_at(head(at, from.len()));
    let words = rest.chunks_exact(8);
    let last = words.remainder();
    // SAFETY: every address lies in the range; words are aligned, for the head ends at a multiple of 8.
    unsafe {
        for (i, &byte) in first.iter().enumerate() {
            AtomicU8::from_ptr(at.add(i)).store(byte, Relaxed);
        }
        let middle = at.add(first.len()).cast::<u64>();
        let count = words.len();
        for (i, word) in words.enumerate() {
            let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
            AtomicU64::from_ptr(middle.add(i)).store(word, Relaxed);
        }
        let end = middle.add(count).cast::<u8>();
        for (i, &byte) in last.iter().enumerate() {
            AtomicU8::from_ptr(end.add(i)).store(byte, Relaxed);
        }
    }
}

/// # Safety
/// `at..at + to.len()` is mapped and readable.
unsafe fn load(at: *mut u8, to: &mut [u8]) {
    let (first, rest) = to.split_at_mut(head(at, to.len()));
    let mut words = rest.chunks_exact_mut(8);
    // SAFETY: as for `store`; only loads are made, so that read-only pages do.
    unsafe {
        for (i, byte) in first.iter_mut().enumerate() {
            *byte = AtomicU8::from_ptr(at.add(i)).load(Relaxed);
        }
        let middle = at.add(first.len()).cast::<u64>();
        let count = words.len();
        for (i, word) in words.by_ref().enumerate() {
            word.copy_from_slice(
                &AtomicU64::from_ptr(middle.add(i))
                    .load(Relaxed)
                    .to_ne_bytes(),
            );
        }
        let end = middle.add(count).cast::<u8>();
        for (i, byte) in words.into_remainder().iter_mut().enumerate() {
            *byte = AtomicU8::from_ptr(end.add(i)).load(Relaxed);
        }
    }
}

/// # Safety
/// `at..at + len` is mapped and writable.
unsafe fn fill(at: *mut u8, len: usize, byte: u8) {
    let first = head(at, len);
    let count = (len - first) / 8;
    // SAFETY: as for `store`.
    unsafe {
        for i in 0..first {
            AtomicU8::from_ptr(at.add(i)).store(byte, Relaxed);
        }
        let middle = at.add(first).cast::<u64>();
        for i in 0..count {
            AtomicU64::from_ptr(middle.add(i)).store(u64::from_ne_bytes([byte; 8]), Relaxed);
        }
        for i in first + count * 8..len {
            AtomicU8::from_ptr(at.add(i)).store(byte, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn view(bytes: &mut [u8], writable: bool) -> CpuView<'_> {
        let base = DevicePtr(bytes.as_mut_ptr().expose_provenance() as u64);
        // SAFETY: the slice is exclusively borrowed for the view's life.
        unsafe { CpuView::new(base, bytes.len() as u64, writable) }
    }

    proptest! {
        #[test]
        fn copies_touch_exactly_the_range(offset in 0_usize..64, data in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut memory = vec![0xee_u8; 192];
            view(&mut memory, true).write_at(offset as u64, &data).unwrap();
            let mut expected = vec![0xee_u8; 192];
            expected[offset..offset + data.len()].copy_from_slice(&data);
            prop_assert_eq!(&memory, &expected);

            let mut back = vec![0_u8; data.len()];
            view(&mut memory, false).read_at(offset as u64, &mut back).unwrap();
            prop_assert_eq!(&back, &data);

            view(&mut memory, true).fill(offset as u64, data.len() as u64, 7).unwrap();
            expected[offset..offset + data.len()].fill(7);
            prop_assert_eq!(&memory, &expected);
        }

        #[test]
        fn ranges_outside_are_refused(offset in any::<u64>(), len in 0_u64..300) {
            let mut memory = vec![0_u8; 128];
            let fits = offset.checked_add(len).is_some_and(|end| end <= 128);
            prop_assert_eq!(view(&mut memory, true).fill(offset, len, 1).is_ok(), fits);
            prop_assert_eq!(view(&mut memory, true).slice(offset, len).is_ok(), fits);
        }
    }

    #[test]
    fn a_read_only_view_refuses_writes() {
        let mut memory = [0_u8; 8];
        let error = view(&mut memory, false).put(0, 1_u8).unwrap_err();
        assert!(matches!(error, Error::NotAccessible { .. }), "{error}");
        assert_eq!(memory, [0; 8]);
    }

    #[test]
    fn typed_values_come_back() {
        let mut memory = [0_u8; 64];
        let view = view(&mut memory, true);
        view.put(3, 1.5_f64).unwrap();
        view.write_at(16, &[1_u32, 2, 3]).unwrap();
        assert_eq!(view.get::<f64>(3).unwrap(), 1.5);
        let mut back = [0_u32; 3];
        view.read_at(16, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3]);
    }
}
