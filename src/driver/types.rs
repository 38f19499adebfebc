//! The types of the driver trait: locations, access, handle types, and properties.

use std::fmt;
use std::ops::{BitOr, BitOrAssign};

use serde::{Deserialize, Serialize};

/// Where memory lies, or where accesses come from. Source: `CUmemLocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Location {
    /// A GPU's own memory, by CUDA device ordinal.
    Device(i32),
    /// Host memory, on no particular node.
    Host,
    /// A host NUMA node, by the operating system's id.
    HostNuma(i32),
    /// The host NUMA node of the calling thread.
    HostNumaCurrent,
}

impl Location {
    /// Returns whether this is the CPU's memory, with or without a node.
    pub const fn is_host(self) -> bool {
        !matches!(self, Self::Device(_))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(ordinal) => write!(f, "GPU {ordinal}"),
            Self::Host => f.write_str("the host"),
            Self::HostNuma(node) => write!(f, "host NUMA node {node}"),
            Self::HostNumaCurrent => f.write_str("the calling thread's NUMA node"),
        }
    }
}

/// A NUMA node, by the operating system's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub i32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl From<NodeId> for Location {
    fn from(node: NodeId) -> Self {
        Self::HostNuma(node.0)
    }
}

/// The access of a location to mapped memory. Source: `CUmemAccess_flags`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Nothing.
    None,
    /// Read only.
    Read,
    /// Read and write.
    #[default]
    ReadWrite,
}

impl Access {
    /// Returns the value of `CUmemAccess_flags`: 0, 1 or 3.
    pub const fn flags(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Read => 1,
            Self::ReadWrite => 3,
        }
    }

    /// Returns the access for a driver's flags; `None` for a value that CUDA does not document.
    pub const fn from_flags(flags: u64) -> Option<Self> {
        match flags {
            0 => Some(Self::None),
            1 => Some(Self::Read),
            3 => Some(Self::ReadWrite),
            _ => None,
        }
    }
}

display_texts! {
    Access {
        Self::None => "no access",
        Self::Read => "read-only access",
        Self::ReadWrite => "read-write access",
    }
}

/// Access for one location. Source: `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AccessDesc {
    /// The location that gets access.
    pub location: Location,
    /// Its access.
    pub access: Access,
}

impl AccessDesc {
    /// Returns access for reading and writing for `who`: a [`Location`], a node's id or a GPU of a topology.
    pub fn read_write(who: impl Into<Location>) -> Self {
        Self::new(who, Access::ReadWrite)
    }

    /// Returns `access` for `who`: a [`Location`], a node's id or a GPU of a topology.
    pub fn new(who: impl Into<Location>, access: Access) -> Self {
        Self {
            location: who.into(),
            access,
        }
    }
}

/// One way to share memory with another process. Source: `CUmemAllocationHandleType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HandleType {
    /// A POSIX file descriptor, for processes of one machine.
    PosixFd,
    /// A fabric handle, for the nodes of an IMEX domain.
    Fabric,
}

display_texts! {
    HandleType {
        Self::PosixFd => "POSIX fd",
        Self::Fabric => "fabric",
    }
}

/// A set of [`HandleType`]s, chosen when memory is created.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct HandleTypes(u32);

impl HandleTypes {
    /// Not shareable.
    pub const NONE: Self = Self(0);
    /// Shareable as a POSIX file descriptor.
    pub const POSIX_FD: Self = Self(1);
    /// Shareable as a fabric handle.
    pub const FABRIC: Self = Self(8);

    /// Returns the driver's bit mask.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns the set with the driver's bit mask `bits`; keeps unknown bits.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Returns whether every type of `other` is in the set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl From<HandleType> for HandleTypes {
    fn from(handle_type: HandleType) -> Self {
        match handle_type {
            HandleType::PosixFd => Self::POSIX_FD,
            HandleType::Fabric => Self::FABRIC,
        }
    }
}

impl BitOr for HandleTypes {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for HandleTypes {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl fmt::Display for HandleTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.contains(Self::POSIX_FD), self.contains(Self::FABRIC)) {
            _ if self.0 & !9 != 0 => write!(f, "{:#x}", self.0),
            (true, true) => f.write_str("fabric | POSIX fd"),
            (true, false) => f.write_str("POSIX fd"),
            (false, true) => f.write_str("fabric"),
            (false, false) => f.write_str("none"),
        }
    }
}

impl fmt::Debug for HandleTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandleTypes({self})")
    }
}

/// The properties of physical memory. Source: `CUmemAllocationProp`, type PINNED.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AllocationProps {
    /// Where the memory lies.
    pub location: Location,
    /// How it may be shared.
    pub handle_types: HandleTypes,
    /// Whether to request GPUDirect RDMA (device memory only).
    pub gpu_direct_rdma: bool,
}

impl AllocationProps {
    /// Returns the properties of unshareable memory at `location`.
    pub const fn at(location: Location) -> Self {
        Self {
            location,
            handle_types: HandleTypes::NONE,
            gpu_direct_rdma: false,
        }
    }

    /// Sets how the memory may be shared.
    pub const fn handle_types(mut self, handle_types: HandleTypes) -> Self {
        self.handle_types = handle_types;
        self
    }
}

/// The properties of a memory pool. Source: `CUmemPoolProps`, type PINNED.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PoolProps {
    /// Where the pool's memory lies.
    pub location: Location,
    /// How the pool may be shared.
    pub handle_types: HandleTypes,
    /// The most bytes the pool may hold; 0: the driver's own limit. Ignored by drivers before 12.2.
    pub max_size: u64,
}

/// Blocks and threads of a kernel launch, in one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchDims {
    /// Blocks: 1 or more.
    pub blocks: u32,
    /// Threads per block: 1 to 1024.
    pub threads: u32,
}

/// The API through which pools are used. Both share their objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolApi {
    /// The driver API: `cuMemPoolCreate` and its family.
    #[default]
    Driver,
    /// The runtime API: `cudaMemPoolCreate` and its family.
    Runtime,
}
