//! Decides which node gets how many bytes, from a topology alone: nothing is read from the system.

use serde::{Deserialize, Serialize};

use super::{NumaNode, Topology, add_once};
use crate::driver::NodeId;
use crate::size::Granularity;
use crate::{Error, Result};

/// The environment variable that allows requests beyond the free memory: any value except an empty one and
/// `0`.
pub const ALLOW_OVERCOMMIT: &str = "EGMEM_ALLOW_OVERCOMMIT";

/// Where to place memory.
///
/// ```
/// use egmem::Machine;
/// use egmem::topology::{Placement, Topology};
///
/// # fn main() -> egmem::Result<()> {
/// let topology = Topology::of_machine(&Machine::gh200x4())?;
/// let shares = Placement::Nearest { gpu: 2 }.request(1 << 30).place(&topology)?;
/// assert_eq!(shares.len(), 1);
/// assert_eq!(shares[0].node, topology.gpu(2)?.host_node()?);
///
/// let spread = Placement::Spread.request(1 << 30).place(&topology)?;
/// assert_eq!(spread.iter().map(|share| share.bytes).sum::<u64>(), 1 << 30);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// On the host node nearest to a GPU.
    Nearest {
        /// The GPU's ordinal.
        gpu: i32,
    },
    /// On this host node.
    Node(NodeId),
    /// In equal parts on all host nodes that have CPUs (on all nodes, if none has any), in whole units of the
    /// granularity. A node whose CPUs are unknown counts as one that has some. Nodes on which this process may not
    /// [allocate](NumaNode::allowed) take no part, unless it may on none. A node with less free memory than its part
    /// gives all it has and the others take the rest. The limit of the control groups counts once for all nodes. Odd
    /// units go to the nodes with the most free memory.
    Spread,
}

impl Placement {
    /// Returns a request for `bytes` with this placement.
    pub fn request(self, bytes: u64) -> PlacementRequest {
        PlacementRequest {
            placement: self,
            bytes,
            granularity: Granularity::TWO_MIB,
            overcommit: Overcommit::Refuse,
        }
    }
}

/// The answer to a request beyond the free memory.
///
/// Pinned memory cannot be swapped out, so beyond the free memory the kernel starts to kill processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overcommit {
    /// Refuse it, with the numbers.
    #[default]
    Refuse,
    /// Pass it to the driver: for virtual machines whose memory grows when it is touched, or to let the
    /// kernel reclaim memory that the estimate does not count.
    Allow,
}

impl Overcommit {
    /// Returns [`Overcommit::Allow`] if the environment variable [`ALLOW_OVERCOMMIT`] says so.
    pub fn from_env() -> Self {
        match std::env::var_os(ALLOW_OVERCOMMIT) {
            Some(value) if !value.is_empty() && value != "0" => Self::Allow,
            _ => Self::Refuse,
        }
    }
}

/// A part of a request, and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Share {
    /// The host node.
    pub node: NodeId,
    /// The bytes to place there: at least 1.
    pub bytes: u64,
}

/// A request for memory: a [`Placement`], a size, and what to do when it is too big.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct PlacementRequest {
    placement: Placement,
    bytes: u64,
    granularity: Granularity,
    overcommit: Overcommit,
}

impl PlacementRequest {
    crate::driver::setters! {
        /// Sets the unit in which memory is created; 2 MiB by default.
        granularity(granularity: Granularity) => granularity = granularity;

        /// Sets what to do if the request exceeds the free memory.
        overcommit(overcommit: Overcommit) => overcommit = overcommit;
    }

    /// [`Overcommit::Allow`]
    pub fn allow_overcommit(self) -> Self {
        self.overcommit(Overcommit::Allow)
    }

    /// Returns the shares of the nodes, by ascending id. They add up to exactly the bytes requested, and all
    /// except one are multiples of the granularity.
    ///
    /// It queries nothing: free memory is as in `topology`, see [`Topology::refresh_free`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 bytes · [`Error::NoSuchGpu`], [`Error::NodeUnknown`],
    /// [`Error::NoSuchNode`] if there is no such node · [`Error::NodeTooFull`], [`Error::NodesTooFull`] if
    /// too little is free and overcommit is refused.
    pub fn place(self, topology: &Topology) -> Result<Vec<Share>> {
        if self.bytes == 0 {
            return Err(Error::invalid("size", "0 bytes cannot be placed"));
        }
        match self.placement {
            Placement::Nearest { gpu } => self.on(topology.node(topology.gpu(gpu)?.host_node()?)?),
            Placement::Node(id) => self.on(topology.node(id)?),
            Placement::Spread => self.spread(topology.nodes(), topology.cgroup_room),
        }
    }

    fn units(self) -> u64 {
        self.bytes.div_ceil(self.granularity.bytes())
    }

    /// Returns the whole units that fit the node.
    fn capacity(self, node: &NumaNode) -> u64 {
        match (self.overcommit, node.memory_free) {
            (Overcommit::Refuse, Some(free)) => free / self.granularity.bytes(),
            _ => u64::MAX,
        }
    }

    fn on(self, node: &NumaNode) -> Result<Vec<Share>> {
        if self.units() > self.capacity(node) {
            return Err(Error::NodeTooFull {
                node: node.id,
                requested: self.bytes,
                free: node.memory_free.unwrap_or(0),
            });
        }
        Ok(vec![Share {
            node: node.id,
            bytes: self.bytes,
        }])
    }

    fn spread(self, nodes: &[NumaNode], cgroup_room: Option<u64>) -> Result<Vec<Share>> {
        let some_allowed = nodes.iter().any(|node| node.allowed);
        let is_allowed = |node: &&NumaNode| node.allowed || !some_allowed;
        let nodes = || nodes.iter().filter(is_allowed);
        let with_cpus = nodes().any(|node| !node.lacks_cpus());
        // (units that fit, units given, id); nodes without memory take no part.
        let mut parts: Vec<(u64, u64, NodeId)> = nodes()
            .filter(|node| !(with_cpus && node.lacks_cpus()))
            .filter(|node| !(node.memory_total == 0 && node.memory_free == Some(0)))
            .map(|node| (self.capacity(node), 0, node.id))
            .collect();
        let fit = parts
            .iter()
            .fold(0, |sum: u64, part| sum.saturating_add(part.0));
        // Each node's free memory is within the control groups' limit, but all nodes together have it once.
        let fit = match (self.overcommit, cgroup_room) {
            (Overcommit::Refuse, Some(room)) => fit.min(room / self.granularity.bytes()),
            _ => fit,
        };
        let units = self.units();
        if units > fit {
            return Err(Error::NodesTooFull {
                nodes: parts.iter().map(|part| part.2).collect(),
                requested: self.bytes,
                free: fit * self.granularity.bytes(),
            });
        }
        // From the fullest node on, each takes an equal part of the remainder, or all it has.
        parts.sort_unstable();
        let mut left = units;
        for (taken, count) in (1..=parts.len() as u64).rev().enumerate() {
            let part = &mut parts[taken];
            part.1 = part.0.min(left / count);
            left -= part.1;
        }
        let mut given = Vec::new();
        for (_, units, node) in parts.into_iter().filter(|part| part.1 > 0) {
            add_once(&mut given, (node, units));
        }
        let unit = self.granularity.bytes();
        let mut rest = self.bytes;
        let shares = given.iter().map(|(node, units)| {
            // Only the last share need not be whole units.
            let bytes = rest.min(units.saturating_mul(unit));
            rest -= bytes;
            Share { node: *node, bytes }
        });
        Ok(shares.collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::topology::{CpuSet, TopologySource};

    fn topology(nodes: &[(Option<u64>, bool)]) -> Topology {
        let nodes = nodes.iter().enumerate().map(|(id, (free, cpus))| NumaNode {
            memory_total: free.unwrap_or(1 << 40),
            memory_free: *free,
            cpus: if *cpus {
                CpuSet::from_iter([id as u32])
            } else {
                CpuSet::default()
            },
            ..NumaNode::new(NodeId(id as i32))
        });
        Topology::new(
            TopologySource::Kernel,
            None,
            Vec::new(),
            nodes.collect(),
            None,
        )
    }

    proptest! {
        #[test]
        fn shares_add_up_fit_and_are_as_even_as_can_be(
            free in proptest::collection::vec(0_u64..1 << 34, 1..8),
            part in 0.0_f64..1.2,
            shift in 12_u32..24,
        ) {
            let unit = 1_u64 << shift;
            let fit: u64 = free.iter().map(|free| free / unit * unit).sum();
            let bytes = (fit as f64 * part) as u64 + 1;
            let nodes: Vec<_> = free.iter().map(|free| (Some(*free), true)).collect();
            let topology = topology(&nodes);
            let placed = Placement::Spread
                .request(bytes)
                .granularity(Granularity::new(unit).unwrap())
                .place(&topology);
            if bytes > fit {
                let refused = matches!(placed, Err(Error::NodesTooFull { free, requested, .. })
                    if free == fit && requested == bytes);
                prop_assert!(refused, "{placed:?}");
                return Ok(());
            }
            let shares = placed.unwrap();
            prop_assert_eq!(shares.iter().map(|share| share.bytes).sum::<u64>(), bytes);
            prop_assert!(shares.iter().rev().skip(1).all(|share| share.bytes % unit == 0));
            let units_of = |id: usize| {
                let share = shares.iter().find(|share| share.node.0 == id as i32);
                share.map_or(0, |share| share.bytes.div_ceil(unit))
            };
            let most = (0..free.len()).map(units_of).max().unwrap();
            for (id, free) in free.iter().enumerate() {
                let units = units_of(id);
                prop_assert!(units <= free / unit, "node {} has {} units too many", id, units);
                // A node with clearly less than the others has given all it has.
                prop_assert!(units + 1 >= most || units == free / unit);
            }
        }

        #[test]
        fn a_node_takes_what_fits_and_refuses_the_rest(free in 0_u64..1 << 40, bytes in 1_u64..1 << 40) {
            let topology = topology(&[(Some(free), true)]);
            let unit = Granularity::TWO_MIB.bytes();
            let request = Placement::Node(NodeId(0)).request(bytes);
            match request.place(&topology) {
                Ok(shares) => {
                    prop_assert_eq!(&shares, &[Share { node: NodeId(0), bytes }]);
                    prop_assert!(bytes.next_multiple_of(unit) <= free);
                }
                Err(error) => {
                    prop_assert_eq!(error, Error::NodeTooFull { node: NodeId(0), requested: bytes, free });
                    prop_assert!(bytes.next_multiple_of(unit) > free);
                }
            }
            prop_assert!(request.allow_overcommit().place(&topology).is_ok());
        }
    }

    #[test]
    fn memory_without_cpus_and_nodes_without_memory_take_no_part_in_a_spread() {
        let nodes = topology(&[
            (Some(1 << 30), true),
            (Some(0), true),
            (Some(1 << 30), false),
        ]);
        for request in [
            Placement::Spread.request(64 << 20),
            Placement::Spread.request(64 << 20).allow_overcommit(),
        ] {
            let shares = request.place(&nodes).unwrap();
            assert_eq!(
                shares,
                [Share {
                    node: NodeId(0),
                    bytes: 64 << 20
                }]
            );
        }
        let without_cpus = topology(&[(Some(1 << 30), false), (None, false)]);
        assert_eq!(
            Placement::Spread
                .request(64 << 20)
                .place(&without_cpus)
                .unwrap()
                .len(),
            2
        );
    }

    #[test]
    fn a_spread_keeps_to_the_nodes_that_the_process_may_allocate_on() {
        let mut nodes = topology(&[(Some(1 << 30), true), (Some(1 << 30), true), (None, false)]);
        let placed = |nodes: &Topology, bytes| {
            let shares = Placement::Spread.request(bytes).place(nodes);
            shares.map(|shares| shares.iter().map(|share| share.node.0).collect::<Vec<_>>())
        };
        nodes.nodes[0].allowed = false;
        assert_eq!(placed(&nodes, 64 << 20), Ok(vec![1]));
        let full = placed(&nodes, 2 << 30).unwrap_err();
        assert!(
            matches!(&full, Error::NodesTooFull { nodes, .. } if *nodes == [NodeId(1)]),
            "{full}"
        );
        // The only node allowed has no CPUs.
        nodes.nodes[1].allowed = false;
        assert_eq!(placed(&nodes, 64 << 20), Ok(vec![2]));
        nodes.nodes[2].allowed = false;
        assert_eq!(placed(&nodes, 64 << 20), Ok(vec![0, 1]));
    }

    #[test]
    fn a_control_groups_limit_counts_once_for_all_nodes() {
        let mut nodes = topology(&[(Some(1 << 30), true), (Some(1 << 30), true)]);
        nodes.cgroup_room = Some(1 << 30);
        let request = |bytes| Placement::Spread.request(bytes);
        assert_eq!(request(1 << 30).place(&nodes).unwrap().len(), 2);
        let full = request((1 << 30) + 1).place(&nodes).unwrap_err();
        assert!(
            matches!(full, Error::NodesTooFull { free, .. } if free == 1 << 30),
            "{full}"
        );
        assert!(request(3 << 30).allow_overcommit().place(&nodes).is_ok());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let nodes = topology(&[(None, true)]);
        let place = |placement: Placement, bytes| placement.request(bytes).place(&nodes);
        assert!(matches!(
            place(Placement::Spread, 0),
            Err(Error::InvalidArgument { .. })
        ));
        assert!(matches!(
            place(Placement::Node(NodeId(1)), 1),
            Err(Error::NoSuchNode { .. })
        ));
        assert!(matches!(
            place(Placement::Nearest { gpu: 0 }, 1),
            Err(Error::NoSuchGpu { .. })
        ));
        assert_eq!(
            place(Placement::Spread, u64::MAX).unwrap()[0].bytes,
            u64::MAX
        );
        assert!(matches!(
            Placement::Spread.request(1).place(&topology(&[])),
            Err(Error::NodesTooFull { .. })
        ));
    }
}
