//! Undocumented answers, each measured on H200 (docs/driver-behaviour.md).

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::pools::plain;
use crate::conformance::raw::*;

const HOST: Location = Location::Host;
const GPU: Location = Location::Device(0);
const NOBODY: Location = Location::Device(99);

/// Whether the answers are known: on Grace nothing was measured.
fn known(ctx: &Ctx) -> bool {
    if !ctx.expect.h200 {
        println!("skipped: measured on H200 alone");
    }
    ctx.expect.h200
}

fn device_memory(gpu: i32) -> AllocationProps {
    AllocationProps::at(Location::Device(gpu))
}

/// The access of HOST is the CPU's or GPU 0's, whichever was changed last; granting the same access
/// again changes nothing.
pub fn host_access_is_that_of_cpu_or_gpu_0_changed_last(ctx: &Ctx) {
    if !known(ctx) {
        return;
    }
    let (read, write, none) = (Access::Read, Access::ReadWrite, Access::None);
    let (cpu, gpu) = (HOST, GPU);
    for (grants, expected) in [
        (vec![(cpu, write), (gpu, read)], 1),
        (vec![(gpu, read), (cpu, write)], 3),
        (vec![(cpu, read), (gpu, write)], 3),
        (vec![(cpu, read), (gpu, write), (cpu, read)], 3),
        (
            vec![(cpu, read), (gpu, write), (cpu, write), (cpu, read)],
            1,
        ),
        (vec![(cpu, read), (gpu, write), (gpu, none)], 1),
        (vec![(gpu, read), (cpu, write), (cpu, none)], 1),
    ] {
        let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), MIB2, &[]);
        for (location, access) in &grants {
            ctx.set_access(memory.ptr, MIB2, &[grant(*location, *access)])
                .unwrap();
        }
        let found = ctx.mem_get_access(HOST, memory.ptr).unwrap();
        assert_eq!(found, expected, "{grants:?}");
    }
}

/// A call that fails for a location has granted the ones before it in its list, of the mappings up to
/// there.
pub fn a_failed_grant_leaves_what_came_before_it(ctx: &Ctx) {
    if !known(ctx) {
        return;
    }
    let memory = Mapped::new(ctx, device_memory(0), MIB2, &[]);
    let access = |ptr| ctx.mem_get_access(GPU, ptr).unwrap();
    let result = ctx.set_access(memory.ptr, MIB2, &[read_write(HOST), read_write(GPU)]);
    fails(result, Code::NOT_SUPPORTED);
    assert_eq!(access(memory.ptr), 0);
    let result = ctx.set_access(memory.ptr, MIB2, &[read_write(GPU), read_write(HOST)]);
    fails(result, Code::NOT_SUPPORTED);
    assert_eq!(access(memory.ptr), 3);

    // Of two neighbours the first is done before the second is looked at.
    for (first, second, expected) in [
        (AllocationProps::at(ctx.home()), device_memory(0), [3, 3]),
        (device_memory(0), AllocationProps::at(ctx.home()), [3, 0]),
    ] {
        let ptr = ctx.mem_address_reserve(2 * MIB2, 0, 0).unwrap();
        let at = [ptr, ptr.add(MIB2)];
        for (props, ptr) in [first, second].iter().zip(at) {
            let handle = ctx.mem_create(MIB2, props).unwrap();
            ctx.map(ptr, MIB2, 0, handle).unwrap();
            ctx.release(handle).unwrap();
        }
        let result = ctx.set_access(ptr, 2 * MIB2, &[read_write(GPU), read_write(HOST)]);
        fails(result, Code::NOT_SUPPORTED);
        assert_eq!(at.map(access), expected);
        ctx.unmap(ptr, 2 * MIB2).unwrap();
        ctx.address_free(ptr, 2 * MIB2).unwrap();
    }
}

/// A list with a location that does not exist grants nothing.
pub fn a_grant_to_nobody_changes_nothing(ctx: &Ctx) {
    let memory = Mapped::new(ctx, AllocationProps::at(ctx.home()), MIB2, &[]);
    for nobody in [NOBODY, Location::HostNumaCurrent] {
        let access = [read_write(GPU), read_write(HOST), read_write(nobody)];
        fails(
            ctx.set_access(memory.ptr, MIB2, &access),
            Code::INVALID_VALUE,
        );
        for location in [GPU, ctx.home()] {
            assert_eq!(ctx.mem_get_access(location, memory.ptr).unwrap(), 0);
        }
    }
}

/// Questions about a pointer are answered for GPU 0: memory that only another GPU may access has no device
/// pointer and no address range.
pub fn a_pointer_is_asked_about_for_gpu_0(ctx: &Ctx) {
    if !known(ctx) || ctx.expect.gpus < 2 {
        return;
    }
    let other = read_write(Location::Device(1));
    for props in [AllocationProps::at(ctx.home()), device_memory(1)] {
        let memory = Mapped::new(ctx, props, MIB2, &[other]);
        let pointer = || ctx.pointer_attribute(memory.ptr, PointerAttribute::DevicePointer);
        fails(pointer(), Code::INVALID_VALUE);
        fails(ctx.mem_address_range(memory.ptr), Code::NOT_FOUND);
        ctx.set_access(memory.ptr, MIB2, &[grant(GPU, Access::Read)])
            .unwrap();
        assert_eq!(pointer().unwrap(), memory.ptr.0);
        ctx.mem_address_range(memory.ptr).unwrap();
    }
    let ptr = ctx.mem_alloc(1, MIB2).unwrap();
    fails(ctx.mem_address_range(ptr), Code::NOT_FOUND);
    ctx.free(1, ptr).unwrap();
}

/// RANGE_START_ADDR of a host pool's memory is no address: it is the offset in the pool's block.
pub fn range_start_of_host_pool_memory_is_an_offset(ctx: &Ctx) {
    if !known(ctx) {
        return;
    }
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    let mut held = Vec::new();
    for (size, start) in [(1000, 0), (4096, 1024), (1, 5120)] {
        let ptr = calls.alloc_from_pool_async(pool, size, stream).unwrap();
        let found = ctx.pointer_attribute(ptr, PointerAttribute::RangeStartAddr);
        assert_eq!(found.unwrap(), start);
        held.push(ptr);
    }
    for ptr in held {
        ctx.pool_free(calls, ptr, stream).unwrap();
    }
    ctx.stream_synchronize(stream).unwrap();
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}

/// A pool reuses the smallest hole that is large enough before it uses fresh memory.
pub fn a_pool_fills_the_smallest_hole_first(ctx: &Ctx) {
    if !known(ctx) {
        return;
    }
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let pool = calls.pool_create(&plain(ctx.home())).unwrap();
    let alloc = |size| calls.alloc_from_pool_async(pool, size, stream).unwrap();
    let free = |ptr| {
        ctx.pool_free(calls, ptr, stream).unwrap();
        ctx.stream_synchronize(stream).unwrap();
    };
    let [large, a, small, b] = [1 << 20, 512, 4096, 512].map(alloc);
    free(large);
    free(small);
    let again = alloc(4000);
    assert_eq!(again, small);
    let [first, next] = [alloc(4000), alloc(2 << 20)];
    assert_eq!(first, large);
    assert!(next > b);
    for ptr in [a, b, again, first, next] {
        free(ptr);
    }
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}

/// cuMemPoolSetAccess checks a list in a certain order, and grants all of it or nothing.
pub fn pool_grants_are_checked_in_order(ctx: &Ctx) {
    if !known(ctx) {
        return;
    }
    let calls = ctx.driver_pools();
    let (nowhere, none) = (read_write(Location::HostNumaCurrent), Access::None);
    let of_host = calls.pool_create(&plain(ctx.home())).unwrap();
    ctx.pool_access(calls, of_host, &[]).unwrap();
    for (list, code) in [
        (vec![read_write(GPU), nowhere], Code::INVALID_VALUE),
        (vec![grant(HOST, none), nowhere], Code::INVALID_VALUE),
        (vec![nowhere, grant(GPU, Access::Read)], Code::NOT_SUPPORTED),
        (
            vec![grant(HOST, none), read_write(NOBODY)],
            Code::INVALID_DEVICE,
        ),
        (
            vec![read_write(GPU), grant(HOST, none)],
            Code::NOT_SUPPORTED,
        ),
    ] {
        fails(ctx.pool_access(calls, of_host, &list), code);
        assert_eq!(calls.pool_get_access(of_host, GPU).unwrap(), 0);
    }
    ctx.destroy_pool(calls, of_host).unwrap();

    let of_device = calls.pool_create(&plain(GPU)).unwrap();
    for (list, code) in [
        (vec![grant(GPU, none)], Code::INVALID_DEVICE),
        (vec![nowhere, read_write(NOBODY)], Code::NOT_SUPPORTED),
        (vec![read_write(NOBODY), nowhere], Code::INVALID_DEVICE),
    ] {
        fails(ctx.pool_access(calls, of_device, &list), code);
    }
    ctx.destroy_pool(calls, of_device).unwrap();
}

/// A hint is where the search starts that goes upwards, and must be a multiple of the alignment and of
/// 2 MiB.
pub fn a_hint_is_where_the_search_for_addresses_starts(ctx: &Ctx) {
    let size = 4 * MIB2;
    let taken = ctx.mem_address_reserve(size, 1 << 30, 0).unwrap();
    for (offset, alignment) in [
        (4096, 0),
        (4096, 4096),
        (MIB2 / 2, 1),
        (MIB2, 2 * MIB2),
        (MIB2, 1 << 30),
        (0, 3 * MIB2),
    ] {
        let result = ctx.mem_address_reserve(MIB2, alignment, taken.0 + offset);
        fails(result, Code::INVALID_VALUE);
    }
    for alignment in [0, 1, 4096, MIB2, 1 << 30] {
        let ptr = ctx.mem_address_reserve(MIB2, alignment, taken.0).unwrap();
        assert!(ptr.0 >= taken.0 + size, "{ptr:?} is not above {taken:?}");
        assert!(ptr.0.is_multiple_of(alignment.max(MIB2)));
        ctx.address_free(ptr, MIB2).unwrap();
    }
    ctx.address_free(taken, size).unwrap();
    // 64 TiB do not fit into the last 16 TiB of a process's addresses.
    let end = if cfg!(target_arch = "x86_64") {
        1 << 47
    } else {
        1 << 48
    };
    let result = ctx.mem_address_reserve(64 << 40, 0, end - (16 << 40));
    fails(result, Code::OUT_OF_MEMORY);
}

/// Which parts of device memory have a DMA-BUF.
pub fn dma_bufs_of_device_memory(ctx: &Ctx) {
    if !known(ctx) {
        return;
    }
    let ask = |ptr, size| {
        // SAFETY: nothing is written through the fd.
        let buffer = unsafe { ctx.mem_dma_buf(ptr, size) };
        buffer.map(drop).map_err(|error| error.code().unwrap())
    };
    let invalid = Err(Code::INVALID_VALUE);
    // Two neighbours without any grant, and a hole behind them.
    let ptr = ctx.mem_address_reserve(3 * MIB2, 0, 0).unwrap();
    for at in [ptr, ptr.add(MIB2)] {
        let handle = ctx.mem_create(MIB2, &device_memory(0)).unwrap();
        ctx.map(at, MIB2, 0, handle).unwrap();
        ctx.release(handle).unwrap();
    }
    assert_eq!(ask(ptr.add(4096), MIB2), Ok(()));
    assert_eq!(ask(ptr, 2 * MIB2), Ok(()));
    assert_eq!(ask(ptr, 2 * MIB2 + 4096), invalid);
    for (at, size) in [(ptr.add(512), 4096), (ptr, 512), (ptr, 0)] {
        assert_eq!(ask(at, size), invalid);
    }
    ctx.unmap(ptr, 2 * MIB2).unwrap();
    ctx.address_free(ptr, 3 * MIB2).unwrap();
    // An allocation, to the end of its last page of 2 MiB.
    let ptr = ctx.mem_alloc(0, MIB2 + 4096).unwrap();
    assert_eq!(ask(ptr.add(4096), 2 * MIB2 - 4096), Ok(()));
    ctx.free(0, ptr).unwrap();
    // A pool's memory at the start of the pool's block alone.
    let calls = ctx.driver_pools();
    let stream = ctx.stream_create(0).unwrap();
    let pool = calls.pool_create(&plain(GPU)).unwrap();
    let alloc = || calls.alloc_from_pool_async(pool, MIB2, stream).unwrap();
    let [first, second] = [alloc(), alloc()];
    assert_eq!(ask(first, MIB2), Ok(()));
    assert_eq!(ask(first.add(4096), 4096), invalid);
    assert_eq!(ask(second, MIB2), invalid);
    for ptr in [first, second] {
        ctx.pool_free(calls, ptr, stream).unwrap();
    }
    ctx.stream_synchronize(stream).unwrap();
    ctx.destroy_pool(calls, pool).unwrap();
    ctx.destroy_stream(stream).unwrap();
}

/// There is nothing behind the last requested byte.
pub fn an_allocation_ends_with_its_last_byte(ctx: &Ctx) {
    if !known(ctx) {
        return;
    }
    let size = 3 * MIB2 - 4096;
    for (ptr, host) in [
        (ctx.mem_alloc(0, size).unwrap(), false),
        (ctx.mem_host_alloc(0, size).unwrap(), true),
    ] {
        let kind = |ptr| ctx.pointer_attribute(ptr, PointerAttribute::MemoryType);
        kind(ptr.add(size - 1)).unwrap();
        fails(kind(ptr.add(size)), Code::INVALID_VALUE);
        match host {
            true => ctx.free_host(0, ptr).unwrap(),
            false => ctx.free(0, ptr).unwrap(),
        }
    }
}

/// Where one neighbour too many would be granted to the CPU, those before it are.
pub fn a_grant_stops_at_one_reference_too_many(ctx: &Ctx) {
    if !ctx.knows_references() {
        return;
    }
    let Some(limit) = ctx.expect.references else {
        return;
    };
    let handle = ctx
        .mem_create(MIB2, &AllocationProps::at(ctx.home()))
        .unwrap();
    let size = (limit + 1) * MIB2;
    let ptr = ctx.mem_address_reserve(size, 0, 0).unwrap();
    for i in 0..=limit {
        ctx.map(ptr.add(i * MIB2), MIB2, 0, handle).unwrap();
    }
    let result = ctx.set_access(ptr, size, &[read_write(HOST)]);
    fails(result, Code::INVALID_VALUE);
    let access = |i| ctx.mem_get_access(ctx.home(), ptr.add(i * MIB2)).unwrap();
    assert_eq!([access(0), access(limit - 1), access(limit)], [3, 3, 0]);
    ctx.unmap(ptr, size).unwrap();
    ctx.address_free(ptr, size).unwrap();
    ctx.release(handle).unwrap();
}
