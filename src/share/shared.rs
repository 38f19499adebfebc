//! Memory of this process that others may import: its exports and the CPU's mapping are created on first use, for all that
//! share it. A process keeps only some fds open ([`MAX_KEPT`]).

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use super::description::View;
use super::{Description, MAX_PARTS, Part};
use crate::Buffer;
use crate::driver::{
    Access, AccessDesc, Driver, HandleType, HandleTypes, Location, ShareableHandle,
};
use crate::error::failed;
use crate::ledger::Party;
use crate::memory::CpuView;
use crate::per_driver::{PerDriver, lock};
use crate::vmm::{Mapping, PhysicalMemory};
use egmem_core::{Error, Result};

/// Memory of this process that can be described and exported to others. Clones are the same memory.
///
/// An importer keeps the memory alive even after this value is dropped.
///
/// ```
/// use egmem::driver::{Access, HandleType, NodeId};
/// use egmem::share::Shared;
/// use egmem::{Buffer, Driver, Machine};
///
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let buffer = Buffer::on(NodeId(0)).bytes(3 << 20).shareable().allocate(&driver)?;
/// let shared = Shared::from(buffer);
/// assert_eq!(shared.describe(Access::Read)?.len, 3 << 20);
/// assert_eq!(shared.export(HandleType::PosixFd)?.len(), 1);
/// # Ok::<(), egmem::Error>(())
/// ```
///
/// To share a part of it, see [`window`](Self::window).
#[derive(Clone, Debug)]
pub struct Shared {
    /// Keeps the memory alive for others.
    parts: Arc<Vec<Source>>,
    view: View,
    /// Kept alive while the memory is shared.
    keep: Vec<Arc<dyn Any + Send + Sync>>,
}

impl From<Buffer> for Shared {
    fn from(buffer: Buffer) -> Self {
        Self::from(Arc::new(buffer))
    }
}

impl From<Arc<Buffer>> for Shared {
    fn from(buffer: Arc<Buffer>) -> Self {
        let of_buffer = |index| Source::Buffer(Exports::default(), Arc::clone(&buffer), index);
        let parts = (0..buffer.physical().len()).map(of_buffer);
        Self::new(parts.collect(), buffer.len())
    }
}

impl Shared {
    fn new(parts: Vec<Source>, len: u64) -> Self {
        Self {
            view: View::whole(parts.len(), len),
            parts: Arc::new(parts),
            keep: Vec::new(),
        }
    }

    /// Shares physical memory that need not be mapped here: the parts side by side in this order, with `len`
    /// usable bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no memory or more than [`MAX_PARTS`], for memory of several drivers or kinds
    /// ([`PhysicalMemory::backing`]), and for a `len` of 0, beyond the parts, or ending before the last one begins. The last part may be
    /// padding only, for probes.
    pub fn from_physical(parts: Vec<PhysicalMemory>, len: u64) -> Result<Self> {
        let all = check_parts(parts.iter())?;
        let before = all - parts.last().map_or(0, |part| part.size().padded());
        if len == 0 || len < before || len > all {
            let why = format!("{len} bytes of {all}, of which the last part begins at {before}");
            return Err(Error::invalid("length", why));
        }
        let parts = parts.into_iter();
        let parts = parts.map(|memory| Source::Physical(Exports::default(), memory));
        Ok(Self::new(parts.collect(), len))
    }

    /// Shares a window of `len` bytes on memory that others hold too, at `offset` from the first part's
    /// start. `keep` lives until this value, its clones and its windows are dropped. Each part is exported
    /// once, for all windows on it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no memory or more than [`MAX_PARTS`], for memory of several drivers or kinds,
    /// and for a `len` of 0; [`Error::OutOfRange`].
    pub fn from_held(
        parts: Vec<Arc<dyn Holds>>,
        offset: u64,
        len: u64,
        keep: impl Any + Send + Sync,
    ) -> Result<Self> {
        let all = check_parts(parts.iter().map(|part| part.physical()))?;
        let all = Self::new(parts.into_iter().map(Source::Held).collect(), all);
        Ok(all.window(offset, len)?.holding(keep))
    }

    /// Returns a window: the `len` bytes at `offset` of this memory, to be shared without the rest. All
    /// windows use the same handles, which are exported once, and imported once by a process that gets
    /// several from one [`Origin`](super::Origin). All of the memory stays alive.
    ///
    /// **A handle grants all of the memory.** An importer of a window can access the bytes beside it, in the
    /// parts that the window touches: this library's importers keep to the window, others need not. Give
    /// windows only to peers that may read and overwrite all of it.
    ///
    /// An importer keeps the memory alive, but does not learn when the window's bytes get another use. Before
    /// you reuse them, make sure that no importer is left, as the exchange's `Published::withdraw` does.
    ///
    /// A window has no padding around it, so it cannot be probed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a `len` of 0, [`Error::OutOfRange`] beyond the usable bytes.
    ///
    /// ```
    /// use egmem::driver::{Access, HandleType, NodeId};
    /// use egmem::share::{ImportOptions, Shared};
    /// use egmem::{Buffer, Driver, Machine};
    ///
    /// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
    /// let buffer = Buffer::on(NodeId(0)).bytes(3 << 20).shareable().allocate(&driver)?;
    /// let shared = Shared::from(buffer);
    /// let window = shared.window(1 << 20, 4096)?;
    /// let handles = window.export(HandleType::PosixFd)?;
    /// let description = window.describe(Access::ReadWrite)?;
    ///
    /// // In another process:
    /// let imported = ImportOptions::new().import(&driver, &description, handles)?;
    /// assert_eq!(imported.len(), 4096);
    /// imported.put(8, 42_u64)?;
    /// assert_eq!(shared.buffer().unwrap().get::<u64>((1 << 20) + 8)?, 42);
    /// # Ok::<(), egmem::Error>(())
    /// ```
    pub fn window(&self, offset: u64, len: u64) -> Result<Self> {
        let sizes = self.parts().map(|part| part.size().padded());
        Ok(Self {
            view: self.view.window(sizes, offset, len)?,
            ..self.clone()
        })
    }

    /// Returns the same memory, which keeps `owner` alive until this value, its clones and its windows are
    /// dropped: under names, in flight, or held by the caller. Earlier clones do not.
    ///
    /// Imported mappings do not keep it: they may outlive it.
    pub fn holding(mut self, owner: impl Any + Send + Sync) -> Self {
        self.keep.push(Arc::new(owner));
        self
    }

    /// Returns the physical memory if this was made from some, is all of it, and has no other clone or
    /// window.
    ///
    /// # Errors
    /// `self` otherwise.
    pub fn into_physical(mut self) -> Result<Vec<PhysicalMemory>, Self> {
        let is_own = matches!(self.parts[..], [Source::Physical(..), ..]);
        let is_all = is_own && self.keep.is_empty() && !self.is_window();
        let Some(parts) = Arc::get_mut(&mut self.parts).filter(|_| is_all) else {
            return Err(self);
        };
        let own = |part| match part {
            // Unmapped, and without a handle, before another user gets it.
            Source::Physical(_exports, memory) => Some(memory),
            _ => None,
        };
        Ok(parts.drain(..).filter_map(own).collect())
    }

    /// Iterates over the parts that it touches.
    fn parts(&self) -> impl Iterator<Item = &PhysicalMemory> + Clone {
        self.parts[self.view.parts.clone()]
            .iter()
            .map(Source::physical)
    }

    /// Returns whether this is a [`window`](Self::window): the bytes around it then belong to other memory.
    pub fn is_window(&self) -> bool {
        self.view.offset.is_some()
    }

    /// Returns the description that an importer needs besides the handles; it asks the importer to keep to
    /// `access`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for [`Access::None`] or more than [`MAX_PARTS`] parts, [`Error::System`] if
    /// the kernel does not report the machine's boot id.
    pub fn describe(&self, access: Access) -> Result<Description> {
        let part = |memory: &PhysicalMemory| {
            Ok(Part {
                identity: memory.identity()?,
                bytes: memory.size().padded(),
                location: memory.location(),
            })
        };
        let description = Description {
            len: self.len(),
            offset: self.view.offset,
            access,
            parts: self.parts().map(part).collect::<Result<_>>()?,
        };
        description.check()?;
        Ok(description)
    }

    /// Returns handles to import the memory: one for each part of the description, in order.
    ///
    /// A process that has them can read and write the memory, also beyond the description: for a window,
    /// all of the parts that it touches. A part's handle is kept and copied, because drivers
    /// have been seen to refuse the CPU's access to memory with more than about 250 exports, imports and CPU
    /// mappings together; of all memory, a process keeps only the last 16 fds.
    ///
    /// Memory of many parts has as many fds: [`Channel::send`](super::Channel::send) and the exchange pass them a few
    /// at a time.
    ///
    /// # Errors
    /// Those of [`PhysicalMemory::export`]; [`Error::System`] if no more fds are available.
    pub fn export(&self, handle_type: HandleType) -> Result<Vec<ShareableHandle>> {
        self.export_parts(0..self.part_count(), handle_type)
    }

    /// Returns handles of some parts of the description, as [`export`](Self::export) does of all. Parts beyond the last
    /// are left out.
    ///
    /// # Errors
    /// As [`export`](Self::export).
    pub fn export_parts(
        &self,
        parts: Range<usize>,
        handle_type: HandleType,
    ) -> Result<Vec<ShareableHandle>> {
        let all = &self.parts[self.view.parts.clone()];
        let parts = parts.start.min(all.len())..parts.end.min(all.len());
        let some = all.get(parts).unwrap_or_default();
        let export = |part: &Source| part.exports().export(part.physical(), handle_type);
        some.iter().map(export).collect()
    }

    /// Returns the number of the description's parts.
    pub fn part_count(&self) -> usize {
        self.view.parts.len()
    }

    /// Notes in the [ledger](egmem_core::ledger) a process that handles were sent to.
    pub fn sent_to(&self, party: &Party) {
        self.parts().for_each(|part| part.sent_to(party.clone()));
    }

    /// Returns the types that all of the memory can be exported as.
    pub fn handle_types(&self) -> HandleTypes {
        let bits = self.parts().map(|part| part.props().handle_types.bits());
        HandleTypes::from_bits(bits.fold(u32::MAX, |all, bits| all & bits))
    }

    /// Gives the memory a new identity when it changes owners, so that importers of the old one do not take
    /// it for the same memory. For a window, this applies to all of the parts that it touches.
    pub fn renew_identity(&self) {
        self.parts().for_each(PhysicalMemory::renew_identity);
    }

    /// Returns the memory's driver.
    pub fn driver(&self) -> &Driver {
        self.first().driver()
    }

    /// Returns the location of the first part.
    pub fn location(&self) -> Location {
        self.first().location()
    }

    fn first(&self) -> &PhysicalMemory {
        // Never empty: every constructor checks that.
        self.parts[self.view.parts.start].physical()
    }

    /// Returns the number of usable bytes.
    pub fn len(&self) -> u64 {
        self.view.len
    }

    /// Returns `false`: there is at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns all bytes that an importer maps, including padding: for a window, those of its parts.
    pub fn padded(&self) -> u64 {
        padded(self.parts())
    }

    /// Returns the buffer that this was made from, if any: all of it, for a window too.
    pub fn buffer(&self) -> Option<&Arc<Buffer>> {
        match &self.parts[self.view.parts.start] {
            Source::Buffer(_, buffer, _) => Some(buffer),
            _ => None,
        }
    }

    /// Reads the word at `offset` bytes with the CPU: below [`padded`](Self::padded), so possibly in the
    /// padding, and within one part. For a window, within its usable bytes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; if the memory is not mapped for the CPU, those of mapping it.
    pub fn word(&self, offset: u64) -> Result<u64> {
        self.with_cpu(offset, |cpu, at| cpu.get(at))
    }

    /// Writes a word where [`word`](Self::word) reads one.
    ///
    /// # Errors
    /// As [`word`](Self::word).
    pub fn put_word(&self, offset: u64, word: u64) -> Result<()> {
        self.with_cpu(offset, |cpu, at| cpu.put(at, word))
    }

    /// Lends a view of the part in which the word at `offset` begins, and its offset there: of the buffer's
    /// own mapping, if the CPU may write there, or of one that is created for it and kept.
    fn with_cpu<T>(
        &self,
        offset: u64,
        with: impl FnOnce(CpuView<'_>, u64) -> Result<T>,
    ) -> Result<T> {
        let sizes = self.parts().map(|part| part.size().padded());
        let (index, at) = self.view.word_at(sizes, offset)?;
        if let Some(buffer) = self.buffer()
            && let Ok(cpu) = buffer.mappings()[index].padded_cpu()
            && cpu.is_writable()
        {
            return with(cpu, at);
        }
        let part = &self.parts[index];
        (part.exports()).with_cpu(part.physical(), |cpu| with(cpu, at))
    }
}

fn padded<'a>(parts: impl Iterator<Item = &'a PhysicalMemory>) -> u64 {
    // All parts exist, so their sum nearly fits an address space.
    parts.fold(0, |sum, part| part.size().padded().saturating_add(sum))
}

/// Checks that parts can be shared together; returns their size.
fn check_parts<'a>(parts: impl ExactSizeIterator<Item = &'a PhysicalMemory>) -> Result<u64> {
    let count = parts.len();
    if !(1..=MAX_PARTS).contains(&count) {
        let why = format!("{count} parts, not 1 to {MAX_PARTS}");
        return Err(Error::invalid("memory", why));
    }
    let parts: Vec<_> = parts.collect();
    for part in &parts {
        part.driver().expect_same(parts[0].driver(), "memory")?;
        if part.backing() != parts[0].backing() {
            let why = "some parts are registered and some are not";
            return Err(Error::invalid_of("memory", why, "parts of one Backing"));
        }
    }
    Ok(padded(parts.into_iter()))
}

/// Physical memory that another owner keeps alive, together with its exports: a chunk with many shared
/// blocks.
pub trait Holds: fmt::Debug + Send + Sync {
    /// Returns the memory, the same for the value's whole life.
    fn physical(&self) -> &PhysicalMemory;
    /// Returns the memory's exports.
    fn exports(&self) -> &Exports;
}

/// The handles of one physical memory and the CPU's mapping of it, each created on first use. An fd is closed when
/// others were exported since, and created again for the next export.
#[derive(Debug, Default)]
pub struct Exports {
    // In this order: unmapped first, then closed.
    cpu: Mutex<Option<Mapping>>,
    fd: Arc<Place>,
    fabric: Mutex<Option<ShareableHandle>>,
}

impl Exports {
    /// Returns a handle of `memory`, which is the same memory in every call: a copy of the one that is kept, if it is.
    /// Drivers have been seen to refuse the CPU's access to memory with more than about 250 exports, imports
    /// and CPU mappings together; an export whose copies are all closed no longer counts.
    pub fn export(
        &self,
        memory: &PhysicalMemory,
        handle_type: HandleType,
    ) -> Result<ShareableHandle> {
        let mut kept = lock(match handle_type {
            HandleType::PosixFd => &*self.fd,
            HandleType::Fabric => &self.fabric,
        });
        let is_new = kept.is_none();
        let handle = match &mut *kept {
            Some(handle) => handle,
            none => none.insert(memory.export(handle_type)?),
        };
        let copy = match handle {
            ShareableHandle::PosixFd(fd) => fd.try_clone().map(ShareableHandle::PosixFd),
            ShareableHandle::Fabric(handle) => Ok(ShareableHandle::Fabric(handle.clone())),
        };
        drop(kept);
        if is_new && handle_type == HandleType::PosixFd {
            note(memory.driver(), &self.fd);
        }
        copy.map_err(failed("duplicating a file descriptor"))
    }

    /// Lends the CPU's view of all of `memory`, through a mapping that is created for it and kept.
    pub fn with_cpu<T>(
        &self,
        memory: &PhysicalMemory,
        with: impl FnOnce(CpuView<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut cpu = lock(&self.cpu);
        let mapping = match &mut *cpu {
            Some(mapping) => mapping,
            none => {
                let mut mapping = memory.map()?;
                mapping.set_access(&[AccessDesc::new(Location::Host, Access::ReadWrite)])?;
                none.insert(mapping)
            }
        };
        with(mapping.padded_cpu()?)
    }
}

/// The most exported fds that a process keeps open for later exports, over all memory of a driver. A memory has an fd
/// for each part, and a process has 1024 by default.
pub(super) const MAX_KEPT: usize = 16;

/// A place for a part's exported fd.
pub(super) type Place = Mutex<Option<ShareableHandle>>;

/// The places of one driver with an fd, the oldest first.
type Kept = Arc<Mutex<VecDeque<Weak<Place>>>>;

/// Records that `place` has an fd now, and closes the oldest ones beyond [`MAX_KEPT`]. The caller holds the lock of no
/// place.
pub(super) fn note(driver: &Driver, place: &Arc<Place>) {
    static KEPT: PerDriver<Kept> = PerDriver::new();
    let of_driver = KEPT.of(driver);
    let mut kept = lock(&of_driver);
    kept.retain(|other| other.strong_count() > 0);
    kept.push_back(Arc::downgrade(place));
    let beyond = kept.len().saturating_sub(MAX_KEPT);
    let oldest: Vec<_> = kept.drain(..beyond).collect();
    drop(kept);
    for place in oldest.iter().filter_map(Weak::upgrade) {
        let fd = lock(&place).take();
        // The last copy's close takes the driver's time.
        drop(fd);
    }
}

/// A part's memory, and its exports, which are dropped before it.
#[derive(Debug)]
enum Source {
    /// The memory with this index in a buffer.
    Buffer(Exports, Arc<Buffer>, usize),
    Physical(Exports, PhysicalMemory),
    Held(Arc<dyn Holds>),
}

impl Source {
    fn physical(&self) -> &PhysicalMemory {
        match self {
            Self::Buffer(_, buffer, index) => &buffer.physical()[*index],
            Self::Physical(_, memory) => memory,
            Self::Held(part) => part.physical(),
        }
    }

    fn exports(&self) -> &Exports {
        match self {
            Self::Buffer(exports, ..) | Self::Physical(exports, _) => exports,
            Self::Held(part) => part.exports(),
        }
    }
}
