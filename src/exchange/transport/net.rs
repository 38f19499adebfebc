//! TCP sockets: looking up, checking and tuning.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::{Security, unreachable};
use crate::{Address, Error, Limits, Result, ShareError, Unreachable};

/// How many connections may wait to be accepted; the kernel's `net.core.somaxconn` may be lower.
const BACKLOG: u32 = 4096;
/// Keep-alive: the idle time, the interval, and the number of probes.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(10), 3);

/// Checks a socket's real address, not the name that was resolved.
pub(super) fn check(address: &Address, real: SocketAddr, security: &Security) -> Result<()> {
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
    let unknown = |why: String| {
        Error::Share(ShareError::Unreachable {
            peer: address.to_string(),
            cause: Unreachable::UnknownHost,
            why,
        })
    };
    let name = host.to_owned();
    let found = on_own_thread(move || (name.as_str(), port).to_socket_addrs()).await;
    let found: Vec<_> = found
        .and_then(|found| found)
        .map_err(|error| unknown(format!("looking up its name: {error}")))?
        .collect();
    if found.is_empty() {
        return Err(unknown("its name has no address".into()));
    }
    Ok(found)
}

/// Connects to the first of a host's addresses that answers. Reports that [nobody listens](Error::nobody_listens) only if
/// that holds for all of them.
///
/// # Errors
/// [`InvalidArgument`](crate::MemoryError::InvalidArgument) for an address that only servers listen at, without TLS.
pub(super) async fn connect(
    address: &Address,
    (host, port): (&str, u16),
    security: &Security,
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
    let mut last = None;
    for real in resolve((host, port), address).await? {
        let tried = match check(address, real, security) {
            Ok(()) => TcpStream::connect(real)
                .await
                .map_err(|error| unreachable(&address.to_string(), &error, false)),
            Err(error) => Err(error),
        };
        match tried {
            Ok(stream) => {
                let real = stream.peer_addr();
                let real = real.map_err(|error| Error::system("getpeername", &error))?;
                check(address, real, security)?;
                return Ok(stream);
            }
            Err(error) => keep(&mut last, error),
        }
    }
    Err(last.unwrap_or_else(no_address))
}

/// Keeps the most useful error. The error of a forbidden address comes before that of an address
/// that did not answer. Least useful is the error of an address where nobody listens.
fn keep(last: &mut Option<Error>, error: Error) {
    let is_worse = |last: &Error| {
        matches!(last, Error::Insecure { .. }) || error.nobody_listens() && !last.nobody_listens()
    };
    if !last.as_ref().is_some_and(is_worse) {
        *last = Some(error);
    }
}

fn no_address() -> Error {
    Error::invalid("address", "its name has no address")
}

/// Listens at the first usable address of a host.
pub(super) async fn listen(
    address: &Address,
    host: (&str, u16),
    security: &Security,
    limits: &Limits,
) -> Result<(TcpListener, SocketAddr)> {
    let found = timeout(limits.handshake, resolve(host, address));
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
            Err(error) => keep(&mut last, error),
        }
    }
    Err(last.unwrap_or_else(no_address))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn the_end_of_a_runtime_does_not_wait_for_a_look_up() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let (answer, waits) = std::sync::mpsc::channel::<()>();
        let mut look_up = Box::pin(on_own_thread(move || waits.recv()));
        {
            let _inside = runtime.enter();
            let mut context = Context::from_waker(Waker::noop());
            assert!(matches!(look_up.as_mut().poll(&mut context), Poll::Pending));
        }
        drop(look_up);
        // With a thread of the runtime this would never return.
        drop(runtime);
        drop(answer);
    }
}
