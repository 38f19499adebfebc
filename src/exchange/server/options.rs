//! Options of a server, and memory on request.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::protocol::Create;
use crate::share::Peers;
use crate::{Address, Error, Limits, Namespaces, PeerName, Refusal, Result, Security, transport};

/// Options of a server; [`start`](Self::start) starts it.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `start`"]
pub struct ServerOptions {
    pub(super) addresses: Vec<Address>,
    pub(super) security: Security,
    pub(super) limits: Limits,
    pub(super) heartbeat: Duration,
    pub(super) lease: Duration,
    pub(super) local_socket: bool,
    pub(super) peers: Peers,
    pub(super) allocator: Option<Allocator>,
    pub(super) wall_clock: fn() -> SystemTime,
    pub(super) audit: Option<tracing::Dispatch>,
}

/// The allocator of a server.
#[derive(Clone)]
pub(super) struct Allocator(pub Arc<dyn Allocate>);

opaque!(Allocator);

impl ServerOptions {
    pub(super) fn new() -> Self {
        Self {
            addresses: Vec::new(),
            security: Security::Plain,
            limits: Limits::default(),
            heartbeat: Duration::from_secs(5),
            lease: Duration::from_secs(30),
            local_socket: true,
            peers: Peers::same_user(),
            allocator: None,
            wall_clock: SystemTime::now,
            audit: None,
        }
    }

    /// Adds an address to listen at. A Unix socket serves the whole protocol, with fds in the answers.
    pub fn listen(mut self, address: Address) -> Self {
        self.addresses.push(address);
        self
    }

    setters! {
        /// Sets how TCP connections are protected; by default not at all, which is allowed only on loopback.
        security: Security;
        /// Sets how much peers may ask for.
        limits: Limits;
        /// Sets how often clients send a heartbeat: 5 s by default. A client that is silent for three times as
        /// long, or for the time of a lease if that is shorter, loses its connection.
        heartbeat: Duration;
        /// Sets how long leases survive their holder's last message: 30 s by default, and at least the heartbeat.
        lease: Duration;
        /// Sets whether clients on this machine that connect over TCP may move their sessions to a Unix socket, which
        /// passes fds: by default yes. It is the first one that the server listens at whose absolute path has at most 107
        /// bytes and no control characters, or else an abstract socket of
        /// its own, which serves sessions that move there and nothing else. Without it such clients get fabric
        /// handles or nothing.
        local_socket: bool;
        /// Sets which users' processes may connect to Unix sockets, also to [move](Self::local_socket) there: by
        /// default the same user's.
        peers: Peers;
    }

    /// Sets the clock for the validity of certificates.
    #[cfg(test)]
    pub(super) fn wall_clock(mut self, clock: fn() -> SystemTime) -> Self {
        self.wall_clock = clock;
        self
    }

    /// Sets the allocator that creates memory for clients; without one such requests are refused with
    /// `unsupported`.
    pub fn allocator(mut self, allocator: Arc<dyn Allocate>) -> Self {
        self.allocator = Some(Allocator(allocator));
        self
    }

    /// Sets the subscriber of audit events (target `egmem::audit`) instead of the program's. It must not block.
    pub fn audit(mut self, to: tracing::Dispatch) -> Self {
        self.audit = Some(to);
        self
    }

    /// Checks everything that needs neither the network nor the file system.
    ///
    /// # Errors
    /// Those of [`start`](Self::start) that can be found before it begins.
    pub fn check(&self) -> Result<()> {
        if self.addresses.is_empty() {
            return Err(Error::invalid("addresses", "the list is empty"));
        }
        if self.heartbeat < Duration::from_millis(1) {
            return Err(Error::invalid("heartbeat", "it is less than 1 ms"));
        }
        if self.lease < self.heartbeat {
            let why = format!("{:?} is less than a heartbeat", self.lease);
            return Err(Error::invalid("lease", why));
        }
        self.limits.check()?;
        for (index, address) in self.addresses.iter().enumerate() {
            transport::check_literal(address, &self.security)?;
            let chosen_by_kernel = matches!(address, Address::Tcp { port: 0, .. });
            if !chosen_by_kernel && self.addresses[..index].contains(address) {
                let why = format!("{address} is given twice");
                return Err(Error::invalid("addresses", why));
            }
        }
        Ok(())
    }
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
