//! Following a name: its memory, whenever it comes to denote other memory than before.

mod decide;
mod generation;
mod slot;
mod task;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use tokio::task::JoinHandle;

use super::{Client, FetchOptions, LeaseState, RemoteBuffer};
use crate::{Error, Result};
use slot::{Offer, Slot};

/// What a followed name denotes now.
#[derive(Debug)]
#[non_exhaustive]
pub enum Followed {
    /// Memory that was not returned before, fetched: imported, mapped, and with a lease of its own.
    Memory(Box<RemoteBuffer>),
    /// No memory at present. Memory that was returned before is to be dropped.
    Gone(Absence),
}

/// Why a followed name denotes no memory at present.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Absence {
    /// This client may fetch nothing under the name: it was never published, it was withdrawn or deleted,
    /// or this client has no right to it. The server does not tell which.
    NotThere,
    /// The server is gone, or silent for longer than a lease, and how that is known. The client dials on.
    Away(Error),
    /// The lease on the memory that was returned last is being withdrawn, or is lost.
    Lease(LeaseState),
    /// There is memory, and this attempt to fetch it has failed for a reason that may pass. The next
    /// attempt follows after a pause.
    Unavailable(Error),
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotThere => f.write_str("nothing that this client may fetch is under the name"),
            Self::Away(why) => write!(f, "the server is away: {why}"),
            Self::Lease(state) => write!(f, "the lease is {state}"),
            Self::Unavailable(why) => write!(f, "not available: {why}"),
        }
    }
}

/// Follows a name across withdrawals, deletions, broken connections and restarts of its exporter.
///
/// [`next`](Self::next) returns states, not a history: a caller that is slower than the changes gets the
/// newest one. The same memory, by its identity and bounds, is returned once. It is returned again in two
/// cases: after [`Followed::Gone`], and where the lease on it was withdrawn or lost in the meantime, for then
/// the exporter keeps the memory no longer for the caller.
///
/// **Memory that was returned before is the caller's.** Its lease goes on as that of any
/// [`RemoteBuffer`], whatever is returned next: nothing is unmapped or exchanged under the caller, and the
/// exporter sees a holder until the caller drops it. So drop or release it when `next` returns, and before
/// that wait for the GPU work that uses it. [`RemoteBuffer::state`] tells meanwhile whether the exporter
/// still keeps it.
///
/// A task on the client's runtime watches the name and dials on through the client, whose
/// [`reconnect`](super::ClientOptions::reconnect) options give the pauses. It fetches only for a caller that
/// waits, or has waited, in `next`. Memory that was fetched and not yet returned is dropped as soon as the
/// exporter wants it back or the name denotes other memory. Dropping a `Follow` ends the task and releases
/// such memory.
///
/// At the server, a follow watches its name for as long as the connection lasts, also after it was dropped.
/// A server lets a session watch 64 names or prefixes; for further ones the task asks by itself, with the
/// same pauses.
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::exchange::{Address, Client, Followed, Server};
/// use egmem::{Buffer, Driver, Machine};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> egmem::Result<()> {
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let server = Server::options().listen(Address::loopback(0)).start().await?;
/// let client = Client::options(server.addresses().remove(0)).connect(&driver).await?;
///
/// let mut follow = client.follow("weights");
/// assert!(matches!(follow.next().await?, Followed::Gone(_)));
/// let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable().allocate(&driver)?;
/// let published = server.publish("weights", buffer).now()?;
/// let weights = match follow.next().await? {
///     Followed::Memory(weights) => weights,
///     other => panic!("{other:?}"),
/// };
/// assert_eq!(weights.len(), 1 << 20);
/// # drop(published);
/// # Ok(())
/// # }
/// ```
pub struct Follow {
    fetch: FetchOptions,
    slot: Arc<Slot>,
    task: Option<JoinHandle<()>>,
    ended: Option<Error>,
}

impl Follow {
    pub(super) fn new(fetch: FetchOptions) -> Self {
        Self {
            fetch,
            slot: Arc::new(Slot::default()),
            task: None,
            ended: None,
        }
    }

    /// The followed name.
    pub fn name(&self) -> &str {
        self.fetch.name()
    }

    /// Waits until the name denotes something else than this has returned last, and returns that. The first
    /// call returns what the name denotes now.
    ///
    /// # Errors
    /// An error ends it: each later call returns the same one.
    ///
    /// - [`Error::Refused`] with `forbidden` or `not_trusted`, [`Error::NotTrusted`]: this client is not
    ///   admitted any more, or lost its right to memory and kept it until the server ended the lease.
    ///   A client that released the memory in time sees [`Absence::NotThere`] alone, as for a name that does
    ///   not exist.
    /// - [`Error::PeerLost`] once the client is closed, or its connection is broken and it does not
    ///   [dial again](super::Reconnect::never).
    /// - Those of [`FetchOptions::go`] that no later attempt avoids, such as [`Error::Mismatched`],
    ///   [`Error::NoCommonHandle`] and [`Error::Refused`] with `read_only` or `stale`, at once; those of the
    ///   driver and of the memory's path, such as [`Error::Import`] and [`Error::DataPlane`], after three
    ///   attempts.
    ///
    /// # Cancel safety
    /// Nothing is missed when it is dropped. A fetch that has begun goes on, and the next call returns its
    /// memory if it is still what the name denotes.
    pub async fn next(&mut self) -> Result<Followed> {
        if let Some(ended) = &self.ended {
            return Err(ended.clone());
        }
        if self.task.is_none() {
            let (fetch, slot) = (self.fetch.clone(), Arc::clone(&self.slot));
            self.task = Some(tokio::spawn(task::run(fetch, slot)));
        }
        self.slot.want();
        loop {
            match self.slot.take() {
                Some(Offer::Memory(memory, _)) => return Ok(Followed::Memory(memory)),
                Some(Offer::Gone(absence)) => return Ok(Followed::Gone(absence)),
                Some(Offer::End(error)) => {
                    self.ended = Some(error.clone());
                    return Err(error);
                }
                None => self.slot.offered().await,
            }
        }
    }
}

impl Drop for Follow {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

impl fmt::Debug for Follow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Follow")
            .field("name", &self.name())
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Follows a name: [`Follow::next`] returns its memory, and again whenever the name comes to denote other
    /// memory. With options, by [`FetchOptions::follow`].
    pub fn follow(&self, name: impl Into<String>) -> Follow {
        self.fetch(name).follow()
    }
}

impl FetchOptions {
    /// Follows the name, and fetches its memory with these options each time. See [`Follow`].
    ///
    /// With [`instance`](Self::instance) it ends with the server's restart.
    pub fn follow(self) -> Follow {
        Follow::new(self)
    }
}
