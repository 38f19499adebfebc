//! The copy near to each reader.

use std::thread;

use super::plan::nearest;
use crate::driver::{Location, NodeId};
use crate::memory::{Memory, ParallelCopy, in_threads};
use crate::topology::Topology;
use crate::{Buffer, Error, Result};

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

/// From this many bytes on each node has a thread of its own. Starting one takes about as long as copying a tenth of them.
const LEAST_BYTES: usize = 1 << 20;

/// Writes `bytes` to each of the buffers by the CPU, near to their nodes: in all with about as many threads as the process
/// may run at once.
pub(super) fn write(topology: &Topology, buffers: &[&Buffer], bytes: &[u8]) -> Result<()> {
    let one = |buffer: &&Buffer| {
        let copier = copier(topology, buffer.location(), buffers.len())?;
        copier.write_at(buffer.cpu()?, 0, bytes)
    };
    if bytes.len() < LEAST_BYTES {
        return buffers.iter().try_for_each(one);
    }
    in_threads((u64::MAX, buffers.len()), buffers.iter(), one)
}

/// Returns a copier for one of `count` copies that are written at the same time.
fn copier(topology: &Topology, location: Location, count: usize) -> Result<ParallelCopy> {
    let all = thread::available_parallelism().map_or(1, usize::from);
    let share = (all / count).max(1);
    let Location::HostNuma(node) = location else {
        return Ok(ParallelCopy::new().threads(share));
    };
    let node = NodeId(node);
    let near = match topology.usable_cpus(node)?.len() {
        0 => share,
        cpus => share.min(cpus),
    };
    Ok(ParallelCopy::on(topology, node)?.threads(near))
}

#[cfg(test)]
mod tests {
    use egmem_core::Machine;

    use super::*;
    use crate::Driver;

    #[test]
    fn all_nodes_get_the_bytes() {
        let driver = Driver::simulated(Machine::gh200x4()).unwrap();
        let topology = Topology::discover(&driver).unwrap();
        for len in [1000, LEAST_BYTES, 17 << 20] {
            let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
            let buffers: Vec<Buffer> = (0..4)
                .map(|node| Buffer::on(NodeId(node)).bytes(len as u64))
                .map(|options| options.allocate(&driver).unwrap())
                .collect();
            let all: Vec<&Buffer> = buffers.iter().collect();
            write(&topology, &all, &bytes).unwrap();
            for buffer in &buffers {
                let mut found = vec![0; len];
                buffer.read_at(0, &mut found).unwrap();
                assert!(found == bytes, "{len}");
            }
        }
    }
}
