//! Converts driver codes to typed reasons where memory is created.

use crate::capability::ImexChannel;
use crate::driver::{
    Access, AccessDesc, AllocationProps, Code, CudaVersion, HandleTypes, Location, NodeId,
    PoolProps, versions,
};
use crate::host::mappings::too_many_mappings;
use crate::topology::{Topology, TopologySource};
use crate::{Driver, DriverError, Error};

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
    if !matches!(
        error.code(),
        Some(Code::INVALID_VALUE | Code::INVALID_DEVICE)
    ) {
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

/// As [`name_missing`], for a GPU's ordinal alone.
pub fn name_missing_gpu(driver: &Driver, error: Error, gpu: i32) -> Error {
    name_missing(driver, error, Location::Device(gpu))
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
        name_missing_gpu(driver, error, gpu)
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Result;
    use crate::driver::{Backend, Call, PoolCalls};

    /// A driver that answers only the query of its version.
    #[derive(Debug)]
    struct Version(i32);

    struct NoPools;
    // SAFETY: it reports no success.
    unsafe impl PoolCalls for NoPools {
        fn api(&self) -> &'static str {
            "none"
        }
    }

    // SAFETY: it reports no success except for its version.
    unsafe impl Backend for Version {
        fn name(&self) -> &'static str {
            "version"
        }
        fn driver_pools(&self) -> &dyn PoolCalls {
            &NoPools
        }
        fn driver_version(&self) -> Result<CudaVersion> {
            Ok(CudaVersion(self.0))
        }
    }

    const NODE: Location = Location::HostNuma(3);

    fn create(version: i32, code: Code, location: Location, types: HandleTypes) -> Error {
        let driver = Driver::from_backend(Arc::new(Version(version)));
        let props = AllocationProps::at(location).handle_types(types);
        explain_create(&driver, Error::driver(Call::MemCreate, code), &props, 7)
    }

    fn pool(version: i32, code: Code, location: Location) -> Error {
        let driver = Driver::from_backend(Arc::new(Version(version)));
        let props = PoolProps {
            location,
            handle_types: HandleTypes::NONE,
            max_size: 0,
        };
        explain_pool(&driver, Error::driver(Call::MemPoolCreate, code), &props, 7)
    }

    fn failed(call: Call, code: Code) -> DriverError {
        DriverError { call, code }
    }

    #[test]
    fn each_code_has_its_reason() {
        let (none, fabric) = (HandleTypes::NONE, HandleTypes::FABRIC);
        assert_eq!(
            create(13000, Code::OUT_OF_MEMORY, NODE, none),
            Error::OutOfMemory {
                location: NODE,
                requested: 7,
                source: failed(Call::MemCreate, Code::OUT_OF_MEMORY),
            }
        );
        assert_eq!(
            create(13000, Code::NOT_SUPPORTED, NODE, fabric),
            Error::PlatformUnsupported {
                what: "fabric handles",
                source: Some(failed(Call::MemCreate, Code::NOT_SUPPORTED)),
            }
        );
        for code in [Code::INVALID_VALUE, Code::NOT_PERMITTED, Code(12345)] {
            assert_eq!(
                create(13000, code, NODE, none),
                Error::driver(Call::MemCreate, code)
            );
        }
        let other = Error::NoSuchNode {
            node: NodeId(9),
            gpu: None,
            choices: vec![],
        };
        let driver = Driver::from_backend(Arc::new(Version(13000)));
        assert_eq!(
            explain_create(&driver, other.clone(), &AllocationProps::at(NODE), 7),
            other
        );
    }

    #[test]
    fn a_driver_is_called_too_old_only_where_age_explains_the_code() {
        let too_old = |error: &Error| match error {
            Error::DriverTooOld { need, .. } => Some(need.0),
            _ => None,
        };
        let (none, fabric) = (HandleTypes::NONE, HandleTypes::FABRIC);
        let refused = Code::INVALID_VALUE;
        assert_eq!(too_old(&create(12020, refused, NODE, fabric)), Some(12030));
        assert_eq!(too_old(&create(12030, refused, NODE, fabric)), None);
        assert_eq!(too_old(&create(12020, refused, NODE, none)), None);
        assert_eq!(
            too_old(&create(12090, refused, Location::Host, none)),
            Some(13000)
        );
        assert_eq!(
            too_old(&create(12020, Code::OUT_OF_MEMORY, NODE, fabric)),
            None
        );
        assert_eq!(too_old(&pool(12050, refused, NODE)), Some(12060));
        assert_eq!(too_old(&pool(12060, Code::NOT_SUPPORTED, NODE)), None);
        assert_eq!(too_old(&pool(12090, refused, Location::Host)), Some(13000));
    }

    #[test]
    fn memory_on_a_node_without_cpus_is_refused_with_the_nodes_that_have_some() {
        use crate::driver::sim::NodeSpec;
        let node = |id, cpus: &str| NodeSpec {
            id,
            cpus: cpus.into(),
            memory: 1 << 30,
            ..NodeSpec::default()
        };
        let mut machine = crate::Machine {
            nodes: vec![node(0, "0-1"), node(1, "2-3"), node(2, "")],
            gpus: crate::Machine::h200x8().gpus[..1].to_vec(),
            ..crate::Machine::default()
        };
        machine.gpus[0].host_numa = 0;
        let create = |machine: &crate::Machine, node| {
            let driver = Driver::simulated(machine.clone()).unwrap();
            let memory = crate::vmm::PhysicalMemory::options(NodeId(node));
            let memory = memory.create(&driver, 2 << 20).map(drop);
            let pool = crate::Pool::options(NodeId(node)).create(&driver).map(drop);
            assert_eq!(memory, pool);
            memory
        };
        assert_eq!(create(&machine, 1), Ok(()));
        let why = "NUMA node 2 has memory but no CPUs, and this driver creates no memory on it";
        let error = Error::invalid_of("node", why, "0, 1");
        assert_eq!(create(&machine, 2), Err(error));
        // Such a description does not say which nodes have none.
        machine.nodes.iter_mut().for_each(|node| node.cpus.clear());
        assert_eq!(create(&machine, 2), Ok(()));
    }

    #[test]
    fn not_permitted_means_no_channel_only_where_there_is_none() {
        let source = failed(Call::MemCreate, Code::NOT_PERMITTED);
        let path = std::path::PathBuf::from("/dev/nvidia-caps-imex-channels/channel0");
        let absent = ImexChannel::Absent { path: path.clone() };
        assert_eq!(
            no_imex_channel(source, &absent),
            Error::NoImexChannel {
                path: path.clone(),
                source
            }
        );
        assert_eq!(
            no_imex_channel(source, &ImexChannel::Accessible { path }),
            Error::Driver(source)
        );
    }
}
