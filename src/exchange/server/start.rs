//! Starts a server.

use std::sync::{Arc, Mutex};

use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::admission::CONNECTIONS;
use super::audit::Audit;
use super::newcomers::Newcomers;
use super::state::ServerState;
use super::{Handle, Server, ServerCore, ServerOptions, accept, janitor, stats};
use crate::account::Accounts;
use crate::limits::LONGEST;
use crate::share::{BootId, InstanceId};
use crate::transport::{FdBudget, Listening, SharedPeers, fd_accounts};
use crate::{Address, Limits, Result, Security};

impl Server {
    /// Returns options for a server.
    pub fn options() -> ServerOptions {
        ServerOptions::new()
    }
}

impl ServerOptions {
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

    async fn bind(&self, address: &Address, peers: &SharedPeers) -> Result<Listening> {
        Listening::bind(address, &self.security, peers, &self.limits).await
    }
}

async fn start(mut options: ServerOptions) -> Result<Server> {
    let instance = InstanceId::random()?;
    let peers = Arc::new(Mutex::new(options.peers.clone()));
    let sockets = Sockets::bind(&options, &peers, instance).await?;
    FdBudget::of_process().cap(&mut options.limits);
    let addresses = sockets.addresses();
    let open_to_others = options.peers.reach_beyond_own_user();
    let inner = core(options, instance, peers, &sockets)?;
    sockets.run(&inner);
    inner.tasks.spawn(janitor::run(Arc::clone(&inner)));
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

/// The sockets at which a server listens.
struct Sockets {
    all: Vec<Listening>,
    /// Whether the last one is the server's own, where sessions of the others move.
    own: bool,
    /// Where clients on this machine move.
    local: Option<String>,
}

impl Sockets {
    async fn bind(
        options: &ServerOptions,
        peers: &SharedPeers,
        instance: InstanceId,
    ) -> Result<Self> {
        let mut all = Vec::new();
        for address in &options.addresses {
            all.push(options.bind(address, peers).await?);
        }
        let unix = all.iter().find_map(|one| match one.address() {
            Address::Unix(path) => Some(std::path::absolute(path)),
            Address::Tcp { .. } => None,
        });
        let own = options.local_socket && unix.is_none();
        let local = match unix.filter(|_| options.local_socket) {
            Some(path) => path.ok().and_then(|path| path.to_str().map(str::to_owned)),
            None if own => {
                let name = format!("egmem-{instance}");
                all.push(Listening::bind_abstract(&name, peers, &options.limits)?);
                Some(format!("@{name}"))
            }
            None => None,
        };
        Ok(Self { all, own, local })
    }

    /// Returns the addresses that clients connect to.
    fn addresses(&self) -> Vec<Address> {
        let all = self.all.iter().take(self.all.len() - usize::from(self.own));
        all.map(|one| one.address().clone()).collect()
    }

    /// Starts a task for each socket.
    fn run(self, inner: &Arc<ServerCore>) {
        let count = self.all.len();
        for (number, one) in self.all.into_iter().enumerate() {
            let own = self.own && number + 1 == count;
            inner.tasks.spawn(accept::run(Arc::clone(inner), one, own));
        }
    }
}

fn core(
    options: ServerOptions,
    instance: InstanceId,
    peers: SharedPeers,
    sockets: &Sockets,
) -> Result<Arc<ServerCore>> {
    let boot = BootId::current()?;
    let audit = Arc::new(Audit::new(options.audit));
    let accounts = Accounts::new(&options.limits);
    Ok(Arc::new(ServerCore {
        instance,
        boot,
        connections: connections(&options.limits),
        sessions: sessions(&options.limits),
        fds: fd_accounts(&options.limits),
        tls: match options.security {
            Security::Tls(tls) => Some(tls),
            Security::Plain | Security::PlainAnywhere => None,
        },
        peers,
        wall_clock: options.wall_clock,
        accounts,
        newcomers: Newcomers::new(options.limits.handshakes),
        heartbeat: options.heartbeat.min(LONGEST),
        lease: options.lease.min(LONGEST),
        local: sockets.local.clone(),
        allocator: Mutex::new(options.allocator),
        state: Mutex::new(ServerState::new(
            Arc::clone(&audit),
            options.limits.leases_per_peer,
        )),
        audit: Arc::clone(&audit),
        limits: options.limits,
        counters: stats::Counters::default(),
        tasks: TaskTracker::new(),
        pidfds: Semaphore::new(FdBudget::of_process().processes),
        janitor: Notify::new(),
        released: Notify::new(),
        ended: CancellationToken::new(),
    }))
}

fn connections(limits: &Limits) -> Arc<Accounts> {
    let each = (limits.connections_per_peer, "connections of this peer");
    Accounts::with((limits.connections, CONNECTIONS), each)
}

fn sessions(limits: &Limits) -> Arc<Accounts> {
    let each = (limits.sessions_per_peer, "sessions of this peer");
    Accounts::with((limits.sessions, "sessions"), each)
}
