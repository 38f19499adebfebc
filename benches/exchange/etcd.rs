//! A server of etcd of its own, over mutual TLS, with its data in a temporary folder.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};

use crate::certificates::Certificates;

/// The server; it ends with this.
pub struct Etcd {
    child: Child,
    folder: tempfile::TempDir,
    endpoint: String,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Etcd {
    /// `None`, with a word on standard error, where there is no program `etcd`.
    pub fn start(certificates: &Certificates) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, pem: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, pem).expect("a file");
            path
        };
        // Two ports that are free now; etcd cannot say which it took.
        let free = || std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let (client, peer) = (free(), free());
        let url = |listener: &std::net::TcpListener, scheme: &str| {
            format!("{scheme}://{}", listener.local_addr().expect("a number"))
        };
        let (endpoint, peers) = (url(&client, "https"), url(&peer, "http"));
        drop((client, peer));
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.path().join("data"))
            .args([
                "--listen-client-urls",
                &endpoint,
                "--advertise-client-urls",
                &endpoint,
            ])
            .args([
                "--listen-peer-urls",
                &peers,
                "--initial-advertise-peer-urls",
                &peers,
            ])
            .args([
                "--initial-cluster",
                &format!("default={peers}"),
                "--client-cert-auth",
            ])
            .arg("--trusted-ca-file")
            .arg(file("ca.pem", &certificates.ca))
            .arg("--cert-file")
            .arg(file("server.pem", &certificates.server_cert))
            .arg("--key-file")
            .arg(file("server.key", &certificates.server_key))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| eprintln!("without etcd: {error}"))
            .ok()?;
        Some(Self {
            child,
            folder,
            endpoint,
        })
    }

    /// A connection, as soon as the server answers.
    pub async fn connect(&self, certificates: &Certificates) -> etcd_client::Client {
        let tls = TlsOptions::new()
            .domain_name("127.0.0.1")
            .ca_certificate(Certificate::from_pem(&certificates.ca))
            .identity(Identity::from_pem(
                &certificates.client_cert,
                &certificates.client_key,
            ));
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let options = ConnectOptions::new()
                .with_tls(tls.clone())
                .with_timeout(Duration::from_secs(2));
            let answer = match etcd_client::Client::connect([&self.endpoint], Some(options)).await {
                Ok(mut client) => client.get("nothing", None).await.map(|_| client),
                Err(error) => Err(error),
            };
            match answer {
                Ok(client) => return client,
                Err(error) if Instant::now() > deadline => panic!(
                    "etcd in {} does not answer: {error}",
                    self.folder.path().display()
                ),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}
