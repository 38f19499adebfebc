//! The allocator service through the public API: the memory that peers see of each
//! other, the memory that stays when they leave, and the memory that is given back.

mod backing;
mod found_again;
mod memory;
mod names;
mod owners;
mod quota;
mod starting;
mod trust;
mod unconfirmed;

use egmem_tests::drivers;

use std::time::Duration;

use egmem::driver::{Access, NodeId};
use egmem::exchange::{
    Client, CreateOptions, Error, Refusal, RemoteBuffer, Result, Security, Tls, TlsPem,
};
use egmem::service::{Service, ServiceConfig};
use egmem::{Driver, Machine};
use rcgen::{CertificateParams, DnType, Issuer, KeyPair, SanType};
use tempfile::TempDir;
use tokio::time::Instant;

use egmem_tests::drivers::nothing_held;

const PATIENCE: Duration = Duration::from_secs(300);
const MIB: u64 = 1 << 20;

/// `[lease]` of a service whose tests wait for no silent peer: live peers lose nothing on a slow machine.
const LEASES_STAY: &str = "[lease]\nheartbeat = \"1min\"\nexpiry = \"1h\"\n";

/// For tests that are not about which peer may create which name: every peer may create every name.
const ANY_NAME: &str = "[[create.prefix]]\npeers = [\"*\"]\nnames = [\"\"]\n";

/// `[limits]` of all: a greeting may take long on a slow machine.
fn limits() -> String {
    format!(
        "[limits]\nhandshake = {}\n",
        egmem_tests::ms(10_000).as_millis()
    )
}

/// `[lease]` of a service whose tests wait until a silent holder's lease is over: long enough that
/// no other loses its own on a slow machine.
fn leases_end() -> String {
    let (heartbeat, expiry) = (egmem_tests::ms(1500), egmem_tests::ms(6000));
    format!(
        "[lease]\nheartbeat = \"{}ms\"\nexpiry = \"{}ms\"\n",
        heartbeat.as_millis(),
        expiry.as_millis()
    )
}

/// This machine's driver, where one is required, else a simulated one.
fn driver() -> Driver {
    drivers::cuda_or(Machine::gh200())
}

/// An authority and certificates of peers, in a folder.
struct Peers {
    folder: TempDir,
    ca: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Peers {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "test");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let ca = params.self_signed(&key).unwrap().pem();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), &ca).unwrap();
        let this = Self {
            folder,
            ca,
            issuer: Issuer::new(params, key),
        };
        let (cert, key) = this.certificate("node.test");
        std::fs::write(this.folder.path().join("node.pem"), cert).unwrap();
        std::fs::write(this.folder.path().join("node.key"), key).unwrap();
        this
    }

    fn certificate(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![
            SanType::DnsName(name.try_into().unwrap()),
            SanType::IpAddress([127, 0, 0, 1].into()),
        ];
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        (cert.pem(), key.serialize_pem())
    }

    fn tls(&self, name: &str) -> Security {
        let (cert, key) = self.certificate(name);
        let pem = TlsPem {
            ca: self.ca.as_bytes(),
            cert: cert.as_bytes(),
            key: key.as_bytes(),
            crl: None,
        };
        Security::Tls(Tls::from_pem(pem).unwrap())
    }

    /// A client of its own.
    async fn client(&self, service: &Service, name: &str, driver: &Driver) -> Client {
        Client::options(service.addresses()[0].clone())
            .security(self.tls(name))
            .timeout(PATIENCE)
            .connect(driver)
            .await
            .unwrap()
    }

    fn config(&self, more: &str) -> ServiceConfig {
        self.config_with(more, LEASES_STAY)
    }

    fn config_with(&self, more: &str, leases: &str) -> ServiceConfig {
        self.config_of_names(more, leases, ANY_NAME)
    }

    /// The same, with rules of their own about which names peers may create.
    fn config_of_names(&self, more: &str, leases: &str, prefixes: &str) -> ServiceConfig {
        let at = self.folder.path().display();
        let text = format!(
            r#"
listen = ["tcp://127.0.0.1:0"]
{more}
[tls]
ca = "{at}/ca.pem"
cert = "{at}/node.pem"
key = "{at}/node.key"
[create]
who = ["*.test"]
peer_bytes = "32MiB"
peer_names = 4
{}[node]
headroom = "0"
quiet = "0s"
{leases}{}"#,
            prefixes,
            limits()
        );
        ServiceConfig::from_toml(&text).unwrap()
    }
}

async fn create(client: &Client, name: &str, bytes: u64) -> Result<RemoteBuffer> {
    client
        .create(CreateOptions::new(name, bytes).node(NodeId(0)))
        .await?;
    client.fetch(name).probe(false).go().await
}

/// All bytes are alike: which.
fn only_byte(memory: &RemoteBuffer) -> u8 {
    let mut bytes = vec![0_u8; memory.len() as usize];
    memory.read_at(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "mixed bytes");
    bytes[0]
}

fn allocations(memory: &RemoteBuffer) -> Vec<(u64, u64)> {
    let parts = memory.description().parts.iter();
    parts
        .map(|part| (part.identity.allocation, part.identity.generation))
        .collect()
}

/// A metric's value, summed over its labels.
fn metric(service: &Service, name: &str) -> u64 {
    let text = service.metrics();
    let lines = text.lines().filter(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with([' ', '{']))
    });
    lines
        .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
        .sum()
}

async fn until(service: &Service, name: &str, value: u64) {
    let end = Instant::now() + PATIENCE;
    while metric(service, name) != value {
        assert!(Instant::now() < end, "{name}: {}", service.metrics());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn refused<T: std::fmt::Debug>(result: Result<T>) -> Refusal {
    match result {
        Err(Error::Refused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}
