//! GPUs and host nodes, and where new memory goes.

use std::collections::BTreeMap;

use egmem::driver::{Location, NodeId};
use egmem::topology::{self, NumaNode};
use pyo3::prelude::*;

use crate::args::{GpuArg, NodeArg};
use crate::error::{OrRaise, ToPy, invalid};
use crate::interpreter::record;

/// Makes the object of a GPU.
///
/// # Errors
/// Python's.
pub fn gpu<'py>(py: Python<'py>, gpu: &topology::Gpu) -> PyResult<Bound<'py, PyAny>> {
    let host_node = match gpu.host_node() {
        Ok(node) => node.0.into_pyobject(py)?.into_any(),
        Err(unknown) => unknown.to_py().into_value(py).into_bound(py).into_any(),
    };
    let values = (
        gpu.ordinal,
        &gpu.name,
        &gpu.pci_bus_id,
        gpu.uuid.map(|uuid| uuid.to_string()),
        gpu.memory,
        gpu.compute_capability,
        gpu.link.to_string(),
        gpu.coherent,
        &gpu.peers,
        host_node,
    );
    record(py, "Gpu", values)
}

/// Makes the object of a host node.
///
/// # Errors
/// Python's.
pub fn node<'py>(py: Python<'py>, node: &NumaNode) -> PyResult<Bound<'py, PyAny>> {
    let cpus: Vec<u32> = node.cpus.iter().collect();
    let distances = node.distances.iter();
    let distances: BTreeMap<i32, u32> = distances.map(|(to, distance)| (to.0, *distance)).collect();
    let (total, free) = (node.memory_total, node.memory_free);
    let values = (node.id.0, cpus, total, free, &node.gpus, distances);
    record(py, "Node", values)
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
