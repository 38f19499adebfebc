//! Connections: TCP, TLS over TCP, Unix sockets. All of them carry frames.

mod frame;
mod listen;
mod net;
mod stream;
#[cfg(test)]
mod tests;

#[cfg(fuzzing)]
pub(crate) use frame::fuzzing::assemble;
pub(crate) use frame::{Frame, FrameReader, FrameWriter, together};
pub(crate) use listen::{Incoming, Listening, SharedPeers};
pub use net::bind;
pub(crate) use net::check_literal;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::{TlsConnector, TlsStream};

use super::tls::{self, Credential, End, Loaded, Tls};
use super::{Address, Limits, PeerName};
use crate::share::{Peers, fd};
use crate::{Error, Result, ShareError, Unreachable};
pub(crate) use stream::send_fds;
use stream::{Reading, UnixReading, Writing};

/// How connections over TCP are protected. Unix sockets need no protection: the kernel identifies the peer,
/// and no other process can read them.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Security {
    /// Mutual TLS 1.3.
    Tls(Tls),
    /// None, on the loopback interface only: every process of the machine can connect.
    #[default]
    Plain,
    /// None, at any address: a process that reaches the port has the rights of `local`, and one on the
    /// network path can read the handles. For networks with other protection.
    PlainAnywhere,
}

/// A connection with an authenticated peer.
#[derive(Debug)]
pub(crate) struct Connection {
    pub reader: FrameReader,
    pub writer: FrameWriter,
    pub peer: PeerName,
    /// For a Unix socket, over which fds can be passed, the user at the other end.
    pub user: Option<u32>,
    /// For a Unix socket, the process that made the other end, if this process can see it.
    pub pid: Option<u32>,
    /// The same as a pidfd, until the process has been looked up.
    pub process: Option<OwnedFd>,
    /// Over TLS, the certificates that the peer was verified with.
    pub credential: Option<Credential>,
    /// The peer's name and address, for errors.
    pub label: Arc<str>,
}

impl Connection {
    fn new(
        (reading, writing): (Reading, Writing),
        peer: PeerName,
        remote: &str,
        limits: &Limits,
    ) -> Self {
        let label: Arc<str> = match &peer {
            PeerName::Certificate(name) | PeerName::Spiffe(name) => {
                format!("{name} ({remote})").into()
            }
            _ => remote.into(),
        };
        Self {
            user: None,
            pid: None,
            process: None,
            credential: None,
            reader: FrameReader::new(reading, label.clone(), limits),
            writer: FrameWriter::new(writing, label.clone(), limits),
            peer,
            label,
        }
    }

    /// Creates a connection over a Unix socket, if the peer's user is admitted.
    fn unix(stream: UnixStream, peers: &Peers, remote: &str, limits: &Limits) -> Result<Self> {
        use std::os::fd::AsFd;
        let who = fd::credentials(stream.as_fd())
            .map_err(|error| Error::system("reading a peer's credentials", &error))?;
        peers.admit(&who)?;
        let remote = format!("{remote} ({who})");
        let process = fd::peer_process(stream.as_fd());
        let socket = stream.into_std().map(|socket| Arc::new(socket.into()));
        let halves = socket.and_then(|socket| {
            let reading = UnixReading::new(Arc::clone(&socket))?;
            Ok((Reading::Unix(reading), Writing::Unix(socket)))
        });
        let halves = halves.map_err(|error| Error::system("waiting for a socket", &error))?;
        Ok(Self {
            user: Some(who.uid),
            pid: who.pid,
            process,
            ..Self::new(halves, PeerName::User(who.uid), &remote, limits)
        })
    }

    /// Creates a connection over a stream of a test, as over plain TCP.
    #[cfg(test)]
    pub(crate) fn over(stream: tokio::io::DuplexStream, limits: &Limits) -> Self {
        let (reading, writing) = tokio::io::split(stream);
        let halves = stream::halves(reading, writing);
        Self::new(halves, PeerName::Local, "test", limits)
    }

    /// Creates a connection over plain TCP.
    fn tcp(stream: TcpStream, remote: &str, limits: &Limits) -> Self {
        let (reading, writing) = stream.into_split();
        let halves = stream::halves(reading, writing);
        Self::new(halves, PeerName::Local, remote, limits)
    }

    /// Creates a connection over TLS, if the peer at that end has proved its name.
    fn tls(
        stream: TlsStream<TcpStream>,
        (end, loaded): (End, &Loaded),
        remote: &str,
        limits: &Limits,
    ) -> Result<Self> {
        let (_, state) = stream.get_ref();
        let (peer, credential) = Credential::of(remote, state, end, loaded)?;
        let (reading, writing) = tokio::io::split(stream);
        Ok(Self {
            credential: Some(credential),
            ..Self::new(stream::halves(reading, writing), peer, remote, limits)
        })
    }
}

/// Converts the system's error of a connect call; for `path`, "not found" means that there is no socket.
fn unreachable(remote: &str, error: &io::Error, path: bool) -> Error {
    let cause = match error.kind() {
        io::ErrorKind::NotFound if !path => Unreachable::Network,
        kind => Unreachable::of(kind),
    };
    let (peer, why) = (remote.into(), error.to_string());
    ShareError::Unreachable { peer, cause, why }.into()
}

/// Connects, within `limits.handshake` in all. At a Unix socket the listening process's user must be one of
/// `peers`.
///
/// # Errors
/// [`Unreachable`](crate::ShareError::Unreachable) if no process listens,
/// [`TimedOut`](crate::ShareError::TimedOut), [`Error::Insecure`],
/// [`NotTrusted`](crate::ShareError::NotTrusted), [`Protocol`](crate::ShareError::Protocol), [`Error::Tls`].
pub(crate) async fn connect(
    address: &Address,
    security: &Security,
    peers: &Peers,
    limits: &Limits,
) -> Result<Connection> {
    let connecting = async {
        let remote = address.to_string();
        let host = match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)
                    .await
                    .map_err(|error| unreachable(&remote, &error, true))?;
                return Connection::unix(stream, peers, &remote, limits);
            }
            Address::Tcp { host, port } => (host.as_str(), *port),
        };
        let tls = match security {
            // Before any byte is sent.
            Security::Tls(tls) => {
                let loaded = tls.loaded();
                Some((tls.client(&loaded)?, tls.server_name(host.0)?, loaded))
            }
            Security::Plain | Security::PlainAnywhere => None,
        };
        let stream = net::connect(address, host, security).await?;
        net::tune(&stream, limits);
        let Some((config, name, loaded)) = tls else {
            return Ok(Connection::tcp(stream, &remote, limits));
        };
        let stream = TlsConnector::from(config)
        .connect(name, stream)
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                let why =
                    "it closed the connection in the TLS handshake, as a server without TLS does";
                Error::peer_lost(remote.as_str(), why)
            }
            _ => tls::explain(&remote, "TLS handshake", &error),
        })?;
        let end = (End::Server, &*loaded);
        Connection::tls(stream.into(), end, &remote, limits)
    };
    let late = || Error::timed_out(format!("connecting to {address}"), limits.handshake);
    let connected = timeout(limits.handshake, connecting).await;
    connected.unwrap_or_else(|_| Err(late()))
}
