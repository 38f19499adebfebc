//! Memory of another process, mapped and granted here.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::cache::Cached;
use super::imports::{Imports, MappedKey, Origin, PartKey, Source};
use super::{Description, MAX_PARTS};
use crate::accessors::cpu_accessors;
use crate::buffer::reachable_gpus;
use crate::capability::ImexChannel;
use crate::driver::{
    Access, AccessDesc, Code, DevicePtr, Driver, HandleType, Location, ShareableHandle,
};
use crate::explain::no_imex_channel;
use crate::memory::{CpuView, Memory, Sealed};
use crate::vmm::{Mapping, PhysicalMemory, Reservation};
use crate::{Error, Result};

/// Who may use imported memory, and whose it is; [`import`](Self::import) maps it.
#[derive(Clone, Debug, Default)]
#[must_use = "options do nothing until `import`"]
pub struct ImportOptions {
    host: Option<Wanted>,
    gpus: Option<BTreeMap<Location, Wanted>>,
    origin: Option<Origin>,
}

/// What somebody is to be granted.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// All that the description allows.
    Allowed,
    /// Exactly this.
    Exactly(Access),
}

impl Wanted {
    fn resolve(self, who: Location, allowed: Access) -> Result<Access> {
        match self {
            Self::Allowed => Ok(allowed),
            Self::Exactly(access) if access <= allowed => Ok(access),
            Self::Exactly(need) => Err(Error::NotAccessible {
                who,
                have: allowed,
                need,
            }),
        }
    }
}

impl ImportOptions {
    /// Access for the host and every GPU that can reach the memory, as far as its description
    /// allows.
    pub fn new() -> Self {
        Self::default()
    }

    /// Which GPUs may use the memory, besides the host: as far as its description allows.
    pub fn access_by<L: Into<Location>>(mut self, who: impl IntoIterator<Item = L>) -> Self {
        self.gpus.get_or_insert_default();
        for location in who {
            self.set(location.into(), Wanted::Allowed);
        }
        self
    }

    /// What one location may do; [`Location::Host`] stands for the CPU.
    pub fn access(mut self, who: impl Into<Location>, access: Access) -> Self {
        self.set(who.into(), Wanted::Exactly(access));
        self
    }

    fn set(&mut self, location: Location, wanted: Wanted) {
        if location.is_host() {
            self.host = Some(wanted);
        } else {
            let gpus = self.gpus.get_or_insert_default();
            gpus.insert(location, wanted);
        }
    }

    /// Who sent the description, as authenticated: then memory of this origin that is imported
    /// already is not imported once more. See [`Origin`]. Without it, nothing is shared.
    pub fn origin(mut self, origin: Origin) -> Self {
        self.origin = Some(origin);
        self
    }

    /// The same without an origin: for descriptions whose sender nobody has proved.
    #[cfg(feature = "exchange")]
    pub(crate) fn unshared(mut self) -> Self {
        self.origin = None;
        self
    }

    /// The same, unless an origin was given.
    pub(super) fn or_origin(mut self, origin: Origin) -> Self {
        self.origin.get_or_insert(origin);
        self
    }

    /// Imports the memory that `description` describes and `handles` name, one for each part, maps
    /// it at one range of addresses, and grants it. If a step fails, the steps before it are undone.
    ///
    /// With an [`origin`](Self::origin), memory that this process has imported already is counted
    /// instead, and its handles are closed unused; where the same is granted to the same, the
    /// mapping is shared too.
    ///
    /// The access is what this process keeps to. The handles would allow it more.
    ///
    /// Source: `cuMemImportFromShareableHandle`, `cuMemMap`, `cuMemSetAccess`. The driver maps
    /// memory whole or not at all, so that a description with wrong sizes is refused by it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a description that cannot be, and for handles that are not as
    /// many, or not of one type; [`Error::NotAccessible`] where more access is wanted than the
    /// description allows; [`Error::NoImexChannel`]; those of [`PhysicalMemory::import`] and
    /// [`Mapping::set_access`].
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
    pub fn import(
        self,
        driver: &Driver,
        description: &Description,
        handles: Vec<ShareableHandle>,
    ) -> Result<ImportedBuffer> {
        description.check()?;
        let via = one_type(&handles, description.parts.len())?;
        let imports = Imports::of(driver);
        let source = match self.origin.clone() {
            Some(origin) => Source::Origin(origin),
            None => Source::unshared(),
        };
        let mut parts = Vec::with_capacity(handles.len());
        for (part, handle) in description.parts.iter().zip(handles) {
            let key = PartKey {
                source: source.clone(),
                identity: part.identity,
                bytes: part.bytes,
            };
            // Closed or wiped in here, used or not.
            parts.push(imports.parts.get_or_try(key, || {
                PhysicalMemory::import(driver, &handle, part.bytes)
                    .map_err(|error| explain(driver, error, via))
            })?);
        }
        let (access, optional_host) = self.resolve(driver, description, &parts)?;
        let key = MappedKey {
            parts: parts.iter().map(|part| part.key().clone()).collect(),
            access: access.clone(),
            optional_host,
        };
        let mapped = imports
            .mapped
            .get_or_try(key, || Mapped::new(driver, parts, &access, optional_host))?;
        Ok(ImportedBuffer(Arc::new(Inner {
            mapped,
            description: description.clone(),
            via,
        })))
    }

    /// Whom to grant what, the host first, and whether the import is of use without the host.
    fn resolve(
        &self,
        driver: &Driver,
        description: &Description,
        parts: &[Cached<PartKey, PhysicalMemory>],
    ) -> Result<(Vec<AccessDesc>, bool)> {
        let allowed = description.access;
        let on_host = parts.iter().all(|part| part.location().is_host());
        let mut access = BTreeMap::new();
        match &self.gpus {
            Some(gpus) => {
                for (&gpu, wanted) in gpus {
                    access.insert(gpu, wanted.resolve(gpu, allowed)?);
                }
            }
            None => {
                let mut lists = parts
                    .iter()
                    .map(|part| reachable_gpus(driver, part.location()));
                let first = lists.next().unwrap_or(Ok(Vec::new()))?;
                access.extend(first.iter().map(|desc| (desc.location, allowed)));
                for list in lists {
                    let list = list?;
                    access.retain(|gpu, _| list.iter().any(|desc| desc.location == *gpu));
                }
            }
        }
        let host = match self.host {
            Some(wanted) => wanted.resolve(Location::Host, allowed)?,
            None if on_host => allowed,
            None => Access::None,
        };
        let list = std::iter::once((Location::Host, host))
            .chain(access)
            .filter(|&(_, access)| access != Access::None)
            .map(|(location, access)| AccessDesc { location, access })
            .collect();
        let here = super::BootId::current()?;
        let elsewhere = description.parts.iter().any(|p| p.identity.boot != here);
        Ok((list, self.host.is_none() && elsewhere))
    }
}

/// The type of all handles, of which there are `count`.
fn one_type(handles: &[ShareableHandle], count: usize) -> Result<HandleType> {
    let first = match handles {
        [first, ..] if handles.len() == count => first.handle_type(),
        _ => {
            let why = format!("{} for {count} parts", handles.len());
            return Err(Error::invalid("handles", why));
        }
    };
    match handles.iter().all(|handle| handle.handle_type() == first) {
        true => Ok(first),
        false => Err(Error::invalid("handles", "they are of different types")),
    }
}

fn explain(driver: &Driver, error: Error, via: HandleType) -> Error {
    match error {
        Error::Driver(source)
            if source.code == Code::NOT_PERMITTED && via == HandleType::Fabric =>
        {
            no_imex_channel(source, &ImexChannel::of(driver))
        }
        other => other,
    }
}

/// Imported memory at one range of addresses.
#[derive(Debug)]
pub(super) struct Mapped {
    // In this order: unmapped first, then released.
    mappings: Vec<Mapping>,
    parts: Vec<Cached<PartKey, PhysicalMemory>>,
}

impl Mapped {
    fn new(
        driver: &Driver,
        parts: Vec<Cached<PartKey, PhysicalMemory>>,
        access: &[AccessDesc],
        optional_host: bool,
    ) -> Result<Self> {
        debug_assert!(parts.len() <= MAX_PARTS);
        let total = parts.iter().map(|part| part.size().padded()).sum();
        let range = Arc::new(Reservation::options().reserve(driver, total)?);
        let mut mappings = Vec::with_capacity(parts.len());
        let mut offset = 0;
        for memory in &parts {
            let mut mapping = range.map(offset, memory)?;
            grant(&mut mapping, access, optional_host)?;
            offset += memory.size().padded();
            mappings.push(mapping);
        }
        Ok(Self { mappings, parts })
    }

    fn padded(&self) -> u64 {
        self.parts.iter().map(|part| part.size().padded()).sum()
    }
}

/// Memory of another node may be out of the CPU's reach, and good for the GPUs all the same.
fn grant(mapping: &mut Mapping, access: &[AccessDesc], optional_host: bool) -> Result<()> {
    let result = mapping.set_access(access);
    let gpus = match access {
        [host, gpus @ ..] if host.location.is_host() && !gpus.is_empty() => gpus,
        _ => return result,
    };
    // The first error tells more, if the second try fails too.
    result.or_else(|error| match mapping.set_access(gpus) {
        Ok(()) if optional_host => Ok(()),
        Ok(()) if error.code() == Some(Code::INVALID_VALUE) => Err(Error::PlatformUnsupported {
            what: "the CPU's access to this memory as it is shared now (drivers measured allow some \
                   254 exports, imports and CPU mappings of one memory together)",
            source: error.driver_error(),
        }),
        _ => Err(error),
    })
}

/// Memory that another process shared, mapped at one address for the CPU and the GPUs. Clones are
/// the same mapping; with the last one it is unmapped and then released.
///
/// It stays valid, with its bytes, whatever becomes of the exporter. Before the last clone is
/// dropped, GPU work that uses it must have finished.
///
/// Made by [`ImportOptions::import`], where an example is, and by [`Offer`](super::Offer).
#[derive(Clone, Debug)]
pub struct ImportedBuffer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    mapped: Cached<MappedKey, Mapped>,
    description: Description,
    via: HandleType,
}

impl ImportedBuffer {
    /// What the exporter said of the memory.
    pub fn description(&self) -> &Description {
        &self.0.description
    }

    /// By which type of handle it came.
    pub fn via(&self) -> HandleType {
        self.0.via
    }

    /// What `location` may do, as the driver tells.
    ///
    /// # Errors
    /// As [`Mapping::access`].
    pub fn access(&self, location: impl Into<Location>) -> Result<Access> {
        self.first().access(location.into())
    }

    /// The CPU's window on the memory.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] unless the host may at least read.
    pub fn cpu(&self) -> Result<CpuView<'_>> {
        Mapping::cpu_of_neighbours(&self.0.mapped.mappings, self.0.description.len)
    }

    /// The CPU's window on all of it, padding included.
    fn padded_cpu(&self) -> Result<CpuView<'_>> {
        Mapping::cpu_of_neighbours(&self.0.mapped.mappings, self.0.mapped.padded())
    }

    cpu_accessors!();

    /// The word at `offset` bytes, read by the CPU; it may lie in the padding beyond
    /// [`len`](Self::len).
    ///
    /// # Errors
    /// [`Error::NotAccessible`], [`Error::OutOfRange`].
    pub fn word(&self, offset: u64) -> Result<u64> {
        self.padded_cpu()?.get(offset)
    }

    /// Writes a word, as [`word`](Self::word) reads one.
    ///
    /// # Errors
    /// As there.
    pub fn put_word(&self, offset: u64, word: u64) -> Result<()> {
        self.padded_cpu()?.put(offset, word)
    }

    /// The mappings of the parts, in the order of addresses.
    pub fn mappings(&self) -> &[Mapping] {
        &self.0.mapped.mappings
    }

    fn first(&self) -> &Mapping {
        // Never empty: the description was checked.
        &self.0.mapped.mappings[0]
    }

    /// The address, the same for every GPU and, on a host node, for the CPU. It is this process's:
    /// another has other addresses for the same memory.
    pub fn device_ptr(&self) -> DevicePtr {
        self.first().device_ptr()
    }

    /// The usable bytes.
    pub fn len(&self) -> u64 {
        self.0.description.len
    }

    /// Never: shared memory has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Sealed for ImportedBuffer {}

impl Memory for ImportedBuffer {
    fn driver(&self) -> &Driver {
        self.first().driver()
    }
    fn device_ptr(&self) -> DevicePtr {
        self.first().device_ptr()
    }
    fn len(&self) -> u64 {
        self.0.description.len
    }
    /// Of the first part, as this machine's driver tells.
    fn location(&self) -> Location {
        self.first().location()
    }
}
