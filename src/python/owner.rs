//! The owner of the bytes of memory that Python sees.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use egmem::driver::{DevicePtr, Driver, Location};
use egmem::exchange::blocking::RemoteBuffer;
use egmem::memory::{CpuMemory, CpuView};
use egmem::share::ImportedBuffer;
use egmem::{Block, Buffer, Memory, PoolBuffer};
use pyo3::prelude::*;

use crate::args::Size;
use crate::error::OrRaise;
use crate::frees::free_after_gpus;
use crate::region::Region;

/// The owner of the bytes.
pub enum Owner {
    /// Memory that was mapped for itself.
    Buffer(Arc<Buffer>),
    /// A part of a heap's memory.
    Block(Arc<Block>),
    /// One of many blocks, all of which it keeps, by its index.
    OfMany(Arc<Many>, usize),
    /// A pool's allocation.
    Pool(PoolBuffer),
    /// Another process's memory.
    Remote(Arc<RemoteBuffer>),
    /// Memory that another process shared without a name.
    Imported(ImportedBuffer),
    /// `len` bytes of other memory, from `offset` on. That is no part itself.
    Part {
        whole: Arc<Region>,
        offset: u64,
        len: u64,
    },
    /// A page of a KV-cache tier, for the CPU.
    Page {
        /// The load that has the page pinned, or the store that writes it.
        keeper: Arc<dyn Any + Send + Sync>,
        /// The tier's driver and location.
        place: (Driver, Location),
        /// Those of a view that `keeper` lends.
        bytes: CpuBytes,
    },
}

/// A region as the CPU reaches it.
#[derive(Clone, Copy)]
pub struct CpuBytes {
    /// The first byte.
    pub address: u64,
    /// The number of bytes.
    pub len: u64,
    /// Whether the CPU may write.
    pub writable: bool,
}

impl CpuBytes {
    /// Returns what a view has.
    pub fn of(cpu: &CpuView<'_>) -> Self {
        Self {
            address: cpu.as_ptr().expose_provenance() as u64,
            len: cpu.len(),
            writable: cpu.is_writable(),
        }
    }

    /// Returns `len` of the bytes, from `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the bytes.
    pub fn part(self, offset: u64, len: u64) -> PyResult<Self> {
        expect_within(offset, len, self.len).or_raise()?;
        Ok(Self {
            address: self.address.wrapping_add(offset),
            len,
            ..self
        })
    }

    /// As [`part`](Self::part): of all bytes that follow without a number.
    ///
    /// # Errors
    /// As [`part`](Self::part).
    pub fn part_or_rest(self, offset: Size, nbytes: Option<Size>) -> PyResult<Self> {
        let rest = self.len.saturating_sub(offset.0);
        self.part(offset.0, nbytes.map_or(rest, |nbytes| nbytes.0))
    }

    /// Returns the first byte's address.
    pub fn ptr(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }

    /// Sets all bytes with the CPU.
    ///
    /// # Errors
    /// `NotAccessible` for bytes that the CPU may not write.
    ///
    /// # Safety
    /// The caller keeps the region meanwhile.
    pub unsafe fn fill(self, byte: u8) -> egmem::Result<()> {
        // SAFETY: the bytes came from a view; the caller keeps their memory. Memory is aligned to 8 bytes and as long as
        // such words; other threads may use the bytes meanwhile, as through any view in Python.
        unsafe { CpuView::new(DevicePtr(self.address), self.len, self.writable) }
            .fill(0, self.len, byte)
    }
}

/// Memory that the CPU and GPUs can be asked about.
pub trait Whole: Memory + CpuMemory {}

impl<M: Memory + CpuMemory> Whole for M {}

impl Owner {
    /// Returns driver, address, number of bytes and the first location.
    pub fn facts(&self) -> (Driver, u64, u64, Location) {
        let of = |memory: &dyn Whole| {
            let (address, location) = (memory.device_ptr().0, memory.location());
            (memory.driver().clone(), address, memory.len(), location)
        };
        match self {
            Self::Part { whole, offset, len } => {
                let address = whole.address.wrapping_add(*offset);
                (whole.driver.clone(), address, *len, whole.location)
            }
            Self::Page { place, bytes, .. } => (place.0.clone(), bytes.address, bytes.len, place.1),
            Self::Buffer(memory) => of(memory),
            Self::Block(memory) => of(memory),
            Self::OfMany(many, index) => of(&many.blocks[*index]),
            Self::Pool(memory) => of(memory),
            Self::Remote(memory) => of(&**memory),
            Self::Imported(memory) => of(memory),
        }
    }

    /// Returns where the parts of the memory are, each location once and in ascending order.
    pub fn places(&self, first: Location) -> Vec<Location> {
        match self {
            Self::Buffer(memory) => memory.locations(),
            Self::Part { whole, .. } => whole.places.to_vec(),
            Self::Imported(memory) => memory.description().locations(),
            Self::Remote(memory) => memory.description().locations(),
            _ => vec![first],
        }
    }

    /// Returns the memory.
    ///
    /// # Errors
    /// `InvalidArgument` for a part, which has its whole's memory, and for a page.
    pub fn memory(&self) -> egmem::Result<&dyn Whole> {
        Ok(match self {
            Self::Buffer(memory) => memory,
            Self::Block(memory) => memory,
            Self::OfMany(many, index) => &many.blocks[*index],
            Self::Pool(memory) => memory,
            Self::Remote(memory) => &**memory,
            Self::Imported(memory) => memory,
            Self::Part { .. } | Self::Page { .. } => {
                return Err(egmem::Error::invalid(
                    "device",
                    "a page's view is the CPU's; GPUs use pages by Tier.load and Tier.store",
                ));
            }
        })
    }
}

/// Checks that `len` bytes from `offset` on lie in `size` bytes.
///
/// # Errors
/// `OutOfRange`.
pub fn expect_within(offset: u64, len: u64, size: u64) -> egmem::Result<()> {
    match offset.checked_add(len) {
        Some(end) if end <= size => Ok(()),
        _ => Err(egmem::Error::OutOfRange { offset, len, size }),
    }
}

/// Blocks that one call allocated: they are freed together. The last reference is dropped without the GIL.
pub struct Many {
    /// The heap.
    pub heap: egmem::Heap,
    /// The blocks.
    pub blocks: Vec<Block>,
    /// Their bytes.
    pub bytes: u64,
    /// Whether code outside of this crate may have an address.
    pub exposed: AtomicBool,
}

impl Drop for Many {
    /// Frees the blocks, if an address was given away only after the GPUs' work.
    fn drop(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        let driver = self.heap.driver();
        if !driver.is_of_this_process() {
            std::mem::forget(blocks);
        } else if *self.exposed.get_mut() {
            free_after_gpus(driver, self.bytes, blocks);
        }
    }
}
