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
    ///
    /// # Errors
    /// Those of `may_read`.
    pub(super) fn new(
        topology: Topology,
        places: &[Location],
        may_read: impl Fn(Location, usize) -> Result<bool>,
    ) -> Result<Self> {
        let near = |who| {
            let mut open = Vec::new();
            for (index, &place) in places.iter().enumerate() {
                if may_read(who, index)? {
                    open.push((index, place));
                }
            }
            let at: Vec<Location> = open.iter().map(|&(_, place)| place).collect();
            Ok(nearest(&topology, &at, who).map(|near| open[near].0))
        };
        let gpus = topology.gpus().iter().map(|gpu| near(gpu.into()));
        let nodes = topology.nodes().iter();
        let nodes = nodes.map(|node| Ok((node.id, near(node.into())?)));
        Ok(Self {
            gpus: gpus.collect::<Result<_>>()?,
            nodes: nodes.collect::<Result<_>>()?,
            host: near(Location::Host)?,
            topology,
        })
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
