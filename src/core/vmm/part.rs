//! Physical memory at its place in a reservation, and such parts side by side.

use std::sync::Arc;

use super::{Mapping, PhysicalMemory, Reservation};
use crate::driver::{Access, AccessDesc, DevicePtr, Location};
use crate::memory::{CpuView, Memory, overlapping};
use crate::{Error, Result};

/// Physical memory, or a share in some, mapped at its place in a reservation. When dropped, it is unmapped first and then
/// released.
#[derive(Debug)]
pub struct MappedPart<P = PhysicalMemory> {
    mapping: Mapping,
    memory: P,
}

impl<P: AsRef<PhysicalMemory>> MappedPart<P> {
    /// Maps `memory` at `offset` bytes into the reservation, and grants `access`.
    ///
    /// # Errors
    /// Those of [`Reservation::map`] and [`Mapping::set_access`]; `memory` is dropped then.
    pub fn map(
        reservation: &Arc<Reservation>,
        offset: u64,
        memory: P,
        access: &[AccessDesc],
    ) -> Result<Self> {
        let mut mapping = reservation.map(offset, memory.as_ref())?;
        mapping.set_access(access)?;
        Ok(Self { mapping, memory })
    }
}

impl<P> MappedPart<P> {
    /// Creates a part of memory and its mapping.
    pub const fn new(mapping: Mapping, memory: P) -> Self {
        Self { mapping, memory }
    }

    /// Returns the mapping, to change its access.
    pub const fn mapping_mut(&mut self) -> &mut Mapping {
        &mut self.mapping
    }

    /// Returns the memory.
    pub const fn memory(&self) -> &P {
        &self.memory
    }

    /// Unmaps the memory and returns it. If the driver refuses, the part is unchanged.
    ///
    /// # Errors
    /// The driver's error, and the part.
    pub fn unmap(self) -> Result<P, Box<(Self, Error)>> {
        let Self { mapping, memory } = self;
        match mapping.unmap() {
            Ok(()) => Ok(memory),
            Err(refused) => {
                let (mapping, error) = *refused;
                Err(Box::new((Self { mapping, memory }, error)))
            }
        }
    }
}

/// A mapping, or something that has one.
pub trait Mapped {
    /// Returns the mapping.
    fn mapping(&self) -> &Mapping;
}

impl Mapped for Mapping {
    fn mapping(&self) -> &Mapping {
        self
    }
}

impl<P> Mapped for MappedPart<P> {
    fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

impl<M: Mapped> Mapped for Arc<M> {
    fn mapping(&self) -> &Mapping {
        (**self).mapping()
    }
}

/// Mappings of one reservation, and their answers together. They lie side by side from its start on, without gaps and in the
/// order of addresses; the answers for other mappings are wrong.
#[derive(Clone, Copy, Debug)]
pub struct Adjacent<'a, M>(pub &'a [M]);

impl<'a, M: Mapped> Adjacent<'a, M> {
    /// Returns those that contain some of `len` bytes from `offset` on.
    pub fn holding(self, offset: u64, len: u64) -> &'a [M] {
        overlapping(self.0, |part| part.mapping().range(), offset, len)
    }

    fn mappings(self, offset: u64, len: u64) -> impl Iterator<Item = &'a Mapping> {
        self.holding(offset, len).iter().map(Mapped::mapping)
    }

    /// Returns the CPU's view of `len` bytes from `offset` on, in a range that begins at `start`. Only the mappings that
    /// contain some of them count; a view of 0 bytes needs none.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read these.
    ///
    /// # Safety
    /// `start` is the start of the mappings' reservation. The mappings lie side by side from `start` on, in the order of
    /// addresses and without gaps, and have these bytes. While the view lives, none of them is unmapped and their access
    /// does not change. Any other access to these bytes in this process keeps the rules of [`CpuView::new`].
    pub unsafe fn cpu(self, start: DevicePtr, offset: u64, len: u64) -> Result<CpuView<'a>> {
        let have = self.mappings(offset, len).map(Mapping::host).min();
        let have = have.unwrap_or(Access::ReadWrite);
        // SAFETY: the caller's promise; mappings are whole pages, so the range may be widened to multiples of 8.
        unsafe { CpuView::granted(start.add(offset), len, have) }
    }

    /// Returns the least access of GPU `gpu` to the mappings that contain `len` bytes from `offset` on, as the driver
    /// reports it.
    ///
    /// # Errors
    /// As [`Mapping::access`].
    pub fn gpu_access(self, gpu: i32, offset: u64, len: u64) -> Result<Access> {
        let mut mappings = self.mappings(offset, len);
        mappings.try_fold(Access::ReadWrite, |least, mapping| {
            Ok(least.min(mapping.access(Location::Device(gpu))?))
        })
    }

    /// Returns whether the CPU may read, but not write, some of the `len` bytes from `offset` on.
    pub fn is_read_only_for_cpu(self, offset: u64, len: u64) -> bool {
        let mut mappings = self.mappings(offset, len);
        mappings.any(|mapping| mapping.host() == Access::Read)
    }

    /// Returns whether some of the `len` bytes from `offset` on are the CPU's memory.
    pub fn may_be_on_host(self, offset: u64, len: u64) -> bool {
        let mut mappings = self.mappings(offset, len);
        mappings.any(|mapping| mapping.location().is_host())
    }

    /// Returns how many of `len` bytes from `offset` on one copy may take; see [`AccessChecks::of_one_copy`](crate::memory::AccessChecks::of_one_copy).
    pub fn of_one_copy(self, offset: u64, len: u64) -> u64 {
        let mut mappings = self.mappings(offset, len);
        let Some(first) = mappings.next() else {
            return len;
        };
        let is_host = |mapping: &Mapping| mapping.location().is_host();
        let is_registered = first.is_registered();
        let other = mappings.find(|next| is_registered || is_host(next) != is_host(first));
        other.map_or(len, |mapping| up_to(mapping, offset))
    }

    /// Returns how many of `len` bytes from `offset` on lie in the mapping of the first one.
    pub fn of_one_mapping(self, offset: u64, len: u64) -> u64 {
        let next = self.mappings(offset, len).nth(1);
        next.map_or(len, |mapping| up_to(mapping, offset))
    }
}

/// Returns the bytes from `offset` to the mapping: 0 if it begins before, which it does only if mappings are out of order.
fn up_to(mapping: &Mapping, offset: u64) -> u64 {
    mapping.range().start.saturating_sub(offset)
}
