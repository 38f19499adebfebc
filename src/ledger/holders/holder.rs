//! A process that may hold memory.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::fds::{Inode, Size};
use super::why::Why;
use crate::driver::NodeId;

/// The shared memory in bytes from which on a process without a GPU is in the report.
const LEAST_SHARED: u64 = 4 << 20;

/// What a process has of a GPU's memory, as NVML counts it: contexts, allocations, what caches keep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OnGpu {
    /// NVML's index of the GPU, which need not be CUDA's ordinal.
    pub index: u32,
    /// The GPU's UUID, as `nvidia-smi -L` shows it.
    pub uuid: Option<String>,
    /// The bytes. `None`: NVML does not tell.
    pub bytes: Option<u64>,
}

/// A process that has a GPU open or mapped, that NVML names, or that holds shared memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Holder {
    /// Its process id in this process's PID namespace; for [`Why::Hidden`] as NVML has it.
    pub pid: u32,
    /// The name of its program: at most 15 bytes.
    pub name: String,
    /// Its program and arguments: at most 200 bytes, or nothing.
    pub command: String,
    /// Its effective user id.
    pub uid: Option<u32>,
    /// The user's name in `/etc/passwd`.
    pub user: Option<String>,
    /// Its state, as proc(5) has it: `R`, `S`, `D`, `T`, `t`, `Z`, `X`.
    pub state: Option<char>,
    /// The container's engine, and the beginning of its id where control groups tell it.
    pub container: Option<String>,
    /// Its process id in its own PID namespace, if that is another one.
    pub inner_pid: Option<u32>,
    /// How many of its file descriptors are `/dev/nvidia*`. `None`: not permitted.
    pub device_fds: Option<u64>,
    /// How many file descriptors wait, unread, in its Unix sockets: they may be memory. `None`: not permitted.
    pub fds_in_flight: Option<u64>,
    /// The bytes of the driver's host memory that it maps for the CPU (`/dev/nvidiactl`), its own or imported. `None`: not
    /// permitted.
    pub driver_mapped: Option<u64>,
    /// The bytes of managed memory that it maps (`/dev/nvidia-uvm`), wherever their pages are. `None`: not permitted.
    pub managed_mapped: Option<u64>,
    /// The driver's memory and managed memory that it maps, by host node: of processes with managed memory,
    /// and of all where the machine has several nodes.
    pub by_node: BTreeMap<NodeId, u64>,
    /// The bytes of shared memory that it maps: memfds, files in `/dev/shm`, shared pages without a file.
    pub shared_mapped: u64,
    /// Those of them without a file: pinned by `cuMemHostAlloc`, or the program's own.
    pub unnamed_mapped: u64,
    /// The bytes of shared memory that it holds by a file descriptor alone.
    pub shared_unmapped: u64,
    /// Its memory on GPUs, as NVML counts it.
    pub gpus: Vec<OnGpu>,
    /// Why memory is in use there, the strongest reason first.
    pub why: Vec<Why>,
    /// Whether `/proc` lists it. A process that is listed may still be unreadable.
    #[serde(skip)]
    pub(super) is_listed: bool,
    /// Whether all its threads have ended, so that it holds nothing any more.
    #[serde(skip)]
    pub(super) has_ended: bool,
    /// Files of shared memory, for sums over processes.
    #[serde(skip)]
    pub(super) files: BTreeMap<Inode, Size>,
}

impl Holder {
    /// Returns the bytes that it holds, for the order of a table.
    pub(crate) fn bytes(&self) -> u64 {
        let gpus = self.gpus.iter().filter_map(|on| on.bytes);
        let host = [
            self.driver_mapped.unwrap_or(0),
            self.managed_mapped.unwrap_or(0),
            self.shared_mapped,
            self.shared_unmapped,
        ];
        gpus.chain(host).fold(0, u64::saturating_add)
    }

    /// Returns the command line, or else the program's name.
    pub(crate) fn title(&self) -> &str {
        match self.command.as_str() {
            "" => &self.name,
            command => command,
        }
    }

    pub(super) fn has_gpu(&self) -> bool {
        let opens = self.device_fds > Some(0);
        let maps = self.driver_mapped > Some(0) || self.managed_mapped > Some(0);
        opens || maps || !self.gpus.is_empty()
    }

    /// Returns whether it may hold memory that somebody looks for.
    pub(super) fn counts(&self) -> bool {
        let shared = self.shared_mapped.saturating_add(self.shared_unmapped);
        let is_stuck = self.why.contains(&Why::Waiting);
        self.has_gpu() || is_stuck || self.fds_in_flight > Some(0) || shared >= LEAST_SHARED
    }
}
