//! The exchange itself.

use std::time::{Duration, Instant};

use egmem::driver::HandleType;
use egmem::exchange::group::{Admission, Group, Map};
use egmem::exchange::server::Published;
use egmem::exchange::{Address, Client, Limits, Security, Server, Tls, TlsPem, Who};
use egmem::share::Shared;
use egmem::{Driver, Machine};
use tokio::task::JoinSet;

use crate::{CLIENTS, NAME, Setting};

/// Far beyond any operation's time.
const LONG: Duration = Duration::from_secs(60);

/// Enough for all clients, which have one certificate, and for the ranks of a group.
fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.connections = 2 * CLIENTS;
    limits.connections_per_peer = 2 * CLIENTS;
    limits.sessions = 4 * CLIENTS;
    limits.leases_per_peer = 4 * CLIENTS;
    limits
}

fn tls(ca: &str, cert: &str, key: &str) -> Security {
    let [ca, cert, key] = [ca, cert, key].map(str::as_bytes);
    Security::Tls(
        Tls::from_pem(TlsPem {
            ca,
            cert,
            key,
            crl: None,
        })
        .expect("certificates"),
    )
}

/// A server with the memory published.
pub struct Exporter {
    server: Server,
    _published: Published,
}

impl Exporter {
    /// Starts it on the current runtime.
    pub async fn start(setting: &Setting) -> Self {
        let files = &setting.certificates;
        let server = Server::options()
            .listen(Address::loopback(0))
            .security(tls(&files.ca, &files.server_cert, &files.server_key))
            .limits(limits())
            .start()
            .await
            .expect("a server");
        let published = server
            .publish(NAME, setting.memory.clone())
            .who(Who::anyone())
            .now();
        Self {
            server,
            _published: published.expect("a name"),
        }
    }

    /// Ends it, when no client holds a lease.
    pub async fn close(self) {
        self.server
            .close(Duration::from_secs(10))
            .await
            .expect("the server's end");
    }
}

/// A client on an open connection.
pub async fn connect(exporter: &Exporter, setting: &Setting) -> Client {
    let files = &setting.certificates;
    let address = exporter.server.addresses().remove(0);
    Client::options(address)
        .security(tls(&files.ca, &files.client_cert, &files.client_key))
        .connect(&setting.importer)
        .await
        .expect("a connection")
}

/// Fetches the fabric handles and releases them: two round trips.
pub async fn handles(client: &Client) {
    let leased = client
        .fetch(NAME)
        .via(HandleType::Fabric)
        .probe(false)
        .lease()
        .await;
    leased.expect("handles").release().await.expect("a release");
}

/// The same, with the import and its undoing between.
pub async fn import(client: &Client, via: HandleType) {
    let memory = client.fetch(NAME).via(via).probe(false).await;
    memory.expect("memory").release().await.expect("a release");
}

/// The ranks of a group: each has its own driver, as a process would, and memory to bring.
pub struct Ranks {
    ranks: Vec<(Driver, Shared)>,
    security: Security,
    map: Map,
}

impl Ranks {
    pub fn create(size: usize, setting: &Setting, tls_on: bool, map: Map) -> egmem::Result<Self> {
        let files = &setting.certificates;
        let security = match tls_on {
            true => tls(&files.ca, &files.server_cert, &files.server_key),
            false => Security::Plain,
        };
        let rank = |_| {
            let driver = Driver::simulated(Machine::gb200())?;
            let memory = crate::memory(&driver)?;
            Ok((driver, memory))
        };
        let ranks = (0..size).map(rank).collect::<egmem::Result<_>>()?;
        Ok(Self {
            ranks,
            security,
            map,
        })
    }

    /// All join, and leave again; how long the joining took, connections and handshakes included.
    pub async fn join(&self) -> Duration {
        let start = Instant::now();
        let joined = self.joined().await;
        let took = start.elapsed();
        leave(joined).await;
        took
    }

    /// All join, meet at so many barriers, and leave again; how long the barriers took.
    pub async fn barriers(&self, times: u64) -> Duration {
        let joined = self.joined().await;
        let start = Instant::now();
        let mut tasks = JoinSet::new();
        for group in joined {
            tasks.spawn(async move {
                for _ in 0..times {
                    group.barrier(LONG).await.expect("a barrier");
                }
                group
            });
        }
        let joined = tasks.join_all().await;
        let took = start.elapsed();
        leave(joined).await;
        took
    }

    async fn joined(&self) -> Vec<Group> {
        let address = {
            let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
            Address::loopback(free.local_addr().expect("its number").port())
        };
        let size = self.ranks.len() as u32;
        let mut tasks = JoinSet::new();
        for (rank, (driver, memory)) in (0..).zip(&self.ranks) {
            let options = Group::options("bench", rank, size, address.clone(), Admission::SamePeer)
                .security(self.security.clone())
                .limits(limits())
                .memory(memory.clone())
                .map(self.map);
            let driver = driver.clone();
            tasks.spawn(async move { options.join(&driver).await.expect("a group") });
        }
        tasks.join_all().await
    }
}

async fn leave(joined: Vec<Group>) {
    let mut tasks = JoinSet::new();
    for group in joined {
        tasks.spawn(async move { group.leave(LONG).await.map(drop).expect("all to leave") });
    }
    tasks.join_all().await;
}
