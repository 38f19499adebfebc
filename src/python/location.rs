//! Where new memory is to lie.

use egmem::driver::{DeviceAttribute, Location, NodeId};
use pyo3::prelude::*;

use crate::args::{GpuArg, NodeArg};
use crate::error::{OrRaise, invalid};

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
        (None, gpu, None) => py
            .detach(|| host_node(driver, gpu.map_or(0, |gpu| gpu.0)))
            .or_raise()
            .map(Into::into),
        _ => Err(invalid("node, near_gpu and device exclude each other")),
    }
}

fn host_node(driver: &egmem::Driver, gpu: i32) -> egmem::Result<NodeId> {
    match driver.device_attribute(gpu, DeviceAttribute::HOST_NUMA_ID) {
        Ok(node) if node >= 0 => Ok(NodeId(node)),
        _ => egmem::Topology::of(driver)?.gpu(gpu)?.host_node(),
    }
}
