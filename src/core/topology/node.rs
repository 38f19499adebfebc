//! Host NUMA nodes.

use std::collections::BTreeMap;

use serde::Serialize;

use super::CpuSet;
use crate::driver::{Location, NodeId};

/// A host NUMA node: a CPU socket's memory, or memory without CPUs (CXL) that does not belong to a GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NumaNode {
    /// The operating system's id, which is also the id of [`Location::HostNuma`].
    pub id: NodeId,
    /// The CPUs of the node; none if [unknown](Self::cpus_known).
    pub cpus: CpuSet,
    /// Whether the node's CPUs are known. An XML of hwloc gives a node without CPUs those of its neighbour, and does
    /// not always say which of the two has them.
    #[serde(skip_serializing_if = "is_true")]
    pub cpus_known: bool,
    /// Whether this process may allocate on the node (`cpuset.mems`), when the topology was read; `true` if unknown, and
    /// on other machines. [`Placement::Spread`](super::Placement::Spread) leaves out nodes that are not allowed.
    ///
    /// Source: `Mems_allowed_list`.
    #[serde(skip_serializing_if = "is_true")]
    pub allowed: bool,
    /// The node's memory in bytes; 0 if unknown.
    pub memory_total: u64,
    /// Bytes that an allocation could get when the topology was read: free pages and page cache that can be
    /// dropped, limited by the control group. `None`: unknown.
    pub memory_free: Option<u64>,
    /// The distance to each host node, including this one: 10 is local, as firmware reports it. Empty if
    /// unknown.
    pub distances: BTreeMap<NodeId, u32>,
    /// The GPUs for which this node is the nearest, by ordinal.
    pub gpus: Vec<i32>,
}

impl NumaNode {
    pub(super) fn new(id: NodeId) -> Self {
        Self {
            id,
            cpus: CpuSet::default(),
            cpus_known: true,
            allowed: true,
            memory_total: 0,
            memory_free: None,
            distances: BTreeMap::new(),
            gpus: Vec::new(),
        }
    }

    /// Returns whether the node is known to have no CPUs.
    pub(crate) fn lacks_cpus(&self) -> bool {
        self.cpus_known && self.cpus.is_empty()
    }
}

const fn is_true(value: &bool) -> bool {
    *value
}

impl From<&NumaNode> for Location {
    fn from(node: &NumaNode) -> Self {
        node.id.into()
    }
}
