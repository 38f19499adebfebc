//! Listens for a server and accepts connections.

use std::os::unix::net::UnixListener as BlockingListener;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::either::Either;

use super::{Connection, Security, bind, check, first, resolve, tune};
use crate::per_driver::lock;
use crate::share::Peers;
use crate::share::socket::{self, SocketFile};
use crate::{Address, Error, Limits, Result, ShareError, tls};

/// How many bytes of a refused peer are still read, and for how long.
const LINGER: (usize, Duration) = (64 << 10, Duration::from_millis(500));

/// An open port or socket, and what is asked of each connection.
#[derive(Debug)]
pub(crate) struct Listening {
    /// Removed before the socket is closed.
    _file: Option<SocketFile>,
    socket: Either<TcpListener, UnixListener>,
    pub(crate) address: Address,
    security: Security,
    peers: SharedPeers,
    limits: Limits,
}

/// The users that may connect, shared by all sockets of a server: they can change.
pub(crate) type SharedPeers = Arc<Mutex<Peers>>;

impl Listening {
    /// Listens. Replaces a Unix socket of a dead server; only this user can open the socket, unless `peers`
    /// has others.
    ///
    /// # Errors
    /// [`Error::Insecure`], [`Error::Tls`] if the certificate is not for servers,
    /// [`System`](crate::MemoryError::System), [`Unreachable`](crate::ShareError::Unreachable) if the name
    /// cannot be looked up.
    pub(crate) async fn bind(
        address: &Address,
        security: &Security,
        peers: &SharedPeers,
        limits: &Limits,
    ) -> Result<Self> {
        let (_file, socket, address) = match address {
            Address::Unix(path) => {
                let admitted = lock(peers).clone();
                let (file, listener) = bind_unix(path.clone(), admitted).await?;
                (Some(file), Either::Right(listener), address.clone())
            }
            Address::Tcp { host, port } => {
                if let Security::Tls(tls) = security {
                    tls.loaded().server.clone()?;
                }
                let listen = |real, _| async move {
                    let failed = |e| Error::system(format!("listening at {address}"), &e);
                    let (listener, real) = bind(real).map_err(failed)?;
                    check(address, real, security)?;
                    Ok((listener, real))
                };
                let listening = async {
                    let reals = resolve((host, *port), address).await?;
                    first(address, reals, security, listen).await
                };
                let late =
                    |_| ShareError::timed_out(format!("looking up {address}"), limits.handshake);
                let listening = timeout(limits.handshake, listening).await;
                let (listener, real) = listening.map_err(late)??;
                let (host, port) = (host.clone(), real.port());
                (None, Either::Left(listener), Address::Tcp { host, port })
            }
        };
        Ok(Self {
            _file,
            socket,
            address,
            security: security.clone(),
            peers: Arc::clone(peers),
            limits: limits.clone(),
        })
    }

    /// Listens at an abstract name, which every user of the machine can reach in the same network namespace: the
    /// credentials of each connection are checked.
    pub(crate) fn bind_abstract(name: &str, peers: &SharedPeers, limits: &Limits) -> Result<Self> {
        // tokio takes a path with a leading NUL for an abstract name.
        let listener = UnixListener::bind(format!("\0{name}"));
        let failed = |error| Error::system(format!("listening at @{name}"), &error);
        Ok(Self {
            _file: None,
            socket: Either::Right(listener.map_err(failed)?),
            address: Address::Unix(format!("@{name}").into()),
            security: Security::Plain,
            peers: Arc::clone(peers),
            limits: limits.clone(),
        })
    }

    /// Returns the address of the next connection, and its handshake, which authenticates the peer and needs a time limit; or `None` if there is no fd or memory for it: call again later.
    ///
    /// # Errors
    /// [`System`](crate::MemoryError::System) if the socket itself is unusable.
    ///
    /// # Cancel safety
    /// Cancel safe: no connection is lost.
    pub(crate) async fn accept(&self) -> Result<Option<Incoming>> {
        let address = &self.address;
        loop {
            let accepted = match &self.socket {
                Either::Left(listener) => (listener.accept().await)
                    .map(|(stream, from)| (Either::Left(stream), format!("tcp://{from}"))),
                Either::Right(listener) => (listener.accept().await)
                    .map(|(stream, _)| (Either::Right(stream), address.to_string())),
            };
            let error = match accepted {
                Ok((stream, remote)) => {
                    let (security, peers) = (self.security.clone(), Arc::clone(&self.peers));
                    let shown = remote.clone();
                    let greeting = handshake(stream, remote, security, peers, self.limits.clone());
                    return Ok(Some((shown, Box::pin(greeting))));
                }
                Err(error) => error,
            };
            tracing::debug!(target: "egmem_exchange", %address, %error, "no connection was accepted");
            match error.raw_os_error() {
                Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                    return Ok(None);
                }
                Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP) => {
                    return Err(Error::system(format!("accepting at {address}"), &error));
                }
                // Faults of that one connection, which is closed already. Source: accept(2).
                _ => tokio::task::yield_now().await,
            }
        }
    }
}

/// Retries for a moment: a dead server's socket, or another server that starts at the same path, may be in
/// the way.
async fn bind_unix(path: PathBuf, peers: Peers) -> Result<(SocketFile, UnixListener)> {
    let failed = |error| Error::system(format!("listening at {}", path.display()), &error);
    let bound = tokio::task::spawn_blocking({
        let path = path.clone();
        move || socket::listen(&path, &peers)
    });
    let (file, listener) = bound.await.map_err(|error| failed(error.into()))??;
    let listener = BlockingListener::from(listener);
    listener.set_nonblocking(true).map_err(failed)?;
    let listener = UnixListener::from_std(listener).map_err(failed)?;
    Ok((file, listener))
}

/// A new connection: its address, and its handshake. That is boxed, because it takes much room, and ends long before the task.
pub(crate) type Incoming = (
    String,
    Pin<Box<dyn Future<Output = Result<Connection>> + Send>>,
);

/// Authenticates the peer of a connection.
///
/// # Errors
/// [`NotTrusted`](crate::ShareError::NotTrusted), [`Protocol`](crate::ShareError::Protocol),
/// [`PeerLost`](crate::ShareError::PeerLost): the connection is closed.
async fn handshake(
    stream: Either<TcpStream, UnixStream>,
    remote: String,
    security: Security,
    peers: SharedPeers,
    limits: Limits,
) -> Result<Connection> {
    let (remote, limits) = (&*remote, &limits);
    let stream = match stream {
        Either::Left(stream) => stream,
        Either::Right(stream) => {
            let peers = lock(&peers).clone();
            return Connection::unix(stream, &peers, remote, limits);
        }
    };
    tune(&stream, limits);
    let Security::Tls(tls) = &security else {
        return Ok(Connection::tcp(stream, remote, limits));
    };
    let loaded = tls.loaded();
    let acceptor = TlsAcceptor::from(loaded.server.clone()?);
    let stream = match acceptor.accept(stream).into_fallible().await {
        Ok(stream) => stream,
        Err((error, stream)) => {
            linger(stream).await;
            return Err(tls::explain(remote, "TLS handshake", &error));
        }
    };
    Connection::tls(stream.into(), (tls::End::Client, &loaded), remote, limits)
}

/// Lets the alert with the reason arrive: closing a connection with unread bytes resets it, and a reset
/// overtakes the bytes before it.
async fn linger(mut stream: TcpStream) {
    let (most, time) = LINGER;
    let reading = async {
        let _ = stream.shutdown().await;
        let mut sink = [0; 4096];
        let mut read = 0;
        while let Ok(count @ 1..) = stream.read(&mut sink).await {
            read += count;
            if read > most {
                break;
            }
        }
    };
    let _ = timeout(time, reading).await;
}
