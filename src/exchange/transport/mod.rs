//! Connections: TCP, TLS over TCP, Unix sockets. All of them carry frames.

mod frame;
mod listen;
#[cfg(test)]
mod tests;

#[cfg(fuzzing)]
pub(crate) use frame::fuzzing::assemble;
pub(crate) use frame::{Frame, FrameReader, FrameWriter, send_fds, together};
pub(crate) use listen::{Incoming, Listening, SharedPeers};

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::{TlsConnector, TlsStream};

use super::tls::{self, Credential, End, Loaded, Tls};
use super::{Address, Limits, PeerName};
use crate::limits::deadline;
use crate::share::{Peers, fd};
use crate::{Error, Result, ShareError, Unreachable};
use frame::{Reading, UnixReading, Writing, halves};

/// How many connections may wait to be accepted; the kernel's `net.core.somaxconn` may be lower.
const BACKLOG: u32 = 4096;
/// Keep-alive: the idle time, the interval, and the number of probes.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(10), 3);

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
        let halves = halves(reading, writing);
        Self::new(halves, PeerName::Local, "test", limits)
    }

    /// Creates a connection over plain TCP.
    fn tcp(stream: TcpStream, remote: &str, limits: &Limits) -> Self {
        let (reading, writing) = stream.into_split();
        let halves = halves(reading, writing);
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
            ..Self::new(halves(reading, writing), peer, remote, limits)
        })
    }
}

/// Checks the address that a name was resolved to.
fn check(address: &Address, real: SocketAddr, security: &Security) -> Result<()> {
    if !matches!(security, Security::Plain) || real.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    let (mut address, ip) = (address.to_string(), real.ip().to_string());
    if !address.contains(&ip) {
        address += &format!(" ({ip})");
    }
    Err(Error::Insecure { address })
}

/// Checks an address that is an IP address, before any look-up.
///
/// # Errors
/// [`Error::Insecure`] as [`check`].
pub(crate) fn check_literal(address: &Address, security: &Security) -> Result<()> {
    if let Address::Tcp { host, port } = address
        && let Ok(ip) = host.parse::<IpAddr>()
    {
        check(address, SocketAddr::new(ip, *port), security)?;
    }
    Ok(())
}

/// Runs blocking work on a thread that nothing waits for once this is dropped.
async fn on_own_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, result) = oneshot::channel();
    let thread = std::thread::Builder::new().name("egmem-lookup".into());
    // An error means that the result is no longer awaited.
    thread.spawn(move || drop(sender.send(work())))?;
    result.await.map_err(io::Error::other)
}

/// Looks a name up. The system's look-up may take minutes and cannot be ended, so it has a thread of its own: the end of
/// the runtime waits for the runtime's threads.
async fn resolve((host, port): (&str, u16), address: &Address) -> Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![(ip, port).into()]);
    }
    let name = host.to_owned();
    let found = on_own_thread(move || (name.as_str(), port).to_socket_addrs()).await;
    let found = found.and_then(|found| found);
    let found = found.map_err(|error| unknown(address, format!("looking up its name: {error}")))?;
    Ok(found.collect())
}

/// Tries the addresses of a host that may be used, one after the other. Returns what the first one gives, or the most useful
/// error: that of a forbidden address comes before that of an address that did not answer, and last comes that of one where
/// [nobody listens](Error::nobody_listens).
///
/// `attempt` is told how many addresses are left, this one too.
async fn first<T, F: Future<Output = Result<T>>>(
    address: &Address,
    reals: Vec<SocketAddr>,
    security: &Security,
    mut attempt: impl FnMut(SocketAddr, u32) -> F,
) -> Result<T> {
    let mut last: Option<Error> = None;
    let mut left = reals.len() as u32 + 1;
    for real in reals {
        left -= 1;
        let tried = match check(address, real, security) {
            Ok(()) => attempt(real, left).await,
            Err(error) => Err(error),
        };
        let error = match tried {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        let is_worse = |last: &Error| {
            matches!(last, Error::Insecure { .. })
                || error.nobody_listens() && !last.nobody_listens()
        };
        if !last.as_ref().is_some_and(is_worse) {
            last = Some(error);
        }
    }
    Err(last.unwrap_or_else(|| unknown(address, "its name has no address".into())))
}

fn unknown(address: &Address, why: String) -> Error {
    let (peer, cause) = (address.to_string(), Unreachable::UnknownHost);
    ShareError::Unreachable { peer, cause, why }.into()
}

/// Connects to the first of a host's addresses that answers. Each of them but the last has its share of the time left: one to
/// which no packet gets through takes the system minutes.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an address that only servers listen at, without TLS.
async fn connect_tcp(
    address: &Address,
    (host, port): (&str, u16),
    security: &Security,
    until: Instant,
) -> Result<TcpStream> {
    let ip = host.parse::<IpAddr>().map(|ip| ip.to_canonical());
    if matches!(security, Security::Plain) && ip.is_ok_and(|ip| ip.is_unspecified()) {
        let invalid = Error::invalid_of(
            "address",
            format!("{address} stands for every address of a machine: a server listens there"),
            format!("the server's name or address, such as tcp://127.0.0.1:{port} on this machine"),
        );
        return Err(invalid);
    }
    let reals = resolve((host, port), address).await?;
    connect_any(address, reals, security, until).await
}

async fn connect_any(
    address: &Address,
    reals: Vec<SocketAddr>,
    security: &Security,
    until: Instant,
) -> Result<TcpStream> {
    let connect = |real, left| async move {
        let connecting = TcpStream::connect(real);
        let stream = match left {
            1 => connecting.await,
            _ => {
                let share = until.saturating_duration_since(Instant::now()) / left;
                let late = |_| Err(io::ErrorKind::TimedOut.into());
                timeout(share, connecting).await.unwrap_or_else(late)
            }
        };
        stream.map_err(|error| unreachable(&address.to_string(), &error, false))
    };
    first(address, reals, security, connect).await
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
    let until = deadline(limits.handshake);
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
        let stream = connect_tcp(address, host, security, until).await?;
        tune(&stream, limits);
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
    let connected = timeout_at(until, connecting).await;
    connected.unwrap_or_else(|_| Err(late()))
}

/// Listens at an address, with a backlog for many connections.
pub fn bind(real: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let socket = match real {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A server that was just restarted can listen at once, even while old connections are closing.
    socket.set_reuseaddr(true)?;
    socket.bind(real)?;
    let listener = socket.listen(BACKLOG)?;
    let real = listener.local_addr()?;
    Ok((listener, real))
}

/// Sends small frames at once, and detects a peer whose machine is gone. If the kernel refuses an option,
/// that costs speed or time, not correctness.
fn tune(stream: &TcpStream, limits: &Limits) {
    let (idle, every, times) = KEEPALIVE;
    let unacknowledged = limits.write.as_millis().try_into().unwrap_or(u32::MAX);
    let tuned = stream.set_nodelay(true).and_then(|()| {
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, idle)?;
        sockopt::set_tcp_keepintvl(stream, every)?;
        sockopt::set_tcp_keepcnt(stream, times)?;
        sockopt::set_tcp_user_timeout(stream, unacknowledged)?;
        Ok(())
    });
    if let Err(error) = tuned {
        tracing::debug!(target: "egmem_exchange", %error, "a socket option is refused");
    }
}
