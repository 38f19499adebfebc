//! How much memory is created at a time, and the progress that the caller sees.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::size::Granularity;
use crate::{Backing, Error, Result};

/// How far an allocation has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Bytes that exist now, mapped and granted.
    pub done: u64,
    /// Bytes that there are to be, in whole granules.
    pub total: u64,
}

impl Progress {
    /// Creates a report for a progress function.
    pub const fn new(done: u64, total: u64) -> Self {
        Self { done, total }
    }
}

/// How far the growth of memory in the background has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GrowthState {
    /// A thread adds memory.
    Growing,
    /// All memory is there.
    #[default]
    Complete,
    /// No more memory is added: an error or the caller has ended the growth. The memory until then stays.
    Stopped,
}

/// How much host memory one driver call creates, and how long the allocation rests before the next.
///
/// The kernel's driver serves one request at a time, for all processes: while one process creates 48 GiB in one call,
/// another one was seen to wait up to 8.9 s for `cudaHostAlloc`; beside chunks of 1 GiB up to 0.24 s.
/// docs/driver-behaviour.md has the figures.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::{Buffer, Driver, Growth, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let buffer = Buffer::on(NodeId(0)).bytes(64 << 20).growth(Growth::gentle()).allocate(&driver)?;
/// assert_eq!(buffer.physical().len(), 4);
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it does nothing until an allocation has it"]
pub struct Growth {
    chunk: u64,
    /// In percent of the time that the chunk before took.
    rest: u32,
}

/// The longest rest after one chunk.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// The most chunks of memory that can be shared: importers need a handle of each. With 2048, memory of 128 GiB has chunks of
/// 64 MiB, and of 32 GiB chunks of 16 MiB. It is half of the most parts of a description (4096): shares and padding may
/// each add a chunk.
const MAX_SHAREABLE_CHUNKS: u64 = 2048;

/// The same for registered memory, each chunk of which is a file that stays open: the usual limit on a process's files is 1024.
const MAX_FILES: u64 = 256;

impl Growth {
    /// The largest chunk: 4 GiB − 2 MiB. Drivers from 590.44 on were reported to fault below each 4 GiB boundary of one
    /// allocation, on arm64 kernels with pages of 64 KiB (NVIDIA/open-gpu-kernel-modules #1269).
    pub const MAX_CHUNK: u64 = (4 << 30) - (2 << 20);

    /// Returns the default: chunks of 64 MiB without a rest. They grew at 0.97 to 1.01 of the speed of one piece by turns,
    /// and 0.81 to 1.10 in single runs (docs/driver-behaviour.md), and 99.9 % of the calls of other processes took at
    /// most 28.3 ms. Memory that can be shared has a handle for each chunk, and at most 2048 of them: beyond 128 GiB its
    /// chunks are larger, such as 96 MiB for 192 GiB. Of registered memory the handle is a file that stays open, hence at most
    /// 256 up to 1 TiB: beyond 16 GiB its chunks are larger.
    pub const fn steady() -> Self {
        Self {
            chunk: 64 << 20,
            rest: 0,
        }
    }

    /// Returns growth for machines whose other processes must not wait for it: chunks of 16 MiB, each followed by a rest
    /// of a quarter of its time. On H100 and H200 it grew at 0.60 to 0.80 of the speed of one piece, and other processes
    /// waited 5.0 to 8.1 ms for 99.9 % of their calls, in one of 38 runs 10.6, and 2 to 8.3 ms while it was freed
    /// (docs/driver-behaviour.md). Memory that can be shared has larger chunks beyond 32 GiB, registered memory beyond 4 GiB.
    pub const fn gentle() -> Self {
        Self {
            rest: 25,
            ..Self::steady().chunk(16 << 20)
        }
    }

    /// Sets the most bytes that one driver call creates, also of memory that can be shared: a multiple of 2 MiB up to
    /// [`MAX_CHUNK`](Self::MAX_CHUNK).
    pub const fn chunk(mut self, bytes: u64) -> Self {
        self.chunk = bytes;
        self
    }

    /// Sets the rest after each chunk but the last, in percent of the time that the chunk took; 0: none. A rest is at
    /// most 1 s.
    pub const fn rest(mut self, percent: u32) -> Self {
        self.rest = percent;
        self
    }

    /// Returns whether `bytes` of memory are not divided in any granularity, whether they can be shared or not.
    pub(crate) const fn is_one_chunk(self, bytes: u64) -> bool {
        // `MAX_CHUNK` in whole units is at least half of it.
        bytes <= self.chunk && bytes <= Self::MAX_CHUNK / 2
    }

    /// Returns the size of the chunks of memory in units of `granularity`, of which `shareable` bytes can be shared: all
    /// of the buffer that can. The growth [was checked](Self::checked_chunk).
    pub(crate) fn chunk_for(
        self,
        granularity: Granularity,
        shareable: Option<u64>,
        backing: Backing,
    ) -> u64 {
        let most = match backing {
            Backing::Registered => MAX_FILES,
            _ => MAX_SHAREABLE_CHUNKS,
        };
        let least = shareable.unwrap_or(0).div_ceil(most);
        Self::chunk_in(granularity, self.chunk.max(least.min(Self::MAX_CHUNK)))
    }

    /// Returns the size of a chunk for `bytes` in whole units of `granularity`: at least one unit, else at most
    /// [`MAX_CHUNK`](Self::MAX_CHUNK).
    pub fn chunk_in(granularity: Granularity, bytes: u64) -> u64 {
        let unit = granularity.bytes();
        let most = granularity.round_down(Self::MAX_CHUNK);
        // `most` is less than 2^32: the sum fits.
        let whole = granularity.round_down(bytes.min(most) + (unit - 1));
        whole.max(unit)
    }

    /// Returns the size of the chunks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another size than [`chunk`](Self::chunk) says.
    pub fn checked_chunk(self) -> Result<u64> {
        if self.chunk == 0
            || self.chunk > Self::MAX_CHUNK
            || !Granularity::TWO_MIB.divides(self.chunk)
        {
            let why = format!("chunks of {} bytes", self.chunk);
            let valid = "multiples of 2 MiB up to 4 GiB − 2 MiB";
            return Err(Error::invalid_of("growth", why, valid));
        }
        Ok(self.chunk)
    }

    /// Begins to measure a chunk's time, if a rest depends on it.
    pub(crate) fn begin(self) -> Option<Instant> {
        (self.rest > 0).then(Instant::now)
    }

    /// Returns how long to rest after a chunk that took this long.
    pub fn rest_after(self, took: Duration) -> Duration {
        // Beforehand, so that the product fits.
        let took = took.min(LONGEST_REST);
        (took * self.rest.min(100_000) / 100).min(LONGEST_REST)
    }
}

impl Default for Growth {
    fn default() -> Self {
        Self::steady()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn chunks_are_whole_granules_and_few_where_each_is_a_handle() {
        let two = Granularity::TWO_MIB;
        let large = Granularity::new(64 * MIB).unwrap();
        let gib = 1 << 30;
        for (growth, bytes, granularity, is_shareable, expected) in [
            (Growth::steady(), 600 * gib, two, false, 64 * MIB),
            (Growth::steady(), 2 * MIB, two, true, 64 * MIB),
            (Growth::steady(), 128 * gib, two, true, 64 * MIB),
            (Growth::steady(), 128 * gib + 1, two, true, 66 * MIB),
            (Growth::steady(), 192 * gib, two, true, 96 * MIB),
            (Growth::steady(), 192 * gib, large, true, 128 * MIB),
            (Growth::steady(), 512 * gib, two, true, 256 * MIB),
            (Growth::steady(), 600 * gib, two, true, 300 * MIB),
            (Growth::steady(), 8191 * gib, two, true, Growth::MAX_CHUNK),
            (Growth::steady().chunk(4 * MIB), gib, two, true, 4 * MIB),
            (Growth::gentle(), 600 * gib, two, false, 16 * MIB),
            (Growth::gentle(), gib, large, false, 64 * MIB),
            (Growth::gentle(), gib, two, true, 16 * MIB),
            (Growth::gentle(), 32 * gib, two, true, 16 * MIB),
            (Growth::gentle(), 64 * gib, two, true, 32 * MIB),
            (Growth::steady(), u64::MAX, two, true, Growth::MAX_CHUNK),
            (
                Growth::steady(),
                u64::MAX,
                large,
                true,
                (4 << 30) - 64 * MIB,
            ),
            (
                Growth::steady().chunk(Growth::MAX_CHUNK),
                gib,
                large,
                false,
                (4 << 30) - 64 * MIB,
            ),
            (
                Growth::steady(),
                gib,
                Granularity::new(8 * gib).unwrap(),
                true,
                8 * gib,
            ),
        ] {
            let shareable = is_shareable.then_some(bytes);
            let chunk = growth.chunk_for(granularity, shareable, Backing::Driver);
            assert_eq!(chunk, expected, "{growth:?} {bytes} {is_shareable}");
        }
        for (gib_of_files, expected) in [(16, 64 * MIB), (80, 320 * MIB), (1024, Growth::MAX_CHUNK)]
        {
            let shareable = Some(gib_of_files * gib);
            let chunk = Growth::steady().chunk_for(two, shareable, Backing::Registered);
            assert_eq!(chunk, expected, "{gib_of_files} GiB");
        }
        let largest = Granularity::new(1 << 63).unwrap();
        assert_eq!(Growth::chunk_in(largest, u64::MAX), 1 << 63);
        assert_eq!(Growth::chunk_in(two, 0), 2 * MIB);
        for chunk in [0, 3 * MIB, Growth::MAX_CHUNK + 2 * MIB, u64::MAX] {
            let growth = Growth::steady().chunk(chunk);
            let error = growth.checked_chunk().unwrap_err();
            assert!(
                matches!(error, Error::InvalidArgument { what: "growth", .. }),
                "{error}"
            );
        }
    }

    #[test]
    fn rests_follow_the_time_that_a_chunk_took_up_to_a_second() {
        let ms = Duration::from_millis;
        let rest_after = |took, percent| Growth::steady().rest(percent).rest_after(took);
        assert_eq!(rest_after(ms(10), 100), ms(10));
        assert_eq!(rest_after(ms(10), 50), ms(5));
        assert_eq!(rest_after(ms(400), 300), LONGEST_REST);
        assert_eq!(rest_after(Duration::MAX, u32::MAX), LONGEST_REST);
        assert_eq!(rest_after(Duration::ZERO, 100), Duration::ZERO);
    }
}
