//! The one error type: what failed, why, and what to do.

#[cfg(test)]
mod catalogue;
mod damage;
mod display;
mod distrust;
mod driver;
mod end;
mod mismatch;
mod refusal;
mod remedy;
mod room;
mod unreachable;
mod words;

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

pub use damage::{BlockInfo, Damage, DamageKind, DamageReport, Seen, Site, WrongBytes};
pub(crate) use damage::{blocks, bytes};
pub use distrust::Distrust;
pub use driver::DriverError;
pub use end::End;
pub use mismatch::Mismatch;
pub use refusal::Refusal;
pub use room::NoRoom;
pub use unreachable::Unreachable;
pub use words::Explained;

use crate::driver::{Access, CudaVersion, Location, NodeId};

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What failed and why; [`Error::remedy`] says what to do.
///
/// Its text has no control character, whatever a peer, a file or the system said: see [`crate::text`].
// The variants' texts are in display.rs, where all of them are escaped.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no usable CUDA driver library.
    NoDriver {
        /// What was tried and what came of it.
        detail: String,
    },
    /// The driver is older than what was asked for needs.
    DriverTooOld {
        /// What needs the newer driver.
        what: &'static str,
        /// The driver's version.
        have: CudaVersion,
        /// The version needed.
        need: CudaVersion,
    },
    /// A library that is loaded at run time is not there.
    MissingLibrary {
        /// The library.
        library: &'static str,
        /// The loader's words.
        detail: String,
    },
    /// A library lacks a function, although its version should have it.
    MissingSymbol {
        /// The function.
        symbol: &'static str,
        /// The library.
        library: &'static str,
    },
    /// A driver call failed with a code that has no better explanation here.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Fabric handles were refused for want of an IMEX channel.
    NoImexChannel {
        /// Where a channel would be.
        path: PathBuf,
        /// The refused call.
        source: DriverError,
    },
    /// The machine, its GPU or its driver cannot do it.
    PlatformUnsupported {
        /// What it cannot do.
        what: &'static str,
        /// The refused call, where there was one.
        source: Option<DriverError>,
    },
    /// The CPU cannot be granted a memory once more: its exports, imports and CPU mappings, in all
    /// processes together, are too many. The driver grants it to GPUs still.
    TooManyReferences {
        /// The refused call.
        source: DriverError,
    },
    /// The driver had no memory left.
    OutOfMemory {
        /// Where.
        location: Location,
        /// Bytes asked for.
        requested: u64,
        /// The refused call.
        source: DriverError,
    },
    /// The request is bigger than the node's free memory and was not put to the driver.
    NodeTooFull {
        /// The node.
        node: NodeId,
        /// Bytes asked for.
        requested: u64,
        /// Bytes free.
        free: u64,
    },
    /// The request is bigger than the free memory of the nodes it should be spread over.
    NodesTooFull {
        /// The nodes.
        nodes: Vec<NodeId>,
        /// Bytes asked for.
        requested: u64,
        /// Bytes free, in whole units of the granularity.
        free: u64,
    },
    /// The driver does not say which host NUMA node is a GPU's.
    NodeUnknown {
        /// The GPU's ordinal.
        gpu: i32,
        /// The nodes there are.
        choices: Vec<NodeId>,
    },
    /// There is no such NUMA node.
    NoSuchNode {
        /// The node asked for.
        node: NodeId,
        /// The GPU whose own memory has this id, where one has.
        gpu: Option<i32>,
        /// The host nodes there are.
        choices: Vec<NodeId>,
    },
    /// There is no such GPU.
    NoSuchGpu {
        /// The ordinal asked for.
        gpu: i32,
        /// How many there are.
        count: usize,
    },
    /// An argument cannot be right.
    InvalidArgument {
        /// Which argument.
        what: &'static str,
        /// What is wrong with it.
        why: String,
        /// The valid range or the valid values, where they can be said in short.
        valid: Option<String>,
    },
    /// A range reaches beyond the memory it is in.
    OutOfRange {
        /// Where the range starts, in bytes.
        offset: u64,
        /// Its length in bytes.
        len: u64,
        /// The memory's size in bytes.
        size: u64,
    },
    /// Someone lacks the access that the operation needs.
    NotAccessible {
        /// Who.
        who: Location,
        /// What it has.
        have: Access,
        /// What it would need.
        need: Access,
    },
    /// A GPU's context is lost to an earlier fault; only a new process gets a new one.
    ContextLost {
        /// The GPU's ordinal.
        device: i32,
        /// The call that found out.
        source: DriverError,
    },
    /// Bytes read back are not the bytes written.
    WrongBytes {
        /// Who read them.
        by: Location,
        /// Where, in bytes from the start.
        offset: u64,
        /// The 64-bit word that should be there.
        expected: u64,
        /// The one that is.
        found: u64,
    },
    /// A probe in a child process died.
    ProbeDied {
        /// What was probed.
        what: String,
        /// Its signal, exit status, or why it could not be started.
        how: String,
    },
    /// The operating system refused something.
    System {
        /// What was tried.
        what: String,
        /// What kind of error it is; [`ErrorKind::Other`] where the system gave none.
        kind: ErrorKind,
        /// The system's words.
        detail: String,
    },
    /// The machine's topology cannot be read.
    Topology {
        /// What is wrong.
        detail: String,
    },
    /// A peer is not who it should be, or this process is not to it.
    NotTrusted {
        /// The peer: an address, a process, a certificate's name.
        peer: String,
        /// What is wrong with it, for programs.
        cause: Distrust,
        /// What is wrong with it.
        why: String,
    },
    /// Handles would travel unprotected over a network.
    Insecure {
        /// The address.
        address: String,
    },
    /// Certificates, keys or their files cannot be used.
    Tls {
        /// What cannot be used: a file, a certificate.
        what: String,
        /// What is wrong with it.
        detail: String,
    },
    /// A peer understood a request and refused it.
    Refused {
        /// Who refuses.
        peer: String,
        /// What was asked for.
        what: String,
        /// Why, for programs.
        reason: Refusal,
        /// Why, for people.
        detail: String,
    },
    /// Memory under a name is not what the caller asked for: nothing of it is mapped.
    Mismatched {
        /// The name.
        name: String,
        /// The server.
        peer: String,
        /// In what it differs.
        what: Box<Mismatch>,
    },
    /// No connection to a peer was established.
    Unreachable {
        /// The peer's address.
        peer: String,
        /// Why not, for programs.
        cause: Unreachable,
        /// What happened.
        why: String,
    },
    /// A peer that was connected is gone, silent, or cannot be reached any more.
    PeerLost {
        /// The peer.
        peer: String,
        /// What happened.
        why: String,
    },
    /// A peer sent what the protocol does not allow; the connection is closed.
    Protocol {
        /// The peer.
        peer: String,
        /// What it sent.
        detail: String,
    },
    /// Something did not happen in time.
    TimedOut {
        /// What was waited for.
        what: String,
        /// How long.
        after: Duration,
    },
    /// A name is withdrawn, memory is to be reused or access to it is to be taken away, and somebody still
    /// holds it.
    StillHeld {
        /// The name, or what is held.
        name: String,
        /// Who holds it.
        holders: Vec<String>,
    },
    /// Handles or leases are of an earlier life of their exporter.
    Stale {
        /// What.
        what: String,
        /// What has changed since.
        why: String,
    },
    /// Memory that a peer shares cannot be imported into this process.
    Import {
        /// The memory's name.
        what: String,
        /// Whose it is.
        peer: String,
        /// Where to look.
        end: End,
        /// What failed.
        source: Box<Error>,
    },
    /// Memory is imported, and yet the two ends do not see the same bytes.
    DataPlane {
        /// The memory's name.
        what: String,
        /// The other end.
        peer: String,
        /// Which way bytes do not go.
        detail: String,
    },
    /// There is no handle type that all who should share can use.
    NoCommonHandle {
        /// Who cannot do what, and why.
        reasons: Vec<String>,
    },
    /// Ranks of a group did not come in time.
    RanksMissing {
        /// The group.
        group: String,
        /// The missing ranks.
        missing: Vec<u32>,
        /// How many ranks there should be.
        size: u32,
    },
    /// A heap in debug mode has found damage.
    HeapDamaged {
        /// What was found.
        report: Box<DamageReport>,
    },
    /// A heap has no room for a block or a reservation, and may not have more memory. Its numbers are of the
    /// moment in which it gave up: then it had taken back all that threads keep, but for a block above the
    /// limit, which is refused at once.
    HeapFull {
        /// Bytes asked for.
        requested: u64,
        /// The alignment asked for, in bytes.
        align: u64,
        /// Bytes that the [debug mode](crate::heap::debug) would have needed around them; 0 without it.
        guards: u64,
        /// Why there is no room.
        why: NoRoom,
        /// The most bytes of memory that the heap may have.
        limit: u64,
        /// Bytes of its memory that are in use: blocks, those that wait for GPU work, slabs of small
        /// blocks.
        used: u64,
        /// Bytes of its memory that are free. What limit, `used` and this leave has no memory yet.
        free: u64,
        /// Bytes of the largest free piece, or nearly: not all are looked at.
        largest_free: u64,
    },
    /// The address space has no hole for what was to be reserved. No memory is needed for that.
    OutOfAddresses {
        /// Bytes of addresses asked for.
        requested: u64,
        /// The refused call.
        source: DriverError,
    },
    /// A limit of this process, set by its options, is reached.
    LimitReached {
        /// What is limited.
        what: &'static str,
        /// How many there may be.
        limit: u64,
    },
    /// The directory cannot tell who holds a name.
    Directory {
        /// The directory's address.
        directory: String,
        /// What is wrong.
        detail: String,
    },
}

impl Error {
    /// An argument that cannot be right.
    pub fn invalid(what: &'static str, why: impl Into<String>) -> Self {
        Self::InvalidArgument {
            what,
            why: why.into(),
            valid: None,
        }
    }

    /// An argument that cannot be right, with the valid range or the valid values.
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

    /// A refusal by the operating system.
    pub fn system(what: impl Into<String>, error: &std::io::Error) -> Self {
        Self::System {
            what: what.into(),
            kind: error.kind(),
            detail: error.to_string(),
        }
    }

    /// A failure beside the operating system, such as of a thread.
    pub(crate) fn failed(what: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::System {
            what: what.into(),
            kind: ErrorKind::Other,
            detail: detail.into(),
        }
    }

    /// An error of a connection that was there before, after an attempt to connect anew.
    #[cfg_attr(
        not(feature = "exchange"),
        allow(dead_code, reason = "the exchange connects anew")
    )]
    pub(crate) fn of_reconnecting(self) -> Self {
        match self {
            Self::Unreachable { peer, why, .. } => Self::PeerLost { peer, why },
            other => other,
        }
    }
}
