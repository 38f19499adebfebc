//! Pages of the process that the driver pins: `cuMemHostRegister`.

use std::alloc::{Layout, alloc_zeroed, dealloc};

use egmem::driver::*;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

/// Pages of this process.
struct Pages {
    start: *mut u8,
    layout: Layout,
}

impl Pages {
    fn new(bytes: u64) -> Self {
        let layout = Layout::from_size_align(bytes as usize, MIB2 as usize).unwrap();
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        assert!(!start.is_null());
        Self { start, layout }
    }

    fn at(&self, offset: u64) -> DevicePtr {
        DevicePtr(self.start.expose_provenance() as u64 + offset)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; each case unregisters before.
        unsafe { dealloc(self.start, self.layout) };
    }
}

/// Rows: copies and fills of registered memory end at the borders of registrations, kernels do not.
pub fn a_copy_across_two_registrations_is_invalid(ctx: &Ctx) {
    let gpu = ctx.expect.gpus - 1;
    let pages = Pages::new(2 * MIB2);
    for offset in [0, MIB2] {
        ctx.register(gpu, pages.at(offset), MIB2, false, None)
            .unwrap();
        assert_eq!(
            ctx.mem_host_device_pointer(gpu, pages.at(offset)).unwrap(),
            pages.at(offset)
        );
    }
    let device = ctx.mem_alloc(gpu, 2 * MIB2).unwrap();
    let stream = ctx.stream_create(gpu).unwrap();
    let invalid = |result| fails(result, Code::INVALID_VALUE);
    let across = pages.at(MIB2 / 2);
    invalid(ctx.copy(device, across, MIB2, stream));
    invalid(ctx.copy(across, device, MIB2, stream));
    invalid(ctx.memset(across, 1, MIB2, stream));
    let copy = MemcpyDesc {
        dst: device,
        src: across,
        bytes: MIB2,
    };
    invalid(ctx.copy_batch(&[copy], stream));
    // Beyond the last one.
    invalid(ctx.copy(device, pages.at(MIB2), MIB2 + 8, stream));
    ctx.memset(pages.at(0), 7, MIB2, stream).unwrap();
    ctx.copy(pages.at(MIB2), pages.at(0), MIB2, stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    assert_eq!(peek(pages.at(2 * MIB2 - 8)), 0x0707_0707_0707_0707);
    ctx.destroy_stream(stream).unwrap();
    ctx.free(gpu, device).unwrap();
    for offset in [0, MIB2] {
        ctx.unregister(gpu, pages.at(offset)).unwrap();
    }
}

/// Rows: pages are registered once, and unregistered from where they were.
pub fn registered_pages_are_registered_once(ctx: &Ctx) {
    let pages = Pages::new(2 * MIB2);
    ctx.register(0, pages.at(0), MIB2, false, None).unwrap();
    let again = Code::HOST_MEMORY_ALREADY_REGISTERED;
    fails(ctx.register(0, pages.at(0), MIB2, false, None), again);
    fails(ctx.register(0, pages.at(0), 2 * MIB2, false, None), again);
    let unknown = Code::HOST_MEMORY_NOT_REGISTERED;
    fails(ctx.unregister(0, pages.at(MIB2)), unknown);
    // Portable: any GPU's context will do.
    ctx.unregister(ctx.expect.gpus - 1, pages.at(0)).unwrap();
    fails(ctx.unregister(0, pages.at(0)), unknown);
}
