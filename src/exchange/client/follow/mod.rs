//! Following a name: returns its memory, and again each time the name gets other memory.

mod decide;
mod followed;
mod generation;
mod slot;
mod task;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use tokio::task::{JoinError, JoinHandle};

pub use followed::{Absence, Followed};

use super::session::ClientSession;
use super::{Client, FetchOptions};
use crate::{Error, Result};
use slot::{Offer, Slot};

/// Follows a name across withdrawals, deletions, broken connections and exporter restarts.
///
/// [`next`](Self::next) returns states, not a history: a caller that is slower than the changes gets the
/// newest one. The same memory (same identity and bounds) is returned only once, with two exceptions: after
/// [`Followed::Gone`], and after the lease on it was withdrawn or lost, because then the exporter no longer
/// keeps the memory for the caller.
///
/// **Memory that was returned before belongs to the caller.** Its lease continues like that of any
/// [`RemoteBuffer`], also when other memory is returned next: nothing is unmapped or replaced under the caller, and
/// the exporter counts a holder until the caller drops it. So when `next` returns, wait for the GPU work that
/// uses the old memory, then drop or release it. Until then [`RemoteBuffer::state`] tells whether the
/// exporter still keeps it.
///
/// A task on the client's runtime watches the name. The client reconnects with the pauses of its
/// [`reconnect`](super::ClientOptions::reconnect) options. The task fetches only once a caller waits, or has
/// waited, in `next`. Fetched memory that was not returned yet is dropped as soon as the exporter wants it
/// back or the name gets other memory. Dropping a `Follow` ends the task and releases such memory, which is
/// unmapped on a blocking thread.
///
/// The server keeps the watch for as long as the connection lasts, even after the follow was dropped. A
/// session can watch 64 names or prefixes; for further names the task polls, with the same pauses. The
/// protocol watches prefixes: the server also sends the events of longer names that begin with the followed
/// name, and the client drops them.
///
/// A `Follow` keeps the client's connection open, as a clone of the [`Client`] does.
///
/// [`RemoteBuffer`]: super::RemoteBuffer
/// [`RemoteBuffer::state`]: super::RemoteBuffer::state
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::exchange::{Address, Client, Followed, Server};
/// use egmem::{Buffer, Driver, Machine};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> egmem::exchange::Result<()> {
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
    /// Returns why the follow ends.
    task: Option<JoinHandle<Error>>,
    ended: Option<Error>,
}

impl Follow {
    pub(super) fn new(fetch: FetchOptions) -> Self {
        let slot = Slot::new(&fetch.client.session().runtime);
        Self {
            fetch,
            slot: Arc::new(slot),
            task: None,
            ended: None,
        }
    }

    /// Returns the followed name.
    pub fn name(&self) -> &str {
        &self.fetch.name
    }

    /// Waits until the state of the name differs from the state returned last, and returns the new one. The
    /// first call returns the current state.
    ///
    /// # Errors
    /// An error ends the follow: each later call returns the same error.
    ///
    /// - [`Error::Refused`] with `forbidden` or `not_trusted`, [`NotTrusted`](crate::ShareError::NotTrusted):
    ///   this client is no longer admitted, or it lost its right to the memory and kept it until the server ended
    ///   the lease. A client that released the memory in time sees only [`Absence::NotThere`], as for a name that
    ///   does not exist.
    /// - [`PeerLost`](crate::ShareError::PeerLost) once the client is closed, or its connection is broken and it does
    ///   not [dial again](super::Reconnect::never).
    /// - Those of [`FetchOptions::go`] that a later attempt cannot avoid, such as
    ///   [`InvalidArgument`](crate::MemoryError::InvalidArgument), [`Protocol`](crate::ShareError::Protocol) and
    ///   [`Error::Refused`] with `stale`, at once. Those of the driver and of the memory's path, such as
    ///   [`Error::Import`] and [`Error::DataPlane`], after three attempts for the same memory. Refusals with
    ///   `internal` of requests that look the name up, after three in a row.
    ///
    /// # Runtime
    /// The task runs on the client's runtime. This may be called from another runtime, or from none.
    ///
    /// # Cancel safety
    /// Dropping the future loses no state. A fetch that has begun continues, and the next call returns its
    /// memory if the name still has that memory.
    pub async fn next(&mut self) -> Result<Followed> {
        if let Some(ended) = &self.ended {
            return Err(ended.clone());
        }
        let session = self.fetch.client.session();
        let task = self.task.get_or_insert_with(|| {
            let work = task::run(self.fetch.clone(), Arc::clone(&self.slot));
            // Not on the caller's runtime, which may end before the follow does.
            session.runtime.spawn(work)
        });
        self.slot.want();
        loop {
            // The end takes the place of an offer.
            let offer = match task.is_finished() {
                true => None,
                false => self.slot.take(),
            };
            match offer {
                Some(Offer::Memory(memory, _)) => return Ok(Followed::Memory(memory)),
                Some(Offer::Gone(absence)) => return Ok(Followed::Gone(absence)),
                None => {}
            }
            let ended = tokio::select! {
                biased;
                ended = &mut *task => ended,
                () = self.slot.filled.notified() => continue,
            };
            let error = ended.unwrap_or_else(|cut_off| why(session, &cut_off));
            self.ended = Some(error.clone());
            return Err(error);
        }
    }
}

/// Returns why a task ended that has not returned a reason.
fn why(session: &ClientSession, cut_off: &JoinError) -> Error {
    if !session.is_open() {
        return session.down();
    }
    let why = match cut_off.is_panic() {
        true => "the task that follows the name has panicked",
        false => "the client's runtime has ended",
    };
    Error::peer_lost(session.peer(), why)
}

impl Drop for Follow {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
        self.slot.clear();
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
    /// Follows a name: [`Follow::next`] returns its memory, and again each time the name gets other memory.
    /// To set options, use [`FetchOptions::follow`].
    #[track_caller]
    pub fn follow(&self, name: impl Into<String>) -> Follow {
        self.fetch(name).follow()
    }
}

impl FetchOptions {
    /// Follows the name, and fetches its memory with these options each time. See [`Follow`].
    ///
    /// With [`instance`](Self::instance) the follow ends when the server restarts.
    pub fn follow(self) -> Follow {
        Follow::new(self)
    }
}
