//! DLPack's devices and their names.

use pyo3::prelude::*;

use crate::error::{OrRaise, invalid};

/// `kDLCPU`.
pub const CPU: i32 = 1;
/// `kDLCUDA`.
pub const CUDA: i32 = 2;
/// `kDLCUDAHost`: pinned memory of the CPU.
pub const CUDA_HOST: i32 = 3;

/// Returns DLPack's device for its name.
///
/// # Errors
/// `InvalidArgument` for another name; `NoSuchPlace` for a GPU that the driver's machine does not have.
pub fn parse(name: &str, driver: &egmem::Driver) -> PyResult<(i32, i32)> {
    let gpu = |digits: &str| digits.parse::<i32>().ok().filter(|gpu| *gpu >= 0);
    match (name, name.strip_prefix("cuda:").and_then(gpu)) {
        ("cpu", _) => Ok((CPU, 0)),
        ("cuda_host", _) => Ok((CUDA_HOST, 0)),
        (_, Some(gpu)) => {
            expect_gpu(gpu, driver)?;
            Ok((CUDA, gpu))
        }
        _ => Err(invalid(&format!(
            "there is no device {name:?}; valid: \"cpu\", \"cuda_host\", \"cuda:0\" and so on"
        ))),
    }
}

/// Checks that the driver's machine has this GPU.
///
/// # Errors
/// `NoSuchPlace`, which names the GPU and how many there are.
pub fn expect_gpu(gpu: i32, driver: &egmem::Driver) -> PyResult<()> {
    let count = Python::attach(|py| py.detach(|| driver.device_count()));
    count
        .and_then(|count| egmem::Error::expect_gpu(gpu, count))
        .or_raise()
}

/// Returns the name of DLPack's device.
pub fn name((kind, gpu): (i32, i32)) -> String {
    match kind {
        CPU => "cpu".into(),
        CUDA_HOST => "cuda_host".into(),
        _ => format!("cuda:{gpu}"),
    }
}
