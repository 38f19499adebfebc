//! Streams, events, copies.

use egmem::driver::*;
use egmem::kernels::pattern;

use crate::conformance::harness::{Ctx, fails};
use crate::conformance::raw::*;

const WORDS: u64 = 4096;
const BYTES: u64 = WORDS * 8;

/// A stream of another GPU or of the same waits for an event; then the bytes are there.
pub fn an_event_orders_two_streams(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    let back = ctx.mem_host_alloc(0, BYTES).unwrap();
    for gpu in ctx.gpus() {
        let (first, second) = (
            ctx.stream_create(gpu).unwrap(),
            ctx.stream_create(gpu).unwrap(),
        );
        let event = ctx.event_create(gpu, false).unwrap();
        let value = 0x40 + gpu as u8;
        ctx.memset(memory.ptr, value, BYTES, first).unwrap();
        ctx.event_record(event, first).unwrap();
        ctx.stream_wait_event(second, event).unwrap();
        ctx.copy(back, memory.ptr, BYTES, second).unwrap();
        ctx.stream_synchronize(second).unwrap();
        let word = u64::from_ne_bytes([value; 8]);
        assert!((0..WORDS).all(|i| peek(back.add(8 * i)) == word));
        assert!(ctx.event_query(event).unwrap());
        assert!(ctx.stream_query(first).unwrap() && ctx.stream_query(second).unwrap());
        ctx.destroy_event(event).unwrap();
        ctx.destroy_stream(first).unwrap();
        ctx.destroy_stream(second).unwrap();
    }
    ctx.free_host(0, back).unwrap();
}

/// Only recorded events with timing have a time between them.
pub fn elapsed_time_needs_recorded_events_with_timing(ctx: &Ctx) {
    let stream = ctx.stream_create(0).unwrap();
    let timed = [(); 2].map(|()| ctx.event_create(0, true).unwrap());
    let untimed = ctx.event_create(0, false).unwrap();
    fails(
        ctx.event_elapsed_ms(timed[0], timed[1]),
        Code::INVALID_HANDLE,
    );
    for event in timed.into_iter().chain([untimed]) {
        // An event that was never recorded counts as done.
        assert!(ctx.event_query(event).unwrap());
        ctx.event_record(event, stream).unwrap();
        ctx.event_synchronize(event).unwrap();
    }
    assert!(ctx.event_elapsed_ms(timed[0], timed[1]).unwrap() >= 0.0);
    fails(
        ctx.event_elapsed_ms(timed[0], untimed),
        Code::INVALID_HANDLE,
    );
    for event in timed.into_iter().chain([untimed]) {
        ctx.destroy_event(event).unwrap();
    }
    ctx.destroy_stream(stream).unwrap();
}

/// Work on the legacy default stream.
pub fn the_default_stream_works(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    for gpu in ctx.gpus() {
        let stream = StreamHandle {
            device: gpu,
            raw: 0,
        };
        ctx.memset(memory.ptr, 7, 4096, stream).unwrap();
        ctx.stream_synchronize(stream).unwrap();
        assert_eq!(peek(memory.ptr), u64::from_ne_bytes([7; 8]));
        poke(memory.ptr, 0);
    }
}

/// Every pair of: host-NUMA mapping, device mapping, cuMemAlloc, cuMemHostAlloc; by each GPU.
pub fn copies_go_in_all_directions(ctx: &Ctx) {
    for gpu in ctx.gpus() {
        let stream = ctx.stream_create(gpu).unwrap();
        let own = Location::Device(gpu);
        let host = Mapped::shared(ctx, MIB2);
        let props = AllocationProps::at(own);
        let device = Mapped::new(ctx, props, MIB2, &[read_write(own)]);
        let plain = ctx.mem_alloc(gpu, BYTES).unwrap();
        let pinned = ctx.mem_host_alloc(gpu, BYTES).unwrap();
        let places = [host.ptr, device.ptr, plain, pinned];
        let mut seed = 100;
        for from in places {
            for to in places.into_iter().filter(|to| *to != from) {
                seed += 1;
                // CPU → `pinned` → from → to → `host` → CPU, for any kinds of memory.
                cpu_write(pinned, WORDS, seed);
                let hops = [pinned, from, to, host.ptr];
                for hop in hops.windows(2).filter(|hop| hop[0] != hop[1]) {
                    ctx.copy(hop[1], hop[0], BYTES, stream).unwrap();
                }
                ctx.stream_synchronize(stream).unwrap();
                cpu_check(host.ptr, WORDS, seed);
            }
        }
        ctx.free(gpu, plain).unwrap();
        ctx.free_host(gpu, pinned).unwrap();
        ctx.destroy_stream(stream).unwrap();
    }
}

/// A copy of part of a range touches nothing beside it.
pub fn a_copy_stays_in_its_range(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    let stream = ctx.stream_create(0).unwrap();
    cpu_write(memory.ptr, 3 * WORDS, 1);
    let (second, third) = (memory.ptr.add(BYTES), memory.ptr.add(2 * BYTES));
    ctx.copy(second.add(8), memory.ptr, BYTES - 16, stream)
        .unwrap();
    ctx.stream_synchronize(stream).unwrap();
    assert_eq!(peek(second), pattern(1, WORDS));
    cpu_check(second.add(8), WORDS - 2, 1);
    assert_eq!(peek(third.add(0)), pattern(1, 2 * WORDS));
    assert_eq!(peek(DevicePtr(third.0 - 8)), pattern(1, 2 * WORDS - 1));
    ctx.destroy_stream(stream).unwrap();
}

/// From CUDA 12.8 on.
pub fn a_batch_makes_each_of_its_copies(ctx: &Ctx) {
    let (from, to) = (Mapped::shared(ctx, MIB2), Mapped::shared(ctx, MIB2));
    let own = Location::Device(0);
    let device = Mapped::new(ctx, AllocationProps::at(own), MIB2, &[read_write(own)]);
    let stream = ctx.stream_create(0).unwrap();
    cpu_write(from.ptr, WORDS, 5);
    let half = BYTES / 2;
    let copies = |dst: DevicePtr, src: DevicePtr| {
        let copy = |at| MemcpyDesc {
            dst: dst.add(at),
            src: src.add(at),
            bytes: half,
        };
        [copy(half), copy(0)]
    };
    let there = ctx.copy_batch(&copies(device.ptr, from.ptr), stream);
    if ctx.driver.driver_version().unwrap() < CudaVersion(12080) {
        assert!(there.is_err());
        return ctx.destroy_stream(stream).unwrap();
    }
    there.unwrap();
    ctx.copy_batch(&copies(to.ptr, device.ptr), stream).unwrap();
    ctx.stream_synchronize(stream).unwrap();
    cpu_check(to.ptr, WORDS, 5);
    ctx.destroy_stream(stream).unwrap();
}

/// Null is refused before any work is queued.
pub fn null_is_refused(ctx: &Ctx) {
    let memory = Mapped::shared(ctx, MIB2);
    let stream = ctx.stream_create(0).unwrap();
    let null = DevicePtr(0);
    fails(ctx.memset(null, 1, 4096, stream), Code::INVALID_VALUE);
    fails(
        ctx.copy(null, memory.ptr, 4096, stream),
        Code::INVALID_VALUE,
    );
    fails(
        ctx.copy(memory.ptr, null, 4096, stream),
        Code::INVALID_VALUE,
    );
    ctx.stream_synchronize(stream).unwrap();
    ctx.destroy_stream(stream).unwrap();
}
