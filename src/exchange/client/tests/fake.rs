//! A scripted server for tests: sends the messages that the test gives it, valid or not.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::time::timeout;

use crate::client::{Client, ClientOptions, Reconnect};
use crate::driver::{Access, HandleType, ShareableHandle};
use crate::protocol::*;
use crate::share::{BootId, InstanceId, Shared};
use crate::{Address, Driver, Limits, Machine, Owner, Result};

/// The longest wait of any test.
pub(crate) const LONG: Duration = Duration::from_secs(300);

pub(crate) fn soon(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) struct Fake {
    listener: TcpListener,
    pub(crate) welcome: Welcome,
    /// The leases that have ended, for a client that resumes its session.
    pub(crate) ended: Vec<u64>,
}

/// One accepted connection, and the leases of a client that has resumed its session.
pub(crate) struct Peer(pub(crate) Box<dyn Stream>, pub(crate) Vec<u64>);

/// Bytes both ways.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

impl Fake {
    /// Heartbeats and leases so long that they do not matter, until a test sets others.
    pub(crate) async fn new() -> Self {
        Self::at("127.0.0.1:0".parse().unwrap()).await
    }

    /// Listens where another server was before.
    pub(crate) async fn at(address: SocketAddr) -> Self {
        Self {
            listener: TcpListener::bind(address).await.unwrap(),
            ended: Vec::new(),
            welcome: Welcome {
                version: VERSION,
                instance: InstanceId::random().unwrap(),
                // Another machine, so that handles are fabric handles.
                boot: BootId::from_bytes([7; 16]),
                session: Secret::new(&[1; 32]).unwrap(),
                resumed: false,
                peer: "local".into(),
                heartbeat_ms: 200_000,
                lease_ms: 600_000,
                frame_bytes: 1 << 20,
                local: None,
            },
        }
    }

    pub(crate) fn times(mut self, heartbeat_ms: u64, lease_ms: u64) -> Self {
        self.welcome.heartbeat_ms = heartbeat_ms;
        self.welcome.lease_ms = lease_ms;
        self
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    pub(crate) fn options(&self) -> ClientOptions {
        let address = self.address();
        let limits = Limits {
            frame_bytes: 1 << 20,
            // A client that gives up an attempt leaves its connection to be accepted.
            handshake: LONG,
            ..Limits::default()
        };
        let address = Address::Tcp {
            host: address.ip().to_string(),
            port: address.port(),
        };
        Client::options(address)
            .timeout(LONG)
            .limits(limits)
            .reconnect(Reconnect::backoff(soon(5), soon(20)))
    }

    /// Accepts a connection, before any message.
    pub(crate) async fn accept(&self) -> Peer {
        let (stream, _) = timeout(LONG, self.listener.accept())
            .await
            .unwrap()
            .unwrap();
        Peer(Box::new(stream), Vec::new())
    }

    /// Accepts and greets a connection.
    pub(crate) async fn greet(&self) -> (Peer, Hello) {
        self.greet_with(&[]).await
    }

    /// The same, with events before the answer to [`Ask::Held`].
    pub(crate) async fn greet_with(&self, events: &[Event]) -> (Peer, Hello) {
        let mut peer = self.accept().await;
        let hello = peer.hello(&self.welcome).await;
        if self.welcome.resumed {
            peer.held(events, &self.ended).await;
        }
        (peer, hello)
    }

    /// Returns a client and its connection.
    pub(crate) async fn client(&self, driver: &Driver) -> (Client, Peer) {
        self.client_of(self.options(), driver).await
    }

    pub(crate) async fn client_of(
        &self,
        options: ClientOptions,
        driver: &Driver,
    ) -> (Client, Peer) {
        let (client, (peer, hello)) = tokio::join!(options.connect(driver), self.greet());
        assert!(hello.resume.is_none());
        (client.unwrap(), peer)
    }
}

impl Peer {
    /// Accepts a session that moves to a Unix socket.
    pub(crate) async fn at(socket: &UnixListener) -> Self {
        let (stream, _) = timeout(LONG, socket.accept()).await.unwrap().unwrap();
        Self(Box::new(stream), Vec::new())
    }

    /// Reads a hello, and answers it.
    pub(crate) async fn hello(&mut self, welcome: &Welcome) -> Hello {
        let hello = decode(&self.frame().await.unwrap()).unwrap();
        self.send(&Greeting::Welcome(welcome.clone())).await;
        hello
    }

    /// Reads which leases the client has, sends `events`, and answers that those of `ended` have ended.
    pub(crate) async fn held(&mut self, events: &[Event], ended: &[u64]) {
        let (id, ask) = decode(&self.frame().await.unwrap()).unwrap();
        let Ask::Held(held) = ask else {
            panic!("{ask:?}");
        };
        self.1 = held.leases;
        for event in events {
            self.notice(event.clone()).await;
        }
        let leases = ended.to_vec();
        self.answer(id, Answer::Expired { leases }).await;
    }

    /// Returns the next frame; `None` at the connection's end.
    pub(crate) async fn frame(&mut self) -> Option<Vec<u8>> {
        let read = async {
            let len = self.0.read_u32().await.ok()?;
            let mut bytes = vec![0; len as usize];
            self.0.read_exact(&mut bytes).await.ok()?;
            Some(bytes)
        };
        timeout(LONG, read).await.expect("a frame, or the end")
    }

    /// Returns the next request; answers pings on the way.
    pub(crate) async fn request(&mut self) -> Option<(u64, Ask)> {
        loop {
            let (id, ask): Request = decode(&self.frame().await?).unwrap();
            match ask {
                Ask::Ping => {
                    // The client may have closed meanwhile; the next read reports that.
                    let bytes = encode(&FromServer::Reply(id, Answer::Done));
                    let _ = self.0.write_u32(bytes.len() as u32).await;
                    let _ = self.0.write_all(&bytes).await;
                }
                ask => return Some((id, ask)),
            }
        }
    }

    pub(crate) async fn send<T: serde::Serialize>(&mut self, message: &T) {
        self.raw(&encode(message)).await;
    }

    pub(crate) async fn raw(&mut self, bytes: &[u8]) {
        self.0.write_u32(bytes.len() as u32).await.unwrap();
        self.0.write_all(bytes).await.unwrap();
    }

    pub(crate) async fn answer(&mut self, id: u64, answer: Answer) {
        self.send(&FromServer::Reply(id, answer)).await;
    }

    pub(crate) async fn done(&mut self, id: u64) {
        self.answer(id, Answer::Done).await;
    }

    pub(crate) async fn refuse(&mut self, id: u64, reason: &str) {
        let refused = Refused {
            reason: reason.into(),
            detail: String::new(),
        };
        self.answer(id, Answer::Refused(refused)).await;
    }

    pub(crate) async fn notice(&mut self, event: Event) {
        self.send(&FromServer::Event(event)).await;
    }

    /// Ends the connection once the other end has read everything. If this end closed with unread bytes, the
    /// last ones it wrote might be lost.
    pub(crate) async fn end(mut self) {
        // The other end may close first.
        let _ = self.0.shutdown().await;
        while self.frame().await.is_some() {}
    }

    /// Answers the next request, which must be a fetch.
    pub(crate) async fn grant(&mut self, lease: u64, memory: &Memory) -> Fetch {
        let (id, ask) = self.request().await.unwrap();
        let Ask::Fetch(fetch) = ask else {
            panic!("{ask:?}")
        };
        self.answer(id, Answer::Granted(memory.granted(lease)))
            .await;
        fetch
    }

    /// Answers the next request, which must be a release.
    pub(crate) async fn released(&mut self) -> u64 {
        let (id, ask) = self.request().await.unwrap();
        let Ask::Release { lease } = ask else {
            panic!("{ask:?}")
        };
        self.done(id).await;
        lease
    }
}

/// Memory that the fake server exports by fabric handle.
pub(crate) struct Memory {
    pub(crate) shared: Shared,
    pub(crate) probe: Option<u64>,
}

impl Memory {
    pub(crate) fn new() -> Self {
        let driver = Driver::simulated(Machine::gh200()).unwrap();
        let buffer = crate::Buffer::on(crate::driver::NodeId(0))
            .bytes(1 << 20)
            .handle_types(crate::driver::HandleTypes::FABRIC)
            .allocate(&driver)
            .unwrap();
        Self {
            shared: buffer.into(),
            probe: None,
        }
    }

    pub(crate) fn granted(&self, lease: u64) -> Granted {
        let secret = |handle: &ShareableHandle| match handle {
            ShareableHandle::Fabric(handle) => Secret::new(handle.expose_bytes()).unwrap(),
            ShareableHandle::PosixFd(_) => unreachable!(),
        };
        let handles = self.shared.export(HandleType::Fabric).unwrap();
        Granted {
            lease,
            memory: self.shared.describe(Access::ReadWrite).unwrap(),
            handles: Handles::Fabric(handles.iter().map(secret).collect()),
            probe: self.probe,
            no_fabric: None,
            owner: Owner::Server,
        }
    }

    pub(crate) fn entry(&self, name: &str) -> Entry {
        Entry {
            name: name.into(),
            memory: self.shared.describe(Access::ReadWrite).unwrap(),
            leases: 0,
            owner: Owner::Server,
        }
    }
}

/// Returns the importer's driver.
pub(crate) fn importer() -> Driver {
    Driver::simulated(Machine::gh200()).unwrap()
}

/// Waits until a driver holds nothing.
pub(crate) async fn nothing_held(driver: &Driver) {
    let empty = async {
        while !driver.sim().unwrap().held().is_empty() {
            tokio::time::sleep(soon(2)).await;
        }
    };
    let held = timeout(LONG, empty).await;
    assert!(held.is_ok(), "held: {}", driver.sim().unwrap().held());
}

pub(crate) fn names(entries: Vec<Entry>, more: bool) -> Answer {
    Answer::Names(Names { entries, more })
}

/// Waits at most [`LONG`].
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    timeout(LONG, work).await.expect("no hang")
}

pub(crate) fn expect_err<T: std::fmt::Debug>(result: Result<T>) -> crate::Error {
    result.expect_err("an error")
}
