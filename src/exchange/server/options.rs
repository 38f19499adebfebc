//! Options of a server, and its start.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::accept;
use super::allocate::Allocate;
use super::audit::Audit;
use super::inner::Counters;
use super::newcomers::Newcomers;
use super::quota::{Quota, fds_of_process, lower_for_fds};
use super::registry::ServerState;
use super::{Handle, Server, ServerCore};
use crate::limits::LONGEST;
use crate::protocol::fault_of_path;
use crate::share::{BootId, InstanceId, Peers};
use crate::transport::{self, Listening, SharedPeers};
use crate::{Address, Error, Limits, Result, Security};

/// Options of a server; [`start`](Self::start) starts it.
#[derive(Clone)]
#[must_use = "options do nothing until `start`"]
pub struct ServerOptions {
    addresses: Vec<Address>,
    security: Security,
    limits: Limits,
    heartbeat: Duration,
    lease: Duration,
    local_socket: bool,
    peers: Peers,
    allocator: Option<Arc<dyn Allocate>>,
    wall_clock: fn() -> SystemTime,
    audit: Option<tracing::Dispatch>,
}

impl fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerOptions")
            .field("addresses", &self.addresses)
            .field("limits", &self.limits)
            .field("heartbeat", &self.heartbeat)
            .field("lease", &self.lease)
            .field("peers", &self.peers)
            .finish_non_exhaustive()
    }
}

impl ServerOptions {
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
        self.allocator = Some(allocator);
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
                return Err(Error::invalid(
                    "addresses",
                    format!("{address} is given twice"),
                ));
            }
        }
        Ok(())
    }

    /// Starts the server on the current tokio runtime, which needs timers and I/O.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for no address, two equal ones, a limit of 0, a
    /// heartbeat of 0, or a lease shorter than the heartbeat; [`Insecure`](crate::Error::Insecure) for an address of other machines
    /// without TLS; [`System`](crate::MemoryError::System) if the system refuses an address.
    pub async fn start(self) -> Result<Server> {
        self.check()?;
        start(self).await
    }
}

impl Server {
    /// Returns options for a server.
    pub fn options() -> ServerOptions {
        ServerOptions {
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
}

async fn start(options: ServerOptions) -> Result<Server> {
    let instance = InstanceId::random()?;
    let peers = Arc::new(Mutex::new(options.peers.clone()));
    let mut sockets = Vec::new();
    for address in &options.addresses {
        let (security, limits) = (&options.security, &options.limits);
        sockets.push(Listening::bind(address, security, &peers, limits).await?);
    }
    let addresses = sockets.iter().map(|socket| socket.address().clone());
    let addresses: Vec<Address> = addresses.collect();
    let (mut local, mut own) = (None, None);
    if options.local_socket {
        local = addresses.iter().find_map(told_path);
        if local.is_none() {
            let name = format!("egmem-{instance}");
            own = Some(Listening::bind_abstract(&name, &peers, &options.limits)?);
            local = Some(format!("@{name}"));
        }
    }
    let open_to_others = options.peers.reach_beyond_own_user();
    let inner = core(options, instance, peers, local)?;
    let accept = |socket, own| {
        inner
            .tasks
            .spawn(accept::run(Arc::clone(&inner), socket, own))
    };
    for socket in sockets {
        accept(socket, false);
    }
    if let Some(socket) = own {
        accept(socket, true);
    }
    inner.tasks.spawn(Arc::clone(&inner).expire_on_time());
    inner.tasks.spawn(Arc::clone(&inner).end_with_processes());
    for address in &addresses {
        tracing::info!(%instance, %address, "listening");
    }
    let handle = Arc::new(Handle {
        inner,
        addresses,
        open_to_others,
    });
    Ok(Server { handle })
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

fn core(
    mut options: ServerOptions,
    instance: InstanceId,
    peers: SharedPeers,
    local: Option<String>,
) -> Result<Arc<ServerCore>> {
    let fds = fds_of_process();
    lower_for_fds(&mut options.limits, fds);
    let audit = Arc::new(Audit::new(options.audit));
    let quota = Quota::new(&options.limits, fds);
    Ok(Arc::new(ServerCore {
        instance,
        boot: BootId::current()?,
        state: Mutex::new(ServerState::new(Arc::clone(&audit), Arc::clone(&quota))),
        quota,
        open: Arc::default(),
        newcomers: Newcomers::new(options.limits.handshakes),
        tls: match options.security {
            Security::Tls(tls) => Some(tls),
            Security::Plain | Security::PlainAnywhere => None,
        },
        peers,
        wall_clock: options.wall_clock,
        heartbeat: options.heartbeat.min(LONGEST),
        lease: options.lease.min(LONGEST),
        local,
        allocator: Mutex::new(options.allocator),
        audit,
        limits: options.limits,
        counters: Counters::default(),
        tasks: TaskTracker::new(),
        followed: Notify::new(),
        janitor: Notify::new(),
        released: Notify::new(),
        ended: CancellationToken::new(),
    }))
}
