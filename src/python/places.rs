//! `egmem.Gpu` and `egmem.Node`, and where new memory goes.

use std::collections::BTreeMap;

use egmem::driver::{Location, NodeId};
use egmem::topology::NumaNode;
use pyo3::prelude::*;

use crate::args::{GpuArg, NodeArg};
use crate::error::{OrRaise, invalid};

/// A GPU of the machine.
#[pyclass(frozen, module = "egmem")]
pub struct Gpu {
    /// The CUDA ordinal.
    #[pyo3(get)]
    pub ordinal: i32,
    /// The product name.
    #[pyo3(get)]
    name: String,
    /// The PCI address, as the driver writes it.
    #[pyo3(get)]
    pci_bus_id: String,
    /// The UUID, as nvidia-smi writes it.
    #[pyo3(get)]
    uuid: Option<String>,
    /// The GPU's own memory in bytes.
    #[pyo3(get)]
    memory: u64,
    /// Major and minor compute capability.
    #[pyo3(get)]
    compute_capability: Option<(i32, i32)>,
    /// The link to the CPU: `"NVLink-C2C"`, `"PCIe"` or `"unknown link"`.
    #[pyo3(get)]
    link: String,
    /// Whether GPU and CPU access each other's memory coherently.
    #[pyo3(get)]
    coherent: bool,
    /// The ordinals of the GPUs whose memory this one can map.
    #[pyo3(get)]
    peers: Vec<i32>,
    host_node: egmem::Result<i32>,
}

impl From<&egmem::topology::Gpu> for Gpu {
    fn from(gpu: &egmem::topology::Gpu) -> Self {
        Self {
            ordinal: gpu.ordinal,
            name: gpu.name.clone(),
            pci_bus_id: gpu.pci_bus_id.clone(),
            uuid: gpu.uuid.map(|uuid| uuid.to_string()),
            memory: gpu.memory,
            compute_capability: gpu.compute_capability,
            link: gpu.link.to_string(),
            coherent: gpu.coherent,
            peers: gpu.peers.clone(),
            host_node: gpu.host_node().map(|node| node.0),
        }
    }
}

#[pymethods]
impl Gpu {
    /// The nearest host NUMA node. Raises `NoSuchPlace` if it is unknown.
    #[getter]
    fn host_node(&self) -> PyResult<i32> {
        self.host_node.clone().or_raise()
    }

    fn __repr__(&self) -> String {
        let (ordinal, name, link) = (self.ordinal, &self.name, &self.link);
        format!("<egmem.Gpu {ordinal}: {name}, {link}>")
    }
}

/// A host NUMA node.
#[pyclass(frozen, get_all, module = "egmem")]
pub struct Node {
    /// The operating system's id.
    pub id: i32,
    /// The node's CPUs.
    cpus: Vec<u32>,
    /// The node's memory in bytes; 0 if unknown.
    memory_total: u64,
    /// The bytes that an allocation could get when the topology was read; `None` if unknown.
    memory_free: Option<u64>,
    /// The ordinals of the GPUs for which this node is the nearest.
    gpus: Vec<i32>,
    /// The distance to each host node: 10 is local.
    distances: BTreeMap<i32, u32>,
}

impl From<&NumaNode> for Node {
    fn from(node: &NumaNode) -> Self {
        let distances = node.distances.iter();
        Self {
            id: node.id.0,
            cpus: node.cpus.iter().collect(),
            memory_total: node.memory_total,
            memory_free: node.memory_free,
            gpus: node.gpus.clone(),
            distances: distances.map(|(to, distance)| (to.0, *distance)).collect(),
        }
    }
}

#[pymethods]
impl Node {
    fn __repr__(&self) -> String {
        let (id, bytes, gpus) = (self.id, self.memory_total, &self.gpus);
        format!("<egmem.Node {id}: {bytes} bytes, GPUs {gpus:?}>")
    }
}

/// Returns the host node of a location.
pub fn node_of(location: Location) -> Option<i32> {
    match location {
        Location::HostNuma(node) => Some(node),
        _ => None,
    }
}

/// Returns the end of an object's text, which tells that its driver is simulated.
pub fn simulated_of(driver: &egmem::Driver) -> &'static str {
    if driver.is_simulated() {
        ", SIMULATED"
    } else {
        ""
    }
}

/// Returns the location that arguments name: a host node, the host node nearest to a GPU, or a GPU's own memory.
/// Without any of them it is the host node nearest to GPU 0.
///
/// # Errors
/// `InvalidArgument` for more than one; `NoSuchPlace`.
pub fn location(
    py: Python<'_>,
    driver: &egmem::Driver,
    node: Option<NodeArg>,
    near_gpu: Option<GpuArg>,
    device: Option<GpuArg>,
) -> PyResult<Location> {
    match (node, near_gpu, device) {
        (Some(node), None, None) => Ok(NodeId(node.0).into()),
        (None, None, Some(device)) => Ok(Location::Device(device.0)),
        (None, gpu, None) => {
            let gpu = gpu.map_or(0, |gpu| gpu.0);
            let node = py.detach(|| egmem::Topology::host_node_of(driver, gpu));
            node.or_raise().map(Into::into)
        }
        _ => Err(invalid("node, near_gpu and device exclude each other")),
    }
}
