//! Imports memory of another process: grants access to it, and reuses existing imports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::cache::{Cache, Cached};
use super::imported::{ImportedBuffer, Inner, Mapped};
use super::{Credentials, Description, Identity, Part, PartHandles};
use crate::buffer::reachable_gpus;
use crate::capability::ImexChannel;
use crate::driver::{Access, AccessDesc, Code, Driver, HandleType, Location, ShareableHandle};
use crate::guard::no_imex_channel;
use crate::ledger::{Imported, Label, Party, Site};
use crate::per_driver::PerDriver;
use crate::vmm::{MappedRange, PhysicalMemory};
use egmem_core::{Backing, Error, Result};

/// The authenticated sender of a description: the kernel or a certificate proves it.
///
/// Memory is recognised by the identity that its description claims, and any peer can claim any identity. If
/// the claim alone counted, a peer could present its own memory as another's, and this process would write
/// data for the other into it. So only descriptions of one origin share imports, and an origin can deceive
/// only itself. Use a name that the peer has proved, never one that it merely states.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Origin {
    /// Processes of one user of this machine: [`Credentials::uid`](super::Credentials::uid). The system does
    /// not protect them against each other anyway.
    User(u32),
    /// A peer with a proved name: that of its certificate.
    Peer(String),
}

/// The key of imported physical memory. It includes the size, so that a wrong claim, which the driver refuses
/// to map, does not block a right one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PartKey {
    pub(super) origin: Option<Origin>,
    /// Without an origin another number in each import, which shares nothing.
    pub(super) unshared: Option<u64>,
    pub(super) identity: Identity,
    pub(super) bytes: u64,
}

/// The key of a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct MappedKey {
    pub(super) parts: Vec<PartKey>,
    /// The host first, then GPUs by their ordinals, each location once.
    pub(super) access: Vec<AccessDesc>,
    /// Whether the mapping may do without the host's access, although `access` lists it.
    pub(super) optional_host: bool,
}

/// The imported physical memories of each driver.
pub(super) static PARTS: PerDriver<Cache<PartKey, PhysicalMemory>> = PerDriver::new();

/// The mappings of each driver.
pub(super) static MAPPED: PerDriver<Cache<MappedKey, Mapped>> = PerDriver::new();

/// Options for importing memory: its access and its origin; [`import`](Self::import) maps it.
#[derive(Clone, Debug, Default)]
#[must_use = "options do nothing until `import`"]
pub struct ImportOptions {
    host: Option<Wanted>,
    /// Each GPU once, in ascending order: equal imports are found by the list.
    gpus: Option<Vec<(Location, Wanted)>>,
    skips_unreachable: bool,
    origin: Option<Origin>,
    sender: Option<Party>,
    label: Option<Label>,
    site: Option<Site>,
}

/// The access to grant one location: exactly this, or without a value as much as the description allows.
type Wanted = Option<Access>;

fn resolved(wanted: Wanted, who: Location, allowed: Access) -> Result<Access> {
    match wanted {
        Some(need) if need > allowed => Err(Error::not_accessible(who, allowed, need)),
        wanted => Ok(wanted.unwrap_or(allowed)),
    }
}

impl ImportOptions {
    /// Returns options that grant access to the host and to every GPU that can reach the memory, as far as
    /// its description allows. Registered memory that may only be read is granted to the host alone, because it is open
    /// to all GPUs for writing or to none.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets which GPUs may use the memory, besides the host: as far as its description allows.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.gpus.get_or_insert_default();
        for location in who {
            self.set(location.into(), None);
        }
        self
    }

    /// Sets the access of one location; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, who: impl Into<Location>, access: Access) -> Self {
        self.set(who.into(), Some(access));
        self
    }

    /// Leaves out the named GPUs that cannot reach the memory. Without this, the import fails for such a GPU.
    pub fn skip_unreachable(mut self) -> Self {
        self.skips_unreachable = true;
        self
    }

    fn set(&mut self, location: Location, wanted: Wanted) {
        if location.is_host() {
            self.host = Some(wanted);
        } else {
            let gpus = self.gpus.get_or_insert_default();
            gpus.retain(|(gpu, _)| *gpu != location);
            let before = gpus.partition_point(|(gpu, _)| *gpu < location);
            gpus.insert(before, (location, wanted));
        }
    }

    /// Sets the authenticated sender of the description: memory of this origin that is already imported is
    /// not imported again. See [`Origin`]. Without it, nothing is shared.
    pub fn origin(mut self, origin: Origin) -> Self {
        self.origin = Some(origin);
        self
    }

    /// Sets which process sent the handles, for the [ledger](egmem_core::ledger).
    pub fn sender(mut self, sender: Party) -> Self {
        self.sender = Some(sender);
        self
    }

    /// Sets the memory's name in the [ledger](egmem_core::ledger). Memory that this process has imported already keeps the
    /// name that it has.
    pub fn label(mut self, label: impl Into<Label>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Sets the memory's name in the [ledger](egmem_core::ledger) unless one was given.
    pub fn or_label(mut self, label: impl Into<Label>) -> Self {
        self.label.get_or_insert_with(|| label.into());
        self
    }

    /// Sets the program's call that the [ledger](egmem_core::ledger) shows, unless one was given: by default the call of
    /// [`import`](Self::import).
    pub fn or_called_at(mut self, site: Site) -> Self {
        self.site.get_or_insert(site);
        self
    }

    /// Removes the origin, for descriptions whose sender is not authenticated.
    pub fn unshared(mut self) -> Self {
        self.origin = None;
        self
    }

    /// Imports the memory of `description` through `handles`, one for each part, maps it at one range of
    /// addresses, and grants access. If a step fails, the steps before it are undone.
    ///
    /// With an [`origin`](Self::origin), memory that this process has imported already gets one more
    /// reference instead, and its handles are closed unused; if the same access goes to the same locations,
    /// the mapping is shared too.
    ///
    /// The access restricts this process only by its own mapping; the handles would allow more.
    ///
    /// Source: `cuMemImportFromShareableHandle`, `cuMemMap`, `cuMemSetAccess`. The driver maps memory whole
    /// or not at all, so it refuses a description with wrong sizes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an invalid description, and for handles of another number or of several
    /// types, for memory of which some is registered and some is not, and for less than read-write access of a GPU that
    /// the options name to [registered](egmem_core::Backing::Registered) memory; [`Error::NotAccessible`] if the options
    /// ask for more access than the description allows;
    /// [`Error::NoImexChannel`]; those of [`PhysicalMemory::import`] and
    /// [`Mapping::set_access`](crate::vmm::Mapping::set_access), including [`Error::TooManyReferences`].
    ///
    /// ```
    /// use egmem::driver::{Access, HandleType, NodeId};
    /// use egmem::share::{ImportOptions, Shared};
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let buffer = Buffer::on(NodeId(0)).bytes(3 << 20).shareable().allocate(&driver)?;
    /// let shared = Shared::from(buffer);
    /// let description = shared.describe(Access::ReadWrite)?;
    /// let handles = shared.export(HandleType::PosixFd)?;
    ///
    /// // Send both by means of your own; in the other process:
    /// let imported = ImportOptions::new().import(&driver, &description, handles)?;
    /// imported.put(0, 42_u64)?;
    /// assert_eq!(shared.buffer().unwrap().get::<u64>(0)?, 42);
    /// # Ok::<(), egmem::Error>(())
    /// ```
    #[track_caller]
    pub fn import(
        self,
        driver: &Driver,
        description: &Description,
        handles: Vec<ShareableHandle>,
    ) -> Result<ImportedBuffer> {
        self.import_from(driver, description, handles.into())
    }

    /// As [`import`](Self::import), with handles that may be received meanwhile: of many fds only a few are open at a
    /// time.
    ///
    /// # Errors
    /// As [`import`](Self::import); [`Error::System`] if the exporter has ended before it sent all handles.
    #[track_caller]
    pub fn import_from(
        self,
        driver: &Driver,
        description: &Description,
        handles: PartHandles,
    ) -> Result<ImportedBuffer> {
        let (parts, via) = self.import_parts(driver, description, handles)?;
        let (access, optional_host) = self.resolve(driver, description, &parts)?;
        let key = MappedKey {
            parts: parts.iter().map(|part| part.key().clone()).collect(),
            access: access.clone(),
            optional_host,
        };
        // The CPU may be unable to reach memory of another node, which the GPUs can still use.
        let gpus = match &access[..] {
            [host, gpus @ ..] if optional_host && host.location.is_host() => gpus,
            _ => &[],
        };
        let map = || MappedRange::map_or(driver, parts, &access, gpus);
        let mapped = Cached::get_or_try(&MAPPED.of(driver), key, map)?;
        let description = description.clone();
        Ok(ImportedBuffer(Arc::new(Inner {
            mapped,
            description,
            via,
        })))
    }

    /// Imports the memory of `description`, or returns memory that this process has imported already; with the handles' type.
    ///
    /// # Errors
    /// As [`import`](Self::import).
    #[track_caller]
    pub(super) fn import_parts(
        &self,
        driver: &Driver,
        description: &Description,
        mut handles: PartHandles,
    ) -> Result<(Vec<Cached<PartKey, PhysicalMemory>>, HandleType)> {
        description.check()?;
        let count = description.parts.len();
        let via = handles.handle_type().unwrap_or(HandleType::PosixFd);
        handles.begin(count)?;
        let imported = PARTS.of(driver);
        let site = self.site.clone().unwrap_or(Site::here());
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let unshared = self.origin.is_none();
        let unshared = unshared.then(|| NEXT.fetch_add(1, Relaxed));
        let mut parts = Vec::with_capacity(count);
        for (index, part) in description.parts.iter().enumerate() {
            let handle = handles.next(count - index)?;
            let key = PartKey {
                origin: self.origin.clone(),
                unshared,
                identity: part.identity,
                bytes: part.bytes,
            };
            // `handle` is dropped in here, used or not, which closes or wipes it.
            parts.push(Cached::get_or_try(&imported, key, || {
                let memory = PhysicalMemory::import(driver, &handle, part.bytes)
                    .map_err(|error| explain(driver, error, via))?;
                memory.imported_from(self.sender_of(part), self.label.clone(), site.clone());
                Ok(memory)
            })?);
        }
        Ok((parts, via))
    }

    /// Returns the ledger's note on the origin of a part.
    fn sender_of(&self, part: &Part) -> Imported {
        let known = self.origin.as_ref().map(|origin| match origin {
            Origin::User(uid) => format!("a process of user {uid}"),
            Origin::Peer(name) => name.clone(),
        });
        let known = known.map(|name| Party { pid: None, name });
        Imported {
            from: self.sender.clone().or(known),
            identity: Some(part.identity),
        }
    }

    /// Leaves GPUs out that may only read, or refuses them if the options name them.
    fn keep_to_read_write(&self, access: &mut Vec<AccessDesc>) -> Result<()> {
        let mut less = access.iter().filter(|gpu| gpu.access == Access::Read);
        if let (Some(AccessDesc { location, access }), true) = (less.next(), self.gpus.is_some()) {
            let why =
                format!("{access} for {location}, but registered memory is open to every GPU");
            let valid =
                "read-write access, or none: name no GPU, or have the exporter use Backing::Driver";
            return Err(Error::invalid_of("access", why, valid));
        }
        access.retain(|gpu| gpu.access == Access::ReadWrite);
        Ok(())
    }

    /// Returns the access to grant, the host first, and whether the import is useful without the host.
    pub(super) fn resolve(
        &self,
        driver: &Driver,
        description: &Description,
        parts: &[Cached<PartKey, PhysicalMemory>],
    ) -> Result<(Vec<AccessDesc>, bool)> {
        let allowed = description.access;
        let on_host = parts.iter().all(|part| part.location().is_host());
        let mut access = Vec::new();
        for &(gpu, wanted) in self.gpus.iter().flatten() {
            access.push(AccessDesc::new(gpu, resolved(wanted, gpu, allowed)?));
        }
        if self.gpus.is_none() || self.skips_unreachable {
            for (index, part) in parts.iter().enumerate() {
                let list = reachable_gpus(driver, part.location())?;
                if index == 0 && self.gpus.is_none() {
                    access.extend(
                        list.iter()
                            .map(|desc| AccessDesc::new(desc.location, allowed)),
                    );
                }
                access.retain(|gpu| list.iter().any(|desc| desc.location == gpu.location));
            }
        }
        let mut backings = parts.iter().map(|part| part.backing());
        if backings.any(|backing| backing == Backing::Registered) {
            self.keep_to_read_write(&mut access)?;
        }
        let host = match self.host {
            Some(wanted) => resolved(wanted, Location::Host, allowed)?,
            None if on_host => allowed,
            None => Access::None,
        };
        access.insert(0, AccessDesc::new(Location::Host, host));
        access.retain(|desc| desc.access != Access::None);
        let here = super::BootId::current()?;
        let elsewhere = description.parts.iter().any(|p| p.identity.boot != here);
        Ok((access, self.host.is_none() && elsewhere))
    }
}

fn explain(driver: &Driver, error: Error, via: HandleType) -> Error {
    let is_refused = via == HandleType::Fabric && error.code() == Some(Code::NOT_PERMITTED);
    match error {
        Error::Driver(source) if is_refused => no_imex_channel(source, &ImexChannel::of(driver)),
        other => other,
    }
}

/// Memory that another process offers: its description and its handles, not imported yet. Dropping it closes
/// the handles. Those of memory with many parts are received only when it is imported, a few at a time.
#[derive(Debug)]
pub struct Offer {
    pub(super) description: Description,
    pub(super) handles: PartHandles,
    pub(super) peer: Credentials,
}

impl Offer {
    /// Returns the description of the memory, as the other process claims.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the credentials of the sender.
    pub fn peer(&self) -> Credentials {
        self.peer
    }

    /// Imports the memory, by default with the other process's user as its origin: see [`Origin`].
    ///
    /// # Errors
    /// As [`ImportOptions::import`].
    #[track_caller]
    pub fn import(self, driver: &Driver, options: ImportOptions) -> Result<ImportedBuffer> {
        let options = self.with_sender(options);
        options.import_from(driver, &self.description, self.handles)
    }

    /// Returns the options with the sender, and by default with its user as the origin.
    pub(super) fn with_sender(&self, mut options: ImportOptions) -> ImportOptions {
        (options.origin).get_or_insert(Origin::User(self.peer.uid));
        options.sender(self.peer.into())
    }

    /// Returns the offer with access to read alone: an import maps the memory so, and a write through the mapping is a fault.
    /// The handles would allow more: the kernel cannot limit them.
    pub fn read_only(mut self) -> Self {
        self.description.access = self.description.access.min(Access::Read);
        self
    }

    /// Returns the description and the handles, to import them by
    /// [`ImportOptions::import_from`]: of many parts, a few at a time.
    pub fn into_part_handles(self) -> (Description, PartHandles) {
        (self.description, self.handles)
    }

    /// Returns the description and the handles, to import them by other means. It receives the fds of memory with more
    /// than 32 parts, and all are open then. If the other process has ended before it sent them, or this one may open no
    /// more, there are no handles: the memory's import fails.
    pub fn into_parts(self) -> (Description, Vec<ShareableHandle>) {
        let handles = self.handles.all(self.description.parts.len());
        (self.description, handles.unwrap_or_default())
    }
}
