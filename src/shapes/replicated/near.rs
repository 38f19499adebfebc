//! The copy near to each reader.

use super::plan::nearest;
use crate::driver::{Location, NodeId};
use crate::topology::Topology;
use crate::{Error, Result};

/// The place near to each reader.
#[derive(Debug)]
pub(super) struct Near {
    gpus: Vec<Option<usize>>,
    nodes: Vec<(NodeId, Option<usize>)>,
    host: Option<usize>,
    topology: Topology,
}

impl Near {
    /// `may_read` tells whether a reader may read the place with an index.
    pub(super) fn new(
        topology: Topology,
        places: &[Location],
        may_read: impl Fn(Location, usize) -> bool,
    ) -> Self {
        let near = |who| {
            let indices = 0..places.len();
            let open: Vec<usize> = indices.filter(|&place| may_read(who, place)).collect();
            let at: Vec<Location> = open.iter().map(|&place| places[place]).collect();
            nearest(&topology, &at, who).map(|near| open[near])
        };
        let nodes = topology.nodes().iter();
        Self {
            gpus: topology.gpus().iter().map(|gpu| near(gpu.into())).collect(),
            nodes: nodes.map(|node| (node.id, near(node.into()))).collect(),
            host: near(Location::Host),
            topology,
        }
    }

    /// Returns the index of the place that is near to `who`; `None` if it can read none.
    pub(super) fn place(&self, who: Location) -> Result<Option<usize>> {
        match who {
            Location::Device(gpu) => {
                let known = usize::try_from(gpu).ok().and_then(|gpu| self.gpus.get(gpu));
                let count = self.gpus.len();
                known.copied().ok_or(Error::NoSuchGpu { gpu, count })
            }
            Location::HostNuma(id) => self.near_node(NodeId(id)),
            Location::HostNumaCurrent => self.near_node(self.topology.current_node()?),
            Location::Host => Ok(self.host),
        }
    }

    fn near_node(&self, id: NodeId) -> Result<Option<usize>> {
        let known = self.nodes.iter().find(|(node, _)| *node == id);
        known
            .map(|(_, place)| *place)
            .ok_or_else(|| Error::NoSuchNode {
                node: id,
                gpu: None,
                choices: self.nodes.iter().map(|(node, _)| *node).collect(),
            })
    }

    pub(super) fn topology(&self) -> &Topology {
        &self.topology
    }
}
