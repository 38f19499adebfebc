//! Memory of this process that others may import.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use super::{Description, MAX_PARTS, Part};
use crate::capability::{Capabilities, Path};
use crate::driver::{
    Access, AccessDesc, Driver, HandleType, HandleTypes, Location, ShareableHandle,
};
use crate::memory::CpuView;
use crate::per_driver::lock;
use crate::vmm::{Mapping, PhysicalMemory};
use crate::{Buffer, Error, Result};

/// Memory of this process, to be described and exported to others. Clones are the same memory.
///
/// Whoever has imported it keeps the memory itself alive, whatever becomes of this value.
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
#[derive(Clone, Debug)]
pub struct Shared(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    // In this order: unmapped first, then released.
    windows: Mutex<BTreeMap<usize, Mapping>>,
    fds: Mutex<Vec<OwnedFd>>,
    memory: Memories,
    len: u64,
}

#[derive(Debug)]
enum Memories {
    Buffer(Arc<Buffer>),
    Physical(Vec<PhysicalMemory>),
}

impl From<Buffer> for Shared {
    fn from(buffer: Buffer) -> Self {
        Self::from(Arc::new(buffer))
    }
}

impl From<Arc<Buffer>> for Shared {
    fn from(buffer: Arc<Buffer>) -> Self {
        let len = buffer.len();
        Self::new(Memories::Buffer(buffer), len)
    }
}

impl Shared {
    fn new(memory: Memories, len: u64) -> Self {
        Self(Arc::new(Inner {
            windows: Mutex::default(),
            fds: Mutex::default(),
            memory,
            len,
        }))
    }

    /// Physical memory that need not be mapped here, side by side in this order, of which `len`
    /// bytes are of use.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no memory or more than [`MAX_PARTS`], for memory of several
    /// drivers, and for a `len` of 0, beyond them, or ending before the last one begins. That one may
    /// be padding alone, where peers can probe.
    pub fn from_physical(parts: Vec<PhysicalMemory>, len: u64) -> Result<Self> {
        let (Some(first), true) = (parts.first(), parts.len() <= MAX_PARTS) else {
            let why = format!("{} parts, not 1 to {MAX_PARTS}", parts.len());
            return Err(Error::invalid("memory", why));
        };
        for part in &parts {
            part.driver().expect_same(first.driver(), "memory")?;
        }
        let all = padded(&parts);
        let before = all - parts.last().map_or(0, |part| part.size().padded());
        if len == 0 || len < before || len > all {
            let why = format!("{len} bytes of {all}, of which the last part begins at {before}");
            return Err(Error::invalid("length", why));
        }
        Ok(Self::new(Memories::Physical(parts), len))
    }

    /// The physical memory again, if it was made from some and nobody else has a clone.
    #[cfg(feature = "service")]
    pub(crate) fn into_physical(self) -> Result<Vec<PhysicalMemory>, Self> {
        let inner = Arc::try_unwrap(self.0).map_err(Self)?;
        match inner {
            Inner {
                windows,
                fds,
                memory: Memories::Physical(parts),
                ..
            } => {
                // Unmapped, and no fd left, before anybody else gets it.
                drop((windows, fds));
                Ok(parts)
            }
            other => Err(Self(Arc::new(other))),
        }
    }

    fn parts(&self) -> &[PhysicalMemory] {
        match &self.0.memory {
            Memories::Buffer(buffer) => buffer.physical(),
            Memories::Physical(parts) => parts,
        }
    }

    /// What an importer must know beside the handles, and be told to keep to `access`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for [`Access::None`] or more than [`MAX_PARTS`] parts,
    /// [`Error::System`] where the kernel does not tell the machine's boot id.
    pub fn describe(&self, access: Access) -> Result<Description> {
        let part = |memory: &PhysicalMemory| {
            Ok(Part {
                identity: memory.identity()?,
                bytes: memory.size().padded(),
                location: memory.location(),
            })
        };
        let description = Description {
            len: self.0.len,
            access,
            parts: self.parts().iter().map(part).collect::<Result<_>>()?,
        };
        description.check()?;
        Ok(description)
    }

    /// Handles by which others import the memory: one for each part, in order.
    ///
    /// Whoever has them can read and write the memory, whatever the description says. The fds are
    /// duplicates of one that is exported once, because drivers have been seen to refuse the CPU's
    /// access to memory with more than some 250 exports, imports and CPU mappings together.
    ///
    /// # Errors
    /// Those of [`PhysicalMemory::export`]; [`Error::System`] where there are no more fds to be had.
    pub fn export(&self, handle_type: HandleType) -> Result<Vec<ShareableHandle>> {
        let export = |memory: &PhysicalMemory| memory.export(handle_type);
        if handle_type != HandleType::PosixFd {
            return self.parts().iter().map(export).collect();
        }
        let mut fds = lock(&self.0.fds);
        for memory in &self.parts()[fds.len()..] {
            if let ShareableHandle::PosixFd(fd) = export(memory)? {
                fds.push(fd);
            }
        }
        fds.iter()
            .map(|fd| fd.try_clone().map(ShareableHandle::PosixFd))
            .collect::<io::Result<_>>()
            .map_err(|error| Error::system("duplicating a file descriptor", &error))
    }

    /// The types that all of the memory can be exported as.
    pub fn handle_types(&self) -> HandleTypes {
        let bits = self.parts().iter().fold(u32::MAX, |bits, part| {
            bits & part.props().handle_types.bits()
        });
        HandleTypes::from_bits(bits)
    }

    /// Makes it count as other memory from now on: it changes owners, and who imported it as what it
    /// was is not to take it for the same.
    pub fn renew_identity(&self) {
        self.parts().iter().for_each(PhysicalMemory::renew_identity);
    }

    /// The driver it belongs to.
    pub fn driver(&self) -> &Driver {
        // Never empty: neither of the two ways to make one allows that.
        self.parts()[0].driver()
    }

    /// Where the first part lies.
    pub fn location(&self) -> Location {
        self.parts()[0].location()
    }

    /// The usable bytes.
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Never: there is at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// All bytes, padding included: what an importer maps.
    pub fn padded(&self) -> u64 {
        padded(self.parts())
    }

    /// The buffer, where it was made from one.
    pub fn buffer(&self) -> Option<&Arc<Buffer>> {
        match &self.0.memory {
            Memories::Buffer(buffer) => Some(buffer),
            Memories::Physical(_) => None,
        }
    }

    /// The word at `offset` bytes, read by the CPU: below [`padded`](Self::padded), so that it may
    /// lie in the padding, and within one part.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; where the memory is not mapped for the CPU, those of mapping it.
    pub fn word(&self, offset: u64) -> Result<u64> {
        self.with_cpu(offset, |cpu, at| cpu.get(at))
    }

    /// Writes a word, as [`word`](Self::word) reads one.
    ///
    /// # Errors
    /// As there.
    pub fn put_word(&self, offset: u64, word: u64) -> Result<()> {
        self.with_cpu(offset, |cpu, at| cpu.put(at, word))
    }

    /// Lends a window on the part in which `offset` lies, and says where in it: of the buffer's own
    /// mapping, if the CPU may write there, or of one that is made for it and kept.
    fn with_cpu<T>(
        &self,
        offset: u64,
        with: impl FnOnce(CpuView<'_>, u64) -> Result<T>,
    ) -> Result<T> {
        let (index, start) = self.part_at(offset)?;
        if let Some(buffer) = self.buffer()
            && let Ok(cpu) = buffer.mappings()[index].padded_cpu()
            && cpu.is_writable()
        {
            return with(cpu, offset - start);
        }
        let mut windows = lock(&self.0.windows);
        let mapping = match windows.entry(index) {
            Entry::Occupied(mapped) => mapped.into_mut(),
            Entry::Vacant(free) => free.insert(map_for_cpu(&self.parts()[index])?),
        };
        with(mapping.padded_cpu()?, offset - start)
    }

    /// Which part `offset` lies in, and where that begins.
    fn part_at(&self, offset: u64) -> Result<(usize, u64)> {
        let mut start = 0;
        for (index, part) in self.parts().iter().enumerate() {
            let next = part.size().padded().saturating_add(start);
            if offset < next {
                return Ok((index, start));
            }
            start = next;
        }
        Err(Error::OutOfRange {
            offset,
            len: size_of::<u64>() as u64,
            size: start,
        })
    }
}

fn padded(parts: &[PhysicalMemory]) -> u64 {
    // Each exists, so that together they fit an address space, or nearly.
    parts
        .iter()
        .fold(0, |sum, part| part.size().padded().saturating_add(sum))
}

fn map_for_cpu(memory: &PhysicalMemory) -> Result<Mapping> {
    let mut mapping = memory.map()?;
    mapping.set_access(&[AccessDesc::new(Location::Host, Access::ReadWrite)])?;
    Ok(mapping)
}

/// How memory can be made shareable on this machine: see [`best_handle_types`].
#[derive(Clone, Debug, PartialEq)]
pub struct Shareable {
    /// What to create it with.
    pub handle_types: HandleTypes,
    /// Why fabric handles are not among them.
    pub no_fabric: Option<Error>,
}

/// The handle types to create memory at `location` with, so that it can be shared as widely as
/// this machine allows: as fabric handle and POSIX fd, or as one of them. Found by trying, once per
/// driver.
///
/// # Errors
/// Why POSIX fds do not work, where neither does.
pub fn best_handle_types(driver: &Driver, location: Location) -> Result<Shareable> {
    const BOTH: HandleTypes =
        HandleTypes::from_bits(HandleTypes::FABRIC.bits() | HandleTypes::POSIX_FD.bits());
    let capabilities = Capabilities::of(driver);
    let tried = |types| capabilities.support(location, Path::Vmm, types).require();
    let only = |handle_types, no_fabric| Shareable {
        handle_types,
        no_fabric,
    };
    let Err(no_fabric) = tried(BOTH) else {
        return Ok(only(BOTH, None));
    };
    match tried(HandleTypes::POSIX_FD) {
        Ok(()) => Ok(only(HandleTypes::POSIX_FD, Some(no_fabric))),
        Err(error) => tried(HandleTypes::FABRIC)
            .map(|()| only(HandleTypes::FABRIC, None))
            .map_err(|_| error),
    }
}
