//! Drivers, their machines' GPUs and host nodes, and what works there.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use egmem::capability::Capabilities;
use egmem::doctor::{InProcess, Report};
use egmem::driver::NodeId;
use egmem::topology::{Gpu, LinkKind, NumaNode};
use egmem::{Driver, Error, Machine, Topology};

use crate::args::handle;
use crate::failure::{Failure, Outcome, given_json};
use crate::{answer, args, ask, destroy, egm_status, make};

/// A driver: CUDA's, or a simulated one. Everything that was made from it keeps it alive, so it may be destroyed
/// before them. Any thread may use it, several at a time.
pub struct egm_driver(pub(crate) Driver);

/// Opens the CUDA driver of this machine and initialises it. No library of CUDA is needed to build a program.
///
/// Fails with ::EGM_NO_DRIVER without a usable libcuda.so.1, ::EGM_DRIVER_TOO_OLD before CUDA 12.2,
/// ::EGM_DRIVER_FAILED.
///
/// # Safety
/// `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_driver_open(
    out: Option<&mut MaybeUninit<*mut egm_driver>>,
) -> egm_status {
    answer(out, || Ok(args::given(egm_driver(Driver::open()?))))
}

/// Makes a driver that simulates a machine: "gh200", "gh200x4", "gb200", "h200x8", or a description as JSON, which
/// begins with a brace. Its memory is ordinary memory of this process; it needs no GPU.
///
/// Fails with ::EGM_INVALID_ARGUMENT for another name and for a wrong description.
///
/// # Safety
/// `machine` is null or a string; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_driver_simulated(
    machine: *const c_char,
    out: Option<&mut MaybeUninit<*mut egm_driver>>,
) -> egm_status {
    answer(out, || {
        // SAFETY: the caller's promise.
        let machine = read_machine(unsafe { args::text(machine, "machine")? })?;
        Ok(args::given(egm_driver(Driver::simulated(machine)?)))
    })
}

fn read_machine(text: &str) -> Outcome<Machine> {
    if text.trim_start().starts_with('{') {
        let fault =
            |error: serde_json::Error| Failure::invalid("machine description", error.to_string());
        serde_json::from_str(text).map_err(fault)
    } else {
        Ok(Machine::preset(text)?)
    }
}

/// Tells whether the machine is simulated: times measured on it mean nothing.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_driver_is_simulated(
    driver: Option<&egm_driver>,
    out: Option<&mut MaybeUninit<bool>>,
) -> egm_status {
    answer(out, || Ok(handle(driver)?.0.is_simulated()))
}

/// Destroys a driver. Objects that were made from it stay usable. A null pointer is left alone.
///
/// # Safety
/// `driver` is null, or a driver that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_driver_destroy(driver: *mut egm_driver) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(driver) }
}

/// The GPUs and host nodes of a machine, read once. Any thread may use it, several at a time.
pub struct egm_topology(pub(crate) Topology);

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
    driver: Option<&egm_driver>,
    out: Option<&mut MaybeUninit<*mut egm_topology>>,
) -> egm_status {
    make(driver, out, |driver| {
        Ok(egm_topology(Topology::discover(&driver.0)?))
    })
}

/// Returns the number of GPUs; their ordinals count from 0.
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_gpu_count(
    topology: Option<&egm_topology>,
    out: Option<&mut MaybeUninit<usize>>,
) -> egm_status {
    ask(topology, out, |it| Ok(it.0.gpus().len()))
}

/// Returns the GPU with this CUDA ordinal. Fails with ::EGM_NO_SUCH_GPU.
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_gpu(
    topology: Option<&egm_topology>,
    ordinal: i32,
    out: Option<&mut MaybeUninit<egm_gpu>>,
) -> egm_status {
    ask(topology, out, |it| Ok(it.0.gpu(ordinal)?.into()))
}

/// Returns the number of host nodes. Nodes of GPUs' own memory do not count.
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_node_count(
    topology: Option<&egm_topology>,
    out: Option<&mut MaybeUninit<usize>>,
) -> egm_status {
    ask(topology, out, |it| Ok(it.0.nodes().len()))
}

/// Returns a host node by its place in the list, which begins at 0 and ascends by the nodes' ids.
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_node(
    topology: Option<&egm_topology>,
    index: usize,
    out: Option<&mut MaybeUninit<egm_node>>,
) -> egm_status {
    ask(topology, out, |topology| {
        let (nodes, at) = (topology.0.nodes(), index as u64);
        let none = || Error::invalid_index("host node", at, nodes.len() as u64);
        Ok(nodes.get(index).ok_or_else(none)?.into())
    })
}

/// Gives the whole topology as JSON, as `egmem topo --json` prints it. Free the text by egm_string_free().
///
/// # Safety
/// `topology` is null or a topology; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_json(
    topology: Option<&egm_topology>,
    out: Option<&mut MaybeUninit<*mut c_char>>,
) -> egm_status {
    ask(topology, out, |it| given_json(&it.0))
}

/// Destroys a topology. A null pointer is left alone.
///
/// # Safety
/// `topology` is null, or a topology that no thread uses during the call or afterwards: not destroyed yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_topology_destroy(topology: *mut egm_topology) -> egm_status {
    // SAFETY: the caller's promise.
    unsafe { destroy(topology) }
}

/// Tries the capabilities of this machine, and gives the report as JSON, as `egmem doctor --json` prints it: the
/// trials, the reasons for failures, and their remedies. Free the text by egm_string_free().
///
/// The trials run in this process and take milliseconds each: a driver that crashes in one ends the process. `egmem
/// doctor` runs each in a process of its own.
///
/// # Safety
/// `driver` is null or a driver; `out` is null or may be written. Any thread may call this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn egm_capabilities_json(
    driver: Option<&egm_driver>,
    out: Option<&mut MaybeUninit<*mut c_char>>,
) -> egm_status {
    ask(driver, out, |driver| {
        let mut prober = InProcess(Capabilities::of(&driver.0));
        given_json(&match driver.0.sim() {
            Some(sim) => Report::gather_simulated(&mut prober, sim.machine()),
            None => Report::gather(&mut prober),
        })
    })
}
