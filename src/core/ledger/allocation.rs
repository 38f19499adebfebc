//! The ledger's report of an allocation, as plain values.

use std::fmt;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::backing::{Backing, Chosen};
use crate::driver::{Access, AccessDesc, Location};
use crate::per_driver::lock;
use crate::text::cut;
use crate::vmm::identity::Identity;

/// How memory was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AllocPath {
    /// Physical memory of its own: `cuMemCreate`.
    Vmm,
    /// A chunk of a heap: `cuMemCreate`. The heap's blocks have no entries.
    HeapChunk,
    /// A part of a shape, such as a growable vector: `cuMemCreate`.
    ShapeChunk,
    /// Physical memory of another process: `cuMemImportFromShareableHandle`.
    Import,
    /// A pool's allocation: `cuMemAllocFromPoolAsync`.
    Pool,
    /// An allocation of another process's pool: `cuMemPoolImportPointer`.
    ImportedPool,
    /// Pinned host memory: `cuMemHostAlloc`.
    Pinned,
    /// Plain device memory: `cuMemAlloc`.
    Device,
    /// The process's own pages, pinned: `cuMemHostRegister`.
    Registered,
    /// The process's own pages, which GPUs reach through the CPU's page tables.
    System,
    /// Managed memory: `cuMemAllocManaged`.
    Managed,
    /// Another way, which a newer version of this crate knows.
    #[serde(other)]
    Other,
}

impl AllocPath {
    /// Returns whether another process allocated the memory: that process's ledger has it too.
    pub const fn is_import(self) -> bool {
        matches!(self, Self::Import | Self::ImportedPool)
    }

    /// Returns whether the memory takes room at [`Allocation::location`] for as long as it lives. The others are managed
    /// memory, whose pages lie where they were touched last, and this process's own pages, which the kernel counts.
    pub const fn takes_room(self) -> bool {
        !matches!(self, Self::Managed | Self::Registered | Self::System)
    }

    /// Returns a short name: `"vmm"`, `"heap chunk"`, …
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vmm => "vmm",
            Self::HeapChunk => "heap chunk",
            Self::ShapeChunk => "shape chunk",
            Self::Import => "import",
            Self::Pool => "pool",
            Self::ImportedPool => "imported pool",
            Self::Pinned => "pinned",
            Self::Device => "device",
            Self::Registered => "registered",
            Self::System => "system",
            Self::Managed => "managed",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for AllocPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Another process, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Party {
    /// Its process id on this machine, as the kernel told it when the memory was passed. The process may have ended, and
    /// its id may be another's by now.
    pub pid: Option<u32>,
    /// Its name: a peer's of the exchange, or the process and its user.
    pub name: String,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Where an import comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imported {
    /// The sender of its handle; `None` if the program passed the handle by means of its own.
    pub from: Option<Party>,
    /// The memory's identity, as the sender claims.
    pub identity: Option<Identity>,
}

/// The most bytes of frames that are kept as text.
const MAX_FRAMES: usize = 64 << 10;

/// The line of the program that allocated, in the program's own language.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CallSite {
    /// The source file, as the compiler or the interpreter knows it.
    pub file: String,
    /// The line.
    pub line: u32,
    /// The function, of a program in Python or C. Rust's sites have none.
    #[serde(default)]
    pub function: Option<String>,
    /// The frames of the call as text, if [`capture_backtraces`](super::capture_backtraces) was on.
    pub backtrace: Option<String>,
}

impl CallSite {
    /// Returns the site of a line.
    pub fn new(file: impl Into<String>, line: u32) -> Self {
        Self {
            file: file.into(),
            line,
            function: None,
            backtrace: None,
        }
    }

    /// Sets the function.
    #[must_use]
    pub fn function(mut self, name: impl Into<String>) -> Self {
        self.function = Some(name.into());
        self
    }

    /// Sets the frames of the call: at most 64 KiB of text are kept.
    #[must_use]
    pub fn backtrace(mut self, frames: &str) -> Self {
        self.backtrace = Some(cut(frames, MAX_FRAMES).to_owned());
        self
    }
}

impl fmt::Display for CallSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// A range of addresses at which memory is mapped in this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedAt {
    /// The first address.
    pub start: u64,
    /// The size in bytes.
    pub bytes: u64,
    /// The access of each location, as last granted through this crate. The CPU is [`Location::Host`].
    pub access: Vec<AccessDesc>,
}

impl MappedAt {
    /// Returns how far behind the start `address` is, if it is in the range.
    pub const fn offset_of(&self, address: u64) -> Option<u64> {
        match address.checked_sub(self.start) {
            Some(offset) if offset < self.bytes => Some(offset),
            _ => None,
        }
    }
}

/// A live allocation of this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Allocation {
    /// Its number among all that this process ever had.
    pub number: u64,
    /// The driver: `"cuda"`, `"simulated"`, or the name of a backend of the program's own.
    pub driver: String,
    /// Its size in bytes, in the allocator's units.
    pub bytes: u64,
    /// The node or GPU where it lies; of managed memory, the GPU that it was allocated for.
    pub location: Location,
    /// How it was allocated.
    pub path: AllocPath,
    /// The program's name for it.
    #[serde(default)]
    pub label: Option<String>,
    /// Milliseconds since it was allocated or imported.
    pub age_ms: u64,
    /// The call that allocated it.
    pub site: Option<CallSite>,
    /// Where it is mapped: nowhere, once, or more often.
    pub mapped: Vec<MappedAt>,
    /// How often a handle or a DMA-BUF of it was exported.
    pub exports: u64,
    /// The processes that it was sent to, as far as they are known; the last [`MAX_PARTIES`](super::MAX_PARTIES). They may
    /// have released it.
    pub exported_to: Vec<Party>,
    /// The memory's identity, by which importers know it; `None` for memory that has none.
    pub identity: Option<Identity>,
    /// Where it comes from, if it is another process's.
    pub imported: Option<Imported>,
    /// Whether the memory is the driver's or registered pages, and why; `None`: the driver's, or a path that has no choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<Chosen>,
    /// The driver refused to take it back: it stays until this process ends.
    pub lost: bool,
}

impl Allocation {
    /// Returns the path whose rules say what room it takes ([`AllocPath::takes_room`]): pages that another process shares
    /// are pages of a process too, which the kernel counts.
    pub fn room_path(&self) -> AllocPath {
        match &self.backing {
            Some(chosen) if chosen.backing == Backing::Registered => AllocPath::Registered,
            _ => self.path,
        }
    }
}

/// The access of some locations: of two, such as the CPU and its only GPU, the list takes no memory of its own.
pub type AccessList = SmallVec<[AccessDesc; 2]>;

/// The access of each location that has any. Owners of memory change it where they call the driver.
#[derive(Clone, Debug)]
pub enum Grants {
    /// Of one range.
    Range(AccessList),
    /// Of a pool, for all of its allocations.
    Pool(Arc<Mutex<AccessList>>),
}

impl Grants {
    /// Returns grants that the allocations of a pool share.
    pub fn of_pool(list: AccessList) -> Self {
        Self::Pool(Arc::new(Mutex::new(list)))
    }

    /// Notes the access of locations from now on, of a pool.
    pub fn set_shared(&self, changes: &[AccessDesc]) {
        if let Self::Pool(list) = self {
            replace(&mut lock(list), changes.into());
        }
    }

    /// As [`set_shared`](Self::set_shared), of one range.
    pub(super) fn set_own(&mut self, changes: AccessList) {
        if let Self::Range(list) = self {
            replace(list, changes);
        }
    }

    /// Returns all locations that may do something: the host first, as [`Location::Host`], then GPUs by ordinals.
    pub(super) fn list(&self) -> Vec<AccessDesc> {
        match self {
            Self::Range(list) => ordered(list),
            Self::Pool(list) => ordered(&lock(list)),
        }
    }
}

fn replace(list: &mut AccessList, mut changes: AccessList) {
    if list.is_empty() {
        *list = changes;
        return;
    }
    list.retain(|known| changes.iter().all(|new| owner(new) != owner(known)));
    list.append(&mut changes);
}

fn ordered(list: &[AccessDesc]) -> Vec<AccessDesc> {
    let mut all: Vec<AccessDesc> = Vec::new();
    for desc in list {
        let (gpu, access) = (owner(desc), desc.access);
        let desc = AccessDesc::new(gpu.map_or(Location::Host, Location::Device), access);
        let at = all.partition_point(|known| owner(known) < gpu);
        // The last of each location counts.
        match all.get_mut(at).filter(|known| owner(known) == gpu) {
            Some(known) => *known = desc,
            None => all.insert(at, desc),
        }
    }
    all.retain(|desc| desc.access != Access::None);
    all
}

/// Returns the GPU that has the access; `None` for every name of the host.
const fn owner(desc: &AccessDesc) -> Option<i32> {
    match desc.location {
        Location::Device(gpu) => Some(gpu),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;

    #[test]
    fn the_last_grant_of_a_location_counts() {
        let mut grants = Grants::Range(AccessList::new());
        let [host, one, two] = [
            Location::HostNuma(3),
            Location::Device(1),
            Location::Device(2),
        ];
        grants.set_own(smallvec![
            AccessDesc::new(two, Access::Read),
            AccessDesc::new(one, Access::ReadWrite),
            AccessDesc::new(host, Access::Read),
        ]);
        grants.set_own(smallvec![
            AccessDesc::new(Location::Host, Access::ReadWrite),
            AccessDesc::new(two, Access::None),
        ]);
        let expected = [
            AccessDesc::new(Location::Host, Access::ReadWrite),
            AccessDesc::new(one, Access::ReadWrite),
        ];
        assert_eq!(grants.list(), expected);
    }
}
