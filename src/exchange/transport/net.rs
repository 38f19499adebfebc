//! TCP sockets: looking up, checking and tuning.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::time::timeout;

use super::{Security, Unconnected};
use crate::{Address, Limits};
use crate::{Error, Result, ShareError, Unreachable};

/// How many connections may wait to be accepted; the kernel's `net.core.somaxconn` may be lower.
const BACKLOG: u32 = 4096;
/// Keep-alive: the idle time, the interval, and the number of probes.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(10), 3);

/// Checks a socket's real address, not the name that was resolved.
pub(super) fn check(address: &Address, real: SocketAddr, security: &Security) -> Result<()> {
    match security {
        Security::Plain if !real.ip().to_canonical().is_loopback() => Err(Error::Insecure {
            address: if address.to_string().contains(&real.ip().to_string()) {
                address.to_string()
            } else {
                format!("{address} ({})", real.ip())
            },
        }),
        _ => Ok(()),
    }
}

/// Checks an address that is an IP address, before any look-up.
///
/// # Errors
/// [`Error::Insecure`] as [`check`].
pub(crate) fn check_literal(address: &Address, security: &Security) -> Result<()> {
    match address {
        Address::Tcp { host, port } => match host.parse::<IpAddr>() {
            Ok(ip) => check(address, SocketAddr::new(ip, *port), security),
            Err(_) => Ok(()),
        },
        Address::Unix(_) => Ok(()),
    }
}

async fn resolve(host: &str, port: u16, address: &Address) -> Result<Vec<SocketAddr>> {
    let unknown = |why: String| {
        Error::Share(ShareError::Unreachable {
            peer: address.to_string(),
            cause: Unreachable::UnknownHost,
            why,
        })
    };
    let found: Vec<_> = lookup_host((host, port))
        .await
        .map_err(|error| unknown(format!("looking up its name: {error}")))?
        .collect();
    if found.is_empty() {
        return Err(unknown("its name has no address".into()));
    }
    Ok(found)
}

/// Connects to the first of a host's addresses that answers. Reports that no process listens only if that
/// holds for all of them.
pub(super) async fn connect(
    address: &Address,
    host: &str,
    port: u16,
    security: &Security,
) -> Result<TcpStream, Unconnected> {
    let (mut last, mut nobody) = (None, true);
    for real in resolve(host, port, address).await? {
        let tried = match check(address, real, security) {
            Ok(()) => TcpStream::connect(real)
                .await
                .map_err(|error| Unconnected::by_system(&address.to_string(), &error, false)),
            Err(error) => Err(error.into()),
        };
        match tried {
            Ok(stream) => {
                let real = stream.peer_addr();
                let real = real.map_err(|error| Error::system("getpeername", &error))?;
                check(address, real, security)?;
                return Ok(stream);
            }
            Err(why) => {
                nobody &= why.nobody;
                // A forbidden address is a better error than another one that did not answer.
                if !matches!(last, Some(Error::Insecure { .. })) {
                    last = Some(why.error);
                }
            }
        }
    }
    match last {
        Some(error) => Err(Unconnected { error, nobody }),
        None => Err(Error::invalid("address", "its name has no address").into()),
    }
}

/// Listens at the first usable address of a host.
pub(super) async fn listen(
    address: &Address,
    host: &str,
    port: u16,
    security: &Security,
    limits: &Limits,
) -> Result<(TcpListener, SocketAddr)> {
    let found = timeout(limits.handshake, resolve(host, port, address));
    let found = found
        .await
        .map_err(|_| ShareError::timed_out(format!("looking up {address}"), limits.handshake))??;
    let mut last = None;
    for real in found {
        // Before the socket is open.
        let tried = check(address, real, security).and_then(|()| {
            bind(real).map_err(|error| Error::system(format!("listening at {address}"), &error))
        });
        match tried {
            Ok((listener, real)) => {
                check(address, real, security)?;
                return Ok((listener, real));
            }
            Err(error) if !matches!(last, Some(Error::Insecure { .. })) => last = Some(error),
            Err(_) => {}
        }
    }
    Err(last.unwrap_or_else(|| Error::invalid("address", "its name has no address")))
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
pub(super) fn tune(stream: &TcpStream, limits: &Limits) {
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
