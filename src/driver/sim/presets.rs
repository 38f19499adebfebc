//! Machines by name: those that come with the crate, files and the environment; checks of descriptions.

use std::collections::BTreeMap;
use std::path::Path;

use super::machine::{GpuSpec, Machine, NodeSpec, PeerAccess, parse_uuid};
use crate::text::pci_address;
use crate::{CudaVersion, Driver, Error, NodeId, Result};

const GIB: u64 = 1 << 30;
/// The limit of one memory's references, as measured.
const H200_REFERENCES: u32 = 254;
/// The CPUs of a Grace socket.
const GRACE_CPUS: i32 = 72;
/// SLIT distances that Grace machines report: another socket, and GPU memory.
const OTHER_SOCKET: u32 = 40;
const GPU_MEMORY: u32 = 80;
const FAR_GPU_MEMORY: u32 = 120;

impl Machine {
    /// The names that [`Machine::preset`] knows.
    pub const PRESETS: &'static [&'static str] = &["gh200", "gh200x4", "gb200", "h200x8"];

    /// Returns the preset called `name`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], listing the presets, if there is none of that name.
    pub fn preset(name: &str) -> Result<Self> {
        match name {
            "gh200" => Ok(Self::gh200()),
            "gh200x4" => Ok(Self::gh200x4()),
            "gb200" => Ok(Self::gb200()),
            "h200x8" => Ok(Self::h200x8()),
            _ => {
                let all = Self::PRESETS.join(", ");
                let why = format!("'{name}' is neither one of {all} nor a machine's description");
                Err(Error::invalid("preset", why))
            }
        }
    }

    /// Returns one GH200 superchip, 480 GB + 96 GB, a member of an NVLink domain.
    pub fn gh200() -> Self {
        let model = gpu("NVIDIA GH200 480GB", 96 * GIB);
        Self {
            imex_channel: true,
            ..grace("gh200", &[0], 480 * GIB, model, &[(0, 1)])
        }
    }

    /// Returns a quad GH200 node: CPU nodes 0 to 3, GPU memory nodes 4, 12, 20 and 28, 120 GB + 96 GB each.
    pub fn gh200x4() -> Self {
        let model = gpu("NVIDIA GH200 120GB", 96 * GIB);
        let gpus = [(0, 4), (1, 12), (2, 20), (3, 28)];
        grace("gh200x4", &[0, 1, 2, 3], 120 * GIB, model, &gpus)
    }

    /// Returns a GB200 node: two Grace sockets, four GPUs, a member of an NVLink domain.
    pub fn gb200() -> Self {
        let model = GpuSpec {
            compute_capability: (10, 0),
            multiprocessors: 152,
            ..gpu("NVIDIA GB200", 184 * GIB)
        };
        let gpus = [(0, 2), (0, 10), (1, 18), (1, 26)];
        Self {
            imex_channel: true,
            ..grace("gb200", &[0, 1], 480 * GIB, model, &gpus)
        }
    }

    /// Returns eight H200 on an x86-64 host with one NUMA node, as measured (docs/driver-behaviour.md).
    pub fn h200x8() -> Self {
        let gpus = (0..8)
            .map(|ordinal| GpuSpec {
                pci_bus_id: format!("0000:{:02x}:00.0", 0x8d + 2 * ordinal),
                host_numa: 0,
                ..gpu("NVIDIA H200", 71_578 << 21) // 139.8 GiB
            })
            .collect();
        let mut distances = BTreeMap::new();
        distances.insert(0, 10);
        Self {
            name: "h200x8".into(),
            nodes: vec![NodeSpec {
                id: 0,
                cpus: "0-127".into(),
                memory: 560 * GIB,
                distances,
            }],
            gpus,
            nvlink: PeerAccess::All,
            memory_references: Some(H200_REFERENCES),
            ..Self::default()
        }
    }
}

fn gpu(name: &str, memory: u64) -> GpuSpec {
    GpuSpec {
        name: name.into(),
        memory,
        ..GpuSpec::default()
    }
}

/// Builds a machine of Grace sockets; `gpus` are pairs of host node and GPU memory node.
fn grace(name: &str, nodes: &[i32], memory: u64, model: GpuSpec, gpus: &[(i32, i32)]) -> Machine {
    // A CPU's node is its own host.
    let all = nodes.iter().map(|&id| (id, id)).chain(gpus.iter().copied());
    let distances = |from: i32, host: i32| {
        let distance = |near: i32, to: i32| match to == from {
            true => 10,
            _ if near == host => GPU_MEMORY,
            _ if near == to && from == host => OTHER_SOCKET,
            _ => FAR_GPU_MEMORY,
        };
        let mut distances = BTreeMap::new();
        distances.extend(all.clone().map(|(near, to)| (to, distance(near, to))));
        distances
    };
    Machine {
        name: name.into(),
        nodes: nodes
            .iter()
            .map(|&id| NodeSpec {
                id,
                cpus: format!("{}-{}", id * GRACE_CPUS, (id + 1) * GRACE_CPUS - 1),
                memory,
                distances: distances(id, id),
            })
            .collect(),
        gpus: gpus
            .iter()
            .enumerate()
            .map(|(ordinal, &(host_numa, numa_id))| GpuSpec {
                pci_bus_id: format!("{:04x}:01:00.0", 9 + 0x10 * ordinal),
                host_numa,
                numa_id,
                coherent: true,
                distances: distances(numa_id, host_numa),
                ..model.clone()
            })
            .collect(),
        nvlink: PeerAccess::All,
        host_pool_for_device: true,
        ..Machine::default()
    }
}

/// The environment variable that names a machine to simulate.
const VARIABLE: &str = "EGMEM_SIM";

impl Machine {
    /// Returns the preset called `name`, or else the machine that the JSON file of that name describes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is neither, or the file cannot be read or is not a correct description;
    /// [`Error::DriverTooOld`] if it describes a driver before 12.2.
    pub fn load(name: impl AsRef<Path>) -> Result<Self> {
        let path = name.as_ref();
        match Self::preset(&path.to_string_lossy()) {
            Err(_) if path.exists() || path.extension().is_some_and(|end| end == "json") => {}
            preset => return preset,
        }
        let fault = |why: String| {
            let why = format!("{}: {why}", path.display());
            Error::invalid("machine description", why)
        };
        let text = std::fs::read_to_string(path).map_err(|error| fault(error.to_string()))?;
        let machine: Self =
            serde_json::from_str(&text).map_err(|error| fault(error.to_string()))?;
        machine.validate()?;
        Ok(machine)
    }

    /// Returns the machine that the environment variable `EGMEM_SIM` names, as for [`load`](Self::load); `None` if the
    /// variable is not set or empty.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the variable, if there is no such machine.
    pub fn from_env() -> Result<Option<Self>> {
        let name = std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
        let load = |name| {
            Self::load(name).map_err(|error| match error {
                Error::InvalidArgument { why, .. } => Error::invalid(VARIABLE, why),
                other => Error::invalid(VARIABLE, other.to_string()),
            })
        };
        name.map(load).transpose()
    }
}

impl Driver {
    /// Opens the driver that the environment chooses: the simulated machine that `EGMEM_SIM` names
    /// ([`Machine::from_env`]), otherwise this machine's CUDA driver.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] that names the variable, if there is no such machine; those of
    /// [`open`](Self::open) and [`simulated`](Self::simulated).
    pub fn from_env() -> Result<Self> {
        match Machine::from_env()? {
            Some(machine) => Self::simulated(machine),
            None => Self::open(),
        }
    }
}

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
        let mut ids = Vec::new();
        for node in &self.nodes {
            let (id, cpus) = (node.id, &node.cpus);
            refuse! { bad;
                id < 0 || ids.contains(&id) => "node id {id} is negative or used twice";
                node.memory == 0 => "node {id} has no memory";
                !is_cpu_list(cpus) => "'{cpus}', the CPUs of node {id}, is not a list such as 0-71";
            }
            ids.push(id);
        }
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            self.validate_gpu(ordinal, gpu, &ids)?;
            ids.extend((gpu.numa_id >= 0).then_some(gpu.numa_id));
        }
        self.validate_distances(&ids)?;
        let gpus = 0..self.gpus.len() as i32;
        for pairs in [&self.peer_access, &self.nvlink] {
            let PeerAccess::Pairs(pairs) = pairs else {
                continue;
            };
            for (a, b) in pairs {
                refuse! { bad;
                    a == b || !gpus.contains(a) || !gpus.contains(b) => "({a}, {b}) is not a pair of GPUs";
                }
            }
        }
        Ok(())
    }

    fn validate_gpu(&self, ordinal: usize, gpu: &GpuSpec, ids: &[i32]) -> Result<()> {
        let (host, memory) = (gpu.host_numa, gpu.numa_id);
        let (pci_bus_id, uuid) = (&gpu.pci_bus_id, &gpu.uuid);
        refuse! { |why| bad(format!("GPU {ordinal}: {why}"));
            gpu.memory == 0 => "it has no memory";
            host != -1 && self.node(NodeId(host)).is_none() => "its host NUMA node {host} does not exist";
            memory < -1 || ids.contains(&memory) =>
                "its memory's node {memory} is negative or used twice";
            !pci_bus_id.is_empty() && !is_pci_bus_id(pci_bus_id) =>
                "'{pci_bus_id}' is not a PCI bus id such as 0000:01:00.0";
            !uuid.is_empty() && parse_uuid(uuid).is_none() => "'{uuid}' is not a UUID";
        }
        Ok(())
    }

    fn validate_distances(&self, ids: &[i32]) -> Result<()> {
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
    let is_range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let ends = (first.parse::<u32>(), last.parse::<u32>());
        matches!(ends, (Ok(first), Ok(last)) if first <= last)
    };
    text.is_empty() || text.split(',').all(is_range)
}

#[cfg(test)]
mod tests;
