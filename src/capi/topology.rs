//! GPUs and host nodes.

use std::ffi::c_char;

use egmem::driver::NodeId;
use egmem::topology::{Gpu, LinkKind, NumaNode};
use egmem::{Driver, Error, Topology};

use crate::call::{ask, call};
use crate::driver::create;
use crate::{args, egm_driver, egm_status, text};

/// The GPUs and host nodes of a machine, read once. Any thread may use it, several at a time.
pub struct egm_topology {
    topology: Topology,
}

/// The link between a GPU and the CPU is unknown.
pub const EGM_LINK_UNKNOWN: i32 = 0;
/// The link between a GPU and the CPU is NVLink-C2C: coherent.
pub const EGM_LINK_NVLINK_C2C: i32 = 1;
/// The link between a GPU and the CPU is PCI Express.
pub const EGM_LINK_PCIE: i32 = 2;

/// A GPU. egm_topology_json() has the rest: its name, its UUID, its links to other GPUs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_gpu {
    /// The CUDA ordinal.
    pub ordinal: i32,
    /// The nearest host node, where its Extended GPU Memory belongs; -1 if unknown.
    pub host_node: i32,
    /// The NUMA node that its own memory forms; -1 if it forms none.
    pub memory_node: i32,
    /// The compute capability's major part; 0 if unknown.
    pub compute_major: i32,
    /// The compute capability's minor part.
    pub compute_minor: i32,
    /// One of `EGM_LINK_…`.
    pub link: i32,
    /// 1 if GPU and CPU share page tables, otherwise 0.
    pub coherent: i32,
    /// 0.
    pub reserved: i32,
    /// Its own memory in bytes.
    pub memory: u64,
}

impl From<&Gpu> for egm_gpu {
    fn from(gpu: &Gpu) -> Self {
        let id = |node: Option<NodeId>| node.map_or(-1, |node| node.0);
        let (compute_major, compute_minor) = gpu.compute_capability.unwrap_or_default();
        Self {
            ordinal: gpu.ordinal,
            host_node: id(gpu.host_numa),
            memory_node: id(gpu.memory_node),
            compute_major,
            compute_minor,
            link: match gpu.link {
                LinkKind::NvlinkC2c => EGM_LINK_NVLINK_C2C,
                LinkKind::Pcie => EGM_LINK_PCIE,
                _ => EGM_LINK_UNKNOWN,
            },
            coherent: gpu.coherent.into(),
            reserved: 0,
            memory: gpu.memory,
        }
    }
}

/// A host NUMA node.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct egm_node {
    /// The operating system's number.
    pub id: i32,
    /// The number of GPUs for which it is the nearest.
    pub gpus: i32,
    /// Its memory in bytes; 0 if unknown.
    pub memory_total: u64,
    /// Bytes that an allocation could get when the topology was read; UINT64_MAX if unknown.
    pub memory_free: u64,
}

impl From<&NumaNode> for egm_node {
    fn from(node: &NumaNode) -> Self {
        Self {
            id: node.id.0,
            gpus: i32::try_from(node.gpus.len()).unwrap_or(i32::MAX),
            memory_total: node.memory_total,
            memory_free: node.memory_free.unwrap_or(u64::MAX),
        }
    }
}

/// Reads the topology of a driver's machine.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_discover(
    driver: *const egm_driver,
    out: *mut *mut egm_topology,
) -> egm_status {
    let make = |driver: &Driver| {
        Ok(egm_topology {
            topology: Topology::discover(driver)?,
        })
    };
    // SAFETY: the caller's promise.
    unsafe { create(driver, out, make) }
}

/// Returns the number of GPUs; their ordinals count from 0.
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_gpu_count(
    topology: *const egm_topology,
    out: *mut usize,
) -> egm_status {
    let answer = |topology: &egm_topology| Ok(topology.topology.gpus().len());
    // SAFETY: the caller's promise.
    unsafe { ask(topology, "topology", out, answer) }
}

/// Returns the GPU with this CUDA ordinal. Fails with ::EGM_NO_SUCH_GPU.
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_gpu(
    topology: *const egm_topology,
    ordinal: i32,
    out: *mut egm_gpu,
) -> egm_status {
    let answer = |topology: &egm_topology| {
        let gpu = topology.topology.gpu(ordinal)?.into();
        Ok(gpu)
    };
    // SAFETY: the caller's promise.
    unsafe { ask(topology, "topology", out, answer) }
}

/// Returns the number of host nodes. Nodes of GPUs' own memory do not count.
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_node_count(
    topology: *const egm_topology,
    out: *mut usize,
) -> egm_status {
    let answer = |topology: &egm_topology| Ok(topology.topology.nodes().len());
    // SAFETY: the caller's promise.
    unsafe { ask(topology, "topology", out, answer) }
}

/// Returns a host node by its place in the list, which begins at 0 and ascends by the nodes' ids.
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_node(
    topology: *const egm_topology,
    index: usize,
    out: *mut egm_node,
) -> egm_status {
    let answer = |topology: &egm_topology| {
        let nodes = topology.topology.nodes();
        let node = nodes
            .get(index)
            .ok_or_else(|| Error::invalid_index("host node", index as u64, nodes.len() as u64))?;
        Ok(node.into())
    };
    // SAFETY: the caller's promise.
    unsafe { ask(topology, "topology", out, answer) }
}

/// Gives the whole topology as JSON, as `egmem topo --json` prints it. Free the text by egm_string_free().
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_json(
    topology: *const egm_topology,
    out: *mut *mut c_char,
) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        let topology = unsafe { args::object(topology, "topology")? };
        let out = args::out(out, "out")?;
        // SAFETY: the caller's promise.
        unsafe { text::give_json(out, &topology.topology) }
    })
}

/// Destroys a topology. A null pointer is left alone.
///
/// # Safety
/// `topology` is null, or a topology that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_destroy(topology: *mut egm_topology) -> egm_status {
    call(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { args::take(topology) });
        Ok(())
    })
}
