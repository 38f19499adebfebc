//! The message and the remedy of each error.

use std::fmt;

use super::remedy::{DESTROYED, of_code, of_system};
use super::room::asked;
use super::words::list;
use super::{DriverError, Error};
use crate::size::Bytes;
use crate::text::Escaping;
use crate::{Access, Code};

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // This crate's own text, with several lines.
            Self::HeapDamaged { report } => write!(f, "{report}"),
            other => other.describe(&mut Escaping(f)),
        }
    }
}

const CHOOSE: &str = "choose one that `egmem topo` lists";
const LESS: &str = "ask for less, free memory on the node, choose another node, or allow it with \
    `overcommit(true)` or EGMEM_ALLOW_OVERCOMMIT=1";
const GRANT: &str = "grant the access when the memory, its heap or its pool is made or imported, or later with `set_access`";
/// The text says what is wrong, and the valid values where they are short.
const IN_TEXT: &str = "";

error_texts! { Error {
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
