//! Physical memory at its place in a reservation, and several side by side at one range of addresses.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Mapping, PhysicalMemory, Reservation};
use crate::driver::{Access, AccessDesc, DevicePtr, Driver, Location};
use crate::memory::{AccessChecks, CpuView, Engine, Memory, access_checks, check_range};
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

/// Mappings that lie side by side in one reservation, and their answers together.
#[derive(Debug)]
pub struct Adjacent<'a, M>(&'a [M]);

impl<'a, M: Mapped> Adjacent<'a, M> {
    /// Takes mappings together.
    ///
    /// # Safety
    /// The mappings lie side by side from the start of their reservation on, in the order of addresses and without gaps: of others
    /// the answers, on which safe calls rely, are wrong.
    pub const unsafe fn new(mappings: &'a [M]) -> Self {
        Self(mappings)
    }

    /// Returns those that contain some of `len` bytes from `offset` on.
    pub fn holding(&self, offset: u64, len: u64) -> &'a [M] {
        let end = offset.saturating_add(len);
        let first = self
            .0
            .partition_point(|part| part.mapping().range().end <= offset);
        let parts = &self.0[first..];
        &parts[..parts.partition_point(|part| part.mapping().range().start < end)]
    }

    fn mappings(&self, offset: u64, len: u64) -> impl Iterator<Item = &'a Mapping> + use<'a, M> {
        self.holding(offset, len).iter().map(Mapped::mapping)
    }

    /// Returns the CPU's view of `len` bytes from `offset` on, in a range that begins at `start`. Only the mappings that
    /// contain some of them count; a view of 0 bytes needs none.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read these.
    ///
    /// # Safety
    /// `start` is the start of the mappings' reservation, and the mappings have these bytes. While the view lives, none of
    /// them is unmapped and their access does not change. Any other access to these bytes in this process keeps the rules
    /// of [`CpuView::new`].
    pub unsafe fn cpu(&self, start: DevicePtr, offset: u64, len: u64) -> Result<CpuView<'a>> {
        let have = self.mappings(offset, len).map(Mapping::host).min();
        let have = have.unwrap_or(Access::ReadWrite);
        // SAFETY: the caller's promise; mappings are whole pages, so the range may be widened to multiples of 8.
        unsafe { CpuView::granted(start.add(offset), len, have) }
    }
}

// SAFETY: the mappings live as long as the borrow, and one that is forgotten stays mapped. The driver answers for each of
// them, and grants change only through `&mut`. By the promise of `new` they are all of the range, which lends no bytes itself.
unsafe impl<M: Mapped> AccessChecks for Adjacent<'_, M> {
    fn gpu_access(&self, gpu: i32, _: Engine, offset: u64, len: u64) -> Result<Access> {
        let end = self.0.last().map_or(0, |last| last.mapping().range().end);
        check_range(offset, len, end)?;
        let mut mappings = self.mappings(offset, len);
        mappings.try_fold(Access::ReadWrite, |least, mapping| {
            Ok(least.min(mapping.access(Location::Device(gpu))?))
        })
    }

    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        let mut mappings = self.mappings(offset, len);
        mappings.any(|mapping| mapping.host() == Access::Read)
    }

    fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
        let mut mappings = self.mappings(offset, len);
        mappings.any(|mapping| mapping.location().is_host())
    }

    fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
        let mut mappings = self.mappings(offset, len);
        let Some(first) = mappings.next() else {
            return len;
        };
        let is_host = |mapping: &Mapping| mapping.location().is_host();
        let is_registered = first.is_registered();
        let other = mappings.find(|next| is_registered || is_host(next) != is_host(first));
        other.map_or(len, |mapping| up_to(mapping, offset))
    }

    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        let next = self.mappings(offset, len).nth(1);
        Some(next.map_or(len, |mapping| up_to(mapping, offset)))
    }
}

/// Returns the bytes from `offset` to the mapping: 0 if it begins before, which it does only if mappings are out of order.
fn up_to(mapping: &Mapping, offset: u64) -> u64 {
    mapping.range().start.saturating_sub(offset)
}

/// Physical memories mapped side by side in one reservation, unmapped and released when dropped.
///
/// `P` owns a physical memory, or shares one with others. When dropped, the last part is unmapped and its memory released,
/// then the one before it, and so on: other processes wait longer for releases that follow one another without a pause
/// (docs/driver-behaviour.md).
///
/// ```
/// use egmem::driver::{Access, AccessDesc, Location, NodeId};
/// use egmem::vmm::{MappedRange, PhysicalMemory};
/// use egmem::{Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200x4())?; // Driver::open() on a real machine
/// let parts = [0, 1].map(|node| PhysicalMemory::options(NodeId(node)).create(&driver, 2 << 20));
/// let parts = parts.into_iter().collect::<egmem::Result<_>>()?;
/// let host = AccessDesc::new(Location::Host, Access::ReadWrite);
/// let range = MappedRange::map(&driver, parts, &[host])?;
/// range.cpu(4 << 20)?.write_at((2 << 20) - 1, &[1_u8, 2])?; // on both nodes
/// assert_eq!(range.mappings()[1].cpu()?.get::<u8>(0)?, 2);
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Debug)]
pub struct MappedRange<P = PhysicalMemory> {
    /// Side by side, in the order of addresses.
    mappings: SmallVec<[Mapping; 1]>,
    /// The memory of each mapping.
    parts: SmallVec<[P; 1]>,
    start: DevicePtr,
    /// The sum of the mappings' sizes.
    padded: u64,
    /// The least that the host may do with a mapping.
    host: Access,
}

impl<P: AsRef<PhysicalMemory>> MappedRange<P> {
    /// Maps `parts` in this order and grants all of them alike. If a step fails, those before it are undone: the part whose
    /// step failed and those behind it are released before the others are unmapped, which depend on none of them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no part, for parts of several drivers and for a sum of sizes beyond 64
    /// bits; those of [`ReservationOptions::reserve`](super::ReservationOptions::reserve),
    /// [`Reservation::map`] and [`Mapping::set_access`].
    pub fn map(driver: &Driver, parts: Vec<P>, access: &[AccessDesc]) -> Result<Self> {
        Self::map_or(driver, parts, access, &[])
    }

    /// As [`map`](Self::map); a part to which the driver refuses `access` is granted `instead`, unless that
    /// is empty.
    ///
    /// # Errors
    /// As [`map`](Self::map). If both are refused, the error is that of `access`.
    pub fn map_or(
        driver: &Driver,
        parts: Vec<P>,
        access: &[AccessDesc],
        instead: &[AccessDesc],
    ) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::invalid("parts", "the list is empty"));
        };
        let options = Reservation::options().backing(first.as_ref().backing());
        let mut sizes = parts.iter().map(|part| part.as_ref().size().padded());
        let padded = sizes
            .try_fold(0_u64, u64::checked_add)
            .ok_or_else(|| Error::invalid("parts", "their sum exceeds the address space"))?;
        let reservation = Arc::new(options.reserve(driver, padded)?);
        let mut range = Self::with_capacity(parts.len());
        for memory in parts {
            // `as_ref` is the user's code, and may return another memory than before: the mapping's size counts.
            let mut mapping = reservation.map(range.padded, memory.as_ref())?;
            if let Err(error) = mapping.set_access(access)
                && (instead.is_empty() || mapping.set_access(instead).is_err())
            {
                return Err(error);
            }
            range.push(MappedPart { mapping, memory });
        }
        Ok(range)
    }
}

impl<P> MappedRange<P> {
    /// Begins a range, to which so many parts are added.
    #[inline]
    pub(crate) fn with_capacity(parts: usize) -> Self {
        Self {
            mappings: SmallVec::with_capacity(parts),
            parts: SmallVec::with_capacity(parts),
            start: DevicePtr(0),
            padded: 0,
            host: Access::ReadWrite,
        }
    }

    /// Adds a part, which is mapped behind those before it.
    #[inline]
    pub(crate) fn push(&mut self, part: MappedPart<P>) {
        let MappedPart { mapping, memory } = part;
        self.start = mapping.reservation().start();
        self.padded = mapping.range().end;
        self.host = self.host.min(mapping.host());
        self.mappings.push(mapping);
        self.parts.push(memory);
    }

    /// Returns the mappings, in the order of addresses.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// Returns the physical memories, in the same order.
    pub fn parts(&self) -> &[P] {
        &self.parts
    }

    /// Returns the first mapping.
    pub fn first(&self) -> &Mapping {
        // Never empty: `map_or` refuses that, and a buffer has a chunk.
        &self.mappings[0]
    }

    /// Returns the first address.
    pub const fn start(&self) -> DevicePtr {
        self.start
    }

    /// Returns the size in bytes, in whole granules.
    pub const fn padded(&self) -> u64 {
        self.padded
    }

    /// Changes the access of locations, part by part. See [`Mapping::set_access`].
    ///
    /// # Errors
    /// As [`Mapping::set_access`]; the parts before the failing one are changed then.
    pub fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        self.set_access_at(0, self.padded, access)
    }

    /// As [`set_access`](Self::set_access), for the parts that `len` bytes from `offset` on are, padding included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that begins or ends inside a part; [`Error::OutOfRange`]; as
    /// [`set_access`](Self::set_access).
    pub fn set_access_at(&mut self, offset: u64, len: u64, access: &[AccessDesc]) -> Result<()> {
        check_range(offset, len, self.padded)?;
        let first = self.parts_before(offset)?;
        let last = self.parts_before(offset + len)?;
        let mut mappings = self.mappings[first..last].iter_mut();
        let result = mappings.try_for_each(|mapping| mapping.set_access(access));
        let hosts = self.mappings.iter().map(Mapping::host);
        self.host = hosts.min().unwrap_or(Access::None);
        result
    }

    /// Returns how many parts end at `offset` or before, if a part begins or the last one ends there.
    fn parts_before(&self, offset: u64) -> Result<usize> {
        let before = |mapping: &Mapping| mapping.range().end <= offset;
        let parts = self.mappings.partition_point(before);
        match self.mappings.get(parts).map(Mapping::range) {
            Some(next) if next.start != offset => {
                let why = format!("byte {offset} is inside a part, whose access cannot be divided");
                let valid = format!(
                    "boundaries of parts, such as {} and {}",
                    next.start, next.end
                );
                Err(Error::invalid_of("range", why, valid))
            }
            _ => Ok(parts),
        }
    }

    /// Notes that something besides GPUs may write the memory from now on.
    pub(crate) fn note_other_writers(&mut self) {
        self.mappings
            .iter_mut()
            .for_each(Mapping::note_other_writers);
    }

    /// Notes in the ledger that a handle of the `len` bytes from `offset` on was exported, which has no identity.
    pub(crate) fn note_export(&self, offset: u64, len: u64) {
        self.all()
            .holding(offset, len)
            .iter()
            .for_each(Mapping::note_export);
    }

    /// Returns the CPU's view of the first `len` bytes. See [`cpu_at`](Self::cpu_at).
    ///
    /// # Errors
    /// As `cpu_at`.
    pub fn cpu(&self, len: u64) -> Result<CpuView<'_>> {
        self.cpu_at(0, len)
    }

    /// Returns the CPU's view of `len` bytes from `offset` on, which may include padding. Only the parts that contain
    /// some of them count.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read these parts; [`Error::OutOfRange`].
    pub fn cpu_at(&self, offset: u64, len: u64) -> Result<CpuView<'_>> {
        check_range(offset, len, self.padded)?;
        // SAFETY: the mappings are adjacent, and mapped with this host access until `set_access` or `drop`,
        // which need `self` exclusively; safe code reaches the bytes through atomic views only.
        unsafe {
            match self.host {
                Access::ReadWrite => CpuView::granted(self.start.add(offset), len, self.host),
                _ => self.all().cpu(self.start, offset, len),
            }
        }
    }

    /// Returns the mappings, to be asked together.
    pub(crate) fn all(&self) -> Adjacent<'_, Mapping> {
        // SAFETY: `push` adds only mappings that lie so, and nothing removes one.
        unsafe { Adjacent::new(&self.mappings) }
    }
}

access_checks!(unsafe impl [P] for MappedRange<P>, |this| this.all());

impl<P> Drop for MappedRange<P> {
    fn drop(&mut self) {
        // From the end, where a reservation forgets a mapping at once.
        while let Some(mapping) = self.mappings.pop() {
            drop(mapping);
            drop(self.parts.pop());
        }
    }
}
