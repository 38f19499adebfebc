//! The driver's answers about an address.

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

/// Row: cuPointerGetAttribute on a HOST_NUMA mapping: MEMORY_TYPE 1 (host), ordinal 0,
/// HOST_POINTER = the address, ALLOWED_HANDLE_TYPES as requested.
pub fn pointer_attributes_of_a_host_numa_mapping(ctx: &Ctx) {
    let access = [read_write(Location::Host), read_write(Location::Device(0))];
    for types in [HandleTypes::NONE, HandleTypes::POSIX_FD] {
        let props = AllocationProps::at(ctx.home()).handle_types(types);
        let memory = Mapped::new(ctx, props, MIB2, &access);
        let ask = |attribute| ctx.pointer_attribute(memory.ptr, attribute).unwrap();
        assert_eq!(ask(PointerAttribute::MemoryType), 1);
        assert_eq!(ask(PointerAttribute::DeviceOrdinal), 0);
        assert_eq!(ask(PointerAttribute::HostPointer), memory.ptr.0);
        let allowed = ask(PointerAttribute::AllowedHandleTypes);
        assert_eq!(allowed, u64::from(types.bits()));
    }
}

/// Row: cuMemGetAddressRange on it: success, size right, base 0.
pub fn address_range_of_a_host_numa_mapping_has_base_0(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, 2 * MIB2);
    let (base, size) = ctx.mem_address_range(memory.ptr.add(4096)).unwrap();
    assert_eq!(size, 2 * MIB2);
    if ctx.simulated() || ctx.expect.h200 {
        assert_eq!(base, DevicePtr(0));
    }
}

/// Row: cuMemGetHandleForAddressRange(DMA_BUF_FD) on HOST_NUMA.
pub fn dma_buf_of_a_host_numa_mapping_is_invalid(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    // SAFETY: nothing is written through the fd.
    let refused = unsafe { ctx.mem_dma_buf(memory.ptr, MIB2) };
    fails(refused, Code::INVALID_VALUE);
}

/// Row: /proc/self/smaps of a mapping: KernelPageSize 4 kB (x86 virtual machine), mapped from
/// /dev/nvidiactl. Of the real driver only: it says how the memory is made.
pub fn smaps_shows_a_mapping_of_nvidiactl(ctx: &Ctx) {
    if !ctx.expect.h200 || ctx.simulated() {
        return println!("skipped: about the real driver on H200");
    }
    let memory = Mapped::shared(ctx, MIB2);
    cpu_write(memory.ptr, 1, 1);
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    // Neighbours may be listed as one.
    let holds = |line: &&str| {
        let range = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'));
        let number = |text| u64::from_str_radix(text, 16).ok();
        let bounds = range.and_then(|(start, end)| Some(number(start)?..number(end)?));
        bounds.is_some_and(|bounds| bounds.contains(&memory.ptr.0))
    };
    let mut lines = smaps.lines().skip_while(|line| !holds(line));
    let head = lines.next().expect("the mapping is not listed");
    assert!(head.ends_with("/dev/nvidiactl"), "{head}");
    let page = lines.find(|line| line.starts_with("KernelPageSize:"));
    assert!(page.unwrap().contains("4 kB"), "{page:?}");
}

/// An address outside of all memory.
pub fn questions_about_no_memory_fail(ctx: &Ctx) {
    let nowhere = DevicePtr(0);
    assert!(ctx.mem_address_range(nowhere).is_err());
    assert!(ctx.mem_retain(nowhere).is_err());
    assert!(ctx.mem_get_access(Location::Device(0), nowhere).is_err());
    assert!(
        ctx.pointer_attribute(nowhere, PointerAttribute::MemoryType)
            .is_err()
    );
}
