//! cuMemCreate, cuMemRelease, granularity, properties.

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

const TYPES: [HandleTypes; 4] = [
    HandleTypes::NONE,
    HandleTypes::POSIX_FD,
    HandleTypes::FABRIC,
    HandleTypes::from_bits(9),
];

/// Row: granularity, every location and handle type, minimum and recommended.
pub fn granularity_is_2_mib_even_for_ids_that_do_not_exist(ctx: &Ctx) {
    for location in [
        Location::Device(0),
        Location::Host,
        ctx.home(),
        Location::HostNuma(99),
        Location::HostNuma(-1),
    ] {
        for types in TYPES {
            for kind in [GranularityKind::Minimum, GranularityKind::Recommended] {
                let props = AllocationProps::at(location).handle_types(types);
                let bytes = ctx.mem_granularity(&props, kind).unwrap();
                if ctx.simulated() || ctx.expect.h200 {
                    assert_eq!(bytes, MIB2, "{location}, {types}");
                }
                assert!(bytes.is_power_of_two());
            }
        }
    }
}

/// Row: cuMemCreate HOST_NUMA id 0, handle none / POSIX fd.
pub fn mem_create_on_each_node_succeeds_and_exports_as_posix_fd(ctx: &Ctx) {
    for node in &ctx.expect.nodes {
        let props = AllocationProps::at(Location::HostNuma(*node));
        let handle = ctx.mem_create(MIB2, &props).unwrap();
        ctx.release(handle).unwrap();
        let props = props.handle_types(HandleTypes::POSIX_FD);
        let handle = ctx.mem_create(MIB2, &props).unwrap();
        let exported = ctx.mem_export(handle, HandleType::PosixFd).unwrap();
        assert_eq!(exported.handle_type(), HandleType::PosixFd);
        ctx.release(handle).unwrap();
    }
}

/// Row: cuMemCreate HOST_NUMA id 0, FABRIC or FABRIC|POSIX; DEVICE likewise.
pub fn mem_create_fabric_is_not_permitted_without_an_imex_channel(ctx: &Ctx) {
    for location in [ctx.home(), Location::Device(0)] {
        for types in [
            HandleTypes::FABRIC,
            HandleTypes::FABRIC | HandleTypes::POSIX_FD,
        ] {
            let props = AllocationProps::at(location).handle_types(types);
            match ctx.mem_create(MIB2, &props) {
                Ok(handle) => {
                    assert!(ctx.expect.imex, "{location}, {types}: no IMEX channel");
                    ctx.mem_export(handle, HandleType::Fabric).unwrap();
                    ctx.release(handle).unwrap();
                }
                Err(error) if ctx.expect.imex && !ctx.simulated() => {
                    // A channel device alone does not make a domain: a typed no is an answer.
                    println!("{location}, {types}, with an IMEX channel: {error}");
                }
                refused => fails(refused, Code::NOT_PERMITTED),
            }
        }
    }
}

/// Row: cuMemCreate HOST_NUMA id 1, 99, −1; HOST_NUMA_CURRENT.
pub fn mem_create_on_missing_nodes_is_invalid(ctx: &Ctx) {
    let mut locations = vec![
        Location::HostNuma(99),
        Location::HostNuma(-1),
        Location::HostNuma(ctx.expect.missing),
        Location::HostNumaCurrent,
    ];
    if ctx.expect.nodes == [0] && ctx.expect.h200 {
        locations.push(Location::HostNuma(1));
    }
    for location in locations {
        let props = AllocationProps::at(location);
        fails(ctx.mem_create(MIB2, &props), Code::INVALID_VALUE);
    }
}

/// Row: cuMemCreate HOST, handle none / any other.
pub fn mem_create_on_host_succeeds_unshareable_only(ctx: &Ctx) {
    for types in TYPES {
        let props = AllocationProps::at(Location::Host).handle_types(types);
        let result = ctx.mem_create(MIB2, &props);
        if types == HandleTypes::NONE {
            ctx.release(result.unwrap()).unwrap();
        } else {
            fails(result, Code::INVALID_VALUE);
        }
    }
}

/// Row: unaligned size; size 0; gpuDirectRDMACapable on HOST_NUMA.
pub fn mem_create_refuses_unaligned_empty_and_rdma_memory(ctx: &Ctx) {
    let props = AllocationProps::at(ctx.home());
    for size in [0, 1, 4096, MIB2 + 1, MIB2 + 4096, MIB2 - 1] {
        fails(ctx.mem_create(size, &props), Code::INVALID_VALUE);
    }
    let rdma = AllocationProps {
        gpu_direct_rdma: true,
        ..props
    };
    fails(ctx.mem_create(MIB2, &rdma), Code::INVALID_VALUE);
}

/// Row: 64 TiB.
pub fn mem_create_of_64_tib_is_out_of_memory(ctx: &Ctx) {
    for location in [ctx.home(), Location::Device(0)] {
        let props = AllocationProps::at(location);
        fails(ctx.mem_create(64 << 40, &props), Code::OUT_OF_MEMORY);
    }
}

/// Device memory through the same calls, on each GPU.
pub fn mem_create_on_each_device_succeeds(ctx: &Ctx) {
    for gpu in ctx.gpus() {
        let props = AllocationProps::at(Location::Device(gpu)).handle_types(HandleTypes::POSIX_FD);
        let handle = ctx.mem_create(MIB2, &props).unwrap();
        assert_eq!(ctx.mem_properties(handle).unwrap(), props);
        ctx.release(handle).unwrap();
    }
    for gpu in [ctx.expect.gpus, 99, -1] {
        let props = AllocationProps::at(Location::Device(gpu));
        assert!(ctx.mem_create(MIB2, &props).is_err(), "GPU {gpu}");
    }
}

/// Properties read back as they were asked for.
pub fn properties_are_those_asked_for(ctx: &Ctx) {
    for types in [HandleTypes::NONE, HandleTypes::POSIX_FD] {
        let props = AllocationProps::at(ctx.home()).handle_types(types);
        let handle = ctx.mem_create(2 * MIB2, &props).unwrap();
        assert_eq!(ctx.mem_properties(handle).unwrap(), props);
        ctx.release(handle).unwrap();
    }
}

/// Row: VMM calls in a thread with no current context (after cuInit).
pub fn vmm_calls_succeed_in_a_thread_without_a_context(ctx: &Ctx) {
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            let memory = Mapped::shared(ctx, MIB2);
            poke(memory.ptr, 1);
            let retained = ctx.mem_retain(memory.ptr).unwrap();
            ctx.release(retained).unwrap();
        });
        work.join().unwrap();
    });
}

/// Row: cuMemRelease before cuMemUnmap; and fresh memory is all zero.
pub fn a_mapping_keeps_released_memory_and_fresh_memory_is_zero(ctx: &Ctx) {
    let ptr = ctx.mem_address_reserve(MIB2, 0, 0).unwrap();
    let handle = ctx
        .mem_create(MIB2, &AllocationProps::at(ctx.home()))
        .unwrap();
    ctx.map(ptr, MIB2, 0, handle).unwrap();
    ctx.release(handle).unwrap();
    ctx.set_access(ptr, MIB2, &[read_write(Location::Host)])
        .unwrap();
    assert!((0..MIB2 / 8).all(|i| peek(ptr.add(8 * i)) == 0));
    cpu_write(ptr, 512, 7);
    cpu_check(ptr, 512, 7);
    ctx.unmap(ptr, MIB2).unwrap();
    ctx.address_free(ptr, MIB2).unwrap();
}

/// Row: cuMemRelease twice.
pub fn mem_release_twice_is_invalid(ctx: &Ctx) {
    // In a child, where no other test gets the handle's number in between.
    ctx.run_child("release_twice");
}

pub fn release_twice(ctx: &Ctx) {
    let props = AllocationProps::at(ctx.home());
    let handle = ctx.mem_create(MIB2, &props).unwrap();
    ctx.release(handle).unwrap();
    fails(ctx.release(handle), Code::INVALID_VALUE);
}

/// Row: cuMemRetainAllocationHandle.
pub fn mem_retain_gives_the_same_handle_to_be_released_once_more(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    assert_eq!(ctx.mem_retain(memory.ptr).unwrap(), memory.handle);
    assert_eq!(ctx.mem_retain(memory.ptr.add(4096)).unwrap(), memory.handle);
    ctx.release(memory.handle).unwrap();
    ctx.release(memory.handle).unwrap();
    // The first reference is still there.
    assert_eq!(
        ctx.mem_properties(memory.handle).unwrap().location,
        ctx.home()
    );
}
