//! A piece of physical memory at its place in the vector's addresses.

use std::ops::Range;
use std::sync::Arc;

use crate::driver::{Access, AccessDesc, DevicePtr, Driver, Location};
use crate::memory::{CpuView, overlapping};
use crate::vmm::{Mapping, PhysicalMemory, PhysicalOptions, Reservation};
use crate::{Error, Result};

/// Physical memory, mapped. Unmapped first when dropped, then released.
#[derive(Debug)]
pub(crate) struct Chunk {
    mapping: Mapping,
    memory: PhysicalMemory,
    /// Bytes from the vector's start.
    offset: u64,
}

impl Chunk {
    /// Creates memory of `bytes` and maps it `offset` bytes behind the reservation's start.
    pub(super) fn create(
        driver: &Driver,
        options: PhysicalOptions,
        reservation: &Arc<Reservation>,
        (offset, bytes): (u64, u64),
        access: &[AccessDesc],
    ) -> Result<Self> {
        let memory = options.create(driver, bytes)?;
        let mut mapping = reservation.map(offset, &memory)?;
        mapping.set_access(access)?;
        Ok(Self {
            mapping,
            memory,
            offset,
        })
    }

    /// Returns the bytes mapped.
    pub(super) const fn bytes(&self) -> u64 {
        self.mapping.size().padded()
    }

    /// Returns where it lies, in bytes from the vector's start.
    pub(super) const fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.bytes()
    }

    pub(super) const fn host(&self) -> Access {
        self.mapping.host()
    }

    pub(super) fn access(&self, location: Location) -> Result<Access> {
        self.mapping.access(location)
    }

    pub(super) fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        self.mapping.set_access(access)
    }

    /// Unmaps the memory and gives it back; returns the chunk unchanged if it could not be unmapped.
    pub(super) fn give_back(self) -> Result<(), Box<(Option<Self>, Error)>> {
        let Self {
            mapping,
            memory,
            offset,
        } = self;
        match mapping.unmap() {
            Ok(()) => memory.release().map_err(|error| Box::new((None, error))),
            Err(kept) => {
                let (mapping, error) = *kept;
                Err(Box::new((
                    Some(Self {
                        mapping,
                        memory,
                        offset,
                    }),
                    error,
                )))
            }
        }
    }
}

impl AsRef<PhysicalMemory> for Chunk {
    fn as_ref(&self) -> &PhysicalMemory {
        &self.memory
    }
}

/// Returns the chunks that contain some of `len` bytes from `offset` on.
pub(super) fn holding(chunks: &[Arc<Chunk>], offset: u64, len: u64) -> &[Arc<Chunk>] {
    overlapping(chunks, |chunk| chunk.range(), offset, len)
}

/// Returns the CPU's view of `bytes` bytes from `offset` on. Only the chunks that contain some of them count.
///
/// # Safety
/// The chunks are adjacent from `start` on and have `offset` and `bytes` bytes. While the view lives, none of them is
/// removed and their access does not change.
pub(super) unsafe fn view(
    chunks: &[Arc<Chunk>],
    start: DevicePtr,
    (offset, bytes): (u64, u64),
) -> Result<CpuView<'_>> {
    let hosts = holding(chunks, offset, bytes)
        .iter()
        .map(|chunk| chunk.host());
    let have = hosts.min().unwrap_or(Access::ReadWrite);
    if have == Access::None {
        let (who, need) = (Location::Host, Access::Read);
        return Err(Error::NotAccessible { who, have, need });
    }
    // SAFETY: the caller's promise; chunks are whole pages, and safe code reaches the bytes through atomic views only.
    Ok(unsafe { CpuView::new(start.add(offset), bytes, have == Access::ReadWrite) })
}
