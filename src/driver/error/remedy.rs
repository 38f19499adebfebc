//! The remedy of each error.

use std::io::ErrorKind;

use super::Error;
use crate::Code;

impl Error {
    /// Returns what to do about it, in a sentence.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::NoDriver { .. } => {
                "install the NVIDIA driver (libcuda.so.1), or simulate one (Driver::simulated, --sim)"
            }
            Self::DriverTooOld { .. } => "install a newer NVIDIA driver",
            Self::MissingLibrary { .. } => {
                "install the library, or add its folder to LD_LIBRARY_PATH"
            }
            Self::MissingSymbol { .. } => {
                "the installed library is damaged or a stub: install the driver for the GPU"
            }
            Self::NoImexChannel { .. } => {
                "ask the administrator for an IMEX channel (nvidia-modprobe or the IMEX service), and in \
                 a container for the device node; within one machine use POSIX fds instead"
            }
            Self::PlatformUnsupported { .. } => {
                "use another path: `egmem doctor` lists those that work"
            }
            Self::TooManyReferences { .. } => {
                "drop imports and CPU mappings of it that are not needed, export an fd once and send \
                 duplicates (share::Shared does), import it once per process (with an origin), or grant \
                 it only to GPUs: access(Location::Host, Access::None)"
            }
            Self::OutOfMemory { .. } => {
                "ask for less, free memory on the node, or choose another node"
            }
            Self::NodeTooFull { .. } | Self::NodesTooFull { .. } => {
                "ask for less, free memory on the node, choose another node, or allow it with \
                 overcommit(true) or EGMEM_ALLOW_OVERCOMMIT=1"
            }
            Self::NodeUnknown { .. } => "choose a node by its id",
            Self::NoSuchNode { .. } | Self::NoSuchGpu { .. } => {
                "choose one that `egmem topo` lists"
            }
            Self::NoPeerAccess { .. } => {
                "put the memory on a host node, which every GPU reaches, or copy it between the GPUs; `egmem topo` shows \
                 which GPUs reach each other"
            }
            Self::NotAccessible { .. } => {
                "grant the access: with set_access on a buffer or a mapping, with HeapOptions::access when a heap is \
                 built, with ImportOptions::access when memory is imported"
            }
            Self::ContextLost { .. } => {
                "restart the process; compute-sanitizer finds the faulty access"
            }
            Self::WrongBytes { .. } => {
                "memory was overwritten or is faulty: check other writers, then the machine's logs"
            }
            Self::HeapDamaged { .. } => {
                "check the code that uses these blocks: kernels' indices and lengths, and work that \
                 still runs when a block is dropped (Block::free_after); compute-sanitizer finds the access"
            }
            Self::ProbeDied { .. } => {
                "if the driver crashed, update it, and use the paths that work"
            }
            Self::Cancelled { .. } => {
                "allocate again without a break from the progress function: what had been allocated was given back"
            }
            Self::StillHeld { .. } => {
                "end or ask the holders; memory that a holder has mapped stays pinned until it unmaps it"
            }
            Self::HeapFull { why, .. } => why.remedy(),
            Self::CursorDamaged { .. } => {
                "check the kernels that have the address: one that writes beyond its memory, a second one on the same side of \
                 a ring, or one that still runs when an appender's records are collected. Create a damaged ring anew; an \
                 appender goes on after `collect`"
            }
            Self::OutOfAddresses { .. } => {
                "reserve fewer (a heap reserves its whole limit, HeapOptions::limit), or drop other reservations"
            }
            Self::Driver(source) => remedy_for(source.code),
            Self::InvalidArgument { valid: Some(_), .. } => "correct the argument",
            Self::InvalidArgument { valid: None, .. } => {
                "change what the message names, or the call, option or key that it came from"
            }
            Self::OutOfRange { .. } => "keep offset and length together within the memory's size",
            Self::System { kind, .. } => remedy_for_system(*kind),
            Self::Topology { .. } => {
                "check /sys/devices/system/node, or the description that was given instead"
            }
        }
    }
}

fn remedy_for_system(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => "check the path: it, or a folder above it, does not exist",
        ErrorKind::PermissionDenied => "check the owner and mode, or run as a user with permission",
        ErrorKind::AddrInUse => {
            "choose another address, or end the program that listens there (ss -ltnp and ss -lxp show it)"
        }
        ErrorKind::AddrNotAvailable => "choose an address of this machine (ip address lists them)",
        ErrorKind::AlreadyExists => "remove it, or choose another path",
        ErrorKind::IsADirectory => "name a file, not a folder",
        ErrorKind::NotADirectory => "check the path: a part before its end is a file",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free space on that file system, or choose another"
        }
        ErrorKind::ReadOnlyFilesystem => "choose a path on a file system that can be written",
        ErrorKind::OutOfMemory => "free memory of this machine",
        ErrorKind::InvalidData => "check the file: its content is invalid",
        _ => "check that it exists, its owner and mode, and this process's limits (ulimit -a)",
    }
}

fn remedy_for(code: Code) -> &'static str {
    match code {
        Code::NO_DEVICE => "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        Code::STUB_LIBRARY => "remove the CUDA toolkit's stubs folder from LD_LIBRARY_PATH",
        Code::SYSTEM_DRIVER_MISMATCH => {
            "reboot or reload the kernel module: it is not the library's version"
        }
        Code::SYSTEM_NOT_READY => "start nvidia-fabricmanager (or nvidia-imex) and try again",
        Code::NOT_PERMITTED => {
            "check the IMEX channel, the container's device nodes and its capabilities"
        }
        Code::OUT_OF_MEMORY => "ask for less, or free memory",
        Code::INVALID_VALUE | Code::INVALID_DEVICE | Code::INVALID_HANDLE => {
            "check the arguments of the call: node, GPU, size and handle (`egmem topo` lists nodes and GPUs)"
        }
        _ => "run `egmem doctor` to see what works on this machine",
    }
}
