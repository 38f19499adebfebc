//! Which copy is nearest to the CPU and to each GPU, and how data reach all copies.

use std::thread;

use crate::driver::{Access, Location, NodeId};
use crate::memory::{Memory, ParallelCopy, in_threads};
use crate::topology::{Gpu, LinkKind, PeerLinkKind, Topology};
use crate::{Buffer, Error, Result};

/// The place near to each reader.
#[derive(Debug)]
pub(super) struct Near {
    /// The readers that can read one, each with its place.
    places: Vec<(Location, usize)>,
    pub(super) topology: Topology,
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
        let gpus = topology.gpus().iter().map(Location::from);
        let nodes = topology.nodes().iter().map(Location::from);
        let mut near = Vec::new();
        for who in gpus.chain(nodes).chain([Location::Host]) {
            let mut open = Vec::new();
            for (index, &place) in places.iter().enumerate() {
                if may_read(who, index)? {
                    open.push((index, place));
                }
            }
            let at: Vec<Location> = open.iter().map(|&(_, place)| place).collect();
            near.extend(nearest(&topology, &at, who).map(|near| (who, open[near].0)));
        }
        Ok(Self {
            places: near,
            topology,
        })
    }

    /// Returns the index of the place that is near to `who`.
    ///
    /// # Errors
    /// [`Error::NotAccessible`] if it can read none; those of [`Replicated::local`](super::Replicated::local).
    pub(super) fn place(&self, who: Location) -> Result<usize> {
        let reader = match who {
            Location::HostNumaCurrent => self.topology.current_node()?.into(),
            who => who,
        };
        let known = self.places.iter().find(|(other, _)| *other == reader);
        if let Some(&(_, place)) = known {
            return Ok(place);
        }
        match reader {
            Location::Device(gpu) => _ = self.topology.gpu(gpu)?,
            Location::HostNuma(node) => _ = self.topology.node(NodeId(node))?,
            _ => {}
        }
        Err(Error::not_accessible(who, Access::None, Access::Read))
    }
}

/// Copies of this many bytes or more use several threads. Starting one takes about as long as copying a tenth of them.
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

/// Copies into GPUs' memories that run side by side: which copy is written, and from which; `None`: from the CPU.
pub(super) type Wave = Vec<(usize, Option<usize>)>;

/// Returns the place that `who` reads from best, if any: the GPU's own memory, then memory behind NVLink, then the
/// rest. By kinds of links, not by measured bandwidths: over NVLink-C2C the CPU's memory comes before other GPUs',
/// over PCIe after those that NVLink connects.
pub(super) fn nearest(topology: &Topology, places: &[Location], who: Location) -> Option<usize> {
    let costs = places.iter().enumerate().filter_map(|(index, &place)| {
        let cost = match who {
            Location::Device(gpu) => cost_to_gpu(topology, topology.gpu(gpu).ok()?, place),
            _ => cost_to_host(topology, who, place),
        };
        Some((cost?, index))
    });
    costs.min().map(|(_, index)| index)
}

/// Lower is better: a class, and the distance of nodes within it.
fn cost_to_gpu(topology: &Topology, gpu: &Gpu, place: Location) -> Option<(u32, u32)> {
    let own_node = gpu.host_node().ok();
    match place {
        Location::Device(owner) if owner == gpu.ordinal => Some((0, 0)),
        Location::Device(owner) => {
            let link = gpu.peer_link(owner).ok().filter(|link| link.access)?;
            match (link.kind, gpu.link) {
                (PeerLinkKind::Nvlink, LinkKind::NvlinkC2c) => Some((2, 0)),
                (PeerLinkKind::Nvlink, _) => Some((1, 0)),
                _ => Some((5, 0)),
            }
        }
        Location::HostNuma(node) => {
            let is_own = own_node.is_some_and(|own| own.0 == node);
            let class = match (gpu.link, is_own) {
                (LinkKind::NvlinkC2c, true) => 1,
                (_, true) => 3,
                (_, false) => 4,
            };
            Some((class, distance(topology, own_node.map(|node| node.0), node)))
        }
        _ => None,
    }
}

/// The CPU reads copies on host nodes alone.
fn cost_to_host(topology: &Topology, who: Location, place: Location) -> Option<(u32, u32)> {
    let Location::HostNuma(node) = place else {
        return None;
    };
    let from = match who {
        Location::HostNuma(from) => Some(from),
        _ => None,
    };
    let class = u32::from(from.is_some_and(|from| from != node));
    Some((class, distance(topology, from, node)))
}

fn distance(topology: &Topology, from: Option<i32>, to: i32) -> u32 {
    let known = from.and_then(|from| {
        let node = topology.node(crate::driver::NodeId(from)).ok()?;
        node.distances.get(&crate::driver::NodeId(to)).copied()
    });
    known.unwrap_or(u32::MAX)
}

/// Returns how the copies on GPUs get their bytes once those on host nodes have them.
///
/// A GPU that reaches its own node's copy over NVLink-C2C reads from there. Of other GPUs that NVLink connects to
/// each other, one reads from the CPU, unless another one has the bytes; those that have them pass them on to as many
/// others in each wave.
pub(super) fn waves(topology: &Topology, places: &[Location]) -> Vec<Wave> {
    let hosts: Vec<Location> = places.iter().copied().filter(|at| at.is_host()).collect();
    let gpus = places
        .iter()
        .enumerate()
        .filter_map(|(index, place)| match place {
            Location::Device(gpu) => Some((index, *gpu)),
            _ => None,
        });
    let mut rest: Vec<(usize, i32)> = gpus.collect();
    // Before the others, which may get the bytes from them.
    rest.sort_by_key(|&(_, gpu)| !reads_own_node(topology, &hosts, gpu));
    let passes_on =
        |to, from| !reads_own_node(topology, &hosts, to) && are_connected(topology, to, from);
    let mut first = Wave::new();
    let mut done: Vec<(usize, i32)> = Vec::new();
    rest.retain(|&(index, gpu)| {
        let is_root = !done.iter().any(|&(_, from)| passes_on(gpu, from));
        if is_root {
            let near = nearest(topology, &hosts, Location::Device(gpu));
            let near = near.and_then(|near| places.iter().position(|place| *place == hosts[near]));
            first.push((index, near));
            done.push((index, gpu));
        }
        !is_root
    });
    let mut waves = vec![first];
    while !rest.is_empty() {
        let mut wave = Wave::new();
        let mut free = done.clone();
        rest.retain(|&(index, gpu)| {
            let from = free.iter().position(|&(_, from)| passes_on(gpu, from));
            if let Some(from) = from {
                wave.push((index, Some(free.swap_remove(from).0)));
                done.push((index, gpu));
            }
            from.is_none()
        });
        waves.push(wave);
    }
    waves.retain(|wave| !wave.is_empty());
    waves
}

/// Returns whether NVLink-C2C leads from the GPU to a copy on its own node: nothing but its own memory is nearer.
fn reads_own_node(topology: &Topology, hosts: &[Location], gpu: i32) -> bool {
    topology.gpu(gpu).is_ok_and(|gpu| {
        let own = gpu.host_node().map(Location::from);
        gpu.link == LinkKind::NvlinkC2c && own.is_ok_and(|own| hosts.contains(&own))
    })
}

/// Returns whether GPU `to` reads GPU `from` over NVLink: faster than the CPU over PCIe, or another node than its
/// own.
fn are_connected(topology: &Topology, to: i32, from: i32) -> bool {
    let link = topology.gpu(to).and_then(|gpu| gpu.peer_link(from));
    link.is_ok_and(|link| link.access && link.kind == PeerLinkKind::Nvlink)
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

#[cfg(test)]
mod plan_tests {
    use super::*;
    use crate::Driver;
    use egmem_core::Machine;
    use egmem_core::driver::sim::PeerAccess;

    const fn gpu(ordinal: i32) -> Location {
        Location::Device(ordinal)
    }

    const fn node(id: i32) -> Location {
        Location::HostNuma(id)
    }

    fn topology(machine: Machine) -> Topology {
        Topology::discover(&Driver::simulated(machine).unwrap()).unwrap()
    }

    #[test]
    fn the_nearest_copy_depends_on_the_links() {
        let x86 = topology(Machine::h200x8());
        let grace = topology(Machine::gh200x4());
        for (topology, places, who, expected) in [
            (&x86, vec![node(0), gpu(3), gpu(5)], gpu(5), Some(2)),
            (&x86, vec![node(0), gpu(3)], gpu(5), Some(1)),
            (&x86, vec![gpu(3), node(0)], node(0), Some(1)),
            (&x86, vec![gpu(3)], node(0), None),
            (&x86, vec![gpu(3), node(0)], Location::Host, Some(1)),
            (&grace, vec![gpu(0), node(1), node(2)], gpu(2), Some(2)),
            (&grace, vec![node(1), gpu(0)], gpu(2), Some(1)),
            (&grace, vec![node(1), node(3)], gpu(3), Some(1)),
            (&grace, vec![node(1), node(3)], node(3), Some(1)),
            (&grace, vec![node(1), node(3)], node(0), Some(0)),
        ] {
            assert_eq!(
                nearest(topology, &places, who),
                expected,
                "{places:?} for {who}"
            );
        }
        let mut apart = Machine::h200x8();
        apart.nvlink = PeerAccess::None;
        let pcie = topology_of(apart.clone());
        assert_eq!(nearest(&pcie, &[gpu(3), node(0)], gpu(5)), Some(1));
        apart.peer_access = PeerAccess::None;
        let none = topology_of(apart);
        assert_eq!(nearest(&none, &[gpu(3)], gpu(5)), None);
    }

    fn topology_of(machine: Machine) -> Topology {
        topology(machine)
    }

    #[test]
    fn bytes_spread_over_nvlink_and_come_from_the_cpu_elsewhere() {
        let x86 = topology(Machine::h200x8());
        let all: Vec<Location> = (0..8).map(gpu).collect();
        // 1 GPU, then 2, 4 and 8 have them.
        let sizes: Vec<usize> = waves(&x86, &all).iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 1, 2, 4]);
        assert_eq!(waves(&x86, &all)[0], [(0, None)]);
        let with_host = [node(0), gpu(2), gpu(4)];
        assert_eq!(
            waves(&x86, &with_host),
            [vec![(1, Some(0))], vec![(2, Some(1))]]
        );
        // Over NVLink-C2C each GPU reads its own node's copy.
        let grace = topology(Machine::gh200x4());
        let places = [gpu(0), gpu(1), node(1), node(0)];
        assert_eq!(waves(&grace, &places), [[(0, Some(3)), (1, Some(2))]]);
        // Those without one get the bytes from GPUs that have them.
        let places = [gpu(0), gpu(1), node(1), gpu(2), gpu(3)];
        let expected = [
            vec![(1, Some(2))],
            vec![(0, Some(1))],
            vec![(3, Some(1)), (4, Some(0))],
        ];
        assert_eq!(waves(&grace, &places), expected);
        // Without a copy on a node the CPU's bytes cross the link between CPU and GPU once.
        let sizes: Vec<usize> = waves(&grace, &all[..4]).iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 1, 2]);
        // Without NVLink between the GPUs each reads the nearest copy.
        let mut apart = Machine::gh200x4();
        apart.nvlink = PeerAccess::None;
        let places = [gpu(0), node(1), gpu(2)];
        let expected = [[(0, Some(1)), (2, Some(1))]];
        assert_eq!(waves(&topology(apart), &places), expected);
        assert_eq!(waves(&grace, &[node(0)]), Vec::<Wave>::new());
        // Two pairs by NVLink: each pair gets the bytes once from the CPU.
        let mut pairs = Machine::h200x8();
        pairs.gpus.truncate(4);
        pairs.nvlink = PeerAccess::Pairs(vec![(0, 1), (2, 3)]);
        let pairs = topology(pairs);
        let expected = [vec![(0, None), (2, None)], vec![(1, Some(0)), (3, Some(2))]];
        assert_eq!(waves(&pairs, &all[..4]), expected);
    }

    #[test]
    fn every_copy_is_written_once_and_from_one_that_was_written_before() {
        for name in Machine::PRESETS {
            let topology = topology(Machine::preset(name).unwrap());
            let nodes = topology.nodes().iter().map(Location::from);
            let gpus = topology.gpus().iter().map(Location::from);
            let places: Vec<Location> = nodes.chain(gpus).collect();
            let mut done: Vec<usize> = (0..topology.nodes().len()).collect();
            for wave in waves(&topology, &places) {
                assert!(
                    wave.iter()
                        .all(|(_, from)| from.is_some_and(|from| done.contains(&from)))
                );
                done.extend(wave.iter().map(|(to, _)| *to));
            }
            done.sort_unstable();
            assert_eq!(done, (0..places.len()).collect::<Vec<_>>(), "{name}");
        }
    }
}
