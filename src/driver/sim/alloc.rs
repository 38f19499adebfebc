//! The older allocators, and memory of the process that the driver pins and maps: `cuMemHostRegister`.

use super::fault::{Answer, fail};
use super::memory::Purpose;
use super::space::{Range, is_covered};
use super::state::{Allocator, Kind, Region, Registered, State};
use crate::*;

/// Allocations are a multiple of this many bytes: at least a page of every Linux on Grace.
const UNIT: u64 = 64 << 10;

impl State {
    pub fn mem_alloc(&mut self, device: i32, size: u64) -> Answer<DevicePtr> {
        self.allocate(Allocator::Device, device, size)
    }

    /// The memory is the GPU's, as if nothing migrated.
    pub fn mem_alloc_managed(&mut self, device: i32, size: u64) -> Answer<DevicePtr> {
        self.allocate(Allocator::Managed, device, size)
    }

    pub fn mem_host_alloc(&mut self, device: i32, size: u64) -> Answer<DevicePtr> {
        self.allocate(Allocator::Host, device, size)
    }

    fn allocate(&mut self, by: Allocator, device: i32, size: u64) -> Answer<DevicePtr> {
        let gpu = &self.machine.gpus[self.context(device)?];
        let (location, host) = match by {
            Allocator::Host if size == 0 => return Ok(DevicePtr(0)), // freed like any other
            _ if size == 0 => return fail(Code::INVALID_VALUE),
            Allocator::Host if gpu.host_numa >= 0 => {
                (Location::HostNuma(gpu.host_numa), Access::ReadWrite)
            }
            Allocator::Host => (Location::Host, Access::ReadWrite),
            Allocator::Managed => (Location::Device(device), Access::ReadWrite),
            Allocator::Device => (Location::Device(device), Access::None),
        };
        let len = size.checked_next_multiple_of(UNIT);
        let len = len.ok_or(Code::OUT_OF_MEMORY)?;
        let memory = self.new_memory(Purpose::Physical, location, HandleTypes::NONE, len)?;
        let _range = Range::reserve(len, 0)?;
        let start = _range.start;
        _range.place(start, len, memory.file(), 0, host)?;
        if matches!(by, Allocator::Managed) {
            _range.keep_from_children()?;
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
    pub fn mem_free(&mut self, device: i32, ptr: DevicePtr) -> Answer {
        self.device(device)?;
        let (start, region) = self.region(ptr.0).ok_or(Code::INVALID_VALUE)?;
        match region.kind {
            Kind::Chunk { pool } => self.free_now(device, pool, ptr)?,
            Kind::Allocation {
                by: Allocator::Device | Allocator::Managed,
                device: owner,
                ..
            } if start == ptr.0 => {
                self.synchronize_device(owner);
                self.regions.remove(ptr.0);
            }
            _ => return fail(Code::INVALID_VALUE),
        }
        self.context(device).map(drop)
    }

    pub fn mem_free_host(&mut self, device: i32, ptr: DevicePtr) -> Answer {
        self.device(device)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        let kind = self.regions.get(ptr.0).map(|region| &region.kind);
        let Some(Kind::Allocation {
            by: Allocator::Host,
            ..
        }) = kind
        else {
            return fail(Code::INVALID_VALUE);
        };
        self.synchronize_all();
        self.regions.remove(ptr.0);
        self.context(device).map(drop)
    }

    pub fn mem_info(&self, device: i32) -> Answer<(u64, u64)> {
        let index = self.context(device)?;
        let free = self.capacity.free(Location::Device(device));
        Ok((free, self.machine.gpus[index].memory))
    }
}

/// Bytes that are checked at a time.
const STEP: u64 = 1 << 30;

impl State {
    /// Maps the range for every GPU. Not measured: codes follow CUDA's documentation.
    pub fn mem_host_register(
        &mut self,
        device: i32,
        ptr: DevicePtr,
        size: u64,
        _read_only: bool,
        node: Option<NodeId>,
    ) -> Answer {
        self.context(device)?;
        let end = ptr.0.checked_add(size).ok_or(Code::INVALID_VALUE)?;
        if ptr.0 == 0 || size == 0 || !is_mapped(ptr.0, end) {
            return fail(Code::INVALID_VALUE);
        }
        let overlaps = |(start, range): &(u64, Registered)| start + range.len > ptr.0;
        let before = self.registered.up_to(end - 1);
        if before.is_some_and(overlaps) || self.is_ours(ptr.0, size) {
            return fail(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        let charge = node.map(|node| self.charge(node.into(), size));
        let range = Registered {
            len: size,
            device,
            _charge: charge.transpose()?,
        };
        self.registered.insert(ptr.0, range);
        Ok(())
    }

    /// Ends a registration after all work of all devices, as CUDA does.
    pub fn mem_host_unregister(&mut self, device: i32, ptr: DevicePtr) -> Answer {
        self.device(device)?;
        if self.registered.get(ptr.0).is_none() {
            return fail(Code::HOST_MEMORY_NOT_REGISTERED);
        }
        self.synchronize_all();
        self.registered.remove(ptr.0);
        self.context(device).map(drop)
    }

    /// The address for GPUs is the CPU's.
    pub fn mem_host_device_pointer(&mut self, device: i32, ptr: DevicePtr) -> Answer<DevicePtr> {
        self.context(device)?;
        let known = self.registration(ptr.0, 1);
        Ok(known.map(|_| ptr).ok_or(Code::INVALID_VALUE)?)
    }

    /// Returns the registration that contains a whole range, with its start.
    pub fn registration(&self, start: u64, len: u64) -> Option<(u64, &Registered)> {
        let (at, range) = self.registered.up_to(start)?;
        let end = start.checked_add(len)?;
        (end <= at + range.len).then_some((*at, range))
    }

    /// Returns whether registrations that lie side by side contain a whole range: kernels reach over their borders, copies
    /// and fills do not.
    pub fn is_registered(&self, start: u64, len: u64) -> bool {
        let after = |at| {
            let (first, range) = self.registration(at, 1)?;
            Some(first + range.len)
        };
        let end = start.checked_add(len);
        end.is_some_and(|end| is_covered(start, end, after))
    }
}

/// Returns whether the process has mapped all of a range.
fn is_mapped(start: u64, end: u64) -> bool {
    // SAFETY: `sysconf` has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let mut resident = vec![0_u8; STEP.div_ceil(page) as usize];
    is_covered(start - start % page, end, |at| {
        let len = (end - at).min(STEP);
        // SAFETY: the kernel checks the range, and writes a byte for each of its pages, for which there is room.
        let answer = unsafe { libc::mincore(at as *mut _, len as usize, resident.as_mut_ptr()) };
        (answer == 0).then_some(at + len)
    })
}
