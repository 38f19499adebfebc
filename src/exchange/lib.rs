//! Memory exchanged by name, within a node and between nodes.
#![deny(missing_docs)]

/// Defines methods of options that set the field of the same name: `field: Type;`.
macro_rules! setters {
    ($($(#[$doc:meta])* $field:ident: $type:ty;)*) => {$(
        $(#[$doc])*
        pub fn $field(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        }
    )*};
}

/// Implements `Debug` of types whose contents are secret, or nobody's concern.
macro_rules! opaque {
    ($($type:ident)*) => {$(
        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(concat!(stringify!($type), "(redacted)"))
            }
        }
    )*};
}

mod access;
mod address;
pub mod blocking;
#[cfg(feature = "certs")]
pub mod certs;
mod client;
pub mod directory;
mod error;
pub mod group;
mod limits;
pub mod protocol;
pub mod server;
pub mod tls;
mod transport;

pub use access::{MAX_PATTERNS, Namespaces, Owner, PeerList, PeerName};
pub use address::Address;
pub use client::{
    Absence, Client, ClientOptions, CreateOptions, FetchOptions, Follow, Followed, LeaseState,
    Leased, Proof, Reconnect, RemoteBuffer,
};
pub use error::{End, Error, Mismatch, Refusal, Result};
pub use limits::Limits;
pub use server::Server;
pub use tls::{Tls, TlsFiles, TlsPem};
pub use transport::Security;
pub use transport::bind;

/// For tests/fuzz only.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing {
    /// Returns the frames in the bytes if they arrive in pieces, and the most room allocated for one.
    pub fn frames(bytes: &[u8], piece: usize, limit: u32) -> (Vec<Vec<u8>>, usize) {
        super::transport::assemble(bytes, piece, limit)
    }

    /// Receives the bytes as rank 0's reply, and as a rank's hello.
    pub fn rendezvous(bytes: &[u8]) {
        super::group::receive_all(bytes);
    }
}

#[cfg(test)]
use egmem_core::{Buffer, Machine};
use egmem_core::{
    Driver, DriverError, Error as MemoryError, Result as MemoryResult, Stream, accessors,
    capability, driver, fork, ledger, memory, numbers, per_driver, pinned, text,
};
use egmem_share::{self as share, Distrust, Error as ShareError, Unreachable};
