//! Reserving, mapping and unmapping.

use egmem_tests::drivers::half_of_the_addresses;

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

/// Row: cuMemAddressReserve 12345 bytes / 1 TiB / 64 TiB / 2 MiB aligned to 1 GiB.
pub fn address_reserve_takes_whole_granules_up_to_64_tib(ctx: &Ctx) {
    fails(ctx.mem_address_reserve(12345, 0, 0), Code::INVALID_VALUE);
    for (size, alignment) in [(1 << 40, 0), (64 << 40, 0), (MIB2, 1 << 30)] {
        if size > 1 << 39 && std::env::var("EGMEM_SANITIZER").is_ok_and(|name| name == "thread") {
            continue; // It ends programs that map so much.
        }
        let _room = half_of_the_addresses();
        if ctx.simulated() && !address_space_has(size + alignment.max(4 << 20)) {
            let refused = ctx.mem_address_reserve(size, alignment, 0);
            fails(refused, Code::OUT_OF_MEMORY);
            continue;
        }
        let ptr = ctx.mem_address_reserve(size, alignment, 0).unwrap();
        assert!(ptr.0.is_multiple_of(alignment.max(MIB2)));
        ctx.address_free(ptr, size).unwrap();
    }
}

/// Sanitizers and emulators leave less room than a process has by itself.
fn address_space_has(size: u64) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: makes a new mapping, which nothing else uses, and unmaps it.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), size as usize, 0, flags, -1, 0);
        start != libc::MAP_FAILED && libc::munmap(start, size as usize) == 0
    }
}

/// Row: cuMemMap at a non-zero offset, or of half a handle.
pub fn mem_map_takes_whole_handles_only(ctx: &Ctx) {
    let handle = ctx
        .mem_create(2 * MIB2, &AllocationProps::at(ctx.home()))
        .unwrap();
    let ptr = ctx.mem_address_reserve(2 * MIB2, 0, 0).unwrap();
    fails(ctx.map(ptr, MIB2, MIB2, handle), Code::NOT_SUPPORTED);
    fails(ctx.map(ptr, MIB2, 0, handle), Code::NOT_SUPPORTED);
    ctx.address_free(ptr, 2 * MIB2).unwrap();
    ctx.release(handle).unwrap();
}

/// Row: cuMemMap over a mapped range.
pub fn mem_map_over_a_mapping_is_invalid(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    let other = ctx
        .mem_create(MIB2, &AllocationProps::at(ctx.home()))
        .unwrap();
    fails(ctx.map(memory.ptr, MIB2, 0, other), Code::INVALID_VALUE);
    let again = ctx.map(memory.ptr, MIB2, 0, memory.handle);
    fails(again, Code::INVALID_VALUE);
    ctx.release(other).unwrap();
}

/// Row: the same handle mapped twice (side by side too).
pub fn a_handle_mapped_twice_shows_the_same_bytes(ctx: &Ctx) {
    let handle = ctx
        .mem_create(MIB2, &AllocationProps::at(ctx.home()))
        .unwrap();
    let side_by_side = ctx.mem_address_reserve(2 * MIB2, 0, 0).unwrap();
    let elsewhere = ctx.mem_address_reserve(MIB2, 0, 0).unwrap();
    let places = [side_by_side, side_by_side.add(MIB2), elsewhere];
    for ptr in places {
        ctx.map(ptr, MIB2, 0, handle).unwrap();
        ctx.set_access(ptr, MIB2, &[read_write(Location::Host)])
            .unwrap();
    }
    for (seed, ptr) in places.iter().enumerate() {
        cpu_write(*ptr, 64, seed as u64);
        places
            .iter()
            .for_each(|ptr| cpu_check(*ptr, 64, seed as u64));
    }
    for ptr in places {
        ctx.unmap(ptr, MIB2).unwrap();
    }
    ctx.address_free(side_by_side, 2 * MIB2).unwrap();
    ctx.address_free(elsewhere, MIB2).unwrap();
    ctx.release(handle).unwrap();
}

/// Row: cuMemAddressFree while mapped; second free.
pub fn address_free_while_mapped_or_twice_is_invalid(ctx: &Ctx) {
    // In a child, where no other test gets the address in between.
    ctx.run_child("address_free_twice");
}

pub fn address_free_twice(ctx: &Ctx) {
    let handle = ctx
        .mem_create(MIB2, &AllocationProps::at(ctx.home()))
        .unwrap();
    let ptr = ctx.mem_address_reserve(MIB2, 0, 0).unwrap();
    ctx.map(ptr, MIB2, 0, handle).unwrap();
    fails(ctx.address_free(ptr, MIB2), Code::INVALID_VALUE);
    ctx.unmap(ptr, MIB2).unwrap();
    ctx.address_free(ptr, MIB2).unwrap();
    fails(ctx.address_free(ptr, MIB2), Code::INVALID_VALUE);
    ctx.release(handle).unwrap();
}

/// Row: cuMemUnmap twice.
pub fn mem_unmap_twice_succeeds(ctx: &Ctx) {
    let handle = ctx
        .mem_create(MIB2, &AllocationProps::at(ctx.home()))
        .unwrap();
    let ptr = ctx.mem_address_reserve(MIB2, 0, 0).unwrap();
    ctx.map(ptr, MIB2, 0, handle).unwrap();
    ctx.unmap(ptr, MIB2).unwrap();
    ctx.unmap(ptr, MIB2).unwrap();
    ctx.address_free(ptr, MIB2).unwrap();
    ctx.release(handle).unwrap();
}

/// An unmapped range takes new memory, with nothing granted yet.
pub fn an_unmapped_range_can_be_mapped_again(ctx: &Ctx) {
    let ptr = ctx.mem_address_reserve(MIB2, 0, 0).unwrap();
    for _ in 0..2 {
        let handle = ctx
            .mem_create(MIB2, &AllocationProps::at(ctx.home()))
            .unwrap();
        ctx.map(ptr, MIB2, 0, handle).unwrap();
        ctx.release(handle).unwrap();
        assert_eq!(ctx.mem_get_access(Location::Device(0), ptr).unwrap(), 0);
        ctx.set_access(ptr, MIB2, &[read_write(Location::Host)])
            .unwrap();
        assert_eq!(peek(ptr), 0);
        poke(ptr, 1);
        ctx.unmap(ptr, MIB2).unwrap();
    }
    ctx.address_free(ptr, MIB2).unwrap();
}
