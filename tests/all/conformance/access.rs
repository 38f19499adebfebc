//! cuMemSetAccess, and its effect on the CPU and on GPUs.

use std::os::unix::process::ExitStatusExt;

use egmem::driver::*;
use egmem::kernels;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

const HOST: Location = Location::Host;
const GPU: Location = Location::Device(0);

/// Row: cuMemSetAccess: host + device; both granted, cuMemGetAccess says 3.
pub fn set_access_to_host_and_device_reads_back_as_3(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    for gpu in ctx.gpus() {
        let flags = ctx.mem_get_access(Location::Device(gpu), memory.ptr);
        assert_eq!(flags.unwrap(), 3, "GPU {gpu}");
    }
    assert_eq!(ctx.mem_get_access(HOST, memory.ptr).unwrap(), 3);
}

/// Nothing is granted at first; granted access can be taken back. A grant to a node is one to the CPU.
pub fn access_starts_with_none_and_can_be_taken_back(ctx: &Ctx) {
    let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), MIB2, &[]);
    let flags = |location| ctx.mem_get_access(location, memory.ptr).unwrap();
    let cpu = ctx.home();
    assert_eq!((flags(HOST), flags(cpu), flags(GPU)), (0, 0, 0));
    ctx.set_access(memory.ptr, MIB2, &[read_write(GPU)])
        .unwrap();
    assert_eq!((flags(HOST), flags(cpu), flags(GPU)), (3, 0, 3));
    let none = grant(GPU, Access::None);
    ctx.set_access(memory.ptr, MIB2, &[none, read_write(HOST)])
        .unwrap();
    assert_eq!((flags(HOST), flags(cpu), flags(GPU)), (3, 3, 0));
    ctx.set_access(memory.ptr, MIB2, &[grant(GPU, Access::Read)])
        .unwrap();
    assert_eq!((flags(HOST), flags(cpu), flags(GPU)), (1, 3, 1));
}

/// Row: cuMemSetAccess over part of one mapping.
pub fn set_access_over_part_of_a_mapping_is_invalid(ctx: &Ctx) {
    let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), 2 * MIB2, &[]);
    for (offset, size) in [(0, MIB2), (MIB2, MIB2)] {
        let result = ctx.set_access(memory.ptr.add(offset), size, &[read_write(GPU)]);
        fails(result, Code::INVALID_VALUE);
    }
}

/// Rows: cuMemSetAccess over several whole neighbouring mappings; over a range with an unmapped
/// part.
pub fn set_access_covers_whole_neighbours_but_no_gap(ctx: &Ctx) {
    let ptr = ctx.mem_address_reserve(3 * MIB2, 0, 0).unwrap();
    for i in 0..2 {
        let handle = ctx
            .mem_create(MIB2, &AllocationProps::at(ctx.home()))
            .unwrap();
        ctx.map(ptr.add(i * MIB2), MIB2, 0, handle).unwrap();
        ctx.release(handle).unwrap();
    }
    let both = [read_write(HOST), read_write(GPU)];
    fails(ctx.set_access(ptr, 3 * MIB2, &both), Code::INVALID_VALUE);
    ctx.set_access(ptr, 2 * MIB2, &both).unwrap();
    for i in 0..2 {
        let flags = ctx.mem_get_access(GPU, ptr.add(i * MIB2)).unwrap();
        assert_eq!(flags, 3);
    }
    cpu_write(ptr, 2 * MIB2 / 8, 3);
    cpu_check(ptr, 2 * MIB2 / 8, 3);
    for i in 0..2 {
        ctx.unmap(ptr.add(i * MIB2), MIB2).unwrap();
    }
    ctx.address_free(ptr, 3 * MIB2).unwrap();
}

/// Row: cuMemSetAccess with an unknown device.
pub fn set_access_for_an_unknown_device_is_invalid(ctx: &Ctx) {
    let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), MIB2, &[]);
    for gpu in [ctx.expect.gpus, 99, -1] {
        let access = [read_write(Location::Device(gpu))];
        fails(
            ctx.set_access(memory.ptr, MIB2, &access),
            Code::INVALID_VALUE,
        );
    }
}

/// Row: cuMemSetAccess with HOST_NUMA id 5 (does not exist): the id is not checked.
pub fn set_access_for_a_missing_node_succeeds(ctx: &Ctx) {
    let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), MIB2, &[]);
    let missing = [5, ctx.expect.missing]
        .into_iter()
        .find(|id| !ctx.expect.nodes.contains(id))
        .unwrap();
    let access = [read_write(Location::HostNuma(missing))];
    ctx.set_access(memory.ptr, MIB2, &access).unwrap();
}

/// Row: CPU touch before access is granted; or after granting only the GPU.
pub fn a_cpu_touch_without_access_faults(ctx: &Ctx) {
    for role in ["touch_ungranted", "touch_granted_to_gpu_only"] {
        let output = ctx.child(role).output().unwrap();
        let signal = output.status.signal();
        assert!(
            signal == Some(libc::SIGSEGV),
            "{role}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

fn touch(ctx: &Ctx, access: &[AccessDesc]) {
    let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), MIB2, access);
    poke(memory.ptr, 1);
    panic!("the touch did not fault");
}

pub fn touch_ungranted(ctx: &Ctx) {
    touch(ctx, &[]);
}

pub fn touch_granted_to_gpu_only(ctx: &Ctx) {
    touch(ctx, &[read_write(GPU)]);
}

/// Row: GPU write where the GPU has PROT_READ: illegal memory access, and the context is lost.
pub fn a_gpu_write_with_read_access_loses_the_context(ctx: &Ctx) {
    ctx.run_child("gpu_writes_read_only");
}

pub fn gpu_writes_read_only(ctx: &Ctx) {
    let access = [read_write(HOST), grant(GPU, Access::Read)];
    let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), MIB2, &access);
    cpu_write(memory.ptr, 512, 5);
    let stream = ctx.stream_create(0).unwrap();
    let kernels = Loaded::new(ctx, 0);
    // Reading is allowed.
    let report = ctx.mem_host_alloc(0, 4096).unwrap();
    poke(report, 0);
    let args = [memory.ptr.0, 512, report.0];
    ctx.launch(&kernels, kernels::READ, &args, stream).unwrap();
    let sum = (0..512).fold(0, |sum, i| sum ^ kernels::pattern(5, i));
    assert_eq!(peek(report), sum);
    // Writing is not.
    let args = [memory.ptr.0, 512, 6];
    let result = ctx.launch(&kernels, kernels::WRITE, &args, stream);
    fails(result, Code::ILLEGAL_ADDRESS);
    assert!(ctx.stream_synchronize(stream).is_err());
    assert!(ctx.mem_alloc(0, 4096).is_err(), "the context is lost");
    // Nothing can be given back any more.
    std::mem::forget((memory, kernels));
}

/// Row: (extra) a GPU that was granted nothing must not reach the memory; in a child, as it faults.
pub fn a_gpu_access_without_a_grant_loses_the_context(ctx: &Ctx) {
    ctx.run_child("gpu_reads_ungranted");
}

pub fn gpu_reads_ungranted(ctx: &Ctx) {
    let access = [read_write(HOST)];
    let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), MIB2, &access);
    let stream = ctx.stream_create(0).unwrap();
    let kernels = Loaded::new(ctx, 0);
    let args = [memory.ptr.0, 512, 6];
    let result = ctx.launch(&kernels, kernels::WRITE, &args, stream);
    fails(result, Code::ILLEGAL_ADDRESS);
    std::mem::forget((memory, kernels));
}
