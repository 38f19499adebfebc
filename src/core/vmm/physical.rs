//! Physical memory: created or imported, exported, released.

mod options;

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU64, Ordering::Acquire, fence};
use std::sync::{Arc, OnceLock};

pub use options::PhysicalOptions;

use super::identity::{BootId, Identity, InstanceId};
use super::pages::{self, Pages};
use crate::backing::{Backing, Chosen, Why};
use crate::driver::Numbers;
use crate::driver::{
    AllocationProps, Driver, GranularityKind, HandleType, HandleTypes, Location, PhysicalHandle,
    ShareableHandle,
};
use crate::fork::PerProcess;
use crate::ledger::{AllocPath, Entry, Imported, Label, NewEntry, Party, Site};
use crate::size::{Granularity, PaddedSize};
use crate::teardown::{give_back, give_back_or_log, may_pass};
use crate::{Error, Result};

/// The state that physical memory and its mappings share.
#[derive(Debug)]
pub(super) struct Origin {
    pub(super) driver: Driver,
    pub(super) size: PaddedSize,
    pub(super) props: AllocationProps,
    /// Whether another process created the memory.
    imported: bool,
    /// The pages of this process that are the memory; `None` if the driver created it.
    pub(super) pages: Option<Pages>,
    /// Unique among the memories of this process. Drawn when it is first asked for: most memory is never shared.
    allocation: OnceLock<u64>,
    generation: AtomicU64,
    /// Lives as long as the memory does in this process: until the last mapping is gone too. Chunks of one allocation
    /// share it.
    pub(super) entry: Entry,
}

/// Physical memory on a host NUMA node or a GPU, released when dropped.
///
/// Mappings of it may outlive it: the driver keeps the memory until the last one is unmapped.
#[derive(Debug)]
pub struct PhysicalMemory {
    /// `None` if it is pages of this process, or was released or is lost.
    handle: Option<PhysicalHandle>,
    /// Every mapping of it in this process has a clone.
    origin: Arc<Origin>,
}

/// Numbers for identities, which peers see.
static NUMBERS: PerProcess<Numbers> = PerProcess::new();

impl PhysicalMemory {
    /// Imports memory that another process exported; `bytes` is its padded size there.
    ///
    /// Source: `cuMemImportFromShareableHandle`. The handle stays the caller's; an imported memory reports no
    /// handle types and cannot be exported again.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `bytes` is not a whole number of granules, and for registered memory that has not all of its
    /// pages; the driver's INVALID_VALUE or
    /// UNKNOWN for an fd that is not CUDA memory, NOT_SUPPORTED for a fabric handle that it cannot use.
    ///
    /// ```
    /// use egmem::driver::{Access, AccessDesc, HandleType, HandleTypes, Location, NodeId};
    /// use egmem::vmm::PhysicalMemory;
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let buffer = Buffer::on(NodeId(0))
    ///     .bytes(3 << 20)
    ///     .handle_types(HandleTypes::POSIX_FD)
    ///     .allocate(&driver)?;
    /// buffer.put(0, 42_u64)?;
    /// let physical = &buffer.physical()[0];
    /// let shared = physical.export(HandleType::PosixFd)?;
    /// let bytes = physical.size().padded();
    ///
    /// // Send the fd in `shared`, and `bytes`, over a Unix socket; in the other process:
    /// let imported = PhysicalMemory::import(&driver, &shared, bytes)?;
    /// let mut mapping = imported.map()?;
    /// mapping.set_access(&[
    ///     AccessDesc::new(Location::Host, Access::ReadWrite),
    ///     AccessDesc::new(Location::Device(0), Access::ReadWrite),
    /// ])?;
    /// assert_eq!(mapping.cpu()?.get::<u64>(0)?, 42);
    /// # Ok::<(), egmem::Error>(())
    /// ```
    #[track_caller]
    pub fn import(driver: &Driver, handle: &ShareableHandle, bytes: u64) -> Result<Self> {
        let pages = match handle {
            ShareableHandle::PosixFd(fd) => Pages::import(driver, fd.as_fd(), bytes)?,
            ShareableHandle::Fabric(_) => None,
        };
        let handle = match &pages {
            Some(_) => None,
            None => Some(driver.mem_import(handle)?),
        };
        let facts = match (&pages, handle) {
            (Some(pages), _) => Ok((pages::GRANULARITY, AllocationProps::at(pages.node().into()))),
            // SAFETY: the handle was imported above, and nothing has released it.
            (None, Some(handle)) => unsafe { facts_of(driver, handle) },
            (None, None) => Err(Error::invalid("handle", "it is of no memory")),
        };
        let facts = facts.and_then(|(granularity, props)| {
            if !granularity.divides(bytes) {
                let why = format!("{bytes} bytes is not a multiple of {}", granularity.bytes());
                return Err(Error::invalid("size", why));
            }
            Ok((PaddedSize::new(bytes, granularity)?, props))
        });
        // Owned in any case, so that it is released if something is wrong.
        let unknown = AllocationProps::at(Location::Host);
        let (size, props) = match &facts {
            Ok(known) => *known,
            Err(_) => (PaddedSize::new(1, Granularity::TWO_MIB)?, unknown),
        };
        let entry = Entry::new(NewEntry {
            driver,
            bytes,
            location: props.location,
            path: AllocPath::Import,
            label: None,
            site: Site::here(),
        });
        if pages.is_some() {
            entry.backed_by(&Chosen::registered(Why::Exporter));
        }
        let memory = Self::new(driver, handle, true, size, props, pages, entry);
        // Owned, so that it is released if something is wrong.
        facts.map(|_| memory)
    }

    #[inline]
    fn new(
        driver: &Driver,
        handle: Option<PhysicalHandle>,
        imported: bool,
        size: PaddedSize,
        props: AllocationProps,
        pages: Option<Pages>,
        entry: Entry,
    ) -> Self {
        let origin = Arc::new(Origin {
            driver: driver.clone(),
            size,
            props,
            imported,
            pages,
            allocation: OnceLock::new(),
            generation: AtomicU64::new(0),
            entry,
        });
        Self { handle, origin }
    }

    /// Exports the memory in a form that another process can import.
    ///
    /// Source: `cuMemExportToShareableHandle`. An importer keeps the memory alive, even after this process
    /// has ended. Pages of registered memory that was never mapped are created first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the memory was created without this handle type, or if the driver returns a handle of
    /// another type; the driver's errors.
    pub fn export(&self, handle_type: HandleType) -> Result<ShareableHandle> {
        if !self.origin.props.handle_types.contains(handle_type.into()) {
            let why = format!(
                "the memory was created with handle types {}, not {handle_type}",
                self.origin.props.handle_types
            );
            return Err(Error::invalid("handle type", why));
        }
        let handle = match (&self.origin.pages, self.handle) {
            (Some(pages), _) => ShareableHandle::PosixFd(pages.export(&self.origin.driver)?),
            // SAFETY: `self` keeps the handle alive.
            (None, Some(handle)) => unsafe { self.origin.driver.mem_export(handle, handle_type)? },
            (None, None) => return Err(Error::invalid("memory", "it was released")),
        };
        if handle.handle_type() != handle_type {
            let why = format!("the driver exported a handle of a type other than {handle_type}");
            return Err(Error::invalid("handle", why));
        }
        self.origin.entry.exported(self.identity().ok());
        Ok(handle)
    }

    /// Sets the memory's name in the [ledger](crate::ledger).
    pub fn set_label(&self, label: impl Into<Label>) {
        self.origin.entry.set_label(label.into());
    }

    /// Notes in the [ledger](crate::ledger) a process that a handle of the memory was sent to.
    pub fn sent_to(&self, party: Party) {
        self.origin.entry.sent_to(party);
    }

    /// Notes in the [ledger](crate::ledger) where imported memory comes from, its name, and the program's call.
    pub fn imported_from(&self, imported: Imported, label: Option<Label>, site: Site) {
        self.origin.entry.imported(imported, label, site);
    }

    /// Returns the size requested and the size created.
    pub fn size(&self) -> PaddedSize {
        self.origin.size
    }

    /// Returns location, handle types and flags, as created or imported.
    pub fn props(&self) -> &AllocationProps {
        &self.origin.props
    }

    /// Returns the memory's location.
    pub fn location(&self) -> Location {
        self.origin.props.location
    }

    /// Returns the memory's driver.
    pub fn driver(&self) -> &Driver {
        &self.origin.driver
    }

    /// Returns the memory's identity, for importers; only the exporter knows that of imported memory.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel does not report the machine's boot id.
    pub fn identity(&self) -> Result<Identity> {
        Ok(Identity {
            boot: BootId::current()?,
            instance: InstanceId::current()?,
            allocation: *self
                .origin
                .allocation
                .get_or_init(|| NUMBERS.get(|_| Numbers::default()).next()),
            generation: self.origin.generation.load(Relaxed),
        })
    }

    /// Gives the memory a new identity when it changes owners.
    pub fn renew_identity(&self) {
        self.origin.generation.fetch_add(1, Relaxed);
    }

    /// Returns the driver's handle, for calls of your own; `self` still owns it. `None` for
    /// [registered](Backing::Registered) memory, which has none.
    pub const fn handle(&self) -> Option<PhysicalHandle> {
        self.handle
    }

    /// Returns what the memory is: [`Driver`](Backing::Driver) or [`Registered`](Backing::Registered).
    pub fn backing(&self) -> Backing {
        match self.origin.pages {
            Some(_) => Backing::Registered,
            None => Backing::Driver,
        }
    }

    /// Releases the memory and returns the result; dropping it ignores errors except for a log message.
    ///
    /// # Errors
    /// The driver's error.
    pub fn release(self) -> Result<()> {
        self.try_release().map_err(|refused| {
            let (memory, error) = *refused;
            if let Some(mut memory) = memory {
                memory.lose();
            }
            error
        })
    }

    /// Releases the memory; returns it if the driver refuses for a temporary reason, so that the caller can
    /// retry later.
    ///
    /// # Errors
    /// The driver's error, and the memory if it still exists.
    pub fn try_release(mut self) -> Result<(), Box<(Option<Self>, Error)>> {
        let Err(error) = give_back(&self.origin.driver, "memory", || self.release_once()) else {
            self.handle = None;
            return Ok(());
        };
        if may_pass(error.code()) {
            return Err(Box::new((Some(self), error)));
        }
        self.lose();
        Err(Box::new((None, error)))
    }

    fn lose(&mut self) {
        self.handle = None;
        self.origin.entry.lost(&self.origin.driver);
    }

    /// Returns the ledger's entry, for further chunks of one allocation.
    pub(crate) fn entry(&self) -> Entry {
        self.origin.entry.again()
    }

    /// Returns the state that every mapping of it keeps.
    pub(super) fn origin(&self) -> Arc<Origin> {
        Arc::clone(&self.origin)
    }

    /// Returns whether it has one mapping in this process and no other process can access it: it has no
    /// handle type, so it cannot be exported, and was not imported.
    pub fn is_mapped_once_and_private(&self) -> bool {
        let private = !self.origin.imported && self.origin.props.handle_types == HandleTypes::NONE;
        let once = private && Arc::strong_count(&self.origin) == 2;
        // Orders other threads' accesses through mappings that they have dropped before the caller's.
        fence(Acquire);
        once
    }

    fn release_once(&self) -> Result<()> {
        match self.handle {
            // SAFETY: `self` owns the handle, which is removed once it is released, and is being dropped.
            Some(handle) => unsafe { self.origin.driver.mem_release(handle) },
            // The pages live as long as their last mapping and fd.
            None => Ok(()),
        }
    }
}

/// Asks for the granularity and the properties of imported memory.
///
/// # Safety
/// The handle is live.
unsafe fn facts_of(
    driver: &Driver,
    handle: PhysicalHandle,
) -> Result<(Granularity, AllocationProps)> {
    // SAFETY: the caller's promise.
    let props = unsafe { driver.mem_properties(handle)? };
    let unit = driver.mem_granularity(&props, GranularityKind::Minimum)?;
    Ok((Granularity::new(unit)?, props))
}

impl AsRef<Self> for PhysicalMemory {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        if give_back_or_log(&self.origin.driver, "physical memory", || {
            self.release_once()
        }) {
            self.lose();
        }
    }
}
