//! A client that can say anything: bytes over TCP, under TLS or not.

use std::io::{self, Read};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egmem::driver::{Access, HandleType};
use egmem::exchange::protocol::{
    Answer, Ask, Fetch, FromServer, Greeting, Hello, MAGIC, Secret, VERSION, Welcome, decode,
    encode,
};
use egmem::share::BootId;
use egmem_tests::pki::Files;
use egmem_tests::{Connection, identity};
use rustls::{ClientConfig, ServerConfig, ServerConnection, StreamOwned};

use crate::exchange_failures::harness::patience;

/// A connection of which every byte is the test's own.
pub struct Raw(Connection);

/// `host:port` of a `tcp://` address.
pub fn socket(address: &str) -> &str {
    address.strip_prefix("tcp://").expect("a TCP address")
}

/// Listens with any certificate at all, for one client, and serves it nothing; its address.
pub fn impostor(files: &Files) -> String {
    let (chain, key) = identity(files);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("they match");
    config.alpn_protocols = vec![b"egmem/1".to_vec()];
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("tcp://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        let (tcp, _) = listener.accept().expect("a client");
        tcp.set_read_timeout(Some(patience())).expect("a timeout");
        let server = ServerConnection::new(Arc::new(config)).expect("a server");
        let mut stream = StreamOwned::new(server, tcp);
        // Until the client leaves.
        std::io::copy(&mut stream, &mut std::io::sink()).ok();
    });
    address
}

impl Raw {
    /// Over plain TCP.
    pub fn plain(address: &str) -> Self {
        Self(Connection::tcp(socket(address), patience()).expect("somebody listens"))
    }

    /// Over TLS; the handshake takes place with the first byte.
    pub fn tls(address: &str, config: Arc<ClientConfig>) -> Self {
        let connection = Connection::tls(socket(address), "localhost", config, patience());
        Self(connection.expect("somebody listens"))
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.send(bytes)
    }

    /// Sends bytes as a frame.
    pub fn frame(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.frame(bytes)
    }

    /// The next frame's bytes.
    pub fn read_frame(&mut self) -> io::Result<Vec<u8>> {
        self.0.read_frame()
    }

    /// Sends a hello and reads the greeting.
    pub fn greet(&mut self, resume: Option<Secret>) -> io::Result<Greeting> {
        self.frame(&hello(resume))?;
        let bytes = self.read_frame()?;
        decode(&bytes).map_err(io::Error::other)
    }

    /// A session, from the beginning.
    #[track_caller]
    pub fn welcome(&mut self, resume: Option<Secret>) -> Welcome {
        match self.greet(resume).expect("a greeting") {
            Greeting::Welcome(welcome) => welcome,
            other => panic!("{other:?}"),
        }
    }

    /// A request, and the answer to it; news in between is skipped.
    pub fn ask(&mut self, id: u64, ask: Ask) -> io::Result<Answer> {
        self.frame(&encode(&(id, ask)))?;
        self.reply(id)
    }

    /// The answer to a request that was sent before.
    pub fn reply(&mut self, id: u64) -> io::Result<Answer> {
        loop {
            match decode(&self.read_frame()?).map_err(io::Error::other)? {
                FromServer::Reply(of, answer) if of == id => return Ok(answer),
                _ => {}
            }
        }
    }

    /// Returns whether the other end closes the connection; the bytes that it sends before that are thrown away.
    pub fn closes(mut self) -> bool {
        let end = Instant::now() + patience();
        self.tcp()
            .set_read_timeout(Some(Duration::from_millis(500)))
            .expect("a timeout");
        let mut bytes = [0; 4096];
        while Instant::now() < end {
            match self.0.read(&mut bytes) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) if waits(&error) => {}
                Err(_) => return true,
            }
        }
        false
    }

    fn tcp(&self) -> &TcpStream {
        self.0.socket().expect("a TCP socket")
    }

    /// Says that nothing more will come.
    pub fn half_close(&self) {
        self.tcp().shutdown(Shutdown::Write).ok();
    }

    /// Sends a byte at a time until the other end closes the connection; returns whether it did.
    pub fn drips(&mut self, bytes: &[u8], pause: Duration) -> bool {
        let end = Instant::now() + patience();
        for byte in bytes.iter().cycle() {
            if self.send(std::slice::from_ref(byte)).is_err() {
                return true;
            }
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(pause);
        }
        false
    }
}

fn waits(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// A good hello's bytes, without the frame's length.
pub fn hello(resume: Option<Secret>) -> Vec<u8> {
    encode(&Hello {
        magic: MAGIC.into(),
        oldest: VERSION,
        newest: VERSION,
        boot: BootId::from_bytes([7; 16]),
        resume,
        agent: "a test".into(),
        moves: false,
        fabric: false,
    })
    .to_vec()
}

/// A request for a name by fabric handle.
pub fn fetch(name: &str) -> Ask {
    Ask::Fetch(Fetch {
        name: name.into(),
        accept: vec![HandleType::Fabric],
        access: Some(Access::ReadWrite),
        probe: false,
        instance: None,
        owner: None,
    })
}

/// The least request.
pub fn ping() -> Ask {
    Ask::Ping
}
