//! A server on loopback, driven by a raw client over the codec.

mod auditing;
mod crowding;
mod fds;
mod fetching;
mod hostile;
mod leasing;
mod moving;
mod naming;
mod recalling;
mod resuming;
mod trust;
mod unconfirmed;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::driver::{Access, HandleType, NodeId};
use crate::protocol::*;
use crate::server::session::ServerSession;
use crate::server::state::ServerCore;
use crate::server::{Published, Server, ServerOptions};
use crate::share::{BootId, Peers, Shared};
use crate::transport::{Connection, connect};
use crate::{Address, Limits, Owner, PeerList, PeerName, Security};
use crate::{Buffer, Driver, Machine, Refusal};
use egmem_tests::ms;

/// The session of a server that has one.
fn only_session(core: &ServerCore) -> Arc<ServerSession> {
    let state = core.state();
    let mut sessions = state.sessions.values();
    Arc::clone(&sessions.next().unwrap().session)
}

/// Long enough for everything that must happen.
const LONG: Duration = Duration::from_secs(300);

/// Returns the time of a lease that expires soon.
fn soon_over() -> Duration {
    ms(1000)
}

/// Returns a short time.
fn short() -> Duration {
    ms(300)
}

const MIB: u64 = 1 << 20;

/// A machine whose driver has fabric handles.
fn driver() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

fn memory(driver: &Driver) -> Shared {
    let buffer = Buffer::on(NodeId(0)).bytes(MIB).shareable();
    buffer.allocate(driver).unwrap().into()
}

/// Options that end no session of a raw client, which sends no heartbeats, however slow the machine is.
fn options() -> ServerOptions {
    Server::options().heartbeat(LONG).lease(LONG)
}

fn loopback() -> ServerOptions {
    options().listen(Address::loopback(0))
}

/// Limits that a busy machine meets. A test sets the one that it exceeds.
fn limits() -> Limits {
    Limits {
        handshake: LONG,
        frame: LONG,
        write: LONG,
        ..Limits::default()
    }
}

/// Closes the server and checks that it leaves nothing behind: no task, no handle.
async fn close(server: Server, driver: &Driver) {
    server.close(LONG).await.unwrap();
    let stats = server.stats();
    assert_eq!(
        (stats.tasks, stats.connections, stats.handshakes, stats.fds),
        (0, 0, 0, 0)
    );
    assert_eq!((stats.names, stats.leases), (0, 0));
    drop(server);
    gone(driver);
}

/// Checks that no object of a simulated driver is alive.
fn gone(driver: &Driver) {
    let held = driver.sim().unwrap().held();
    assert!(held.is_empty(), "{held}");
}

/// Waits until the condition holds.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(LONG, wait).await;
    waited.unwrap_or_else(|_| panic!("not within {LONG:?}: {what}"));
}

fn hello() -> Hello {
    Hello {
        magic: MAGIC.into(),
        oldest: OLDEST,
        newest: VERSION,
        boot: BootId::current().unwrap(),
        resume: None,
        agent: "test".into(),
        moves: false,
        fabric: false,
    }
}

/// A client that sends the messages that a test gives it, valid or not.
struct Raw {
    connection: Connection,
    welcome: Option<Welcome>,
    notices: Vec<Event>,
    last: u64,
}

impl Raw {
    async fn connect(address: &Address, security: &Security) -> Self {
        let limits = Limits {
            handshake: LONG,
            ..Limits::default()
        };
        let connection = connect(address, security, &Peers::same_user(), &limits).await;
        Self {
            connection: connection.unwrap(),
            welcome: None,
            notices: Vec::new(),
            last: 0,
        }
    }

    async fn greet(&mut self, hello: &Hello) -> Greeting {
        self.write(&encode(hello)).await;
        let greeting = decode(&self.read().await.unwrap().0).unwrap();
        if let Greeting::Welcome(welcome) = &greeting {
            self.welcome = Some(welcome.clone());
        }
        greeting
    }

    /// Opens a session over plain TCP.
    async fn open(server: &Server) -> Self {
        Self::open_at(&server.addresses()[0], &Security::Plain, &hello()).await
    }

    async fn open_at(address: &Address, security: &Security, hello: &Hello) -> Self {
        let mut raw = Self::connect(address, security).await;
        let greeting = raw.greet(hello).await;
        assert!(matches!(greeting, Greeting::Welcome(_)), "{greeting:?}");
        raw
    }

    /// Opens a session where handshakes have little time: a busy machine may need several attempts.
    async fn open_in_time(server: &Server) -> Self {
        let begun = std::time::Instant::now();
        while begun.elapsed() < LONG {
            let mut raw = Self::connect(&server.addresses()[0], &Security::Plain).await;
            let sent = raw.connection.writer.write(&encode(&hello()), &[]).await;
            if sent.is_ok()
                && let Some((bytes, _)) = raw.read().await
                && let Ok(Greeting::Welcome(welcome)) = decode(&bytes)
            {
                raw.welcome = Some(welcome);
                return raw;
            }
        }
        panic!("no session within {LONG:?}")
    }

    fn welcome(&self) -> &Welcome {
        self.welcome.as_ref().unwrap()
    }

    /// Resumes the session on another connection.
    async fn resume(&self, server: &Server) -> Self {
        let hello = Hello {
            resume: Some(self.welcome().session.clone()),
            ..hello()
        };
        Self::open_at(&server.addresses()[0], &Security::Plain, &hello).await
    }

    /// Says which leases the client has; returns those that have ended.
    async fn held(&mut self, leases: Vec<u64>) -> Vec<u64> {
        let held = Held {
            leases,
            ..Held::default()
        };
        match self.ask(Ask::Held(held)).await.0 {
            Answer::Expired { leases } => leases,
            other => panic!("{other:?}"),
        }
    }

    /// Returns the Unix socket where the session moves.
    fn local(&self) -> Address {
        let local = self.welcome().local.as_deref().unwrap();
        Address::Unix(local.replace('@', "\0").into())
    }

    /// Returns the hello that moves the session.
    fn moves(&self) -> Hello {
        Hello {
            resume: Some(self.welcome().session.clone()),
            moves: true,
            ..hello()
        }
    }

    /// Moves the session to the server's Unix socket.
    async fn moved(mut self) -> Self {
        let moved = Self::open_at(&self.local(), &Security::Plain, &self.moves()).await;
        self.hung_up().await;
        moved
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.connection.writer.write(bytes, &[]).await.unwrap();
    }

    /// Returns the next frame; `None` at the end, orderly or not.
    async fn read(&mut self) -> Option<(zeroize::Zeroizing<Vec<u8>>, Vec<OwnedFd>)> {
        let frame = tokio::time::timeout(LONG, self.connection.reader.read(u32::MAX));
        let frame = frame.await.expect("the server says nothing");
        let frame = frame.ok().flatten()?;
        Some((frame.bytes, frame.fds))
    }

    async fn send(&mut self, ask: Ask) -> u64 {
        self.last += 1;
        let request = (self.last, ask);
        self.write(&encode(&request)).await;
        self.last
    }

    /// Returns the answer to a request; keeps notices before it.
    async fn answer(&mut self, id: u64) -> (Answer, Vec<OwnedFd>) {
        self.answer_if_any(id).await.expect("the server hung up")
    }

    /// The same; `None` if the server hangs up instead.
    async fn answer_if_any(&mut self, id: u64) -> Option<(Answer, Vec<OwnedFd>)> {
        loop {
            let (bytes, fds) = self.read().await?;
            match decode::<FromServer>(&bytes).unwrap() {
                FromServer::Reply(of, answer) => {
                    assert_eq!(of, id);
                    return Some((answer, fds));
                }
                FromServer::Event(event) => self.notices.push(event),
            }
        }
    }

    /// Returns whether the server answers a ping. It may have hung up before.
    async fn is_answered(&mut self) -> bool {
        self.last += 1;
        let ping = encode(&(self.last, Ask::Ping));
        self.connection.writer.write(&ping, &[]).await.is_ok()
            && self.answer_if_any(self.last).await.is_some()
    }

    async fn ask(&mut self, ask: Ask) -> (Answer, Vec<OwnedFd>) {
        let id = self.send(ask).await;
        self.answer(id).await
    }

    /// Returns the next notice.
    async fn notice(&mut self) -> Event {
        if !self.notices.is_empty() {
            return self.notices.remove(0);
        }
        let (bytes, _) = self.read().await.expect("the server hung up");
        match decode::<FromServer>(&bytes).unwrap() {
            FromServer::Event(event) => event,
            other => panic!("{other:?}"),
        }
    }

    /// Reads until the server hangs up.
    async fn hung_up(&mut self) {
        while self.read().await.is_some() {}
    }

    async fn fetch(&mut self, ask: Fetch) -> Result<(Granted, Vec<OwnedFd>), Refusal> {
        match self.ask(Ask::Fetch(ask)).await {
            (Answer::Granted(granted), fds) => Ok((granted, fds)),
            (Answer::Refused(refused), _) => Err(Refusal::from_word(&refused.reason)),
            (other, _) => panic!("{other:?}"),
        }
    }

    async fn release(&mut self, lease: u64) {
        let (answer, _) = self.ask(Ask::Release { lease }).await;
        assert_eq!(answer, Answer::Done);
    }

    async fn refusal(&mut self, ask: Ask) -> Refusal {
        match self.ask(ask).await.0 {
            Answer::Refused(refused) => Refusal::from_word(&refused.reason),
            other => panic!("{other:?}"),
        }
    }

    async fn names(&mut self, prefix: &str) -> Vec<String> {
        let list = List {
            prefix: prefix.into(),
            after: None,
        };
        match self.ask(Ask::List(list)).await.0 {
            Answer::Names(names) => names.entries.into_iter().map(|entry| entry.name).collect(),
            other => panic!("{other:?}"),
        }
    }
}

/// Returns TLS with this name, for a server named `server.test`.
fn tls(authority: &crate::certs::Authority, name: &str) -> Security {
    use crate::{Tls, TlsPem};
    let request = crate::certs::CertRequest::new(name);
    let issued = authority.issue(&request).unwrap();
    let pem = TlsPem {
        ca: authority.cert_pem().as_bytes(),
        cert: issued.cert_pem.as_bytes(),
        key: issued.key_pem.as_bytes(),
        crl: None,
    };
    let tls = Tls::from_pem(pem).unwrap();
    Security::Tls(tls.expect_peer("server.test").unwrap())
}

/// Asks for fabric handles, then fds.
fn fetch(name: &str) -> Fetch {
    Fetch {
        name: name.into(),
        accept: vec![HandleType::Fabric, HandleType::PosixFd],
        access: Some(Access::ReadWrite),
        probe: true,
        instance: None,
        owner: None,
    }
}

/// Asks for fds.
fn fetch_fds(name: &str) -> Fetch {
    Fetch {
        accept: vec![HandleType::PosixFd],
        ..fetch(name)
    }
}

/// A server with a Unix socket in a directory that the test removes.
fn at_unix() -> (tempfile::TempDir, Address) {
    let directory = tempfile::tempdir().unwrap();
    let path: PathBuf = directory.path().join("exchange.sock");
    (directory, Address::Unix(path))
}

/// Starts a server that also listens at a Unix socket, in a folder that has to be kept.
async fn start_at_unix(options: ServerOptions) -> (tempfile::TempDir, Address, Server) {
    let (directory, address) = at_unix();
    let server = options.listen(address.clone()).start().await.unwrap();
    (directory, address, server)
}
