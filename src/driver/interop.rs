//! Addresses as kernel arguments of cudarc's launches, and cudarc's streams as this crate's.

use cudarc::driver::{CudaStream, DeviceRepr};

use crate::{DevicePtr, StreamHandle};

// SAFETY: `repr(transparent)` over the 64-bit address that a kernel's pointer parameter is.
unsafe impl DeviceRepr for DevicePtr {}

impl From<&CudaStream> for StreamHandle {
    /// Converts the stream for this crate's calls. cudarc still owns it: it must outlive the handle's use.
    fn from(stream: &CudaStream) -> Self {
        Self {
            device: stream.context().ordinal() as i32,
            raw: stream.cu_stream() as u64,
        }
    }
}
