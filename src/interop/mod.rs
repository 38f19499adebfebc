//! For programs that use [cudarc](https://docs.rs/cudarc): this crate's memory in cudarc's copies
//! and launches. Needs the feature `interop`.
//!
//! The program depends on cudarc 0.19 itself and chooses its CUDA version (`cuda-12080`, …) and its linking. This
//! crate chooses neither: it compiles with every CUDA version of cudarc. Where no crate of the build names a
//! version, cudarc takes that of `nvcc`, or its newest where there is no `nvcc`.
//!
//! - [`DevicePtr`] is a kernel argument: `builder.arg(&buffer.device_ptr())`, kept in a variable.
//! - [`EgmSlice`] and [`EgmSliceMut`] are memory seen as elements, which cudarc copies from and to
//!   (`memcpy_dtoh`, `memcpy_htod`, `memcpy_dtod`, …), and kernel arguments too.
//!
//! The driver must be [`Driver::open`](crate::Driver::open)'s, and is to be opened first: without
//! libcuda it gives an error where cudarc panics. Both use the devices' primary contexts, so their
//! addresses, streams and events go together. `examples/cudarc-interop.rs` shows it whole.

mod slice;

use cudarc::driver::{CudaStream, DeviceRepr};

pub use slice::{EgmSlice, EgmSliceMut};

use crate::driver::{DevicePtr, StreamHandle};

// SAFETY: `repr(transparent)` over the 64-bit address that a kernel's pointer parameter is.
unsafe impl DeviceRepr for DevicePtr {}

impl From<&CudaStream> for StreamHandle {
    /// The stream, for this crate's seam. It stays cudarc's: it must outlive the handle's use.
    fn from(stream: &CudaStream) -> Self {
        Self {
            device: stream.context().ordinal() as i32,
            raw: stream.cu_stream() as u64,
        }
    }
}
