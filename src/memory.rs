//! What all memory of this crate has in common, and how the CPU reaches it safely.

use std::marker::PhantomData;
use std::mem::size_of_val;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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
/// Copies go through relaxed atomic accesses of eight aligned bytes each: a concurrent writer can
/// tear a value, but nothing worse, and bytes beside those written are left alone. Order them against GPU work by synchronising its stream.
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
    /// For `'a` the range, widened to multiples of 8, must stay mapped and readable by the CPU, and
    /// writable too if `writable`; whoever else accesses it in this process must do so atomically in
    /// the same words, or be ordered by other means. (Atomic accesses of different sizes race.)
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

    /// Whether the CPU may write.
    pub fn is_writable(&self) -> bool {
        self.writable
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
        // SAFETY: the range is inside the window, whose words are mapped and writable for the CPU.
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
        // SAFETY: the range is inside the window, whose words are mapped and readable for the CPU.
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
        // SAFETY: the range is inside the window, whose words are mapped and writable for the CPU.
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
/// `at` is a multiple of 8, and the 8 bytes there are mapped as the caller will use them.
unsafe fn word<'a>(at: *mut u8) -> &'a AtomicU64 {
    // SAFETY: aligned and mapped; read-only pages allow relaxed loads of this size.
    unsafe { &*at.cast::<AtomicU64>() }
}

/// Changes some bytes of one word and leaves the others to whoever writes them.
///
/// # Safety
/// The bytes lie in one word, which is mapped and writable.
unsafe fn store_part(at: *mut u8, from: &[u8]) {
    if from.is_empty() {
        return;
    }
    let skip = at as usize & 7;
    // SAFETY: the word of `at` starts `skip` bytes before it.
    let word = unsafe { word(at.sub(skip)) };
    let _ = word.fetch_update(Relaxed, Relaxed, |old| {
        let mut bytes = old.to_ne_bytes();
        bytes[skip..skip + from.len()].copy_from_slice(from);
        Some(u64::from_ne_bytes(bytes))
    });
}

/// # Safety
/// The bytes lie in one word, which is mapped and readable.
unsafe fn load_part(at: *mut u8, to: &mut [u8]) {
    if to.is_empty() {
        return;
    }
    let skip = at as usize & 7;
    // SAFETY: the word of `at` starts `skip` bytes before it.
    let bytes = unsafe { word(at.sub(skip)) }.load(Relaxed).to_ne_bytes();
    to.copy_from_slice(&bytes[skip..skip + to.len()]);
}

/// # Safety
/// The words of `at..at + from.len()` are mapped and writable.
unsafe fn store(at: *mut u8, from: &[u8]) {
    let (first, rest) = from.split_at(head(at, from.len()));
    let words = rest.chunks_exact(8);
    let last = words.remainder();
    // SAFETY: every word is one of the range; the head ends at a multiple of 8.
    unsafe {
        store_part(at, first);
        let mut at = at.add(first.len());
        for bytes in words {
            word(at).store(
                u64::from_ne_bytes(bytes.try_into().unwrap_or_default()),
                Relaxed,
            );
            at = at.add(8);
        }
        store_part(at, last);
    }
}

/// # Safety
/// The words of `at..at + to.len()` are mapped and readable.
unsafe fn load(at: *mut u8, to: &mut [u8]) {
    let (first, rest) = to.split_at_mut(head(at, to.len()));
    let mut words = rest.chunks_exact_mut(8);
    // SAFETY: as for `store`; only loads are made, so that read-only pages do.
    unsafe {
        load_part(at, first);
        let mut at = at.add(first.len());
        for bytes in words.by_ref() {
            bytes.copy_from_slice(&word(at).load(Relaxed).to_ne_bytes());
            at = at.add(8);
        }
        load_part(at, words.into_remainder());
    }
}

/// # Safety
/// The words of `at..at + len` are mapped and writable.
unsafe fn fill(at: *mut u8, len: usize, byte: u8) {
    let bytes = [byte; 8];
    let first = head(at, len);
    // SAFETY: as for `store`.
    unsafe {
        store_part(at, &bytes[..first]);
        let mut at = at.add(first);
        for _ in 0..(len - first) / 8 {
            word(at).store(u64::from_ne_bytes(bytes), Relaxed);
            at = at.add(8);
        }
        store_part(at, &bytes[..(len - first) % 8]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn view(words: &mut [u64], writable: bool) -> CpuView<'_> {
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
                // Each has one byte of the first word and one of the last.
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
