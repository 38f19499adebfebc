//! Physical memory, mapped and granted at reserved addresses.

use std::ops::Range;
use std::sync::Arc;

use super::pages::PagesMapping;
use super::physical::Origin;
use super::{PhysicalMemory, Reservation};
use crate::driver::{Access, AccessDesc, Code, DevicePtr, Location};
use crate::guard::{explain_access, name_missing};
use crate::ledger::AccessList;
use crate::memory::{
    AccessChecks, CpuView, Engine, Memory, check_range, impl_cpu_memory, impl_memory,
};
use crate::size::PaddedSize;
use crate::teardown::{give_back, give_back_or_log};
use crate::{Error, Result};

impl PhysicalMemory {
    /// Maps the whole memory at addresses of the driver's choice, without access for any location yet.
    ///
    /// # Errors
    /// The driver's errors; nothing stays reserved then.
    pub fn map(&self) -> Result<Mapping> {
        let options = Reservation::options().backing(self.backing());
        Arc::new(options.reserve(self.driver(), self.size().padded())?).map(0, self)
    }
}

impl Reservation {
    /// Maps all of `physical` at `offset` bytes into the range, without access for any location yet.
    ///
    /// Source: `cuMemMap`. The same memory may be mapped more than once.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if it does not fit there; [`Error::InvalidArgument`] if the memory is another
    /// driver's; the driver's INVALID_VALUE if something is mapped already.
    pub fn map(self: &Arc<Self>, offset: u64, physical: &PhysicalMemory) -> Result<Mapping> {
        let mut mapping = Arc::clone(self).map_last(offset, physical)?;
        mapping.note_grants(AccessList::new(), true);
        Ok(mapping)
    }

    /// As [`map`](Self::map), for a caller that maps nothing else in the range. The ledger learns of the mapping when access
    /// is set.
    #[inline]
    pub(crate) fn map_last(
        self: Arc<Self>,
        offset: u64,
        physical: &PhysicalMemory,
    ) -> Result<Mapping> {
        physical
            .driver()
            .expect_same(self.driver(), "physical memory")?;
        let size = physical.size();
        check_range(offset, size.padded(), self.size())?;
        let start = self.start().add(offset);
        let origin = physical.origin();
        let pages = match (self.addresses(), physical.handle(), &origin.pages) {
            (None, Some(handle), None) => {
                // SAFETY: the range is inside the reservation, and the driver refuses one that is in use.
                unsafe { self.driver().mem_map(start, size.padded(), 0, handle)? };
                None
            }
            (Some(addresses), None, Some(pages)) => {
                let range = start.0..start.0 + size.padded();
                let pages = PagesMapping::new(self.driver(), addresses, pages, range)?;
                Some(Box::new(pages))
            }
            _ => {
                let why = format!(
                    "its addresses are for {} memory, and this is {} memory",
                    self.backing(),
                    physical.backing()
                );
                return Err(Error::invalid("reservation", why));
            }
        };
        Ok(Mapping {
            reservation: self,
            start,
            host: Access::None,
            granted_to_gpus: false,
            unmapped: false,
            pages,
            origin,
        })
    }
}

/// Physical memory mapped at an address, unmapped when dropped.
///
/// No location has access until [`set_access`](Self::set_access) grants it. Before a mapping is dropped, GPU
/// work that uses it must have finished: a GPU that accesses unmapped addresses loses its context.
#[derive(Debug)]
pub struct Mapping {
    reservation: Arc<Reservation>,
    start: DevicePtr,
    host: Access,
    /// Whether a grant to a GPU was ever attempted: work in flight may use the access.
    granted_to_gpus: bool,
    unmapped: bool,
    /// The mapping of pages of this process; `None` if the driver maps the memory.
    pages: Option<Box<PagesMapping>>,
    /// The physical memory's, whose mappings its clones count.
    origin: Arc<Origin>,
}

impl Mapping {
    /// Changes the access of the given locations for the whole mapping.
    ///
    /// Source: `cuMemSetAccess`, in one call; for registered memory `cuMemHostRegister` and `mprotect`. The host is
    /// [`Location::Host`] or any host node. The driver refuses a GPU that cannot reach the memory.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`]; [`Error::NoPeerAccess`] for a GPU that cannot access the memory of another one;
    /// [`Error::TooManyReferences`] if the host is refused because the memory is shared too often;
    /// [`Error::TooManyMappings`] if the kernel allows the process no more mappings;
    /// [`Error::InvalidArgument`] in a forked child, whose memory it is not, and for a GPU that is to have less than read-write
    /// access to registered memory; [`Error::System`] if the kernel refuses the CPU's access to registered memory; or the
    /// driver's: NOT_SUPPORTED for the host if it cannot reach a GPU's memory.
    pub fn set_access(&mut self, access: &[AccessDesc]) -> Result<()> {
        let before = self.host;
        Self::set_access_together(&mut [self], access).map_err(|error| {
            match explain_access(self.driver(), error, self.location(), access) {
                Error::Driver(source) if self.is_refused_to_host(source.code, access, before) => {
                    Error::TooManyReferences { source }
                }
                other => other,
            }
        })
    }

    /// Changes the access of adjacent mappings of one reservation, by ascending addresses.
    ///
    /// After an error the caller can still use [`set_access`](Self::set_access) for each, which also gives
    /// the reason: the drivers measured accept a range of several whole mappings, but CUDA's documentation
    /// does not promise it.
    ///
    /// Source: `cuMemSetAccess`, in one call; for registered memory as [`set_access`](Self::set_access), one mapping after
    /// another.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for mappings that are not adjacent, of several reservations or at several locations, and in
    /// a forked child; the driver's. Of registered memory, the mappings before the refused one have the new access then.
    pub fn set_access_together(mappings: &mut [&mut Self], access: &[AccessDesc]) -> Result<()> {
        let (Some(first), false) = (mappings.first(), access.is_empty()) else {
            let nothing = |mapping: &mut &mut Self| mapping.note_grants(AccessList::new(), true);
            mappings.iter_mut().for_each(nothing);
            return Ok(());
        };
        let (start, location, driver) = (first.start, first.location(), first.driver());
        let reservation = &first.reservation;
        driver.expect_this_process("mapping")?;
        let mut size = 0;
        for mapping in mappings.iter() {
            driver.expect_same(mapping.driver(), "mapping")?;
            // One reservation has memory of one backing, whose access one kind of call changes.
            if !Arc::ptr_eq(&mapping.reservation, reservation) {
                return Err(Error::invalid(
                    "mappings",
                    "they are of several reservations",
                ));
            }
            if mapping.start != start.add(size) || mapping.location() != location {
                let why = "they are not side by side, or on several nodes";
                return Err(Error::invalid("mappings", why));
            }
            size += mapping.size().padded();
        }
        let own = first.own_terms(access);
        if first.pages.is_some() {
            // Each mapping is changed by calls of its own. It notes its access before a later one is refused.
            return mappings.iter_mut().try_for_each(|mapping| {
                let granted = match &mapping.pages {
                    Some(pages) => pages.grant(mapping.driver(), &own),
                    None => Ok(()),
                };
                mapping.note_grants(own.clone(), granted.is_ok());
                granted
            });
        }
        // SAFETY: the mappings are exclusively borrowed, so they have no views; as just checked they are the whole range.
        let result = unsafe { driver.mem_set_access(start, size, &own) };
        match mappings {
            [one] => one.note_grants(own, result.is_ok()),
            all => all
                .iter_mut()
                .for_each(|mapping| mapping.note_grants(own.clone(), result.is_ok())),
        }
        result
    }

    /// Notes the access after a call to change it, here and in the ledger.
    fn note_grants(&mut self, mut own: AccessList, granted: bool) {
        let is_of_host = |desc: &&AccessDesc| desc.location.is_host();
        let names_host = own.iter().any(|desc| is_of_host(&desc));
        let mut gpus = own.iter().filter(|desc| !is_of_host(desc));
        self.granted_to_gpus |= gpus.any(|desc| desc.access != Access::None);
        if !granted {
            // CUDA does not document the access after a failed call.
            own.retain(|desc| {
                let has = self.access(desc.location);
                has.map(|has| desc.access = has).is_ok()
            });
        }
        if names_host {
            let host = own.iter().find(is_of_host);
            self.host = host.map_or(Access::None, |desc| desc.access);
        }
        if let Some(pages) = &self.pages {
            own.extend(pages.gpus());
        }
        let bytes = self.origin.size.padded();
        self.origin.entry.grant(self.start, bytes, own);
    }

    /// Returns whether only the host is refused this access, with INVALID_VALUE: drivers do that for host
    /// memory only if it is shared too often (docs/driver-behaviour.md).
    fn is_refused_to_host(&mut self, code: Code, access: &[AccessDesc], before: Access) -> bool {
        let host = access.iter().rfind(|desc| desc.location.is_host());
        let Some(wanted) = host.filter(|desc| desc.access != Access::None) else {
            return false;
        };
        if code != Code::INVALID_VALUE || !self.location().is_host() {
            return false;
        }
        match Self::set_access_together(&mut [self], &[*wanted]) {
            Err(error) => error.code() == Some(code),
            Ok(()) => {
                // A GPU was the cause: a refused call must change nothing.
                let before = AccessDesc::new(Location::Host, before);
                // If that is refused, the ledger has the access that the driver reports.
                let _ = Self::set_access_together(&mut [self], &[before]);
                false
            }
        }
    }

    /// Returns the access of `location` to the mapping, as the driver reports it.
    ///
    /// Source: `cuMemGetAccess`. Every name of the host means the CPU.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`], the driver's errors, and [`Error::InvalidArgument`] for flags that this crate
    /// does not know.
    pub fn access(&self, location: Location) -> Result<Access> {
        if let Some(pages) = &self.pages {
            return match location {
                Location::Device(gpu) => pages.access(gpu),
                _ => Ok(self.host),
            };
        }
        let flags = self
            .driver()
            .mem_get_access(self.host_terms(location), self.start)
            .map_err(|error| name_missing(self.driver(), error, location))?;
        Access::from_flags(flags)
            .ok_or_else(|| Error::invalid_of("access flags", format!("{flags:#x}"), "0, 1 or 3"))
    }

    /// Returns the CPU's view of the bytes requested.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        self.view(self.origin.size.requested())
    }

    /// Returns the CPU's access, as last granted through this mapping.
    pub const fn host(&self) -> Access {
        self.host
    }

    /// Returns the CPU's view of the whole mapping, including padding.
    ///
    /// # Errors
    /// As [`cpu`](Self::cpu).
    pub fn padded_cpu(&self) -> Result<CpuView<'_>> {
        self.view(self.origin.size.padded())
    }

    fn view(&self, len: u64) -> Result<CpuView<'_>> {
        // SAFETY: at most the whole range, which is mapped with this host access until `set_access` or `drop`,
        // which need `self` exclusively; safe code reaches it through atomic views only.
        unsafe { CpuView::granted(self.start, len, self.host) }
    }

    /// Unmaps the memory. If the driver refuses, the mapping is unchanged.
    ///
    /// # Errors
    /// The driver's error, and the mapping.
    pub fn unmap(mut self) -> Result<(), Box<(Self, Error)>> {
        self.unmapped = true;
        let result = give_back(self.driver(), "a mapping", || self.unmap_once());
        result.map_err(|error| {
            self.unmapped = false;
            Box::new((self, error))
        })
    }

    fn unmap_once(&self) -> Result<()> {
        let addresses = self.reservation.addresses();
        if let (Some(mapping), Some(pages), Some(addresses)) =
            (&self.pages, &self.origin.pages, addresses)
        {
            return mapping.unmap(self.driver(), addresses, pages);
        }
        // SAFETY: `self` owns the range and is being dropped; views of it borrow `self`, so none exist.
        unsafe {
            self.driver()
                .mem_unmap(self.start, self.origin.size.padded())
        }
    }

    /// Notes that something besides GPUs may write the memory from now on: it counts as granted to them.
    pub(super) const fn note_other_writers(&mut self) {
        self.granted_to_gpus = true;
    }

    /// Notes in the ledger that a handle of mapped bytes was exported.
    pub(super) fn note_export(&self) {
        self.origin.entry.exported(None);
    }

    /// Returns whether a grant to a GPU was ever attempted.
    pub const fn was_granted_to_gpus(&self) -> bool {
        self.granted_to_gpus
    }

    /// Returns whether the memory is registered pages, of which one copy by the driver takes no more than this mapping.
    pub(super) const fn is_registered(&self) -> bool {
        self.pages.is_some()
    }

    /// Returns the size requested and the size mapped.
    pub fn size(&self) -> PaddedSize {
        self.origin.size
    }

    /// Returns where it lies in its reservation, in bytes from the start.
    pub fn range(&self) -> Range<u64> {
        let offset = self.start.0 - self.reservation.start().0;
        offset..offset + self.origin.size.padded()
    }

    /// Returns the mapping's reservation.
    pub const fn reservation(&self) -> &Arc<Reservation> {
        &self.reservation
    }

    /// Maps every name of the host to one: the memory's own node. Drivers accept other names too, but for
    /// HOST they have been seen to report the lesser of GPU 0's and the CPU's access.
    fn host_terms(&self, location: Location) -> Location {
        match (location.is_host(), self.location()) {
            (false, _) => location,
            (true, Location::HostNuma(node)) => Location::HostNuma(node),
            (true, _) => Location::HostNuma(0),
        }
    }

    /// Returns grants in the form for the driver. Of several to one location the last one counts.
    fn own_terms(&self, access: &[AccessDesc]) -> AccessList {
        let mut own = AccessList::with_capacity(access.len());
        for desc in access {
            let desc = AccessDesc::new(self.host_terms(desc.location), desc.access);
            match own.iter_mut().find(|known| known.location == desc.location) {
                Some(known) => *known = desc,
                None => own.push(desc),
            }
        }
        own
    }
}

impl_cpu_memory!(Mapping);

// SAFETY: the driver answers for the range, which is mapped until this is dropped.
unsafe impl AccessChecks for Mapping {
    fn gpu_access(&self, gpu: i32, _: Engine, _: u64, _: u64) -> Result<Access> {
        self.access(Location::Device(gpu))
    }

    fn may_be_on_host(&self, _: u64, _: u64) -> bool {
        self.location().is_host()
    }

    fn of_one_mapping(&self, _offset: u64, len: u64) -> Option<u64> {
        Some(len)
    }

    fn is_read_only_for_cpu(&self, _: u64, _: u64) -> bool {
        self.host == Access::Read
    }
}

impl_memory! { for Mapping, |this| this.reservation.driver(), this.start, this.origin.size.requested(), this.origin.props.location }

impl Drop for Mapping {
    /// The ledger's entry loses the addresses before the reservation does, so that no other entry has them meanwhile.
    fn drop(&mut self) {
        let entry = &self.origin.entry;
        if self.unmapped || !give_back_or_log(self.driver(), "a mapping", || self.unmap_once()) {
            return entry.unmap(self.start);
        }
        entry.lost(self.driver());
        if let Some(addresses) = self.reservation.addresses() {
            addresses.keep();
        }
    }
}
