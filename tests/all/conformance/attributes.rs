//! Devices.

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};

/// The attributes in the table's heading.
pub fn attributes_of_the_devices_are_as_measured(ctx: &Ctx) {
    for gpu in ctx.gpus() {
        let ask = |attribute| ctx.device_attribute(gpu, attribute).unwrap();
        assert_eq!(ask(DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1);
        assert_eq!(ask(DeviceAttribute::MEMORY_POOLS_SUPPORTED), 1);
        if !ctx.expect.h200 {
            continue;
        }
        for (attribute, value) in [
            (DeviceAttribute::HOST_NUMA_ID, 0),
            (DeviceAttribute::NUMA_ID, -1),
            (
                DeviceAttribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                1,
            ),
            (DeviceAttribute::HOST_NUMA_MEMORY_POOLS_SUPPORTED, 1),
            (DeviceAttribute::HOST_NUMA_MULTINODE_IPC_SUPPORTED, 0),
            (
                DeviceAttribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                1,
            ),
            (DeviceAttribute::HANDLE_TYPE_FABRIC_SUPPORTED, 1),
            (DeviceAttribute::MEMPOOL_SUPPORTED_HANDLE_TYPES, 9),
            (DeviceAttribute::DMA_BUF_SUPPORTED, 1),
            (DeviceAttribute::PAGEABLE_MEMORY_ACCESS, 0),
        ] {
            assert_eq!(ask(attribute), value, "GPU {gpu}, {attribute:?}");
        }
    }
}

/// Each device has a name, a UUID of its own, a PCI bus id of its own, and memory.
pub fn devices_are_told_apart(ctx: &Ctx) {
    let mut ids = std::collections::HashSet::new();
    for gpu in ctx.gpus() {
        assert!(!ctx.device_name(gpu).unwrap().is_empty());
        assert!(ids.insert(ctx.device_uuid(gpu).unwrap().to_vec()));
        let bus = ctx.device_pci_bus_id(gpu).unwrap();
        assert_eq!(bus.split([':', '.']).count(), 4, "{bus}");
        assert!(ids.insert(bus.into_bytes()));
        let total = ctx.device_total_mem(gpu).unwrap();
        let (free, all) = ctx.mem_info(gpu).unwrap();
        assert!(free <= all && all <= total && free > 0);
    }
    assert!(ctx.driver_version().unwrap() >= CudaVersion::OLDEST);
}

/// Ordinals that do not exist, and attributes that do not.
pub fn unknown_devices_and_attributes_are_refused(ctx: &Ctx) {
    for gpu in [ctx.expect.gpus, 99, -1] {
        fails(ctx.device_name(gpu), Code::INVALID_DEVICE);
        fails(ctx.device_total_mem(gpu), Code::INVALID_DEVICE);
        let result = ctx.device_attribute(gpu, DeviceAttribute::NUMA_ID);
        fails(result, Code::INVALID_DEVICE);
        fails(ctx.stream_create(gpu), Code::INVALID_DEVICE);
        fails(ctx.mem_alloc(gpu, 4096), Code::INVALID_DEVICE);
    }
    let result = ctx.device_attribute(0, DeviceAttribute(100_000));
    fails(result, Code::INVALID_VALUE);
}

/// Attributes of the links between GPUs. Between GPUs that can access each other they are known, and both
/// calls report the same access.
pub fn links_between_gpus_are_described(ctx: &Ctx) {
    let pairs = ctx.gpus().flat_map(|a| ctx.gpus().map(move |b| (a, b)));
    for (gpu, peer) in pairs {
        let ask = |attribute| ctx.device_p2p_attribute(gpu, peer, attribute);
        if gpu == peer {
            fails(ask(P2pAttribute::ACCESS_SUPPORTED), Code::INVALID_DEVICE);
            continue;
        }
        let access = ctx.device_can_access_peer(gpu, peer).unwrap();
        assert_eq!(ask(P2pAttribute::ACCESS_SUPPORTED), Ok(access.into()));
        let told = [
            P2pAttribute::PERFORMANCE_RANK,
            P2pAttribute::NATIVE_ATOMIC_SUPPORTED,
            P2pAttribute::CUDA_ARRAY_ACCESS_SUPPORTED,
            P2pAttribute::ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED,
        ]
        .map(ask);
        println!("GPU {gpu} to {peer}: access {access}, rank, atomics, arrays, partial {told:?}");
        if access && ctx.expect.h200 {
            assert_eq!(told[..3], [Ok(0), Ok(1), Ok(1)]);
        }
    }
    for attribute in [P2pAttribute(0), P2pAttribute(100)] {
        if ctx.expect.gpus > 1 {
            let result = ctx.device_p2p_attribute(0, 1, attribute);
            fails(result, Code::INVALID_VALUE);
        }
    }
    let nowhere = ctx.device_p2p_attribute(0, 99, P2pAttribute::ACCESS_SUPPORTED);
    fails(nowhere, Code::INVALID_DEVICE);
}
