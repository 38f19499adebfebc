//! Memory on request, and refusals of requests.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::protocol::Create;
use crate::{Error, Namespaces, PeerName, Refusal};

/// A refusal: the reason for programs, and for people.
pub(super) type Refused = (Refusal, String);

/// Refuses a malformed request.
pub(super) fn invalid(error: Error) -> Refused {
    (Refusal::Invalid, error.to_string())
}

/// Refuses a name that does not exist or that the peer has no right to: the peer does not learn which.
pub(super) fn not_found() -> Refused {
    (Refusal::NotFound, String::new())
}

/// The answer of an [`Allocate`]: a refusal has a reason for programs and one for people.
pub type Allocation<'a> = Pin<Box<dyn Future<Output = Result<(), (Refusal, String)>> + Send + 'a>>;

/// Creates memory for clients on request, and publishes it on the server.
///
/// # Cancel safety
/// A future is dropped before completion when its client disconnects or the server ends. It must then undo
/// its work so far.
pub trait Allocate: Send + Sync {
    /// Returns whether `peer` may create this name, whether it exists or not; called before
    /// [`create`](Self::create). By default a peer creates names only under its own name:
    /// [`Namespaces::own`].
    ///
    /// # Errors
    /// The refusal for the peer.
    fn may_create(&self, peer: &PeerName, name: &str) -> Result<(), (Refusal, String)> {
        Namespaces::own().check(peer, name)
    }

    /// Returns whether `peer` may fetch memory that another peer created. By default it may.
    ///
    /// # Errors
    /// The refusal for the peer.
    fn may_fetch(&self, peer: &PeerName) -> Result<(), (Refusal, String)> {
        let _ = peer;
        Ok(())
    }

    /// Creates memory for `peer` and publishes it under the requested name, whose form has been checked, with
    /// `peer` as its [owner](crate::server::PublishOptions::owner): the owner is charged for the
    /// name. The name must exist when the future is done.
    ///
    /// Check the peer's rights and quota before another peer's name: a refusal with `exists` reveals to the peer
    /// that the name exists. Check `peer`'s own names before its quota, and refuse an existing one with `exists`:
    /// [`Client::create_or_get`](crate::Client::create_or_get) then takes its memory.
    fn create<'a>(&'a self, peer: &'a PeerName, ask: &'a Create) -> Allocation<'a>;

    /// Ends a name that `peer` created, after waiting at most `wait` for its holders.
    fn delete<'a>(&'a self, peer: &'a PeerName, name: &'a str, wait: Duration) -> Allocation<'a>;
}
