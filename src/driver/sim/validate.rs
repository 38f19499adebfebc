//! Checks of a machine's description.

use std::collections::BTreeSet;

use super::machine::{parse_pci, parse_uuid};
use super::{GpuSpec, Machine, PeerAccess};
use crate::{CudaVersion, NodeId};
use crate::{Error, Result};

impl Machine {
    /// Checks that the description does not contradict itself.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the first contradiction, [`Error::DriverTooOld`] for a
    /// driver before 12.2.
    pub fn validate(&self) -> Result<()> {
        let bad = |why: String| Err(Error::invalid("machine", why));
        if self.driver_version < CudaVersion::OLDEST {
            return Err(Error::DriverTooOld {
                what: "egmem",
                have: self.driver_version,
                need: CudaVersion::OLDEST,
            });
        }
        if self.nodes.is_empty() {
            return bad("it has no host NUMA node".into());
        }
        if self.pool_chunk == 0 || !self.pool_chunk.is_multiple_of(2 << 20) {
            return bad(format!(
                "pool_chunk is {}, which is not a multiple of 2 MiB",
                self.pool_chunk
            ));
        }
        if self.memory_references == Some(0) {
            return bad("memory_references is 0: no CPU could map anything".into());
        }
        let mut ids = BTreeSet::new();
        for node in &self.nodes {
            if node.id < 0 || !ids.insert(node.id) {
                return bad(format!("node id {} is negative or used twice", node.id));
            }
            if node.memory == 0 {
                return bad(format!("node {} has no memory", node.id));
            }
            if !is_cpu_list(&node.cpus) {
                return bad(format!(
                    "'{}', the CPUs of node {}, is not a list such as 0-71",
                    node.cpus, node.id
                ));
            }
        }
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            self.validate_gpu(ordinal, gpu, &mut ids)?;
        }
        self.validate_distances(&ids)?;
        let all = [&self.peer_access, &self.nvlink];
        let all = all.into_iter().filter_map(|pairs| match pairs {
            PeerAccess::Pairs(pairs) => Some(pairs),
            _ => None,
        });
        let count = self.gpus.len() as i32;
        for &(a, b) in all.flatten() {
            if !(0..count).contains(&a) || !(0..count).contains(&b) || a == b {
                return bad(format!("({a}, {b}) is not a pair of GPUs"));
            }
        }
        Ok(())
    }

    fn validate_gpu(&self, ordinal: usize, gpu: &GpuSpec, ids: &mut BTreeSet<i32>) -> Result<()> {
        let bad = |why: String| Err(Error::invalid("machine", format!("GPU {ordinal}: {why}")));
        if gpu.memory == 0 {
            return bad("it has no memory".into());
        }
        if gpu.host_numa != -1 && self.node(NodeId(gpu.host_numa)).is_none() {
            return bad(format!(
                "its host NUMA node {} does not exist",
                gpu.host_numa
            ));
        }
        if gpu.numa_id < -1 || (gpu.numa_id >= 0 && !ids.insert(gpu.numa_id)) {
            return bad(format!(
                "its memory's node {} is negative or used twice",
                gpu.numa_id
            ));
        }
        if !gpu.pci_bus_id.is_empty() && parse_pci(&gpu.pci_bus_id).is_none() {
            return bad(format!(
                "'{}' is not a PCI bus id such as 0000:01:00.0",
                gpu.pci_bus_id
            ));
        }
        if !gpu.uuid.is_empty() && parse_uuid(&gpu.uuid).is_none() {
            return bad(format!("'{}' is not a UUID", gpu.uuid));
        }
        Ok(())
    }

    fn validate_distances(&self, ids: &BTreeSet<i32>) -> Result<()> {
        let nodes = self.nodes.iter().map(|node| (node.id, &node.distances));
        let gpus = self.gpus.iter().map(|gpu| (gpu.numa_id, &gpu.distances));
        for (from, distances) in nodes.chain(gpus) {
            for (&to, &distance) in distances {
                if !ids.contains(&to) {
                    return Err(Error::invalid(
                        "machine",
                        format!("a distance names node {to}, which does not exist"),
                    ));
                }
                if (from == to) != (distance == 10) || distance < 10 {
                    return Err(Error::invalid(
                        "machine",
                        format!("the distance from node {from} to {to} cannot be {distance}"),
                    ));
                }
            }
        }
        Ok(())
    }
}

fn is_cpu_list(text: &str) -> bool {
    text.is_empty()
        || text.split(',').all(|part| match part.split_once('-') {
            Some((first, last)) => match (first.parse::<u32>(), last.parse::<u32>()) {
                (Ok(first), Ok(last)) => first <= last,
                _ => false,
            },
            None => part.parse::<u32>().is_ok(),
        })
}
