//! Several physical memories at one range of addresses.

mod growing;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::{Adjacent, Mapping, PhysicalMemory, Reservation};
use crate::driver::{Access, AccessDesc, DevicePtr, Driver};
use crate::memory::{AccessChecks, CpuView, Engine, check_range};
use crate::{Error, Result};

pub use growing::GrowingRange;

/// Physical memories mapped side by side in one reservation, unmapped and released when dropped.
///
/// `P` owns a physical memory, or shares one with others.
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
    /// Adjacent, in the order of addresses; at least one.
    pairs: Pairs<P>,
    start: DevicePtr,
    /// The sum of the mappings' sizes.
    padded: u64,
    /// The least that the host may do with a mapping.
    host: Access,
}

impl<P: AsRef<PhysicalMemory>> MappedRange<P> {
    /// Maps `parts` in this order and grants all of them alike. If a step fails, those before it are undone.
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
        let grant = |mapping: &mut Mapping| {
            let result = mapping.set_access(access);
            if instead.is_empty() {
                return result;
            }
            result.or_else(|error| mapping.set_access(instead).map_err(|_| error))
        };
        // Asked once: `as_ref` is the user's code, and may return another memory the next time.
        let memories: Vec<&PhysicalMemory> = parts.iter().map(AsRef::as_ref).collect();
        if memories.is_empty() {
            return Err(Error::invalid("parts", "the list is empty"));
        }
        let mut sizes = memories.iter().map(|memory| memory.size().padded());
        let padded = sizes
            .try_fold(0_u64, u64::checked_add)
            .ok_or_else(|| Error::invalid("parts", "their sum exceeds the address space"))?;
        let options = Reservation::options().backing(memories[0].backing());
        let reservation = Arc::new(options.reserve(driver, padded)?);
        let mut mappings = Vec::with_capacity(memories.len());
        let mut offset = 0;
        let result: Result<()> = memories.into_iter().try_for_each(|memory| {
            let mut mapping = reservation.map(offset, memory)?;
            grant(&mut mapping)?;
            offset += mapping.size().padded();
            mappings.push(mapping);
            Ok(())
        });
        // Before an error is returned: pairs are undone one after the other.
        let pairs = Pairs { mappings, parts };
        result?;
        Ok(Self {
            start: reservation.start(),
            padded,
            host: least(&pairs.mappings),
            pairs,
        })
    }
}

impl<P> MappedRange<P> {
    /// Returns the mappings, in the order of addresses.
    pub fn mappings(&self) -> &[Mapping] {
        &self.pairs.mappings
    }

    /// Returns the physical memories, in the same order.
    pub fn parts(&self) -> &[P] {
        &self.pairs.parts
    }

    /// Returns the first mapping.
    pub fn first(&self) -> &Mapping {
        // Never empty: `map_or` refuses that.
        &self.pairs.mappings[0]
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
        let mut mappings = self.pairs.mappings[first..last].iter_mut();
        let result = mappings.try_for_each(|mapping| mapping.set_access(access));
        self.host = least(&self.pairs.mappings);
        result
    }

    /// Returns how many parts end at `offset` or before, if a part begins or the last one ends there.
    fn parts_before(&self, offset: u64) -> Result<usize> {
        let before = |mapping: &Mapping| mapping.range().end <= offset;
        let parts = self.pairs.mappings.partition_point(before);
        match self.pairs.mappings.get(parts).map(Mapping::range) {
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
        self.pairs
            .mappings
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

    /// Returns the CPU's view of the first `len` bytes, which may include padding.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read all parts; [`Error::OutOfRange`].
    pub fn cpu(&self, len: u64) -> Result<CpuView<'_>> {
        check_range(0, len, self.padded)?;
        self.view(0, len, self.host)
    }

    /// Returns the CPU's view of `len` bytes from `offset` on, which may include padding. Only the parts that contain
    /// some of them count.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read these parts; [`Error::OutOfRange`].
    pub fn cpu_at(&self, offset: u64, len: u64) -> Result<CpuView<'_>> {
        check_range(offset, len, self.padded)?;
        if self.host == Access::ReadWrite {
            return self.view(offset, len, self.host);
        }
        // SAFETY: as in `view`.
        unsafe { self.all().cpu(self.start, offset, len) }
    }

    /// The range has been checked, and `have` is the least that the host may do there.
    fn view(&self, offset: u64, len: u64, have: Access) -> Result<CpuView<'_>> {
        // SAFETY: the mappings are adjacent, and mapped with this host access until `set_access` or `drop`,
        // which need `self` exclusively; safe code reaches the bytes through atomic views only.
        unsafe { CpuView::granted(self.start.add(offset), len, have) }
    }

    fn all(&self) -> Adjacent<'_, Mapping> {
        Adjacent(&self.pairs.mappings)
    }
}

// SAFETY: the mappings live as long as this, and a range that is forgotten stays mapped. The driver answers for them, and
// grants change only through `&mut self`. Safe code reaches the bytes by a `CpuView` alone.
unsafe impl<P> AccessChecks for MappedRange<P> {
    fn gpu_access(&self, gpu: i32, _: Engine, offset: u64, len: u64) -> Result<Access> {
        check_range(offset, len, self.padded)?;
        self.all().gpu_access(gpu, offset, len)
    }

    fn is_read_only_for_cpu(&self, offset: u64, len: u64) -> bool {
        self.all().is_read_only_for_cpu(offset, len)
    }

    fn may_be_on_host(&self, offset: u64, len: u64) -> bool {
        self.all().may_be_on_host(offset, len)
    }

    fn of_one_copy(&self, offset: u64, len: u64) -> u64 {
        self.all().of_one_copy(offset, len)
    }

    fn of_one_mapping(&self, offset: u64, len: u64) -> Option<u64> {
        Some(self.all().of_one_mapping(offset, len))
    }
}

/// Returns the least that the host may do with any of the mappings.
fn least(mappings: &[Mapping]) -> Access {
    let hosts = mappings.iter().map(Mapping::host);
    hosts.min().unwrap_or(Access::None)
}

/// Mappings, and the memory of each in the same order. Memory behind the last mapping is not mapped.
///
/// When dropped, the first mapping is unmapped and its memory released, then the second, and so on: other processes wait
/// longer for releases that follow one another without a pause (docs/driver-behaviour.md).
#[derive(Debug)]
struct Pairs<P> {
    pub mappings: Vec<Mapping>,
    pub parts: Vec<P>,
}

impl<P> Drop for Pairs<P> {
    fn drop(&mut self) {
        for (mapping, part) in self.mappings.drain(..).zip(self.parts.drain(..)) {
            drop(mapping);
            drop(part);
        }
    }
}
