//! Memory exchanged by name, within a node and between nodes.
//!
//! # The server
//! One task serves a connection and answers a request in the same turn if it has to wait for nothing. A request that waits
//! (for a name, the driver, an allocator) runs beside it, in a bounded number of tasks; driver calls run off the
//! runtime. The server's state is under one lock, held for moments and never across an await. Its part
//! for leases (`leases.rs`) gets the times of grants and ends as arguments, and tests compare it with a naive model. One fetch
//! shows the way of a request.
//!
//! What peers make the server keep is counted (`quota.rs`), and each item has a largest size: no bytes are added up.
//!
//! **A session outlives its connection** for the time of a lease. A returning client names its session by a secret, which
//! is good for the same peer alone, and lists its leases: a lease whose grant was lost on the way ends then, and one that
//! has ended meanwhile is reported. A session that holds nothing ends with its connection.
//!
//! **An expired lease is an unconfirmed release** (`publish.rs`), not an end. Its holder may be stopped with the memory
//! mapped, and cannot be forced. So it stays on the list of importers, its probe's place is given to others once 1024 others have expired, and
//! `withdraw` answers `StillHeld`, until the same peer says in any session that it let go, or its process on this machine is known to
//! have ended. Nothing is proved about a lost holder on another machine. The server gets the process at the other end of a Unix socket from the kernel (`SO_PEERPIDFD`). When a session's connection ends, it looks five times a second whether the processes of the session's leases still run, and ends each
//! lease with its process. A lease whose session still has a connection stays: another process has the socket then. Over plain
//! TCP on loopback every local process is the same peer, so the release stays unconfirmed.
//!
//! **A name does not exist for a peer that may not have it**: not in lists, not for waiting or fetching. Only a
//! peer that may have it gets `read_only` when it asks for more access than there is, and `configured` when it deletes a
//! name of the configuration. **Numbers that peers see** (`driver::Numbers`: leases, sessions, allocations) are a counter that
//! random keys permute: a plain counter would reveal how many the others got, and a random number could repeat.
//!
//! **A session over TCP moves to the Unix socket** of a server on the same machine, because only that passes fds (`client/connect.rs`,
//! `server/sessions.rs`). Two proofs meet there: the name and the rights are those of the connection over TCP (a certificate), which
//! must be alive at that moment, and the kernel identifies the process and its user, whom the server admits.
//!
//! # The client
//! One task owns a connection and reads, writes and keeps the time side by side, so that a server that does not read cannot
//! stop the client from reading.
//!
//! **One fetch**, in `exchange/client/` and `exchange/server/`, in the order of the calls:
//!
//! ```text
//! client           fetch.rs         go, accept, ask: which handle types this end can import, and the request
//!                  session.rs       request: waits for room, queues it, wakes the task, waits for the reply
//!                  actor.rs         write, next_frame: numbers and encodes it (protocol.rs)
//!                  ../transport/    frame.rs: the length, the bytes, the fds
//! server           ../transport/    frame.rs
//!                  connection.rs    run, request: decodes it and polls it once; one that has to wait becomes a task
//!                  requests.rs      handle, answer: counts it, and calls the function for its kind
//!                  fetch.rs         fetch: rights and terms (state.rs: names, and who sees them), handles
//!                                   (publication.rs exports them off the runtime)
//!                  requests.rs      permit_for: waits for the permit of a large answer
//!                  connection.rs    answer: builds and writes it, as the lease begins; recalls of it follow
//!                  fetch.rs         grant: a lease (leases.rs)
//! client           actor.rs         read, handle_reply: the lease becomes a value (buffer.rs), and the caller wakes
//!                  fetch.rs         checked: the grant is what was asked for
//!                  buffer.rs        import (share/import.rs), prove: a word each way, by a request of its own
//! ```
//!
//! **A granted lease is a value as soon as it is read**, before the requester has seen it: a fetch that is given up, or
//! whose answer comes too late, releases it by being dropped. Releases are kept until the server has noted them, also
//! across broken connections.
//!
//! **The client decides when a lease is lost**: if for a heartbeat nothing listens at the server's address, if another
//! instance answers there, or if nothing was received for the time of a lease. Only time in which this process ran counts:
//! after SIGSTOP it was not the server that was silent. `Lost` is final and takes nothing away: the mapping stays until it
//! is dropped, first it and then the lease.
//!
//! **A follow waits for the end of its lease** (`client/follow.rs`), because a name gets other memory only after the leases on the memory
//! before were withdrawn or lost. Then it fetches, or lets the server wait for the name, while the caller waits; so a slow caller gets the newest state and
//! needs no queue.
//!
//! **fds before fabric** within one boot of a machine, because they need no channel. If one fails, the other is tried,
//! unless one was asked for by name, and the reason is kept. **Probes** are there because each step before them can succeed
//! alone: a handle can be opened while the link behind it is down. A word goes each way, by a GPU, in padding that belongs
//! to no user. An fd names memory of the machine that it is on, and needs none.
//!
//! # Groups, directories, certificates
//! A group has no server. The job's launcher has an all-gather already (MPI, `torch.distributed`), or `group/env.rs` finds the
//! ranks in the environment and `group/rendezvous.rs` connects them: rank 0 listens, and each gather goes through it, because
//! a missing rank must be named to all, and only a process that hears all can do that. `group/gather.rs` gathers what each
//! rank can (`agree` of `gather.rs` chooses, a pure function), whether the ranks of one machine reach each other's sockets, otherwise the
//! fabric handles, and whether each could map. A rank that fails goes on taking part and
//! states its error in place of its value, so no rank waits for one that has returned, and all fail alike. A rank
//! that ends while rank 0 answers a gather is missing in rank 0 alone, and in all at the next gather.
//!
//! The transport is not trusted if the ranks have a secret (`group.rs`). The key is derived from it and from a number that each
//! rank draws; rank and number of the gather are nonce and associated data. So a contribution is good once, in one place. fds
//! never go over the transport: each rank listens at a Unix socket with a random name in a folder of its user's.
//!
//! A directory has addresses to ask, and no handle or secret. A writer there can send a client to the wrong place,
//! where TLS and the instance that it asked for reveal it. Names go with a lease that the exporter keeps alive, and are
//! written anew when etcd has lost that lease. While the directory is away, look-ups fail in time, and nothing else does.
//!
//! A peer's name is the SPIFFE id or the first DNS name of its certificate, of one private authority. `certs` only makes
//! files, by rcgen; certificates from elsewhere do as well. `exchange/tls` checks them, by rustls and webpki, with TLS 1.3
//! alone and no resumption, so that recorded traffic is worthless.
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
    ($($type:ident $(<$lifetime:lifetime>)?)*) => {$(
        impl std::fmt::Debug for $type $(<$lifetime>)? {
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
    Driver, DriverError, Error as MemoryError, Result as MemoryResult, Stream, capability, driver,
    fork, ledger, memory, per_driver, pinned, text,
};
use egmem_share::{self as share, Distrust, Error as ShareError, Unreachable};
