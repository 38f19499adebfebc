//! Memory on request.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::Refusal;
use crate::exchange::protocol::Create;
use crate::exchange::{Namespaces, PeerName};

/// What an [`Allocate`] answers: a refusal has its reason for programs and one for people.
pub type Allocation<'a> = Pin<Box<dyn Future<Output = Result<(), (Refusal, String)>> + Send + 'a>>;

/// Makes memory for clients that ask for it, and publishes it on the server that asks.
///
/// # Cancel safety
/// A future is dropped unfinished when its client is gone or the server ends. What it has half made
/// must be undone then.
pub trait Allocate: Send + Sync {
    /// Whether `peer` may create this name, whatever is there now; asked before [`create`](Self::create).
    /// By default a peer creates names under its own name alone: [`Namespaces::own`].
    ///
    /// # Errors
    /// The refusal that the peer is told.
    fn may_create(&self, peer: &PeerName, name: &str) -> Result<(), (Refusal, String)> {
        Namespaces::own().check(peer, name)
    }

    /// Makes memory for `peer` and publishes it under the name that is asked for, which has the form
    /// of names, with `peer` as its [owner](crate::exchange::server::PublishOptions::owner): the owner is
    /// charged for the name. It must be there when the future is done.
    ///
    /// Check the peer's rights and quota before the name: a refusal with `exists` tells the peer that
    /// somebody has it.
    fn create<'a>(&'a self, peer: &'a PeerName, ask: &'a Create) -> Allocation<'a>;

    /// Ends a name that `peer` created, after waiting that long for its holders.
    fn delete<'a>(&'a self, peer: &'a PeerName, name: &'a str, wait: Duration) -> Allocation<'a>;
}
