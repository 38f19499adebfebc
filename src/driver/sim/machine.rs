//! Descriptions of machines to simulate.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Deserializer, Serialize};

use crate::size::Bytes;
use crate::{CudaVersion, NodeId, SimulatedHost, SimulatedNode};

/// A machine to simulate: its NUMA nodes, GPUs and driver.
///
/// In JSON only `nodes` and `gpus`, each with its `memory`, are required; a size is a number of bytes or a
/// text such as `"96 GiB"`.
///
/// ```
/// let machine: egmem::Machine = serde_json::from_str(
///     r#"{"nodes": [{"memory": "64 GiB"}], "gpus": [{"memory": "16 GiB", "host_numa": 0}]}"#,
/// )?;
/// machine.validate()?;
/// let driver = egmem::Driver::simulated(machine)?;
/// assert_eq!(driver.device_count()?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Machine {
    /// A human-readable name.
    pub name: String,
    /// The answer of `cuDriverGetVersion`: 12.2 or newer. The simulator refuses features that it lacks, as
    /// its driver does. 13.0 if not given.
    pub driver_version: CudaVersion,
    /// The host NUMA nodes: at least one.
    pub nodes: Vec<NodeSpec>,
    /// The GPUs, by CUDA ordinal.
    pub gpus: Vec<GpuSpec>,
    /// Which GPUs can access each other's memory.
    pub peer_access: PeerAccess,
    /// Which GPUs NVLink connects; PCIe connects the others. None if not given.
    pub nvlink: PeerAccess,
    /// Whether there is an IMEX channel; without one the driver refuses FABRIC.
    pub imex_channel: bool,
    /// Whether a host-NUMA pool may become a device's pool, so that `cudaMallocAsync` draws from it.
    pub host_pool_for_device: bool,
    /// How many bytes a pool grows by at a time, unless a request needs more: a multiple of 2 MiB.
    #[serde(deserialize_with = "bytes")]
    pub pool_chunk: u64,
    /// The most references that one physical memory may have, over all processes, when a CPU mapping is
    /// granted: exports (fds not closed), imports and CPU mappings count together, including that mapping.
    /// 254 was measured on H200 (docs/driver-behaviour.md). Not 0; `None`, the default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_references: Option<u32>,
    /// The most mappings that the kernel allows the process (`vm.max_map_count`), of which the simulator counts those that
    /// the CPU has access to. `None`, the default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_mappings: Option<u64>,
    /// Answers of `cuDeviceGetAttribute` that differ from those that the other fields imply, by the attribute's
    /// number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<i32, AttributeAnswer>,
    /// An `lstopo` XML file of the machine, which stands for hwloc's answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology_xml: Option<PathBuf>,
}

/// A host NUMA node: a CPU socket's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NodeSpec {
    /// The operating system's id. 0 if not given.
    pub id: i32,
    /// Its CPUs as a list, such as `0-71`; may be empty. The driver refuses memory on a node without CPUs if another
    /// node has some.
    pub cpus: String,
    /// Its memory in bytes.
    #[serde(deserialize_with = "bytes")]
    pub memory: u64,
    /// The distances to other NUMA nodes, including GPU memories, as in the firmware's SLIT: 10 is the node
    /// itself. May be empty: unknown.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub distances: BTreeMap<i32, u32>,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GpuSpec {
    /// Its product name.
    pub name: String,
    /// `domain:bus:device.function`; empty: derived from the ordinal.
    pub pci_bus_id: String,
    /// Its UUID as 32 hexadecimal digits, dashes and `GPU-` or `MIG-` allowed; empty: derived from the ordinal.
    pub uuid: String,
    /// Its memory in bytes.
    #[serde(deserialize_with = "bytes")]
    pub memory: u64,
    /// HOST_NUMA_ID; −1, the default: unknown.
    pub host_numa: i32,
    /// NUMA_ID: the node that its own memory forms on coherent machines; −1, the default: none.
    pub numa_id: i32,
    /// Whether it reaches host memory coherently, over NVLink-C2C.
    pub coherent: bool,
    /// Its compute capability, major and minor. 9.0 if not given.
    pub compute_capability: (i32, i32),
    /// The number of multiprocessors. 132 if not given.
    pub multiprocessors: i32,
    /// The distance from its memory's node to other NUMA nodes. May be empty: unknown.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub distances: BTreeMap<i32, u32>,
}

/// Pairs of GPUs: those that can access each other's memory, or that a link connects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerAccess {
    /// Every GPU and every other.
    #[default]
    All,
    /// No GPU and another.
    None,
    /// These pairs of ordinals, both ways.
    Pairs(Vec<(i32, i32)>),
}

impl PeerAccess {
    /// Returns whether two GPUs are a pair.
    fn has(&self, a: i32, b: i32) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Pairs(pairs) => pairs.contains(&(a, b)) || pairs.contains(&(b, a)),
        }
    }
}

/// An answer of `cuDeviceGetAttribute`: a number, or `"INVALID_VALUE"` if the driver does not know the
/// attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AttributeAnswer {
    /// The attribute's value.
    Value(i32),
    /// The call fails.
    Refused(Refusal),
}

/// How `cuDeviceGetAttribute` fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// `CUDA_ERROR_INVALID_VALUE`: the driver does not know the attribute.
    #[serde(rename = "INVALID_VALUE")]
    InvalidValue,
}

/// Parses a number of bytes, or a text such as `"96 GiB"`.
fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "a number of bytes, or a text such as \"96 GiB\""
    )]
    enum Size {
        Number(u64),
        Text(String),
    }
    match Size::deserialize(deserializer)? {
        Size::Number(bytes) => Ok(bytes),
        Size::Text(text) => text
            .parse::<Bytes>()
            .map(|bytes| bytes.0)
            .map_err(serde::de::Error::custom),
    }
}

impl Default for Machine {
    /// Returns a machine without nodes and GPUs, to be filled in.
    fn default() -> Self {
        Self {
            name: "custom".into(),
            driver_version: CudaVersion(13000),
            nodes: Vec::new(),
            gpus: Vec::new(),
            peer_access: PeerAccess::All,
            nvlink: PeerAccess::None,
            imex_channel: false,
            host_pool_for_device: false,
            pool_chunk: 32 << 20,
            memory_references: None,
            max_mappings: None,
            attributes: BTreeMap::new(),
            topology_xml: None,
        }
    }
}

impl Default for GpuSpec {
    /// Returns a GPU without memory and location, to be filled in.
    fn default() -> Self {
        Self {
            name: "Simulated GPU".into(),
            pci_bus_id: String::new(),
            uuid: String::new(),
            memory: 0,
            host_numa: -1,
            numa_id: -1,
            coherent: false,
            compute_capability: (9, 0),
            multiprocessors: 132,
            distances: BTreeMap::new(),
        }
    }
}

impl Machine {
    /// Returns the machine's host, with all memory free.
    pub fn host(&self) -> SimulatedHost {
        let node = |spec: &NodeSpec| SimulatedNode {
            id: NodeId(spec.id),
            cpus: spec.cpus.clone(),
            memory: spec.memory,
            free: spec.memory,
            distances: spec.distances.clone(),
        };
        SimulatedHost {
            machine: self.name.clone(),
            nodes: self.nodes.iter().map(node).collect(),
            imex_channel: self.imex_channel,
            mappings: 0,
            max_mappings: self.max_mappings,
            topology_xml: self.topology_xml.clone(),
        }
    }

    /// Returns the host node with this id.
    pub fn node(&self, id: NodeId) -> Option<&NodeSpec> {
        self.nodes.iter().find(|node| node.id == id.0)
    }

    /// Returns whether the driver creates memory on this host node: drivers were reported to refuse nodes without
    /// CPUs. A description in which no node has CPUs does not say which have none.
    pub(super) fn gives_memory_on(&self, id: NodeId) -> bool {
        let some_have_cpus = self.nodes.iter().any(|node| !node.cpus.is_empty());
        self.node(id)
            .is_some_and(|node| !(some_have_cpus && node.cpus.is_empty()))
    }

    /// Returns the GPU with this ordinal.
    pub fn gpu(&self, ordinal: i32) -> Option<&GpuSpec> {
        usize::try_from(ordinal)
            .ok()
            .and_then(|ordinal| self.gpus.get(ordinal))
    }

    /// Returns the distance from one NUMA node to another, host node or GPU memory; `None`: unknown.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        let gpu = || self.gpus.iter().find(|gpu| gpu.numa_id == from.0);
        match self.node(from) {
            Some(node) => node.distances.get(&to.0).copied(),
            None => gpu()?.distances.get(&to.0).copied(),
        }
    }

    /// Returns whether GPU `device` can access the memory of GPU `peer`; a GPU is not its own peer.
    pub fn peers(&self, device: i32, peer: i32) -> bool {
        self.are_two(device, peer) && self.peer_access.has(device, peer)
    }

    /// Returns whether NVLink connects two GPUs.
    pub fn linked(&self, device: i32, peer: i32) -> bool {
        self.are_two(device, peer) && self.nvlink.has(device, peer)
    }

    fn are_two(&self, device: i32, peer: i32) -> bool {
        device != peer && self.gpu(device).is_some() && self.gpu(peer).is_some()
    }

    /// Returns a GPU's PCI bus id, given or derived.
    pub fn pci_bus_id(&self, ordinal: i32) -> Option<String> {
        let gpu = self.gpu(ordinal)?;
        Some(if gpu.pci_bus_id.is_empty() {
            format!("{:04x}:01:00.0", ordinal)
        } else {
            gpu.pci_bus_id.clone()
        })
    }

    /// Returns a GPU's UUID, given or derived.
    pub fn uuid(&self, ordinal: i32) -> Option<[u8; 16]> {
        let gpu = self.gpu(ordinal)?;
        parse_uuid(&gpu.uuid).or_else(|| {
            let mut uuid = [0; 16];
            for (i, half) in uuid.chunks_exact_mut(8).enumerate() {
                // Any well-mixed function of the ordinal suffices: the UUID is stable and unique.
                let word = crate::kernels::pattern(0x5eed + ordinal as u64, 1 + i as u64);
                half.copy_from_slice(&word.to_be_bytes());
            }
            Some(uuid)
        })
    }
}

pub(super) fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits = text.strip_prefix("GPU-").or(text.strip_prefix("MIG-"));
    crate::text::hex_id(digits.unwrap_or(text))
}
