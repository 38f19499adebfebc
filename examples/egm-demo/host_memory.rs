//! The kinds of host memory whose bandwidth is measured.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

use egmem::driver::{DeviceAttribute, DevicePtr, Driver};
use egmem::pinned::PinnedHost;
use egmem::{Buffer, Error, Memory, PoolBuffer, Result};

/// Memory of one kind.
pub enum HostMemory {
    Vmm(Buffer),
    Registered(Buffer),
    Pool(PoolBuffer),
    Pinned(PinnedHost),
    Pageable(Pageable),
}

impl HostMemory {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Vmm(_) => "vmm",
            Self::Registered(_) => "registered",
            Self::Pool(_) => "pool",
            Self::Pinned(_) => "cudaHostAlloc",
            Self::Pageable(_) => "pageable",
        }
    }

    pub fn start(&self) -> DevicePtr {
        match self {
            Self::Vmm(buffer) | Self::Registered(buffer) => buffer.device_ptr(),
            Self::Pool(buffer) => buffer.device_ptr(),
            Self::Pinned(memory) => memory.device_ptr(),
            Self::Pageable(memory) => DevicePtr(memory.start.expose_provenance() as u64),
        }
    }

    /// Offset and length of the copies that make one of `bytes`: the driver copies registered memory within one registration
    /// alone, so the library makes a copy for each, and so does this.
    pub fn copies(&self, bytes: u64) -> Vec<(u64, u64)> {
        match self {
            Self::Registered(buffer) => {
                let chunks = buffer.mappings().iter().map(|mapping| mapping.range());
                chunks
                    .map(|range| (range.start, range.end.min(bytes) - range.start))
                    .collect()
            }
            _ => vec![(0, bytes)],
        }
    }

    /// Copies reach every kind, kernels reach pageable memory on coherent machines only.
    pub fn reached_by_kernels_of(&self, gpu: i32) -> Result<bool> {
        match self {
            Self::Pageable(memory) => memory
                .driver
                .device_attribute(gpu, DeviceAttribute::PAGEABLE_MEMORY_ACCESS)
                .map(|answer| answer == 1),
            _ => Ok(true),
        }
    }
}

/// Memory from `malloc`, touched by the thread that allocates it.
pub struct Pageable {
    driver: Driver,
    start: *mut u8,
    layout: Layout,
}

impl Pageable {
    pub fn new(driver: &Driver, bytes: u64) -> Result<Self> {
        let layout = usize::try_from(bytes)
            .ok()
            .filter(|&bytes| bytes > 0)
            .and_then(|bytes| Layout::from_size_align(bytes, 4096).ok())
            .ok_or_else(|| Error::invalid("size", format!("{bytes} bytes cannot be allocated")))?;
        // SAFETY: the layout's size is not 0.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: just allocated with this size. The first touch puts it on this thread's node.
        unsafe { start.write_bytes(1, layout.size()) };
        Ok(Self {
            driver: driver.clone(),
            start,
            layout,
        })
    }
}

impl Drop for Pageable {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; `Bench::time` waits for the work that uses it.
        unsafe { dealloc(self.start, self.layout) };
    }
}
