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
//!
//! # Design
//! `Shared` is memory to export, a `Description` tells importers about it, and a `ShareableHandle` opens it.
//! `ImportOptions::import` takes the latter two from any source; `Channel` carries them over a Unix socket, and `exchange`
//! by name and between nodes.
//!
//! **Imports are counted.** A process imports the same memory once. It recognises it by its identity, {boot, instance,
//! allocation, generation}, never by an address, a process id or an fd, all of which are reused. The mapping is shared too
//! if the same locations get the same access.
//!
//! An identity is a claim. If any claim counted, a peer could send its own memory under another peer's identity, and read
//! the bytes that the importer writes for the other. A handle proves nothing about its memory before the import, and a
//! driver does not report whether two imports are the same. So claims count only within one *origin*: the sender, as the
//! kernel (a user) or a certificate (a name) has proved it. Peers of one origin can fool each other, which they can do
//! anyway. Without an origin an import is shared with none. The size is part of the cache's key, so a wrong one does not
//! block the right one.
//!
//! **Access** in a description is a request to the importer. The handle itself allows everything, and CUDA
//! exports no weaker one: a peer that must not write must not get the handle.
//!
//! **Pools.** The importer must have freed an allocation before its exporter does, so the exporter lends it
//! (`LentPoolBuffer`). One end of a pipe travels with it. The importer's value closes that end after its free, and the
//! kernel closes it for a process that dies: an acknowledgement that cannot be forgotten, lost, or forged early by a
//! process other than the holder. A free that fails leaves the pipe open. A lent allocation that is dropped is freed later,
//! never too early. A pool's handle reaches all of the pool: share a pool only with peers that may see all of it.
//!
//! **Events** are lent in the same way (`Event::lend`): CUDA leaves undefined what an importer's calls do after the exporter has destroyed the event, so it
//! is destroyed after all pipes are closed. The importer polls its end of the pipe to learn that the exporter has ended; no thread watches.
//!
//! **A channel** has no state but the socket: if an error leaves the next byte's meaning unknown, the channel is closed for
//! good. Each operation has one deadline for all its waiting, but for the fds of memory with more than 32 parts, which have a
//! time limit for each 16 of them. A socket listens and has its permissions
//! before its file appears: it is bound to a name beside the path, then renamed. A dead file is exchanged with the new one
//! (`RENAME_EXCHANGE`), not removed, so that two starting servers do not remove each other's.
#![deny(missing_docs)]

mod cache;
mod channel;
mod description;
mod error;
pub mod fd;
#[cfg(all(test, not(miri)))]
#[path = "../../tests/support/fork.rs"]
mod fork_check;
mod frame;
mod growing;
mod import;
mod imported;
mod lent;
mod peers;
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
pub use imported::{ImportedBuffer, ImportedParts};
pub use lent::LentPoolBuffer;
pub use peers::{Credentials, Link, Peers};
pub use queue::PartHandles;
pub use shared::{Exports, Holds, Shared};
pub use socket::Listener;

pub use egmem_core::capability::shareable::{Shareable, best_handle_types};
pub use egmem_core::vmm::identity::{BootId, Identity, InstanceId};

use egmem_core::{
    Buffer, Driver, DriverError, Error as MemoryError, Event, Memory, Pool, PoolBuffer,
    Result as MemoryResult, Stream, buffer, capability, driver, fork, guard, ledger, memory,
    per_driver, pool, size, vmm,
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
