//! A process that may hold memory, why, and the command that shows more.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use super::files::{Inode, Size, by_node};
use crate::driver::NodeId;
use crate::procs::{self, Unanswered};

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
    pub(super) files: HashMap<Inode, Size>,
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
        procs::title(&self.command, &self.name)
    }

    /// Adds the kernel's count of its pages by node, or that there is none.
    pub(super) fn add_pages(&mut self, counted: Result<Vec<u8>, Unanswered>) {
        match counted {
            Ok(pages) => self.by_node = by_node(&pages),
            Err(_) => self.why.push(Why::NodesUnknown),
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

/// A reason why memory is in use in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Why {
    /// The process that reports: its own contexts.
    Reporter,
    /// It offers its ledger.
    Ledger,
    /// NVML names it, and `/proc` does not show it: it is in another PID namespace, or has ended and its GPU memory is being
    /// given back.
    Hidden,
    /// Its first thread has ended, as after a kill, and another one is still in the kernel with the memory.
    Zombie,
    /// It was stopped.
    Stopped,
    /// A thread waits in the kernel and takes no signal, or the kernel did not show the process's files and mappings within 5 s,
    /// to this report or to an earlier one that still waits for them.
    Waiting,
    /// It is an MPS daemon or server, which holds its clients' contexts.
    Mps,
    /// It is a client of an MPS server.
    MpsClient,
    /// It is in another PID namespace, as in a container.
    Namespace,
    /// It belongs to another user.
    OtherUser,
    /// It did not permit this process to look at its files and mappings.
    Unreadable,
    /// It was not looked at, because too much or too many had been waited for already.
    NotLookedAt,
    /// The kernel did not show its pages by node within 10 s, or was not asked, because an earlier report still waits for them or
    /// too many questions wait already.
    NodesUnknown,
    /// File descriptors wait, unread, in its Unix sockets.
    InFlight,
    /// It maps the driver's memory, although it has closed all file descriptors of GPUs.
    MappedAlone,
    /// PyTorch, whose allocator keeps freed memory.
    #[serde(rename = "pytorch")]
    PyTorch,
    /// CuPy, whose pools keep freed memory.
    #[serde(rename = "cupy")]
    CuPy,
    /// It has contexts or allocations on GPUs.
    OnGpus,
    /// It maps managed memory, more than contexts have.
    Managed,
    /// It maps the driver's host memory, more than contexts have: `cuMemCreate` on a node, its own or imported, or a pool's.
    DriverMemory,
    /// It has GPUs open and maps shared pages without a file, as `cuMemHostAlloc` pins them.
    Pinned,
    /// It holds shared memory by a file descriptor alone.
    SharedUnmapped,
    /// It maps shared memory.
    Shared,
    /// It has GPUs open, and neither maps the driver's memory nor has memory on a GPU: handles, exported fds and imports that
    /// nobody maps would be here.
    OpenAlone,
    /// A reason that only a newer version of this library knows.
    #[serde(other)]
    Other,
}

impl Why {
    /// Returns the reason in a few words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Reporter => "this report's own",
            Self::Ledger => "offers its ledger",
            Self::Hidden => "not in /proc: in another PID namespace, or ending",
            Self::Zombie => "zombie, a thread still holds it",
            Self::Stopped => "stopped",
            Self::Waiting => "waits in the kernel",
            Self::Mps => "MPS, with its clients' contexts",
            Self::MpsClient => "MPS client",
            Self::Namespace => "in another PID namespace",
            Self::OtherUser => "another user's",
            Self::Unreadable => "could not be read",
            Self::NotLookedAt => "not looked at",
            Self::NodesUnknown => "its pages' nodes are not known",
            Self::InFlight => "fds unread in its sockets",
            Self::MappedAlone => "mapped after its fds were closed",
            Self::PyTorch => "PyTorch's cache",
            Self::CuPy => "CuPy's pools",
            Self::OnGpus => "contexts and allocations on GPUs",
            Self::Managed => "managed memory",
            Self::DriverMemory => "maps the driver's host memory, own or imported",
            Self::Pinned => "pinned by cudaHostAlloc, or shared pages of its own",
            Self::SharedUnmapped => "shared memory by fd alone",
            Self::Shared => "maps shared memory",
            Self::OpenAlone => "GPU open, nothing mapped (handles, exports, imports)",
            Self::Other => "other",
        }
    }

    /// Returns a command that shows more, with `PID` for the process, or a function of the library in the process. `None`:
    /// the report says it all.
    pub const fn command(self) -> Option<&'static str> {
        Some(match self {
            Self::Hidden => "nvidia-smi, outside of containers; ps -p PID",
            Self::Zombie | Self::Waiting => "ps -Lo pid,tid,stat,wchan:32,comm -p PID",
            Self::Stopped => "ps -o pid,stat,wchan:32,args -p PID",
            Self::Mps | Self::MpsClient => "echo get_server_list | nvidia-cuda-mps-control",
            Self::Namespace => "grep NSpid /proc/PID/status; cat /proc/PID/cgroup",
            Self::OtherUser => "ps -o user,args -p PID",
            Self::Unreadable => "sudo egmem ps",
            Self::NodesUnknown => "grep nvidia /proc/PID/numa_maps",
            Self::InFlight => "grep scm_fds: /proc/PID/fdinfo/*",
            Self::PyTorch => "torch.cuda.memory_summary(); torch.cuda.empty_cache()",
            Self::CuPy => "cupy.get_default_memory_pool().total_bytes(), .free_all_blocks()",
            Self::OnGpus => "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            Self::Managed => "grep -A4 nvidia-uvm /proc/PID/smaps",
            Self::DriverMemory | Self::MappedAlone => "grep nvidiactl /proc/PID/maps",
            Self::Pinned => "grep '/dev/zero' /proc/PID/maps",
            Self::SharedUnmapped => "ls -l /proc/PID/fd | grep -E 'memfd|/dev/shm'",
            Self::Shared => "grep -E 'memfd|/dev/shm|/dev/zero|SYSV|anon_huge' /proc/PID/maps",
            Self::OpenAlone => "ls -l /proc/PID/fd | grep nvidia",
            Self::Reporter | Self::Ledger | Self::NotLookedAt | Self::Other => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_of_a_stopped_process_sends_no_signal() {
        let command = Why::Stopped.command().unwrap();
        assert!(!command.contains("kill"), "{command}");
    }
}
