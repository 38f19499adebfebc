//! Where pages lie in a GPU's memory, and where memory continues in another mapping.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use egmem_core::memory::{expect_gpu_access, is_of_one_kind};
use egmem_core::per_driver::lock;

use crate::driver::{Access, DevicePtr};
use crate::memory::{AccessChecks, Engine, GrantUse, Memory};
use crate::{Driver, MemoryError, Result, Stream};

/// The most parts of a page.
const MAX_PARTS: usize = 1 << 16;

/// Memory of a GPU's cache, kept by the jobs that use it.
type Part = Arc<dyn Memory + Send + Sync>;

/// A serving engine's cache on a GPU: tensors, each of which has a part of every block. Clones are the same.
///
/// Block `b` of part `p` lies at the address of part `p` plus `b` times the part's stride. A page of the tier has the
/// parts of one block side by side, in their order. Parts are for instance the keys and the values of each layer, and
/// may have different sizes.
#[derive(Clone)]
pub struct GpuPages {
    layout: Arc<Layout>,
    /// Where in each page the block lies; `None` if it is the page.
    offset: Option<u64>,
    /// The owner that `keeping` was given.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// How a part's blocks lie: block `b` has `bytes` bytes, `b` × `stride` bytes from the part's beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartShape {
    /// The bytes between two blocks.
    pub stride: u64,
    /// The bytes of the part in one block: 1 to the stride.
    pub bytes: u64,
}

/// A part, and where it lies in a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) base: DevicePtr,
    pub(crate) shape: PartShape,
    /// The bytes of the parts before it.
    pub(crate) at: u64,
}

/// A part with its memory.
struct PlacedPart {
    place: Place,
    /// At which bytes from its base it continues in another allocation; `None` if the memory does not report it. For memory that
    /// the caller keeps, the driver does.
    borders: OnceLock<Option<Vec<u64>>>,
    /// The memory, and where in it the part begins; `None` if the caller keeps it.
    memory: Option<(Part, u64)>,
}

struct Layout {
    parts: Vec<PlacedPart>,
    block_bytes: u64,
    blocks: u64,
}

impl GpuPages {
    /// Describes parts in memory of this library: each part's memory and where in it the part begins, in bytes.
    /// Blocks are `stride` bytes apart, and a part has `part_bytes` of each. There are as many blocks as fit into
    /// every part.
    ///
    /// The memory is kept until the last clone and the last job is gone.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no part, more than 65,536, parts of no byte, a
    /// stride less than `part_bytes`, and memory of both kinds, the CPU's and a GPU's;
    /// [`OutOfRange`](crate::MemoryError::OutOfRange) for a part without room for a block.
    pub fn over<M>(parts: Vec<(Arc<M>, u64)>, stride: u64, part_bytes: u64) -> Result<Self>
    where
        M: Memory + Send + Sync + 'static,
    {
        let shape = PartShape {
            stride,
            bytes: part_bytes,
        };
        let part = |(memory, at)| (memory as Part, at, shape);
        Self::over_parts(parts.into_iter().map(part).collect())
    }

    /// As [`over`](Self::over), for parts in memory of several types and of different sizes: each part's memory, where in it the part
    /// begins, in bytes, and its shape.
    ///
    /// # Errors
    /// As [`over`](Self::over).
    pub fn over_parts(parts: Vec<(Part, u64, PartShape)>) -> Result<Self> {
        check(parts.iter().map(|(_, _, shape)| *shape))?;
        let mut blocks = u64::MAX;
        let mut placed = Vec::with_capacity(parts.len());
        for (memory, at, shape) in parts {
            let base = memory.range(at, shape.bytes)?;
            let room = memory.len() - at - shape.bytes;
            blocks = blocks.min(room / shape.stride + 1);
            if !is_of_one_kind(&*memory, at, memory.len() - at) {
                let why = "it has memory of the CPU and of a GPU";
                return Err(MemoryError::invalid("part", why).into());
            }
            placed.push(PlacedPart {
                place: Place { base, shape, at: 0 },
                borders: borders_of(&*memory, at..memory.len()).into(),
                memory: Some((memory, at)),
            });
        }
        Ok(Self::of(placed, blocks))
    }

    /// Describes parts at addresses of memory that other code owns, such as tensors of a framework: `blocks` blocks
    /// each.
    ///
    /// The first job that copies by [`Batch`](crate::CopyMethod::Batch) asks the driver where allocations border,
    /// because drivers were reported to refuse copies over a border in a batch: one query for each allocation. A
    /// range without an answer counts as one allocation, as host memory that is mapped by `cuMemMap` does; use
    /// [`over`](Self::over) for that. If the driver refuses a batch, with `CUDA_ERROR_INVALID_VALUE`,
    /// [`Auto`](crate::CopyMethod::Auto) copies one by one, and `Batch` fails with that error.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) as for [`over`](Self::over), for no block, and for
    /// parts that extend beyond the last address.
    ///
    /// # Safety
    /// At each base there is memory for all blocks: (`blocks` - 1) × `stride` + `part_bytes` bytes, of one
    /// allocation, or of several allocations of a GPU side by side, as in PyTorch's expandable segments. Until the
    /// last job with this value or a clone has ended, it stays mapped as it is and accessible to the GPU of the job's
    /// stream, for reads and, in loads, writes. Code that is not ordered after a load does not read the blocks that
    /// it writes, and code that is not ordered after a store does not write the blocks that it reads.
    pub unsafe fn from_raw(
        bases: Vec<DevicePtr>,
        stride: u64,
        part_bytes: u64,
        blocks: u64,
    ) -> Result<Self> {
        let shape = PartShape {
            stride,
            bytes: part_bytes,
        };
        let parts = bases.into_iter().map(|base| (base, shape)).collect();
        // SAFETY: the caller's promise is that of `from_raw_parts` for parts of one shape.
        unsafe { Self::from_raw_parts(parts, blocks) }
    }

    /// As [`from_raw`](Self::from_raw), for parts of different sizes: each part's address and shape.
    ///
    /// # Errors
    /// As [`from_raw`](Self::from_raw).
    ///
    /// # Safety
    /// As for [`from_raw`](Self::from_raw), with each part's own stride and bytes.
    pub unsafe fn from_raw_parts(parts: Vec<(DevicePtr, PartShape)>, blocks: u64) -> Result<Self> {
        check(parts.iter().map(|(_, shape)| *shape))?;
        if blocks == 0 {
            return Err(MemoryError::invalid_of("blocks", "it is 0", "1 or more").into());
        }
        for (base, shape) in &parts {
            let bytes = blocks
                .checked_sub(1)
                .and_then(|last| last.checked_mul(shape.stride))
                .and_then(|at| at.checked_add(shape.bytes));
            if bytes.and_then(|bytes| base.0.checked_add(bytes)).is_none() {
                let stride = shape.stride;
                let why = format!(
                    "{blocks} blocks, {stride} bytes apart, do not end in the address space"
                );
                return Err(MemoryError::invalid("blocks", why).into());
            }
        }
        let part = |(base, shape)| PlacedPart {
            place: Place { base, shape, at: 0 },
            borders: OnceLock::new(),
            memory: None,
        };
        Ok(Self::of(parts.into_iter().map(part).collect(), blocks))
    }

    /// Puts the parts side by side. Of parts that are no page together the places saturate, and nothing is copied there.
    fn of(mut parts: Vec<PlacedPart>, blocks: u64) -> Self {
        let mut block_bytes = 0_u64;
        for PlacedPart { place, .. } in &mut parts {
            place.at = block_bytes;
            block_bytes = block_bytes.saturating_add(place.shape.bytes);
        }
        let layout = Layout {
            parts,
            block_bytes,
            blocks,
        };
        Self {
            layout: Arc::new(layout),
            offset: None,
            owner: None,
        }
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> u64 {
        self.layout.blocks
    }

    /// Returns the number of parts.
    pub fn parts(&self) -> usize {
        self.layout.parts.len()
    }

    /// Returns the shape of a part; `None` for a number from [`parts`](Self::parts) on.
    pub fn shape(&self, part: usize) -> Option<PartShape> {
        self.layout.parts.get(part).map(|part| part.place.shape)
    }

    /// Returns the bytes of a block in all parts: those of a page, or of the part of each page that begins
    /// [`at`](Self::at) an offset.
    pub fn block_bytes(&self) -> u64 {
        self.layout.block_bytes
    }

    /// Keeps `owner` until the last clone and the last job is gone; for ever, if the driver does not report the end
    /// of a job's copies. For the owner of the memory given to [`from_raw`](Self::from_raw), and for a borrowed
    /// stream.
    pub fn keeping(self, owner: impl Any + Send + Sync) -> Self {
        let owner = match self.owner {
            None => Arc::new(owner) as Arc<dyn Any + Send + Sync>,
            Some(earlier) => Arc::new((earlier, owner)),
        };
        Self {
            owner: Some(owner),
            ..self
        }
    }

    /// Sets that a block is a part of a page: bytes `offset` to `offset` plus [`block_bytes`](Self::block_bytes) of it. A
    /// page has the blocks of all ranks of a tensor-parallel engine side by side then, and each rank's cache copies its own
    /// bytes of it. A job with a block that extends beyond its page is refused. Without this, a block is a page.
    ///
    /// A store is committed after the jobs of all ranks. Kernels need an offset that is a multiple of 16.
    pub fn at(self, offset: u64) -> Self {
        Self {
            offset: Some(offset),
            ..self
        }
    }

    /// Returns where in each page the block lies; `None` if it is the page.
    pub(crate) fn offset(&self) -> Option<u64> {
        self.offset
    }

    /// Iterates over the parts, in their order.
    pub(crate) fn places(&self) -> impl Iterator<Item = Place> + Clone {
        self.layout.parts.iter().map(|part| part.place)
    }

    /// Finds where parts in memory that the caller keeps continue in another allocation: one query for each
    /// allocation, once.
    pub(crate) fn find_borders(&self, driver: &Driver) {
        for PlacedPart { place, borders, .. } in &self.layout.parts {
            // Below the last address, as `from_raw_parts` has checked.
            let bytes = || (self.layout.blocks - 1) * place.shape.stride + place.shape.bytes;
            borders.get_or_init(|| Some(borders_of_raw(driver, place.base, bytes())));
        }
    }

    /// Iterates over the parts: each one, and at which bytes from its base it continues in another allocation, if
    /// that is known.
    pub(crate) fn bordered_places(&self) -> impl Iterator<Item = (Place, &[u64])> {
        self.layout.parts.iter().map(|part| {
            let borders = part.borders.get().and_then(Option::as_deref);
            (part.place, borders.unwrap_or_default())
        })
    }

    /// Returns whether some part is in memory that does not report where it continues in another allocation.
    pub(crate) fn has_unknown_borders(&self) -> bool {
        let mut parts = self.layout.parts.iter();
        parts.any(|part| part.borders.get() == Some(&None))
    }

    /// Checks that `stream`'s GPU may copy to or from the parts, and orders the stream after their allocation. Access
    /// is not revoked while the result lives.
    ///
    /// # Errors
    /// [`NotAccessible`](crate::MemoryError::NotAccessible); [`InvalidArgument`](crate::MemoryError::InvalidArgument)
    /// for another driver's memory; the driver's errors.
    pub(crate) fn ready(
        &self,
        stream: &Stream,
        engine: Engine,
        need: Access,
    ) -> Result<Vec<GrantUse>, MemoryError> {
        let mut grants = Vec::new();
        let parts = self.layout.parts.iter();
        for (memory, at) in parts.filter_map(|part| part.memory.as_ref()) {
            stream.driver().expect_same(memory.driver(), "part")?;
            // Before the check: its result stays valid.
            grants.extend(memory.hold_grants());
            let len = memory.len() - at;
            expect_gpu_access(memory, (stream.device(), engine), (*at, len), need)?;
            if need == Access::ReadWrite && memory.is_read_only_for_cpu(*at, len) {
                // The driver may make a copy between host memories with the CPU.
                let who = crate::driver::Location::Host;
                return Err(MemoryError::not_accessible(who, Access::Read, need));
            }
            // SAFETY: the stream lives, and is of the memory's driver as just checked.
            unsafe { memory.ready_on(stream.handle())? };
        }
        Ok(grants)
    }
}

/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument).
fn check(shapes: impl ExactSizeIterator<Item = PartShape>) -> Result<()> {
    let parts = shapes.len();
    if parts == 0 || parts > MAX_PARTS {
        let valid = format!("1 to {MAX_PARTS}");
        return Err(MemoryError::invalid_of("parts", format!("{parts} parts"), valid).into());
    }
    for PartShape { stride, bytes } in shapes {
        if bytes == 0 || stride < bytes {
            let why = format!("parts of {bytes} bytes that are {stride} bytes apart");
            return Err(MemoryError::invalid_of("part_bytes", why, "1 to the stride").into());
        }
    }
    Ok(())
}

impl fmt::Debug for GpuPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuPages")
            .field("parts", &self.parts())
            .field("block_bytes", &self.block_bytes())
            .field("blocks", &self.blocks())
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

/// The borders of a memory that may grow: each is looked for once.
#[derive(Debug, Default)]
pub(crate) struct Borders(Mutex<(u64, Arc<[u64]>)>);

impl Borders {
    /// Returns at which places in the first `bytes` bytes, which only grow, `memory` continues in another mapping; `None` if
    /// it does not report that.
    pub(crate) fn of(
        &self,
        memory: &(impl AccessChecks + ?Sized),
        bytes: u64,
    ) -> Option<Arc<[u64]>> {
        let mut known = lock(&self.0);
        if known.0 < bytes {
            // A mapping that ended the memory until now is looked at again.
            let last = known.1.last().copied().unwrap_or(0);
            let more = borders_of(memory, last..bytes)?
                .into_iter()
                .map(|at| last + at);
            *known = (bytes, known.1.iter().copied().chain(more).collect());
        }
        Some(Arc::clone(&known.1))
    }
}

/// Returns at which places in `range` of `memory` it continues in another mapping, in bytes from the range's start
/// and in ascending order: copies end there. `None` if the memory does not report it.
pub(crate) fn borders_of(
    memory: &(impl AccessChecks + ?Sized),
    range: Range<u64>,
) -> Option<Vec<u64>> {
    let mut borders = Vec::new();
    let mut at = range.start;
    loop {
        at += memory.of_one_mapping(at, range.end - at)?.max(1);
        if at >= range.end {
            return Some(borders);
        }
        borders.push(at - range.start);
    }
}

/// As [`borders_of`], for `bytes` bytes at an address of other code's memory, such as a framework that maps several
/// allocations side by side. The driver is asked once for each allocation; if it has no answer, the rest counts as
/// one.
///
/// Source: `cuMemGetAddressRange`, which returns 0 as the base of mapped host memory.
pub(crate) fn borders_of_raw(driver: &Driver, base: DevicePtr, bytes: u64) -> Vec<u64> {
    let mut borders = Vec::new();
    let mut at = 0;
    while let Ok((start, len)) = driver.mem_address_range(base.add(at)) {
        let end = start.0.saturating_add(len).saturating_sub(base.0);
        if start.0 > base.0 + at || end <= at || end >= bytes {
            break;
        }
        borders.push(end);
        at = end;
    }
    borders
}
