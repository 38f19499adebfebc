//! Shares memory with other processes of the same machine, as POSIX fds over Unix sockets.
//!
//! ```text
//! one process:   Buffer ─▶ Shared ──────────── Channel::send ─┐
//!                          Description + ShareableHandles     │ Unix socket
//! another:       ImportedBuffer ◀── import ─── Offer ◀── receive
//! ```
//!
//! A process with a handle can map, read and write the memory for as long as it likes, even after the exporter
//! has ended. The description limits none of that. So a channel checks the other end of its socket
//! ([`Peers`]), and handles are closed or wiped when dropped.
//!
//! An importer maps the same memory once, however often it receives it: see [`Origin`]. Pools can be shared
//! too, and their allocations are freed in the right order: see [`LentPoolBuffer`].
//!
//! To share with other nodes, and to find memory by name, see `egmem::exchange`.
#![deny(missing_docs)]

mod cache;
mod channel;
mod description;
mod error;
mod events;
pub mod fd;
mod frame;
mod growing;
mod import;
mod imported;
mod link;
mod parts;
mod peers;
mod pools;
pub mod queue;
mod shared;
pub mod socket;
#[cfg(test)]
mod tests;

pub use channel::{Channel, Closer, DEFAULT_TIMEOUT};
pub use description::{Description, MAX_PARTS, Part};
pub use error::{Distrust, Error, Result, Unreachable};
pub use growing::GrowingImport;
pub use import::{ImportOptions, Offer, Origin};
pub use imported::ImportedBuffer;
pub use link::Link;
pub use parts::ImportedParts;
pub use peers::{Credentials, Peers};
pub use pools::LentPoolBuffer;
pub use queue::PartHandles;
pub use shared::{Exports, Holds, Shared};
pub use socket::Listener;

pub use egmem_core::capability::shareable::{Shareable, best_handle_types};
pub use egmem_core::vmm::identity::{BootId, Identity, InstanceId};

use egmem_core::{
    Buffer, Driver, DriverError, Error as MemoryError, Event, Memory, Pool, PoolBuffer,
    Result as MemoryResult, Stream, accessors, buffer, capability, driver, explain, fork, ledger,
    memory, per_driver, pool, size, text, vmm,
};
#[cfg(test)]
use egmem_core::{Machine, proof, topology};

/// For tests/fuzz only.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing {
    use super::frame;

    /// Decodes a frame, its length first; an accepted one must encode again.
    pub fn frame(bytes: &[u8]) {
        if let Some((prefix, rest)) = bytes.split_first_chunk() {
            let _ = frame::length(*prefix);
            if let Ok(body) = frame::decode(rest) {
                let again = frame::encode(&body).expect("what is taken can be sent");
                let again = frame::decode(&again[4..]).expect("our own");
                assert_eq!(body.fds(), again.fds());
            }
        }
    }
}
