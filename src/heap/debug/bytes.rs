//! Writes and checks patterns in a heap's bytes.

use super::WrongBytes;
use crate::driver::{Access, DevicePtr, Driver, Relaxed};
use crate::memory::CpuView;
use crate::pinned::PinnedHost;
use crate::{Memory, Result, Stream};

/// How many bytes are checked at once.
const STEP: u64 = 64 << 10;
/// How many wrong bytes a report contains.
const SHOWN: usize = 32;

/// Where a heap's memory is, and its users' access.
pub(crate) struct HeapMemory {
    /// The address of offset 0.
    pub(crate) start: u64,
    pub(crate) driver: Driver,
    pub(crate) host: Access,
    /// A GPU that may write the memory, if any.
    pub(crate) gpu: Option<i32>,
}

/// How the debug mode accesses the bytes.
pub(super) enum Reach {
    Cpu,
    Gpu(Gpu),
    /// Neither the CPU nor a GPU may write them.
    None,
}

/// A GPU that writes the bytes and copies them to a staging buffer for the CPU.
pub(super) struct Gpu {
    stream: Stream,
    staging: PinnedHost,
}

impl Reach {
    pub(super) fn new(memory: &HeapMemory) -> Result<Self> {
        if memory.host == Access::ReadWrite {
            return Ok(Self::Cpu);
        }
        let Some(gpu) = memory.gpu else {
            return Ok(Self::None);
        };
        let driver = &memory.driver;
        // Another thread may be capturing its streams.
        let _relaxed = Relaxed::new(driver);
        Ok(Self::Gpu(Gpu {
            stream: Stream::new(driver, gpu)?,
            staging: PinnedHost::new(driver, gpu, STEP)?,
        }))
    }

    /// Fills a range with one byte.
    ///
    /// # Safety
    /// The range is the heap's and has memory, and no other code uses it.
    pub(super) unsafe fn fill(&self, start: DevicePtr, bytes: u64, byte: u8) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        match self {
            // SAFETY: the caller's promise; words at the ends are changed in part, atomically.
            Self::Cpu => unsafe { CpuView::new(start, bytes, true) }.fill(0, bytes, byte),
            Self::Gpu(gpu) => {
                let _relaxed = Relaxed::new(gpu.stream.driver());
                // SAFETY: the caller's promise; the work ends before this returns.
                let put = unsafe { gpu.stream.memset_async(start, byte, bytes) };
                put.and(gpu.stream.synchronize())
            }
            Self::None => Ok(()),
        }
    }

    /// Returns the bytes of a range that are not `byte`, counted from `from` on.
    ///
    /// # Safety
    /// The range is the heap's and has memory; concurrent writes to its words are atomic.
    pub(super) unsafe fn wrong(
        &self,
        start: DevicePtr,
        (from, bytes): (i64, u64),
        byte: u8,
    ) -> Result<Option<WrongBytes>> {
        let mut wrong = None;
        let mut buffer = vec![0; STEP.min(bytes) as usize];
        let mut at = 0;
        while at < bytes {
            let step = STEP.min(bytes - at);
            let buffer = &mut buffer[..step as usize];
            match self {
                Self::Cpu => {
                    // SAFETY: the caller's promise.
                    let view = unsafe { CpuView::new(start.add(at), step, false) };
                    view.read_at(0, buffer)?;
                }
                Self::Gpu(gpu) => {
                    // SAFETY: the caller's promise.
                    unsafe { gpu.fetch(start.add(at), step)? };
                    gpu.staging.cpu().read_at(0, buffer)?;
                }
                Self::None => return Ok(None),
            }
            look(&mut wrong, from + at as i64, buffer, byte);
            at += step;
        }
        Ok(wrong)
    }
}

impl Gpu {
    /// # Safety
    /// As [`wrong`](Reach::wrong); at most [`STEP`] bytes.
    unsafe fn fetch(&self, start: DevicePtr, bytes: u64) -> Result<()> {
        let _relaxed = Relaxed::new(self.stream.driver());
        let to = self.staging.device_ptr();
        // SAFETY: both have this many bytes; the staging memory belongs to this heap alone, and the work ends
        // before this returns.
        let put = unsafe { self.stream.copy_async(to, start, bytes) };
        put.and(self.stream.synchronize())
    }
}

/// Adds those of `bytes`, which lie at `start`, that are not `expected`.
fn look(wrong: &mut Option<WrongBytes>, start: i64, bytes: &[u8], expected: u8) {
    if bytes.iter().all(|&byte| byte == expected) {
        return;
    }
    for (at, &byte) in bytes.iter().enumerate() {
        let at = start + at as i64;
        let is_wrong = byte != expected;
        if !is_wrong && wrong.is_none() {
            continue;
        }
        let wrong = wrong.get_or_insert_with(|| WrongBytes {
            first: at,
            last: at,
            expected,
            ..WrongBytes::default()
        });
        if wrong.found.len() < SHOWN && wrong.first + wrong.found.len() as i64 == at {
            wrong.found.push(byte);
        }
        if is_wrong {
            wrong.last = at;
            wrong.count += 1;
        }
    }
    if let Some(wrong) = wrong {
        let reach = wrong.last - wrong.first + 1;
        wrong.found.truncate(reach.min(SHOWN as i64) as usize);
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
                look(&mut seen, (number * step) as i64, part, 7);
            }
            let wrong: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at] != 7).collect();
            let expected = wrong.first().zip(wrong.last()).map(|(&first, &last)| {
                (first as i64, last as i64, wrong.len() as u64)
            });
            prop_assert_eq!(seen.as_ref().map(|w| (w.first, w.last, w.count)), expected);
            if let Some(WrongBytes { first, found, .. }) = seen {
                let first = first as usize;
                prop_assert!(!found.is_empty() && found.len() <= SHOWN);
                prop_assert_eq!(&bytes[first..first + found.len()], &found[..]);
            }
        }
    }
}
