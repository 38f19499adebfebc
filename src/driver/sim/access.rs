//! Finds the memory behind addresses, with the checks of a GPU's own memory management, and answers queries about pointers.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::fault::{Answer, fail};
use super::memory::{FAULT, Memory, memfd};
use super::space::{GRANULARITY, is_covered};
use super::state::{Allocator, Kind, Mapping, Region, State};
use crate::*;

/// The part of a copy that is in flight at a time.
const BOUNCE: usize = 256 << 10;

/// A part of a range.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// The simulated physical memory; `None`: the process's own memory.
    memory: Option<Arc<Memory>>,
    /// The offset in that memory, or the address.
    at: u64,
    pub len: u64,
}

/// The hardware that accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Engine {
    /// The copy engine: it reaches every allocation of the older kind, on any device.
    Copy,
    /// A kernel: it reaches pageable memory if the GPU is coherent with the CPU.
    Kernel,
}

impl State {
    /// Returns the pieces of a range if `device` has this access to all of them; otherwise the fault.
    pub fn pieces(
        &self,
        device: i32,
        engine: Engine,
        start: u64,
        len: u64,
        need: Access,
    ) -> Result<Vec<Piece>, Code> {
        let end = start.checked_add(len).ok_or(Code::ILLEGAL_ADDRESS)?;
        let mut pieces = Vec::new();
        let mut at = start;
        while at < end {
            let Some((begin, region)) = self.region(at) else {
                break;
            };
            // A range may span mappings only within one reservation; other mappings are adjacent by chance.
            if at > start && self.reservation(start, at - start + 1).is_none() {
                return Err(Code::ILLEGAL_ADDRESS);
            }
            let access = match (&region.kind, engine) {
                (Kind::Allocation { .. }, Engine::Copy) => Access::ReadWrite,
                _ => self.access(region, device),
            };
            if access < need {
                return Err(Code::ILLEGAL_ADDRESS);
            }
            let n = (end - at).min(region.len - (at - begin));
            if let Kind::Chunk { pool } = region.kind
                && !self.pools[pool].is_in_use(at, n)
            {
                return Err(Code::ILLEGAL_ADDRESS);
            }
            pieces.push(Piece {
                memory: Some(Arc::clone(&region.memory)),
                at: region.offset + (at - begin),
                len: n,
            });
            at += n;
        }
        let coherent = || self.machine.gpu(device).is_some_and(|gpu| gpu.coherent);
        if at == end {
            Ok(pieces)
        } else if pieces.is_empty()
            && !self.is_ours(start, len)
            && (engine == Engine::Copy || coherent() || self.is_registered(start, len))
        {
            Ok(vec![Piece {
                memory: None,
                at: start,
                len,
            }])
        } else {
            Err(Code::ILLEGAL_ADDRESS)
        }
    }

    /// Returns whether the driver has reserved or allocated any part of a range.
    pub fn is_ours(&self, start: u64, len: u64) -> bool {
        let last = start + (len - 1);
        let (reserved, region) = (self.reservations.up_to(last), self.regions.up_to(last));
        reserved.is_some_and(|(at, range)| at + range.len > start)
            || region.is_some_and(|(at, region)| at + region.len > start)
    }

    /// Makes the driver's checks of a submitted copy or memset: that the range is allocated, and
    /// that the device has some access. Returns whether it is pageable memory.
    pub fn check_submitted(&self, device: i32, start: u64, len: u64) -> Result<bool, Code> {
        let pieces = self
            .pieces(device, Engine::Copy, start, len, Access::Read)
            .map_err(|_| Code::INVALID_VALUE)?;
        if let Some((_, region)) = self.region(start)
            && let Kind::Chunk { pool } = region.kind
            && !self.pools[pool].is_live(start, len)
        {
            return Err(Code::INVALID_VALUE);
        }
        let is_of_process = matches!(pieces[..], [Piece { memory: None, .. }]);
        match self.registration(start, 1) {
            // Measured: the driver refuses a copy or fill that ends in another registration, or in none.
            Some(_) if self.registration(start, len).is_none() => Err(Code::INVALID_VALUE),
            registered => Ok(is_of_process && registered.is_none()),
        }
    }
}

impl Piece {
    /// Returns the piece without its first `n` bytes.
    pub fn after(&self, n: u64) -> Self {
        Self {
            at: self.at + n,
            len: self.len - n,
            ..self.clone()
        }
    }

    /// Reads the piece's first bytes.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), Code> {
        match &self.memory {
            Some(memory) => memory.read(self.at, bytes),
            None => read_own(self.at, bytes),
        }
    }

    /// Overwrites the piece's first bytes.
    ///
    /// # Safety
    /// The caller may overwrite the process's own memory there.
    pub unsafe fn write(&self, bytes: &[u8]) -> Result<(), Code> {
        match &self.memory {
            Some(memory) => memory.write(self.at, bytes),
            // SAFETY: the caller's promise.
            None => unsafe { write_own(self.at, bytes) },
        }
    }

    /// Sets every byte.
    ///
    /// # Safety
    /// As for [`Self::write`].
    pub unsafe fn fill(mut self, value: u8) -> Result<(), Code> {
        let pattern = vec![value; BOUNCE.min(self.len as usize)];
        while self.len > 0 {
            let n = BOUNCE.min(self.len as usize);
            // SAFETY: the caller's promise.
            unsafe { self.write(&pattern[..n]) }?;
            self = self.after(n as u64);
        }
        Ok(())
    }
}

/// Reads this process's own memory. The kernel does it, so a wrong address is an error, not a fault.
fn read_own(address: u64, bytes: &mut [u8]) -> Result<(), Code> {
    let file = scratch()?;
    // SAFETY: the kernel checks the address and returns EFAULT if it cannot be read. The caller of the driver's call
    // guarantees that the range may be read.
    let moved = unsafe { libc::pwrite64(file.as_raw_fd(), address as *const _, bytes.len(), 0) };
    if moved != bytes.len() as isize {
        return Err(FAULT);
    }
    file.read_exact_at(bytes, 0).map_err(|_| FAULT)
}

/// Overwrites this process's own memory, as above.
///
/// # Safety
/// The caller may overwrite the range.
unsafe fn write_own(address: u64, bytes: &[u8]) -> Result<(), Code> {
    let file = scratch()?;
    file.write_all_at(bytes, 0).map_err(|_| FAULT)?;
    // SAFETY: as above; the caller guarantees that the range may be overwritten.
    let moved = unsafe { libc::pread64(file.as_raw_fd(), address as *mut _, bytes.len(), 0) };
    if moved == bytes.len() as isize {
        Ok(())
    } else {
        Err(FAULT)
    }
}

/// Creates a file to pass bytes through.
fn scratch() -> Result<File, Code> {
    memfd("egmem-sim-scratch").map_err(|_| Code::OUT_OF_MEMORY)
}

/// Copies between two ranges of the same length.
///
/// # Safety
/// The caller may overwrite the process's own memory in `dst`.
pub(super) unsafe fn copy(dst: Vec<Piece>, src: Vec<Piece>) -> Result<(), Code> {
    let (mut dst, mut src) = (dst.into_iter(), src.into_iter());
    let (mut to, mut from) = (dst.next(), src.next());
    let mut bounce = Vec::new();
    while let (Some(into), Some(of)) = (&to, &from) {
        let n = into.len.min(of.len).min(BOUNCE as u64);
        bounce.resize(n as usize, 0);
        of.read(&mut bounce)?;
        // SAFETY: the caller's promise.
        unsafe { into.write(&bounce) }?;
        let rest = |piece: &Piece| (piece.len > n).then(|| piece.after(n));
        let (more_to, more_from) = (rest(into), rest(of));
        to = more_to.or_else(|| dst.next());
        from = more_from.or_else(|| src.next());
    }
    Ok(())
}

/// The allocation or mapping at a pointer.
struct Found<'a> {
    start: u64,
    size: u64,
    location: Location,
    handle_types: HandleTypes,
    region: &'a Region,
}

impl State {
    /// Finds the memory that contains an address. Bytes after the requested size belong to nothing.
    fn find(&self, ptr: DevicePtr) -> Option<Found<'_>> {
        let (mut start, region) = self.region(ptr.0)?;
        let mut size = region.len;
        let (location, handle_types) = match &region.kind {
            Kind::Mapping(Mapping { physical, .. }) => {
                (physical.props.location, physical.props.handle_types)
            }
            Kind::Allocation {
                by,
                device,
                size: requested,
                ..
            } => {
                size = *requested;
                let location = match by {
                    Allocator::Host => Location::Host,
                    Allocator::Device | Allocator::Managed => Location::Device(*device),
                };
                (location, HandleTypes::NONE)
            }
            Kind::Chunk { pool } => {
                let pool = self.pools.get(*pool)?;
                (start, size) = pool.allocation(ptr.0)?;
                (pool.memory.label.location, pool.memory.label.handle_types)
            }
        };
        (ptr.0 - start < size).then_some(Found {
            start,
            size,
            location,
            handle_types,
            region,
        })
    }

    /// Returns whether the memory at an address is the CPU's.
    pub fn is_on_host(&self, address: u64) -> bool {
        let found = self.find(DevicePtr(address));
        found.is_some_and(|found| found.location.is_host())
    }

    pub fn pointer_attribute(&self, ptr: DevicePtr, attribute: PointerAttribute) -> Answer<u64> {
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
        let mapping = found.region.mapping();
        let is_open = mapping.is_none_or(|mapping| mapping.host != Access::None);
        let reservation = mapping.and_then(|_| self.reservation(ptr.0, 1));
        Ok(match attribute {
            PointerAttribute::MemoryType => 2 - u64::from(host),
            PointerAttribute::DevicePointer if !self.first_gpu_reaches(found.region) => {
                return fail(Code::INVALID_VALUE);
            }
            PointerAttribute::DevicePointer => ptr.0,
            PointerAttribute::HostPointer if is_by(Allocator::Managed) => ptr.0,
            PointerAttribute::HostPointer if host && is_open => ptr.0,
            PointerAttribute::HostPointer => return fail(Code::INVALID_VALUE),
            PointerAttribute::DeviceOrdinal => match (&found.region.kind, found.location) {
                (&Kind::Allocation { device, .. }, _) | (_, Location::Device(device)) => {
                    device as u64
                }
                _ => 0,
            },
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
        let pool = self.pools.get(pool)?;
        let chunk = pool.live.get(found.start)?.chunk;
        let own = found.location.is_host() && !pool.is_imported();
        own.then(|| (found.start - chunk) % self.machine.pool_chunk)
    }

    pub fn mem_address_range(&self, ptr: DevicePtr) -> Answer<(DevicePtr, u64)> {
        let known = |found: &Found<'_>| self.first_gpu_reaches(found.region);
        let found = self.find(ptr).filter(known).ok_or(Code::NOT_FOUND)?;
        // Measured: for mapped host memory the base is 0, the size right.
        let is_mapping = found.region.mapping().is_some();
        let base = if is_mapping && found.location.is_host() {
            0
        } else {
            found.start
        };
        Ok((DevicePtr(base), found.size))
    }

    /// Stands for a DMA-BUF: returns an fd that keeps the memory at `ptr`.
    pub fn mem_dma_buf(&self, ptr: DevicePtr, size: u64) -> Answer<OwnedFd> {
        let whole_pages = |bytes: u64| bytes.is_multiple_of(4096);
        let end = ptr.0.checked_add(size).ok_or(Code::INVALID_VALUE)?;
        let pages = size > 0 && whole_pages(size) && whole_pages(ptr.0);
        let covers = |found: &Found<'_>| pages && self.exports_to(found, ptr.0, end);
        let found = self.find(ptr).filter(covers).ok_or(Code::INVALID_VALUE)?;
        let file = found.region.memory.file();
        Ok(file.as_fd().try_clone_to_owned()?)
    }

    /// Returns whether a DMA-BUF of the memory at a pointer can cover `start..end`.
    fn exports_to(&self, found: &Found<'_>, start: u64, end: u64) -> bool {
        if found.location.is_host() {
            return false;
        }
        match found.region.kind {
            // Further, through the device memory that is mapped behind it.
            Kind::Mapping(_) => self.is_device_memory(start, end),
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
        let after = |at| {
            let (begin, region) = self.region(at)?;
            let is_host = region.mapping()?.physical.props.location.is_host();
            (!is_host).then_some(begin + region.len)
        };
        is_covered(start, end, after) && self.reservation(start, end - start).is_some()
    }

    /// Returns whether GPU 0 may access a region: the trait queries pointers in its context.
    fn first_gpu_reaches(&self, region: &Region) -> bool {
        !self.machine.gpus.is_empty() && self.access(region, 0) != Access::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_address_is_an_error() {
        assert_eq!(read_own(4096, &mut [0; 16]), Err(FAULT));
        // SAFETY: nothing is mapped at the address, so nothing can be overwritten.
        assert_eq!(unsafe { write_own(4096, &[0; 16]) }, Err(FAULT));
        let (text, mut read, mut back) = (*b"some words", [0; 10], [0_u8; 10]);
        read_own(text.as_ptr() as u64, &mut read).unwrap();
        // SAFETY: `back` is a local variable and long enough.
        unsafe { write_own(back.as_mut_ptr() as u64, &read) }.unwrap();
        assert_eq!(back, text);
    }
}
