//! What memory on a host node is: the driver's, or registered pages of this process.

pub mod choose;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::driver::{Location, NodeId};
use crate::vmm::pages::Fork;

/// What memory on a host node is made of.
///
/// | | `Driver` | `Registered` |
/// |---|---|---|
/// | made by | `cuMemCreate`, on the node | `mmap`, pages created on the node by its CPUs, then `cuMemHostRegister` |
/// | a forked child | has the same memory | has the same memory; zeros of its own of a buffer that was asked for as `Registered` and cannot be shared |
/// | shared as | POSIX fd, fabric handle | POSIX fd. A peer that has it can punch holes: the CPU then sees zeros, and GPUs the old pages |
/// | access | of each GPU and the CPU apart | of the CPU apart, of all GPUs alike |
/// | copies by the driver | over borders of chunks | within one chunk: others fail with INVALID_VALUE |
/// | after other code resets the GPU that made it | as before | the CPU's alone: GPUs that use it fault |
/// | counted by the kernel | as no process's | as the process's, and by its control group |
///
/// docs/host-memory.md has figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backing {
    /// Memory that the driver creates on the node.
    #[default]
    Driver,
    /// Pages of this process on the node, huge ones where the kernel has them, which the driver pins.
    Registered,
    /// Registered where that is as good or better, else the driver's; [`Why`] lists the reasons.
    Auto,
}

crate::driver::display_texts! {
    Backing {
        Self::Driver => "driver",
        Self::Registered => "registered",
        Self::Auto => "auto",
    }
}

/// A decision between the driver's memory and registered memory, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Chosen {
    /// [`Driver`](Backing::Driver) or [`Registered`](Backing::Registered).
    pub backing: Backing,
    /// The reason.
    pub why: Why,
}

/// The reason of a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Why {
    /// The program asked for it.
    Asked,
    /// The process that exported the memory decided.
    Exporter,
    /// Registered memory is pinned several times as fast, and a trial of it succeeded.
    Faster,
    /// Registered memory lies on a host node that is named; this location is another.
    Location,
    /// The memory may have to be shared by fabric handles.
    Fabric,
    /// Registered memory is open to the CPU and to all GPUs, and less was asked for.
    Access,
    /// A GPU would know registered memory by other addresses than the CPU's.
    Pointer,
    /// One copy by the driver must be able to take all of it, and registered memory would have several chunks.
    Chunks,
    /// On coherent machines the driver's memory is what GPUs reach over their links; registered memory was never measured
    /// there.
    Coherent,
    /// A trial of registered memory failed, or its pages were not huge.
    Trial(String),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Asked => "the program asked for it",
            Self::Exporter => "another process made it so",
            Self::Faster => "registered memory is pinned faster",
            Self::Location => "registered memory needs a host node",
            Self::Fabric => "registered memory has no fabric handles",
            Self::Access => "registered memory is open to the CPU and all GPUs",
            Self::Pointer => "a GPU has other addresses for registered memory than the CPU",
            Self::Chunks => "one copy does not cross the chunks of registered memory",
            Self::Coherent => "registered memory was never measured on coherent machines",
            Self::Trial(text) => return write!(f, "registered memory failed a trial: {text}"),
        })
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.backing, self.why)
    }
}

impl Chosen {
    /// The driver's memory, because that was asked for.
    pub const DRIVER: Self = Self::driver(Why::Asked);

    pub(crate) const fn driver(why: Why) -> Self {
        let backing = Backing::Driver;
        Self { backing, why }
    }

    pub(crate) const fn registered(why: Why) -> Self {
        let backing = Backing::Registered;
        Self { backing, why }
    }

    /// Returns what a forked child has of a buffer's registered memory that cannot be shared: the same as of the driver's,
    /// unless the program asked for registered memory.
    pub(crate) fn fork_of_buffers(&self) -> Fork {
        match self.why {
            Why::Asked => Fork::Zeros,
            _ => Fork::Shared,
        }
    }

    /// Returns the node for pages at `location`; `None` if the driver creates the memory.
    pub(crate) fn node_of_pages(&self, location: Location) -> Option<NodeId> {
        match (self.backing, location) {
            (Backing::Registered, Location::HostNuma(node)) => Some(NodeId(node)),
            _ => None,
        }
    }
}
