//! Code for GPUs: device functions as headers for CUDA C++, and kernels as PTX.
//!
//! The headers compile with nvcc, NVRTC and clang, with or without CUDA's own headers. `egmem_ring.cuh` and
//! `egmem_append.cuh` say how their functions are used. The PTX is compiled from the same headers; every kernel argument is
//! 64 bits wide, and pointers are multiples of 8. It is PTX 7.5, which drivers of CUDA 11.5 and later take, and needs a GPU
//! of compute capability 7.0 or later. The simulator runs none of it.
//!
//! A kernel's memory must stay until the kernel has ended. A program that returns early on an error, while a kernel runs,
//! breaks the promise of its launch: wait first ([`Stream::finish`](crate::Stream::finish)), or pump an
//! [`Appender`](crate::Appender) by [`pump_while`](crate::Appender::pump_while), which does so.
//!
//! ```no_run
//! use egmem::driver::{LaunchDims, NodeId};
//! use egmem::pinned::PinnedHost;
//! use egmem::shapes::{Ring, device};
//! use egmem::{Driver, Memory, Stream};
//!
//! // A kernel fills a ring while the CPU empties it.
//! let driver = Driver::open()?;
//! let stream = Stream::new(&driver, 0)?;
//! let Ring { producer, mut consumer } = Ring::<[u64; 2]>::on(NodeId(0)).create(&driver)?;
//! let producer = producer.into_gpu();
//! let done = PinnedHost::new(&driver, 0, 8)?;
//! // SAFETY: the text is PTX.
//! let module = unsafe { driver.module_load(0, device::PTX)? };
//! let args = [producer.device_ptr().0, 5000, 64, 10_000_000_000, done.device_ptr().0];
//! // SAFETY: the module is loaded; the arguments are the kernel's; the ring and `done` live until the kernel has ended, since
//! // nothing returns before `finish`.
//! unsafe {
//!     let kernel = driver.module_function(0, module, device::RING_PUSH_NUMBERED)?;
//!     driver.launch_kernel(kernel, LaunchDims { blocks: 1, threads: 64 }, &args, stream.handle())?;
//! }
//! let mut left = Ok(5000);
//! while let Ok(count @ 1..) = left {
//!     left = consumer.pop_into(&mut vec![[0; 2]; count]).map(|popped| count - popped);
//! }
//! stream.finish()?; // also after an error: the kernel may still write
//! left?;
//! // SAFETY: nothing runs any more.
//! unsafe { driver.module_unload(0, module)? };
//! # Ok::<(), egmem::Error>(())
//! ```

use std::ffi::CStr;

/// The header files: name and text, as NVRTC takes them.
pub const HEADERS: [(&str, &str); 3] = [
    ("egmem_device.cuh", include_str!("egmem_device.cuh")),
    ("egmem_append.cuh", include_str!("egmem_append.cuh")),
    ("egmem_ring.cuh", include_str!("egmem_ring.cuh")),
];

/// The kernels below as PTX, and the headers' functions for PTX of other sources, to be linked by `cuLinkAddData`:
/// `egmem_ring_fn_open`, `_look`, `_wait`, `_at`, `_fence` and `_advance`, for a side of 72 bytes; `egmem_append_fn_open`,
/// `_reserve` and `_at`, for an appender's state of 48 bytes; both at multiples of 8. `tests/all/shapes/linked.cu` declares and
/// calls them.
pub const PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("shapes.ptx"), "\0").as_bytes()) {
        Ok(ptx) => ptx,
        Err(_) => panic!("shapes.ptx holds a NUL"),
    };

/// `(ring, from, count, ns, done)`, one warp: pushes `count` records that lie side by side at `from`. Stops where the
/// ring stays full for `ns` nanoseconds. `done` gets the number of records pushed. Where there is no ring at the address,
/// nothing is written, not even `done`: so for all kernels here.
pub const RING_PUSH_RECORDS: &CStr = c"egmem_ring_push_records";

/// `(ring, to, count, ns, done)`, one warp: pops `count` records to `to`. Stops where the ring stays empty for `ns`
/// nanoseconds. `done` gets the number of records popped.
pub const RING_POP_RECORDS: &CStr = c"egmem_ring_pop_records";

/// `(ring, count, batch, ns, done)`, one block of any size: pushes `count` records of 16 bytes, the `n`th of which is `n`
/// from 0 on and its complement. `batch` records are committed together, and fewer at the end: 1 up to the ring's capacity,
/// since a batch of 0 never ends and a larger one never has room. Stops where a batch has no room for `ns` nanoseconds.
/// `done` gets the number of records pushed. A ring with records of another size gets none, and `done` is not written. For
/// tests and measurements.
pub const RING_PUSH_NUMBERED: &CStr = c"egmem_ring_push_numbered";

/// `(ring, count, ns, times, clock)`, one thread: pushes a record of 16 bytes and waits until it is released, `count`
/// times, within `ns` nanoseconds in all. `times` gets the cycles of each; `clock` the nanoseconds and the cycles of all. For measurements.
pub const RING_ROUND_TRIPS: &CStr = c"egmem_ring_round_trips";

/// `(appender, count, share, done, ns)`, any grid of whole warps: appends a record of 16 bytes, a number and its
/// complement, for about `share` of 256 numbers below `count`, unless its byte in `done` is set, and sets that. `done` may
/// be 0. For tests and measurements.
pub const APPEND_ITEMS: &CStr = c"egmem_append_items";

#[cfg(test)]
mod tests {
    use super::*;

    /// How many fences between mappings a kernel's code has.
    fn fences(name: &CStr) -> usize {
        let entry = format!(".entry {}(", name.to_str().unwrap());
        let (_, code) = PTX.to_str().unwrap().split_once(&entry).unwrap();
        let (code, _) = code.split_once("\n}").unwrap();
        code.matches("fence.proxy.alias").count()
    }

    #[test]
    fn kernels_fence_the_two_mappings_of_a_ring() {
        // In the wait and in the advance; and around the other threads' accesses.
        for (name, expected) in [
            (RING_PUSH_RECORDS, 4),
            (RING_POP_RECORDS, 4),
            (RING_PUSH_NUMBERED, 4),
            (RING_ROUND_TRIPS, 2),
            (APPEND_ITEMS, 0),
        ] {
            assert_eq!(fences(name), expected, "{name:?}");
        }
    }
}
