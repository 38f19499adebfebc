//! The use of a host node's memory, as far as the kernel reports it.

use serde::{Deserialize, Serialize};

use crate::driver::NodeId;

/// A host node's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NodeUse {
    /// The node.
    pub node: NodeId,
    /// All of its memory in bytes, as the [topology](crate::topology::NumaNode::memory_total) has it.
    pub total: u64,
    /// The bytes in use.
    pub used: u64,
    /// The bytes that the kernel accounts for: page cache, programs' plain memory, the kernel's own, huge pages. `None`: it
    /// does not say.
    pub kernel: Option<u64>,
    /// The bytes in the ledgers.
    pub accounted: u64,
    /// The bytes in use that neither the kernel nor a ledger accounts for: memory that drivers hold for other programs.
    pub unaccounted: Option<u64>,
}
