//! The crate's error type: what failed, why, and what to do.

mod heap;
mod texts;

use std::io::ErrorKind;
use std::path::PathBuf;

pub use heap::{
    BlockInfo, Damage, DamageKind, DamageReport, NoRoom, Seen, Site, WrongBytes, blocks, bytes,
};
#[doc(hidden)]
pub use texts::RUN_DOCTOR;
pub use texts::{Explain, Explained, Language};

pub use crate::DriverError;
use crate::{Access, Call, Code, CudaVersion, Location, NodeId};

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The failures of memory, each with its cause; [`Error::remedy`] says what to do.
///
/// Its text has no control characters, even if a peer, a file or the system sent some: see [`crate::text`].
// The texts of the variants are in texts.rs, which escapes all of them.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// There is no usable CUDA driver library.
    NoDriver {
        /// The libraries tried and the loader's messages.
        detail: String,
    },
    /// The driver is too old for the request.
    DriverTooOld {
        /// The feature that needs the newer driver.
        what: &'static str,
        /// The driver's version.
        have: CudaVersion,
        /// The version needed.
        need: CudaVersion,
    },
    /// A library that is loaded at run time was not found.
    MissingLibrary {
        /// The library.
        library: &'static str,
        /// The loader's message.
        detail: String,
    },
    /// A library lacks a function, although its version should have it.
    MissingSymbol {
        /// The function.
        symbol: &'static str,
        /// The library.
        library: &'static str,
    },
    /// A driver call failed with a code that this crate has no better explanation for.
    Driver(DriverError),
    /// The driver refused fabric handles because there is no IMEX channel.
    NoImexChannel {
        /// Where a channel would be.
        path: PathBuf,
        /// The refused call.
        source: DriverError,
    },
    /// The machine, its GPU or its driver does not support the request.
    PlatformUnsupported {
        /// The feature that it does not support.
        what: &'static str,
        /// The refused call, if there was one.
        source: Option<DriverError>,
    },
    /// The CPU cannot get another mapping of a memory: its exports, imports and CPU mappings, in all
    /// processes together, are too many. The driver still grants it to GPUs.
    TooManyReferences {
        /// The refused call.
        source: DriverError,
    },
    /// The process has as many memory mappings as the kernel allows it. The driver reports that as a lack of memory.
    TooManyMappings {
        /// The process's mappings.
        mappings: u64,
        /// The kernel's limit: `vm.max_map_count`.
        limit: u64,
        /// The refused call.
        source: DriverError,
    },
    /// The driver had no memory left.
    OutOfMemory {
        /// The location.
        location: Location,
        /// Bytes requested.
        requested: u64,
        /// The refused call.
        source: DriverError,
    },
    /// The request exceeds the node's free memory and was not passed to the driver.
    NodeTooFull {
        /// The node.
        node: NodeId,
        /// Bytes requested.
        requested: u64,
        /// Bytes free.
        free: u64,
    },
    /// The request exceeds the free memory of the nodes that it was to be spread over, or of all nodes if it names none.
    NodesTooFull {
        /// The nodes.
        nodes: Vec<NodeId>,
        /// Bytes requested.
        requested: u64,
        /// Bytes free, in whole units of the granularity, and within the limit of the control groups.
        free: u64,
    },
    /// The driver does not report a GPU's host NUMA node.
    NodeUnknown {
        /// The GPU's ordinal.
        gpu: i32,
        /// The existing nodes.
        choices: Vec<NodeId>,
    },
    /// There is no such NUMA node.
    NoSuchNode {
        /// The node requested.
        node: NodeId,
        /// The GPU whose own memory has this id, if any.
        gpu: Option<i32>,
        /// The existing host nodes.
        choices: Vec<NodeId>,
    },
    /// There is no such GPU.
    NoSuchGpu {
        /// The ordinal requested.
        gpu: i32,
        /// The number of GPUs.
        count: usize,
    },
    /// A GPU cannot access the memory of another one.
    NoPeerAccess {
        /// The GPU that was to be granted the memory.
        gpu: i32,
        /// The GPU whose memory it is.
        owner: i32,
        /// The refused call.
        source: DriverError,
    },
    /// An argument is invalid.
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// The fault.
        why: String,
        /// The valid range or values, if they are short.
        valid: Option<String>,
    },
    /// A range extends beyond its memory.
    OutOfRange {
        /// Where the range starts, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The memory's size in bytes.
        size: u64,
    },
    /// A location lacks the access that the operation needs.
    NotAccessible {
        /// The location.
        who: Location,
        /// The access that it has.
        have: Access,
        /// The access that it needs.
        need: Access,
    },
    /// A GPU's context is lost to an earlier fault, or was destroyed; only a new process gets a new one.
    ContextLost {
        /// The GPU's ordinal.
        device: i32,
        /// The call that reported it.
        source: DriverError,
    },
    /// Bytes read back differ from the bytes written.
    WrongBytes {
        /// The location that read them.
        by: Location,
        /// The offset in bytes from the start.
        offset: u64,
        /// The expected 64-bit word.
        expected: u64,
        /// The word read.
        found: u64,
    },
    /// A probe in a child process died.
    ProbeDied {
        /// The capability or the driver that was probed.
        what: String,
        /// Its signal or exit status, or why it could not be started.
        how: String,
    },
    /// The operating system refused an operation.
    System {
        /// The operation.
        what: String,
        /// The kind of error; [`ErrorKind::Other`] if the system gave none.
        kind: ErrorKind,
        /// The system's message.
        detail: String,
    },
    /// The machine's topology cannot be read.
    Topology {
        /// The fault.
        detail: String,
    },
    /// The caller stopped an allocation, by its progress function for instance.
    Cancelled {
        /// Bytes that had been allocated by then.
        done: u64,
        /// Bytes requested, in whole granules.
        total: u64,
    },
    /// Memory is to be given back or reused, or access to it to be revoked, but it is still held.
    StillHeld {
        /// The name, or a description of the memory.
        name: String,
        /// The holders.
        holders: Vec<String>,
    },
    /// A heap in debug mode has found damage.
    HeapDamaged {
        /// The findings.
        report: Box<DamageReport>,
    },
    /// A heap has no room for a block or a reservation, and may not have more memory. Its numbers are those
    /// of the moment of failure, after it had emptied all threads' caches; a block above the limit is refused
    /// at once, without that.
    HeapFull {
        /// Bytes requested.
        requested: u64,
        /// The alignment requested, in bytes.
        align: u64,
        /// Bytes that the debug mode would have needed for guards; 0 without it.
        guards: u64,
        /// Why there is no room.
        why: NoRoom,
        /// The most bytes of memory that the heap may have.
        limit: u64,
        /// Bytes of its memory in use: blocks, blocks that wait for GPU work, slabs of small blocks.
        used: u64,
        /// Free bytes of its memory. The rest of the limit has no memory yet.
        free: u64,
        /// Bytes of the largest free range, or slightly less: not all are examined.
        largest_free: u64,
    },
    /// A counter in memory that a GPU writes, of a ring or of an appender, has a value that it cannot have. No record was
    /// read or written for it.
    CursorDamaged {
        /// The counter.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The least valid value.
        least: u64,
        /// The greatest valid value; less than `least` where the count has passed 2^64.
        most: u64,
    },
    /// The address space has no hole for a reservation. A reservation needs no memory.
    OutOfAddresses {
        /// Bytes of addresses requested.
        requested: u64,
        /// The refused call.
        source: DriverError,
    },
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its text is the call's.
            Self::Driver(_) => None,
            other => other.failed_call().map(|call| call as _),
        }
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

impl Error {
    /// Creates the error of a failed driver call.
    pub const fn driver(call: Call, code: Code) -> Self {
        Self::Driver(DriverError { call, code })
    }

    /// Returns the failed driver call behind the error, if any.
    pub const fn driver_error(&self) -> Option<DriverError> {
        self.failed_call().copied()
    }

    const fn failed_call(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(source)
            | Self::NoImexChannel { source, .. }
            | Self::OutOfMemory { source, .. }
            | Self::OutOfAddresses { source, .. }
            | Self::TooManyReferences { source }
            | Self::TooManyMappings { source, .. }
            | Self::NoPeerAccess { source, .. }
            | Self::ContextLost { source, .. } => Some(source),
            Self::PlatformUnsupported { source, .. } => source.as_ref(),
            _ => None,
        }
    }

    /// Returns the result code behind the error, if a driver call failed.
    pub const fn code(&self) -> Option<Code> {
        match self.driver_error() {
            Some(source) => Some(source.code),
            None => None,
        }
    }

    /// Creates an error about an invalid argument.
    pub fn invalid(what: &'static str, why: impl Into<String>) -> Self {
        Self::InvalidArgument {
            what,
            why: why.into(),
            valid: None,
        }
    }

    /// Creates an error about an invalid argument, with the valid range or values.
    pub fn invalid_of(
        what: &'static str,
        why: impl Into<String>,
        valid: impl Into<String>,
    ) -> Self {
        Self::InvalidArgument {
            what,
            why: why.into(),
            valid: Some(valid.into()),
        }
    }

    /// Creates an error about an index of one of `count` things, which are numbered from 0.
    pub fn invalid_index(what: &'static str, index: u64, count: u64) -> Self {
        let valid = match count {
            0 => None,
            1 => Some("0".into()),
            more => Some(format!("0 to {}", more - 1)),
        };
        let why = match valid {
            Some(_) => format!("there is no {what} {index}"),
            None => format!("there is no {what}"),
        };
        Self::InvalidArgument { what, why, valid }
    }

    /// Creates an error about memory to which the location `who` has less access than an operation needs.
    pub const fn not_accessible(who: Location, have: Access, need: Access) -> Self {
        Self::NotAccessible { who, have, need }
    }

    /// Checks that GPU `gpu` is one of `count`.
    ///
    /// # Errors
    /// [`Error::NoSuchGpu`].
    pub fn expect_gpu(gpu: i32, count: i32) -> Result<()> {
        if (0..count).contains(&gpu) {
            return Ok(());
        }
        let count = count.max(0) as usize;
        Err(Self::NoSuchGpu { gpu, count })
    }

    /// Creates an error about something that the platform lacks, with the driver's answer if it was asked.
    pub const fn unsupported(what: &'static str, source: Option<DriverError>) -> Self {
        Self::PlatformUnsupported { what, source }
    }

    /// Creates an error from an operating system error.
    pub fn system(what: impl Into<String>, error: &std::io::Error) -> Self {
        Self::System {
            what: what.into(),
            kind: error.kind(),
            detail: error.to_string(),
        }
    }

    /// Creates an error of a system facility that has no system error, such as a thread.
    pub fn failed(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::System {
            what: what.into(),
            kind: ErrorKind::Other,
            detail: detail.into(),
        }
    }
}
