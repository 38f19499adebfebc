//! A connection whose every byte is the test's own.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};

/// The most bytes of a frame that is read.
const LARGEST: usize = 16 << 20;

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A connection over TCP, TLS or a Unix socket, which sends anything.
pub struct Connection {
    stream: Box<dyn Stream>,
    tcp: Option<TcpStream>,
}

impl Connection {
    /// Connects to `host:port`. Reads and writes fail after `patience`.
    ///
    /// # Errors
    /// Those of the system.
    pub fn tcp(address: &str, patience: Duration) -> io::Result<Self> {
        let tcp = dial(address, patience)?;
        Ok(Self {
            stream: Box::new(tcp.try_clone()?),
            tcp: Some(tcp),
        })
    }

    /// Connects to `host:port` over TLS, to a server of that name. The handshake takes place with the first byte.
    ///
    /// # Errors
    /// Those of the system; a text that is no server's name.
    pub fn tls(
        address: &str,
        name: &str,
        config: Arc<ClientConfig>,
        patience: Duration,
    ) -> io::Result<Self> {
        let tcp = dial(address, patience)?;
        let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let client = ClientConnection::new(config, name).map_err(io::Error::other)?;
        Ok(Self {
            stream: Box::new(StreamOwned::new(client, tcp.try_clone()?)),
            tcp: Some(tcp),
        })
    }

    /// Connects to a Unix socket, where file descriptors that come are closed.
    ///
    /// # Errors
    /// Those of the system.
    pub fn unix(path: &Path, patience: Duration) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Self {
            stream: Box::new(stream),
            tcp: None,
        })
    }

    /// Returns the TCP socket, unless it is a Unix socket.
    pub fn socket(&self) -> Option<&TcpStream> {
        self.tcp.as_ref()
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    /// Sends bytes as a frame.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn frame(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.send(&framed(bytes))
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// Those of the connection; a frame of more than 16 MiB.
    pub fn read_frame(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length) as usize;
        if length > LARGEST {
            return Err(io::Error::other("a frame that is too large"));
        }
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

impl Read for Connection {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.read(bytes)
    }
}

fn dial(address: &str, patience: Duration) -> io::Result<TcpStream> {
    let tcp = TcpStream::connect(address)?;
    tcp.set_read_timeout(Some(patience))?;
    tcp.set_write_timeout(Some(patience))?;
    tcp.set_nodelay(true)?;
    Ok(tcp)
}

/// Returns bytes with their length before them.
///
/// # Panics
/// For 4 GiB and more.
pub fn framed(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).expect("a short frame");
    [&length.to_be_bytes(), bytes].concat()
}
