//! Starts a server.

use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use tokio::sync::{Notify, Semaphore, broadcast, watch};
use tokio_util::task::TaskTracker;

use super::audit::Audit;
use super::fd_socket::FdSocketPath;
use super::handshakes::Handshakes;
use super::state::ServerState;
use super::{Handle, Server, ServerCore, ServerOptions, accept, fd_socket, janitor, stats};
use crate::account::Accounts;
use crate::directory::Exporter;
use crate::group::{Groups, Keys, Rights, Rules};
use crate::limits::LONGEST;
use crate::protocol::Event;
use crate::share::{BootId, InstanceId};
use crate::transport::{FdBudget, FdTable, Listening, SharedPeers};
use crate::{Address, Result, Security};

/// Events in the queue of a receiver that does not keep up.
const EVENTS: usize = 1024;

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
    /// heartbeat of 0, a lease shorter than the heartbeat, or a pattern of [`groups`](Self::groups) that
    /// matches no name; [`Insecure`](crate::Error::Insecure) for an address of other machines without TLS;
    /// [`System`](crate::MemoryError::System) if the system refuses an address; those of
    /// [`Directory::register`](crate::directory::Directory::register).
    pub async fn start(self) -> Result<Server> {
        self.check()?;
        start(self).await
    }

    async fn bind(&self, address: &Address, peers: &SharedPeers) -> Result<Listening> {
        Listening::bind(address, &self.security, peers.clone(), &self.limits).await
    }
}

async fn start(mut options: ServerOptions) -> Result<Server> {
    let instance = InstanceId::random()?;
    let peers = SharedPeers::from(options.peers.clone());
    let rights = Rights::new(std::mem::take(&mut options.groups))?;
    let keys = Keys::new()?;
    let sockets = Sockets::bind(&options, &peers, instance).await?;
    FdBudget::of_process().cap(&mut options.limits, sockets.count());
    let addresses = sockets.addresses();
    let open_to_others = options.peers.reach_beyond_own_user();
    let inner = core(options, instance, peers, (rights, keys), &sockets)?;
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
    listening: Vec<Listening>,
    fd_socket: Option<(Listening, FdSocketPath)>,
}

impl Sockets {
    async fn bind(
        options: &ServerOptions,
        peers: &SharedPeers,
        instance: InstanceId,
    ) -> Result<Self> {
        let mut listening = Vec::new();
        for address in &options.addresses {
            listening.push(options.bind(address, peers).await?);
        }
        let path = FdSocketPath::prepare(&options.fd_socket, instance, &options.peers)?;
        let fd_socket = match path {
            Some(path) => {
                let address = Address::Unix(path.path().to_owned());
                Some((options.bind(&address, peers).await?, path))
            }
            None => None,
        };
        Ok(Self {
            listening,
            fd_socket,
        })
    }

    fn count(&self) -> usize {
        self.listening.len() + usize::from(self.fd_socket.is_some())
    }

    fn addresses(&self) -> Vec<Address> {
        let all = self.listening.iter();
        all.map(|one| one.address().clone()).collect()
    }

    /// Returns the path of the first Unix socket.
    fn local(&self) -> Option<String> {
        self.listening.iter().find_map(|one| match one.address() {
            Address::Unix(path) => std::path::absolute(path)
                .ok()
                .as_deref()
                .and_then(path_text),
            Address::Tcp { .. } => None,
        })
    }

    /// Starts a task for each socket.
    fn run(self, inner: &Arc<ServerCore>) {
        let last = self.count() - 1;
        for (number, one) in self.listening.into_iter().enumerate() {
            let run = accept::run(Arc::clone(inner), one, number);
            inner.tasks.spawn(run);
        }
        if let Some((fd_socket, path)) = self.fd_socket {
            let run = fd_socket::run(Arc::clone(inner), fd_socket, last, path);
            inner.tasks.spawn(run);
        }
    }
}

fn core(
    options: ServerOptions,
    instance: InstanceId,
    peers: SharedPeers,
    (rights, keys): (Rights, Keys),
    sockets: &Sockets,
) -> Result<Arc<ServerCore>> {
    let boot = BootId::current()?;
    let rules = Rules::new(&options.limits, options.lease.min(LONGEST));
    let exporter = Exporter {
        addresses: match options.advertised.is_empty() {
            true => sockets.addresses(),
            false => options.advertised,
        },
        instance: Some(instance),
        boot: Some(boot),
    };
    let registration = match options.directory {
        Some(directory) => Some(directory.register(exporter)?),
        None => None,
    };
    let fd_socket = sockets.fd_socket.as_ref();
    let audit = Arc::new(Audit::new(options.audit));
    let accounts = Accounts::new(&options.limits);
    Ok(Arc::new_cyclic(|inner: &Weak<ServerCore>| ServerCore {
        instance,
        boot,
        registration: Mutex::new(registration),
        groups: Groups::new(rules, rights, keys, teller(inner)),
        fds: FdTable::new(&options.limits),
        tls: match options.security {
            Security::Tls(tls) => Some(tls),
            Security::Plain | Security::PlainAnywhere => None,
        },
        peers,
        wall_clock: options.wall_clock,
        unknown: accounts.unknown(),
        accounts,
        handshakes: Handshakes::at_each(&options.limits, sockets.count()),
        limits: options.limits,
        heartbeat: options.heartbeat.min(LONGEST),
        lease: options.lease.min(LONGEST),
        ticket: options.ticket.min(LONGEST),
        fd_socket: fd_socket.and_then(|(_, path)| path_text(path.path())),
        local: sockets.local(),
        allocator: Mutex::new(options.allocator),
        state: Mutex::new(ServerState::new(Arc::clone(&audit))),
        audit: Arc::clone(&audit),
        counters: stats::Counters::default(),
        events: broadcast::channel(EVENTS).0,
        tasks: TaskTracker::new(),
        pidfds: Semaphore::new(FdBudget::of_process().processes),
        janitor: Notify::new(),
        released: Notify::new(),
        ended: watch::channel(false).0,
    }))
}

/// Returns the function by which groups tell sessions of lost ranks.
fn teller(inner: &Weak<ServerCore>) -> impl Fn(u64, Event) + Send + Sync + 'static {
    let inner = Weak::clone(inner);
    move |session, notice| {
        let inner = inner.upgrade();
        let session = inner.and_then(|inner| inner.state().sessions.get(session).cloned());
        if let Some(session) = session {
            session.tell(notice);
        }
    }
}

/// Returns addresses of Unix sockets as text.
fn path_text(path: &Path) -> Option<String> {
    path.to_str().map(str::to_owned)
}
