//! Checks of a machine's description.

use std::collections::BTreeSet;

use super::machine::parse_uuid;
use super::{GpuSpec, Machine, NodeSpec, PeerAccess};
use crate::text::pci_address;
use crate::{CudaVersion, NodeId};
use crate::{Error, Result};

impl Machine {
    /// Checks that the description does not contradict itself.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the first contradiction, [`Error::DriverTooOld`] for a
    /// driver before 12.2.
    pub fn validate(&self) -> Result<()> {
        if self.driver_version < CudaVersion::OLDEST {
            return Err(Error::DriverTooOld {
                what: "egmem",
                have: self.driver_version,
                need: CudaVersion::OLDEST,
            });
        }
        refuse! { bad;
            self.nodes.is_empty() => "it has no host NUMA node";
            self.pool_chunk == 0 || !self.pool_chunk.is_multiple_of(2 << 20) =>
                "pool_chunk is {}, which is not a multiple of 2 MiB", self.pool_chunk;
            self.memory_references == Some(0) => "memory_references is 0: no CPU could map anything";
        }
        let mut ids = BTreeSet::new();
        for NodeSpec {
            id, cpus, memory, ..
        } in &self.nodes
        {
            refuse! { bad;
                *id < 0 || !ids.insert(*id) => "node id {id} is negative or used twice";
                *memory == 0 => "node {id} has no memory";
                !is_cpu_list(cpus) => "'{cpus}', the CPUs of node {id}, is not a list such as 0-71";
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
        let gpus = 0..self.gpus.len() as i32;
        for (a, b) in all.flatten() {
            refuse! { bad;
                a == b || !gpus.contains(a) || !gpus.contains(b) => "({a}, {b}) is not a pair of GPUs";
            }
        }
        Ok(())
    }

    fn validate_gpu(&self, ordinal: usize, gpu: &GpuSpec, ids: &mut BTreeSet<i32>) -> Result<()> {
        let GpuSpec {
            host_numa,
            numa_id,
            pci_bus_id,
            uuid,
            ..
        } = gpu;
        refuse! { |why| bad(format!("GPU {ordinal}: {why}"));
            gpu.memory == 0 => "it has no memory";
            *host_numa != -1 && self.node(NodeId(*host_numa)).is_none() =>
                "its host NUMA node {host_numa} does not exist";
            *numa_id < -1 || (*numa_id >= 0 && !ids.insert(*numa_id)) =>
                "its memory's node {numa_id} is negative or used twice";
            !pci_bus_id.is_empty() && !is_pci_bus_id(pci_bus_id) =>
                "'{pci_bus_id}' is not a PCI bus id such as 0000:01:00.0";
            !uuid.is_empty() && parse_uuid(uuid).is_none() => "'{uuid}' is not a UUID";
        }
        Ok(())
    }

    fn validate_distances(&self, ids: &BTreeSet<i32>) -> Result<()> {
        let nodes = self.nodes.iter().map(|node| (node.id, &node.distances));
        let gpus = self.gpus.iter().map(|gpu| (gpu.numa_id, &gpu.distances));
        for (from, distances) in nodes.chain(gpus) {
            for (&to, &distance) in distances {
                refuse! { bad;
                    !ids.contains(&to) => "a distance names node {to}, which does not exist";
                    (from == to) != (distance == 10) || distance < 10 =>
                        "the distance from node {from} to {to} cannot be {distance}";
                }
            }
        }
        Ok(())
    }
}

fn bad(why: String) -> Error {
    Error::invalid("machine", why)
}

/// Returns whether a text is a PCI address with a domain and nothing around it, as drivers report it.
fn is_pci_bus_id(text: &str) -> bool {
    let has_domain = text.matches(':').count() == 2;
    has_domain && text.trim() == text && pci_address(text).is_some()
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
