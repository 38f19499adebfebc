//! `egmem.Topology`: GPUs, host nodes, their distances.

use egmem::driver::NodeId;
use pyo3::prelude::*;

use crate::args::NodeArg;
use crate::class::to_python;
use crate::driver::{Driver, given_or_default};
use crate::error::OrRaise;
use crate::places::{Gpu, Node};

/// The GPUs and host NUMA nodes of a machine, as they were read.
#[pyclass(frozen, module = "egmem", name = "Topology")]
pub struct Topology {
    inner: egmem::Topology,
}

impl Topology {
    /// Wraps a topology.
    pub fn wrap(inner: egmem::Topology) -> Self {
        Self { inner }
    }
}

#[pymethods]
impl Topology {
    /// The GPUs, by ordinal.
    #[getter]
    fn gpus(&self) -> Vec<Gpu> {
        self.inner.gpus().iter().map(Gpu::from).collect()
    }

    /// The host nodes, by ascending id; never a GPU's own memory.
    #[getter]
    fn nodes(&self) -> Vec<Node> {
        self.inner.nodes().iter().map(Node::from).collect()
    }

    /// Returns the GPU with this ordinal.
    fn gpu(&self, ordinal: i32) -> PyResult<Gpu> {
        self.inner.gpu(ordinal).or_raise().map(Gpu::from)
    }

    /// Returns the host node with this id.
    fn node(&self, id: i32) -> PyResult<Node> {
        self.inner.node(NodeId(id)).or_raise().map(Node::from)
    }

    /// Returns the bytes that an allocation on a host node could get now; `None` if unknown.
    fn free_memory(&self, node: NodeArg) -> PyResult<Option<u64>> {
        self.inner.free_memory(NodeId(node.0)).or_raise()
    }

    /// Returns the text of `egmem topo`.
    fn to_text(&self) -> String {
        self.inner.to_text()
    }

    /// Returns the drawing of `egmem topo --svg`.
    fn to_svg(&self) -> String {
        self.inner.to_svg()
    }

    /// Returns the output of `egmem topo --json`, as a dictionary.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.inner)
    }

    fn __str__(&self) -> String {
        self.inner.to_text()
    }

    fn __repr__(&self) -> String {
        let (nodes, gpus) = (self.inner.nodes().len(), self.inner.gpus().len());
        let machine = self
            .inner
            .machine()
            .map(|name| format!(" of {name}, SIMULATED"))
            .unwrap_or_default();
        format!("<egmem.Topology{machine}: {nodes} host node(s), {gpus} GPU(s)>")
    }
}

/// Reads the topology of the machine of `driver`, or of the default one.
#[pyfunction]
#[pyo3(signature = (driver=None))]
pub fn topology(py: Python<'_>, driver: Option<&Bound<'_, Driver>>) -> PyResult<Topology> {
    let driver = given_or_default(py, driver)?;
    py.detach(|| egmem::Topology::discover(&driver))
        .or_raise()
        .map(Topology::wrap)
}
