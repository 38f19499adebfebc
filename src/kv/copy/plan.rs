//! What is copied where, checked before anything begins.

use crate::driver::DevicePtr;
use crate::geometry::Geometry;
use crate::inner::Inner;
use crate::table::{Direction, PageId};
use crate::{GpuPages, MemoryError, Result, Stream};

/// The most pages of one job.
const MAX_PAIRS: usize = 1 << 24;

/// Checked pairs of pages and blocks.
#[derive(Debug)]
pub(crate) struct Plan {
    /// For each pair: the page, and where its block lies in each part.
    pairs: Vec<(PageId, u64)>,
    bytes: u64,
}

impl Plan {
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for parts that are not a page together, and for too many
    /// pairs; [`OutOfRange`](crate::MemoryError::OutOfRange) for a block that does not exist.
    pub(crate) fn new(
        geometry: &Geometry,
        pairs: &[(PageId, u64)],
        gpu: &GpuPages,
    ) -> Result<Self> {
        if gpu.block_bytes() != geometry.page_bytes {
            let why = format!(
                "{} parts of {} bytes are not a page of {}",
                gpu.parts(),
                gpu.part_bytes(),
                geometry.page_bytes
            );
            return Err(MemoryError::invalid("GPU pages", why).into());
        }
        if pairs.len() > MAX_PAIRS {
            let why = format!("{} pages are too many for one job", pairs.len());
            return Err(MemoryError::invalid_of("pairs", why, format!("0 to {MAX_PAIRS}")).into());
        }
        let checked = pairs.iter().map(|&(page, block)| {
            let (offset, len, size) = (block, 1, gpu.blocks());
            if block >= size {
                return Err(MemoryError::OutOfRange { offset, len, size }.into());
            }
            // Below the blocks' end, which is in the address space.
            Ok((page, block * gpu.stride()))
        });
        Ok(Self {
            pairs: checked.collect::<Result<_>>()?,
            // At most 2^24 pages of at most 2^32 bytes.
            bytes: pairs.len() as u64 * geometry.page_bytes,
        })
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Iterates over the copies: destination, source and bytes.
    pub(crate) fn copies(
        &self,
        tier: &Inner,
        direction: Direction,
        gpu: &GpuPages,
    ) -> impl Iterator<Item = (DevicePtr, DevicePtr, u64)> {
        let start = tier.memory.device_ptr();
        let part_bytes = gpu.part_bytes();
        self.pairs.iter().flat_map(move |&(page, block_at)| {
            let page = start.add(tier.geometry.page_at(page));
            gpu.bases().iter().enumerate().map(move |(part, base)| {
                let ours = page.add(part as u64 * part_bytes);
                let theirs = base.add(block_at);
                match direction {
                    Direction::Load => (theirs, ours, part_bytes),
                    Direction::Store => (ours, theirs, part_bytes),
                }
            })
        })
    }

    /// Submits one copy for each part.
    ///
    /// # Errors
    /// The driver's errors. Some of the copies may be on the stream then.
    ///
    /// # Safety
    /// The tier's memory and the parts stay allocated until the copies have ended.
    pub(crate) unsafe fn copy_each(
        &self,
        tier: &Inner,
        stream: &Stream,
        direction: Direction,
        gpu: &GpuPages,
    ) -> Result<()> {
        let mut joined = None::<(DevicePtr, DevicePtr, u64)>;
        // SAFETY: pages and blocks were checked, so the ranges are of the tier and of the parts; the caller promises that they
        // stay. Pages are read and written by nobody else: stores have theirs alone, and ready pages do not change.
        let put = |(to, from, bytes)| unsafe { stream.copy_async(to, from, bytes) };
        for (to, from, bytes) in self.copies(tier, direction, gpu) {
            joined = match joined {
                // Neighbours on both sides are one copy.
                Some((first_to, first_from, len))
                    if first_to.add(len) == to
                        && first_from.add(len) == from
                        && gpu.parts() == 1 =>
                {
                    Some((first_to, first_from, len + bytes))
                }
                Some(copy) => {
                    put(copy)?;
                    Some((to, from, bytes))
                }
                None => Some((to, from, bytes)),
            };
        }
        joined.map_or(Ok(()), put)?;
        Ok(())
    }
}
