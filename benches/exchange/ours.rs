//! The exchange itself.

use std::time::Duration;

use egmem::driver::HandleType;
use egmem::exchange::server::Published;
use egmem::exchange::{Address, Client, Limits, PeerList, Security, Server, Tls, TlsPem};

use crate::{CLIENTS, NAME, Setting};

/// Enough for all clients, which have one certificate.
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
            .who(PeerList::anyone())
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
