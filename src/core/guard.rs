//! Why memory is refused: too little is free on its node, before the driver is asked for much of it; and the driver's codes,
//! converted to typed reasons.

use std::io::ErrorKind;

use crate::capability::ImexChannel;
use crate::driver::{
    Access, AccessDesc, AllocationProps, Code, CudaVersion, HandleTypes, Location, NodeId,
    PoolProps, versions,
};
use crate::topology::kernel::Kernel;
use crate::topology::{self, Overcommit, Topology, TopologySource};
use crate::{Driver, DriverError, Error, Result};

/// Smaller requests go to the driver unchecked: reading the node's counters takes a good part of the time of
/// creating them, and the kernel keeps as much in reserve.
pub const WORTH_ASKING: u64 = 64 << 20;

/// Refuses `bytes` at `location` if the node has less free; where the kernel chooses the nodes, if all have less.
///
/// Pinned memory cannot be swapped out: beyond a node's free memory the kernel starts to kill processes.
/// `idle` returns how many bytes exist already for the request, and is called only if they matter.
pub fn check_free(
    driver: &Driver,
    location: Location,
    bytes: u64,
    idle: impl FnOnce() -> u64,
) -> Result<()> {
    if bytes < WORTH_ASKING {
        return Ok(());
    }
    check_free_now(driver, location, bytes, idle).map(drop)
}

/// As [`check_free`], for any number of bytes; returns the free bytes, if the location is on the host and the number is known.
pub fn check_free_now(
    driver: &Driver,
    location: Location,
    bytes: u64,
    idle: impl FnOnce() -> u64,
) -> Result<Option<u64>> {
    let (nodes, free) = match location {
        Location::Device(_) => return Ok(None),
        Location::HostNuma(id) => (vec![NodeId(id)], topology::free_now(driver, NodeId(id))),
        Location::Host | Location::HostNumaCurrent => free_of_all(driver),
    };
    let Some(free) = free else { return Ok(None) };
    // The override is for machines that report less memory than they can provide.
    if free >= bytes
        || free.saturating_add(idle()) >= bytes
        || Overcommit::from_env() == Overcommit::Allow
    {
        return Ok(Some(free));
    }
    let requested = bytes;
    Err(match nodes[..] {
        [node] => Error::NodeTooFull {
            node,
            requested,
            free,
        },
        _ => Error::NodesTooFull {
            nodes,
            requested,
            free,
        },
    })
}

/// Returns the nodes on which this process may allocate, and what they have free within the control groups' limit; `None` if that is
/// not known for each.
fn free_of_all(driver: &Driver) -> (Vec<NodeId>, Option<u64>) {
    let Ok(topology) = Topology::of(driver) else {
        return (Vec::new(), None);
    };
    let nodes = topology.nodes();
    let some_allowed = nodes.iter().any(|node| node.allowed);
    let nodes = nodes.iter().filter(|node| node.allowed || !some_allowed);
    let nodes: Vec<NodeId> = nodes.map(|node| node.id).collect();
    let mut free = nodes.iter().map(|&node| topology::free_now(driver, node));
    let sum = free.try_fold(0_u64, |sum, free| Some(sum.saturating_add(free?)));
    let room = topology::cgroup_room(driver).unwrap_or(u64::MAX);
    let known = sum.filter(|_| !nodes.is_empty());
    (nodes, known.map(|sum| sum.min(room)))
}

/// Returns whether an error says that there was too little memory: less of it, or later, or on another node, there may be.
pub fn is_shortage(error: &Error) -> bool {
    match error {
        Error::NodeTooFull { .. } | Error::NodesTooFull { .. } => true,
        // The kernel has no pages on the node.
        Error::System { kind, .. } => *kind == ErrorKind::OutOfMemory,
        _ => error.code() == Some(Code::OUT_OF_MEMORY),
    }
}

/// Returns whether an error says nothing about what the machine and the driver can do: it may pass.
pub fn is_passing(error: &Error) -> bool {
    use ErrorKind::{InvalidInput, NotFound, PermissionDenied, Unsupported};
    let lasting = |kind| {
        matches!(
            kind,
            InvalidInput | NotFound | PermissionDenied | Unsupported
        )
    };
    match error {
        Error::ContextLost { .. } => true,
        // Of file descriptors, for instance; the driver answers OPERATING_SYSTEM then.
        Error::System { kind, .. } => !lasting(*kind),
        other => is_shortage(other) || other.code() == Some(Code::OPERATING_SYSTEM),
    }
}

/// Explains why `cuMemCreate` (or an export from its handle) with `props` failed.
pub fn explain_create(driver: &Driver, error: Error, props: &AllocationProps, bytes: u64) -> Error {
    let what = match props.location {
        Location::Device(_) => "device memory through VMM",
        Location::Host => "host memory through VMM",
        Location::HostNuma(_) | Location::HostNumaCurrent => "host-NUMA memory through VMM",
    };
    let of = (props.location, props.handle_types, bytes);
    explain(driver, error, what, of)
}

/// Explains why a pool with `props` was refused, or an allocation of `bytes` from it.
pub fn explain_pool(driver: &Driver, error: Error, props: &PoolProps, bytes: u64) -> Error {
    let what = match props.location {
        Location::Device(_) => "device memory pools",
        Location::Host => "host memory pools",
        Location::HostNuma(_) | Location::HostNumaCurrent => HOST_NUMA_POOLS.0,
    };
    let of = (props.location, props.handle_types, bytes);
    explain(driver, error, what, of)
}

/// The first drivers whose pools are known to work on host nodes. Source: CCCL's documentation of memory
/// pools, "supported on CUDA 12.6 and later".
const HOST_NUMA_POOLS: (&str, CudaVersion) = ("host-NUMA memory pools", CudaVersion(12060));

fn explain(
    driver: &Driver,
    error: Error,
    what: &'static str,
    (location, handle_types, requested): (Location, HandleTypes, u64),
) -> Error {
    let Error::Driver(source) = error else {
        return error;
    };
    let fabric = handle_types.contains(HandleTypes::FABRIC);
    if let Some(error) = too_many_mappings(driver, source) {
        return error;
    }
    match source.code {
        Code::OUT_OF_MEMORY => Error::OutOfMemory {
            location,
            requested,
            source,
        },
        Code::NOT_PERMITTED if fabric => no_imex_channel(source, &ImexChannel::of(driver)),
        Code::NOT_SUPPORTED | Code::INVALID_VALUE => {
            let older = driver.driver_version().ok().and_then(|have| {
                match versions::explain(error.clone(), have, location, handle_types) {
                    older @ Error::DriverTooOld { .. } => Some(older),
                    _ if what == HOST_NUMA_POOLS.0 && have < HOST_NUMA_POOLS.1 => {
                        let need = HOST_NUMA_POOLS.1;
                        Some(Error::DriverTooOld { what, have, need })
                    }
                    _ => None,
                }
            });
            match older {
                Some(older) => older,
                None if source.code == Code::NOT_SUPPORTED => {
                    let what = if fabric { "fabric handles" } else { what };
                    Error::unsupported(what, Some(source))
                }
                None => name_missing(driver, error, location),
            }
        }
        Code::INVALID_DEVICE => name_missing(driver, error, location),
        _ => error,
    }
}

/// Replaces the driver's INVALID_VALUE or INVALID_DEVICE for a node or a GPU that does not exist according to
/// the topology, and for a node that has no CPUs.
pub fn name_missing(driver: &Driver, error: Error, location: Location) -> Error {
    let missing = [Code::INVALID_VALUE, Code::INVALID_DEVICE];
    if !error.code().is_some_and(|code| missing.contains(&code)) {
        return error;
    }
    match location {
        Location::Device(gpu) => match driver.device_count() {
            Ok(count) => Error::expect_gpu(gpu, count).err().unwrap_or(error),
            Err(_) => error,
        },
        Location::HostNuma(node) => match Topology::discover(driver) {
            Ok(topology) if topology.source() != TopologySource::Driver => {
                why_not_on(&topology, NodeId(node)).unwrap_or(error)
            }
            _ => error,
        },
        Location::Host | Location::HostNumaCurrent => error,
    }
}

/// Returns why a driver may refuse memory on a node: it does not exist, or it has no CPUs while others have.
fn why_not_on(topology: &Topology, id: NodeId) -> Option<Error> {
    let node = match topology.node(id) {
        Ok(node) => node,
        Err(error) => return Some(error),
    };
    let nodes = topology.nodes().iter();
    let with_cpus: Vec<String> = nodes
        .filter(|node| !node.cpus.is_empty())
        .map(|node| node.id.to_string())
        .collect();
    if !node.lacks_cpus() || with_cpus.is_empty() {
        return None;
    }
    let why =
        format!("NUMA node {id} has memory but no CPUs, and this driver creates no memory on it");
    Some(Error::invalid_of("node", why, with_cpus.join(", ")))
}

/// Returns the driver's answer to a call for a GPU, whose ordinal it may not know.
///
/// # Errors
/// [`Error::NoSuchGpu`]; the driver's.
pub fn on_gpu<T>(driver: &Driver, gpu: i32, answer: Result<T>) -> Result<T> {
    answer.map_err(|error| name_missing(driver, error, Location::Device(gpu)))
}

/// As [`name_missing`], for the first GPU in `access` that does not exist, or that cannot access memory at `location`. Names
/// the limit if the process has too many mappings.
pub fn explain_access(
    driver: &Driver,
    error: Error,
    location: Location,
    access: &[AccessDesc],
) -> Error {
    if let Error::Driver(source) = error
        && let Some(error) = too_many_mappings(driver, source)
    {
        return error;
    }
    let gpus = access.iter().filter_map(|desc| match desc.location {
        Location::Device(gpu) => Some((gpu, desc.access)),
        _ => None,
    });
    let error = gpus.clone().fold(error, |error, (gpu, _)| {
        name_missing(driver, error, Location::Device(gpu))
    });
    let (Error::Driver(source), Location::Device(owner)) = (&error, location) else {
        return error;
    };
    let refused = [
        Code::INVALID_VALUE,
        Code::INVALID_DEVICE,
        Code::PEER_ACCESS_UNSUPPORTED,
    ];
    let is_apart = |gpu| gpu != owner && driver.device_can_access_peer(gpu, owner) == Ok(false);
    let mut granted = gpus.filter(|(_, access)| *access != Access::None);
    match granted.find(|&(gpu, _)| is_apart(gpu)) {
        Some((gpu, _)) if refused.contains(&source.code) => {
            let source = *source;
            Error::NoPeerAccess { gpu, owner, source }
        }
        _ => error,
    }
}

/// NOT_PERMITTED means a missing channel only if there is none.
pub fn no_imex_channel(source: DriverError, channel: &ImexChannel) -> Error {
    if channel.usable() {
        Error::Driver(source)
    } else {
        Error::NoImexChannel {
            path: channel.path(),
            source,
        }
    }
}

/// How many mappings below the limit the kernel may refuse one: a call may need several, and others may have gone since.
const SLACK: u64 = 64;

/// Returns the number of the process's mappings, and the most that it may have.
fn mappings(kernel: &Kernel) -> Option<(u64, u64)> {
    let maps = kernel.read_bytes("/proc/self/maps")?;
    let count = maps.iter().filter(|&&byte| byte == b'\n').count() as u64;
    Some((count, kernel.number("/proc/sys/vm/max_map_count")?))
}

/// Names the limit behind a call that the driver refused for lack of memory, if the process has as many mappings as the
/// kernel allows it.
pub fn too_many_mappings(driver: &Driver, source: DriverError) -> Option<Error> {
    if source.code != Code::OUT_OF_MEMORY {
        return None;
    }
    let (count, limit) = match driver.simulated_host() {
        Some(host) => (host.mappings, host.max_mappings?),
        None => mappings(&Kernel::here())?,
    };
    (count + SLACK >= limit).then_some(Error::TooManyMappings {
        mappings: count,
        limit,
        source,
    })
}

#[cfg(test)]
mod tests;
