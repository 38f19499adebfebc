//! Remedies by the code that the driver or the operating system reported.

use std::io::ErrorKind;

use crate::Code;

pub(super) fn of_system(kind: ErrorKind) -> &'static str {
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

/// The remedy for codes without a better one. A report of the doctor has another.
#[doc(hidden)]
pub const RUN_DOCTOR: &str = "run `egmem doctor` to see what works on this machine";

pub(super) const DESTROYED: &str = "restart the process, and let nothing in it reset the GPU: cudaDeviceReset, \
    cuDevicePrimaryCtxReset, and the teardown of a library that calls one of them, destroy the context that all libraries \
    of the process share";

pub(super) fn of_code(code: Code) -> &'static str {
    match code {
        Code::NO_DEVICE => "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        Code::STUB_LIBRARY => "remove the CUDA toolkit's stubs folder from LD_LIBRARY_PATH",
        Code::SYSTEM_DRIVER_MISMATCH => {
            "load the libcuda of the kernel module's version: in a container remove the folder of its cuda-compat \
             library from LD_LIBRARY_PATH and /etc/ld.so.conf.d; after an update of the driver reboot, or reload the \
             kernel module (`egmem doctor` shows both versions)"
        }
        Code::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "remove the folder of the cuda-compat library from LD_LIBRARY_PATH and /etc/ld.so.conf.d: this GPU does not \
             support it (`egmem doctor` shows which libcuda is loaded)"
        }
        Code::DEVICE_UNAVAILABLE => {
            "end the process that has the GPU for itself, or set its compute mode to DEFAULT (nvidia-smi -c DEFAULT); \
             with MIG on, create an instance"
        }
        Code::OPERATING_SYSTEM => {
            "check the owner and mode of /dev/nvidia*, the container's device nodes, its filter of system calls, and \
             this process's limits (ulimit -a)"
        }
        Code::UNKNOWN => {
            "look for NVRM and Xid in the kernel's log (dmesg), and check that /dev/nvidia-uvm exists here; after a \
             suspend reload the module nvidia_uvm"
        }
        Code::SYSTEM_NOT_READY => "start nvidia-fabricmanager (or nvidia-imex) and try again",
        Code::NOT_PERMITTED => {
            "check the IMEX channel, the container's device nodes and its capabilities"
        }
        Code::INVALID_CONTEXT | Code::CONTEXT_IS_DESTROYED => DESTROYED,
        Code::OUT_OF_MEMORY => "ask for less, or free memory",
        Code::INVALID_VALUE | Code::INVALID_DEVICE | Code::INVALID_HANDLE => {
            "check the arguments of the call: node, GPU, size and handle (`egmem topo` lists nodes and GPUs)"
        }
        _ => RUN_DOCTOR,
    }
}
