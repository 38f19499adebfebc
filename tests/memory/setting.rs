//! A server that peers flood, and the bounds on the bytes that it keeps for them.

use std::sync::Arc;

use egmem::exchange::Limits;
use rcgen::SanType;
use rustls::ClientConfig;
use tempfile::TempDir;

use crate::host::{Host, Look, Setup};
use crate::peer::{PATIENCE, Peer, Via, hello, socket};
use crate::runtime;
use egmem_tests::pki::{Files, Pki};
use egmem_tests::tls_config;

/// The most bytes that a server keeps for one that it received,
pub const RATIO: usize = 8;
/// beside so many for each connection with its session, before any request: buffers of the connection, of
/// TLS and of a short frame.
pub const CONNECTION: usize = 36 << 10;
/// and so many for each request that waits, and each rank and name that stays, without its texts and
/// lists: their tasks, timers and table entries. Of requests
/// there are at most 64 on a connection.
pub const REQUEST: usize = 2 << 10;
/// The allowance for tables beyond that, also when the peers are gone: a hash table keeps room for 64
/// entries (`shrink` in `src/exchange/server/quota.rs`), up to 10 KiB in one whose entries are long.
const TABLES: usize = 32 << 10;
/// The same of resident bytes, which are whole pages: at the heap's end up to 256 KiB lie idle (glibc's
/// thresholds for growing and trimming, see [`Host`]), and the rest of a table can be on a page of its
/// own, as can the stacks of the runtime's six threads.
const PAGES: usize = 512 << 10;

/// So many connections flood at once.
pub const CONNECTIONS: usize = 4;

pub struct Setting {
    pub runtime: tokio::runtime::Runtime,
    pub host: Host,
    pub via: Via,
    /// The first bytes of peers without a session.
    pub hello: Vec<u8>,
    _folder: TempDir,
}

/// How a setting's peers reach the server.
pub enum Transport {
    Tcp,
    Tls,
    /// With a name of 2048 bytes.
    LongName,
    Unix,
}

/// The longest SPIFFE id.
fn long_name() -> String {
    let begin = "spiffe://cluster.test/";
    format!("{begin}{}", "x".repeat(2048 - begin.len()))
}

fn certificates(folder: &TempDir, name: Option<String>) -> (Files, Arc<ClientConfig>) {
    let pki = Pki::new(folder.path(), "ca");
    let peer = pki.issue_for("peer.test", &["peer.test"], |params| {
        let uri = name.map(|name| SanType::URI(name.try_into().unwrap()));
        params.subject_alt_names.extend(uri);
    });
    (pki.issue("server.test"), tls_config(pki.ca(), Some(&peer)))
}

impl Setting {
    /// Sessions end soon after their connections, but no connection before its flood.
    pub fn new(transport: Transport) -> Self {
        let mut limits = Limits::default();
        (limits.frame, limits.handshake) = (PATIENCE, PATIENCE);
        Self::with(transport, limits, 6, 0)
    }

    /// With other limits, a session's seconds without a word, and so many more names.
    pub fn with(transport: Transport, limits: Limits, lease: u64, names: usize) -> Self {
        Self::in_parts(transport, limits, lease, names, 0)
    }

    /// The same, and a name with so many parts.
    pub fn in_parts(
        transport: Transport,
        limits: Limits,
        lease: u64,
        names: usize,
        parts: u64,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let tls = match transport {
            Transport::Tls => Some(certificates(&folder, None)),
            Transport::LongName => Some(certificates(&folder, Some(long_name()))),
            Transport::Tcp | Transport::Unix => None,
        };
        let (files, config) = tls.unzip();
        let host = Host::start(&Setup {
            folder: folder.path().to_owned(),
            files,
            limits,
            lease,
            names,
            parts,
        });
        let via = match (transport, config) {
            (Transport::Unix, _) => socket(&host.folder, "socket"),
            (_, Some(config)) => Via::Tls(host.port, config),
            (_, None) => Via::Tcp(host.port),
        };
        Self {
            runtime: runtime(),
            host,
            via,
            hello: hello(None),
            _folder: folder,
        }
    }

    /// So many peers, each with a session, and the bytes that they have sent.
    pub fn greet(&self, count: usize) -> Vec<Peer> {
        let greet = async {
            let mut peers = Vec::new();
            for _ in 0..count {
                peers.push(Peer::greet(&self.via, &self.hello).await.0);
            }
            peers
        };
        self.runtime.block_on(greet)
    }

    /// Resets the peaks, and returns the state before peers come.
    pub fn before(&mut self) -> Look {
        self.host.empty();
        self.host.reset()
    }

    /// Checks that the bytes kept now, and their peak since the last reset, are bounded by those received, with an
    /// allowance beside.
    #[track_caller]
    pub fn bounded(&self, what: &str, before: &Look, now: &Look, received: usize, beside: usize) {
        let grown = now.peak.saturating_sub(before.live);
        let resident = now.anonymous.saturating_sub(before.anonymous);
        let kept = now.live.saturating_sub(before.live);
        println!(
            "{what}: {received} received, {beside} beside, at most {grown}, now {kept}, \
             resident {resident}"
        );
        let most = received * RATIO + beside + TABLES;
        assert!(grown <= most, "{what}: {grown} bytes for {received}");
        let pages = most + PAGES;
        assert!(
            resident <= pages,
            "{what}: {resident} resident bytes for {received}"
        );
    }

    /// Checks that peers that are gone have left nothing.
    #[track_caller]
    pub fn given_back(&mut self, what: &str, before: &Look) {
        let now = self.host.empty();
        let kept = now.live.saturating_sub(before.live);
        let resident = now.anonymous.saturating_sub(before.anonymous);
        println!("{what}: gone, {kept} left, resident {resident}");
        assert!(kept <= TABLES, "{what}: {kept} bytes are left");
        assert!(
            resident <= PAGES,
            "{what}: {resident} resident bytes are left"
        );
        assert_eq!((now.leases, now.names), (0, before.names), "{what}");
    }

    /// Has several peers send the same bytes after their hellos, with so many requests in them of which
    /// `waiting` at most wait on each connection. Returns the last look before they go.
    #[track_caller]
    pub fn flood(&mut self, what: &str, bytes: &[u8], requests: u64, waiting: usize) -> Look {
        // A few requests of each message, so that memory which is allocated once is not counted.
        let mut first = self.greet(1);
        let few = &bytes[..bytes.len().min(8 << 10)];
        self.runtime.block_on(first[0].flood(few));
        self.host.settled(0);
        drop(first);
        let before = self.before();
        let mut peers = self.greet(CONNECTIONS);
        self.runtime.block_on(async {
            let (runtime, all) = (tokio::runtime::Handle::current(), peers.drain(..));
            let floods: Vec<_> = all
                .map(|mut peer| {
                    let bytes = bytes.to_vec();
                    runtime.spawn(async move {
                        peer.flood(&bytes).await;
                        peer
                    })
                })
                .collect();
            for flood in floods {
                peers.push(flood.await.unwrap());
            }
        });
        let requests = before.requests + requests * CONNECTIONS as u64;
        let now = self.host.settled(requests);
        let received = peers.iter().map(|peer| peer.sent).sum();
        let beside = CONNECTIONS * (CONNECTION + waiting * REQUEST);
        self.bounded(what, &before, &now, received, beside);
        drop(peers);
        self.given_back(what, &before);
        now
    }
}
