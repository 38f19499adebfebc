//! The client: finds memory by name, imports it, and holds a lease on it.

mod actor;
mod buffer;
mod connect;
mod create;
mod fetch;
mod follow;
mod greet;
mod lease;
mod open;
mod options;
mod probe;
mod session;
mod text;
mod watch;

#[cfg(test)]
pub(crate) mod tests;

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

pub use buffer::{Leased, RemoteBuffer};
pub use create::CreateOptions;
pub use fetch::FetchOptions;
pub use follow::{Absence, Follow, Followed};
pub use lease::LeaseState;
pub use options::{ClientOptions, Reconnect};
pub use probe::Proof;
pub use watch::{Watch, WatchEvent};

use super::PeerName;
use super::protocol::{Answer, Ask, Delete, Entry, List, Names, Wait};
use crate::share::{BootId, InstanceId};
use crate::{Error, Result};
pub(crate) use connect::importable;
use lease::Keep;
pub(crate) use open::fabric;
pub(crate) use session::{Answered, ClientSession};
pub(crate) use text::cut;

/// A connection to an exchange server. Clones are the same connection, which closes when the last clone and
/// everything fetched through it are dropped.
///
/// A task on the runtime that created it keeps the leases alive, and reconnects when the connection breaks:
/// within the time of a lease the server resumes the session. If that fails, leases become
/// [`LeaseState::Lost`].
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::exchange::{Address, Client, Server};
/// use egmem::{Buffer, Driver, Machine};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> egmem::exchange::Result<()> {
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let server = Server::options().listen(Address::loopback(0)).start().await?;
/// let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable().allocate(&driver)?;
/// let published = server.publish("weights", buffer).now()?;
///
/// let client = Client::options(server.addresses().remove(0)).connect(&driver).await?;
/// let weights = client.fetch("weights").go().await?;
/// weights.put(0, 42_u64)?;
/// assert_eq!(published.shared()?.word(0)?, 42);
/// weights.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Client(Keep);

impl Client {
    /// Returns the names that begin with `prefix` and that this client may fetch, in order.
    ///
    /// # Errors
    /// [`PeerLost`](crate::ShareError::PeerLost); [`TimedOut`](crate::ShareError::TimedOut) if the server does not
    /// answer within the client's [`timeout`](ClientOptions::timeout);
    /// [`Protocol`](crate::ShareError::Protocol); [`Error::LimitReached`] for more names than
    /// [`Limits::names`](super::Limits).
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing is left.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.pages(prefix, Vec::new(), true).await
    }

    /// Checks the order of `entries`, and requests further pages after the last of them, while there is `more`.
    async fn pages(
        &self,
        prefix: &str,
        mut entries: Vec<Entry>,
        mut more: bool,
    ) -> Result<Vec<Entry>> {
        let limit = self.session().dial.options.limits.names;
        if !entries.is_sorted_by(|one, next| one.name < next.name) {
            return Err(self.broken("names out of order"));
        }
        while more {
            let ask = Ask::List(List {
                prefix: prefix.into(),
                after: entries.last().map(|entry: &Entry| entry.name.clone()),
            });
            let names = self.names(ask).await?;
            more = names.more;
            if more && names.entries.is_empty() {
                return Err(self.broken("an empty page before the last"));
            }
            for entry in names.entries {
                // Otherwise the same page could come again and again.
                if entries.last().is_some_and(|last| last.name >= entry.name) {
                    return Err(self.broken("names out of order"));
                }
                entries.push(entry);
            }
            if entries.len() > limit {
                let (what, limit) = ("names in a list", limit as u64);
                return Err(Error::LimitReached { what, limit });
            }
        }
        Ok(entries)
    }

    /// Returns a name's entry, as soon as there is one that this client may fetch.
    ///
    /// # Errors
    /// [`TimedOut`](crate::ShareError::TimedOut) if there is none after `patience`, or if the server does not answer
    /// within `patience` or the client's [`timeout`](ClientOptions::timeout), whichever is longer; those of
    /// [`list`](Self::list).
    ///
    /// # Cancel safety
    /// If dropped before completion, nothing is left.
    pub async fn wait(&self, name: &str, patience: Duration) -> Result<Entry> {
        let begun = Instant::now();
        loop {
            let left = patience.saturating_sub(begun.elapsed());
            let ask = Ask::Wait(Wait {
                name: name.into(),
                ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX),
            });
            let asked = Instant::now();
            let allowed = left.max(self.patience());
            let mut answered = self.again(ask, allowed).await;
            if let Ok(Answer::Names(names)) = &mut answered
                && let Some(entry) = names.entries.pop().filter(|entry| entry.name == name)
            {
                return Ok(entry);
            }
            match answered {
                Err(error) if error.is_timed_out() => {
                    if begun.elapsed() >= patience {
                        let what = format!("waiting for '{name}' at {}", self.peer());
                        return Err(Error::timed_out(what, patience));
                    }
                    // The server may limit the wait to less than requested.
                    let least = Duration::from_millis(20);
                    tokio::time::sleep(least.saturating_sub(asked.elapsed())).await;
                }
                Err(error) => return Err(error),
                Ok(_) => return Err(self.broken("unexpected answer, not one name's entry")),
            }
        }
    }

    /// Ends a name that this client created, after waiting up to `patience` for its holders. The answer may take the
    /// client's [`timeout`](ClientOptions::timeout) longer.
    ///
    /// # Errors
    /// [`Error::Refused`]: `not_found`, `forbidden`, `timed_out` if it is still held, with the holders; those of
    /// [`list`](Self::list).
    ///
    /// # Cancel safety
    /// As [`create`](Self::create).
    pub async fn delete(&self, name: impl Into<String>, patience: Duration) -> Result<()> {
        let ask = Ask::Delete(Delete {
            name: name.into(),
            ms: u64::try_from(patience.as_millis()).unwrap_or(u64::MAX),
        });
        let allowed = patience.saturating_add(self.patience());
        match self.call(ask, allowed).await? {
            Answer::Done => Ok(()),
            _ => Err(self.broken("unexpected answer to a deletion")),
        }
    }

    /// Returns the server's instance, which changes at a restart.
    pub fn instance(&self) -> InstanceId {
        self.session().terms().welcome.instance
    }

    /// Returns the server's authenticated name and its address.
    pub fn peer(&self) -> String {
        self.session().peer()
    }

    /// Returns this client's name, as the server has authenticated it.
    pub fn name(&self) -> String {
        self.session().terms().welcome.peer.clone()
    }

    /// Returns this client's name as an owner of names.
    ///
    /// # Errors
    /// [`Protocol`](crate::ShareError::Protocol) if the server's text is not a peer name.
    pub fn peer_name(&self) -> Result<PeerName> {
        let broken = |_| self.broken("a name for this client that is not a peer name");
        self.name().parse().map_err(broken)
    }

    /// Ends the connection, after pending releases. Leases that remain become [`LeaseState::Lost`], and other
    /// clones of this client fail.
    ///
    /// Dropping the last clone does the same, once nothing fetched is left.
    pub async fn close(self) {
        self.session().close();
        self.session().closed().await;
    }

    /// Returns the server's machine.
    pub fn boot(&self) -> BootId {
        self.session().terms().welcome.boot
    }

    /// Returns how long a request may take.
    pub(crate) fn patience(&self) -> Duration {
        self.session().patience()
    }

    /// Returns the session, to close it when a program ends its use. Does not keep the client.
    pub(crate) fn weak_session(&self) -> Weak<ClientSession> {
        Arc::downgrade(self.session())
    }

    fn session(&self) -> &Arc<ClientSession> {
        self.0.session()
    }

    fn broken(&self, detail: &str) -> Error {
        Error::protocol(self.peer(), detail)
    }

    /// Sends a request once.
    pub(crate) async fn call(&self, ask: Ask, patience: Duration) -> Result<Answer> {
        Ok(self.exchange(ask, Vec::new(), patience).await?.answer)
    }

    /// Sends a request once, with fds to send and to receive.
    pub(crate) async fn exchange(
        &self,
        ask: Ask,
        fds: Vec<std::os::fd::OwnedFd>,
        patience: Duration,
    ) -> Result<Answered> {
        self.session().call(ask, fds, patience).await
    }

    /// Sends an idempotent request: again if the connection broke before the answer.
    async fn again(&self, ask: Ask, patience: Duration) -> Result<Answer> {
        let begun = Instant::now();
        loop {
            let left = patience.saturating_sub(begun.elapsed());
            match self.call(ask.clone(), left).await {
                Err(error)
                    if error.is_peer_lost()
                        && self.session().is_open()
                        && begun.elapsed() < patience => {}
                done => return done,
            }
        }
    }

    async fn names(&self, ask: Ask) -> Result<Names> {
        match self.again(ask, self.patience()).await? {
            Answer::Names(names) => Ok(names),
            _ => Err(self.broken("unexpected answer, not names")),
        }
    }
}
