//! `egmem.Gpu` and `egmem.Node`.

use pyo3::prelude::*;

use crate::error::OrRaise;

/// A GPU of the machine.
#[pyclass(frozen, module = "egmem")]
pub struct Gpu {
    inner: egmem::topology::Gpu,
}

impl Gpu {
    /// Wraps it.
    pub fn wrap(inner: egmem::topology::Gpu) -> Self {
        Self { inner }
    }

    /// Returns the CUDA ordinal.
    pub fn number(&self) -> i32 {
        self.inner.ordinal
    }
}

#[pymethods]
impl Gpu {
    /// The CUDA ordinal.
    #[getter]
    fn ordinal(&self) -> i32 {
        self.inner.ordinal
    }

    /// The product name.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// The PCI address, as the driver writes it.
    #[getter]
    fn pci_bus_id(&self) -> &str {
        &self.inner.pci_bus_id
    }

    /// The UUID, as nvidia-smi writes it.
    #[getter]
    fn uuid(&self) -> Option<String> {
        self.inner.uuid.map(|uuid| uuid.to_string())
    }

    /// The GPU's own memory in bytes.
    #[getter]
    fn memory(&self) -> u64 {
        self.inner.memory
    }

    /// Major and minor compute capability.
    #[getter]
    fn compute_capability(&self) -> Option<(i32, i32)> {
        self.inner.compute_capability
    }

    /// The nearest host NUMA node. Raises `NoSuchPlace` if it is unknown.
    #[getter]
    fn host_node(&self) -> PyResult<i32> {
        self.inner.host_node().or_raise().map(|node| node.0)
    }

    /// The link to the CPU: `"NVLink-C2C"`, `"PCIe"` or `"unknown link"`.
    #[getter]
    fn link(&self) -> String {
        self.inner.link.to_string()
    }

    /// Whether GPU and CPU access each other's memory coherently.
    #[getter]
    fn coherent(&self) -> bool {
        self.inner.coherent
    }

    /// The ordinals of the GPUs whose memory this one can map.
    #[getter]
    fn peers(&self) -> Vec<i32> {
        self.inner.peers.clone()
    }

    fn __repr__(&self) -> String {
        format!(
            "<egmem.Gpu {}: {}, {}>",
            self.inner.ordinal, self.inner.name, self.inner.link
        )
    }
}

/// A host NUMA node.
#[pyclass(frozen, module = "egmem")]
pub struct Node {
    inner: egmem::topology::NumaNode,
}

impl Node {
    /// Wraps it.
    pub fn wrap(inner: egmem::topology::NumaNode) -> Self {
        Self { inner }
    }

    /// Returns the operating system's id.
    pub fn number(&self) -> i32 {
        self.inner.id.0
    }
}

#[pymethods]
impl Node {
    /// The operating system's id.
    #[getter]
    fn id(&self) -> i32 {
        self.inner.id.0
    }

    /// The node's CPUs.
    #[getter]
    fn cpus(&self) -> Vec<u32> {
        self.inner.cpus.iter().collect()
    }

    /// The node's memory in bytes; 0 if unknown.
    #[getter]
    fn memory_total(&self) -> u64 {
        self.inner.memory_total
    }

    /// The bytes that an allocation could get when the topology was read; `None` if unknown.
    #[getter]
    fn memory_free(&self) -> Option<u64> {
        self.inner.memory_free
    }

    /// The ordinals of the GPUs for which this node is the nearest.
    #[getter]
    fn gpus(&self) -> Vec<i32> {
        self.inner.gpus.clone()
    }

    /// The distance to each host node: 10 is local.
    #[getter]
    fn distances(&self) -> std::collections::BTreeMap<i32, u32> {
        self.inner
            .distances
            .iter()
            .map(|(node, distance)| (node.0, *distance))
            .collect()
    }

    fn __repr__(&self) -> String {
        format!(
            "<egmem.Node {}: {} bytes, GPUs {:?}>",
            self.inner.id, self.inner.memory_total, self.inner.gpus
        )
    }
}
