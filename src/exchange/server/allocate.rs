//! Memory on request.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use crate::Refusal;
use crate::exchange::PeerName;
use crate::exchange::protocol::Create;

/// What an [`Allocate`] answers: a refusal has its reason for programs and one for people.
pub type Allocation<'a> = Pin<Box<dyn Future<Output = Result<(), (Refusal, String)>> + Send + 'a>>;

/// Makes memory for clients that ask for it, and publishes it on the server that asks.
///
/// # Cancel safety
/// A future is dropped unfinished when its client is gone or the server ends. What it has half made
/// must be undone then.
pub trait Allocate: Send + Sync {
    /// Makes memory for `peer` and publishes it under the name that is asked for, which has the form
    /// of names. It must be there when the future is done.
    fn create<'a>(&'a self, peer: &'a PeerName, ask: &'a Create) -> Allocation<'a>;

    /// Ends a name that `peer` created, after waiting that long for its holders.
    fn delete<'a>(&'a self, peer: &'a PeerName, name: &'a str, wait: Duration) -> Allocation<'a>;
}
