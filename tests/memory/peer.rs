//! Peers that send arbitrary bytes, over each transport.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egmem::exchange::protocol::{
    Answer, Ask, FromServer, Greeting, Hello, MAGIC, Secret, VERSION, Welcome, decode, encode,
};
use egmem::share::BootId;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;

/// Longer than anything here takes, even emulated.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// How a peer reaches its server.
#[derive(Clone)]
pub enum Via {
    Tcp(u16),
    Tls(u16, Arc<ClientConfig>),
    Unix(PathBuf),
}

/// A message with its length before it.
pub fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap();
    [&length.to_be_bytes(), bytes].concat()
}

pub fn hello(resume: Option<Secret>) -> Vec<u8> {
    framed(&encode(&Hello {
        magic: MAGIC.into(),
        oldest: VERSION,
        newest: VERSION,
        boot: BootId::current().unwrap(),
        resume,
        agent: String::new(),
        moves: false,
        fabric: false,
    }))
}

pub fn request(id: u64, ask: Ask) -> Vec<u8> {
    framed(&encode(&(id, ask)))
}

/// Requests one after the other, at least `bytes` of them, and how many they are.
pub fn requests(bytes: usize, ask: impl Fn(u64) -> Ask) -> (Vec<u8>, u64) {
    let mut all = Vec::new();
    for id in 1.. {
        all.extend(request(id, ask(id)));
        if all.len() >= bytes {
            return (all, id);
        }
    }
    unreachable!("there is no last number")
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A connection whose every byte is the test's own.
pub struct Peer {
    reader: Option<ReadHalf<Box<dyn Stream>>>,
    writer: WriteHalf<Box<dyn Stream>>,
    /// Reads bytes from the server and throws them away.
    drain: Option<JoinHandle<()>>,
    /// Bytes that went to the server.
    pub sent: usize,
    last: u64,
}

impl Peer {
    pub async fn dial(via: &Via) -> Self {
        let tcp = async |port: u16| {
            let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            stream.set_nodelay(true).unwrap();
            stream
        };
        let stream: Box<dyn Stream> = match via {
            Via::Tcp(port) => Box::new(tcp(*port).await),
            Via::Unix(path) => Box::new(UnixStream::connect(path).await.unwrap()),
            Via::Tls(port, config) => {
                let connector = tokio_rustls::TlsConnector::from(Arc::clone(config));
                let name = ServerName::try_from("127.0.0.1").unwrap();
                let stream = connector.connect(name, tcp(*port).await).await;
                Box::new(stream.unwrap())
            }
        };
        let (reader, writer) = split(stream);
        Self {
            reader: Some(reader),
            writer,
            drain: None,
            sent: 0,
            last: 0,
        }
    }

    /// A session, and its terms.
    pub async fn greet(via: &Via, hello: &[u8]) -> (Self, Welcome) {
        let mut peer = Self::dial(via).await;
        peer.send(hello).await;
        let greeting = peer.read().await;
        match decode(&greeting).unwrap() {
            Greeting::Welcome(welcome) => (peer, welcome),
            other => panic!("{other:?}"),
        }
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.writer.write_all(bytes).await.unwrap();
        self.writer.flush().await.unwrap();
        self.sent += bytes.len();
    }

    /// The next frame.
    pub async fn read(&mut self) -> Vec<u8> {
        let reader = self.reader.as_mut().unwrap();
        let read = async {
            let len = reader.read_u32().await?;
            let mut bytes = vec![0; len as usize];
            reader.read_exact(&mut bytes).await?;
            Ok::<_, std::io::Error>(bytes)
        };
        tokio::time::timeout(PATIENCE, read).await.unwrap().unwrap()
    }

    /// Asks and returns the answer; events in between are skipped.
    pub async fn ask(&mut self, ask: Ask) -> Answer {
        self.last += 1;
        let id = self.last;
        self.send(&request(id, ask)).await;
        loop {
            let answer = self.read().await;
            match decode(&answer).unwrap() {
                FromServer::Reply(of, answer) if of == id => return answer,
                other @ FromServer::Reply(..) => panic!("{other:?}"),
                FromServer::Event(_) => {}
            }
        }
    }

    /// Sends the bytes, or as many as the server reads before it closes the connection. The answers
    /// are thrown away, then and from now on.
    pub async fn flood(&mut self, bytes: &[u8]) {
        let mut reader = self.reader.take().unwrap();
        self.drain = Some(tokio::spawn(async move {
            let mut sink = [0; 16 << 10];
            while let Ok(1..) = reader.read(&mut sink).await {}
        }));
        let mut rest = bytes;
        let send = async {
            while !rest.is_empty() {
                match self.writer.write(rest).await {
                    Ok(count) => {
                        rest = &rest[count..];
                        self.sent += count;
                    }
                    Err(_) => return,
                }
            }
            let _ = self.writer.flush().await;
        };
        let sent = tokio::time::timeout(PATIENCE, send).await;
        sent.expect("the server does not read");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(drain) = &self.drain {
            drain.abort();
        }
    }
}

/// Waits until it is so.
#[track_caller]
pub fn until(what: impl std::fmt::Display, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A server's socket in its folder.
pub fn socket(folder: &Path, name: &str) -> Via {
    Via::Unix(folder.join(name))
}
