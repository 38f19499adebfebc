//! The errors' texts.

use std::fmt::{self, Write};

use super::Error;
use super::room::asked;
use super::words::list;
use crate::size::Bytes;
use crate::text::Escaping;

/// One line without control characters: fields may contain text of a peer, a file or the system.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // This crate's own text, with several lines.
            Self::HeapDamaged { report } => write!(f, "{report}"),
            other => other.describe(&mut Escaping(f)),
        }
    }
}

impl Error {
    fn describe(&self, f: &mut Escaping<'_, '_>) -> fmt::Result {
        match self {
            Self::NoDriver { detail } => write!(f, "no CUDA driver: {detail}"),
            Self::DriverTooOld { what, have, need } => write!(
                f,
                "{what} needs a driver for CUDA {need}, this one is for CUDA {have}"
            ),
            Self::MissingLibrary { library, detail } => {
                write!(f, "cannot load {library}: {detail}")
            }
            Self::MissingSymbol { symbol, library } => {
                write!(f, "{library} has no function {symbol}")
            }
            Self::Driver(error) => write!(f, "{error}"),
            Self::NoImexChannel { path, .. } => write!(
                f,
                "fabric handles are refused: no IMEX channel at {}",
                path.display()
            ),
            Self::PlatformUnsupported { what, .. } => {
                write!(f, "this platform does not support {what}")
            }
            Self::TooManyReferences { .. } => write!(
                f,
                "the driver refuses the CPU one more mapping of this memory: its exports, imports and CPU \
         mappings in all processes count together, and the tested drivers refuse the CPU more than \
         254 of them"
            ),
            Self::OutOfMemory {
                location,
                requested,
                ..
            } => write!(
                f,
                "out of memory: {} requested at {location}",
                Bytes(*requested)
            ),
            Self::NodeTooFull {
                node,
                requested,
                free,
            } => write!(
                f,
                "NUMA node {node} has {} free, {} requested",
                Bytes(*free),
                Bytes(*requested)
            ),
            Self::NodesTooFull {
                nodes,
                requested,
                free,
            } => write!(
                f,
                "NUMA nodes {} have {} free together, {} requested",
                list(nodes),
                Bytes(*free),
                Bytes(*requested)
            ),
            Self::NodeUnknown { gpu, choices } => write!(
                f,
                "the host NUMA node of GPU {gpu} is unknown; nodes of this machine: {}",
                list(choices)
            ),
            Self::NoSuchNode {
                node,
                gpu: Some(gpu),
                choices,
            } => write!(
                f,
                "NUMA node {node} is GPU {gpu}'s own memory, not a host node; host nodes: {}",
                list(choices)
            ),
            Self::NoSuchNode { node, choices, .. } => write!(
                f,
                "there is no host NUMA node {node}; host nodes: {}",
                list(choices)
            ),
            Self::NoSuchGpu { gpu, count: 0 } => {
                write!(f, "there is no GPU {gpu}; this machine has none")
            }
            Self::NoSuchGpu { gpu, count } => write!(
                f,
                "there is no GPU {gpu}; this machine has {count}, numbered from 0"
            ),
            Self::NoPeerAccess { gpu, owner, .. } => {
                write!(f, "GPU {gpu} cannot access the memory of GPU {owner}")
            }
            Self::InvalidArgument { what, why, valid } => match valid {
                Some(valid) => write!(f, "invalid {what}: {why}; valid: {valid}"),
                None => write!(f, "invalid {what}: {why}"),
            },
            Self::OutOfRange { offset, len, size } => write!(
                f,
                "range of {len} bytes at offset {offset} is outside memory of {size} bytes"
            ),
            Self::NotAccessible { who, have, need } => {
                write!(f, "{who} has {have}, the operation needs {need}")
            }
            Self::ContextLost { device, source } => write!(
                f,
                "GPU {device} is lost to this process after an earlier fault ({source})"
            ),
            Self::WrongBytes {
                by,
                offset,
                expected,
                found,
            } => write!(
                f,
                "wrong bytes at offset {offset}: {found:#018x} instead of {expected:#018x} ({by})"
            ),
            Self::ProbeDied { what, how } => write!(f, "the probe of {what} died: {how}"),
            Self::System { what, detail, .. } => write!(f, "{what}: {detail}"),
            Self::Topology { detail } => write!(f, "topology: {detail}"),
            Self::Cancelled { done, total } => write!(
                f,
                "the allocation was cancelled after {} of {}",
                Bytes(*done),
                Bytes(*total)
            ),
            Self::StillHeld { name, holders } => {
                write!(f, "{name} is still held by {}", holders.join(", "))
            }
            Self::HeapDamaged { report } => write!(f, "{report}"),
            Self::HeapFull {
                requested,
                align,
                guards,
                why,
                limit,
                used,
                free,
                largest_free,
            } => write!(
                f,
                "a heap has no room for {}: {why} (limit {}; {} in use, {} free, largest free range {})",
                asked(*requested, *align, *guards),
                Bytes(*limit),
                Bytes(*used),
                Bytes(*free),
                Bytes(*largest_free)
            ),
            Self::CursorDamaged {
                what,
                found,
                least,
                most,
            } => write!(
                f,
                "{what} is damaged: it is {found}, valid: {least} to {most}"
            ),
            Self::OutOfAddresses { requested, .. } => write!(
                f,
                "this process has no {} of contiguous addresses left",
                Bytes(*requested)
            ),
        }
    }
}
