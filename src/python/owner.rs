//! The owner of the bytes of memory that Python sees.

use std::sync::{Arc, Mutex};

use egmem::driver::{Driver, Location};
use egmem::exchange::blocking::RemoteBuffer;
use egmem::memory::{AccessChecks, CpuMemory, CpuView};
use egmem::share::ImportedBuffer;
use egmem::{Block, Buffer, Memory, PoolBuffer};
use pyo3::prelude::*;

use crate::error::OrRaise;
use crate::gil::lock;
use crate::many::OfMany;
use crate::region::Region;

/// The owner of the bytes.
pub enum Owner {
    /// Memory that was mapped for itself.
    Buffer(Arc<Buffer>),
    /// A part of a heap's memory.
    Block(Arc<Block>),
    /// One of many blocks.
    OfMany(OfMany),
    /// A pool's allocation. Streams are added to it, which needs it exclusively.
    Pool(Mutex<PoolBuffer>),
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
    /// A page of a KV-cache tier.
    Page(Box<dyn PageBytes>),
}

/// A page of a KV-cache tier, with the store or load that keeps it.
pub trait PageBytes: Send + Sync {
    /// Returns driver, address, number of bytes and location.
    fn facts(&self) -> (Driver, u64, u64, Location);

    /// Returns the bytes as the CPU reaches them.
    ///
    /// # Errors
    /// Those of the tier's views.
    fn cpu(&self) -> PyResult<CpuBytes>;

    /// Sets `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `InvalidArgument` for a page that may only be read; those of the view.
    fn fill(&self, offset: u64, len: u64, byte: u8) -> egmem::Result<()>;
}

/// A region as the CPU reaches it.
#[derive(Clone, Copy)]
pub struct CpuBytes {
    /// The first byte.
    pub address: *mut u8,
    /// The number of bytes.
    pub len: u64,
    /// Whether the CPU may write.
    pub writable: bool,
}

// SAFETY: an address and a number and a flag; code that uses the address keeps the region.
unsafe impl Send for CpuBytes {}

impl CpuBytes {
    /// Returns what a view has.
    pub fn of(cpu: &CpuView<'_>) -> Self {
        Self {
            address: cpu.as_ptr(),
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
            address: self.address.wrapping_add(offset as usize),
            len,
            writable: self.writable,
        })
    }
}

/// Memory that the CPU and GPUs can be asked about.
pub trait Whole: AccessChecks + CpuMemory {}

impl<M: AccessChecks + CpuMemory + ?Sized> Whole for M {}

impl Owner {
    /// Returns driver, address, number of bytes and the first location.
    pub fn facts(&self) -> (Driver, u64, u64, Location) {
        match self {
            Self::Buffer(memory) => facts(memory),
            Self::Block(memory) => facts(memory),
            Self::OfMany(one) => facts(one.block()),
            Self::Pool(memory) => facts(&*lock(memory)),
            Self::Remote(memory) => facts(&**memory),
            Self::Imported(memory) => facts(memory),
            Self::Part { whole, offset, len } => (
                whole.driver().clone(),
                whole.address().wrapping_add(*offset),
                *len,
                whole.location(),
            ),
            Self::Page(page) => page.facts(),
        }
    }

    /// Returns where the parts of the memory are, each location once and in ascending order.
    pub fn places(&self, first: Location) -> Vec<Location> {
        match self {
            Self::Buffer(memory) => memory.locations(),
            Self::Part { whole, .. } => whole.places().to_vec(),
            Self::Imported(memory) => memory.description().locations(),
            Self::Remote(memory) => memory.description().locations(),
            _ => vec![first],
        }
    }

    /// Calls `work` with the memory.
    ///
    /// # Errors
    /// `InvalidArgument` for a part, which has its whole's memory, and for a page.
    pub fn with<T>(&self, work: impl FnOnce(&dyn Whole) -> T) -> egmem::Result<T> {
        Ok(match self {
            Self::Buffer(memory) => work(memory),
            Self::Block(memory) => work(memory),
            Self::OfMany(one) => work(one.block()),
            Self::Pool(memory) => work(&*lock(memory)),
            Self::Remote(memory) => work(&**memory),
            Self::Imported(memory) => work(memory),
            Self::Part { .. } | Self::Page(_) => {
                return Err(egmem::Error::invalid(
                    "device",
                    "a page's view is the CPU's; GPUs use pages by Tier.load and Tier.store",
                ));
            }
        })
    }

    /// Calls `work` with the CPU's view.
    ///
    /// # Errors
    /// `NotAccessible` unless the CPU may read; errors of earlier work on a pool's streams; those of `work` and of
    /// [`with`](Self::with).
    pub fn with_cpu<T>(
        &self,
        work: impl FnOnce(CpuView<'_>) -> egmem::Result<T>,
    ) -> egmem::Result<T> {
        self.with(|memory| memory.cpu().and_then(work))?
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

fn facts(memory: &impl Memory) -> (Driver, u64, u64, Location) {
    (
        memory.driver().clone(),
        memory.device_ptr().0,
        memory.len(),
        memory.location(),
    )
}
