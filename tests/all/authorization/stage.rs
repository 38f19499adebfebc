//! A service, an owner with names that others may not see, and the state that can be observed.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egmem::certs::{Authority, CertRequest, Issued};
use egmem::driver::{Access, HandleType};
use egmem::exchange::Address;
use egmem::exchange::protocol::{Answer, Ask, Create, Fetch, Granted, List};
use egmem::service::{Service, ServiceConfig};
use egmem::{Driver, Machine};
use rustls::ClientConfig;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::authorization::raw::{Raw, answer, refusal};
use egmem_tests::ms;

/// Owns the name, and may do everything.
pub const OWNER: &str = "owner.test";
/// May create memory, and knows none of the owner's.
pub const OTHER: &str = "other.test";
/// Has a certificate of the authority, and no right.
pub const STRANGER: &str = "stranger.test";

/// A user besides the service's own that may connect to its Unix sockets.
pub const USER: u32 = 65534;

/// Nothing takes as long that does not hang.
const PATIENCE: Duration = Duration::from_secs(300);

const DAY: Duration = Duration::from_secs(86_400);

/// The owner's name, which no other peer may fetch.
pub const HIDDEN: &str = "owner.test/hidden";
/// A name of the same length that does not exist.
pub const ABSENT: &str = "owner.test/absent";

pub struct Stage {
    runtime: Runtime,
    service: Service,
    folder: TempDir,
    authority: Authority,
}

/// The state that a peer could have changed.
#[derive(Debug, PartialEq)]
pub struct Snapshot {
    /// The owner's names with their leases.
    names: Vec<u8>,
    /// All metrics except the counts of requests, refusals and connections.
    metrics: Vec<String>,
}

impl Stage {
    /// A service where the owner has created [`HIDDEN`].
    pub fn new() -> Self {
        let authority = Authority::create("test", 10).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let own = issue(&authority, "service.test", DAY);
        let crl = egmem_tests::pki::crl((authority.cert_pem(), &authority.key_pem()), &[]);
        for (name, text) in [
            ("ca.pem", authority.cert_pem()),
            ("cert.pem", &own.cert_pem),
            ("key.pem", &own.key_pem),
            ("crl.pem", &crl),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        // The user of the Unix socket looks for it there.
        let open = Permissions::from_mode(0o711);
        std::fs::set_permissions(folder.path(), open).unwrap();
        let config = configuration(folder.path(), &[OWNER, OTHER], &[USER]);
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let runtime = Runtime::new().unwrap();
        let service = runtime.block_on(Service::start(config, &driver)).unwrap();
        let stage = Self {
            runtime,
            service,
            folder,
            authority,
        };
        let created = stage.peer(OWNER).ask(create(HIDDEN));
        assert!(matches!(created, Answer::Names(_)), "{created:?}");
        stage
    }

    fn config(&self, issued: Option<&Issued>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(self.authority.cert_pem().as_bytes()).unwrap();
        roots.add(ca).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match issued {
            None => builder.with_no_client_auth(),
            Some(issued) => {
                let cert = CertificateDer::from_pem_slice(issued.cert_pem.as_bytes()).unwrap();
                let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).unwrap();
                builder.with_client_auth_cert(vec![cert], key).unwrap()
            }
        };
        config.alpn_protocols = vec![b"egmem/1".to_vec()];
        Arc::new(config)
    }

    /// A certificate of a peer, for so long.
    pub fn issue(&self, name: &str, lasting: Duration) -> Issued {
        issue(&self.authority, name, lasting)
    }

    /// A connection before the hello, which shows this certificate or none.
    pub fn connection_with(&self, issued: Option<&Issued>) -> Raw {
        let Address::Tcp { host, port } = self.service.addresses().remove(0) else {
            panic!("a TCP address");
        };
        Raw::tls(&format!("{host}:{port}"), self.config(issued))
    }

    /// A connection before the hello, which shows a new certificate.
    pub fn connection(&self, name: &str) -> Raw {
        self.connection_with(Some(&self.issue(name, DAY)))
    }

    /// A session of a peer.
    pub fn peer(&self, name: &str) -> Raw {
        let mut raw = self.connection(name);
        raw.welcome(None);
        raw
    }

    /// A connection to the Unix socket, before the hello.
    pub fn at_unix(&self) -> Raw {
        Raw::unix(&self.path("own.sock")).unwrap()
    }

    /// Waits until there are so many sessions.
    pub fn until_sessions(&self, count: u64) {
        let begun = Instant::now();
        while self.service.stats().sessions != count {
            assert!(begun.elapsed() < PATIENCE, "not {count} sessions");
            std::thread::sleep(ms(5));
        }
    }

    /// A file of the service.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Returns the state that can be observed now.
    pub fn snapshot(&self) -> Snapshot {
        let sessions = || self.service.stats().sessions;
        let before = sessions();
        let names = self.peer(OWNER).ask_bytes(Ask::List(List::default()));
        // Its own session is over before the numbers are read, and effects that come late have some time.
        let begun = Instant::now();
        while begun.elapsed() < ms(200) || sessions() > before {
            assert!(begun.elapsed() < PATIENCE, "its own session does not end");
            std::thread::sleep(ms(20));
        }
        let counted = [
            "egmem_accepted",
            "egmem_connections",
            "egmem_creations_refused",
            "egmem_failed_handshakes",
            "egmem_handshakes",
            "egmem_protocol_errors",
            "egmem_refusals",
            "egmem_requests",
            "egmem_sessions",
        ];
        let metrics = self.service.metrics();
        let metrics = metrics.lines().filter(|line| {
            let line = line
                .trim_start_matches("# HELP ")
                .trim_start_matches("# TYPE ");
            !counted.iter().any(|name| line.starts_with(name))
        });
        Snapshot {
            names,
            metrics: metrics.map(str::to_owned).collect(),
        }
    }

    /// Asks twice, first of a name that exists and then of one that does not: the answers have the same bytes, the
    /// refusal is `word`, no event comes, and nothing has changed.
    #[track_caller]
    pub fn nothing_comes_of(&self, raw: &mut Raw, exists: Ask, absent: Ask, word: &str) {
        let before = self.snapshot();
        let answered = raw.ask_bytes(exists);
        assert_eq!(refusal(&answered), word);
        assert_eq!(self.snapshot(), before);
        let of_absent = raw.ask_bytes(absent);
        assert_eq!(answered, of_absent, "{:?}", answer(&of_absent));
        assert!(raw.events.is_empty(), "{:?}", raw.events);
    }

    /// Reloads the configuration with these peers and users on its lists.
    pub fn reload(&self, who: &[&str], users: &[u32]) {
        let config = configuration(self.folder.path(), who, users);
        let _context = self.runtime.enter();
        let restart = self.service.reload(config).unwrap();
        assert!(restart.is_empty(), "{restart:?}");
    }

    /// Reloads with this certificate revoked.
    pub fn revoke(&self, issued: &Issued) {
        let authority = (self.authority.cert_pem(), &**self.authority.key_pem());
        let crl = egmem_tests::pki::crl(authority, &[&issued.cert_pem]);
        std::fs::write(self.path("crl.pem"), crl).unwrap();
        self.reload(&[OWNER, OTHER], &[USER]);
    }

    /// Ends the service.
    pub fn end(self) {
        let drained = self.service.drain(ms(10_000));
        self.runtime.block_on(drained).unwrap();
    }
}

/// The configuration, with which those peers may create memory, and those users may connect.
fn configuration(folder: &Path, who: &[&str], users: &[u32]) -> ServiceConfig {
    let (at, handshake) = (folder.display(), ms(10_000).as_millis());
    let config = format!(
        r#"
listen = ["tcp://127.0.0.1:0", "unix:{at}/own.sock"]
[tls]
ca = "{at}/ca.pem"
cert = "{at}/cert.pem"
key = "{at}/key.pem"
crl = "{at}/crl.pem"
[local]
users = {users:?}
[create]
who = {who:?}
[node]
headroom = "0"
[lease]
heartbeat = "1min"
expiry = "1h"
[limits]
handshake = {handshake}
"#
    );
    ServiceConfig::from_toml(&config).unwrap()
}

fn issue(authority: &Authority, name: &str, lasting: Duration) -> Issued {
    let request = CertRequest::new(name).and("127.0.0.1").lasting(lasting);
    authority.issue(&request).unwrap()
}

pub fn create(name: &str) -> Ask {
    Ask::Create(Create {
        name: name.into(),
        bytes: 1 << 20,
        node: None,
        peers: String::new(),
    })
}

pub fn fetch(name: &str, accept: HandleType) -> Ask {
    Ask::Fetch(Fetch {
        name: name.into(),
        accept: vec![accept],
        access: Some(Access::ReadWrite),
        probe: true,
        instance: None,
        owner: None,
    })
}

/// Fetches the owner's name.
#[track_caller]
pub fn granted(owner: &mut Raw, accept: HandleType) -> Granted {
    match owner.ask(fetch(HIDDEN, accept)) {
        Answer::Granted(granted) => granted,
        other => panic!("{other:?}"),
    }
}
