//! Batched copies between pages and blocks of a GPU's cache: how they are made, and the pairs to copy, checked before.

pub(crate) mod job;
mod kernel;

use std::iter;
use std::ops::Range;

use crate::driver::{Code, MemcpyDesc};
use crate::geometry::Geometry;
use crate::gpu::Place;
use crate::inner::Inner;
use crate::page::{Direction, PageId};
use crate::{GpuPages, MemoryError, Result, Stream};
use kernel::{ALIGN, Group, Launch, MAX_BLOCKS, is_missing};

pub(crate) use kernel::Kernels;

/// From so many bytes of a part on the copy engines of an H100 are about as fast as the kernel: 48 to 49 GB/s beside 50 to 52.
/// They take no multiprocessor.
const COPY_ENGINES: u64 = 256 << 10;

/// How copies are made. docs/kv.md has the speed of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyMethod {
    /// The method that was the fastest for parts of this size, of those that this driver and these addresses allow.
    #[default]
    Auto,
    /// A kernel that copies all parts of all pages. It takes room on up to `blocks` of the GPU's multiprocessors from other kernels
    /// while it runs: 1 to 1024. A kernel that needs every multiprocessor whole, as many matrix products do, takes up to twice as
    /// long beside it. Addresses and sizes must be multiples of 16. The simulator runs no kernel of this kind.
    Kernel {
        /// The blocks of 512 threads.
        blocks: u32,
    },
    /// One `cuMemcpyBatchAsync`, which drivers have from CUDA 12.8 on. Not on the legacy default stream, nor in memory that does not
    /// tell its [borders](crate::memory::AccessChecks::of_one_mapping).
    Batch,
    /// One `cuMemcpyAsync` for each part of each page.
    Loop,
}

impl CopyMethod {
    /// The kernel with the number of blocks that [`Auto`](Self::Auto) takes. On an H100 4 to 64 are about as fast as each other.
    pub const KERNEL: Self = Self::Kernel { blocks: 4 };

    /// Returns the methods that are tried, the first one first, for parts of which the smallest has so many bytes.
    pub(crate) fn choices(self, part_bytes: u64) -> Vec<Self> {
        match self {
            Self::Auto if part_bytes < COPY_ENGINES => vec![Self::KERNEL, Self::Batch, Self::Loop],
            Self::Auto => vec![Self::Batch, Self::Loop],
            method => vec![method],
        }
    }

    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for a number of blocks out of range.
    pub(crate) fn check(self) -> Result<(), MemoryError> {
        match self {
            Self::Kernel { blocks } if !(1..=MAX_BLOCKS).contains(&blocks) => {
                let (why, valid) = (format!("{blocks} blocks"), format!("1 to {MAX_BLOCKS}"));
                Err(MemoryError::invalid_of("blocks", why, valid))
            }
            _ => Ok(()),
        }
    }
}

/// Returns whether an error says that a method does not work here or now, and not that copies fail. Without memory for
/// a kernel, or for its list, copies by the driver may go on.
pub(super) fn may_do_otherwise(error: &MemoryError) -> bool {
    const REFUSALS: [Code; 4] = [
        Code::OUT_OF_MEMORY,
        Code::INVALID_VALUE,
        Code::NOT_SUPPORTED,
        Code::INVALID_HANDLE,
    ];
    is_missing(error)
        || matches!(error, MemoryError::NotAccessible { .. })
        || error.code().is_some_and(|code| REFUSALS.contains(&code))
}

/// The most pages of one job.
const MAX_PAIRS: usize = 1 << 24;

/// The most copies of a batch; more are several batches.
const MAX_BATCH: usize = 1 << 16;

/// The copies of a job: checked pairs of pages and blocks.
pub(crate) struct Plan<'a> {
    tier: &'a Inner,
    stream: &'a Stream,
    direction: Direction,
    gpu: &'a GpuPages,
    /// Where in the tier's memory a block's bytes lie, and the block. Each place is asked for once.
    pairs: Vec<(u64, u64)>,
    pub(crate) bytes: u64,
}

impl<'a> Plan<'a> {
    /// Plans the copies of pages that are pinned.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for parts that are not a page together, or do not lie in
    /// one, for pages of several sizes, for too many pairs, and for a block that does not exist.
    pub(crate) fn new(
        tier: &'a Inner,
        direction: Direction,
        stream: &'a Stream,
        pairs: &[(PageId, u64)],
        gpu: &'a GpuPages,
    ) -> Result<Self> {
        if pairs.len() > MAX_PAIRS {
            let why = format!("{} pages are too many for one job", pairs.len());
            return Err(MemoryError::invalid_of("pairs", why, format!("0 to {MAX_PAIRS}")).into());
        }
        let size = gpu.blocks();
        if let Some(&(_, block)) = pairs.iter().find(|&&(_, block)| block >= size) {
            return Err(MemoryError::invalid_index("block", block, size).into());
        }
        expect_sizes(&tier.geometry, pairs, gpu)?;
        let at = gpu.offset().unwrap_or(0);
        let place = |&(page, block): &(PageId, u64)| (tier.geometry.page_at(page) + at, block);
        Ok(Self {
            tier,
            stream,
            direction,
            gpu,
            pairs: pairs.iter().map(place).collect(),
            // At most 2^24 pages of at most 2^32 bytes.
            bytes: pairs.len() as u64 * gpu.block_bytes(),
        })
    }

    /// Calls `put` with each copy: one for each part of each page, and more where allocations border in it.
    ///
    /// # Errors
    /// That of the first call that fails, which is the last one.
    fn each_copy(
        &self,
        mut put: impl FnMut(MemcpyDesc) -> Result<(), MemoryError>,
    ) -> Result<(), MemoryError> {
        let our_borders = self.tier.borders().unwrap_or_default();
        let start = self.tier.memory.device_ptr();
        for &(page_at, block) in &self.pairs {
            for (Place { base, shape, at }, borders) in self.gpu.bordered_places() {
                let at = page_at + at;
                // Below the blocks' end, which is in the address space.
                let block_at = block * shape.stride;
                for ours in pieces(&our_borders, at..at + shape.bytes) {
                    let theirs = block_at + (ours.start - at)..block_at + (ours.end - at);
                    for theirs in pieces(borders, theirs) {
                        let bytes = theirs.end - theirs.start;
                        let ours = start.add(at + (theirs.start - block_at));
                        let theirs = base.add(theirs.start);
                        let (dst, src) = match self.direction {
                            Direction::Load => (theirs, ours),
                            Direction::Store => (ours, theirs),
                        };
                        put(MemcpyDesc { dst, src, bytes })?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Submits one copy for each part.
    ///
    /// # Errors
    /// The driver's errors. Some of the copies may be on the stream then.
    ///
    /// # Safety
    /// The tier's memory and the parts stay allocated until the copies have ended.
    pub(crate) unsafe fn copy_each(&self) -> Result<(), MemoryError> {
        // SAFETY: pages and blocks were checked, so the ranges are of the tier and of the parts, which the caller
        // keeps. Nothing else in this process writes the bytes that are read or reads those that are written,
        // except through views: a store has its pages alone, and ready pages do not change; blocks are the
        // caller's to order.
        let put =
            |copy: MemcpyDesc| unsafe { self.stream.copy_async(copy.dst, copy.src, copy.bytes) };
        self.each_copy(put)
    }

    /// Submits all copies as one batch.
    ///
    /// # Errors
    /// The driver's errors. Some of the copies may be on the stream then.
    ///
    /// # Safety
    /// As for [`copy_each`](Self::copy_each).
    pub(crate) unsafe fn copy_batch(&self) -> Result<(), MemoryError> {
        let mut copies = Vec::new();
        self.each_copy(|copy| {
            copies.push(copy);
            Ok(())
        })?;
        let driver = self.stream.driver();
        for copies in copies.chunks(MAX_BATCH) {
            // SAFETY: as in `copy_each`; the stream lives.
            unsafe { driver.memcpy_batch_async(copies, self.stream.handle())? };
        }
        Ok(())
    }

    /// Returns the kernel's launch, if all addresses and sizes are multiples of [`ALIGN`].
    pub(crate) fn launch(&self, blocks: u32) -> Option<Launch<'_>> {
        let gpu = self.gpu;
        let start = self.tier.memory.device_ptr().0;
        let pages = self.pairs.iter().fold(start, |all, (at, _)| all | at);
        let all = gpu.places().fold(pages, |all, place| {
            all | place.base.0 | place.shape.stride | place.shape.bytes | place.at
        });
        if !all.is_multiple_of(ALIGN) {
            return None;
        }
        Some(Launch {
            pairs: &self.pairs,
            tier_at: start,
            groups: Group::of(gpu.places()),
            is_load: self.direction == Direction::Load,
            blocks,
            stream: self.stream,
        })
    }
}

/// Checks that all pages have one size, and that a block is a page, or lies in it where the cache has a part of each page.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
fn expect_sizes(geometry: &Geometry, pairs: &[(PageId, u64)], gpu: &GpuPages) -> Result<()> {
    let mut sizes = pairs.iter().map(|&(page, _)| geometry.page_bytes_of(page));
    let Some(bytes) = sizes.next() else {
        return Ok(());
    };
    if let Some(other) = sizes.find(|&other| other != bytes) {
        let why = format!("pages of {bytes} and of {other} bytes in one job");
        return Err(MemoryError::invalid("pairs", why).into());
    }
    let (parts, block) = (gpu.parts(), gpu.block_bytes());
    let why = match gpu.offset() {
        None if block == bytes => return Ok(()),
        None => format!("{parts} parts of {block} bytes together are not a page of {bytes}"),
        Some(at) if at.checked_add(block).is_some_and(|end| end <= bytes) => return Ok(()),
        Some(at) => {
            format!(
                "{parts} parts of {block} bytes together, at byte {at}, exceed a page of {bytes}"
            )
        }
    };
    Err(MemoryError::invalid("GPU pages", why).into())
}

/// Cuts a range at those of the ascending `borders` that are inside it.
fn pieces(borders: &[u64], range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let first = borders.partition_point(|&border| border <= range.start);
    let last = borders.partition_point(|&border| border < range.end);
    let inside = borders.get(first..last).unwrap_or_default();
    let starts = iter::once(range.start).chain(inside.iter().copied());
    let ends = inside.iter().copied().chain(iter::once(range.end));
    starts.zip(ends).map(|(start, end)| start..end)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::Memory;
    use crate::{Buffer, Driver, Key, Tier};
    use egmem_core::Machine;

    #[test]
    fn a_kernel_takes_aligned_parts_of_aligned_pages() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let memory = Arc::new(Buffer::near(&driver, 0, 1 << 16).unwrap());
        let stream = Stream::new(&driver, 0).unwrap();
        let keys = [1, 2].map(|byte| Key::new([byte; 32]));
        for (page_bytes, part_bytes, offset, is_aligned) in [
            (96, 48, 48, true),
            (96, 48, 40, false),
            (96, 40, 0, false),
            (104, 48, 48, false),
        ] {
            let tier = Tier::on(memory.location()).pages(2).page_bytes(page_bytes);
            let tier = tier.create(&driver).unwrap();
            let gpu = GpuPages::over(vec![(memory.clone(), 0)], 64, part_bytes);
            let gpu = gpu.unwrap().at(offset);
            let store = tier.prepare_store(&keys).unwrap();
            let pairs = store.pairs(&[3, 5]).unwrap();
            let plan = Plan::new(&tier.0, Direction::Load, &stream, &pairs, &gpu).unwrap();
            assert_eq!(plan.bytes, 2 * part_bytes);
            let launch = plan.launch(4);
            let places = launch.map(|launch| launch.pairs.to_vec());
            let expected = [0, 1].map(|at| {
                let page_at = tier.page_ptr(store.pages()[at]).unwrap().0;
                (page_at - tier.0.memory.device_ptr().0 + offset, pairs[at].1)
            });
            let expected = is_aligned.then(|| expected.to_vec());
            assert_eq!(places, expected, "{page_bytes} {part_bytes} {offset}");
        }
    }

    #[test]
    fn ranges_are_cut_at_the_borders_inside_them() {
        let cut = |range| {
            let pieces = pieces(&[10, 20, 30], range);
            pieces
                .map(|piece| (piece.start, piece.end))
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(0..10), [(0, 10)]);
        assert_eq!(cut(10..20), [(10, 20)]);
        assert_eq!(cut(9..31), [(9, 10), (10, 20), (20, 30), (30, 31)]);
        assert_eq!(cut(29..30), [(29, 30)]);
        assert_eq!(cut(30..99), [(30, 99)]);
        assert_eq!(pieces(&[], 5..6).count(), 1);
    }
}
