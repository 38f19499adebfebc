//! The bytes of a heap's memory, as the heap itself reads and writes them.

use crate::driver::{Access, DevicePtr, Driver, Location, Relaxed};
use crate::error::WrongBytes;
use crate::memory::CpuView;
use crate::pinned::PinnedHost;
use crate::{Error, Memory, Result, Stream};

/// How many bytes are compared at once.
const STEP: u64 = 64 << 10;
/// How many wrong bytes a report contains.
const SHOWN: i64 = 32;

/// Reads and writes bytes: by the CPU if it may write them, else by a GPU that may, with microseconds of driver calls.
pub(crate) struct ByteAccess {
    driver: Driver,
    host: Access,
    gpu: Option<i32>,
    /// The GPU's, created when first needed: its stream, and memory for bytes that the CPU looks at.
    stream: Option<Stream>,
    staging: Option<PinnedHost>,
}

impl ByteAccess {
    /// Returns access to memory that the CPU has `host` access to, and that `gpu` may write.
    pub(crate) fn new(driver: &Driver, host: Access, gpu: Option<i32>) -> Self {
        Self {
            driver: driver.clone(),
            host,
            gpu,
            stream: None,
            staging: None,
        }
    }

    /// Returns whether neither the CPU nor a GPU may write the bytes.
    pub(crate) fn is_none(&self) -> bool {
        self.host != Access::ReadWrite && self.gpu.is_none()
    }

    /// Gives back what the GPU needed.
    pub(crate) fn close(&mut self) {
        (self.stream, self.staging) = (None, None);
    }

    /// Fills a range with one byte, and waits for the end.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] if [neither](Self::is_none) may write; the driver's errors.
    ///
    /// # Safety
    /// The range is the heap's and has memory, and no other code uses it.
    pub(crate) unsafe fn fill(&mut self, start: DevicePtr, bytes: u64, byte: u8) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        if self.host == Access::ReadWrite {
            // SAFETY: the caller's promise; words at the ends are changed in part, atomically.
            return unsafe { CpuView::new(start, bytes, true) }.fill(0, bytes, byte);
        }
        let driver = self.driver.clone();
        // Another thread may be capturing its streams.
        let _relaxed = Relaxed::new(&driver);
        let (stream, _) = self.stream()?;
        // SAFETY: the caller's promise; the work ends before this returns.
        let put = unsafe { stream.memset_async(start, byte, bytes) };
        put.and(stream.finish())
    }

    /// Reads bytes: at most [`STEP`].
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    ///
    /// # Safety
    /// The range is the heap's and has memory; concurrent writes to its words are atomic.
    unsafe fn read(&mut self, start: DevicePtr, buffer: &mut [u8]) -> Result<()> {
        let bytes = buffer.len() as u64;
        if self.host == Access::ReadWrite {
            // SAFETY: the caller's promise.
            return unsafe { CpuView::new(start, bytes, false) }.read_at(0, buffer);
        }
        let (driver, staging) = (self.driver.clone(), self.staging.take());
        let _relaxed = Relaxed::new(&driver);
        let (stream, gpu) = self.stream()?;
        let staging = match staging {
            Some(staging) => staging,
            None => PinnedHost::new(&driver, gpu, STEP)?,
        };
        // SAFETY: both have this many bytes; the staging memory belongs to this value alone, and the work ends
        // before this returns.
        let put = unsafe { stream.copy_async(staging.device_ptr(), start, bytes) };
        put.and(stream.finish())?;
        self.staging.insert(staging).cpu().read_at(0, buffer)
    }

    /// Returns the bytes of a range that are not `expected`, counted from `from` on.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    ///
    /// # Safety
    /// The range is the heap's and has memory; concurrent writes to its words are atomic.
    pub(crate) unsafe fn compare(
        &mut self,
        start: DevicePtr,
        (from, bytes): (i64, u64),
        expected: u8,
    ) -> Result<Option<WrongBytes>> {
        let mut wrong = None;
        let mut buffer = vec![0; STEP.min(bytes) as usize];
        for at in (0..bytes).step_by(STEP as usize) {
            let buffer = &mut buffer[..STEP.min(bytes - at) as usize];
            // SAFETY: the caller's promise.
            unsafe { self.read(start.add(at), buffer)? };
            compare(&mut wrong, from + at as i64, buffer, expected);
        }
        Ok(wrong)
    }

    /// Returns the stream for the work, and its GPU. The caller has relaxed captures.
    fn stream(&mut self) -> Result<(&Stream, i32)> {
        let gpu = self.gpu.ok_or(Error::NotAccessible {
            who: Location::Host,
            have: self.host,
            need: Access::ReadWrite,
        })?;
        let stream = match self.stream.take() {
            Some(stream) => stream,
            None => Stream::new(&self.driver, gpu)?,
        };
        Ok((self.stream.insert(stream), gpu))
    }
}

/// Adds those of `bytes`, which lie at `start`, that are not `expected`. Bytes are shown from the first wrong one on.
fn compare(wrong: &mut Option<WrongBytes>, start: i64, bytes: &[u8], expected: u8) {
    if bytes.iter().all(|&byte| byte == expected) {
        return;
    }
    for (at, &byte) in (start..).zip(bytes) {
        if byte != expected {
            let wrong = wrong.get_or_insert_with(|| WrongBytes {
                first: at,
                expected,
                ..WrongBytes::default()
            });
            wrong.last = at;
            wrong.count += 1;
        }
        if let Some(wrong) = wrong
            && at < wrong.first + SHOWN
        {
            // Right ones between are shown, too; those that end a part are skipped.
            wrong.found.resize((at - wrong.first) as usize, expected);
            wrong.found.push(byte);
        }
    }
    if let Some(wrong) = wrong {
        wrong
            .found
            .truncate((wrong.last - wrong.first + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For every division of the bytes into steps.
        #[test]
        fn all_wrong_bytes_are_counted_and_the_first_shown(
            bytes in proptest::collection::vec(prop_oneof![6 => Just(7_u8), 1 => any::<u8>()], 0..300),
            step in 1_usize..120,
        ) {
            let mut seen = None;
            for (number, part) in bytes.chunks(step).enumerate() {
                compare(&mut seen, (number * step) as i64, part, 7);
            }
            let wrong: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] != 7).collect();
            let expected = wrong.first().zip(wrong.last()).map(|(&first, &last)| {
                (first as i64, last as i64, wrong.len() as u64)
            });
            prop_assert_eq!(seen.as_ref().map(|w| (w.first, w.last, w.count)), expected);
            if let Some(WrongBytes { first, found, .. }) = seen {
                let first = first as usize;
                prop_assert!(!found.is_empty() && found.len() <= SHOWN as usize);
                prop_assert_eq!(&bytes[first..first + found.len()], &found[..]);
            }
        }
    }
}
