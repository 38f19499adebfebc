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
    /// The CPUs of the node.
    pub cpus: CpuSet,
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
            memory_total: 0,
            memory_free: None,
            distances: BTreeMap::new(),
            gpus: Vec::new(),
        }
    }
}

impl From<&NumaNode> for Location {
    fn from(node: &NumaNode) -> Self {
        node.id.into()
    }
}
