//! Lets programs that use [cudarc](https://docs.rs/cudarc) pass this crate's memory to cudarc's copies and
//! launches. Needs the feature `interop`.
//!
//! The program depends on cudarc 0.19 itself and chooses its CUDA version (`cuda-12080`, …) and its linking.
//! This crate chooses neither: it compiles with every CUDA version of cudarc. If no crate of the build
//! selects a version, cudarc takes that of `nvcc`, or its newest if there is no `nvcc`.
//!
//! - [`DevicePtr`](crate::driver::DevicePtr) is a kernel argument: `builder.arg(&buffer.device_ptr())`, kept in a variable.
//! - [`EgmSlice`] and [`EgmSliceMut`] are memory seen as elements, which cudarc copies from and to
//!   (`memcpy_dtoh`, `memcpy_htod`, `memcpy_dtod`, …), and kernel arguments too.
//!
//! The driver must come from [`Driver::open`](crate::Driver::open). Open it first: without libcuda it returns
//! an error, but cudarc panics. Both use the devices' primary contexts, so they can share addresses, streams
//! and events. `examples/cudarc` has complete examples.

mod slice;

pub use slice::{EgmSlice, EgmSliceMut};
