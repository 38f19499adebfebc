//! Free memory that is looked at; codes of a driver, and what they become.

use std::sync::Arc;

use super::*;
use crate::driver::{Backend, Call, PoolCalls};
use crate::topology::kernel::tests::Tree;
use crate::{Buffer, Growth, Machine, Result};

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
    let mut machine = Machine {
        nodes: vec![node(0, "0-1"), node(1, "2-3"), node(2, "")],
        gpus: Machine::h200x8().gpus[..1].to_vec(),
        ..Machine::default()
    };
    machine.gpus[0].host_numa = 0;
    let create = |machine: &Machine, node| {
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

#[test]
fn mappings_are_counted_as_the_kernel_does() {
    let tree = Tree::new();
    assert_eq!(mappings(&tree.kernel()), None);
    tree.file("proc/sys/vm/max_map_count", "65530\n");
    tree.file("proc/self/maps", "1-2 r--p /a\n2-3 rw-s /dev/nvidiactl\n");
    assert_eq!(mappings(&tree.kernel()), Some((2, 65_530)));
    if let Some((count, limit)) = mappings(&Kernel::here()) {
        assert!(count > 2 && count < limit, "{count} of {limit}");
    }
}

#[test]
fn a_process_with_too_many_mappings_is_told_of_the_limit() {
    let mut machine = Machine::gh200();
    machine.max_mappings = Some(3);
    let driver = Driver::simulated(machine).unwrap();
    let growth = Growth::steady().chunk(2 << 20);
    let buffer = |bytes| {
        Buffer::on(NodeId(0))
            .bytes(bytes)
            .growth(growth)
            .allocate(&driver)
    };
    let kept = buffer(4 << 20).unwrap();
    let error = buffer(6 << 20).unwrap_err();
    let is_named = matches!(
        error,
        Error::TooManyMappings {
            mappings: 3,
            limit: 3,
            ..
        }
    );
    assert!(is_named, "{error}");
    assert!(
        error.remedy().contains("vm.max_map_count"),
        "{}",
        error.remedy()
    );
    drop(kept);
    buffer(6 << 20).unwrap();
}

#[test]
fn more_than_a_node_has_free_is_refused_with_the_numbers() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    let total = driver.sim().unwrap().machine().nodes[0].memory;
    let at = |bytes| check_free(&driver, Location::HostNuma(0), bytes, || 0);
    at(total).unwrap();
    check_free(&driver, Location::HostNuma(0), total + 10, || 10).unwrap();
    let error = at(total + 1).unwrap_err();
    assert!(
        matches!(error, Error::NodeTooFull { free, requested, .. } if free == total && requested == total + 1),
        "{error}"
    );
    let _held = driver
        .mem_create(256 << 20, &AllocationProps::at(Location::HostNuma(0)))
        .unwrap();
    assert!(at(total).is_err());
    at(total - (256 << 20)).unwrap();
}

#[test]
fn only_host_nodes_are_guarded() {
    let driver = Driver::simulated(Machine::gh200()).unwrap();
    check_free(&driver, Location::Device(0), 1 << 50, || 0).unwrap();
    check_free(&driver, Location::HostNuma(99), 1 << 50, || 0).unwrap();
}

#[test]
fn where_the_kernel_chooses_the_node_all_of_them_count() {
    let driver = Driver::simulated(Machine::gh200x4()).unwrap();
    let nodes = driver.sim().unwrap().machine().nodes.clone();
    let total: u64 = nodes.iter().map(|node| node.memory).sum();
    let sim = driver.sim().unwrap();
    for location in [Location::Host, Location::HostNumaCurrent] {
        check_free(&driver, location, total, || 0).unwrap();
        check_free(&driver, location, total + 10, || 10).unwrap();
        let refused = |error: Error| match error {
            Error::NodesTooFull {
                nodes: all, free, ..
            } => assert_eq!((all.len(), free), (nodes.len(), total)),
            other => panic!("{other:?}"),
        };
        refused(check_free(&driver, location, total + 1, || 0).unwrap_err());
        let options = Buffer::on(location).bytes(total + (2 << 20));
        refused(options.allocate(&driver).unwrap_err());
    }
    let pages = crate::pinned::PageSize::Base;
    crate::pinned::RegisteredHost::new(&driver, 0, total + 1, pages).unwrap_err();
    crate::pinned::PinnedHost::new(&driver, 0, total + 1).unwrap_err();
    for call in [Call::MemCreate, Call::MemHostAlloc, Call::MemHostRegister] {
        assert_eq!(sim.count(call), 0, "{call:?}");
    }
}

#[test]
fn failures_that_may_pass_are_told_from_lasting_ones() {
    use std::io::Error as Os;
    let passing = |code| is_passing(&Error::system("opening", &Os::from_raw_os_error(code)));
    assert!([libc::EMFILE, libc::ENFILE, libc::EINTR, libc::ENOMEM].map(passing) == [true; 4]);
    assert!([libc::EINVAL, libc::EPERM, libc::ENOSYS].map(passing) == [false; 3]);
    let code = |code| is_passing(&Error::driver(Call::MemCreate, code));
    assert!(code(Code::OPERATING_SYSTEM) && code(Code::OUT_OF_MEMORY));
    assert!(!code(Code::NOT_SUPPORTED) && !code(Code::NOT_PERMITTED));
}
