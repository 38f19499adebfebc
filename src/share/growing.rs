//! Memory of another process that comes in steps.

use std::sync::Arc;

use super::cache::Cached;
use super::import::PartKey;
use super::{Description, ImportOptions, Offer, PartHandles};
use crate::driver::{DevicePtr, Driver, Location, ShareableHandle};
use crate::memory::{CpuView, access_checks, check_range, impl_cpu_memory, impl_memory};
use crate::vmm::{Adjacent, Mapped, MappedPart, PhysicalMemory, Reservation};
use egmem_core::{Error, Result};

/// Memory that another process shares step by step, mapped side by side at one range of addresses, which is reserved
/// at the start: mapped memory keeps its address while more is added. All of it is of one kind
/// ([`Backing`](egmem_core::Backing)), that of the first part.
///
/// A clone has the memory that was there when it was made, for a GPU or another thread, while more is added to the
/// original. Each part is unmapped when its last clone is dropped; GPU work that uses it must have finished by then.
///
/// ```
/// use egmem::driver::{Access, HandleType, NodeId};
/// use egmem::share::{GrowingImport, ImportOptions, Shared};
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let mut all = GrowingImport::reserve(&driver, 1 << 30)?;
/// for step in 0..3_u64 {
///     // The exporter:
///     let buffer = Buffer::on(NodeId(0)).bytes(2 << 20).shareable().allocate(&driver)?;
///     buffer.put(0, step)?;
///     let shared = Shared::from(buffer);
///     let handles = shared.export(HandleType::PosixFd)?;
///     // The importer, which received both, for instance by `Channel::receive`:
///     all.add(&shared.describe(Access::Read)?, handles, &ImportOptions::new())?;
/// }
/// assert_eq!((all.len(), all.cpu()?.get::<u64>(4 << 20)?), (6 << 20, 2));
/// # Ok::<(), egmem::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GrowingImport {
    /// In the order of addresses, without gaps. Each keeps the addresses.
    parts: Vec<Arc<Part>>,
    reservation: Arc<Reservation>,
    driver: Driver,
    /// The sum of the parts' bytes.
    mapped: u64,
}

type Part = MappedPart<Cached<PartKey, PhysicalMemory>>;

impl GrowingImport {
    /// Reserves addresses for `bytes`, rounded up to 2 MiB. That takes no memory.
    ///
    /// # Errors
    /// Those of [`ReservationOptions::reserve`](crate::vmm::ReservationOptions::reserve).
    pub fn reserve(driver: &Driver, bytes: u64) -> Result<Self> {
        Ok(Self {
            parts: Vec::new(),
            reservation: Arc::new(Reservation::options().reserve(driver, bytes)?),
            driver: driver.clone(),
            mapped: 0,
        })
    }

    /// Imports memory and maps it behind the memory mapped so far. If a step fails, nothing is added.
    /// Memory that this process has imported already from the same [`Origin`](super::Origin) is not imported again.
    ///
    /// # Errors
    /// As [`ImportOptions::import`]; [`Error::InvalidArgument`] for a description of less than whole parts, for memory of
    /// another kind than before, and in a forked child; [`Error::OutOfRange`] beyond the addresses; the driver's
    /// INVALID_VALUE, or [`Error::InvalidArgument`], where a clone has added memory there.
    #[track_caller]
    pub fn add(
        &mut self,
        description: &Description,
        handles: Vec<ShareableHandle>,
        options: &ImportOptions,
    ) -> Result<()> {
        self.add_from(description, handles.into(), options)
    }

    #[track_caller]
    fn add_from(
        &mut self,
        description: &Description,
        handles: PartHandles,
        options: &ImportOptions,
    ) -> Result<()> {
        self.driver.expect_this_process("imported memory")?;
        description.check()?;
        let all = description.padded();
        if description.offset.unwrap_or(0) != 0 || description.len != all {
            let why = format!("{} bytes of parts of {all}", description.len);
            return Err(Error::invalid_of("description", why, "whole parts"));
        }
        check_range(self.mapped, all, self.reservation.size())?;
        let (parts, _) = options.import_parts(&self.driver, description, handles)?;
        let (access, _) = options.resolve(&self.driver, description, &parts)?;
        let mut reservation = Arc::clone(&self.reservation);
        let backing = parts[0].backing();
        if self.parts.is_empty() && backing != reservation.backing() {
            // Memory of the other kind needs other addresses than those from the start.
            let options = Reservation::options().backing(backing);
            reservation = Arc::new(options.reserve(&self.driver, reservation.size())?);
        }
        let mut offset = self.mapped;
        let mut added = Vec::with_capacity(parts.len());
        for memory in parts {
            let part = Part::map(&reservation, offset, memory, &access)?;
            offset = part.mapping().range().end;
            added.push(Arc::new(part));
        }
        self.parts.extend(added);
        self.reservation = reservation;
        self.mapped = offset;
        Ok(())
    }

    /// As [`add`](Self::add), for memory received over a channel. By default the other process's user is the origin.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    #[track_caller]
    pub fn add_offer(&mut self, offer: Offer, options: &ImportOptions) -> Result<()> {
        let options = offer.with_sender(options.clone());
        self.add_from(&offer.description, offer.handles, &options)
    }

    /// Returns the bytes that are mapped.
    pub const fn len(&self) -> u64 {
        self.mapped
    }

    /// Returns whether no memory has come yet.
    pub const fn is_empty(&self) -> bool {
        self.mapped == 0
    }

    /// Returns the number of parts.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Returns the first address. It never changes once there is memory: the kind of the first part may need other
    /// addresses than those reserved at the start.
    pub fn device_ptr(&self) -> DevicePtr {
        self.reservation.start()
    }

    /// Returns the CPU's view of all bytes that are mapped.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read all of them.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        self.cpu_at(0, self.mapped)
    }

    /// Returns the CPU's view of `len` bytes from `offset` on. Only the parts that contain some of them count.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read these parts; [`Error::OutOfRange`].
    pub fn cpu_at(&self, offset: u64, len: u64) -> Result<CpuView<'_>> {
        check_range(offset, len, self.mapped)?;
        // SAFETY: the parts are adjacent, have these bytes, and are mapped with this host access while `self` has
        // them: no function changes their access.
        unsafe { self.all().cpu(self.device_ptr(), offset, len) }
    }

    fn all(&self) -> Adjacent<'_, Arc<Part>> {
        // SAFETY: each part is mapped behind those before it.
        unsafe { Adjacent::new(&self.parts) }
    }
}

impl_cpu_memory!(GrowingImport);

access_checks!(unsafe impl for GrowingImport, |this| this.all());

impl_memory! {
    /// Returns the location of the first part; the host while there is none.
    for GrowingImport, |this| &this.driver, this.device_ptr(), this.mapped,
    this.parts.first().map_or(Location::Host, |part| part.mapping().location())
}

#[cfg(test)]
mod tests {
    use egmem_core::{Buffer, Machine};

    use super::*;
    use crate::driver::{Access, Call, Code, HandleType, NodeId};
    use crate::{Memory, Shared};

    const MIB: u64 = 1 << 20;

    /// Adds `bytes` of new memory, which begins with `word`.
    fn add(all: &mut GrowingImport, bytes: u64, word: u64) -> Result<()> {
        let options = Buffer::on(NodeId(0)).bytes(bytes).shareable();
        let buffer = options.allocate(all.driver())?;
        buffer.put(0, word)?;
        let shared = Shared::from(buffer);
        let handles = shared.export(HandleType::PosixFd)?;
        let description = shared.describe(Access::ReadWrite)?;
        all.add(&description, handles, &ImportOptions::new())
    }

    #[test]
    fn what_is_refused_adds_nothing() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let mut all = GrowingImport::reserve(&driver, 8 * MIB).unwrap();
        assert!(all.is_empty());
        add(&mut all, 2 * MIB, 1).unwrap();
        let error = add(&mut all, 3 * MIB, 2).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        let error = add(&mut all, 8 * MIB, 2).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
        let sim = driver.sim().unwrap();
        let held = sim.held();
        for call in [
            Call::MemImportFromShareableHandle,
            Call::MemMap,
            Call::MemSetAccess,
        ] {
            // The exporter's buffer is mapped and granted first.
            let nth = if call == Call::MemImportFromShareableHandle {
                1
            } else {
                2
            };
            sim.fail(call, nth, Code::UNKNOWN);
            let error = add(&mut all, 2 * MIB, 2).unwrap_err();
            assert_eq!(error.code(), Some(Code::UNKNOWN), "{call:?}");
            assert_eq!((all.len(), all.parts()), (2 * MIB, 1));
            assert_eq!(sim.held(), held);
        }
        add(&mut all, 4 * MIB, 3).unwrap();
        let view = all.cpu().unwrap();
        assert_eq!((view.get(0), view.get(2 * MIB)), (Ok(1_u64), Ok(3_u64)));
        let error = all.cpu_at(6 * MIB - 4, 8).unwrap_err();
        assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
        drop(all);
        assert!(sim.held().is_empty(), "{}", sim.held());
    }

    #[test]
    fn one_clone_follows() {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let mut all = GrowingImport::reserve(&driver, 8 * MIB).unwrap();
        add(&mut all, 2 * MIB, 1).unwrap();
        let mut before = all.clone();
        add(&mut all, 2 * MIB, 2).unwrap();
        let error = add(&mut before, 2 * MIB, 3).unwrap_err();
        assert_eq!(error.code(), Some(Code::INVALID_VALUE));
        drop(all);
        assert_eq!(before.cpu().unwrap().get(0), Ok(1_u64));
        // The place is free again.
        add(&mut before, 2 * MIB, 3).unwrap();
        assert_eq!(before.cpu().unwrap().get(2 * MIB), Ok(3_u64));
    }
}
