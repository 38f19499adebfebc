//! The server: publishes memory under names and tracks its holders.
//!
//! One task serves a connection: it reads a request, and writes the answer. A request is one future (`requests.rs`): the
//! connection polls it once, and one that must wait goes on in a task of its own; their number is limited. Driver calls run off
//! the runtime. All of the server's state is
//! under one lock, held for moments and never across an await.

mod audit;
mod connection;
mod fetch;
mod leases;
mod newcomers;
mod options;
mod publication;
mod publish;
mod quota;
mod requests;
mod session;
mod sessions;
mod state;

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use self::audit::audit;

pub use options::{Allocate, Allocation, ServerOptions};
pub(crate) use publication::made_without_fabric;
pub use publication::{Holder, HolderProcess, HolderState};
pub use publish::{PublishOptions, Published, UnconfirmedRelease};
pub use state::ServerStats;

use crate::limits::{LONGEST, deadline};
use crate::per_driver::lock;
use crate::protocol::fault_of_path;
use crate::share::{InstanceId, Peers};
use crate::transport::Listening;
use crate::{Address, Error, MemoryError, PeerName, Refusal, Result};
use quota::{fds_of_process, lower_for_fds};
use session::ServerSession;
use state::ServerCore;

/// Publishes memory for others to import. Clones are the same server, which ends with the last one,
/// or by [`close`](Self::close).
///
/// ```
/// use egmem::driver::NodeId;
/// use egmem::exchange::{Address, Server};
/// use egmem::{Buffer, Driver, Machine};
///
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let driver = Driver::simulated(Machine::gh200())?; // Driver::open() on a real machine
/// let buffer = Buffer::on(NodeId(0)).bytes(1 << 20).shareable().allocate(&driver)?;
///
/// let server = Server::options().listen(Address::loopback(0)).start().await?;
/// let published = server.publish("weights", buffer).now()?;
/// println!("{} at {:?}", published.name(), server.addresses());
/// // … clients come and go …
/// let memory = published.withdraw(std::time::Duration::from_secs(10)).await?;
/// assert_eq!(memory.len(), 1 << 20);
/// server.close(std::time::Duration::from_secs(10)).await?;
/// # Ok::<(), egmem::exchange::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone)]
pub struct Server {
    handle: Arc<Handle>,
}

/// The state that all clones of a server share; the tasks share [`ServerCore`], which does not keep it alive.
struct Handle {
    inner: Arc<ServerCore>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inner.end();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("instance", &self.handle.inner.instance)
            .field("addresses", &self.handle.inner.options.addresses)
            .finish_non_exhaustive()
    }
}

impl ServerOptions {
    /// Starts the server on the current tokio runtime, which needs timers and I/O.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no address, two equal ones, a limit of 0, a
    /// heartbeat of 0, or a lease shorter than the heartbeat; [`Insecure`](crate::Error::Insecure) for an address of other machines
    /// without TLS; [`System`](crate::MemoryError::System) if the system refuses an address.
    pub async fn start(mut self) -> Result<Server> {
        self.check()?;
        let instance = InstanceId::random()?;
        let peers = Arc::new(Mutex::new(self.peers.clone()));
        let mut sockets = Vec::new();
        for address in &self.addresses {
            let listening = Listening::bind(address, &self.security, &peers, &self.limits);
            sockets.push((listening.await?, false));
        }
        let addresses = sockets.iter().map(|(socket, _)| socket.address.clone());
        self.addresses = addresses.collect();
        let mut local = None;
        if self.local_socket {
            local = self.addresses.iter().find_map(told_path);
            if local.is_none() {
                let name = format!("egmem-{instance}");
                let own = Listening::bind_abstract(&name, &peers, &self.limits)?;
                sockets.push((own, true));
                local = Some(format!("@{name}"));
            }
        }
        let fds = fds_of_process();
        lower_for_fds(&mut self.limits, fds);
        (self.heartbeat, self.lease) = (self.heartbeat.min(LONGEST), self.lease.min(LONGEST));
        let inner = Arc::new(ServerCore::new(self, fds, instance, peers, local)?);
        for (socket, own) in sockets {
            let accepting = sessions::run(Arc::clone(&inner), socket, own);
            inner.tasks.spawn(accepting);
        }
        inner.tasks.spawn(Arc::clone(&inner).expire_on_time());
        inner.tasks.spawn(Arc::clone(&inner).end_with_processes());
        for address in &inner.options.addresses {
            tracing::info!(%instance, %address, "listening");
        }
        let handle = Arc::new(Handle { inner });
        Ok(Server { handle })
    }
}

/// Returns a socket's absolute path as a welcome tells it, if it can.
fn told_path(address: &Address) -> Option<String> {
    let Address::Unix(path) = address else {
        return None;
    };
    let path = std::path::absolute(path).ok()?;
    let path = path.to_str()?;
    fault_of_path(path).is_none().then(|| path.to_owned())
}

impl Server {
    /// Returns options for a server.
    pub fn options() -> ServerOptions {
        ServerOptions::new()
    }

    /// Returns the addresses that it listens at, with the ports that the kernel chose.
    pub fn addresses(&self) -> Vec<Address> {
        self.handle.inner.options.addresses.clone()
    }

    /// Returns the id of this run of the server: names and leases of another run are not its own.
    pub fn instance(&self) -> InstanceId {
        self.handle.inner.instance
    }

    /// Ends all sessions of a peer at once and tells it so: its leases expire, and memory that it has not
    /// released counts as still mapped. Returns the number of sessions. The peer may connect again unless
    /// its certificate is revoked or its user is no longer admitted.
    pub fn end_sessions(&self, of: &PeerName) -> usize {
        self.end_sessions_if(|peer| peer == of)
    }

    /// As [`end_sessions`](Self::end_sessions), for several peers.
    pub fn end_sessions_if(&self, of: impl Fn(&PeerName) -> bool) -> usize {
        let (reason, detail) = (Refusal::Forbidden, "this peer is no longer admitted");
        (self.handle.inner).dismiss(|session| of(&session.peer), &reason, detail)
    }

    /// Changes the users that may connect to Unix sockets, and ends the sessions of those that no longer may. Sessions
    /// that have [moved](ServerOptions::local_socket) there go back to TCP.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) if other users are to be admitted and none was
    /// at the server's start: its sockets are closed to them.
    pub fn set_peers(&self, peers: Peers) -> Result<()> {
        let inner = &self.handle.inner;
        if peers.reach_beyond_own_user() && !inner.options.peers.reach_beyond_own_user() {
            let why = "other users were not admitted when the server started; restart it";
            return Err(Error::invalid("peers", why));
        }
        lock(&inner.peers).clone_from(&peers);
        {
            let state = inner.state();
            let moved = state.sessions_if(|session| {
                let user = session.link().and_then(|link| link.user);
                !matches!(session.peer, PeerName::User(_))
                    && user.is_some_and(|uid| !peers.admits_user(uid))
            });
            // They may go on over TCP.
            for session in moved {
                session.cut();
            }
        }
        let refused = |session: &ServerSession| matches!(session.peer, PeerName::User(uid) if !peers.admits_user(uid));
        inner.dismiss(refused, &Refusal::Forbidden, sessions::NO_USER);
        Ok(())
    }

    /// Returns statistics.
    pub fn stats(&self) -> ServerStats {
        self.handle.inner.stats()
    }

    /// Ends the server: starts nothing new, asks holders to release their memory, and when all have, or
    /// `within` is over, closes connections and names and ends all tasks.
    ///
    /// # Errors
    /// [`StillHeld`](crate::MemoryError::StillHeld) with the holders that had not released in time;
    /// [`TimedOut`](crate::ShareError::TimedOut) if a driver call does not return. The server has ended anyway.
    ///
    /// # Cancel safety
    /// If dropped before completion, the server continues to serve the remaining holders; close it again.
    pub async fn close(&self, within: Duration) -> Result<()> {
        let inner = &self.handle.inner;
        let until = deadline(within);
        {
            let mut state = inner.state();
            state.closing = true;
            state.notify_closing(until.into_std());
        }
        tracing::info!(instance = %inner.instance, "closing");
        inner.wait_for_releases(until).await;
        let held = inner.end();
        // Lets writes and driver calls in progress finish, and the last messages be sent.
        let writing = inner.options.limits.write.saturating_mul(2);
        let grace = writing.saturating_add(inner.options.limits.request);
        inner.tasks.close();
        if tokio::time::timeout(grace, inner.tasks.wait())
            .await
            .is_err()
        {
            let what = format!("ending {} tasks of the server", inner.tasks.len());
            return Err(Error::timed_out(what, grace));
        }
        let sessions = inner.state().clear();
        for session in sessions {
            let (session, peer) = (session.id, Some(&session.peer));
            audit! { inner.audit, Session, peer, "session_ended", session, reason = "closing" }
        }
        inner.audit.finish();
        tracing::info!(instance = %inner.instance, "closed");
        if held.is_empty() {
            return Ok(());
        }
        let (name, holders) = ("memory of this server".into(), held);
        Err(MemoryError::StillHeld { name, holders }.into())
    }
}
