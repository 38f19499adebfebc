//! The message and the remedy of each error, and how people read them.

use std::borrow::Cow;
use std::fmt;
use std::io::ErrorKind;

use super::Error;
use super::heap::asked;
use crate::text::Bytes;
use crate::{Access, Code, DriverError, NodeId};

const CHOOSE: &str = "choose one that `egmem topo` lists";
const LESS: &str = "ask for less, free memory on the node, choose another node, or allow it with \
    `overcommit(true)` or EGMEM_ALLOW_OVERCOMMIT=1";
const GRANT: &str = "grant the access when the memory, its heap or its pool is made or imported, or later with `set_access`";
/// The text says what is wrong, and the valid values where they are short.
const IN_TEXT: &str = "";

// A report of damage is this crate's own text, with several lines.
error_texts! { Error, Self::HeapDamaged { report } => report, {
    Error::NoDriver { detail } => ("no CUDA driver: {detail}"),
        "install the NVIDIA driver (libcuda.so.1), or simulate one (`Driver::simulated`, `--sim`)";
    Error::DriverTooOld { what, have, need } =>
        ("{what} needs a driver for CUDA {need}, this one is for CUDA {have}"),
        "install a newer NVIDIA driver";
    Error::MissingLibrary { library, detail } => ("cannot load {library}: {detail}"),
        "install the library, or add its folder to LD_LIBRARY_PATH";
    Error::MissingSymbol { symbol, library } => ("{library} has no function {symbol}"),
        "the installed library is damaged or a stub: install the driver for the GPU";
    Error::Driver(source) => ("{source}"), of_code(source.code);
    Error::NoImexChannel { path, .. } =>
        ("fabric handles are refused: no IMEX channel at {}", path.display()),
        "ask the administrator for an IMEX channel (nvidia-modprobe or the IMEX service), and in \
         a container for the device node; within one machine use POSIX fds instead";
    Error::PlatformUnsupported { what, .. } => ("this platform does not support {what}"),
        "use another path: `egmem doctor` lists those that work";
    Error::TooManyReferences { .. } =>
        ("the driver refuses the CPU one more mapping of this memory: its exports, imports and CPU \
          mappings in all processes count together, and the tested drivers refuse the CPU more than \
          254 of them"),
        "free imports and CPU mappings of it that are not needed, export an fd once and send duplicates, import it \
         once per process, or grant it only to GPUs";
    Error::TooManyMappings { mappings, limit, .. } =>
        ("the process has {mappings} memory mappings, and the kernel allows it {limit} (vm.max_map_count): there is no room for more"),
        "use larger chunks, free memory that is mapped and not needed, or raise the limit: sysctl -w \
         vm.max_map_count=1048576";
    Error::OutOfMemory { location, requested, .. } =>
        ("out of memory: {} requested at {location}", Bytes(*requested)),
        "ask for less, free memory on the node, or choose another node";
    Error::NodeTooFull { node, requested, free } =>
        ("NUMA node {node} has {} free, {} requested", Bytes(*free), Bytes(*requested)), LESS;
    Error::NodesTooFull { nodes, requested, free } =>
        ("NUMA nodes {} have {} free together, {} requested", list(nodes), Bytes(*free), Bytes(*requested)), LESS;
    Error::NodeUnknown { gpu, choices } =>
        ("the host NUMA node of GPU {gpu} is unknown; nodes of this machine: {}", list(choices)),
        "choose a node by its id";
    Error::NoSuchNode { node, gpu: Some(gpu), choices } =>
        ("NUMA node {node} is GPU {gpu}'s own memory, not a host node; host nodes: {}", list(choices)), CHOOSE;
    Error::NoSuchNode { node, choices, .. } =>
        ("there is no host NUMA node {node}; host nodes: {}", list(choices)), CHOOSE;
    Error::NoSuchGpu { gpu, count: 0 } => ("there is no GPU {gpu}; this machine has none"), CHOOSE;
    Error::NoSuchGpu { gpu, count } =>
        ("there is no GPU {gpu}; this machine has {count}, numbered from 0"), CHOOSE;
    Error::NoPeerAccess { gpu, owner, .. } => ("GPU {gpu} cannot access the memory of GPU {owner}"),
        "put the memory on a host node, which every GPU reaches, or copy it between the GPUs; `egmem topo` shows \
         which GPUs reach each other";
    Error::InvalidArgument { what, why, valid: Some(valid) } => ("invalid {what}: {why}; valid: {valid}"), IN_TEXT;
    Error::InvalidArgument { what, why, valid: None } => ("invalid {what}: {why}"), IN_TEXT;
    Error::OutOfRange { offset, len, size } =>
        ("range of {len} bytes at offset {offset} is outside memory of {size} bytes"),
        "keep offset and length together within the memory's size";
    Error::NotAccessible { who, have, need: Access::Read } =>
        ("{who} has {have}, the operation needs access to read"), GRANT;
    Error::NotAccessible { who, have, need } => ("{who} has {have}, the operation needs {need}"), GRANT;
    Error::ContextLost {
        device,
        source: source @ DriverError { code: Code::INVALID_CONTEXT | Code::CONTEXT_IS_DESTROYED, .. }
    } => ("the CUDA context of GPU {device} was destroyed ({source})"), DESTROYED;
    Error::ContextLost { device, source } =>
        ("GPU {device} is lost to this process after an earlier fault ({source})"),
        "restart the process; compute-sanitizer finds the faulty access";
    Error::WrongBytes { by, offset, expected, found } =>
        ("wrong bytes at offset {offset}: {found:#018x} instead of {expected:#018x} ({by})"),
        "memory was overwritten or is faulty: check other writers, then the machine's logs";
    Error::ProbeDied { what, how } => ("the probe of {what} died: {how}"),
        "if the driver crashed, update it, and use the paths that work";
    Error::System { what, kind: _kind, detail } => ("{what}: {detail}"), of_system(*_kind);
    Error::Topology { detail } => ("topology: {detail}"),
        "check /sys/devices/system/node, or the description that was given instead";
    Error::Cancelled { done, total } =>
        ("the allocation was cancelled after {} of {}", Bytes(*done), Bytes(*total)),
        "allocate again without a break from the progress function: what had been allocated was given back, unless it \
         grew in the background";
    Error::StillHeld { name, holders } => ("{name} is still held by {}", holders.join(", ")),
        "end or ask the holders; memory that a holder has mapped stays pinned until it unmaps it";
    Error::HeapDamaged { report } => ("{report}"),
        "check the code that uses these blocks: kernels' indices and lengths, and GPU work that still runs when its block \
         is freed; compute-sanitizer finds the access";
    Error::HeapFull { requested, align, guards, why, limit, used, free, largest_free } =>
        ("a heap has no room for {}: {why} (limit {}; {} in use, {} free, largest free range {})",
         asked(*requested, *align, *guards), Bytes(*limit), Bytes(*used), Bytes(*free), Bytes(*largest_free)),
        why.remedy();
    Error::CursorDamaged { what, found, least, most } =>
        ("{what} is damaged: it is {found}, valid: {least} to {most}"),
        "check the kernels that have the address: one that writes beyond its memory, a second one on the same side of \
         a ring, or one that still runs when an appender's records are collected. Create a damaged ring anew; an \
         appender goes on after `collect`";
    Error::OutOfAddresses { requested, .. } =>
        ("this process has no {} of contiguous addresses left", Bytes(*requested)),
        "reserve fewer (a heap reserves addresses for its whole limit), or free other memory";
} }

fn of_system(kind: ErrorKind) -> &'static str {
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

const DESTROYED: &str = "restart the process, and let nothing in it reset the GPU: cudaDeviceReset, \
    cuDevicePrimaryCtxReset, and the teardown of a library that calls one of them, destroy the context that all libraries \
    of the process share";

fn of_code(code: Code) -> &'static str {
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

fn list(nodes: &[NodeId]) -> String {
    let nodes: Vec<String> = nodes.iter().map(NodeId::to_string).collect();
    nodes.join(", ")
}

/// An error of any of egmem's crates, which says what to do about it: for [`Explained`].
pub trait Explain: fmt::Display {
    /// Returns what to do about the error, in a sentence; nothing where the error's text says it.
    fn remedy(&self) -> &'static str;

    /// Returns the failed driver call behind the error, unless the error's text has it.
    fn untold_call(&self) -> Option<DriverError>;
}

impl Explain for Error {
    fn remedy(&self) -> &'static str {
        self.remedy()
    }

    fn untold_call(&self) -> Option<DriverError> {
        match self {
            Self::Driver(_) | Self::ContextLost { .. } => None,
            other => other.driver_error(),
        }
    }
}

/// An error with its remedy, for display: `{error}; {remedy}`, or `{error}` without a remedy.
#[derive(Debug)]
pub struct Explained<'a, E: ?Sized = Error>(pub &'a E);

impl<E: Explain + ?Sized> Explained<'_, E> {
    /// Returns the text without the remedy: the error's, and the failed driver call behind it.
    pub fn message(&self) -> String {
        match self.0.untold_call() {
            Some(source) => format!("{} ({source})", self.0),
            None => self.0.to_string(),
        }
    }

    /// Returns the remedy with the names that a language has.
    pub fn remedy_in(&self, language: Language) -> Cow<'static, str> {
        language.adapt(self.0.remedy())
    }

    /// Returns the text with the remedy, for a command line: `{error}; what to do: {remedy}`.
    pub fn advice(&self) -> String {
        self.joined("; what to do: ")
    }

    fn joined(&self, between: &str) -> String {
        let mut text = self.message();
        if !self.0.remedy().is_empty() {
            text = text + between + self.0.remedy();
        }
        text
    }
}

impl<E: Explain + ?Sized> fmt::Display for Explained<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.joined("; "))
    }
}

/// A language besides Rust whose programs read errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Language {
    /// Python.
    Python,
    /// C and C++.
    C,
}

/// What remedies call a thing: in Rust and on the command line, in Python, in C. A text that does as well in all of them needs no
/// row: "a larger limit".
const NAMES: &[[&str; 3]] = &[
    [
        "`Driver::simulated`, `--sim`",
        "`egmem.simulated(\"gh200\")`",
        "`egm_driver_simulated`",
    ],
    [
        "`overcommit(true)`",
        "`overcommit=True`",
        "`EGM_OVERCOMMIT`",
    ],
    [
        ", or later with `set_access`",
        ": `access_by`, or `host` for the CPU",
        ", or later with `egm_buffer_set_access`",
    ],
    [
        "`--server-user` and `share::Peers`",
        "`server_users`",
        "`server_user`",
    ],
    [
        "`--expect-peer`, `Tls::expect_peer`",
        "`expect_peer`",
        "`expect_peer`",
    ],
    // Python connects to other machines with TLS alone.
    [
        ", or allow plain TCP, which anyone on the network path can read: `--plain-anywhere`, `plain_anywhere = true` of \
         `egmem serve`, `Security::PlainAnywhere`",
        ": `ca`, `cert` and `key`",
        ", or allow plain TCP, which anyone on the network path can read: `EGM_PLAIN_ANYWHERE`",
    ],
    ["`--read-only`", "`mode=\"r\"`", "`EGM_READ_ONLY`"],
    ["`CopyMethod::Auto`", "`method=\"auto\"`", "`auto`"],
];

impl Language {
    /// Returns a remedy with the names that this language has.
    pub fn adapt(self, remedy: &str) -> Cow<'_, str> {
        let mut adapted = Cow::Borrowed(remedy);
        for [rust, python, c] in NAMES {
            if adapted.contains(rust) {
                let name = match self {
                    Self::Python => python,
                    Self::C => c,
                };
                adapted = Cow::Owned(adapted.replace(rust, name));
            }
        }
        adapted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_differ_are_replaced() {
        let remedy = "choose another node, or allow it with `overcommit(true)`";
        let python = "choose another node, or allow it with `overcommit=True`";
        assert_eq!(Language::Python.adapt(remedy), python);
        assert!(Language::C.adapt(remedy).ends_with("`EGM_OVERCOMMIT`"));
        assert!(matches!(Language::C.adapt("free blocks"), Cow::Borrowed(_)));
    }
}
