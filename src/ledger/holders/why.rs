//! Why a process may hold memory, and the command that shows more.

use serde::{Deserialize, Serialize};

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
    /// A thread waits in the kernel and takes no signal, or the kernel did not show the process's mappings within 5 s.
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
