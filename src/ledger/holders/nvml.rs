//! What NVML tells of GPUs and their processes.

use serde::{Deserialize, Serialize};

/// A process that NVML names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NvmlProcess {
    /// Its process id.
    pub pid: u32,
    /// Its bytes on the GPU. `None`: NVML does not tell.
    pub bytes: Option<u64>,
    /// Whether it is a client of an MPS server.
    pub is_mps_client: bool,
}

impl NvmlProcess {
    /// A process with `bytes` on a GPU, which is no client of an MPS server.
    pub const fn new(pid: u32, bytes: Option<u64>) -> Self {
        Self {
            pid,
            bytes,
            is_mps_client: false,
        }
    }
}

/// A GPU, as NVML has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NvmlGpu {
    /// NVML's index, which need not be CUDA's ordinal.
    pub index: u32,
    /// Its UUID, as `nvidia-smi -L` shows it.
    pub uuid: Option<String>,
    /// The bytes that the driver and the firmware keep for themselves; CUDA counts them neither as total nor as used.
    pub reserved: Option<u64>,
    /// The processes that use it, at most 4096.
    pub processes: Vec<NvmlProcess>,
    /// NVML's error, where it did not tell something.
    pub why: Option<String>,
}

/// Asks NVML, if it is here.
#[cfg(not(feature = "nvml"))]
pub(super) fn ask() -> Result<Vec<NvmlGpu>, String> {
    Err("this build asks no NVML (feature nvml)".into())
}

#[cfg(feature = "nvml")]
pub(super) use asked::ask;

#[cfg(feature = "nvml")]
mod asked {
    use nvml_wrapper::enums::device::UsedGpuMemory;
    use nvml_wrapper::error::NvmlError;
    use nvml_wrapper::struct_wrappers::device::ProcessInfo;
    use nvml_wrapper::{Device, Nvml};

    use super::{NvmlGpu, NvmlProcess};

    /// The most GPUs and the most processes of one.
    const MOST: usize = 4096;

    /// Asks NVML, if it is here. It is loaded for one question, and given up with its files.
    pub(in crate::holders) fn ask() -> Result<Vec<NvmlGpu>, String> {
        let nvml = Nvml::init().map_err(|error| match error {
            NvmlError::LibloadingError(_) => "libnvidia-ml.so.1 is not here".to_owned(),
            error => format!("NVML does not start: {error}"),
        })?;
        let count = nvml
            .device_count()
            .map_err(|error| format!("NVML counts no GPUs: {error}"))?;
        let gpu = |index| match nvml.device_by_index(index) {
            Ok(device) => of_device(index, &device),
            Err(error) => NvmlGpu {
                index,
                why: Some(format!("NVML has no GPU {index}: {error}")),
                ..NvmlGpu::default()
            },
        };
        Ok((0..count.min(MOST as u32)).map(gpu).collect())
    }

    fn of_device(index: u32, device: &Device<'_>) -> NvmlGpu {
        let mut gpu = NvmlGpu {
            index,
            uuid: device.uuid().ok(),
            reserved: device.memory_info().ok().map(|info| info.reserved),
            ..NvmlGpu::default()
        };
        let lists = [
            ("compute", device.running_compute_processes(), false),
            ("graphics", device.running_graphics_processes(), false),
            ("MPS", device.mps_running_compute_processes(), true),
        ];
        for (name, list, is_mps_client) in lists {
            match list {
                Ok(list) => gpu.add(list, is_mps_client),
                // Drivers before 510 have another form of the lists.
                Err(error) => {
                    gpu.why = Some(format!("NVML does not list {name} processes: {error}"))
                }
            }
        }
        gpu
    }

    impl NvmlGpu {
        fn add(&mut self, list: Vec<ProcessInfo>, is_mps_client: bool) {
            for info in list {
                let bytes = match info.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                };
                let is_full = self.processes.len() == MOST;
                let mut all = self.processes.iter_mut();
                match all.find(|known| known.pid == info.pid) {
                    Some(known) => {
                        known.bytes = known.bytes.max(bytes);
                        known.is_mps_client |= is_mps_client;
                    }
                    None if is_full => return,
                    None => self.processes.push(NvmlProcess {
                        pid: info.pid,
                        bytes,
                        is_mps_client,
                    }),
                }
            }
        }
    }
}
