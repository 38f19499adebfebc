//! The older allocators, and queries about pointers.

use std::os::fd::{AsFd, OwnedFd};

use super::answer::{Answer, exhausted, fail};
use super::memory::Purpose;
use super::space::GRANULARITY;
use super::space::Range;
use super::state::{Allocator, Kind, Region, State};
use crate::{Access, Code, DevicePtr, HandleTypes, Location, PointerAttribute};

/// Allocations are a multiple of this many bytes: at least a page of every Linux on Grace.
const UNIT: u64 = 64 << 10;

/// The allocation or mapping at a pointer.
struct Found<'a> {
    start: u64,
    size: u64,
    location: Location,
    device: i32,
    handle_types: HandleTypes,
    region: &'a Region,
}

impl State {
    pub(super) fn mem_alloc(&mut self, device: i32, size: u64) -> Answer<DevicePtr> {
        self.allocate(Allocator::Device, device, Location::Device(device), size)
    }

    /// The memory is the GPU's, as if nothing migrated.
    pub(super) fn mem_alloc_managed(&mut self, device: i32, size: u64) -> Answer<DevicePtr> {
        self.allocate(Allocator::Managed, device, Location::Device(device), size)
    }

    pub(super) fn mem_host_alloc(&mut self, device: i32, size: u64) -> Answer<DevicePtr> {
        self.context(device)?;
        if size == 0 {
            return Ok(DevicePtr(0)); // freed like any other
        }
        let location = match self.machine.gpu(device) {
            Some(gpu) if gpu.host_numa >= 0 => Location::HostNuma(gpu.host_numa),
            _ => Location::Host,
        };
        self.allocate(Allocator::Host, device, location, size)
    }

    fn allocate(
        &mut self,
        by: Allocator,
        device: i32,
        location: Location,
        size: u64,
    ) -> Answer<DevicePtr> {
        self.context(device)?;
        if size == 0 {
            return fail(Code::INVALID_VALUE);
        }
        let host = match by {
            Allocator::Device => Access::None,
            Allocator::Managed | Allocator::Host => Access::ReadWrite,
        };
        let len = size.checked_next_multiple_of(UNIT);
        let len = len.ok_or(Code::OUT_OF_MEMORY)?;
        let memory = self.new_memory(Purpose::Physical, location, HandleTypes::NONE, len)?;
        let _range = Range::reserve(len, 0).map_err(exhausted)?;
        let start = _range.start;
        let placed = _range.place(start, len, memory.file(), 0, host);
        placed.map_err(exhausted)?;
        if matches!(by, Allocator::Managed) {
            _range.keep_from_children().map_err(exhausted)?;
        }
        let region = Region {
            len,
            memory,
            offset: 0,
            kind: Kind::Allocation {
                by,
                device,
                size,
                _range,
            },
        };
        self.regions.insert(start, region);
        Ok(DevicePtr(start))
    }

    /// Frees device memory after all work of the device, as CUDA does.
    pub(super) fn mem_free(&mut self, device: i32, ptr: DevicePtr) -> Answer<()> {
        self.device(device)?;
        let (start, region) = self.region(ptr.0).ok_or(Code::INVALID_VALUE)?;
        let owner = match region.kind {
            Kind::Chunk { pool } => return self.free_now(device, pool, ptr),
            Kind::Allocation {
                by: Allocator::Device | Allocator::Managed,
                device,
                ..
            } if start == ptr.0 => device,
            _ => return fail(Code::INVALID_VALUE),
        };
        self.synchronize_device(owner);
        self.regions.remove(&ptr.0);
        self.context(device).map(drop)
    }

    pub(super) fn mem_free_host(&mut self, device: i32, ptr: DevicePtr) -> Answer<()> {
        self.device(device)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        match self.regions.get(&ptr.0).map(|region| &region.kind) {
            Some(Kind::Allocation {
                by: Allocator::Host,
                ..
            }) => {}
            _ => return fail(Code::INVALID_VALUE),
        }
        self.synchronize_all();
        self.regions.remove(&ptr.0);
        self.context(device).map(drop)
    }

    pub(super) fn mem_info(&self, device: i32) -> Answer<(u64, u64)> {
        let index = self.context(device)?;
        let free = self.capacity.free(Location::Device(device));
        Ok((free, self.machine.gpus[index].memory))
    }

    /// Finds the memory that contains an address. Bytes after the requested size belong to nothing.
    fn find(&self, ptr: DevicePtr) -> Option<Found<'_>> {
        self.find_region(ptr)
            .filter(|found| ptr.0 - found.start < found.size)
    }

    fn find_region(&self, ptr: DevicePtr) -> Option<Found<'_>> {
        let (start, region) = self.region(ptr.0)?;
        let whole = |location, device, handle_types| Found {
            start,
            size: region.len,
            location,
            device,
            handle_types,
            region,
        };
        Some(match &region.kind {
            Kind::Mapping { physical, .. } => whole(
                physical.props.location,
                owner(physical.props.location),
                physical.props.handle_types,
            ),
            Kind::Allocation {
                by, device, size, ..
            } => {
                let location = match by {
                    Allocator::Host => Location::Host,
                    Allocator::Device | Allocator::Managed => Location::Device(*device),
                };
                Found {
                    size: *size,
                    ..whole(location, *device, HandleTypes::NONE)
                }
            }
            Kind::Chunk { pool } => {
                let pool = self.pools.get(pool)?;
                let (start, size) = pool.allocation(ptr.0)?;
                Found {
                    start,
                    size,
                    ..whole(pool.location, owner(pool.location), pool.handle_types)
                }
            }
        })
    }

    pub(super) fn pointer_attribute(
        &self,
        ptr: DevicePtr,
        attribute: PointerAttribute,
    ) -> Answer<u64> {
        if let Some((start, range)) = self.registration(ptr.0, 1) {
            return Ok(match attribute {
                PointerAttribute::MemoryType | PointerAttribute::Mapped => 1,
                PointerAttribute::DevicePointer | PointerAttribute::HostPointer => ptr.0,
                PointerAttribute::DeviceOrdinal => range.device as u64,
                PointerAttribute::RangeStartAddr => start,
                PointerAttribute::RangeSize => range.len,
                PointerAttribute::AllowedHandleTypes => 0,
            });
        }
        let found = self.find(ptr).ok_or(Code::INVALID_VALUE)?;
        let host = found.location.is_host();
        let is_by = |this| matches!(found.region.kind, Kind::Allocation { by, .. } if by == this);
        // For a mapping, the reservation around it.
        let reservation = match found.region.kind {
            Kind::Mapping { .. } => self.reservation(ptr.0, 1),
            _ => None,
        };
        Ok(match attribute {
            PointerAttribute::MemoryType => 2 - u64::from(host),
            PointerAttribute::DevicePointer if !self.first_gpu_reaches(found.region) => {
                return fail(Code::INVALID_VALUE);
            }
            PointerAttribute::DevicePointer => ptr.0,
            PointerAttribute::HostPointer if is_by(Allocator::Managed) => ptr.0,
            PointerAttribute::HostPointer if host && self.host_reaches(found.region) => ptr.0,
            PointerAttribute::HostPointer => return fail(Code::INVALID_VALUE),
            PointerAttribute::DeviceOrdinal => found.device as u64,
            PointerAttribute::RangeStartAddr => match reservation {
                Some(range) => range.start,
                None => self.offset_in_block(&found).unwrap_or(found.start),
            },
            PointerAttribute::RangeSize => reservation.map_or(found.size, |range| range.len),
            PointerAttribute::Mapped => 1,
            PointerAttribute::AllowedHandleTypes => found.handle_types.bits().into(),
        })
    }

    /// Returns an offset in the pool's block instead of an address: measured for a host pool's memory.
    fn offset_in_block(&self, found: &Found<'_>) -> Option<u64> {
        let Kind::Chunk { pool } = found.region.kind else {
            return None;
        };
        let pool = self.pools.get(&pool)?;
        let chunk = pool.live.get(&found.start)?.chunk;
        let own = pool.location.is_host() && !pool.imported;
        own.then(|| (found.start - chunk) % self.machine.pool_chunk)
    }

    pub(super) fn mem_address_range(&self, ptr: DevicePtr) -> Answer<(DevicePtr, u64)> {
        let known = |found: &Found<'_>| self.first_gpu_reaches(found.region);
        let found = self.find(ptr).filter(known).ok_or(Code::NOT_FOUND)?;
        // Measured: for mapped host memory the base is 0, the size right.
        let is_mapping = matches!(found.region.kind, Kind::Mapping { .. });
        let base = match is_mapping && found.location.is_host() {
            true => 0,
            false => found.start,
        };
        Ok((DevicePtr(base), found.size))
    }

    /// Stands for a DMA-BUF: returns an fd that keeps the memory at `ptr`.
    pub(super) fn mem_dma_buf(&self, ptr: DevicePtr, size: u64) -> Answer<OwnedFd> {
        let whole_pages = |bytes: u64| bytes.is_multiple_of(4096);
        let end = ptr.0.checked_add(size).ok_or(Code::INVALID_VALUE)?;
        match self.find(ptr) {
            Some(found)
                if (size > 0 && whole_pages(size) && whole_pages(ptr.0))
                    && self.exports_to(&found, ptr.0, end) =>
            {
                let file = found.region.memory.file();
                file.as_fd().try_clone_to_owned().map_err(exhausted)
            }
            _ => fail(Code::INVALID_VALUE),
        }
    }

    /// Returns whether a DMA-BUF of the memory at a pointer can cover `start..end`.
    fn exports_to(&self, found: &Found<'_>, start: u64, end: u64) -> bool {
        if found.location.is_host() {
            return false;
        }
        match found.region.kind {
            // Further, through the device memory that is mapped behind it.
            Kind::Mapping { .. } => self.is_device_memory(start, end),
            // Up to the end of its last page.
            Kind::Allocation {
                by: Allocator::Device,
                size,
                ..
            } => end - found.start <= size.next_multiple_of(GRANULARITY),
            // Memory that shares a block with other memory: only from the block's start.
            Kind::Chunk { .. } => {
                let block = self.region(start);
                block.is_some_and(|(at, block)| at == start && end - start <= block.len)
            }
            Kind::Allocation { .. } => false,
        }
    }

    /// Returns whether device memory is mapped everywhere in a range, in one reservation.
    fn is_device_memory(&self, start: u64, end: u64) -> bool {
        let mut at = start;
        while at < end {
            let Some((start, region)) = self.region(at) else {
                return false;
            };
            match &region.kind {
                Kind::Mapping { physical, .. } if !physical.props.location.is_host() => {
                    at = start + region.len;
                }
                _ => return false,
            }
        }
        self.reservation(start, end - start).is_some()
    }

    /// Returns whether GPU 0 may access a region: the trait queries pointers in its context.
    fn first_gpu_reaches(&self, region: &Region) -> bool {
        !self.machine.gpus.is_empty() && self.access(region, 0) != Access::None
    }

    fn host_reaches(&self, region: &Region) -> bool {
        match &region.kind {
            Kind::Mapping { host, .. } => *host != Access::None,
            _ => true,
        }
    }
}

fn owner(location: Location) -> i32 {
    match location {
        Location::Device(device) => device,
        _ => 0,
    }
}
